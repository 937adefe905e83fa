//! Decoding and prompts on models of real machines: an RTX 4090 with experts in host memory, and a Jetson AGX Orin.
//!
//! The device is the tests' own ([`lagging_device`]) with sourced speeds, and all times are virtual: neither this
//! machine's speed nor its load matters, and nothing here was measured on a GPU. A shape has a known model's layers, or
//! a part of them, with fewer weights in each; the device's rates are divided by the same factor and figures are given
//! for the full model. Host memory holds every expert. Not counted: the host's own work beside waits and expert
//! products, and arithmetic, which bounds prompts on real GPUs.
//!
//! ```text
//! hobbit-sim import qwen.route.csv qwen.trace
//! cargo bench --bench devices -- --routes qwen3-30b=qwen.trace
//! cargo bench --bench devices -- --shapes mixtral-f16 --flags "--low auto;--preset hobbit"
//! cargo bench --bench devices -- --machine orin
//! ```
//!
//! Tables (markdown) go to stdout, raw numbers to `benches/results/<machine>/devices-<machine modelled>.json`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use hobbit::engine::{Stock, StockOptions};
use hobbit::options::DeviceChoice;
use hobbit::{DeviceOptions, Token};
use hobbit_core::gguf::Gguf;
use hobbit_core::profile::{Loss, beside, log_softmax};
use hobbit_core::trace::TraceReader;
use hobbit_programs::bench::engine::{Engine, Hobbit};
use hobbit_programs::bench::host::Host;
use hobbit_programs::bench::{Case, Test};
use hobbit_synth::{Format, Spec, write};
use lagging_device::{Device, Options, Report};
use serde::Serialize;
use serde_json::json;

/// hobbit and llama.cpp on models of real machines, in virtual time
#[derive(Debug, Parser)]
struct Args {
    /// Machine that the device stands for
    #[arg(long, value_enum, default_value = "rtx-4090")]
    machine: Machine,
    /// Shapes to run [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    shapes: Vec<String>,
    /// Flags of hobbit's that make a row each [default: a list]
    #[arg(long, value_name = "FLAGS;...", value_delimiter = ';', allow_hyphen_values = true)]
    flags: Vec<String>,
    /// Traces (hobbit-sim import) whose routes hobbit follows; the model then uses as many experts as were recorded,
    /// and rows that choose other experts are left out
    #[arg(long, value_name = "SHAPE=FILE,...", value_delimiter = ',', value_parser = named_file)]
    routes: Vec<(String, PathBuf)>,
    /// Profiles with measured mixes (gguf-tools profile --max-loss); a shape without one has no row of --max-loss
    #[arg(long, value_name = "SHAPE=FILE,...", value_delimiter = ',', value_parser = named_file)]
    profiles: Vec<(String, PathBuf)>,
    /// EdgeMoE's path tables (gguf-tools profile); a shape without one has no row of EdgeMoE
    #[arg(long, value_name = "SHAPE=FILE,...", value_delimiter = ',', value_parser = named_file)]
    path_tables: Vec<(String, PathBuf)>,
    /// Percent of the experts in the machine's memory [default: the shape's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    percent: Option<u32>,
    /// Tokens decoded
    #[arg(long, value_name = "N", default_value_t = 96, value_parser = clap::value_parser!(u32).range(1..=1024))]
    decode_tokens: u32,
    /// Where raw numbers go
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

fn named_file(text: &str) -> Result<(String, PathBuf), String> {
    let (name, file) = text.split_once('=').ok_or("expected SHAPE=FILE")?;
    Ok((name.to_owned(), file.into()))
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Machine {
    #[value(name = "rtx-4090")]
    Rtx4090,
    #[value(name = "orin")]
    Orin,
}

impl Machine {
    fn options(self) -> Options {
        match self {
            Self::Rtx4090 => Options::rtx_4090(),
            Self::Orin => Options::orin_64gb(),
        }
    }

    /// Rows of the table, by hobbit's flags. Rows without `--cpu-helper` and `--preset` have the helper. The shape's
    /// bound follows `--max-loss`.
    fn rows(self) -> &'static [&'static str] {
        match self {
            Self::Rtx4090 => &[
                EXACT,
                "",
                "--low auto --cpu-helper off",
                "--low auto",
                "--preset hobbit --precision exact",
                "--preset hobbit",
                "--cache-bias 0.1 --cpu-helper off",
                "--cache-bias 0.2 --cpu-helper off",
                "--max-loss --cpu-helper off",
                "--max-loss",
                "--max-loss --low q2_k --cpu-helper off",
                "--max-loss --low q2_k",
                "--preset edgemoe",
                "--preset fate",
                "--preset smoe",
                "--preset swapmoe",
            ],
            Self::Orin => &["", "--low auto", "--preset hobbit", "--cache-bias 0.2"],
        }
    }
}

/// The row that others are compared with.
const EXACT: &str = "--cpu-helper off";

/// A model, made smaller.
struct Shape {
    name: &'static str,
    title: &'static str,
    spec: Spec,
    /// Layers, width and hidden width of the full model.
    full: [u32; 3],
    /// Percent of the experts on the RTX 4090, and in the Orin's memory.
    percents: [u32; 2],
    /// A trained model of this repository, which tells what approximations lose; else one of random weights.
    bundled: Option<&'static str>,
    text: &'static str,
}

impl Shape {
    /// The factor by which each layer's bytes are divided.
    fn factor(&self) -> f64 {
        f64::from(self.full[1]) * f64::from(self.full[2]) / (f64::from(self.spec.embd) * f64::from(self.spec.ff))
    }

