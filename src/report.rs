//! Measurements in words and as JSON: at most three lines when a run starts and four when it ends. All figures are in
//! the JSON of `--stats-json`, which `-v` logs too.

use std::fmt::Write as _;

use serde_json::{Value, json};

use hobbit::engine::ModelInfo;
use hobbit::options::KernelChoice;
use hobbit::stats::{DeviceReport, PhaseStats, PrecisionReport, Stats, Timings, WarmStart};
use hobbit_core::load::balance::HelperMode;
use hobbit_core::plan::{BudgetSource, MemoryPlan, WidthReport};
use hobbit_core::units::{Bytes, Percent, Seconds};

/// Hit rate from which reads are assumed not to bound decoding, unless decoding waited for them anyway.
const RESIDENT: f64 = 0.95;
/// Share of decode time that such waiting has to exceed: few misses of large experts can be most of the time.
const WAITED: f64 = 0.1;

/// The model, and the session's context. `name` is the model's file as shown; `is_n_ctx_given`: the user gave the
/// context's length.
pub fn model(name: &str, info: &ModelInfo, n_ctx: u32, is_n_ctx_given: bool) -> String {
    let ModelInfo { n_params, tensor_bytes, n_layer, n_expert, n_expert_used, n_ctx_train, .. } = info;
    let mut line =
        format!("{name}: {}, {}, {n_layer} layers", description(&info.description, *n_params), Bytes(*tensor_bytes));
    if info.is_moe() {
        let _ = write!(line, " of {n_expert} experts, {n_expert_used} per token");
    }
    let _ = write!(line, ", context {n_ctx}");
    if !is_n_ctx_given && n_ctx < *n_ctx_train {
        let _ = write!(line, " of {n_ctx_train} (-c)");
    }
    line
}

/// The available memory, and the experts in it; also reports a session that runs as plain llama.cpp.
pub fn memory(
    plan: &MemoryPlan,
    io_choice: &str,
    (warm, width, devices): (Option<WarmStart>, Option<WidthReport>, &[DeviceReport]),
) -> String {
    let origin = match plan.budget_source {
        BudgetSource::Given => "--mem-budget",
        BudgetSource::Cgroup => &format!("limit of the {}", BudgetSource::GROUP),
        BudgetSource::MemAvailable => "available memory",
    };
    let origin = match plan.asked {
        Some(asked) => format!("all of the {origin}; {} asked", Bytes(asked)),
        None => origin.to_owned(),
    };
    let mut line = format!("memory: {} ({origin})", Bytes(plan.budget));
    let (slots, experts) = (plan.n_slots, plan.n_experts);
    let _ = match (io_choice.strip_prefix("none: "), percent(slots, experts)) {
        (Some(words), _) => write!(line, "; {words}"),
        _ if DeviceReport::hold_all(devices, plan.n_experts) => {
            write!(line, "; no expert is kept here, because the devices have all")
        }
        (None, _) if plan.is_fully_resident() => {
            let low =
                if plan.n_low_slots > 0 { format!(" and {} low versions", plan.n_low_slots) } else { String::new() };
            write!(line, "; all {experts} experts{low} fit, in {}", Bytes(plan.expert_cache))
        }
        (None, percent) => {
            let how = if io_choice.starts_with("direct") { "by direct I/O" } else { "through the page cache" };
            let low =
                if plan.n_low_slots > 0 { format!(" and {} low versions", plan.n_low_slots) } else { String::new() };
            let (cache, percent) = (Bytes(plan.expert_cache), percent.unwrap_or(0));
            let more = plan.decode.as_ref().map_or_else(String::new, |decode| {
                format!(" for prompts, {} in {} while tokens decode", decode.n_slots, Bytes(decode.expert_cache))
            });
            write!(
                line,
                "; {slots} of {experts} experts ({percent} %){low} in {cache}{more}, the others are read {how}"
            )
        }
    };
    // Whoever sees the file's size should know where it is. Most models' embeddings are small.
    if let Some(tables) = io_choice.split("; ").find(|part| part.contains("GiB of embeddings")) {
        let _ = write!(line, "; {tables}");
    }
    for mirror in io_choice.split("; ").filter(|part| part.starts_with("mirror ")) {
        let _ = write!(line, "; {mirror}");
    }
    if let Some(WidthReport { usual, widest, .. }) = width {
        let _ =
            write!(line, "; prompts in batches of {usual} to {widest} tokens, as their reads and products take time");
    }
    match warm {
        Some(WarmStart { later, .. }) if later > 0 => {
            let _ = write!(line, "; {later} of an earlier run are read in pauses (--cache-state)");
        }
        Some(WarmStart { by_frequency, saved, experts, bytes, .. }) if experts > 0 || bytes > 0 => {
            let what = match by_frequency {
                true => format!("filled with the {experts} most frequent of the path table"),
                false => format!("{experts} of the {saved} of an earlier run are back"),
            };
            let _ = write!(line, "; {what} ({} read)", Bytes(bytes));
        }
        _ => {}
    }
    line
}

