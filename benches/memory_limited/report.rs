//! The tables and the raw numbers.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::child::Run;
use super::contestant::Contestant;
use super::roofline::Roofline;
use super::runs::{Finished, Settings};
use super::total::Total;
use super::verdict;
use hobbit_programs::measure::host::Host;

const MIB: f64 = (1 << 20) as f64;
const GIB: f64 = 1024.0 * MIB;

/// Prints the tables and writes the raw numbers.
pub fn finish(settings: &Settings, finished: &[Finished]) -> Result<()> {
    let host = Host::describe(&settings.files.model);
    let bytes = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.len());
    let model_bytes = bytes(&settings.files.model);
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
    let verdicts = if is_comparison { verdict::verdicts(settings, finished) } else { Vec::new() };
    if is_comparison {
        notes(settings, &host, finished);
        contestants(finished);
    }
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
        "model": {
            "name": settings.name,
            "bytes": model_bytes,
            "low_bytes": settings.files.low.as_deref().map(bytes),
            "pack_bytes": settings.files.pack.as_deref().map(bytes),
        },
        "settings": {
            "limit_bytes": settings.limit,
            "low_share": settings.low_share,
            "prompt_tokens": settings.prompt_tokens,
            "decode_tokens": settings.decode_tokens,
            "stock_decode_tokens": settings.stock_decode_tokens,
            "threads": settings.threads,
            "stock_threads": settings.stock_threads,
        },
        "targets": settings.targets,
        "verdicts": verdicts,
        "runs": finished,
    });
    write(&path, &raw)
}

fn table(finished: &[Finished]) {
    println!(
        "{:<32} {:>10} {:>10} {:>9} {:>11} {:>11} {:>10} {:>6} {:>5} {:>5} {:>5} {:>9} {:>10} {:>8}",
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
        let name =
            |run: &Run| format!("{} {} ({} threads)", run.contestant.letter(), run.contestant.name(), run.threads);
        let name = finished.variant.clone().or_else(|| finished.run.as_deref().map(name)).unwrap_or_default();
        let Some(run) = &finished.run else {
            println!("{name:<32} killed: it needs more memory");
            continue;
        };
        let decode = &run.decode;
        let tokens = decode.tokens as f64;
        let experts = decode.experts.as_ref();
        // The kernel counts what a run fetches from the disk, the page cache's read-ahead included.
        let share = |seconds: f64| format!("{:.0}%", 100.0 * seconds / decode.seconds);
        println!(
            "{name:<32} {:>10.2} {:>10.3} {:>9.1} {:>11.0} {:>11.1} {:>10.0} {:>6} {:>5} {:>5} {:>5} {:>9.0} {:>10} {:>8}",
            run.prompt.speed(),
            decode.speed(),
            1e3 * decode.seconds / tokens,
            run.prompt.disk_bytes as f64 / MIB,
            decode.disk_bytes as f64 / tokens / MIB,
            decode.major_faults as f64 / tokens,
            experts.map_or_else(dash, |experts| percent(experts.hits, experts.hits + experts.misses)),
            experts.map_or_else(dash, |experts| share(experts.io_busy_seconds)),
            experts.map_or_else(dash, |experts| share(experts.io_wait_seconds)),
            share(decode.cpu_seconds),
            run.peak_rss_bytes as f64 / MIB,
            finished.cgroup.and_then(|usage| usage.max).map_or_else(dash, |max| format!("{:.0}", max as f64 / MIB)),
            finished.cgroup.map_or_else(dash, |usage| usage.limit_hits.to_string()),
        );
    }
}

/// What explains the numbers.
fn notes(settings: &Settings, host: &Host, finished: &[Finished]) {
    if let (Some(_), Some(kib)) = (settings.limit, host.disk.read_ahead_kib) {
        println!("read-ahead of the disk: {kib} KiB (page faults of llama.cpp fetch up to this much)");
    }
    if let Some(io) = finished.iter().find_map(|finished| finished.run.as_ref()?.io_choice.as_ref()) {
        println!("hobbit reads experts: {io}");
    }
    for (finished, roofline) in finished.iter().filter_map(|one| Some((one, Roofline::of(one)?))) {
        let letter = finished.run.as_ref().map_or(' ', |run| run.contestant.letter());
        println!(
            "roofline: {:.0} MB/s of random reads, {:.1} MB per token: {:.2} t/s; {letter} decodes {:.2} t/s, {:.0}%",
            roofline.bytes_per_second / 1e6,
            roofline.bytes_per_token / 1e6,
            roofline.limit(),
            roofline.speed,
            100.0 * roofline.share()
        );
    }
}

/// A row for each who took part, all its runs together.
fn contestants(finished: &[Finished]) {
    let total = |contestant| Some(Total::of(contestant, finished)).filter(|total| total.runs > 0);
    let (stock, exact) = (total(Contestant::Stock), total(Contestant::Exact));
    println!(
        "\n| | runs | prompt t/s | decode t/s | of A | of B | median ms | expert MiB/token | hits | high / low / skipped | \
         roofline | upgrades | peak RSS MiB |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    );
    for contestant in Contestant::ALL {
        let Some(total) = total(contestant) else { continue };
        let ratio = |other: &Option<Total>| {
            other.as_ref().map_or_else(dash, |other| format!("{:.2}x", total.decode.speed() / other.decode.speed()))
        };
        let experts = total.experts.as_ref();
        println!(
            "| {} {} | {} | {:.2} | {:.3} | {} | {} | {:.1} | {} | {} | {} | {} | {} | {:.0} |",
            contestant.letter(),
            contestant.name(),
            total.runs,
            total.prompt.speed(),
            total.decode.speed(),
            ratio(&stock),
            ratio(&exact),
            1e3 * total.decode_median(),
            experts
                .map_or_else(dash, |experts| format!("{:.1}", experts.bytes_read as f64 / total.decode.tokens / MIB)),
            experts.map_or_else(dash, |experts| percent(experts.hits, experts.hits + experts.misses)),
            experts.map_or_else(dash, |experts| {
                let used = experts.used;
                let all = used.high + used.low + used.skipped;
                [used.high, used.low, used.skipped].map(|count| percent(count, all)).join(" / ")
            }),
            total.roofline_share().map_or_else(dash, |share| format!("{:.0}%", 100.0 * share)),
            experts.map_or_else(dash, |experts| experts.upgrades.to_string()),
            total.peak_rss_bytes as f64 / MIB,
        );
    }
    println!();
}

fn dash() -> String {
    "-".to_owned()
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1}%", 100.0 * part as f64 / whole.max(1) as f64)
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
