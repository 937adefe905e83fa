//! One row: an engine on the device, and what it took.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use hobbit::engine::{Stock, StockOptions};
use hobbit::options::{DeviceChoice, Repack};
use hobbit::{DeviceOptions, Token};
use hobbit_core::gguf::Gguf;
use hobbit_core::profile::{Loss, log_softmax};
use hobbit_programs::bench::engine::{Engine, Hobbit};
use hobbit_programs::bench::{Case, Test};
use lagging_device::{Device, Options, Report};
use serde::Serialize;

use crate::Args;
use crate::shapes::{EXACT, Shape};

/// Tokens of the prompt that warms the caches and, without `--prompt-tokens`, is timed; and tokens before the decoded
/// ones, of which the last are evaluated one at a time.
pub const PROMPT: u32 = 512;
const BEFORE: u32 = 28;
const UNCOUNTED: u32 = 16;

/// A row of the table: its name and its flags.
#[derive(Clone, Debug)]
pub struct Arm {
    pub name: String,
    /// hobbit's flags; `None`: llama.cpp.
    pub flags: Option<String>,
}

/// A row of the table, for the full model.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    pub shape: String,
    pub row: String,
    pub flags: Option<String>,
    pub decode_tokens_per_second: f64,
    pub prompt_tokens_per_second: f64,
    pub requests: Vec<Request>,
    /// Seconds of a decoded token in which the link and the device are busy, and the CPU computes experts.
    pub link_seconds: f64,
    pub device_seconds: f64,
    pub cpu_seconds: f64,
    /// Bytes of experts that a decoded token copies to the device and reads from files.
    pub link_bytes: f64,
    pub file_bytes: f64,
    /// Median CPU seconds of the host for a layer whose experts are all on the device, from the router's choice to the
    /// submission of its products: the one time here that is real.
    pub hit_layer_host_seconds: f64,
    pub hits: u64,
    pub misses: u64,
    pub helper_experts: u64,
    pub high_uses: u64,
    pub low_uses: u64,
    pub skipped_uses: u64,
    pub rerouted_uses: u64,
    /// Distance of the decoded tokens' predictions from those of [`EXACT`]: mean KL divergence in nats, and the
    /// logarithm of the ratio of perplexities.
    pub kl: Option<f64>,
    pub log_perplexity_increase: Option<f64>,
    pub error: Option<String>,
}

/// A prompt, and tokens decoded after it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Request {
    pub prompt_tokens: u32,
    pub decode_tokens: u32,
    pub prompt_seconds: f64,
    pub decode_seconds: f64,
}

/// Evaluates tokens, and waits for the last one's logits.
fn feed(engine: &mut dyn Engine, tokens: &[Token]) -> Result<()> {
    engine.feed(tokens)?;
    engine.logits().map(|_| ()).context("no logits")
}

pub fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models")
}

/// Experts that llama.cpp's CPU computes beside the device: bytes for a token, and their number in a layer.
#[derive(Default)]
struct OnCpu {
    token_bytes: f64,
    experts: f64,
    used: f64,
}

impl OnCpu {
    /// Bytes for a batch of `n` tokens that choose experts evenly: those of at least 32 tokens go to the device
    /// (op-offload).
    fn bytes(&self, n: u32) -> f64 {
        if n == 1 || self.used == 0.0 {
            return self.token_bytes;
        }
        let chosen = self.experts * (1.0 - (1.0 - self.used / self.experts).powi(n as i32));
        if n < 32 { self.token_bytes * chosen / self.used } else { 0.0 }
    }
}

/// Clocks stretches of work of one engine.
struct Timer<'a> {
    device: &'a Device,
    options: &'a Options,
    on_cpu: OnCpu,
    depth: f64,
    /// Tokens that llama.cpp computes at once; the CPU has experts of the last, shorter batch alone.
    ubatch: u32,
}

impl Timer<'_> {
    /// Seconds of the full model for what was measured, which evaluated batches of so many tokens. llama.cpp's CPU and
    /// device take turns.
    fn seconds(&self, measured: &Measured, batches: &[u32]) -> f64 {
        let on_cpu: f64 = batches.iter().map(|n| self.on_cpu.bytes(*n)).sum();
        (measured.report.host_time + on_cpu / self.options.host_bandwidth) * self.depth
    }

    fn request(&self, engine: &mut dyn Engine, history: &[Token], tokens: &[Token], n_prompt: u32) -> Result<Request> {
        let (prompt, decoded) = tokens.split_at(n_prompt as usize);
        engine.clear();
        if !history.is_empty() {
            feed(engine, history)?;
        }
        let started = measure(self.device, engine);
        feed(engine, prompt)?;
        let read = started.until(self.device, engine);
        let started = measure(self.device, engine);
        decoded.chunks(1).try_for_each(|token| feed(engine, token))?;
        let written = started.until(self.device, engine);
        Ok(Request {
            prompt_tokens: n_prompt,
            decode_tokens: decoded.len() as u32,
            prompt_seconds: self.seconds(&read, &[n_prompt % self.ubatch]),
            decode_seconds: self.seconds(&written, &vec![1; decoded.len()]),
        })
    }
}