/// The devices, and everything that makes results differ from llama.cpp's. A dense model's precision is not reported.
pub fn devices_and_precision(devices: &[DeviceReport], precision: &PrecisionReport) -> Option<String> {
    let mut parts: Vec<String> = devices.iter().map(device).collect();
    parts.extend(missing(devices));
    if let Some(words) = &precision.routing {
        parts.push(format!("routing: {words}; results are approximate"));
    }
    parts.extend(deviation(precision));
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// The precision of a run, unless it is exact in every way and uses all it was given.
fn deviation(precision: &PrecisionReport) -> Option<String> {
    let low = precision.low.as_ref().map(|low| format!("low {} from {}", low.versions.types, low.source));
    if precision.is_dynamic() {
        let PrecisionReport { t1, t2, .. } = precision;
        let low = low.unwrap_or_else(|| "no low".to_owned());
        let over = if precision.over_link { " over the link" } else { "" };
        return Some(format!("precision: dynamic{over} (T1 {t1:.2}, T2 {t2:.2}), {low}; results are approximate"));
    }
    let is_resident = precision.high.slots == precision.high.experts && !precision.divided;
    let unused = low.map(|low| {
        if is_resident { format!("everything fits, {low} is not needed") } else { format!("{low} is not used") }
    });
    if precision.routing.is_some() {
        return unused;
    }
    let mut except = match (precision.divided, precision.cpu_helper) {
        (false, false) => "",
        (true, false) => ", except for the device's rounding in divided prompts",
        (_, true) => {
            ", except for the device's rounding in divided prompts, and for experts that the CPU helper computes"
        }
    }
    .to_owned();
    if precision.kernels == KernelChoice::Fastest {
        except += ", except for the fastest kernels' rounding of prompts: they are approximate";
    }
    if except.is_empty() && unused.is_none() {
        return None;
    }
    let unused = unused.map_or_else(String::new, |unused| format!("; {unused}"));
    Some(format!("precision: exact (bit-identical to llama.cpp{except}){unused}"))
}

fn device(device: &DeviceReport) -> String {
    let layers = if device.n_layers == 1 { "layer" } else { "layers" };
    let mut text = format!("{}: {} {layers}", device.name, device.n_layers);
    if device.unified {
        text += ", experts in place in host memory";
    } else if let Some(percent) = percent(device.slots, device.experts) {
        let _ = write!(text, ", {} of {} experts ({percent} %)", device.slots, device.experts);
        if device.slots > 0 {
            let _ = write!(text, " in {}", Bytes(device.cache_bytes));
        }
        if device.takes_all && device.slots < device.experts {
            text += ", all that weights, context and head-room leave";
        }
    }
    text
}

/// How devices come by experts that they lack; `None` if they lack none that they compute.
fn missing(devices: &[DeviceReport]) -> Option<String> {
    let lacks = |device: &&DeviceReport| !device.unified && device.staging_slots > 0 && device.slots < device.experts;
    let device = devices.iter().find(lacks)?;
    let how = match device.helper {
        None => "copied from memory when they are needed",
        Some(HelperMode::On) => "computed by the CPU if memory has them, and else copied",
        Some(_) => "copied from memory, or computed by the CPU where measurements say that is sooner",
    };
    let ahead = if device.copies_ahead { "some are copied ahead" } else { "none is copied ahead (--predictor)" };
    Some(format!("missing experts are {how}; {ahead}"))
}

fn percent(part: u64, whole: u64) -> Option<u64> {
    (part * 100).checked_div(whole)
}

/// The measurements of a run and how it ended.
pub struct Closing<'a> {
    pub stats: &'a Stats,
    pub precision: &'a PrecisionReport,
    pub devices: &'a [DeviceReport],
    /// Whether the model ended the text.
    pub is_eog: bool,
    /// `None` if sampling is not random.
    pub seed: Option<u32>,
    /// Whether the seed was drawn because none was given.
    pub is_seed_drawn: bool,
}

