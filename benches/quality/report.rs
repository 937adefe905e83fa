//! The tables, the verdicts, and the raw numbers.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;

use super::args::Args;
use super::compare::{Loss, Row};
use super::setup::Study;
use super::text::WINDOW;
use super::verdict::{self, Verdict};
use hobbit::perplexity::estimate::Estimate;
use hobbit_programs::bench::host::Host;

/// What low-precision versions at default thresholds may cost, of the exact model's perplexity.
const COST_MAX: f64 = 0.01;

/// Prints tables and verdicts, and writes them and the raw numbers.
///
/// # Errors
/// A directory that cannot be written.
pub fn finish(args: &Args, study: &Study, seconds: f64, rows: &[Row]) -> Result<()> {
    let model = &study.subject.name;
    let tables = tables(args, rows);
    println!("\n# {model}\n{tables}");
    let verdicts = verdicts(rows);
    verdict::print(&verdicts);
    let host = Host::describe(&study.subject.path);
    let raw = json!({
        "host": host,
        "model": model,
        "window": WINDOW,
        "whole_windows": args.whole_windows,
        "threads": args.threads,
        "texts": study.texts.iter().map(|text| json!({
            "name": text.name, "windows": text.windows.len(), "questions": text.questions.len(),
        })).collect::<Vec<_>>(),
        "seconds": seconds,
        "verdicts": verdicts,
        "rows": rows,
    });
    let dir = directory(args, &host);
    let stem = format!("quality-{model}{}", suffix(args));
    let path = |extension: &str| dir.join(format!("{stem}.{extension}"));
    verdict::write(&raw, Some(&path("json")), &host, "")?;
    let page = format!("# Quality: {model}\n\nMade by `cargo bench --bench quality`; {}\n{tables}", how(args));
    fs::write(path("md"), page).with_context(|| path("md").display().to_string())?;
    eprintln!("written: {}", path("md").display());
    Ok(())
}

/// A part is no record.
fn directory(args: &Args, host: &Host) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    match (&args.out, args.windows) {
        (Some(dir), _) => dir.clone(),
        (None, Some(_)) => root.join("target/quality"),
        (None, None) => root.join("benches/results").join(&host.machine),
    }
}

/// Names what was compared, unless it was what is compared by default.
fn suffix(args: &Args) -> String {
    match (&args.arms, args.more_arms.is_empty()) {
        (Some(path), _) => format!("-{}", path.file_stem().unwrap_or_default().to_string_lossy()),
        (None, false) => "-own".to_owned(),
        (None, true) => String::new(),
    }
}

fn how(args: &Args) -> String {
    let read = if args.whole_windows { "each window in one batch" } else { "one token at a time" };
    let times = if args.jobs == Some(1) {
        ""
    } else {
        "; rows ran side by side, so that times of tokens mean nothing and are left out"
    };
    format!(
        "{read}{times}. ± is one standard error, paired by token or question. `loss`: perplexity is worse by more than 5 of them.\n"
    )
}

fn tables(args: &Args, rows: &[Row]) -> String {
    let mut tables = String::new();
    for (i, first) in rows.iter().enumerate() {
        if rows[..i].iter().any(|row| row.is_comparable(first)) {
            continue;
        }
        let how = if args.whole_windows { "one batch a window" } else { "token by token" };
        let _ = writeln!(tables, "\n**{}, expert cache {}%, {how}**\n", first.text, first.cache_percent);
        tables.push_str(
            "| arm | perplexity | against exact | KL, millinats | 99.9 % KL | same top | task, points | loss | KiB/token | hits | \
             high / low / skipped | ms/token p50, p99 | control of equal bytes: perplexity, KL | better |\n\
             |---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
        );
        for row in rows.iter().filter(|row| row.is_comparable(first)) {
            let _ = writeln!(tables, "{}", line(row));
        }
    }
    tables
}

fn line(row: &Row) -> String {
    let signed =
        |Estimate { value, uncertainty }: Estimate| format!("{:+.2} ± {:.2}", 100.0 * value, 100.0 * uncertainty);
    let millinats =
        |Estimate { value, uncertainty }: Estimate| format!("{:.2} ± {:.2}", 1e3 * value, 1e3 * uncertainty);
    let none = || "-".to_owned();
    let task = row
        .task
        .as_ref()
        .map_or_else(none, |task| format!("{:.1} ({})", 100.0 * task.score.value, signed(task.change)));
    let loss = match row.loss {
        Loss::None => "none",
        Loss::Within => "below 5 errors",
        Loss::Beyond => "**loss**",
    };
    let hits = row.hit_rate.map_or_else(none, |rate| format!("{:.1}%", 100.0 * rate));
    let used = row.stats.used.shares().map_or_else(none, |shares| {
        format!("{:.1} / {:.1} / {:.1} %", 100.0 * shares.high, 100.0 * shares.low, 100.0 * shares.skipped)
    });
    let times = row.token_ms.map_or_else(none, |ms| format!("{:.2}, {:.2}", ms.p50, ms.p99));
    let control = row.control.as_ref().map_or_else(String::new, |control| {
        format!("{:.3}, {:.2} ({})", control.perplexity, 1e3 * control.kl, control.between.join(" to "))
    });
    let better =
        match row.control.as_ref().map(|control| (row.perplexity < control.perplexity, row.kl.value < control.kl)) {
            None if row.fits == Some(true) => "fits",
            None => "",
            Some((true, true)) => "yes",
            Some((true, false)) => "perplexity only",
            Some((false, true)) => "KL only",
            Some((false, false)) => "no",
        };
    format!(
        "| {} | {:.3} | {} % | {} | {:.0} ± {:.0} | {:.1} ± {:.1} % | {task} | {loss} | {:.0} | {hits} | {used} | {times} | {control} | \
         {better} |",
        row.arm,
        row.perplexity,
        signed(row.cost),
        millinats(row.kl),
        1e3 * row.kl_999.value,
        1e3 * row.kl_999.uncertainty,
        100.0 * row.same_top.value,
        100.0 * row.same_top.uncertainty,
        row.bytes_per_token / 1024.0,
    )
}

/// What the documentation promises, and what every arm has to be better than.
fn verdicts(rows: &[Row]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for row in rows {
        let of = format!("{}, cache {}%, {}", row.text, row.cache_percent, row.arm);
        if row.is_promised {
            let promise = format!("{of}: costs at most {:.0}% perplexity", 100.0 * COST_MAX);
            let found = format!("{:+.2} ± {:.2} %", 100.0 * row.cost.value, 100.0 * row.cost.uncertainty);
            verdicts.push(Verdict { promise, found, is_kept: row.cost.value <= COST_MAX });
        }
        if let Some(control) = &row.control {
            let found = format!(
                "perplexity {:.3} against {:.3}, KL {:.2} against {:.2} millinats",
                row.perplexity,
                control.perplexity,
                1e3 * row.kl.value,
                1e3 * control.kl
            );
            let is_kept = row.perplexity < control.perplexity && row.kl.value < control.kl;
            verdicts.push(Verdict {
                promise: format!("{of}: better than a smaller quant of equal bytes"),
                found,
                is_kept,
            });
        }
    }
    verdicts
}
