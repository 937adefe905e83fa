//! Measurements in words: llama.cpp's timing lines, then hobbit's; the same as JSON.

pub mod brief;
pub mod device;

use std::fmt::Write as _;

use serde_json::{Value, json};

use hobbit::stats::{PhaseStats, PrecisionReport, PrefetchReport, Stats, Timings, WarmStart};
use hobbit::units::{Bytes, Percent, Seconds};

/// The hit rate from which reading is taken not to bound decoding, unless decoding waited for it all the same.
const RESIDENT: f64 = 0.95;
/// The share of decoding that such waiting has to exceed: few misses of large experts can be most of the time.
const WAITED: f64 = 0.1;

/// llama.cpp's lines, as `llama_perf_sampler_print` and `llama_perf_context_print` print them.
pub fn timing_lines(t: &Timings) -> String {
    // llama.cpp counts at least one of each, so that nothing is divided by zero.
    let (prompt, runs) = (t.prompt_tokens.max(1), t.eval_runs.max(1));
    let per_token = |ms: f64, n: u64| {
        let n = n as f64;
        format!("({:8.2} ms per token, {:8.2} tokens per second)", ms / n, 1e3 / ms * n)
    };
    let name = "llama_perf_context_print";
    format!(
        "llama_perf_sampler_print:    samplers time = {:10.2} ms / {:5} runs\n\
         {name}:        load time = {:10.2} ms\n\
         {name}: prompt eval time = {:10.2} ms / {prompt:5} tokens {}\n\
         {name}:        eval time = {:10.2} ms / {runs:5} runs   {}\n\
         {name}:       total time = {:10.2} ms / {:5} tokens\n\
         {name}:    graphs reused = {:10}\n",
        t.sample_ms,
        t.sample_count,
        t.load_ms,
        t.prompt_ms,
        per_token(t.prompt_ms, prompt),
        t.eval_ms,
        per_token(t.eval_ms, runs),
        t.total_ms,
        prompt + runs,
        t.graphs_reused,
    )
}

/// What reading ahead did, on a line.
fn prefetch_line(report: &PrefetchReport) -> String {
    let counters = &report.counters;
    let percent = |part: u64| (100 * part).checked_div(counters.issued).unwrap_or(0);
    let mut line = format!(
        "{} experts read ahead ({} % in time, {} % late, {} % not used)",
        counters.issued,
        percent(counters.useful),
        percent(counters.late),
        percent(counters.wasted)
    );
    for recall in &report.recall {
        let _ = write!(line, ", {} foreseen {} ahead", Percent(recall.recall.unwrap_or(0.0)), recall.distance);
    }
    let word = if report.governor.is_on { "on" } else { "off" };
    let _ = write!(line, "; {word}: {}", report.governor.reason);
    line
}

/// What an earlier run left.
pub fn warm_start(warm: WarmStart) -> String {
    let WarmStart { saved, experts, bytes: read } = warm;
    format!("hobbit: warm start: {experts} of {saved} experts that were in memory are back, {} read", Bytes(read))
}

/// hobbit's lines: where the experts were found and what reading them cost.
pub fn cache_lines(stats: &Stats) -> String {
    let mut lines = String::new();
    for (name, phase) in [("prompt", &stats.prompt), ("decode", &stats.decode)] {
        let Some(hit_rate) = phase.hit_rate() else { continue };
        let _ = writeln!(
            lines,
            "hobbit: {name}: {} hits, {} misses (hit rate {}), {} read{}, waited {} of {}",
            phase.hits,
            phase.misses,
            Percent(hit_rate),
            Bytes(phase.bytes_read),
            phase.read_bandwidth().map_or_else(String::new, |rate| format!(" at {}/s", Bytes(rate as u64))),
            Seconds(phase.io_wait_seconds),
            Seconds(phase.seconds),
        );
    }
    // A dense model has no hit rate: nothing is known about its reads.
    if let (Some(reached), Some(_)) = (stats.decode.tokens_per_second(), stats.decode.hit_rate()) {
        let bound = match roofline(stats) {
            Some(roofline) => {
                let share = Percent(reached / roofline);
                let efficiency = efficiency(stats).map_or_else(String::new, |share| {
                    format!(", {:.0} of what reading and computing at once would give", Percent(share))
                });
                format!("{share:.0} of the I/O roofline of {roofline:.2} tokens/s{efficiency}")
            }
            None => "not bound by I/O".to_owned(),
        };
        let _ = writeln!(lines, "hobbit: decode: {reached:.2} tokens/s, {bound}");
    }
    if let Some(prefetch) = &stats.prefetch {
        let _ = writeln!(lines, "hobbit: prefetch: {}", prefetch_line(prefetch));
    }
    if !stats.kernels.trials.is_empty() {
        let _ = writeln!(lines, "hobbit: {}", stats.kernels);
    }
    if stats.peak_rss_bytes > 0 {
        let _ = writeln!(lines, "hobbit: peak resident memory: {}", Bytes(stats.peak_rss_bytes));
    }
    lines
}