    /// The factor by which layers are divided.
    fn depth(&self) -> f64 {
        f64::from(self.full[0]) / f64::from(self.spec.layers)
    }

    /// The loss bound. What a model of random weights loses is noise, and no mix would be below 1 % of it.
    fn max_loss(&self) -> &'static str {
        if self.bundled.is_some() { "--max-loss 1%" } else { "--max-loss 10%" }
    }

    fn percent(&self, machine: Machine) -> u32 {
        self.percents[machine as usize]
    }
}

fn shapes() -> Vec<Shape> {
    let mixtral = |type_| Spec {
        layers: 32,
        embd: 256,
        ff: 1024,
        experts: 8,
        topk: 2,
        heads: 4,
        vocab: 2288,
        // As of `mixtral-8x7b`: demands by T1 and T2 are the paper's.
        router_spread: 1.6,
        types: vec![type_],
        ..Spec::tiny("llama")
    };
    let random = Shape {
        name: "",
        title: "",
        spec: mixtral(Format::F16),
        full: [0; 3],
        percents: [0; 2],
        bundled: None,
        text: "demo-heldout-prose.txt",
    };
    vec![
        Shape {
            name: "mixtral-f16",
            title: "Mixtral-8x7B F16",
            spec: mixtral(Format::F16),
            full: [32, 4096, 14_336],
            percents: [20, 60],
            ..random
        },
        Shape {
            name: "mixtral-q4",
            title: "Mixtral-8x7B Q4_K",
            spec: mixtral(Format::Q4_K),
            full: [32, 4096, 14_336],
            percents: [70, 100],
            ..random
        },
        Shape {
            name: "qwen3-30b",
            title: "Qwen3-30B-A3B Q8_0",
            spec: Spec {
                layers: 12,
                experts: 128,
                topk: 8,
                heads: 10,
                kv_heads: Some(2),
                head_dim: Some(128),
                vocab: 12_672,
                ..Spec::tiny("qwen3moe")
            },
            full: [48, 2048, 768],
            percents: [60, 100],
            ..random
        },
        Shape {
            name: "gpt-oss-120b",
            title: "gpt-oss-120b MXFP4",
            spec: Spec {
                layers: 18,
                embd: 288,
                ff: 288,
                experts: 128,
                topk: 4,
                heads: 6,
                kv_heads: Some(1),
                head_dim: Some(64),
                vocab: 10_048,
                ..Spec::tiny("gpt-oss")
            },
            full: [36, 2880, 2880],
            percents: [30, 80],
            ..random
        },
        Shape {
            name: "fine",
            title: "The bundled fine-grained model, scaled to Qwen3-30B-A3B",
            spec: Spec { experts: 32, topk: 4, ..Spec::tiny("deepseek") },
            full: [48, 2048, 768],
            percents: [25, 100],
            bundled: Some("fine.gguf"),
            text: "fine-heldout-dialogue.txt",
        },
    ]
}

/// Tokens of the prompt that is timed, and before the decoded tokens. The first of these are not counted.
const PROMPT: u32 = 512;
const BEFORE: u32 = 28;
const UNCOUNTED: u32 = 16;

/// Evaluates tokens, and waits for the last one's logits.
fn feed(engine: &mut dyn Engine, tokens: &[Token]) -> Result<()> {
    engine.feed(tokens)?;
    engine.logits().map(|_| ()).context("no logits")
}

