//! Decoding and prompts on models of real machines: NVIDIA GPUs with experts in host memory, and Jetsons AGX Orin.
//!
//! The device is the tests' own ([`lagging_device`]) with sourced speeds, and all times are virtual: neither this
//! machine's speed nor its load matters, and nothing here was measured on a GPU. A shape has a known model's layers, or
//! a part of them, with fewer weights in each; the device's rates are divided by the same factor and figures are given
//! for the full model. Beside a GPU, host memory holds every expert unless `--host-percent` says less; others are read
//! at the speed of an NVMe drive, in virtual time, too. Not counted: the host's own work beside waits and expert
//! products, and arithmetic, which bounds prompts on real GPUs.
//!
//! ```text
//! hobbit-sim import qwen.route.csv qwen.trace
//! cargo bench --bench devices -- --routes qwen3-30b=qwen.trace
//! cargo bench --bench devices -- --shapes mixtral-f16 --flags "--low auto;HOBBIT=--preset hobbit"
//! cargo bench --bench devices -- --shapes mixtral-q8 --prompt-tokens 16,128 --decode-tokens 32,128 --machine orin-32
//! ```
//!
//! Tables (markdown) go to stdout, raw numbers to `benches/results/<machine>/devices-<machine modelled>.json`.

mod run;
mod shapes;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use hobbit_core::gguf::Gguf;
use hobbit_core::profile::beside;
use hobbit_core::trace::TraceReader;
use hobbit_programs::bench::host::Host;
use hobbit_synth::{Format, write};
use lagging_device::Options;
use serde_json::json;

use run::{Arm, PROMPT, Row, models};
use shapes::{CLASS_LRU, EXACT, LRU, Machine, Shape, shapes};

/// hobbit and llama.cpp on models of real machines, in virtual time
#[derive(Debug, Parser)]
struct Args {
    /// Machine that the device stands for
    #[arg(long, value_enum, default_value = "rtx-4090")]
    machine: Machine,
    /// Shapes to run [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    shapes: Vec<String>,
    /// Format of the weights [default: the shape's]
    #[arg(long = "type", value_name = "TYPE")]
    format: Option<Format>,
    /// Flags of hobbit's that make a row each, perhaps with a name [default: a list]
    #[arg(long, value_name = "[NAME=]FLAGS;...", value_delimiter = ';', allow_hyphen_values = true, value_parser = arm)]
    flags: Vec<Arm>,
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
    /// Percent of the experts in the device's memory [default: as many as fit the machine's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    percent: Option<u32>,
    /// Percent of the experts that host memory beside a GPU holds; others are read from the file
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100))]
    host_percent: u32,
    /// Lengths of prompts. With it, each row has the times of requests: each of these lengths with each number of
    /// decoded tokens [default: a prompt of 512 alone]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=65_536))]
    prompt_tokens: Vec<u32>,
    /// Tokens in the context before each of these prompts, not timed
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=65_536))]
    history: u32,
    /// Prompt tokens computed at once, by both engines. A scaled model's buffers shrink less than its weights, so a
    /// width is given here and not found by costs and memory
    #[arg(long, value_name = "N", default_value_t = PROMPT, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ubatch: u32,
    /// Tokens decoded
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "96",
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    decode_tokens: Vec<u32>,
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

/// Flags begin with `--`, names do not.
fn arm(text: &str) -> Result<Arm, String> {
    let text = text.trim();
    let (name, flags) = match text.split_once('=') {
        Some((name, flags)) if !text.starts_with('-') => (name.trim().to_owned(), flags.trim()),
        _ if !text.is_empty() && !text.starts_with("--") => return Err("expected [NAME=]--FLAG ...".to_owned()),
        _ => (named(text), text),
    };
    Ok(Arm { name, flags: Some(flags.to_owned()) })
}