/// The closing lines: four at most.
pub fn closing(run: &Closing) -> Vec<String> {
    let stats = run.stats;
    let phases = [("prompt", &stats.prompt), ("decode", &stats.decode)];
    let mut lines = Vec::new();
    for (name, phase) in phases {
        if let (tokens @ 1.., Some(rate)) = (phase.tokens, phase.tokens_per_second()) {
            let (s, time) = (if tokens == 1 { "" } else { "s" }, Seconds(phase.seconds));
            lines.push(format!("{name}: {tokens} token{s} in {time}, {rate:.2} tokens/s"));
            if let (Some(WidthReport { usual, last: Some(last), .. }), "prompt") = (&stats.prompt_width, name)
                && let Some(line) = lines.last_mut().filter(|_| last > usual)
            {
                let _ = write!(line, ", {last} at once");
            }
        }
    }
    if let Some(last) = lines.last_mut() {
        if let Some(latency) = &stats.latency {
            let _ = write!(last, "; {latency}");
        }
        if let Some(drafts) = &stats.speculation {
            let _ = write!(last, "; {drafts}");
        }
        if run.is_eog {
            *last += "; end of text";
        }
    }
    // A dense model has no hit rate.
    let counted = phases.into_iter().rev().find(|(_, phase)| phase.hit_rate().is_some());
    lines.extend(counted.map(|(name, phase)| experts(name, phase, run)));
    let seed = run
        .seed
        .map(|seed| if run.is_seed_drawn { format!("random seed {seed} (reuse: -s)") } else { format!("seed {seed}") });
    let peak = (stats.peak_rss_bytes > 0).then(|| format!("peak memory {}", Bytes(stats.peak_rss_bytes)));
    let last: Vec<String> = seed.into_iter().chain(peak).collect();
    if !last.is_empty() {
        lines.push(last.join(", "));
    }
    lines
}

/// Speed and hit rate of one answer, from the counts of decoding before and after it.
pub fn answer(before: &PhaseStats, after: &PhaseStats) -> Option<String> {
    let (tokens, seconds) = (after.tokens.checked_sub(before.tokens)?, after.seconds - before.seconds);
    if tokens == 0 || seconds <= 0.0 {
        return None;
    }
    let mut line = format!("{:.2} tokens/s", tokens as f64 / seconds);
    let hits = after.hits.saturating_sub(before.hits);
    let all = hits + after.misses.saturating_sub(before.misses);
    if all > 0 {
        let _ = write!(line, ", hit rate {}", Percent(hits as f64 / all as f64));
    }
    Some(line)
}