/// hobbit's lines about dynamic precision: what experts were computed in, and how misses were answered. Empty for an exact
/// session.
pub fn precision_lines(precision: &PrecisionReport, stats: &Stats) -> String {
    let mut lines = String::new();
    if !precision.is_dynamic() {
        return lines;
    }
    for (name, phase) in [("prompt", &stats.prompt), ("decode", &stats.decode)] {
        let Some(shares) = phase.used.shares() else { continue };
        let _ = writeln!(
            lines,
            "hobbit: {name}: experts used: {shares}; where no high version was resident: {}",
            phase.missed
        );
    }
    let upgrades = stats.total().upgrades;
    if upgrades > 0 {
        let experts = if upgrades == 1 { "expert" } else { "experts" };
        let _ = writeln!(lines, "hobbit: {upgrades} {experts} upgraded from low to high precision");
    }
    lines
}

/// Everything for `--stats-json`: what a session measured, beside what is known `about` it. Rates are absent (`null`) where
/// nothing was counted.
pub fn json(mut about: Value, timings: &Timings, stats: &Stats) -> Value {
    for (device, counters) in about["devices"].as_array_mut().into_iter().flatten().zip(&stats.devices) {
        device["counters"] = json!(counters);
    }
    for (name, value) in [
        ("hobbit", json!(env!("CARGO_PKG_VERSION"))),
        ("timings", json!(timings)),
        ("prompt", phase(&stats.prompt)),
        ("decode", phase(&stats.decode)),
        ("total", phase(&stats.total())),
        ("roofline_tokens_per_second", json!(roofline(stats))),
        ("efficiency", json!(efficiency(stats))),
        ("peak_rss_bytes", json!(stats.peak_rss_bytes)),
        ("layers", json!(stats.layers)),
        ("prefetch", json!(stats.prefetch)),
        ("target_latency", json!(stats.latency)),
        ("kernels", json!(stats.kernels)),
    ] {
        about[name] = value;
    }
    about
}

fn phase(phase: &PhaseStats) -> Value {
    let mut object = json!(phase);
    object["hit_rate"] = json!(phase.hit_rate());
    object["used_shares"] = json!(phase.used.shares());
    object["read_bytes_per_second"] = json!(phase.read_bandwidth());
    object["tokens_per_second"] = json!(phase.tokens_per_second());
    object
}

/// Tokens per second if decoding did nothing but read, at the bandwidth that decoding itself reached. `None` when
/// (nearly) everything was resident: the number would say nothing.
fn roofline(stats: &Stats) -> Option<f64> {
    let waited = stats.decode.io_wait_seconds > WAITED * stats.decode.seconds;
    stats.decode.hit_rate().filter(|&rate| rate < RESIDENT || waited)?;
    stats.decode.roofline_tokens_per_second(stats.decode.read_bandwidth()?)
}

/// How near decoding came to reading and computing at once.
fn efficiency(stats: &Stats) -> Option<f64> {
    stats.decode.efficiency(stats.decode.read_bandwidth()?)
}

/// A number of parameters for people: `11.7M`.
pub fn parameters(n: u64) -> String {
    match n as f64 {
        few if n < 1_000_000_000 => format!("{:.1}M", few / 1e6),
        many => format!("{:.2}B", many / 1e9),
    }
}

