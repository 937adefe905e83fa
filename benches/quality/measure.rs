//! One run: a text, window by window, and how far it is from the exact model.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use hobbit::engine::Ggml;
use hobbit::gguf::{GgmlType, Gguf};
use hobbit::options::LowSource;
use hobbit::pack::{self, PackKind, PackSpec};
use hobbit::perplexity::{estimate::Sums, softmax::Normaliser};
use hobbit::plan::{Budget, ExpertCache};
use hobbit::stats::PhaseStats;
use hobbit::{BatchToken, Model, ModelOptions, Session, SessionOptions, Token};

use super::case::{Case, Quant};
use crate::requantise::requantise_experts;

/// Tokens of a window. The second half is scored, as llama-perplexity does: every scored token has context.
pub const WINDOW: usize = 512;
/// First position whose successor is scored.
const SCORED: usize = WINDOW / 2;
/// Budget beyond the model's size, in bytes: the cache is what is limited here.
const ROOM: u64 = 16 << 30;

/// The model, and the same with other experts.
pub struct Files {
    paths: HashMap<Quant, PathBuf>,
    /// By high type.
    nested: HashMap<Quant, PathBuf>,
    expert_bytes: u64,
    file_bytes: u64,
}

impl Files {
    /// Requantises into `dir` what `cases` need.
    pub fn new(model: &Path, cases: &[Case], dir: &Path, threads: usize) -> Result<Self> {
        let gguf = Gguf::open(model)?;
        let experts = gguf.experts()?;
        ensure!(!experts.is_empty(), "{}: expected a model with experts", model.display());
        let mut paths = HashMap::from([(None, model.to_owned())]);
        for dtype in cases.iter().flat_map(|case| [case.high, case.low]).flatten() {
            if let Entry::Vacant(entry) = paths.entry(Some(dtype)) {
                let path = entry.insert(dir.join(format!("{dtype}.gguf")));
                requantise_experts(model, dtype, path, threads)?;
            }
        }
        let mut nested = HashMap::new();
        for high in cases.iter().filter(|case| case.nested).map(|case| case.high) {
            if let Entry::Vacant(entry) = nested.entry(high) {
                let path = entry.insert(dir.join("nested.gguf"));
                let source = Gguf::open(&paths[&high])?;
                let spec = PackSpec { nested: true, threads, ..PackSpec::new(PackKind::Full) };
                pack::write(&source, path, &spec, &Ggml, &mut |_| ControlFlow::Continue(()))?;
            }
        }
        Ok(Self { paths, nested, expert_bytes: experts.bytes(), file_bytes: gguf.file_bytes() })
    }
}

/// Type of the first expert tensor.
pub fn own_type(model: &Gguf) -> Result<GgmlType> {
    let experts = model.experts()?;
    let tensor = experts.layers.first().and_then(|layer| layer.tensors.first());
    Ok(tensor.with_context(|| format!("{}: no experts", model.files[0].path.display()))?.dtype)
}

/// A text as windows of tokens, each beginning with the start token where the model has one.
pub struct Text {
    pub name: String,
    windows: Vec<Vec<Token>>,
}

impl Text {
    pub fn new(path: &Path, model: &Model, windows_max: usize) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let tokens = model.tokenize(&text, true, false)?;
        let start = if model.adds_bos() { model.tokenize("", true, false)?.first().copied() } else { None };
        let mut windows: Vec<Vec<Token>> =
            tokens.chunks_exact(WINDOW).take(windows_max).map(<[Token]>::to_vec).collect();
        ensure!(!windows.is_empty(), "{}: {} tokens, expected at least {WINDOW}", path.display(), tokens.len());
        for window in &mut windows {
            window[0] = start.unwrap_or(window[0]);
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Ok(Self { name: name.trim_start_matches("demo-heldout-").to_owned(), windows })
    }

    /// Tokens that are scored.
    pub fn n_scored(&self) -> usize {
        self.windows.len() * (WINDOW - 1 - SCORED)
    }
}

