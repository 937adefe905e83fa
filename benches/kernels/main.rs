//! What llama.cpp's repacking of weights for the CPU is worth to experts: times of products of one expert's matrix, as
//! files have it and repacked, and the speed of repacking, which a miss would pay between its arrival and its product.
//! With `--gates` the product of later layers' routers instead ([`gates`]).
//!
//! Which types are repacked, and how, ggml decides by the CPU. Matrices come from memory, not from a cache: there are more
//! of them than any cache holds, used in turn. All ways run in turns; medians count.
//!
//! ```text
//! cargo bench --bench kernels                                       # about ten minutes
//! cargo bench --bench kernels -- --types q4_K,q4_0 --rows 1,64      # a look at some
//! cargo bench --bench kernels -- --json kernels.json --threads 4
//! cargo bench --bench kernels -- --gates                            # the product of later layers' routers instead, a minute
//! ```
//!
//! Tables (markdown) go to stdout, raw numbers to `benches/results/<machine>/kernels.json`. A bench reports: a type that
//! gains too little is printed, the exit code stays 0.

mod gates;
mod ggml;
mod measure;
mod report;
#[path = "../shared/verdict.rs"]
mod verdict;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use hobbit_core::gguf::GgmlType;
use hobbit_programs::bench::host::Host;
use serde_json::json;

use ggml::{Cpu, Shape};
use measure::{Measured, Product, Settings};
use verdict::Verdict;

/// What repacked experts are worth
#[derive(Debug, Parser)]
struct Args {
    /// Types of weights
    #[arg(
        long,
        value_name = "TYPE,...",
        value_delimiter = ',',
        default_value = "q4_0,q4_1,q5_0,q5_1,q8_0,q2_K,q3_K,q4_K,q5_K,q6_K,iq4_nl,iq4_xs,mxfp4,f16"
    )]
    types: Vec<String>,
    /// Matrices: row length and rows
    #[arg(
        long,
        value_name = "NxM,...",
        value_delimiter = ',',
        default_value = "2048x768,4096x1792,2880x2880",
        value_parser = shape
    )]
    shapes: Vec<(usize, usize)>,
    /// Rows that are multiplied by a matrix
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,2,4,8,16,32,64,256")]
    rows: Vec<usize>,
    /// Threads [default: all cores]
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(i32).range(1..=256))]
    threads: Option<i32>,
    /// MiB of matrices of a kind, of which there are two
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    memory: u64,
    /// How often each is timed
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u64).range(1..=1000))]
    tries: u64,
    /// Instead, the product of the next layers' routers that predictors take for each token, against ggml's
    #[arg(long, conflicts_with_all = ["types", "shapes", "rows"])]
    gates: bool,
    /// Where raw numbers go [default: benches/results/<machine>/kernels.json, with --gates kernels-gates.json]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// Most elements of a row, and rows, of a matrix.
const SIDE_MAX: usize = 1 << 16;

fn shape(text: &str) -> Result<(usize, usize), String> {
    let side = |text: &str| text.parse().ok().filter(|side| (1..=SIDE_MAX).contains(side));
    let sides = text.split_once('x').and_then(|(a, b)| Some((side(a)?, side(b)?)));
    sides.ok_or_else(|| format!("expected NxM of 1 to {SIDE_MAX}, such as 2048x768"))
}

fn main() -> Result<()> {
    if std::env::args_os().len() == 1 {
        println!("kernels: nothing to do for cargo test; run it with cargo bench");
        return Ok(());
    }
    let args = Args::parse();
    ensure!(args.rows.iter().all(|rows| (1..=1 << 14).contains(rows)), "--rows: expected 1 to {}", 1 << 14);
    // ggml says of every matrix that it repacks it.
    hobbit::set_log(|level, text| {
        if level == hobbit::LogLevel::Error {
            eprint!("{text}");
        }
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(cores as i32);
    let cpu = Cpu::new(threads)?;
    let settings =
        Settings { rows: args.rows.clone(), bytes: (args.memory << 20) as usize, tries: args.tries as usize };
    let host = Host::describe(Path::new(env!("CARGO_MANIFEST_DIR")));
    let machine = format!("\n{}, {threads} threads; {}", host.cpu, host.system_info.trim());
    if args.gates {
        let found = gates::measure(&cpu, &settings)?;
        println!("{machine}");
        gates::print(&found);
        let raw = json!({ "host": host, "threads": threads, "memory_mib": args.memory, "gates": found });
        return verdict::write(&raw, args.json.as_deref(), &host, "kernels-gates.json");
    }
    let mut all: Vec<Measured> = Vec::new();
    for name in &args.types {
        let dtype = GgmlType::from_name(name).with_context(|| format!("--types {name}: no type of ggml's"))?;
        for &(n_per_row, n_rows) in &args.shapes {
            let found = measure::measure(&cpu, &settings, Shape { dtype, n_per_row, n_rows });
            let Some(measured) = found.with_context(|| format!("{name}, {n_per_row} x {n_rows}"))? else { continue };
            let word = measured.buffer_type.as_deref().unwrap_or("as it is");
            eprintln!("{name}, {n_per_row} x {n_rows}: {word}");
            all.push(measured);
        }
    }
    println!("{machine}");
    report::print(&all, f64::from(threads));
    let verdicts: Vec<Verdict> = all.iter().flat_map(|measured| verdicts(measured, f64::from(threads))).collect();
    verdict::print(&verdicts);
    let raw =
        json!({ "host": host, "threads": threads, "memory_mib": args.memory, "verdicts": verdicts, "types": all });
    verdict::write(&raw, args.json.as_deref(), &host, "kernels.json")
}

/// Whether repacking pays, net of what misses cost: where tokens are generated, and in prompts.
fn verdicts(measured: &Measured, threads: f64) -> Vec<Verdict> {
    let of = format!("{}, {} x {}", measured.dtype, measured.n_per_row, measured.n_rows);
    let gain = |product: &Product, missed| report::gain(measured, product, missed, threads);
    let best = |is_prompt: bool| {
        let products = measured.products.iter().filter(|product| (product.rows > 1) == is_prompt);
        let gains = products.filter_map(|product| Some((product, gain(product, report::MISSED)?)));
        gains.max_by(|a, b| a.1.total_cmp(&b.1))
    };
    let verdict = |phase: &str, (product, net): (&Product, f64)| Verdict {
        promise: format!("{of}: repacking brings {}x in {phase}", report::GAIN_MIN),
        found: format!(
            "{net:.2}x with {} rows where {:.0} % are missed, {:.2}x where none are",
            product.rows,
            report::MISSED * 100.0,
            gain(product, 0.0).unwrap_or_default()
        ),
        is_kept: net >= report::GAIN_MIN,
    };
    let decode = best(false).map(|found| verdict("decode", found));
    let prompt = best(true).map(|found| verdict("prompts", found));
    decode.into_iter().chain(prompt).collect()
}