/// Runs llama.cpp, or hobbit with the arm's flags. `exact`: log-probabilities after each decoded token, which the row
/// [`EXACT`] sets.
pub fn run(args: &Args, shape: &Shape, percent: u32, path: &Path, arm: &Arm, exact: &mut Vec<Vec<f32>>) -> Result<Row> {
    let flags = arm.flags.as_deref();
    let (factor, depth) = (shape.factor(), shape.depth());
    // The share of experts is given, and llama.cpp's buffers shrink less than weights.
    let options = Options { memory: 64 << 30, ..args.machine.options().scaled(factor) };
    let device = lagging_device::register(options.clone());
    let flag = |flag: &str| format!("--{}", flag.trim().replacen(' ', "=", 1));
    let mut words: Vec<String> = flags.unwrap_or_default().split("--").skip(1).map(flag).collect();
    let (device_cache, expert_cache) = if options.unified { (100, percent) } else { (percent, args.host_percent) };
    words.extend([format!("--device={}", device.name()), "--device-headroom=0%".to_owned()]);
    // An arm may have less than the machine.
    if !flags.is_some_and(|flags| flags.contains("--device-cache")) {
        words.push(format!("--device-cache={device_cache}%"));
    }
    words.push(format!("--expert-cache={expert_cache}%"));
    let file = |files: &[(String, PathBuf)], flag: &str| {
        let (_, file) = files.iter().find(|(name, _)| name == shape.name)?;
        Some(format!("--{flag}={}", file.display()))
    };
    words.extend(file(&args.routes, "routes"));
    if flags.is_some_and(|flags| flags.contains("edgemoe")) {
        words.extend(file(&args.path_tables, "path-table"));
    }
    let n_decoded = args.decode_tokens.iter().copied().max().unwrap_or_default();
    let n_prompt = args.prompt_tokens.iter().copied().max().unwrap_or(PROMPT);
    let case = Case {
        model: path.to_owned(),
        words,
        n_batch: args.ubatch.max(PROMPT),
        n_ubatch: args.ubatch,
        type_k: "f16".to_owned(),
        type_v: "f16".to_owned(),
        flash_attn: "auto".to_owned(),
        threads: 1,
        test: Test { n_prompt: n_prompt.max(PROMPT), n_gen: n_decoded, n_depth: args.history },
        ..Case::default()
    };
    let session = case.session_options()?;
    let mut timer = Timer { device: &device, options: &options, on_cpu: OnCpu::default(), depth, ubatch: args.ubatch };
    let mut name = arm.name.clone();
    let mut engine: Box<dyn Engine> = match flags {
        Some(_) => {
            let mut hobbit = Hobbit::open(path, &case.model_options()?, &session)?;
            // Experts are in host memory, low versions too, as after some time of use.
            hobbit.touch_all()?;
            Box::new(hobbit)
        }
        None => {
            let layers = Gguf::open(path)?.experts()?.layers;
            let n_on_cpu = layers.len() - layers.len() * percent as usize / 100;
            let on_cpu = &layers[..n_on_cpu];
            // Dense layers at the beginning count, too.
            let n_cpu_moe = on_cpu.last().map_or(0, |layer| u32::from(layer.layer) + 1);
            let slice_bytes: u64 = on_cpu.iter().flat_map(|layer| &layer.tensors).map(|t| t.slice_bytes).sum();
            let used = f64::from(shape.spec.topk);
            timer.on_cpu =
                OnCpu { token_bytes: slice_bytes as f64 * used, experts: f64::from(shape.spec.experts), used };
            name = format!("{name}, --n-cpu-moe {n_cpu_moe} of {}", shape.spec.layers);
            let devices = DeviceChoice::Named(vec![device.name().into()]);
            let stock = StockOptions {
                device: DeviceOptions { devices, n_cpu_moe, ..DeviceOptions::default() },
                n_gpu_layers: 999,
                load_mode: Some("none".to_owned()),
                repack: Repack::Off,
                routes: None,
                adapters: Default::default(),
            };
            Box::new(Stock::open(path, &stock, &session)?)
        }
    };
    let engine = &mut *engine;
    let text = std::fs::read_to_string(models().join(shape.text)).context(shape.text)?;
    let n_read = [PROMPT, BEFORE, UNCOUNTED, n_decoded + 1, n_prompt, n_decoded].into_iter().sum::<u32>();
    let tokens: Vec<Token> = engine.tokenize(&text)?.into_iter().cycle().take(n_read as usize).collect();
    let history: Vec<Token> = tokens.iter().rev().copied().cycle().take(args.history as usize).collect();
    let (prompt, rest) = tokens.split_at(PROMPT as usize);
    let (before, rest) = rest.split_at((BEFORE + UNCOUNTED) as usize);
    // And the token after them.
    let (decoded, after) = rest.split_at(n_decoded as usize + 1);

    // Fills host memory.
    feed(engine, prompt)?;
    engine.clear();
    feed(engine, &before[..BEFORE as usize])?;
    before[BEFORE as usize..].chunks(1).try_for_each(|token| feed(engine, token))?;
    let decode = measure(&device, engine);
    let mut loss = Loss::default();
    for (at, pair) in decoded.windows(2).enumerate() {
        feed(engine, &pair[..1])?;
        let logits = engine.logits().context("no logits")?;
        if flags == Some(EXACT) && exact.len() == at {
            exact.push(Vec::new());
            log_softmax(logits, &mut exact[at]);
        }
        if flags.is_some()
            && let Some(exact) = exact.get(at)
        {
            loss.add(exact, logits, pair[1] as usize);
        }
    }
    let decode = decode.until(&device, engine);
    let lost = |of: fn(&Loss) -> f64| (flags.is_some() && !exact.is_empty()).then(|| of(&loss));
    let requests = if args.prompt_tokens.is_empty() {
        vec![timer.request(engine, &history, prompt, PROMPT)?]
    } else {
        let lengths = args.prompt_tokens.iter().flat_map(|p| args.decode_tokens.iter().map(move |d| (*p, *d)));
        let request = |(n_prompt, n_decoded): (u32, u32)| {
            timer.request(engine, &history, &after[..(n_prompt + n_decoded) as usize], n_prompt)
        };
        lengths.map(request).collect::<Result<_>>()?
    };
    ensure!(device.faults().is_empty(), "the device found fault: {}", device.faults().join("; "));

    let per_token = |value: f64| value / f64::from(n_decoded);
    let decode_seconds = timer.seconds(&decode, &vec![1; n_decoded as usize]);
    let longest = requests.iter().max_by_key(|request| request.prompt_tokens).context("no request")?;
    Ok(Row {
        shape: shape.name.to_owned(),
        row: name,
        flags: arm.flags.clone(),
        decode_tokens_per_second: f64::from(n_decoded) / decode_seconds,
        prompt_tokens_per_second: f64::from(longest.prompt_tokens) / longest.prompt_seconds,
        link_seconds: per_token(decode.report.copy_busy) * depth,
        device_seconds: per_token(decode.report.compute_busy) * depth,
        cpu_seconds: (per_token(decode.row.cpu_seconds) + timer.on_cpu.bytes(1) / options.host_bandwidth) * depth,
        link_bytes: per_token(decode.row.link_bytes) * factor * depth,
        hit_layer_host_seconds: median(decode.report.host_work),
        file_bytes: per_token(decode.row.file_bytes) * factor * depth,
        kl: lost(Loss::kl),
        log_perplexity_increase: lost(Loss::log_increase),
        requests,
        ..decode.row
    })
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(0.0)
}

