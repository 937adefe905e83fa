//! Held-out perplexity of the demo model in several precisions, as quoted in models/README.md.
//!
//! ```sh
//! cargo run --release --example demo_perplexity -- demo-f16.gguf models/demo-heldout-*.txt
//! ```
//!
//! The first argument is the F16 export of `gguf-tools/demo-model/export.py`; llama.cpp quantises it into temporary
//! files.

use std::ffi::CString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use ggml_sys::llama;
use hobbit::{BatchToken, Model, ModelOptions, SessionOptions};
use hobbit_core::perplexity::logits::nll;

/// Tokens evaluated at once: the model's context.
const WINDOW: usize = 512;

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
        println!("| type | file, MiB | perplexity a token | a word | bits a byte |\n|---|---|---|---|---|");
        for (name, kind) in kinds {
            let path = match kind {
                None => f16.clone(),
                Some(kind) => quantise(&f16, &dir.path().join(name), kind)?,
            };
            let [per_token, per_word, bits_per_byte] = perplexity(&path, text)?;
            let size = std::fs::metadata(&path)?.len() as f64 / (1 << 20) as f64;
            println!("| {name} | {size:.1} | {per_token:.2} | {per_word:.1} | {bits_per_byte:.3} |");
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

/// Cuts the text into pieces of `WINDOW - 1` tokens, each preceded by the start token, and predicts every token once:
/// perplexity a token and a word, bits a byte.
fn perplexity(model: &Path, text: &Path) -> Result<[f64; 3]> {
    let model = Model::open(model, &ModelOptions::default())?;
    let text = std::fs::read_to_string(text)?;
    let start = *model.tokenize("", true, false)?.first().context("the model has a start token")?;
    let tokens = model.tokenize(&text, false, false)?;
    let n = WINDOW as u32;
    let settings = SessionOptions { n_ctx: n, n_batch: n, n_ubatch: n, ..SessionOptions::default() };
    let mut session = model.session(&settings)?;
    let mut nats = 0.0;
    for piece in tokens.chunks(WINDOW - 1) {
        session.reset();
        let window = std::iter::once(start).chain(piece.iter().copied()).zip(0..);
        let batch: Vec<BatchToken> =
            window.map(|(token, position)| BatchToken { token, position, sequence: 0, logits: true }).collect();
        session.evaluate(&batch)?;
        for (i, &token) in piece.iter().enumerate() {
            nats += nll(session.logits(i).context("logits were asked for")?, token);
        }
    }
    Ok([
        (nats / tokens.len() as f64).exp(),
        (nats / text.split_whitespace().count() as f64).exp(),
        nats / text.len() as f64 / std::f64::consts::LN_2,
    ])
}