/// A row of the table, for the full model.
#[derive(Clone, Debug, Default, Serialize)]
struct Row {
    shape: String,
    row: String,
    decode_tokens_per_second: f64,
    prompt_tokens_per_second: f64,
    /// Seconds of a decoded token in which the link and the device are busy, and the CPU computes experts.
    link_seconds: f64,
    device_seconds: f64,
    cpu_seconds: f64,
    /// Bytes of experts that a decoded token copies to the device and reads from files.
    link_bytes: f64,
    file_bytes: f64,
    /// Median CPU seconds of the host for a layer whose experts are all on the device, from the router's choice to the
    /// submission of its products: the one time here that is real.
    hit_layer_host_seconds: f64,
    hits: u64,
    misses: u64,
    helper_experts: u64,
    high_uses: u64,
    low_uses: u64,
    skipped_uses: u64,
    rerouted_uses: u64,
    /// Distance of the decoded tokens' predictions from those of [`EXACT`]: mean KL divergence in nats, and the
    /// logarithm of the ratio of perplexities.
    kl: Option<f64>,
    log_perplexity_increase: Option<f64>,
    error: Option<String>,
}

/// A model of `shape`, with as many experts per token as routes have, and its profile beside it.
fn model(shape: &mut Shape, routes: Option<&Path>, profile: Option<&Path>) -> Result<PathBuf> {
    if let Some(routes) = routes {
        let reader = TraceReader::open(routes)?;
        shape.spec.topk = reader.header().model.layers.first().map_or(shape.spec.topk, |layer| layer.n_used.into());
    }
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = dir.join(format!("devices-{}-{}.gguf", shape.name, shape.spec.topk));
    match shape.bundled {
        _ if path.exists() => {}
        Some(name) => _ = std::fs::copy(models().join(name), &path).context(name)?,
        None => _ = write(&path, &shape.spec)?,
    }
    if let Some(profile) = profile {
        std::fs::copy(profile, beside(&path)).with_context(|| profile.display().to_string())?;
    }
    Ok(path)
}

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models")
}

