//! Held-out perplexity of the demo model in several precisions, as quoted in models/README.md.
//!
//! ```sh
//! cargo run --release --example demo_perplexity -- demo-f16.gguf models/demo-heldout-prose.txt models/demo-heldout-code.txt
//! ```
//!
//! The first argument is the F16 export of `gguf-tools/demo-model/export.py`; llama.cpp quantises it into temporary files.

use std::ffi::CString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use ggml_sys::llama;
use hobbit::{BatchToken, Model, ModelOptions, SessionOptions, Token};

/// Tokens evaluated at once; the first half of each window is context only.
const WINDOW: usize = 256;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).map(PathBuf::from);
    let Some(f16) = arguments.next() else { bail!("usage: demo_perplexity F16.gguf TEXT...") };
    let texts: Vec<PathBuf> = arguments.collect();
    ensure!(!texts.is_empty(), "usage: demo_perplexity F16.gguf TEXT...");
    let dir = tempfile::tempdir()?;
    let kinds = [
        ("F16", None),
        ("Q8_0", Some(llama::LLAMA_FTYPE_MOSTLY_Q8_0)),
        ("Q4_K", Some(llama::LLAMA_FTYPE_MOSTLY_Q4_K_S)),
        ("Q2_K", Some(llama::LLAMA_FTYPE_MOSTLY_Q2_K)),
    ];
    for text in &texts {
        println!("\n{}", text.file_name().unwrap_or_default().to_string_lossy());
        println!("| type | file, MiB | perplexity per token | per byte |\n|---|---|---|---|");
        for (name, kind) in kinds {
            let path = match kind {
                None => f16.clone(),
                Some(kind) => quantise(&f16, &dir.path().join(name), kind)?,
            };
            let (per_token, per_byte) = perplexity(&path, text)?;
            let size = std::fs::metadata(&path)?.len() as f64 / (1 << 20) as f64;
            println!("| {name} | {size:.1} | {per_token:.3} | {per_byte:.4} |");
        }
    }
    Ok(())
}

fn quantise(from: &Path, to: &Path, kind: llama::llama_ftype) -> Result<PathBuf> {
    let name = |path: &Path| CString::new(path.to_string_lossy().into_owned()).context("a path without NUL");
    // SAFETY: plain values and NUL-terminated names that outlive the call.
    let code = unsafe {
        let mut params = llama::llama_model_quantize_default_params();
        params.ftype = kind;
        // Every weight in the type that is named, so that the rows compare.
        params.pure_ = true;
        llama::llama_model_quantize(name(from)?.as_ptr(), name(to)?.as_ptr(), &params)
    };
    ensure!(code == 0, "llama.cpp cannot quantise {}", from.display());
    Ok(to.to_owned())
}

/// Perplexity per token and per byte over windows that overlap by half, each token predicted from at least half a
/// window (the first half window of the text from less).
fn perplexity(model: &Path, text: &Path) -> Result<(f64, f64)> {
    let model = Model::open(model, &ModelOptions::default(), |_| true)?;
    let tokens = model.tokenize(&std::fs::read_to_string(text)?, false, false)?;
    let n = WINDOW as u32;
    let settings = SessionOptions { n_ctx: n, n_batch: n, n_ubatch: n, ..SessionOptions::default() };
    let mut session = model.session(&settings)?;
    let (mut nats, mut count, mut bytes) = (0.0, 0usize, 0usize);
    let mut start = 0;
    while start + WINDOW <= tokens.len() {
        let window = &tokens[start..start + WINDOW];
        session.reset();
        let batch = window.iter().zip(0..);
        let batch: Vec<BatchToken> =
            batch.map(|(&token, position)| BatchToken { token, position, sequence: 0, logits: true }).collect();
        session.evaluate(&batch)?;
        let first = if start == 0 { 0 } else { WINDOW / 2 - 1 };
        for i in first..WINDOW - 1 {
            let logits = session.logits(i).context("logits were asked for")?;
            nats += surprise(logits, window[i + 1]);
            bytes += model.piece(window[i + 1], false).len();
            count += 1;
        }
        start += WINDOW / 2;
    }
    ensure!(count > 0, "{} is shorter than {WINDOW} tokens", text.display());
    Ok(((nats / count as f64).exp(), (nats / bytes as f64).exp()))
}

/// Negative log-likelihood in nats.
fn surprise(logits: &[f32], token: Token) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
    sum.ln() - f64::from(logits[token as usize] - max)
}
