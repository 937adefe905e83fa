//! The bundled fine-grained model has learnt all four kinds of text, and no expert of it is dead.

use std::collections::BTreeSet;

use hobbit::options::DeviceChoice;
use hobbit::{BatchToken, DeviceOptions, Model, ModelOptions, SessionOptions, Token};
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::trace::{Record, TraceReader};

use crate::fixture::{bundled, quiet_llama_cpp};

const KINDS: [&str; 4] = ["prose", "code", "docs", "dialogue"];
const N_LAYERS: u16 = 4;
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

#[test]
fn it_predicts_all_kinds_of_text_and_uses_all_experts() {
    quiet_llama_cpp();
    let readme = std::fs::read_to_string(bundled("README.md")).unwrap();
    // Perplexities of the whole texts, in the table of models/README.md.
    let (_, readme) = readme.split_once("\n# The fine-grained model\n").expect("a part on this model");
    let row = readme.lines().find_map(|line| line.strip_prefix("| Q8_0 | llama.cpp |")).expect("a row of perplexities");
    let cells = row.trim_end_matches('|').split('|').map(|cell| cell.trim().parse().expect("a perplexity"));
    let perplexities: Vec<f64> = cells.collect();
    assert_eq!(perplexities.len(), KINDS.len(), "{row}");
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("fine.trace");
    let options = ModelOptions {
        budget: Budget::Bytes(4 << 30),
        expert_cache: ExpertCache::Percent(50.0),
        trace: Some(trace.clone()),
        device: DeviceOptions { devices: DeviceChoice::None, ..DeviceOptions::default() },
        ..ModelOptions::default()
    };
    {
        let model = Model::open(&bundled("fine.gguf"), &options).unwrap();
        let n = WINDOW as u32;
        let settings =
            SessionOptions { n_ctx: n, n_batch: n, n_ubatch: n, threads: Some(1), ..SessionOptions::default() };
        let mut session = model.session(&settings).unwrap();
        let start = model.tokenize("", true, false).unwrap()[0];
        for (kind, whole) in KINDS.into_iter().zip(perplexities) {
            let text = std::fs::read_to_string(bundled(&format!("fine-heldout-{kind}.txt"))).unwrap();
            let tokens = model.tokenize(&text, false, false).unwrap();
            let (mut nats, mut n_scored) = (0.0, 0);
            for piece in tokens.chunks(WINDOW - 1).take(N_WINDOWS) {
                session.reset();
                let window = std::iter::once(start).chain(piece.iter().copied()).zip(0..);
                let batch: Vec<BatchToken> =
                    window.map(|(token, position)| BatchToken { token, position, sequence: 0, logits: true }).collect();
                session.evaluate(&batch).unwrap();
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
    let all = (0..N_LAYERS).flat_map(|layer| (0..N_EXPERTS).map(move |expert| (layer, expert)));
    let dead: Vec<(u16, u16)> = all.filter(|expert| !used.contains(expert)).collect();
    assert!(dead.is_empty(), "never used, as (layer, expert): {dead:?}");
}
