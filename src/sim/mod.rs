//! `hobbit-sim`: prints, imports and replays traces, and tunes policies with them.

mod args;
mod import;
mod recall;
mod replay;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser};
use serde_json::Value;

use args::{Args, Command, ShowArgs, TuneArgs};

use super::exit;
use crate::args::read;
use hobbit_core::files::{self, Input, Kind, Output, OutputError};
use hobbit_core::route::Thresholds;
use hobbit_core::sim::{FitGoal, Fitted, Memory, Recording, SimError, fit};
use hobbit_core::trace::TraceReader;

/// Runs `hobbit-sim` with the arguments of this process. Ctrl-C keeps the system's default, status 130 in a shell:
/// outputs are written whole at the end.
pub fn main() -> ExitCode {
    hobbit_common::output::prepare_console();
    exit::code(run(std::env::args_os(), &mut io::stdout().lock()))
}

/// Runs the command line `words`, program name first.
fn run(words: impl Iterator<Item = OsString>, out: &mut dyn Write) -> Result<u8> {
    let parse = |words| Args::try_parse_from(std::iter::once("hobbit-sim".into()).chain(words));
    let args: Args = read(Args::command, words.skip(1).collect(), parse)?;
    match args.command {
        Command::Show(args) => show(&args, out)?,
        Command::Import(args) => import::run(&args, out)?,
        Command::Replay(args) => replay::run(&args, out)?,
        Command::Calibrate(args) => tune(&args, out)?,
        Command::Recall(args) => recall::run(&args, out)?,
    }
    out.flush()?;
    Ok(0)
}

/// `hobbit-sim show`: a trace as JSON lines.
fn show(args: &ShowArgs, out: &mut dyn Write) -> Result<()> {
    let mut reader = TraceReader::open(&args.file)?;
    let header = serde_json::json!({ "record": "header", "header": reader.header() });
    writeln!(out, "{header}")?;
    if args.header {
        return Ok(());
    }
    let mut out = io::BufWriter::new(out);
    for record in &mut reader {
        serde_json::to_writer(&mut out, &record?)?;
        out.write_all(b"\n")?;
    }
    out.flush()?;
    warn_of_cut(&args.file, reader.truncated());
    Ok(())
}

/// `hobbit-sim calibrate`: HOBBIT's weights and thresholds from traces, as flags.
fn tune(args: &TuneArgs, out: &mut dyn Write) -> Result<()> {
    let thresholds = match (args.t1, args.t2) {
        (Some(t1), Some(t2)) => Some(Thresholds::new(t1, t2)?),
        _ => None,
    };
    let recordings: Vec<_> = args.files.iter().map(|file| open(file, args.assumed.low_bytes)).collect::<Result<_>>()?;
    let goal = FitGoal {
        memory: Memory { budget: args.budget, slots: args.slots, low_percent: args.low_share },
        shares: args.shares,
        thresholds,
    };
    let Fitted { weights, thresholds, penalty, penalty_lru, tokens } = fit(&recordings, &goal)?;
    write!(out, "--policy hobbit --policy-weights {weights}")?;
    if let Some(Thresholds { t1, t2 }) = thresholds {
        write!(out, " --t1 {t1:.3} --t2 {t2:.3}")?;
    }
    writeln!(out, "\npenalty per token: {penalty:.3}, {penalty_lru:.3} under LRU ({tokens} tokens)")?;
    Ok(())
}

/// Checks that a result overwrites nothing but an earlier result.
fn check_output(path: &Path, kind: Kind, traces: &[PathBuf]) -> Result<(), OutputError> {
    let traces: Vec<_> = traces.iter().map(|path| Input { flag: "a trace", path }).collect();
    files::check(&[Output { flag: "-o", path, kind }], &traces)
}

/// Opens a trace; with `low_bytes`, pretends that low versions exist, with this percentage of the bytes.
fn open(path: &Path, low_bytes: Option<f64>) -> Result<Recording> {
    let mut recording = Recording::open(path)?;
    warn_of_cut(path, recording.truncated);
    if let Some(percent) = low_bytes {
        recording.assume_low(percent);
    }
    Ok(recording)
}

/// Other traces of a recording's model.
fn others(files: &[PathBuf], recording: &Recording) -> Result<Vec<Recording>> {
    let shape = |trace: &Recording| -> Vec<_> {
        trace.header.model.layers.iter().map(|layer| (layer.layer, layer.n_expert, layer.n_used)).collect()
    };
    let open = |file: &PathBuf| {
        let other = open(file, None)?;
        let first = || recording.path.clone();
        if shape(&other) == shape(recording) {
            Ok(other)
        } else {
            Err(SimError::OtherModel { first: first(), other: other.path }.into())
        }
    };
    files.iter().map(open).collect()
}

/// Prints about each trace: JSON objects with these fields, in an array; or texts, each below a heading.
fn each(
    (files, low_bytes): (&[PathBuf], Option<f64>),
    is_json: bool,
    out: &mut dyn Write,
    fields: impl Fn(&Recording) -> Result<Value>,
    text: impl Fn(&Recording) -> Result<String>,
) -> Result<()> {
    if is_json {
        let all = files.iter().map(|file| fields(&open(file, low_bytes)?)).collect::<Result<Vec<_>>>()?;
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
        return Ok(());
    }
    for (at, file) in files.iter().enumerate() {
        let recording = open(file, low_bytes)?;
        let gap = if at > 0 { "\n" } else { "" };
        write!(out, "{gap}{}\n{}", about(&recording), text(&recording)?)?;
    }
    Ok(())
}

fn about(recording: &Recording) -> String {
    let header = &recording.header;
    let experts: u32 = header.model.layers.iter().map(|layer| u32::from(layer.n_expert)).sum();
    format!(
        "{}: {}, {} layers, {experts} experts; {} tokens, recorded with {} and {} MiB of experts",
        recording.path.display(),
        header.model.name,
        header.model.layers.len(),
        recording.n_tokens(),
        header.settings.policy,
        header.settings.cache_bytes >> 20,
    )
}

/// Warns of a trace that a crash cut off.
fn warn_of_cut(path: &Path, truncated: Option<u64>) {
    if let Some(offset) = truncated {
        let _ =
            writeln!(io::stderr(), "warning: {}: cut off at byte {offset}; what precedes it is used", path.display());
    }
}

/// Columns of text without borders or blanks at line ends, easy to cut and compare. The heading's cells have commas
/// between them; rows are as long. The first `n_left` columns are left-aligned, the others right-aligned.
fn table(heading: &str, rows: &[Vec<String>], n_left: usize) -> String {
    let heading: Vec<String> = heading.split(',').map(str::to_owned).collect();
    let lines = || std::iter::once(&heading).chain(rows);
    let width = |column: usize| lines().map(|cells| cells[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..heading.len()).map(width).collect();
    let line = |cells: &Vec<String>| {
        let padded = cells.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if column < n_left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    lines().map(line).collect()
}
