//! Experts on a device behind a throttled link, over a sweep of link speeds: missing experts copied, computed on the
//! CPU, or whichever is sooner, against llama.cpp with its experts on the CPU and op-offload.
//!
//! The device is the tests' own ([`lagging_device`]), in real time: it computes on CPU threads, and each copy takes as
//! long as the link says. The bench shows the balance between copying and computing, not the speed of a GPU. All
//! weights are in host memory before anything is measured; decoding is teacher-forced, on real text.
//!
//! ```text
//! cargo bench --bench devices                                # about 20 minutes
//! cargo bench --bench devices -- --tiny --links 0.5,8        # a look whether it runs
//! cargo bench --bench devices -- --model model.gguf --caches 10,25
//! ```
//!
//! At each speed all contestants run in order and then in reverse. A table (markdown) goes to stdout, raw numbers to
//! `benches/results/<machine>/devices-<model>.json`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use gguf_tools::synth::{Spec, write};
use hobbit::engine::{Stock, StockOptions};
use hobbit::options::{CpuHelper, DeviceChoice};
use hobbit::stats::DeviceCounters;
use hobbit::{DeviceOptions, ModelOptions, SessionOptions, Token};
use hobbit_core::plan::ExpertCache;
use hobbit_programs::bench::engine::{Engine, Hobbit};
use hobbit_programs::bench::host::{Host, sanitised};
use lagging_device::Device;
use serde::Serialize;
use serde_json::json;

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
    rounds: usize,
    /// Threads of the device, and of the CPU [default: half of the cores each]
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: Option<u32>,
    /// Where raw numbers go [default: benches/results/<machine>/devices-<model>.json]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// A way to run the model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Contestant {
    /// Plain llama.cpp: experts on the CPU, of large batches copied to the device (`--n-cpu-moe` all, op-offload on).
    Stock,
    /// hobbit with a device cache of so many percent of all experts.
    Hobbit { cache_percent: f64, helper: CpuHelper },
}

impl fmt::Display for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Contestant::Stock => f.write_str("llama.cpp, experts on the CPU"),
            Contestant::Hobbit { cache_percent, helper } => {
                write!(f, "hobbit, {cache_percent}% on the device, CPU helper {helper}")
            }
        }
    }
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
struct Run {
    contestant: Contestant,
    link_gb_per_second: f64,
    prompt_seconds: f64,
    /// Decoding, token by token.
    step_seconds: Vec<f64>,
    /// Bytes over the link while decoding, per token.
    link_bytes_per_token: f64,
    /// The device's counts for the prompt, and for the tokens after it.
    prompt_device: Option<DeviceCounters>,
    decode_device: Option<DeviceCounters>,
}

fn model(args: &Args) -> Result<(String, PathBuf)> {
    if let Some(path) = &args.model {
        let stem = path.file_stem().context("--model: expected a file")?.to_string_lossy();
        return Ok((sanitised(&stem), path.clone()));
    }
    // 420 MiB in 256 experts of 1.6 MiB, of which a token uses 32.
    let large = Spec { layers: 8, embd: 1024, ff: 512, experts: 32, topk: 4, heads: 8, ..Spec::tiny("qwen3moe") };
    let (name, spec) = if args.tiny { ("tiny", Spec::tiny("qwen3moe")) } else { ("qwen3moe-420mib", large) };
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("devices-{name}.gguf"));
    if !path.exists() {
        write(&path, &spec)?;
    }
    Ok((name.to_owned(), path))
}

/// Opens a contestant, reads everything into host memory, and times a prompt and single tokens.
fn run(args: &Args, path: &Path, threads: u32, contestant: Contestant, device: &Device, link: f64) -> Result<Run> {
    let devices = DeviceChoice::Named(vec![device.name().into()]);
    // A prompt is one batch.
    let n_batch = args.prompt_tokens.max(32);
    let session = SessionOptions {
        n_ctx: (args.prompt_tokens + args.decode_tokens + 1).next_multiple_of(256),
        n_batch,
        n_ubatch: n_batch,
        threads: Some(threads as i32),
        ..SessionOptions::default()
    };
    let mut engine: Box<dyn Engine> = match contestant {
        Contestant::Stock => {
            let stock = StockOptions {
                device: DeviceOptions { devices, n_cpu_moe: u32::MAX, ..DeviceOptions::default() },
                n_gpu_layers: 999,
                load_mode: Some("none".to_owned()),
                repack: false,
                routes: None,
                adapters: Default::default(),
            };
            Box::new(Stock::open(path, &stock, &session)?)
        }
        Contestant::Hobbit { cache_percent, helper: cpu_helper } => {
            let cache = ExpertCache::Percent(cache_percent);
            let device = DeviceOptions { devices, cache, cpu_helper, headroom: 0.0, ..DeviceOptions::default() };
            let expert_cache = ExpertCache::Percent(100.0);
            Box::new(Hobbit::open(path, &ModelOptions { expert_cache, device, ..ModelOptions::default() }, &session)?)
        }
    };
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo-heldout-prose.txt");
    let text = std::fs::read_to_string(text).context("models/demo-heldout-prose.txt")?;
    let tokens: Vec<Token> = engine.bos().into_iter().chain(engine.tokenize(&text)?).collect();
    let (n_prompt, n_decode) = (args.prompt_tokens as usize, args.decode_tokens as usize);
    ensure!(tokens.len() >= n_prompt + n_decode, "the text has {} tokens", tokens.len());
    let (prompt, rest) = tokens.split_at(n_prompt);
    let decoded = &rest[..n_decode];

    engine.feed(prompt)?;
    decoded.chunks(1).try_for_each(|token| engine.feed(token))?;
    engine.clear();

    let at_start = engine.device();
    let started = Instant::now();
    engine.feed(prompt)?;
    let prompt_seconds = started.elapsed().as_secs_f64();
    let at_prompt = engine.device();
    let bytes = device.report().copied_bytes;
    let step_seconds = decoded.chunks(1).map(|token| {
        let started = Instant::now();
        engine.feed(token).map(|()| started.elapsed().as_secs_f64())
    });
    let step_seconds = step_seconds.collect::<Result<Vec<_>>>()?;
    let bytes = device.report().copied_bytes - bytes;
    ensure!(device.faults().is_empty(), "the device found fault: {}", device.faults().join("; "));
    Ok(Run {
        contestant,
        link_gb_per_second: link,
        prompt_seconds,
        step_seconds,
        link_bytes_per_token: bytes as f64 / n_decode as f64,
        prompt_device: at_start.zip(at_prompt).map(|(before, after)| after - before),
        decode_device: at_prompt.zip(engine.device()).map(|(before, after)| after - before),
    })
}

