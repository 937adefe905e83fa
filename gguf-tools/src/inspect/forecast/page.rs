//! A forecast as a short page.

use std::fmt;

use hobbit_core::forecast::{Forecast, Limit};
use hobbit_core::units::{Bytes, Percent, ShortBytes};

use super::{Published, Report};

/// How far measured runs lie from forecasts, in words. From the table in docs/FORECAST.md.
const ERROR: &str = "Against measured runs: docs/FORECAST.md";

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        model(f, self)?;
        machine(f, self)?;
        match (&self.forecast, &self.refused) {
            (Some(forecast), _) => speeds(f, self, forecast)?,
            (None, Some(why)) => writeln!(f, "\nNo: {why}")?,
            (None, None) => (),
        }
        memory(f, self)?;
        writeln!(f, "\nHit rates: {}. {ERROR}.", self.locality)
    }
}

impl Report {
    /// The expected speed in a line, if the model runs.
    pub fn in_short(&self) -> Option<String> {
        let forecast = self.forecast.as_ref()?;
        let busy = if self.machine.load.is_some() { ", on a busy machine: too low" } else { "" };
        Some(format!(
            "{} tokens a second; an answer to {} tokens begins after {} (a forecast, below{busy})",
            number(forecast.expected.tokens_per_second),
            self.task.n_prompt,
            seconds(forecast.first_token.seconds())
        ))
    }
}

/// A forecast without its table of other memory sizes.
pub struct Short<'a>(pub &'a Report);

impl fmt::Display for Short<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(report) = self;
        model(f, report)?;
        machine(f, report)?;
        match (&report.forecast, &report.refused) {
            (Some(forecast), _) => speeds(f, report, forecast),
            (None, why) => writeln!(f, "\nNo: {}", why.as_deref().unwrap_or_default()),
        }
    }
}

fn model(out: &mut fmt::Formatter<'_>, report: &Report) -> std::fmt::Result {
    let model = &report.model;
    writeln!(
        out,
        "{}: {}, {} layers of {} experts, of which a token uses {}",
        model.name, model.architecture, model.n_layers, model.n_expert, model.n_expert_used
    )?;
    writeln!(
        out,
        "{} parameters, {} for a token; {}, of which experts {} of {} each",
        billions(model.n_parameters),
        billions(model.n_parameters_used),
        Bytes(model.tensor_bytes),
        Bytes(model.expert_bytes),
        ShortBytes(model.one_expert_bytes)
    )?;
    if let Some((there, missing)) = model.partial {
        writeln!(
            out,
            "only {} of the file are here, {} are missing: enough to forecast, nothing to run",
            Bytes(there),
            Bytes(missing)
        )?;
    }
    Ok(())
}

fn machine(out: &mut fmt::Formatter<'_>, report: &Report) -> std::fmt::Result {
    let machine = &report.machine;
    let host = &machine.host;
    write!(
        out,
        "\non   {} of memory ({}), a disk of {} ({}), a processor that reads memory at {} ({})",
        Bytes(host.memory),
        machine.memory_from.word(),
        rate(host.disk),
        machine.disk_from.word(),
        rate(host.cpu.memory),
        machine.cpu_from.word()
    )?;
    for (dtype, own) in host.cpu.by_type.iter().filter(|(_, own)| **own < host.cpu.memory) {
        write!(out, ", {dtype} at {}", rate(*own))?;
    }
    if let Some(gpu) = host.device {
        write!(out, ", a GPU with {} at {}", Bytes(gpu.memory), rate(gpu.bandwidth))?;
        if let Some(link) = gpu.link {
            write!(out, " behind a link of {}", rate(link))?;
        }
        if let Some(from) = machine.gpu_from {
            write!(out, " ({})", from.word())?;
        }
    }
    writeln!(out)?;
    let names = machine.gpus.join(", ");
    match (names.is_empty(), host.device) {
        (true, _) => {}
        (false, Some(_)) => writeln!(out, "GPU   {names}; without: gguf-tools inspect --forecast --gpu none")?,
        (false, None) => writeln!(
            out,
            "GPU   {names}: left aside, its rates are unknown; with them: gguf-tools inspect --forecast --gpu SIZE@RATE"
        )?,
    }
    if let Some(load) = machine.load {
        writeln!(
            out,
            "\nwarning: this machine is busy (load {load:.1}), so measured rates may be too low: run this again when\n\
             it is idle. Speeds with published rates of usual machines, which are upper bounds (flags of gguf-tools\n\
             inspect --forecast):"
        )?;
        for Published { cpu, disk, speed } in &report.published {
            let flags = format!("--cpu {cpu} --disk {disk}");
            writeln!(out, "  {flags:<36} {:>5} t/s", number(speed.tokens_per_second))?;
        }
    }
    Ok(())
}

