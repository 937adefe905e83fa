//! A greedy continuation by either engine, told as the programs in `benches/peers` tell theirs.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use hobbit::Token;
use hobbit::perplexity::logits::Normaliser;
use hobbit_programs::bench::answer::ggml_build;
use hobbit_programs::bench::args::Who;
use hobbit_programs::bench::case::Task;
use hobbit_programs::bench::child;
use hobbit_programs::bench::engine::{self, Engine};

/// What is to be continued.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Wish {
    pub task: Task,
    pub prompt_file: PathBuf,
    /// Tokens to generate.
    pub predict: usize,
}

/// The contract of `benches/peers/*/run`: its last line on stdout.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Continuation {
    pub engine: String,
    pub version: String,
    /// How the program was told to run.
    pub command: String,
    pub load_ns: u64,
    pub prompt_tokens: u64,
    pub prompt_ns: u64,
    /// Evaluations that `decode_ns` covers.
    pub decode_tokens: u64,
    pub decode_ns: u64,
    pub token_ns: Vec<u64>,
    pub tokens: Vec<Token>,
    pub text: String,
    /// Of our own engines.
    pub model_type: String,
    pub model_size: u64,
    pub model_n_params: u64,
    pub peak_rss: u64,
    /// Of hobbit's plan, where it tells.
    pub budget: Option<u64>,
    pub expert_cache: Option<u64>,
    pub expert_bytes: Option<u64>,
}

/// Continues a text by always taking the most probable token.
///
/// # Errors
/// As [`engine::open`]; a text that cannot be read or has no tokens.
pub fn run(wish: &Wish) -> Result<Continuation> {
    hobbit::set_log(|level, text| {
        if level == hobbit::LogLevel::Error {
            let _ = write!(io::stderr(), "{text}");
        }
    });
    let began = child::began(&wish.task);
    let text = std::fs::read_to_string(&wish.prompt_file)
        .with_context(|| format!("{}: cannot read this file as text", wish.prompt_file.display()))?;
    let mut engine = engine::open(&wish.task)?;
    let load_ns = began.elapsed().as_nanos() as u64;
    let mut prompt: Vec<Token> = engine.bos().into_iter().collect();
    prompt.extend(engine.tokenize(&text)?);
    ensure!(!prompt.is_empty(), "{}: no text to continue", wish.prompt_file.display());
    let started = Instant::now();
    engine.feed(&prompt)?;
    let mut token = best(&*engine)?;
    let prompt_ns = started.elapsed().as_nanos() as u64;
    let (mut tokens, mut token_ns, mut bytes) = (vec![token], Vec::new(), engine.piece(token));
    while tokens.len() < wish.predict {
        let started = Instant::now();
        engine.feed(&[token])?;
        token = best(&*engine)?;
        token_ns.push(started.elapsed().as_nanos() as u64);
        bytes.extend(engine.piece(token));
        tokens.push(token);
    }
    let about = engine.describe();
    let is_stock = wish.task.who == Who::Stock;
    Ok(Continuation {
        engine: if is_stock { "llama.cpp" } else { "hobbit" }.into(),
        version: if is_stock { format!("b{}", ggml_build()) } else { env!("CARGO_PKG_VERSION").into() },
        command: wish.task.case.words.join(" "),
        load_ns,
        prompt_tokens: prompt.len() as u64,
        prompt_ns,
        decode_tokens: token_ns.len() as u64,
        decode_ns: token_ns.iter().sum(),
        token_ns,
        tokens,
        text: String::from_utf8_lossy(&bytes).into_owned(),
        model_type: about.model_type,
        model_size: about.model_size,
        model_n_params: about.model_n_params,
        peak_rss: hobbit::stats::peak_rss_bytes(),
        budget: about.hobbit_budget,
        expert_cache: about.hobbit_expert_cache,
        expert_bytes: about.hobbit_expert_bytes,
    })
}

/// The most probable token, of equal ones the first.
fn best(engine: &dyn Engine) -> Result<Token> {
    Ok(Normaliser::of(engine.logits().context("no logits")?).argmax as Token)
}