/// Runs llama.cpp, or hobbit with the row's flags. `exact`: log-probabilities after each decoded token, which the row
/// [`EXACT`] sets.
fn run(args: &Args, shape: &Shape, path: &Path, flags: Option<&str>, exact: &mut Vec<Vec<f32>>) -> Result<Row> {
    let (factor, depth) = (shape.factor(), shape.depth());
    // The share of experts is given, and llama.cpp's buffers shrink less than weights.
    let options = Options { memory: 64 << 30, ..args.machine.options().scaled(factor) };
    let device = lagging_device::register(options.clone());
    let percent = shape.percent(args.machine);
    let flag = |flag: &str| format!("--{}", flag.trim().replacen(' ', "=", 1));
    let mut words: Vec<String> = flags.unwrap_or_default().split("--").skip(1).map(flag).collect();
    let (device_cache, expert_cache) = if options.unified { (100, percent) } else { (percent, 100) };
    words.extend([format!("--device={}", device.name()), "--device-headroom=0%".to_owned()]);
    words.extend([format!("--device-cache={device_cache}%"), format!("--expert-cache={expert_cache}%")]);
    let file = |files: &[(String, PathBuf)], flag: &str| {
        let (_, file) = files.iter().find(|(name, _)| name == shape.name)?;
        Some(format!("--{flag}={}", file.display()))
    };
    words.extend(file(&args.routes, "routes"));
    if flags.is_some_and(|flags| flags.contains("edgemoe")) {
        words.extend(file(&args.path_tables, "path-table"));
    }
    let case = Case {
        model: path.to_owned(),
        words,
        n_batch: PROMPT,
        n_ubatch: PROMPT,
        type_k: "f16".to_owned(),
        type_v: "f16".to_owned(),
        flash_attn: "auto".to_owned(),
        threads: 1,
        test: Test { n_prompt: PROMPT, n_gen: args.decode_tokens, n_depth: 0 },
        ..Case::default()
    };
    let session = case.session_options()?;
    // Layers whose experts llama.cpp's CPU computes, and their bytes for a token.
    let n_cpu_moe = shape.spec.layers - shape.spec.layers * percent / 100;
    let mut cpu_bytes = 0;
    let mut engine: Box<dyn Engine> = match flags {
        Some(_) => {
            let mut hobbit = Hobbit::open(path, &case.model_options()?, &session)?;
            // Experts are in host memory, low versions too, as after some time of use.
            hobbit.touch_all()?;
            Box::new(hobbit)
        }
        None => {
            let layers = Gguf::open(path)?.experts()?.layers;
            let tensors = layers.iter().take(n_cpu_moe as usize).flat_map(|layer| &layer.tensors);
            cpu_bytes = tensors.map(|tensor| tensor.slice_bytes * u64::from(shape.spec.topk)).sum();
            let devices = DeviceChoice::Named(vec![device.name().into()]);
            let stock = StockOptions {
                device: DeviceOptions { devices, n_cpu_moe, ..DeviceOptions::default() },
                n_gpu_layers: 999,
                load_mode: Some("none".to_owned()),
                repack: false,
                routes: None,
                adapters: Default::default(),
            };
            Box::new(Stock::open(path, &stock, &session)?)
        }
    };
    let engine = &mut *engine;
    let text = std::fs::read_to_string(models().join(shape.text)).context(shape.text)?;
    let tokens = engine.tokenize(&text)?;
    let (prompt, rest) = tokens.split_at(PROMPT as usize);
    let (before, rest) = rest.split_at((BEFORE + UNCOUNTED) as usize);
    // And the token after them.
    let decoded = rest.get(..=args.decode_tokens as usize).context("--decode-tokens: the text is shorter")?;

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
        if flags == Some(EXACT) {
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
    engine.clear();
    let evaluate = measure(&device, engine);
    feed(engine, prompt)?;
    let evaluate = evaluate.until(&device, engine);
    ensure!(device.faults().is_empty(), "the device found fault: {}", device.faults().join("; "));

    let per_token = |value: f64| value / f64::from(args.decode_tokens);
    let file_bytes = per_token(decode.row.file_bytes);
    // llama.cpp's CPU and device take turns; its CPU computes no prompt of this length (op-offload).
    let stock_seconds = cpu_bytes as f64 / options.host_bandwidth;
    // Not overlapped with anything, so an upper bound.
    let file_seconds = |bytes: f64| bytes * factor / Options::ORIN_DISK;
    let token_seconds = per_token(decode.report.host_time) + stock_seconds + file_seconds(file_bytes);
    let prompt_seconds = evaluate.report.host_time + file_seconds(evaluate.row.file_bytes);
    let prompt_tokens_per_second = f64::from(PROMPT) / prompt_seconds / depth;
    Ok(Row {
        shape: shape.name.to_owned(),
        row: flags.map_or_else(|| format!("llama.cpp, --n-cpu-moe {n_cpu_moe} of {}", shape.spec.layers), named),
        decode_tokens_per_second: 1.0 / token_seconds / depth,
        prompt_tokens_per_second,
        link_seconds: per_token(decode.report.copy_busy) * depth,
        device_seconds: per_token(decode.report.compute_busy) * depth,
        cpu_seconds: (per_token(decode.row.cpu_seconds) + stock_seconds) * depth,
        link_bytes: per_token(decode.row.link_bytes) * factor * depth,
        hit_layer_host_seconds: median(decode.report.host_work),
        file_bytes: file_bytes * factor * depth,
        kl: lost(Loss::kl),
        log_perplexity_increase: lost(Loss::log_increase),
        ..decode.row
    })
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(0.0)
}

fn named(flags: &str) -> String {
    match flags {
        "" => "hobbit, exact with helper (default)".to_owned(),
        EXACT => "hobbit, exact without helper".to_owned(),
        flags => format!("hobbit {flags}"),
    }
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

fn table(shape: &Shape, machine: Machine, is_recorded: bool, rows: &[Row]) {
    let (title, used, percent) = (shape.title, shape.spec.topk, shape.percent(machine));
    let routes = match (is_recorded, shape.bundled) {
        (true, _) => "recorded",
        (false, Some(_)) => "its own",
        (false, None) => "synthetic",
    };
    println!("\n### {title}: {percent} % of the experts in its memory, {used} per token on {routes} routes\n");
    println!(
        "| | t/s | / exact | / llama.cpp | MB/token copied, read | hits | by CPU | low | rerouted | prompt t/s | KL | \
         perplexity |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    let speed_of = |name: &str| {
        let row = rows.iter().find(|row| row.row.starts_with(name) && row.error.is_none())?;
        Some(row.decode_tokens_per_second)
    };
    let bases = [named(EXACT), "llama.cpp".to_owned()].map(|name| speed_of(&name));
    for row in rows {
        if let Some(error) = &row.error {
            println!("| {} | {error} | | | | | | | | | | |", row.row);
            continue;
        }
        let ratio = |base: Option<f64>| {
            base.map_or("-".to_owned(), |base| format!("{:.2}", row.decode_tokens_per_second / base))
        };
        let percent = |part: u64, whole: u64| match whole {
            0 => "-".to_owned(),
            whole => format!("{:.0}%", 100.0 * part as f64 / whole as f64),
        };
        let uses = row.high_uses + row.low_uses + row.skipped_uses;
        println!(
            "| {} | {:.2} | {} | {} | {:.1}, {:.1} | {} | {} | {} | {} | {:.0} | {} | {} |",
            row.row,
            row.decode_tokens_per_second,
            ratio(bases[0]),
            ratio(bases[1]),
            row.link_bytes / 1e6,
            row.file_bytes / 1e6,
            percent(row.hits, row.hits + row.misses),
            percent(row.helper_experts, row.misses),
            percent(row.low_uses, uses),
            percent(row.rerouted_uses, uses),
            row.prompt_tokens_per_second,
            row.kl.map_or("-".to_owned(), |kl| format!("{kl:.4}")),
            row.log_perplexity_increase.map_or("-".to_owned(), |nats| format!("{:+.2} %", 100.0 * nats.exp_m1())),
        );
    }
}

fn main() -> Result<()> {
    if std::env::args_os().len() == 1 {
        println!("devices: nothing to do for cargo test; run it with cargo bench");
        return Ok(());
    }
    let args = Args::parse();
    // Before anything looks at ggml's list of devices.
    lagging_device::register(Options { memory: 0, ..Options::default() });
    hobbit::set_log(|level, text| {
        if level == hobbit::LogLevel::Error {
            eprint!("{text}");
        }
    });
    let mut all = Vec::new();
    let is_wanted = |shape: &Shape| args.shapes.is_empty() || args.shapes.iter().any(|name| name == shape.name);
    for mut shape in shapes().into_iter().filter(is_wanted) {
        shape.percents[args.machine as usize] = args.percent.unwrap_or(shape.percent(args.machine));
        let routes = args.routes.iter().find(|(name, _)| name == shape.name);
        let profile = args.profiles.iter().find(|(name, _)| name == shape.name);
        let path = model(&mut shape, routes.map(|(_, file)| file.as_path()), profile.map(|(_, file)| file.as_path()))?;
        let has_profile = profile.is_some();
        let has_paths = args.path_tables.iter().any(|(name, _)| name == shape.name);
        // Recorded routes have no scores of other experts.
        let reroutes =
            |flags: &str| ["cache-bias", "max-loss", "smoe", "swapmoe"].iter().any(|word| flags.contains(word));
        let can_run = |flags: &str| {
            (has_paths || !flags.contains("edgemoe"))
                && (has_profile || !flags.contains("max-loss"))
                && (routes.is_none() || !reroutes(flags))
        };
        let usual = args.machine.rows().iter().map(|flags| flags.replace("--max-loss", shape.max_loss()));
        let given: Vec<String> = args.flags.iter().map(|flags| flags.trim().to_owned()).collect();
        let all_flags = if given.is_empty() { usual.collect() } else { given };
        let flags = all_flags.iter().map(String::as_str).filter(|flags| can_run(flags));
        let stock = (args.machine == Machine::Rtx4090).then_some(None);
        let (mut rows, mut exact) = (Vec::new(), Vec::new());
        for flags in stock.into_iter().chain(flags.map(Some)) {
            let name = flags.map_or_else(|| "llama.cpp".to_owned(), named);
            eprintln!("{}: {name}", shape.name);
            let row = run(&args, &shape, &path, flags, &mut exact).unwrap_or_else(|error| Row {
                shape: shape.name.to_owned(),
                row: name,
                error: Some(format!("{error:#}").replace(&format!("{}: ", path.display()), "")),
                ..Row::default()
            });
            eprintln!("host, per hit layer: {:.1} µs of real CPU time", 1e6 * row.hit_layer_host_seconds);
            rows.push(row);
        }
        table(&shape, args.machine, routes.is_some(), &rows);
        all.extend(rows);
    }
    let host = Host::describe(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let machine = args.machine.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    let results = || Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/results").join(&host.machine);
    let path = args.json.clone().unwrap_or_else(|| results().join(format!("devices-{machine}.json")));
    let settings = json!({
        "machine": machine,
        "decode_tokens": args.decode_tokens,
        "prompt_tokens": PROMPT,
        "recorded_routes": args.routes.iter().map(|(shape, _)| shape).collect::<Vec<_>>(),
    });
    let raw = json!({ "time": "virtual", "host": host, "settings": settings, "rows": all });
    std::fs::write(&path, serde_json::to_string_pretty(&raw)? + "\n").with_context(|| path.display().to_string())?;
    eprintln!("raw numbers: {}", path.display());
    Ok(())
}
