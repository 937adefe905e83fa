//! The bundled fine-grained models have learnt all four kinds of text and use all of their experts, and the draft
//! predicts the text of `fine.gguf`.

use std::collections::BTreeSet;

use hobbit::options::DeviceChoice;
use hobbit::{BatchToken, DeviceOptions, Model, ModelOptions, Session, SessionOptions, Token};
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::trace::{Record, TraceReader};

use crate::fixture::{bundled, quiet_llama_cpp};

const KINDS: [&str; 4] = ["prose", "code", "docs", "dialogue"];
const N_EXPERTS: u16 = 32;
/// Tokens evaluated at once, as for the README's figures: the start token and as many of the text.
const WINDOW: usize = 512;
const N_WINDOWS: usize = 4;

/// Negative log-likelihood in nats.
fn surprise(logits: &[f32], token: Token) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    sum.ln() - f64::from(logits[token as usize] - max)
}

/// Figures of the whole texts by kind: the row that begins with `row` in a part of models/README.md.
fn readme(part: &str, row: &str) -> [f64; KINDS.len()] {
    let readme = std::fs::read_to_string(bundled("README.md")).unwrap();
    let (_, readme) = readme.split_once(&format!("\n# {part}\n")).expect("a part on this model");
    let cells = readme.lines().find_map(|line| line.strip_prefix(row)).expect("a row of figures").trim_end_matches('|');
    let figures: Vec<f64> = cells.split('|').map(|cell| cell.trim().parse().expect("a figure")).collect();
    figures.try_into().expect("a figure for each kind of text")
}

fn text(kind: &str) -> String {
    std::fs::read_to_string(bundled(&format!("fine-heldout-{kind}.txt"))).unwrap()
}

fn session(model: &Model) -> Session {
    let n = WINDOW as u32;
    let settings = SessionOptions { n_ctx: n, n_batch: n, n_ubatch: n, threads: Some(1), ..SessionOptions::default() };
    model.session(&settings).unwrap()
}

/// Evaluates the start token and a piece of a text.
fn evaluate(model: &Model, session: &mut Session, piece: &[Token]) {
    session.reset();
    let start = model.tokenize("", true, false).unwrap()[0];
    let window = std::iter::once(start).chain(piece.iter().copied()).zip(0..);
    let batch: Vec<BatchToken> =
        window.map(|(token, position)| BatchToken { token, position, sequence: 0, logits: true }).collect();
    session.evaluate(&batch).unwrap();
}

#[test]
fn fine_predicts_all_kinds_of_text_and_uses_all_experts() {
    predicts_all_kinds_of_text_and_uses_all_experts("fine.gguf", "The fine-grained model", 4);
}

#[test]
fn deep_predicts_all_kinds_of_text_and_uses_all_experts() {
    predicts_all_kinds_of_text_and_uses_all_experts("deep.gguf", "The deep model", 14);
}

fn predicts_all_kinds_of_text_and_uses_all_experts(name: &str, part: &str, n_layers: u16) {
    quiet_llama_cpp();
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("routes.trace");
    let options = ModelOptions {
        budget: Budget::Bytes(4 << 30),
        expert_cache: ExpertCache::Percent(50.0),
        trace: Some(trace.clone()),
        device: DeviceOptions { devices: DeviceChoice::None, ..DeviceOptions::default() },
        ..ModelOptions::default()
    };
    {
        let model = Model::open(&bundled(name), &options).unwrap();
        let mut session = session(&model);
        for (kind, whole) in KINDS.into_iter().zip(readme(part, "| Q8_0 | llama.cpp |")) {
            let tokens = model.tokenize(text(kind), false, false).unwrap();
            let (mut nats, mut n_scored) = (0.0, 0);
            let pieces = tokens.chunks(WINDOW - 1);
            let every = pieces.len() / N_WINDOWS;
            for piece in pieces.step_by(every).take(N_WINDOWS) {
                evaluate(&model, &mut session, piece);
                nats += piece.iter().zip(0..).map(|(&t, i)| surprise(session.logits(i).unwrap(), t)).sum::<f64>();
                n_scored += piece.len();
            }
            let found = (nats / n_scored as f64).exp();
            // A part of the text is harder or easier than the whole; a broken weight costs far more.
            assert!((whole / 1.5..whole * 1.5).contains(&found), "{kind}: {found:.1}, of the whole text {whole}");
        }
    }
    let mut used = BTreeSet::new();
    for record in TraceReader::open(&trace).unwrap() {
        if let Record::Layer(layer) = record.unwrap() {
            used.extend(layer.chosen.iter().map(|expert| (layer.layer, *expert)));
        }
    }
    let all = (0..n_layers).flat_map(|layer| (0..N_EXPERTS).map(move |expert| (layer, expert)));
    let dead: Vec<(u16, u16)> = all.filter(|expert| !used.contains(expert)).collect();
    assert!(dead.is_empty(), "never used, as (layer, expert): {dead:?}");
}

#[test]
fn its_draft_often_guesses_what_it_says() {
    quiet_llama_cpp();
    let options = ModelOptions {
        device: DeviceOptions { devices: DeviceChoice::None, ..DeviceOptions::default() },
        ..ModelOptions::default()
    };
    let [fine, draft] = ["fine.gguf", "fine-draft.gguf"].map(|name| Model::open(&bundled(name), &options).unwrap());
    let [mut said, mut guessed] = [&fine, &draft].map(session);
    let best = |logits: &[f32]| logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(token, _)| token);
    for (kind, whole) in KINDS.into_iter().zip(readme("The draft", "| at temperature 0 |")) {
        let tokens = fine.tokenize(text(kind), false, false).unwrap();
        assert_eq!(draft.tokenize(text(kind), false, false).unwrap(), tokens, "{kind}");
        let (mut n_same, mut n_guessed) = (0, 0);
        for piece in tokens.chunks(WINDOW - 1).take(N_WINDOWS) {
            evaluate(&fine, &mut said, piece);
            evaluate(&draft, &mut guessed, piece);
            let same = |i: &usize| best(said.logits(*i).unwrap()) == best(guessed.logits(*i).unwrap());
            n_same += (0..).take(piece.len()).filter(same).count();
            n_guessed += piece.len();
        }
        let found = 100.0 * n_same as f64 / n_guessed as f64;
        // A part of the text again; weights that are not the trained ones guess next to nothing.
        assert!((found - whole).abs() < 10.0, "{kind}: {found:.1} %, of the whole text {whole} %");
    }
}
