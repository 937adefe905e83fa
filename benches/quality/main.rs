//! What dynamic precision costs in quality, at equal memory: against the exact model, against leaving the same experts
//! out, and against a uniformly smaller quant that moves as many bytes per token.
//!
//! Text in windows of 512 tokens, of which the second half is scored (as llama-perplexity does), token by token: that is
//! how tokens are generated, and only then each token's own wishes count. A second table reads windows in one batch, for
//! `--prefill-low`. Every row gets the same bytes of expert cache, nothing depends on time (`--deterministic`), and
//! tokens are compared one by one with the exact model. Only experts differ between the files of the rows.
//!
//! Quants come in steps, so the uniform quant of equal bytes is interpolated: linearly in bytes per token, between the
//! two uniform rows next to the dynamic one; the exact model is the largest of them. Beyond the smallest or the largest,
//! that one itself is taken.
//!
//! ```text
//! cargo bench --bench quality                                # the demo model, both texts
//! cargo bench --bench quality -- --windows 4 --cache 25      # a quick look
//! cargo bench --bench quality -- --sweep thresholds          # or low-share, renormalise
//! ```
//!
//! Tables (markdown) go to stdout, raw numbers to `benches/results/<machine>/`. A bench reports: a missed target is
//! printed, the exit code stays 0.

mod case;
mod compare;
mod measure;
mod report;
mod requantise;
#[path = "../shared/verdict.rs"]
mod verdict;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Parser;
use hobbit::gguf::Gguf;
use hobbit::{Model, ModelOptions};

use case::{Case, Pair};
use compare::Row;
use measure::{Files, Reference, Text};

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models");
const SWEEPS: [&str; 3] = ["low-share", "thresholds", "renormalise"];

/// What dynamic precision costs in quality
#[derive(Debug, Parser)]
struct Args {
    /// Model whose experts are the exact ones [default: models/demo.gguf]
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Text to read; may be repeated [default: the demo model's held-out prose and code]
    #[arg(long = "text", value_name = "FILE")]
    texts: Vec<PathBuf>,
    /// Expert cache, percent of the exact model's expert bytes
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "25,50")]
    cache: Vec<f64>,
    /// Types of the high and low versions (q8_0+nested: a nested pack); a sweep takes the first
    #[arg(
        long,
        value_name = "HIGH+LOW,...",
        value_delimiter = ',',
        value_parser = case::pair,
        default_value = "q8_0+q2_k,q8_0+q3_k,q8_0+q4_k,q8_0+q4_0,q8_0+nested,q4_k+q2_k"
    )]
    pairs: Vec<Pair>,
    /// Vary one setting instead
    #[arg(long, value_name = "WHAT", value_parser = SWEEPS)]
    sweep: Option<String>,
    /// Windows of 512 tokens of each text [default: all]
    #[arg(long, value_name = "N")]
    windows: Option<usize>,
    /// Rows measured side by side, one thread each [default: cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    jobs: Option<u16>,
    /// Where raw numbers go [default: benches/results/<machine>/quality-<model>[-<sweep>].json]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    if std::env::args_os().len() == 1 {
        println!("quality: nothing to do for cargo test; run it with cargo bench");
        return Ok(());
    }
    let args = Args::parse();
    let started = Instant::now();
    hobbit::set_log(|_, _| {});
    let path = args.model.clone().unwrap_or_else(|| Path::new(MODELS).join("demo.gguf"));
    let jobs = args.jobs.map(usize::from).or_else(|| thread::available_parallelism().ok().map(usize::from));
    let jobs = jobs.unwrap_or(1);
    if let Some(wrong) = args.cache.iter().find(|percent| !(0.0..=100.0).contains(*percent)) {
        bail!("--cache {wrong}: expected percent, 0 to 100");
    }
    let own = measure::own_type(&Gguf::open(&path)?)?;
    let of_cache = |&percent: &f64| case::cases(args.sweep.as_deref(), &args.pairs, own, percent);
    let cases: Vec<Case> = args.cache.iter().flat_map(of_cache).collect();
    let dir = tempfile::tempdir()?;
    let files = Files::new(&path, &cases, dir.path(), jobs)?;
    let texts = texts(&args, &path)?;
    // One text after the other: a reference is large (tokens x vocabulary).
    let mut rows = Vec::new();
    for text in &texts {
        eprintln!("{}: {} tokens are scored in each of {} rows", text.name, text.n_scored(), cases.len());
        let reference = measure::reference(&files, text)?;
        rows.extend(side_by_side(&files, text, &cases, &reference, jobs)?);
    }
    compare::compare(&mut rows);
    report::finish(&args, &path, started.elapsed().as_secs_f64(), &rows)
}

fn texts(args: &Args, path: &Path) -> Result<Vec<Text>> {
    let model = Model::open(path, &ModelOptions { stand_aside: false, ..ModelOptions::default() }, |_| true)?;
    let held_out = || ["prose", "code"].map(|name| Path::new(MODELS).join(format!("demo-heldout-{name}.txt"))).to_vec();
    let paths = if args.texts.is_empty() { held_out() } else { args.texts.clone() };
    paths.iter().map(|path| Text::new(path, &model, args.windows.unwrap_or(usize::MAX))).collect()
}

/// Measures every case, `jobs` at a time; answers in the order of the cases.
fn side_by_side(files: &Files, text: &Text, cases: &[Case], reference: &Reference, jobs: usize) -> Result<Vec<Row>> {
    let queue = Mutex::new(cases.iter().enumerate());
    let next = || queue.lock().expect("no thread panics with the lock").next();
    let work = || {
        let one = |(i, case): (usize, &Case)| {
            let row = measure::measure(files, text, case, reference)
                .map(|measured| Row::new(&text.name, case.clone(), &measured))
                .inspect(|row| {
                    eprintln!("{}, cache {}%, {}: {:.3}", text.name, case.cache_percent, case.label, row.perplexity)
                });
            (i, row)
        };
        std::iter::from_fn(next).map(one).collect::<Vec<_>>()
    };
    let mut rows = thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs.min(cases.len())).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no thread panics")).collect::<Vec<_>>()
    });
    rows.sort_by_key(|(i, _)| *i);
    rows.into_iter().map(|(_, row)| row).collect()
}
