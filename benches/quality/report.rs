//! The tables, the verdicts, and the raw numbers.

use std::path::Path;

use anyhow::Result;
use hobbit::PrecisionOptions;
use serde_json::json;

use super::Args;
use super::case::Kind;
use super::compare::Row;
use super::measure::WINDOW;
use super::verdict::{self, Verdict};
use hobbit_programs::measure::host::Host;

/// What default thresholds may cost, of the exact model's perplexity.
const COST_MAX: f64 = 0.01;

/// Prints the tables and verdicts, and writes the raw numbers.
pub fn finish(args: &Args, model: &Path, seconds: f64, rows: &[Row]) -> Result<()> {
    for (i, first) in rows.iter().enumerate() {
        if rows[..i].iter().any(|row| row.is_comparable(first)) {
            continue;
        }
        let how = if first.case.prefill_low.is_some() { "one batch a window" } else { "token by token" };
        println!("\n**{}, expert cache {}%, {how}**\n", first.text, first.case.cache_percent);
        table(rows.iter().filter(|row| row.is_comparable(first)));
    }
    let verdicts = if args.sweep.is_none() { verdicts(rows) } else { Vec::new() };
    verdict::print(&verdicts);
    let host = Host::describe(model);
    let stem = model.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let suffix = args.sweep.as_ref().map_or(String::new(), |sweep| format!("-{sweep}"));
    let raw = json!({
        "host": host,
        "model": stem,
        "window": WINDOW,
        "seconds": seconds,
        "verdicts": verdicts,
        "rows": rows,
    });
    verdict::write(&raw, args.json.as_deref(), &host, &format!("quality-{stem}{suffix}.json"))
}

fn table<'a>(rows: impl Iterator<Item = &'a Row>) {
    println!(
        "| experts | perplexity | against exact | KL, millinats | KiB/token | hits | high / low / skipped | uniform of \
         equal bytes: perplexity, KL | better |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for row in rows {
        let hits = row.stats.hit_rate().map_or("-".to_owned(), |rate| format!("{:.1}%", 100.0 * rate));
        let used = row.stats.used.shares().map_or("-".to_owned(), |shares| {
            format!("{:.1} / {:.1} / {:.1} %", 100.0 * shares.high, 100.0 * shares.low, 100.0 * shares.skipped)
        });
        let uniform = row.uniform.as_ref().map_or("".to_owned(), |uniform| {
            format!("{:.3}, {:.2} ({})", uniform.perplexity, 1e3 * uniform.kl, uniform.between.join(" to "))
        });
        let better = row.uniform.as_ref().map(|uniform| (row.perplexity < uniform.perplexity, row.kl < uniform.kl));
        let better = match better {
            None => "",
            Some((true, true)) => "yes",
            Some((true, false)) => "perplexity only",
            Some((false, true)) => "KL only",
            Some((false, false)) => "no",
        };
        println!(
            "| {} | {:.3} | {:+.2} ± {:.2} % | {:.2} ± {:.2} | {:.0} | {hits} | {used} | {uniform} | {better} |",
            row.case.label,
            row.perplexity,
            100.0 * row.cost,
            100.0 * row.cost_error,
            1e3 * row.kl,
            1e3 * row.kl_error,
            row.bytes_per_token / 1024.0,
        );
    }
}

/// On the pairs whose high version is the exact one; a smaller high version costs more for reasons of its own.
fn verdicts(rows: &[Row]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for row in rows.iter().filter(|row| row.is_judged() && row.case.high.is_none()) {
        let of = format!("{}, cache {}%, {}", row.text, row.case.cache_percent, row.case.label);
        if (row.case.t1, row.case.t2) == (PrecisionOptions::T1, PrecisionOptions::T2) {
            let promise = format!("{of}: costs at most {:.0}% perplexity", 100.0 * COST_MAX);
            let found = format!("{:+.2} ± {:.2} %", 100.0 * row.cost, 100.0 * row.cost_error);
            verdicts.push(Verdict { promise, found, is_kept: row.cost <= COST_MAX });
        }
        let mut better_than = |what: &str, perplexity: f64, kl: f64| {
            let found = format!(
                "perplexity {:.3} against {perplexity:.3}, KL {:.2} against {:.2} millinats",
                row.perplexity,
                1e3 * row.kl,
                1e3 * kl
            );
            let is_kept = row.perplexity < perplexity && row.kl < kl;
            verdicts.push(Verdict { promise: format!("{of}: better than {what}"), found, is_kept });
        };
        let dropped = rows.iter().filter(|other| other.case.kind == Kind::ColdDrop && other.is_comparable(row));
        if let Some(best) = dropped.min_by(|a, b| a.perplexity.total_cmp(&b.perplexity)) {
            better_than("cold-drop", best.perplexity, best.kl);
        }
        if let Some(uniform) = &row.uniform {
            better_than("a uniform quant of equal bytes", uniform.perplexity, uniform.kl);
        }
    }
    verdicts
}
