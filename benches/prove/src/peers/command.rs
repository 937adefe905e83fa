//! hobbit-cli as its users start it: the whole command, from the start of the process to its end.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

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
    for (name, _) in std::env::vars_os() {
        let is_setting = name.to_str().is_some_and(|name| name.starts_with("LLAMA_ARG_"));
        if is_setting {
            command.env_remove(name);
        }
    }
    command.arg("-m").arg(&case.model).arg("-f").arg(&wish.prompt_file);
    command.args(["-n", &wish.predict.to_string(), "-t", &case.threads.to_string()]);
    command.args(["-c", &case.test.n_tokens().next_multiple_of(256).to_string()]);
    command.args(["-b", &case.n_batch.to_string(), "-ub", &case.n_ubatch.to_string()]);
    command.args(["--temp", "0", "--ignore-eos", "-no-cnv", "--no-warmup", "--no-display-prompt"]);
    command.args(["--stats-json", "-"]).args(&case.words);
    Ok(command)
}

/// What `--stats-json` says, in part.
#[derive(Deserialize)]
struct Stats {
    hobbit: String,
    model: About,
    plan: Plan,
    timings: Timings,
    peak_rss_bytes: u64,
}

#[derive(Deserialize)]
struct About {
    description: String,
    tensor_bytes: u64,
    n_params: u64,
    expert_bytes: u64,
}

#[derive(Deserialize)]
struct Plan {
    budget: u64,
    expert_cache: u64,
}

#[derive(Deserialize)]
struct Timings {
    load_ms: f64,
    prompt_ms: f64,
    prompt_tokens: u64,
    eval_ms: f64,
    eval_runs: u64,
}

/// What it printed: a text, and behind it JSON, whose first line is a bracket alone.
///
/// # Errors
/// Something else.
pub fn continuation(wish: &Wish, printed: &str) -> Result<Continuation> {
    let at = printed.rfind("\n{\n").map(|at| at + 1).or(printed.starts_with("{\n").then_some(0));
    let (text, stats) = printed.split_at(at.context("hobbit-cli printed no statistics")?);
    let stats: Stats = serde_json::from_str(stats).context("the statistics of hobbit-cli")?;
    let ns = |ms: f64| (ms * 1e6) as u64;
    Ok(Continuation {
        engine: "hobbit".into(),
        version: stats.hobbit,
        command: wish.task.case.words.join(" "),
        load_ns: ns(stats.timings.load_ms),
        prompt_tokens: stats.timings.prompt_tokens,
        prompt_ns: ns(stats.timings.prompt_ms),
        decode_tokens: stats.timings.eval_runs,
        decode_ns: ns(stats.timings.eval_ms),
        text: text.to_owned(),
        model_type: stats.model.description,
        model_size: stats.model.tensor_bytes,
        model_n_params: stats.model.n_params,
        peak_rss: stats.peak_rss_bytes,
        budget: Some(stats.plan.budget),
        expert_cache: Some(stats.plan.expert_cache),
        expert_bytes: Some(stats.model.expert_bytes),
        ..Continuation::default()
    })
}