fn table(args: &Args, contestants: &[Contestant], runs: &[Run]) {
    println!("\n| link GB/s | | prompt t/s | decode t/s | link MB/token | hits | by the CPU, of misses |");
    println!("|---|---|---|---|---|---|---|");
    let percent = |part: u64, whole: u64| {
        if whole == 0 { "-".to_owned() } else { format!("{:.1}%", 100.0 * part as f64 / whole as f64) }
    };
    for &link in &args.links {
        for &contestant in contestants {
            let runs = runs.iter().filter(|run| run.contestant == contestant && run.link_gb_per_second == link);
            let runs: Vec<&Run> = runs.collect();
            let mean = |of: &dyn Fn(&Run) -> f64| runs.iter().map(|run| of(run)).sum::<f64>() / runs.len() as f64;
            let count = |of: fn(DeviceCounters) -> u64| runs.iter().filter_map(|run| run.decode_device).map(of).sum();
            let (hits, misses): (u64, u64) = (count(|device| device.hits), count(|device| device.misses));
            println!(
                "| {link} | {contestant} | {:.1} | {:.2} | {:.2} | {} | {} |",
                f64::from(args.prompt_tokens) / mean(&|run| run.prompt_seconds),
                f64::from(args.decode_tokens) / mean(&|run| run.step_seconds.iter().sum()),
                mean(&|run| run.link_bytes_per_token) / 1e6,
                percent(hits, hits + misses),
                percent(count(|device| device.helper_experts), misses),
            );
        }
    }
}

fn main() -> Result<()> {
    if std::env::args_os().len() == 1 {
        println!("devices: nothing to do for cargo test; run it with cargo bench");
        return Ok(());
    }
    let args = Args::parse();
    ensure!(args.links.iter().all(|link| *link > 0.0), "--links: expected speeds above 0 GB/s");
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u32;
    let threads = args.threads.unwrap_or((cores / 2).max(1));
    // Before anything looks at ggml's list of devices.
    let device = |link: &f64| {
        lagging_device::register(lagging_device::Options {
            memory: 64 << 30,
            link_latency: args.latency,
            link_bandwidth: link * 1e9,
            n_threads: threads as usize,
            real_time: true,
            ..lagging_device::Options::default()
        })
    };
    let devices: Vec<Device> = args.links.iter().map(device).collect();
    hobbit::set_log(|level, text| {
        if level == hobbit::LogLevel::Error {
            eprint!("{text}");
        }
    });
    let (name, path) = model(&args)?;
    let of_cache = |&cache_percent: &f64| {
        [CpuHelper::Off, CpuHelper::On, CpuHelper::Auto].map(|helper| Contestant::Hobbit { cache_percent, helper })
    };
    let contestants: Vec<_> = [Contestant::Stock].into_iter().chain(args.caches.iter().flat_map(of_cache)).collect();
    let order: Vec<Contestant> = contestants.iter().chain(contestants.iter().rev()).copied().collect();
    let mut runs: Vec<Run> = Vec::new();
    for (device, &link) in devices.iter().zip(&args.links) {
        for contestant in order.repeat(args.rounds) {
            eprintln!("{link} GB/s: {contestant}");
            let run = run(&args, &path, threads, contestant, device, link);
            runs.push(run.with_context(|| format!("{contestant} at {link} GB/s"))?);
        }
    }
    let host = Host::describe(&path);
    println!("\n{name}: prompt of {} tokens, {} decoded; {}", args.prompt_tokens, args.decode_tokens, host.machine);
    table(&args, &contestants, &runs);
    let results = || Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/results").join(&host.machine);
    let json = args.json.clone().unwrap_or_else(|| results().join(format!("devices-{name}.json")));
    let settings = json!({
        "prompt_tokens": args.prompt_tokens,
        "decode_tokens": args.decode_tokens,
        "threads": threads,
        "device_threads": threads,
        "link_latency_seconds": args.latency,
    });
    let raw = json!({ "host": host, "model": name, "settings": settings, "runs": runs });
    std::fs::write(&json, serde_json::to_string_pretty(&raw)? + "\n").with_context(|| json.display().to_string())?;
    eprintln!("raw numbers: {}", json.display());
    Ok(())
}