/// llama.cpp's description of a model, with the number of parameters where it knows no name for the size.
pub fn description(text: &str, n_params: u64) -> String {
    text.replace("?B", &parameters(n_params)).replace(" (guessed)", "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit::options::PrecisionMode;
    use hobbit::stats::{DeviceCounters, PrecisionCounts};

    const TIMINGS: Timings = Timings {
        load_ms: 123.456,
        prompt_ms: 50.0,
        prompt_tokens: 10,
        eval_ms: 200.0,
        eval_runs: 20,
        sample_ms: 1.5,
        sample_count: 21,
        total_ms: 400.0,
        graphs_reused: 19,
    };

    fn stats() -> Stats {
        let decode = PhaseStats {
            tokens: 20,
            seconds: 0.2,
            hits: 75,
            misses: 25,
            used: PrecisionCounts { high: 134, low: 60, skipped: 6 },
            missed: PrecisionCounts { high: 10, low: 12, skipped: 3 },
            rerouted: Default::default(),
            upgrades: 2,
            slices_loaded: 75,
            bytes_read: 1 << 30,
            io_busy_seconds: 0.1,
            io_wait_seconds: 0.05,
        };
        Stats { decode, peak_rss_bytes: 3 << 29, ..Stats::default() }
    }

    fn precision(mode: PrecisionMode) -> PrecisionReport {
        PrecisionReport {
            mode,
            t1: 0.6,
            t2: 0.9,
            prefill_low: 0.25,
            renormalise: false,
            deterministic: false,
            cpu_helper: false,
            divided: false,
            kernels: Default::default(),
            routing: None,
            loss_bound: None,
            upgrade: true,
            high: Default::default(),
            low: None,
        }
    }

    #[test]
    fn timing_lines_are_llama_cpps() {
        let expected = "\
llama_perf_sampler_print:    samplers time =       1.50 ms /    21 runs
llama_perf_context_print:        load time =     123.46 ms
llama_perf_context_print: prompt eval time =      50.00 ms /    10 tokens (    5.00 ms per token,   200.00 tokens per second)
llama_perf_context_print:        eval time =     200.00 ms /    20 runs   (   10.00 ms per token,   100.00 tokens per second)
llama_perf_context_print:       total time =     400.00 ms /    30 tokens
llama_perf_context_print:    graphs reused =         19
";
        assert_eq!(timing_lines(&TIMINGS), expected);
    }

    #[test]
    fn cache_lines_skip_what_was_not_counted() {
        let expected = "\
hobbit: decode: 75 hits, 25 misses (hit rate 75.0 %), 1.00 GiB read at 10.00 GiB/s, waited 0.05 s of 0.20 s
hobbit: decode: 100.00 tokens/s, 50 % of the I/O roofline of 200.00 tokens/s, 75 % of what reading and computing at once would give
hobbit: peak resident memory: 1.50 GiB
";
        assert_eq!(cache_lines(&stats()), expected);
        assert_eq!(cache_lines(&Stats::default()), "");
    }

    #[test]
    fn precision_lines_are_for_dynamic_sessions() {
        let expected = "\
hobbit: decode: experts used: 67.0 % high, 30.0 % low, 3.0 % skipped; where no high version was resident: 10 high, 12 low, 3 skipped
hobbit: 2 experts upgraded from low to high precision
";
        let dynamic = precision(PrecisionMode::Dynamic);
        assert_eq!(precision_lines(&dynamic, &stats()), expected);
        assert_eq!(precision_lines(&dynamic, &Stats::default()), "");
        assert_eq!(precision_lines(&precision(PrecisionMode::Exact), &stats()), "");
    }

    #[test]
    fn no_roofline_when_nearly_everything_was_resident() {
        let mut stats = stats();
        (stats.decode.hits, stats.decode.misses) = (95, 5);
        stats.decode.io_wait_seconds = 0.5 * stats.decode.seconds;
        assert!(roofline(&stats).is_some(), "a few large misses may bound decoding");
        stats.decode.io_wait_seconds = 0.0;
        assert!(cache_lines(&stats).contains("hobbit: decode: 100.00 tokens/s, not bound by I/O\n"));
        assert_eq!(roofline(&stats), None);
        (stats.decode.hits, stats.decode.bytes_read) = (0, 0);
        assert!(cache_lines(&stats).contains("not bound by I/O"));
    }

    #[test]
    fn models_in_words() {
        for (n, text) in [(0, "0.0M"), (11_700_000, "11.7M"), (5_020_000_000, "5.02B")] {
            assert_eq!(parameters(n), text);
        }
        assert_eq!(description("llama ?B Q8_0 (guessed)", 12_200_000), "llama 12.2M Q8_0");
        assert_eq!(description("llama 8x7B Q8_0", 46_700_000_000), "llama 8x7B Q8_0");
    }

    #[test]
    fn json_has_counts_and_rates() {
        let about = json!({
            "precision": precision(PrecisionMode::Dynamic),
            "caching": { "slots": "even" },
            "devices": [{ "name": "CUDA0" }, { "name": "CUDA1" }],
        });
        let stats = Stats { devices: vec![DeviceCounters { hits: 4, ..Default::default() }], ..stats() };
        let value = json(about, &TIMINGS, &stats);
        assert_eq!(value["devices"][1], json!({ "name": "CUDA1" }), "nothing was counted there");
        assert_eq!(
            (&value["devices"][0]["name"], &value["devices"][0]["counters"]["hits"]),
            (&json!("CUDA0"), &json!(4))
        );
        assert_eq!(value["decode"]["hit_rate"], 0.75);
        assert_eq!(value["decode"]["misses"], 25);
        assert_eq!(value["prompt"]["hit_rate"], Value::Null);
        assert_eq!(value["precision"]["mode"], "dynamic");
        assert_eq!(value["caching"]["slots"], "even");
        assert_eq!(value["decode"]["used"], json!({"high": 134, "low": 60, "skipped": 6}));
        assert_eq!(value["decode"]["used_shares"]["low"], 0.3);
        assert_eq!(value["prompt"]["used_shares"], Value::Null);
        assert_eq!(value["total"]["missed"], json!({"high": 10, "low": 12, "skipped": 3}));
        assert_eq!(value["total"]["upgrades"], 2);
        assert_eq!(value["timings"]["eval_runs"], 20);
        assert_eq!(value["roofline_tokens_per_second"], 200.0);
        assert!(value["efficiency"].as_f64().is_some_and(|share| (share - 0.75).abs() < 1e-9));
        assert_eq!(value["total"]["bytes_read"], 1u64 << 30);
    }
}
