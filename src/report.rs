//! Measurements as text and as JSON. Start-up and closing lines give each figure once: brief lines are always shown,
//! details with `-v`.

pub mod closing;
pub mod start;

use serde_json::{Value, json};

#[cfg(feature = "engine")]
use super::log::Level;
use hobbit::stats::{PhaseStats, Stats, Timings};

/// Hit rate from which reads are assumed not to bound decoding, unless decoding waited for them anyway.
const RESIDENT: f64 = 0.95;
/// Share of decode time that such waiting has to exceed: few misses of large experts can be most of the time.
const WAITED: f64 = 0.1;

/// A line of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Whether it is shown without `-v`.
    pub is_brief: bool,
    pub text: String,
}

impl Line {
    /// The level of the log at which it is shown.
    #[cfg(feature = "engine")]
    pub fn level(&self) -> Level {
        if self.is_brief { Level::Info } else { Level::More }
    }
}

pub fn brief(text: impl Into<String>) -> Line {
    Line { is_brief: true, text: text.into() }
}

pub fn detail(text: impl Into<String>) -> Line {
    Line { is_brief: false, text: text.into() }
}

/// llama.cpp's lines, as `llama_perf_sampler_print` and `llama_perf_context_print` print them.
pub fn timing_lines(t: &Timings) -> String {
    // llama.cpp counts at least one of each, to avoid division by zero.
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

/// The JSON of `--stats-json`: a session's measurements, added to the description in `about`. Rates are `null` if
/// nothing was counted.
pub fn json(mut about: Value, timings: &Timings, stats: &Stats) -> Value {
    for (device, counters) in about["devices"].as_array_mut().into_iter().flatten().zip(&stats.devices) {
        device["counters"] = json!(counters);
    }
    // Every counter of the library, under its field name.
    if let (Value::Object(all), Value::Object(mut counted)) = (&mut about, json!(stats)) {
        counted.remove("devices");
        all.extend(counted);
    }
    for (name, value) in [
        ("hobbit", json!(env!("CARGO_PKG_VERSION"))),
        ("timings", json!(timings)),
        ("prompt", phase(&stats.prompt)),
        ("decode", phase(&stats.decode)),
        ("total", phase(&stats.total())),
        ("roofline_tokens_per_second", json!(roofline(stats))),
        ("efficiency", json!(efficiency(stats))),
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

/// Tokens per second if decoding did nothing but read, at decoding's own read bandwidth. `None` if (nearly) all
/// experts were resident, where the figure has no meaning.
fn roofline(stats: &Stats) -> Option<f64> {
    let waited = stats.decode.io_wait_seconds > WAITED * stats.decode.seconds;
    stats.decode.hit_rate().filter(|&rate| rate < RESIDENT || waited)?;
    stats.decode.roofline_tokens_per_second(stats.decode.read_bandwidth()?)
}

/// How close decoding came to full overlap of reads and computation.
fn efficiency(stats: &Stats) -> Option<f64> {
    stats.decode.efficiency(stats.decode.read_bandwidth()?)
}

/// A readable number of parameters: `11.7M`.
pub fn parameters(n: u64) -> String {
    match n as f64 {
        few if n < 1_000_000_000 => format!("{:.1}M", few / 1e6),
        many => format!("{:.2}B", many / 1e9),
    }
}

/// llama.cpp's description of a model; the number of parameters replaces an unknown size name.
pub fn description(text: &str, n_params: u64) -> String {
    text.replace("?B", &parameters(n_params)).replace(" (guessed)", "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit::stats::DeviceCounters;

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

    #[test]
    fn timing_lines_are_llama_cpps() {
        let expected = "\
llama_perf_sampler_print:    samplers time =       1.50 ms /    21 runs
@:        load time =     123.46 ms
@: prompt eval time =      50.00 ms /    10 tokens (    5.00 ms per token,   200.00 tokens per second)
@:        eval time =     200.00 ms /    20 runs   (   10.00 ms per token,   100.00 tokens per second)
@:       total time =     400.00 ms /    30 tokens
@:    graphs reused =         19
";
        assert_eq!(timing_lines(&TIMINGS), expected.replace('@', "llama_perf_context_print"));
    }

    #[test]
    fn no_roofline_when_nearly_everything_was_resident() {
        let mut stats = closing::tests::stats();
        (stats.decode.hits, stats.decode.misses) = (95, 5);
        stats.decode.io_wait_seconds = 0.5 * stats.decode.seconds;
        assert!(roofline(&stats).is_some(), "a few large misses may bound decoding");
        stats.decode.io_wait_seconds = 0.0;
        assert_eq!(roofline(&stats), None);
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
        let about = json!({ "caching": { "slots": "even" }, "devices": [{ "name": "CUDA0" }, { "name": "CUDA1" }] });
        let counters = DeviceCounters { hits: 4, ..Default::default() };
        let value = json(about, &TIMINGS, &Stats { devices: vec![counters], ..closing::tests::stats() });
        for (pointer, expected) in [
            ("/devices/0/counters/hits", json!(4)),
            ("/devices/1", json!({ "name": "CUDA1" })),
            ("/caching/slots", json!("even")),
            ("/decode/hit_rate", json!(0.75)),
            ("/decode/misses", json!(25)),
            ("/decode/used", json!({"high": 134, "low": 60, "skipped": 6})),
            ("/decode/used_shares/low", json!(0.3)),
            ("/prompt/hit_rate", Value::Null),
            ("/total/missed", json!({"high": 10, "low": 12, "skipped": 3})),
            ("/total/bytes_read", json!(1u64 << 30)),
            ("/timings/eval_runs", json!(20)),
            ("/roofline_tokens_per_second", json!(200.0)),
        ] {
            assert_eq!(value.pointer(pointer), Some(&expected), "{pointer}");
        }
        for key in
            ["layers", "prefetch", "virtual_experts", "target_latency", "kernels", "peak_rss_bytes", "efficiency"]
        {
            assert!(value.get(key).is_some(), "{key}");
        }
    }
}
