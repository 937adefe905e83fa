//! Experts on a device behind a throttled link, over a sweep of link speeds: missing experts copied, computed on the CPU,
//! or whichever is sooner, against llama.cpp with its experts on the CPU and op-offload.
//!
//! The device is the tests' own ([`lagging_device`]), in real time: it computes on CPU threads, and each copy takes as
//! long as the link says. What it shows is the balance between copying and computing, not the speed of a GPU. All weights
//! are in host memory before anything is measured; decoding is teacher-forced, on real text.
//!
//! ```text
//! cargo bench --bench devices                                # about 20 minutes
//! cargo bench --bench devices -- --tiny --links 0.5,8        # a look whether it runs
//! cargo bench --bench devices -- --model model.gguf --caches 10,25
//! ```
//!
//! At each speed everyone runs in order and then in reverse. Tables (markdown) go to stdout, raw numbers to
//! `benches/results/<machine>/devices-<model>.json`. A bench reports: a missed target is printed, the exit code stays 0.

mod report;
mod run;
#[path = "../shared/verdict.rs"]
mod verdict;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use gguf_tools::synth::{Spec, write};
use hobbit::options::CpuHelper;
use lagging_device::Device;

use run::{Contestant, Run, Settings};

/// hobbit on a device behind a throttled link
#[derive(Debug, Parser)]
struct Args {
    /// Model to use instead of a generated one
    #[arg(long, value_name = "FILE", conflicts_with = "tiny")]
    model: Option<PathBuf>,
    /// A model of a few MB, for a look whether everything runs
    #[arg(long)]
    tiny: bool,
    /// Speeds of the link in GB/s
    #[arg(long, value_name = "GB/S,...", value_delimiter = ',', default_value = "0.25,0.5,1,2,4,8,16")]
    links: Vec<f64>,
    /// Seconds before each copy begins
    #[arg(long, value_name = "S", default_value_t = 1e-5)]
    latency: f64,
    /// Device caches in percent of all experts
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "25,50")]
    caches: Vec<f64>,
    /// Tokens of the prompt, evaluated in one batch
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=2048))]
    prompt_tokens: u32,
    /// Tokens decoded
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    decode_tokens: u32,
    /// Repetitions of the order
    #[arg(long, value_name = "R", default_value_t = 1)]
    rounds: u32,
    /// Threads that are the device [default: half of the cores]
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=256))]
    device_threads: Option<u32>,
    /// Threads of the CPU [default: the other half]
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(i32).range(1..=256))]
    threads: Option<i32>,
    /// Where raw numbers go [default: benches/results/<machine>/devices-<model>.json]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where the model is generated, or found again
    #[arg(long, value_name = "DIR", default_value = env!("CARGO_TARGET_TMPDIR"), hide_default_value = true)]
    dir: PathBuf,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// 420 MiB in 256 experts of 1.6 MiB, of which a token uses 32.
fn spec() -> Spec {
    Spec { layers: 8, embd: 1024, ff: 512, experts: 32, topk: 4, heads: 8, ..Spec::tiny("qwen3moe") }
}

fn model(args: &Args) -> Result<(String, PathBuf)> {
    if let Some(path) = &args.model {
        let stem = path.file_stem().context("--model: expected a file")?.to_string_lossy();
        return Ok((hobbit_programs::bench::host::sanitised(&stem), path.clone()));
    }
    let (name, spec) = if args.tiny { ("tiny", Spec::tiny("qwen3moe")) } else { ("qwen3moe-420mib", spec()) };
    let path = args.dir.join(format!("devices-{name}.gguf"));
    if !path.exists() {
        std::fs::create_dir_all(&args.dir).with_context(|| format!("--dir {}", args.dir.display()))?;
        write(&path, &spec)?;
    }
    Ok((name.to_owned(), path))
}

fn main() -> Result<()> {
    if std::env::args_os().len() == 1 {
        println!("devices: nothing to do for cargo test; run it with cargo bench");
        return Ok(());
    }
    let args = Args::parse();
    let n_links = args.links.len();
    let most = lagging_device::DEVICES_MAX;
    ensure!((1..=most).contains(&n_links), "--links: found {n_links} speeds, expected 1 to {most}");
    ensure!(args.links.iter().all(|link| *link > 0.0), "--links: expected speeds above 0 GB/s");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let device_threads = args.device_threads.map_or((cores / 2).max(1), |n| n as usize);
    // Before anything looks at ggml's list of devices.
    let devices: Vec<Device> = args
        .links
        .iter()
        .map(|link| {
            lagging_device::register(lagging_device::Options {
                memory: 64 << 30,
                link_latency: args.latency,
                link_bandwidth: link * 1e9,
                n_threads: device_threads,
                real_time: true,
                ..lagging_device::Options::default()
            })
        })
        .collect();
    hobbit::set_log(|level, text| {
        if level == hobbit::LogLevel::Error {
            eprint!("{text}");
        }
    });
    let (name, path) = model(&args)?;
    let settings = Settings {
        name,
        path,
        prompt_tokens: args.prompt_tokens as usize,
        decode_tokens: args.decode_tokens as usize,
        threads: args.threads.unwrap_or((cores - cores / 2).max(1) as i32),
        device_threads,
        link_latency_seconds: args.latency,
    };
    let of_cache = |&cache_percent: &f64| {
        [CpuHelper::Off, CpuHelper::On, CpuHelper::Auto].map(|helper| Contestant::Hobbit { cache_percent, helper })
    };
    let everyone: Vec<_> = [Contestant::Stock].into_iter().chain(args.caches.iter().flat_map(of_cache)).collect();
    let order: Vec<Contestant> = everyone.iter().chain(everyone.iter().rev()).copied().collect();
    let mut runs: Vec<Run> = Vec::new();
    for (device, &link) in devices.iter().zip(&args.links) {
        for contestant in order.repeat(args.rounds as usize) {
            eprintln!("{link} GB/s: {contestant}");
            let run = run::run(&settings, contestant, device, link);
            runs.push(run.with_context(|| format!("{contestant} at {link} GB/s"))?);
        }
    }
    report::finish(&settings, &everyone, &runs, args.json.as_deref())
}
