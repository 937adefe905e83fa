//! hobbit-cli as its users start it: the whole command, from the start of the process to its end.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Error, Result, ensure};
use serde_json::Value;

use super::generate::{Continuation, Wish};

/// The hobbit-cli beside this program.
///
/// # Errors
/// There is none.
pub fn find() -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding this program's file")?;
    let path = own.with_file_name("hobbit-cli");
    ensure!(
        path.is_file(),
        "--cli: no program {}; build it with cargo build --release --bin hobbit-cli",
        path.display()
    );
    Ok(path)
}

/// What continues a text as [`generate`](super::generate) does: as many tokens, always the most probable, the same context.
///
/// # Errors
/// As [`find`].
pub fn hobbit_cli(wish: &Wish) -> Result<Command> {
    let case = &wish.task.case;
    let mut command = Command::new(find()?);
    // Settings of the caller are no part of the case.
    let names = std::env::vars_os().map(|(name, _)| name);
    for name in names.filter(|name| name.to_str().is_some_and(|name| name.starts_with("LLAMA_ARG_"))) {
        command.env_remove(name);
    }
    command.arg("-m").arg(&case.model).arg("-f").arg(&wish.prompt_file);
    command.args(["-n", &wish.predict.to_string(), "-t", &case.threads.to_string()]);
    command.args(["-c", &case.test.n_tokens().next_multiple_of(256).to_string()]);
    command.args(["-b", &case.n_batch.to_string(), "-ub", &case.n_ubatch.to_string()]);
    command.args(["--temp", "0", "--ignore-eos", "-no-cnv", "--no-warmup", "--no-display-prompt"]);
    command.args(["--stats-json", "-"]).args(&case.words);
    Ok(command)
}

/// What it printed: a text, and behind it the JSON of `--stats-json`, whose first line is a bracket alone.
///
/// # Errors
/// Something else.
pub fn continuation(wish: &Wish, printed: &str) -> Result<Continuation> {
    let at = printed.rfind("\n{\n").map(|at| at + 1).or(printed.starts_with("{\n").then_some(0));
    let (text, stats) = printed.split_at(at.context("hobbit-cli printed no statistics")?);
    let stats: Value = serde_json::from_str(stats).context("the statistics of hobbit-cli")?;
    let find = |path: &str| stats.pointer(path).with_context(|| format!("the statistics of hobbit-cli have no {path}"));
    let word = |path: &str| Ok::<_, Error>(find(path)?.as_str().unwrap_or_default().to_owned());
    let number =
        |path: &str| find(path)?.as_u64().with_context(|| format!("{path} of hobbit-cli's statistics is no number"));
    let ns = |path: &str| Ok::<_, Error>((find(path)?.as_f64().unwrap_or(0.0) * 1e6) as u64);
    Ok(Continuation {
        engine: "hobbit".into(),
        version: word("/hobbit")?,
        command: wish.task.case.words.join(" "),
        load_ns: ns("/timings/load_ms")?,
        prompt_tokens: number("/timings/prompt_tokens")?,
        prompt_ns: ns("/timings/prompt_ms")?,
        decode_tokens: number("/timings/eval_runs")?,
        decode_ns: ns("/timings/eval_ms")?,
        text: text.to_owned(),
        model_type: word("/model/description")?,
        model_size: number("/model/tensor_bytes")?,
        model_n_params: number("/model/n_params")?,
        peak_rss: number("/peak_rss_bytes")?,
        budget: Some(number("/plan/budget")?),
        expert_cache: Some(number("/plan/expert_cache")?),
        expert_bytes: Some(number("/model/expert_bytes")?),
        ..Continuation::default()
    })
}
