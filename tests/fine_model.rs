//! The bundled fine-grained model has the shape, types and size that models/README.md states. It has learnt all four
//! kinds of text, and no expert of it is dead.

use std::collections::BTreeSet;

use hobbit::options::DeviceChoice;
use hobbit::{BatchToken, DeviceOptions, Model, ModelOptions, SessionOptions, Token};
use hobbit_core::gguf::{GgmlType, Gguf};
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::trace::{Record, TraceReader};

use crate::fixture::{bundled, quiet_llama_cpp};

const KINDS: [&str; 4] = ["prose", "code", "docs", "dialogue"];
const N_LAYERS: u16 = 4;
const N_EXPERTS: u16 = 32;
const N_USED: u64 = 4;
/// Tokens evaluated at once, as for the README's figures: the start token and as many of the text.
const WINDOW: usize = 512;
const N_WINDOWS: usize = 4;

/// The part of models/README.md on this model.
fn readme() -> String {
    let text = std::fs::read_to_string(bundled("README.md")).unwrap();
    text.split_once("\n# The fine-grained model\n")
        .expect("models/README.md has a part on the fine-grained model")
        .1
        .into()
}

#[test]
fn its_header_matches_the_readme() {
    let gguf = Gguf::open(&bundled("fine.gguf")).unwrap();
    assert_eq!(gguf.architecture(), "deepseek");
    let keys = [
        ("block_count", u64::from(N_LAYERS)),
        ("leading_dense_block_count", 0),
        ("embedding_length", 256),
        ("expert_feed_forward_length", 256),
        ("expert_count", u64::from(N_EXPERTS)),
        ("expert_used_count", N_USED),
        ("expert_shared_count", 1),
        ("context_length", WINDOW as u64),
    ];
    for (key, expected) in keys {
        assert_eq!(gguf.metadata.get_u64(&format!("deepseek.{key}")), Some(expected), "{key}");
    }
    let experts = gguf.experts().unwrap();
    assert_eq!(experts.layers.len(), usize::from(N_LAYERS));
    for tensor in &gguf.tensors {
        let is_small = tensor.dims.len() == 1 || tensor.name.ends_with("ffn_gate_inp.weight");
        let expected = if is_small { GgmlType::F32 } else { GgmlType::Q8_0 };
        assert_eq!(tensor.dtype, expected, "{}", tensor.name);
        // Any type of llama.cpp's fits, K-quants too.
        assert_eq!(tensor.dims[0] % 256, 0, "{}: rows of {}", tensor.name, tensor.dims[0]);
    }
    let bytes = gguf.file_bytes();
    assert!(bytes <= 28 << 20, "{bytes} bytes");
    let grouped: String = bytes.to_string().chars().rev().enumerate().fold(String::new(), |mut text, (i, digit)| {
        if i > 0 && i % 3 == 0 {
            text.insert(0, ',');
        }
        text.insert(0, digit);
        text
    });
    assert!(readme().contains(&format!("{grouped} bytes")), "models/README.md does not say {grouped} bytes");
}

/// Negative log-likelihood in nats.
fn surprise(logits: &[f32], token: Token) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    sum.ln() - f64::from(logits[token as usize] - max)
}

/// Perplexities of the whole texts in the README's table.
fn perplexities() -> Vec<f64> {
    let readme = readme();
    let row = readme.lines().find_map(|line| line.strip_prefix("| Q8_0 | llama.cpp |")).expect("a row of perplexities");
    let cells = row.trim_end_matches('|').split('|').map(|cell| cell.trim().parse().expect("a perplexity"));
    let found: Vec<f64> = cells.collect();
    assert_eq!(found.len(), KINDS.len(), "{row}");
    found
}

#[test]
fn it_predicts_all_kinds_of_text_and_uses_all_experts() {
    quiet_llama_cpp();
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
        for (kind, whole) in KINDS.into_iter().zip(perplexities()) {
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