/// Counts so far, of the small model.
struct Measured {
    report: Report,
    row: Row,
}

fn measure(device: &Device, engine: &dyn Engine) -> Measured {
    let mut row = Row::default();
    if let Some(stats) = engine.stats() {
        let used = stats.decode.used;
        (row.high_uses, row.low_uses, row.skipped_uses) = (used.high, used.low, used.skipped);
        row.rerouted_uses = stats.decode.rerouted.uses;
        row.file_bytes = (stats.prompt.bytes_read + stats.decode.bytes_read) as f64;
        (row.hits, row.misses) = (stats.decode.hits, stats.decode.misses);
        if let Some(device) = stats.devices.first().filter(|device| device.hits + device.misses > 0) {
            (row.hits, row.misses, row.helper_experts) = (device.hits, device.misses, device.helper_experts);
            (row.link_bytes, row.cpu_seconds) = (device.uploaded_bytes as f64, device.helper_seconds);
        }
    }
    Measured { report: device.report(), row }
}

impl Measured {
    fn until(self, device: &Device, engine: &dyn Engine) -> Measured {
        let Measured { report, row } = measure(device, engine);
        Measured {
            report: Report {
                host_time: report.host_time - self.report.host_time,
                copy_busy: report.copy_busy - self.report.copy_busy,
                compute_busy: report.compute_busy - self.report.compute_busy,
                host_work: report.host_work[self.report.host_work.len()..].to_vec(),
                ..report
            },
            row: Row {
                cpu_seconds: row.cpu_seconds - self.row.cpu_seconds,
                link_bytes: row.link_bytes - self.row.link_bytes,
                file_bytes: row.file_bytes - self.row.file_bytes,
                hits: row.hits - self.row.hits,
                misses: row.misses - self.row.misses,
                helper_experts: row.helper_experts - self.row.helper_experts,
                high_uses: row.high_uses - self.row.high_uses,
                low_uses: row.low_uses - self.row.low_uses,
                skipped_uses: row.skipped_uses - self.row.skipped_uses,
                rerouted_uses: row.rerouted_uses - self.row.rerouted_uses,
                ..row
            },
        }
    }
}
