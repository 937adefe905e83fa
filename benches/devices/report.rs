//! The table, the verdicts, and the raw numbers.

use std::fs;
use std::path::Path;

use anyhow::Result;
use hobbit::options::CpuHelper;
use serde_json::json;

use super::run::{Contestant, Run, Settings};
use super::verdict::{self, Verdict};
use hobbit_programs::bench::host::Host;

/// Of the better of copying all and computing all.
const AUTO_MIN: f64 = 0.9;
/// Of llama.cpp's prompt speed.
const PROMPT_MIN: f64 = 1.0;

/// Prints the tables and verdicts, and writes the raw numbers.
pub fn finish(settings: &Settings, everyone: &[Contestant], runs: &[Run], json: Option<&Path>) -> Result<()> {
    let host = Host::describe(&settings.path);
    println!(
        "\n{}: prompt of {} tokens, {} decoded; {} threads and {} of the device; {}",
        settings.name,
        settings.prompt_tokens,
        settings.decode_tokens,
        settings.threads,
        settings.device_threads,
        host.machine
    );
    let mut links: Vec<f64> = runs.iter().map(|run| run.link_gb_per_second).collect();
    links.dedup();
    table(everyone, &links, runs);
    let verdicts: Vec<Verdict> = links.iter().flat_map(|&link| verdicts(everyone, link, runs)).collect();
    verdict::print(&verdicts);
    let raw = json!({
        "host": host,
        "model": { "name": settings.name, "bytes": fs::metadata(&settings.path).map_or(0, |file| file.len()) },
        "settings": settings,
        "verdicts": verdicts,
        "runs": runs,
    });
    verdict::write(&raw, json, &host, &format!("devices-{}.json", settings.name))
}

/// All runs of one contestant at one speed, in tokens per second.
struct Speed {
    prompt: f64,
    decode: f64,
    link_bytes_per_token: f64,
    hits: u64,
    misses: u64,
    helper_experts: u64,
}

fn speed(contestant: Contestant, link: f64, runs: &[Run]) -> Option<Speed> {
    let of = |run: &&Run| run.contestant == contestant && run.link_gb_per_second == link;
    let runs: Vec<&Run> = runs.iter().filter(of).collect();
    let sum = |of: fn(&Run) -> f64| runs.iter().map(|run| of(run)).sum::<f64>();
    let devices = || runs.iter().filter_map(|run| run.decode_device);
    (!runs.is_empty()).then(|| Speed {
        prompt: sum(|run| run.prompt_tokens as f64) / sum(|run| run.prompt_seconds),
        decode: sum(|run| run.decode_tokens as f64) / sum(Run::decode_seconds),
        link_bytes_per_token: sum(|run| run.link_bytes_per_token) / runs.len() as f64,
        hits: devices().map(|device| device.hits).sum(),
        misses: devices().map(|device| device.misses).sum(),
        helper_experts: devices().map(|device| device.helper_experts).sum(),
    })
}

fn table(everyone: &[Contestant], links: &[f64], runs: &[Run]) {
    println!("\n| link GB/s | | prompt t/s | decode t/s | link MB/token | hits | by the CPU, of misses |");
    println!("|---|---|---|---|---|---|---|");
    for &link in links {
        for &contestant in everyone {
            let Some(speed) = speed(contestant, link, runs) else { continue };
            println!(
                "| {link} | {contestant} | {:.1} | {:.2} | {:.2} | {} | {} |",
                speed.prompt,
                speed.decode,
                speed.link_bytes_per_token / 1e6,
                percent(speed.hits, speed.hits + speed.misses),
                percent(speed.helper_experts, speed.misses),
            );
        }
    }
}

fn verdicts(everyone: &[Contestant], link: f64, runs: &[Run]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let stock = speed(Contestant::Stock, link, runs);
    for &contestant in everyone {
        let Contestant::Hobbit { cache_percent, helper: CpuHelper::Auto } = contestant else { continue };
        let with = |helper| speed(Contestant::Hobbit { cache_percent, helper }, link, runs);
        let (Some(off), Some(on), Some(auto)) = (with(CpuHelper::Off), with(CpuHelper::On), with(CpuHelper::Auto))
        else {
            continue;
        };
        let of = format!("{link} GB/s, {cache_percent}% on the device");
        let better = f64::max(off.decode, on.decode);
        verdicts.push(Verdict {
            promise: format!("{of}: load-or-compute decodes at least {AUTO_MIN}x as fast as the better pure choice"),
            found: format!("{:.2}x of {better:.2} t/s", auto.decode / better),
            is_kept: auto.decode >= AUTO_MIN * better,
        });
        if let Some(stock) = &stock {
            verdicts.push(Verdict {
                promise: format!("{of}: reads prompts at least {PROMPT_MIN}x as fast as llama.cpp"),
                found: format!("{:.2}x of {:.1} t/s", auto.prompt / stock.prompt, stock.prompt),
                is_kept: auto.prompt >= PROMPT_MIN * stock.prompt,
            });
        }
    }
    verdicts
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.1}%", 100.0 * part as f64 / whole as f64) }
}
