//! What dynamic precision, packs and smaller quants cost in quality: model x text x share of cache x arm.
//!
//! An arm is a name and a line of flags as hobbit-cli takes them ([`arm`]; those by default: `arms/default.txt`). Each
//! is compared with the exact model, and always with the hardest control: the same model as a smaller quant that moves
//! as many bytes per token.
//!
//! Text in windows of 512 tokens, of which the second half is scored (as llama-perplexity does), token by token: that
//! is how tokens are generated, and only then each token's own wishes count; wide batches flatter. Then questions about
//! the same text: which of four continuations is its own, token by token, too. Every arm gets the same bytes of expert
//! cache, nothing depends on time (`--deterministic`), and tokens are compared one by one with the exact model's. Only
//! experts differ between the files of the arms. `--whole-windows` reads windows in one batch, for `--prefill-low`.
//!
//! Quants come in steps, so the control of equal bytes is interpolated: linearly in bytes per token, between the two
//! uniform quants next to the arm; the exact model is the largest of them. Beyond the smallest or the largest, that one
//! itself is taken.
//!
//! [`setup`] looks at everything that was given before anything is measured, [`variant`] makes files, [`measure`] runs
//! an arm, [`compare`] makes rows with their errors, [`report`] shows them.
//!
//! A bench reports: a missed target is printed, the exit code stays 0. That its judge can say no is tested
//! (`tests/quality`).

mod args;
mod arm;
mod compare;
mod measure;
mod report;
mod requantise;
mod setup;
mod text;
mod variant;
#[path = "../shared/verdict.rs"]
mod verdict;

use std::process::ExitCode;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::Result;
use clap::Parser;
use hobbit_programs::exit;

use args::Args;
use compare::Row;
use measure::{Manner, Reference};
use setup::Study;
use text::Text;
use variant::{Ready, Workshop};

/// Tokens of the first text that experts' widths are measured on.
const PROFILED: usize = 4096;

fn main() -> ExitCode {
    if std::env::args_os().len() == 1 {
        println!("quality: nothing to do for cargo test; run it with cargo bench");
        return ExitCode::SUCCESS;
    }
    exit::code(run(&Args::parse()).map(|()| 0))
}

fn run(args: &Args) -> Result<()> {
    hobbit::set_log(|_, _| {});
    let studies = setup::studies(args)?;
    studies.iter().try_for_each(|study| measured(args, study))
}

/// Measures a model, and reports.
fn measured(args: &Args, study: &Study) -> Result<()> {
    let started = Instant::now();
    let jobs = args.jobs.map(usize::from).or_else(|| thread::available_parallelism().ok().map(usize::from));
    let jobs = jobs.unwrap_or(1);
    let dir = tempfile::tempdir()?;
    let read = study.texts[0].windows.len() * text::WINDOW;
    let profiled = (study.first_text.as_path(), read.min(PROFILED));
    let workshop = Workshop { subject: &study.subject, dir: dir.path(), threads: jobs, profiled };
    let name = &study.subject.name;
    let ready: Vec<Ready> = study
        .arms
        .iter()
        .inspect(|arm| eprintln!("{name}: preparing {}", arm.name))
        .map(|arm| workshop.ready(arm))
        .collect::<Result<_>>()?;
    let rows: Vec<(f64, &Ready)> =
        args.cache.iter().flat_map(|&percent| ready.iter().map(move |ready| (percent, ready))).collect();
    let manner = Manner { whole_windows: args.whole_windows, threads: args.threads, alone: jobs == 1 };
    // One text after the other: a reference is large (tokens x vocabulary).
    let mut found = Vec::new();
    for text in &study.texts {
        eprintln!(
            "{name}, {}: {} tokens and {} questions, {} rows, {jobs} at a time",
            text.name,
            text.n_scored(),
            text.questions.len(),
            rows.len()
        );
        let exact = workshop.ready(&arm::Arm::exact())?;
        let reference = measure::reference(&study.subject, &exact, text, manner)?;
        found.extend(side_by_side(study, text, &rows, &reference, manner, jobs)?);
    }
    compare::compare(&mut found);
    report::finish(args, study, started.elapsed().as_secs_f64(), &found)
}

/// Measures every row, `jobs` at a time; answers in their order.
fn side_by_side(
    study: &Study,
    text: &Text,
    rows: &[(f64, &Ready)],
    reference: &Reference,
    manner: Manner,
    jobs: usize,
) -> Result<Vec<Row>> {
    let queue = Mutex::new(rows.iter().enumerate());
    let next = || queue.lock().expect("no thread panics with the lock").next();
    let subject = &study.subject;
    let work = || {
        let one = |(i, &(percent, ready)): (usize, &(f64, &Ready))| {
            let row = measure::measure(subject, ready, percent, text, reference, manner)
                .map(|measured| Row::new(&text.name, percent, subject.cache_bytes(percent), ready, measured))
                .inspect(|row| eprintln!("{}, cache {percent}%, {}: {:.3}", text.name, row.arm, row.perplexity));
            (i, row)
        };
        std::iter::from_fn(next).map(one).collect::<Vec<_>>()
    };
    let mut found = thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs.min(rows.len())).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no thread panics")).collect::<Vec<_>>()
    });
    found.sort_by_key(|(i, _)| *i);
    found.into_iter().map(|(_, row)| row).collect()
}
