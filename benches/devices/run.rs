//! One run: everything into host memory, then a prompt and single tokens, timed.

use std::fmt;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use hobbit::engine::{Stock, StockOptions};
use hobbit::options::{CpuHelper, DeviceChoice};
use hobbit::stats::DeviceCounters;
use hobbit::{DeviceOptions, ModelOptions, SessionOptions, Token};
use hobbit_core::plan::ExpertCache;
use hobbit_programs::bench::engine::{Engine, Hobbit};
use lagging_device::Device;
use serde::Serialize;

/// Real text: what is read first is the prompt, what follows is "decoded".
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo-heldout-prose.txt");

/// A way to run the model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Contestant {
    /// Plain llama.cpp: experts on the CPU, of large batches copied to the device (`--n-cpu-moe` all, op-offload on).
    Stock,
    /// hobbit with a device cache of so many percent of all experts, and what becomes of the missing ones.
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

/// What all runs have in common.
#[derive(Clone, Debug, Serialize)]
pub struct Settings {
    #[serde(skip)]
    pub name: String,
    #[serde(skip)]
    pub path: PathBuf,
    pub prompt_tokens: usize,
    pub decode_tokens: usize,
    pub threads: i32,
    pub device_threads: usize,
    pub link_latency_seconds: f64,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    pub contestant: Contestant,
    pub link_gb_per_second: f64,
    pub prompt_tokens: usize,
    pub prompt_seconds: f64,
    pub decode_tokens: usize,
    /// Of each token.
    pub step_seconds: Vec<f64>,
    /// Bytes over the link while decoding, per token.
    pub link_bytes_per_token: f64,
    /// What the device did for the prompt, and for the tokens after it.
    pub prompt_device: Option<DeviceCounters>,
    pub decode_device: Option<DeviceCounters>,
}

impl Run {
    pub fn decode_seconds(&self) -> f64 {
        self.step_seconds.iter().sum()
    }
}

/// Opens a contestant and measures it.
pub fn run(settings: &Settings, contestant: Contestant, device: &Device, link_gb_per_second: f64) -> Result<Run> {
    let mut engine = open(settings, contestant, device)?;
    let text = std::fs::read_to_string(TEXT).context("models/demo-heldout-prose.txt")?;
    let tokens: Vec<Token> = engine.bos().into_iter().chain(engine.tokenize(&text)?).collect();
    let wanted = settings.prompt_tokens + settings.decode_tokens;
    ensure!(tokens.len() >= wanted, "the text has {} tokens, {wanted} are wanted", tokens.len());
    let (prompt, rest) = tokens.split_at(settings.prompt_tokens);
    let decoded = &rest[..settings.decode_tokens];

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
        link_gb_per_second,
        prompt_tokens: prompt.len(),
        prompt_seconds,
        decode_tokens: decoded.len(),
        step_seconds,
        link_bytes_per_token: bytes as f64 / decoded.len() as f64,
        prompt_device: at_start.zip(at_prompt).map(|(before, after)| after - before),
        decode_device: at_prompt.zip(engine.device()).map(|(before, after)| after - before),
    })
}

/// llama.cpp with its experts on the CPU and everything else on the device, or hobbit.
fn open(settings: &Settings, contestant: Contestant, device: &Device) -> Result<Box<dyn Engine>> {
    let devices = DeviceChoice::Named(vec![device.name().into()]);
    // A prompt is one batch.
    let n_batch = settings.prompt_tokens.max(32) as u32;
    let session = SessionOptions {
        n_ctx: (settings.prompt_tokens + settings.decode_tokens + 1).next_multiple_of(256) as u32,
        n_batch,
        n_ubatch: n_batch,
        threads: Some(settings.threads),
        ..SessionOptions::default()
    };
    Ok(match contestant {
        Contestant::Stock => {
            let stock = StockOptions {
                device: DeviceOptions { devices, n_cpu_moe: u32::MAX, ..DeviceOptions::default() },
                n_gpu_layers: 999,
                load_mode: Some("none".to_owned()),
                repack: false,
                routes: None,
                adapters: Default::default(),
            };
            Box::new(Stock::open(&settings.path, &stock, &session)?)
        }
        Contestant::Hobbit { cache_percent, helper } => {
            let device = DeviceOptions {
                devices,
                cache: ExpertCache::Percent(cache_percent),
                cpu_helper: helper,
                headroom: 0.0,
                ..DeviceOptions::default()
            };
            let expert_cache = ExpertCache::Percent(100.0);
            let options = ModelOptions { expert_cache, device, ..ModelOptions::default() };
            Box::new(Hobbit::open(&settings.path, &options, &session)?)
        }
    })
}