fn speeds(out: &mut fmt::Formatter<'_>, report: &Report, forecast: &Forecast) -> std::fmt::Result {
    writeln!(out)?;
    places(out, report, forecast)?;
    decode(out, forecast)?;
    let expected = &forecast.expected;
    let what = match expected.limit() {
        Limit::Disk => "the disk",
        Limit::Products => "compute (memory bandwidth, cores)",
    };
    writeln!(
        out,
        "limited by     {what}: compute {}, reads {} of a token's {}; overlap {:.0}",
        milliseconds(expected.products_seconds),
        milliseconds(expected.reading_seconds),
        milliseconds(1.0 / expected.tokens_per_second),
        Percent(expected.efficiency().min(1.0))
    )?;
    let first = forecast.first_token;
    let assumed = if report.machine.host.cpu.operations.is_none() { ", operations assumed" } else { "" };
    writeln!(
        out,
        "first token    {} for {} tokens: loading {}, prompt {} (reads {}, compute {}{assumed})",
        seconds(first.seconds()),
        report.task.n_prompt,
        seconds(first.load_seconds),
        seconds(first.prompt_seconds),
        seconds(first.reading_seconds),
        seconds(first.products_seconds)
    )?;
    if forecast.device.is_some() {
        writeln!(out, "no run on a GPU was ever measured: what it brings follows from bandwidths alone")?;
    }
    Ok(())
}

/// Where experts and the rest lie.
fn places(out: &mut fmt::Formatter<'_>, report: &Report, forecast: &Forecast) -> std::fmt::Result {
    let of_experts = |bytes: u64| Percent(bytes as f64 / report.model.expert_bytes.max(1) as f64);
    match &forecast.plan {
        None => writeln!(out, "fits           all of it: llama.cpp runs by itself")?,
        Some(plan) => {
            let beside = plan.budget - plan.unused() - plan.expert_cache;
            // While tokens decode, as the share.
            let (cache, beside) = plan.decode.as_ref().map_or((plan.expert_cache, beside), |decode| {
                (decode.expert_cache, beside - (plan.fixed.compute - decode.compute))
            });
            writeln!(
                out,
                "memory         {} of experts ({:.0}), {} of all else",
                Bytes(cache),
                of_experts(cache),
                Bytes(beside)
            )?;
            if let Some(warning) = &plan.warning {
                writeln!(
                    out,
                    "               less than one token uses: {} of {} experts",
                    warning.n_slots, warning.n_cycle
                )?;
            }
        }
    }
    match (&forecast.device, report.machine.host.device) {
        (Some(plan), _) => {
            writeln!(
                out,
                "GPU            {} of experts ({:.0}), all ordinary weights and the context",
                Bytes(plan.cache),
                of_experts(plan.cache)
            )?;
        }
        (None, Some(_)) => writeln!(out, "GPU            too small for ordinary weights and the context: left aside")?,
        (None, None) => {}
    }
    Ok(())
}

/// The speed of decoding and the reads of a token.
fn decode(out: &mut fmt::Formatter<'_>, forecast: &Forecast) -> std::fmt::Result {
    let Forecast { expected, low, high, .. } = forecast;
    let speed = |speed: f64| number(speed);
    write!(out, "decode, exact  {} t/s", speed(expected.tokens_per_second))?;
    // Each is a draw of a few tokens: the figure itself may lie beyond the other two.
    let all = [low, expected, high].map(|found| found.tokens_per_second);
    let (least, most) = (all.into_iter().fold(all[0], f64::min), all.into_iter().fold(all[0], f64::max));
    if number(least) != number(most) {
        write!(out, " ({} to {} as recorded models differ)", speed(least), speed(most))?;
    }
    writeln!(out)?;
    if expected.bytes_read > 0.0 {
        writeln!(
            out,
            "               {} t/s if experts were chosen blindly, {} with a policy that knows the future",
            speed(forecast.random.tokens_per_second),
            speed(forecast.optimum.tokens_per_second)
        )?;
        writeln!(
            out,
            "               {:.1} of experts are there, {} are read for a token",
            Percent(expected.hit_rate),
            Bytes(expected.bytes_read as u64)
        )?;
    }
    Ok(())
}

fn memory(out: &mut fmt::Formatter<'_>, report: &Report) -> std::fmt::Result {
    if report.memory.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{:>11}{:>10}{:>9}{:>14}{:>9}  limited by", "memory", "experts", "found", "read a token", "t/s")?;
    for row in &report.memory {
        let limit = match row.speed.limit() {
            Limit::Disk => "disk",
            Limit::Products => "compute",
        };
        let mark = if row.asked { "  <" } else { "" };
        writeln!(
            out,
            "{:>11}{:>10}{:>9}{:>14}{:>9}  {limit}{mark}",
            ShortBytes(row.memory).to_string(),
            format!("{:.0}", Percent(row.share)),
            Percent(row.speed.hit_rate).to_string(),
            ShortBytes(row.speed.bytes_read as u64).to_string(),
            number(row.speed.tokens_per_second)
        )?;
    }
    Ok(())
}

/// Three digits.
fn number(value: f64) -> String {
    match value {
        v if v >= 99.95 => format!("{v:.0}"),
        v if v >= 9.995 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

fn billions(n: u64) -> String {
    match n {
        n if n < 1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
        n => format!("{:.1} B", n as f64 / 1e9),
    }
}

/// A rate for people: `3.1 GB/s`.
pub fn rate(bytes_per_second: f64) -> String {
    match bytes_per_second {
        rate if rate >= 1e12 => format!("{:.2} TB/s", rate / 1e12),
        rate if rate >= 1e9 => format!("{:.1} GB/s", rate / 1e9),
        rate => format!("{:.0} MB/s", rate / 1e6),
    }
}

fn milliseconds(seconds: f64) -> String {
    format!("{} ms", number(1e3 * seconds))
}

fn seconds(seconds: f64) -> String {
    format!("{} s", number(seconds))
}