/// What a run found, in nats a scored token.
#[derive(Default)]
pub struct Measured {
    /// Negative log-likelihoods.
    pub nll: Sums,
    /// How much larger they are than the reference's: tokens are compared one by one, as both models read the same text.
    pub difference: Sums,
    /// Kullback-Leibler divergences from the reference.
    pub kl: Sums,
    pub stats: PhaseStats,
}

/// Log-probabilities of the exact model after each scored position, `[n_vocab]` each.
pub type Reference = Vec<Vec<f32>>;

/// Runs the exact model with everything resident.
pub fn reference(files: &Files, text: &Text) -> Result<Reference> {
    let mut rows = Vec::with_capacity(text.n_scored());
    run(&mut open(files, &Case::exact(100.0))?, text, false, |log_probs, _| rows.push(log_probs.to_vec()))?;
    Ok(rows)
}

/// Runs the case and compares with the reference.
pub fn measure(files: &Files, text: &Text, case: &Case, reference: &Reference) -> Result<Measured> {
    let mut session = open(files, case).with_context(|| case.label.clone())?;
    let mut measured = Measured::default();
    let mut exact = reference.iter();
    run(&mut session, text, case.prefill_low.is_some(), |log_probs, next| {
        let exact = exact.next().expect("the reference saw the same windows");
        let nll = |log_probs: &[f32]| -f64::from(log_probs[next as usize]);
        measured.nll.add(nll(log_probs));
        measured.difference.add(nll(log_probs) - nll(exact));
        let divergence: f64 = exact.iter().zip(log_probs).map(|(p, q)| f64::from(p.exp()) * f64::from(p - q)).sum();
        measured.kl.add(divergence.max(0.0)); // rounding
    })?;
    Ok(Measured { stats: session.stats().total(), ..measured })
}

fn open(files: &Files, case: &Case) -> Result<Session> {
    let bytes = (files.expert_bytes as f64 * case.cache_percent / 100.0) as u64;
    let options = ModelOptions {
        budget: Budget::Bytes(ROOM + 2 * files.file_bytes),
        expert_cache: ExpertCache::Bytes(bytes),
        low: case.low.map(|_| LowSource::File(files.paths[&case.low].clone())),
        low_share: case.low_share,
        precision: case.precision(),
        n_gpu_layers: 0,
        ..ModelOptions::default()
    };
    let paths = if case.nested { &files.nested } else { &files.paths };
    let model = Model::open(&paths[&case.high], &options, |_| true)?;
    let n = WINDOW as u32;
    // One thread: the rows are evaluated side by side instead.
    let settings = SessionOptions {
        n_ctx: n,
        n_batch: n,
        n_ubatch: n,
        threads: Some(1),
        warmup: false,
        ..SessionOptions::default()
    };
    Ok(model.session(&settings)?)
}

/// Shows `score` the log-probabilities after each scored position, and the token that came.
fn run(session: &mut Session, text: &Text, in_batches: bool, mut score: impl FnMut(&[f32], Token)) -> Result<()> {
    let scored = SCORED..WINDOW - 1;
    let positions: Vec<usize> = if in_batches { (0..WINDOW).collect() } else { (0..scored.end).collect() };
    for window in &text.windows {
        session.reset();
        for batch in positions.chunks(if in_batches { WINDOW } else { 1 }) {
            let entry = |&at: &usize| BatchToken {
                token: window[at],
                position: at as i32,
                sequence: 0,
                logits: scored.contains(&at),
            };
            session.evaluate(&batch.iter().map(entry).collect::<Vec<_>>())?;
            for (index, at) in batch.iter().enumerate().filter(|(_, at)| scored.contains(at)) {
                let logits = session.logits(index).context("logits were asked for")?;
                let row = Normaliser::of(logits);
                let shift = row.max + row.sum_exp.ln() as f32;
                score(&logits.iter().map(|logit| logit - shift).collect::<Vec<_>>(), window[at + 1]);
            }
        }
    }
    Ok(())
}