/// Hits and misses of a phase.
fn experts(name: &str, phase: &PhaseStats, run: &Closing) -> String {
    let hit_rate = Percent(phase.hit_rate().unwrap_or(0.0));
    let per_token = Bytes(phase.bytes_read / phase.tokens.max(1));
    let (waited, time) = (Seconds(phase.io_wait_seconds), Seconds(phase.seconds));
    let mut line =
        format!("experts in {name}: hit rate {hit_rate}, {per_token} read per token, waited {waited} of {time}");
    if let Some(shares) = phase.used.shares().filter(|_| run.precision.is_dynamic()) {
        let _ = write!(line, "; computed {shares}");
    }
    let rerouted = (phase.used.total() > 0).then(|| phase.rerouted.uses as f64 / phase.used.total() as f64);
    if let (Some(share), true) = (rerouted, run.precision.routing.is_some()) {
        let _ = write!(line, "; {} of the experts were substituted", Percent(share));
        if phase.rerouted.refused > 0 {
            let refused = phase.rerouted.refused;
            let _ = write!(line, " ({refused} choices of the router could not be read and stayed)");
        }
        let layers = &run.stats.layers;
        let n_flat = layers.iter().filter(|layer| layer.is_flat).count();
        if n_flat > 0 && name == "decode" {
            let n_layers = layers.len();
            let _ =
                write!(line, " (--substitute auto leaves out {n_flat} of {n_layers} layers: their routers are flat)");
        }
    }
    if let (Some(changed), "decode") = (run.stats.virtual_experts, name) {
        let (n, period) = (changed.replacements, changed.period_tokens);
        let norms = changed.norms;
        let _ = write!(line, "; {n} experts were exchanged, one of a layer in {period} tokens, norms {norms}");
        if changed.failed > 0 {
            let _ = write!(line, " ({} could not be read)", changed.failed);
        }
    }
    let share: f64 = run.stats.copies.iter().skip(1).map(|copy| copy.share).sum();
    if run.stats.copies.len() > 1 {
        let _ = write!(line, "; {} of the bytes read came from mirrors", Percent(share));
    }
    for (device, counters) in run.devices.iter().zip(&run.stats.devices) {
        if let Some(rate) = counters.hit_rate() {
            let _ = write!(line, "; {}: hit rate {}", device.name, Percent(rate));
        }
    }
    line
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
fn parameters(n: u64) -> String {
    match n as f64 {
        few if n < 1_000_000_000 => format!("{:.1}M", few / 1e6),
        many => format!("{:.2}B", many / 1e9),
    }
}

/// llama.cpp's description of a model; the number of parameters replaces an unknown size name.
fn description(text: &str, n_params: u64) -> String {
    text.replace("?B", &parameters(n_params)).replace(" (guessed)", "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit::options::PrecisionMode;
    use hobbit::stats::{DeviceCounters, LowReport, PrecisionCounts, VersionsReport};
    use hobbit_core::plan::{
        Budget, DecodePlan, ExpertCache, FixedCosts, MemoryLimits, PlanInput, PoolSpec, StagingWish,
    };

    const MIB: u64 = 1 << 20;

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
            in_order: 0,
            slices_loaded: 75,
            bytes_read: 1 << 30,
            io_busy_seconds: 0.1,
            io_wait_seconds: 0.05,
        };
        Stats { decode, peak_rss_bytes: 3 << 29, ..Stats::default() }
    }

    fn plan(budget: u64, n_layers: usize) -> MemoryPlan {
        let pool = PoolSpec {
            precision: hobbit_core::expert::Precision::High,
            n_versions: vec![8; n_layers],
            expert_stride: 4 * MIB,
            slice_stride_max: 2 * MIB,
        };
        let plan = MemoryPlan::new(&PlanInput {
            overcommit: false,
            budget: Budget::Bytes(budget * MIB),
            limits: MemoryLimits::default(),
            expert_cache: ExpertCache::Auto,
            low_share: Default::default(),
            fixed: FixedCosts::default(),
            prompt_only: 0,
            margin: None,
            pools: if n_layers > 0 { vec![pool] } else { Vec::new() },
            n_expert_used: 2,
            staging: StagingWish::default(),
        });
        plan.unwrap()
    }

    fn exact() -> PrecisionReport {
        PrecisionReport {
            mode: PrecisionMode::Exact,
            t1: 0.6,
            t2: 0.9,
            prefill_low: 0.25,
            renormalise: false,
            deterministic: false,
            cpu_helper: false,
            divided: false,
            kernels: KernelChoice::Identical,
            routing: None,
            over_link: false,
            loss_bound: None,
            upgrade: true,
            high: VersionsReport { types: "q8_0".into(), bytes: 5_798_205_850, slots: 210, experts: 768 },
            low: None,
        }
    }

    fn low() -> Option<LowReport> {
        let (source, types) = ("mixtral.low.gguf".into(), "q2_K".into());
        let versions = VersionsReport { types, bytes: 1_793_148_846, slots: 96, experts: 768 };
        Some(LowReport { source, versions, cache_bytes: 224_143_605 })
    }

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
        let mut stats = stats();
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
        let value = json(about, &TIMINGS, &Stats { devices: vec![counters], ..stats() });
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

    #[test]
    fn four_lines_at_the_end() {
        let run = |stats, precision| Closing {
            stats,
            precision,
            devices: &[],
            is_eog: false,
            seed: Some(7),
            is_seed_drawn: false,
        };
        let mut stats = stats();
        stats.prompt = PhaseStats { tokens: 10, seconds: 0.05, ..PhaseStats::default() };
        stats.decode.bytes_read = 20 * MIB;
        let precision = exact();
        let expected = [
            "prompt: 10 tokens in 0.05 s, 200.00 tokens/s",
            "decode: 20 tokens in 0.20 s, 100.00 tokens/s",
            "experts in decode: hit rate 75.0 %, 1.00 MiB read per token, waited 0.05 s of 0.20 s",
            "seed 7, peak memory 1.50 GiB",
        ];
        assert_eq!(closing(&run(&stats, &precision)), expected);
        let dynamic = PrecisionReport { mode: PrecisionMode::Dynamic, ..exact() };
        let lines = closing(&Closing { is_eog: true, is_seed_drawn: true, ..run(&stats, &dynamic) });
        assert!(lines[1].ends_with("; end of text") && lines[3].starts_with("random seed 7 (reuse: -s), "));
        assert!(lines[2].ends_with("; computed 67.0 % high, 30.0 % low, 3.0 % skipped"), "{}", lines[2]);
        let later = PhaseStats { tokens: 30, seconds: 0.7, hits: 85, misses: 35, ..stats.decode };
        assert_eq!(answer(&stats.decode, &later).unwrap(), "20.00 tokens/s, hit rate 50.0 %");
        assert_eq!(answer(&later, &later), None);
        let none = Stats::default();
        assert_eq!(closing(&run(&none, &precision)), ["seed 7"], "a dense model, and no tokens");
        assert!(closing(&Closing { seed: None, ..run(&none, &precision) }).is_empty(), "greedy");
    }

    #[test]
    fn models_and_memory() {
        let mut info = ModelInfo {
            description: "llama ?B Q8_0 (guessed)".into(),
            architecture: "llama".into(),
            path: "demo.gguf".into(),
            n_ctx_train: 4096,
            n_params: 11_700_000,
            tensor_bytes: 12 * MIB,
            expert_bytes: 10 * MIB,
            n_layer: 6,
            n_expert: 8,
            n_expert_used: 2,
            chat_template: None,
        };
        let line = "demo.gguf: llama 11.7M Q8_0, 12.00 MiB, 6 layers of 8 experts, 2 per token, context 512";
        assert_eq!(model("demo.gguf", &info, 512, true), line);
        info.n_expert = 0;
        assert!(model("m", &info, 512, false).ends_with("6 layers, context 512 of 4096 (-c)"), "a dense model");
        let words = |plan: &MemoryPlan, io: &str| memory(plan, io, (None, None, &[]));
        let part = plan(120, 4);
        let (slots, percent, cache) = (part.n_slots, part.n_slots * 100 / 32, Bytes(part.expert_cache));
        let expected = format!("{slots} of 32 experts ({percent} %) in {cache}, the others are read by direct I/O");
        assert_eq!(words(&part, "direct (why)"), format!("memory: 120.00 MiB (--mem-budget); {expected}"));
        assert!(words(&part, "buffered (why)").ends_with("read through the page cache"));
        let tables = |bytes: &str| words(&part, &format!("direct (why); {bytes} of embeddings stay in the file; more"));
        assert!(tables("26.80 GiB").ends_with("; 26.80 GiB of embeddings stay in the file"), "{}", tables("26.80 GiB"));
        assert!(!tables("139.00 KiB").contains("embeddings"));
        let pools = part.pools.clone();
        let decode = Some(DecodePlan { pools, n_slots: 30, expert_cache: 120 * MIB, compute: 0 });
        let line = words(&MemoryPlan { decode, ..part }, "direct (why)");
        assert!(
            line.contains(&format!(" in {cache} for prompts, 30 in 120.00 MiB while tokens decode, the")),
            "{line}"
        );
        let budget_source = BudgetSource::MemAvailable;
        let cut = MemoryPlan { budget_source, asked: Some(64 << 30), ..plan(1024, 0) };
        assert_eq!(words(&cut, "none: x"), "memory: 1.00 GiB (all of the available memory; 64.00 GiB asked); x");
        let warm = Some(WarmStart { saved: 32, experts: 30, bytes: MIB, ..WarmStart::default() });
        let all = "memory: 1.00 GiB (--mem-budget); all 32 experts fit, in 128.00 MiB; \
                   30 of the 32 of an earlier run are back (1.00 MiB read)";
        assert_eq!(memory(&plan(1024, 4), "direct (why)", (warm, None, &[])), all);
        let later = Some(WarmStart { saved: 32, later: 30, ..WarmStart::default() });
        let line = memory(&plan(1024, 4), "direct (why)", (later, None, &[]));
        assert!(line.ends_with("; 30 of an earlier run are read in pauses (--cache-state)"), "{line}");
        let width = Some(WidthReport { usual: 512, widest: 4096, last: None, costs: None });
        let line = memory(&plan(1024, 4), "direct (why)", (None, width, &[]));
        assert!(line.ends_with("; prompts in batches of 512 to 4096 tokens, as their reads and products take time"));
        let plain = words(&plan(1024, 0), "none: run as llama.cpp");
        assert_eq!(plain, "memory: 1.00 GiB (--mem-budget); run as llama.cpp");
    }

    #[test]
    fn approximations_are_always_announced() {
        let line = |precision: PrecisionReport| devices_and_precision(&[], &precision);
        assert_eq!(line(exact()), None);
        let dynamic = || PrecisionReport { mode: PrecisionMode::Dynamic, ..exact() };
        let with_low = || PrecisionReport { low: low(), ..dynamic() };
        let routed =
            PrecisionReport { routing: Some("cache bias 0.2".into()), mode: PrecisionMode::Exact, ..with_low() };
        for (report, words) in [
            (dynamic(), "precision: dynamic (T1 0.60, T2 0.90), no low; results are approximate"),
            (with_low(), "(T1 0.60, T2 0.90), low q2_K from mixtral.low.gguf; results are approximate"),
            (PrecisionReport { cpu_helper: true, ..exact() }, "experts that the CPU helper computes)"),
            (PrecisionReport { divided: true, ..exact() }, "rounding in divided prompts)"),
            (PrecisionReport { kernels: KernelChoice::Fastest, ..exact() }, "prompts: they are approximate)"),
            (PrecisionReport { low: low(), ..exact() }, "llama.cpp); low q2_K from mixtral.low.gguf is not used"),
            (routed, "routing: cache bias 0.2; results are approximate; low q2_K from mixtral.low.gguf is not used"),
        ] {
            assert!(line(report).is_some_and(|line| line.ends_with(words)), "{words}");
        }
    }

    #[test]
    fn devices_say_what_was_decided() {
        let device = DeviceReport {
            name: "CUDA0".into(),
            n_layers: 4,
            slots: 8,
            experts: 32,
            cache_bytes: 3 * MIB,
            staging_slots: 6,
            ..DeviceReport::default()
        };
        let line = |device: &DeviceReport| devices_and_precision(std::slice::from_ref(device), &exact()).unwrap();
        let given = "CUDA0: 4 layers, 8 of 32 experts (25 %) in 3.00 MiB; missing experts are copied from memory when \
                     they are needed; none is copied ahead (--predictor)";
        assert_eq!(line(&device), given);
        let decided =
            DeviceReport { takes_all: true, helper: Some(HelperMode::Auto), copies_ahead: true, ..device.clone() };
        assert!(
            line(&decided).contains("all that weights, context and head-room leave; missing experts are copied from")
        );
        assert!(line(&decided).ends_with("where measurements say that is sooner; some are copied ahead"));
        let all = DeviceReport { slots: 32, staging_slots: 0, takes_all: true, ..device.clone() };
        assert_eq!(line(&all), "CUDA0: 4 layers, 32 of 32 experts (100 %) in 3.00 MiB");
        let none = DeviceReport { slots: 0, staging_slots: 0, ..device };
        assert_eq!(line(&none), "CUDA0: 4 layers, 0 of 32 experts (0 %)");
        let on_host = memory(&plan(1024, 4), "direct (why)", (None, None, &[all]));
        assert!(on_host.ends_with("no expert is kept here, because the devices have all"), "{on_host}");
    }
}