fn named(flags: &str) -> String {
    match flags {
        "" => "hobbit, exact with helper (default)".to_owned(),
        EXACT => "hobbit, exact without helper".to_owned(),
        LRU => "llama.cpp's first expert cache (lru)".to_owned(),
        CLASS_LRU => "llama.cpp's expert cache (classlru)".to_owned(),
        flags => format!("hobbit {flags}"),
    }
}

/// A model of `shape`, with as many experts per token as routes have, and its profile beside it.
fn model(shape: &mut Shape, args: &Args) -> Result<PathBuf> {
    let of_shape =
        |files: &[(String, PathBuf)]| files.iter().find(|(name, _)| name == shape.name).map(|(_, file)| file.clone());
    let (routes, profile) = (of_shape(&args.routes), of_shape(&args.profiles));
    if let Some(routes) = routes {
        let reader = TraceReader::open(&routes)?;
        shape.spec.topk = reader.header().model.layers.first().map_or(shape.spec.topk, |layer| layer.n_used.into());
    }
    let mut name = format!("devices-{}-{}", shape.name, shape.spec.topk);
    if let Some(format) = args.format {
        ensure!(shape.bundled.is_none(), "--type: {} is a trained model", shape.name);
        shape.spec.types = vec![format];
        name = format!("{name}-{}", format.name());
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.gguf"));
    // A file of an earlier specification is written anew.
    let (spec, written) = (format!("{:?}", shape.spec), path.with_extension("spec"));
    if !path.exists() || std::fs::read_to_string(&written).ok().as_ref() != Some(&spec) {
        _ = std::fs::remove_file(&path);
        match shape.bundled {
            Some(name) => _ = std::fs::copy(models().join(name), &path).context(name)?,
            None => _ = write(&path, &shape.spec)?,
        }
        std::fs::write(&written, spec)?;
    }
    if let Some(profile) = profile {
        std::fs::copy(&profile, beside(&path)).with_context(|| profile.display().to_string())?;
    }
    Ok(path)
}

/// Percent of the experts in the machine's memory.
fn percent(shape: &Shape, path: &Path, args: &Args) -> Result<u32> {
    let fixed = shape.percent.filter(|_| !args.machine.options().unified);
    if let Some(percent) = args.percent.or(fixed) {
        return Ok(percent);
    }
    let layers = Gguf::open(path)?.experts()?.layers;
    let bytes = |layer: &hobbit_core::gguf::LayerExperts| {
        u64::from(layer.n_expert) * layer.tensors.iter().map(|tensor| tensor.slice_bytes).sum::<u64>()
    };
    let small: u64 = layers.iter().map(bytes).sum();
    Ok(args.machine.percent(small as f64 * shape.factor() * shape.depth()))
}

fn table(shape: &Shape, percent: u32, is_recorded: bool, rows: &[Row]) {
    let (title, used) = (shape.title(), shape.spec.topk);
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
    let speed_of = |flags: Option<&str>| {
        let row = rows.iter().find(|row| row.flags.as_deref() == flags && row.error.is_none())?;
        Some(row.decode_tokens_per_second)
    };
    let bases = [Some(EXACT), None].map(speed_of);
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

/// Seconds of whole requests, of which the prompt takes those in brackets.
fn table_of_requests(rows: &[Row]) {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.error.is_none()).collect();
    let Some(first) = rows.first() else { return };
    let lengths =
        first.requests.iter().map(|request| format!(" {} + {} |", request.prompt_tokens, request.decode_tokens));
    println!("\n| seconds (of the prompt): tokens read + written |{}", lengths.collect::<String>());
    println!("|---|{}", "---|".repeat(first.requests.len()));
    for row in &rows {
        let seconds = row.requests.iter().map(|request| {
            format!(" {:.3} ({:.3}) |", request.prompt_seconds + request.decode_seconds, request.prompt_seconds)
        });
        println!("| {} |{}", row.row, seconds.collect::<String>());
    }
}

/// The rows of a shape: llama.cpp's where there is a discrete GPU and host memory has room for its weights, and
/// hobbit's.
fn arms(args: &Args, shape: &Shape) -> Result<Vec<Arm>> {
    let has = |files: &[(String, PathBuf)]| files.iter().any(|(name, _)| name == shape.name);
    let (has_routes, has_paths, has_profile) = (has(&args.routes), has(&args.path_tables), has(&args.profiles));
    // Recorded routes have no scores of other experts.
    let reroutes = |flags: &str| ["cache-bias", "max-loss", "smoe", "swapmoe"].iter().any(|word| flags.contains(word));
    let can_run = |arm: &Arm| {
        let flags = arm.flags.as_deref().unwrap_or_default();
        (has_paths || !flags.contains("edgemoe"))
            && (has_profile || !flags.contains("max-loss"))
            && (!has_routes || !reroutes(flags))
    };
    let usual = args.machine.rows().iter().map(|row| arm(&row.replace("--max-loss", shape.max_loss())));
    let usual = usual.collect::<Result<_, _>>().map_err(anyhow::Error::msg)?;
    let given = if args.flags.is_empty() { usual } else { args.flags.clone() };
    let stock = Arm { name: "llama.cpp".to_owned(), flags: None };
    let stock = (!args.machine.options().unified && args.host_percent == 100).then_some(stock);
    Ok(stock.into_iter().chain(given.into_iter().filter(can_run)).collect())
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
    let known = shapes();
    let names: Vec<_> = known.iter().map(|shape| shape.name).collect();
    for name in &args.shapes {
        ensure!(names.contains(&name.as_str()), "--shapes {name}: expected some of {}", names.join(", "));
    }
    let mut all = Vec::new();
    let is_wanted = |shape: &Shape| args.shapes.is_empty() || args.shapes.iter().any(|name| name == shape.name);
    for mut shape in known.into_iter().filter(is_wanted) {
        let path = model(&mut shape, &args)?;
        let percent = percent(&shape, &path, &args)?;
        let (mut rows, mut exact) = (Vec::new(), Vec::new());
        for arm in arms(&args, &shape)? {
            eprintln!("{}: {}", shape.name, arm.name);
            let row = run::run(&args, &shape, percent, &path, &arm, &mut exact).unwrap_or_else(|error| Row {
                shape: shape.name.to_owned(),
                row: arm.name,
                flags: arm.flags,
                error: Some(format!("{error:#}").replace(&format!("{}: ", path.display()), "")),
                ..Row::default()
            });
            eprintln!("host, per hit layer: {:.1} µs of real CPU time", 1e6 * row.hit_layer_host_seconds);
            rows.push(row);
        }
        let is_recorded = args.routes.iter().any(|(name, _)| name == shape.name);
        table(&shape, percent, is_recorded, &rows);
        if !args.prompt_tokens.is_empty() {
            table_of_requests(&rows);
        }
        all.extend(rows);
    }
    let host = Host::describe(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let machine = args.machine.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    let results = || Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/results").join(&host.machine);
    let path = args.json.clone().unwrap_or_else(|| results().join(format!("devices-{machine}.json")));
    let settings = json!({
        "machine": machine,
        "decode_tokens": args.decode_tokens,
        "prompt_tokens": if args.prompt_tokens.is_empty() { vec![PROMPT] } else { args.prompt_tokens.clone() },
        "history": args.history,
        "ubatch": args.ubatch,
        "host_percent": args.host_percent,
        "recorded_routes": args.routes.iter().map(|(shape, _)| shape).collect::<Vec<_>>(),
    });
    let raw = json!({ "time": "virtual", "host": host, "settings": settings, "rows": all });
    std::fs::write(&path, serde_json::to_string_pretty(&raw)? + "\n").with_context(|| path.display().to_string())?;
    eprintln!("raw numbers: {}", path.display());
    Ok(())
}
