//! Compares what gungraun counted (standard input) with what was recorded, or records it. `check.sh` calls it.

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, ensure};
use clap::Parser;
use hobbit_guard::compare::{Verdict, compare, heading};
use hobbit_guard::counts;
use hobbit_guard::recorded::{Recorded, Tools};

/// Compares instruction counts with the recorded ones; exit code 1 where a bench takes more than the margin allows.
#[derive(Parser)]
struct Args {
    /// Write what was counted in place of what was recorded
    #[arg(long)]
    record: bool,
    /// Change that passes, in percent of what was recorded
    #[arg(long, value_name = "PERCENT", default_value_t = 5.0)]
    margin: f64,
    /// The recording
    #[arg(long, value_name = "FILE", default_value = "instructions.json")]
    file: PathBuf,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    ensure!(args.margin >= 0.0, "--margin {}: expected a number of percent from 0 on", args.margin);
    let mut output = String::new();
    std::io::stdin().read_to_string(&mut output).context("gungraun's output cannot be read from standard input")?;
    let found = counts::parse(&output)?;
    let here = Tools::here()?;
    if args.record {
        println!("{}: {} benches recorded", args.file.display(), found.len());
        Recorded { recorded_with: here, instructions: found }.write(&args.file)?;
        return Ok(ExitCode::SUCCESS);
    }
    let recorded = Recorded::read(&args.file)?;
    let lines = compare(&recorded.instructions, &found, args.margin);
    println!("{}", heading());
    lines.iter().for_each(|line| println!("{line}"));
    for difference in recorded.recorded_with.differences(&here) {
        println!("note: {difference}; counts may differ for that alone");
    }
    let n_failed = lines.iter().filter(|line| line.verdict.fails()).count();
    let n_faster = lines.iter().filter(|line| line.verdict == Verdict::Faster).count();
    if n_faster > 0 {
        println!(
            "{n_faster} benches improved by more than {} %: benches/guard/check.sh --record keeps them so",
            args.margin
        );
    }
    if n_failed == 0 {
        println!("{} benches within {} % of what was recorded, or below", lines.len(), args.margin);
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("{n_failed} of {} benches failed (margin {} %):", lines.len(), args.margin);
    lines.iter().filter(|line| line.verdict.fails()).for_each(|line| eprintln!("{line}"));
    eprintln!("a slower path is a bug unless the change needs it: then record it with benches/guard/check.sh --record");
    Ok(ExitCode::FAILURE)
}
