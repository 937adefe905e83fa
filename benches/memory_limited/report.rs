//! The table, the targets, and the raw numbers.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::child::{Disk, Engine, Phase, Run};
use super::host::Host;
use super::runs::{Finished, Settings};

const MIB: f64 = (1 << 20) as f64;
const GIB: f64 = 1024.0 * MIB;

/// All runs of one engine together.
#[derive(Clone, Debug, Default)]
struct Total {
    runs: usize,
    prompt: Rate,
    decode: Rate,
    decode_seconds: Vec<f64>,
}

impl Total {
    fn of(engine: Engine, finished: &[Finished]) -> Self {
        let mut total = Self::default();
        for run in finished.iter().filter_map(|finished| finished.run.as_ref()).filter(|run| run.engine == engine) {
            total.runs += 1;
            total.prompt.add(&run.prompt);
            total.decode.add(&run.decode);
            total.decode_seconds.extend(&run.decode.step_seconds);
        }
        total.decode_seconds.sort_by(f64::total_cmp);
        total
    }

    /// Seconds of the median token.
    fn decode_median(&self) -> f64 {
        self.decode_seconds.get(self.decode_seconds.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    tokens: f64,
    seconds: f64,
}

impl Rate {
    fn add(&mut self, phase: &Phase) {
        self.tokens += phase.tokens as f64;
        self.seconds += phase.seconds;
    }

    /// Tokens per second.
    fn speed(self) -> f64 {
        self.tokens / self.seconds
    }
}

/// Decode speed against what the disk allows, of one run.
#[derive(Clone, Copy, Debug)]
struct Roofline {
    bytes_per_second: f64,
    bytes_per_token: f64,
    speed: f64,
}

impl Roofline {
    /// None where nothing was read or measured.
    fn of(finished: &Finished) -> Option<Self> {
        let run = finished.run.as_ref()?;
        let best = best(&finished.disk)?;
        let bytes = run.decode.experts?.bytes_read;
        (bytes > 0).then(|| Self {
            bytes_per_second: best.bytes_per_second,
            bytes_per_token: bytes as f64 / run.decode.tokens as f64,
            speed: speed(&run.decode),
        })
    }

    /// Tokens per second if only reading took time.
    fn limit(self) -> f64 {
        self.bytes_per_second / self.bytes_per_token
    }

    fn share(self) -> f64 {
        self.speed / self.limit()
    }
}

/// What was promised and what came.
struct Verdict {
    promise: String,
    found: String,
    is_kept: bool,
}

/// Prints the table and writes the raw numbers.
pub fn finish(settings: &Settings, finished: &[Finished]) -> Result<()> {
    let host = Host::describe(&settings.model);
    let model_bytes = fs::metadata(&settings.model).map_or(0, |metadata| metadata.len());
    let memory = settings.limit.map_or("no limit".to_owned(), |limit| format!("{:.2} GiB", limit as f64 / GIB));
    println!(
        "\n{}: {:.2} GiB in {memory}; prompt of {} tokens; {}",
        settings.name,
        model_bytes as f64 / GIB,
        settings.prompt_tokens,
        host.machine
    );
    table(finished);
    let is_comparison = finished.iter().all(|finished| finished.variant.is_none());
    let verdicts = if is_comparison { summary(settings, &host, finished) } else { Vec::new() };
    for verdict in &verdicts {
        let word = if verdict.is_kept { "OK    " } else { "MISSED" };
        println!("{word} {}: {}", verdict.promise, verdict.found);
    }

    let suffix = match (is_comparison, settings.limit) {
        (false, _) => "-tune",
        (true, None) => "-resident",
        (true, Some(_)) => "",
    };
    let path = settings
        .json
        .clone()
        .unwrap_or_else(|| host.results().join(format!("memory_limited-{}{suffix}.json", settings.name)));
    let raw = json!({
        "host": host,
        "model": { "name": settings.name, "bytes": model_bytes },
        "settings": {
            "limit_bytes": settings.limit,
            "prompt_tokens": settings.prompt_tokens,
            "decode_tokens": settings.decode_tokens,
            "stock_decode_tokens": settings.stock_decode_tokens,
            "threads": settings.threads,
            "stock_threads": settings.stock_threads,
        },
        "targets": settings.targets,
        "verdicts": verdicts.iter().map(as_json).collect::<Vec<_>>(),
        "runs": finished,
    });
    write(&path, &raw)
}

fn table(finished: &[Finished]) {
    println!(
        "{:<25} {:>10} {:>10} {:>9} {:>11} {:>11} {:>10} {:>6} {:>5} {:>5} {:>5} {:>9} {:>10} {:>8}",
        "run",
        "prompt t/s",
        "decode t/s",
        "ms/token",
        "prompt MiB",
        "MiB/token",
        "faults/tok",
        "hits",
        "busy",
        "wait",
        "cpu",
        "peak RSS",
        "cgroup max",
        "at limit"
    );
    for finished in finished {
        let name = |run: &Run| format!("{} ({} threads)", engine_name(run.engine), run.threads);
        let name = finished.variant.clone().or_else(|| finished.run.as_deref().map(name)).unwrap_or_default();
        let Some(run) = &finished.run else {
            println!("{name:<25} killed: it needs more memory");
            continue;
        };
        let decode = &run.decode;
        let tokens = decode.tokens as f64;
        let experts = decode.experts.as_ref();
        // The kernel counts what a run fetches from the disk, the page cache's read-ahead included.
        let share = |seconds: f64| format!("{:.0}%", 100.0 * seconds / decode.seconds);
        let dash = || "-".to_owned();
        println!(
            "{name:<25} {:>10.2} {:>10.3} {:>9.1} {:>11.0} {:>11.1} {:>10.0} {:>6} {:>5} {:>5} {:>5} {:>9.0} {:>10} {:>8}",
            speed(&run.prompt),
            speed(decode),
            1e3 * decode.seconds / tokens,
            run.prompt.disk_bytes as f64 / MIB,
            decode.disk_bytes as f64 / tokens / MIB,
            decode.major_faults as f64 / tokens,
            experts.map_or_else(dash, |experts| {
                let needed = (experts.hits + experts.misses).max(1);
                format!("{:.1}%", 100.0 * experts.hits as f64 / needed as f64)
            }),
            experts.map_or_else(dash, |experts| share(experts.io_busy_seconds)),
            experts.map_or_else(dash, |experts| share(experts.io_wait_seconds)),
            share(decode.cpu_seconds),
            run.peak_rss_bytes as f64 / MIB,
            finished.cgroup.and_then(|usage| usage.max).map_or_else(dash, |max| format!("{:.0}", max as f64 / MIB)),
            finished.cgroup.map_or_else(dash, |usage| usage.limit_hits.to_string()),
        );
    }
}

/// Prints both engines' speeds, the ratio and the roofline; answers how the targets fared.
fn summary(settings: &Settings, host: &Host, finished: &[Finished]) -> Vec<Verdict> {
    let (stock, hobbit) = (Total::of(Engine::Stock, finished), Total::of(Engine::Hobbit, finished));
    let mut verdicts = Vec::new();
    let mut verdict =
        |promise: String, found: String, is_kept: bool| verdicts.push(Verdict { promise, found, is_kept });

    if let (Some(_), Some(kib)) = (settings.limit, host.disk.read_ahead_kib) {
        println!("read-ahead of the disk: {kib} KiB (page faults of llama.cpp fetch up to this much)");
    }
    if let Some(io) = finished.iter().find_map(|finished| finished.run.as_ref()?.io_choice.as_ref()) {
        println!("hobbit reads experts: {io}");
    }
    if stock.runs > 0 && hobbit.runs > 0 {
        let (prompt, decode) =
            (hobbit.prompt.speed() / stock.prompt.speed(), hobbit.decode.speed() / stock.decode.speed());
        println!(
            "means: prompt {:.2} t/s and {:.2} t/s, ratio {prompt:.2}; decode {:.3} t/s and {:.3} t/s, ratio {decode:.2}",
            stock.prompt.speed(),
            hobbit.prompt.speed(),
            stock.decode.speed(),
            hobbit.decode.speed(),
        );
        println!("median token: {:.1} ms and {:.1} ms", 1e3 * stock.decode_median(), 1e3 * hobbit.decode_median());
        let (n_same, n_common) = equal_logits(finished);
        verdict("exact: equal logits".into(), format!("{n_same} of {n_common} evaluations"), n_same == n_common);
        if let Some(targets) = settings.targets {
            if settings.limit.is_some() {
                let found = format!("{decode:.2}x");
                let promise = format!("decode at least {}x llama.cpp", targets.decode_ratio);
                verdict(promise, found, decode >= targets.decode_ratio);
            } else {
                // All tokens cost the same here; the median forgets what else the machine did.
                let overhead = hobbit.decode_median() / stock.decode_median() - 1.0;
                let promise = format!("decode overhead (median token) below {:.0}%", 100.0 * targets.resident_overhead);
                verdict(promise, format!("{:.1}%", 100.0 * overhead), overhead < targets.resident_overhead);
            }
            let promise = format!("prompt at least {}x llama.cpp", targets.prompt_ratio);
            // With everything resident both do the same work; the overhead allowed to decoding is allowed here too.
            let least = if settings.limit.is_some() { 1.0 } else { 1.0 / (1.0 + targets.resident_overhead) };
            verdict(promise, format!("{prompt:.3}x"), prompt >= targets.prompt_ratio * least);
        }
    }
    let rooflines: Vec<Roofline> = finished.iter().filter_map(Roofline::of).collect();
    for roofline in &rooflines {
        println!(
            "roofline: {:.0} MB/s of random reads, {:.1} MB per token: {:.2} t/s; hobbit decodes {:.2} t/s, {:.0}%",
            roofline.bytes_per_second / 1e6,
            roofline.bytes_per_token / 1e6,
            roofline.limit(),
            roofline.speed,
            100.0 * roofline.share()
        );
    }
    if let Some(targets) = settings.targets.filter(|_| !rooflines.is_empty()) {
        let share = rooflines.iter().map(|roofline| roofline.share()).sum::<f64>() / rooflines.len() as f64;
        let promise = format!("decode at {:.0}% of the roofline", 100.0 * targets.roofline_share);
        verdict(promise, format!("{:.0}%", 100.0 * share), share >= targets.roofline_share);
    }
    let peak = finished.iter().filter_map(|finished| finished.run.as_ref());
    let peak = peak.filter(|run| run.engine == Engine::Hobbit).map(|run| run.peak_rss_bytes).max();
    if let (Some(limit), Some(peak)) = (settings.limit, peak) {
        let found = format!("{:.0} MiB of {:.0} MiB", peak as f64 / MIB, limit as f64 / MIB);
        verdict("peak RSS within the budget".into(), found, peak <= limit);
    }
    verdicts
}

/// (equal, compared) evaluations: each run against the first, as far as both went.
fn equal_logits(finished: &[Finished]) -> (usize, usize) {
    let mut runs = finished.iter().filter_map(|finished| finished.run.as_ref());
    let Some(first) = runs.next() else { return (0, 0) };
    runs.flat_map(|run| run.logits_hash.iter().zip(&first.logits_hash))
        .fold((0, 0), |(same, all), (a, b)| (same + usize::from(a == b), all + 1))
}

fn best(disk: &[Disk]) -> Option<&Disk> {
    disk.iter().max_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second))
}

fn speed(phase: &Phase) -> f64 {
    phase.tokens as f64 / phase.seconds
}

fn engine_name(engine: Engine) -> &'static str {
    match engine {
        Engine::Stock => "llama.cpp",
        Engine::Hobbit => "hobbit",
        Engine::Disk => "disk",
    }
}

fn as_json(verdict: &Verdict) -> Value {
    json!({ "promise": verdict.promise, "found": verdict.found, "is_kept": verdict.is_kept })
}

fn write(path: &Path, raw: &Value) -> Result<()> {
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
    let text = serde_json::to_string_pretty(raw)? + "\n";
    fs::write(path, text).with_context(|| path.display().to_string())?;
    eprintln!("raw numbers: {}", path.display());
    Ok(())
}
