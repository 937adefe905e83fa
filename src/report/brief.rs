//! A run in a few lines: at most three before it and four after. The rest is for `-v`.

use std::fmt::Write as _;

use super::description;
use hobbit::options::KernelChoice;
use hobbit::plan::{BudgetSource, MemoryPlan};
use hobbit::stats::{DeviceReport, PhaseStats, PrecisionReport, Stats, VirtualExpertsReport, WarmStart};
use hobbit::units::{Bytes, Percent, Seconds};

/// What runs.
pub struct ModelFacts<'a> {
    /// How it is named: its file.
    pub name: &'a str,
    /// llama.cpp's description.
    pub description: &'a str,
    pub n_params: u64,
    pub tensor_bytes: u64,
    pub n_layer: u32,
    /// 0 for a dense model.
    pub n_expert: u32,
    pub n_expert_used: u32,
    /// Tokens of the session's context.
    pub n_ctx: u32,
    /// Where nobody said how many, those that the model was trained on.
    pub n_ctx_of: Option<u32>,
}

/// The first line: what runs.
pub fn model_line(model: &ModelFacts) -> String {
    let ModelFacts { name, n_params, tensor_bytes, n_layer, n_expert, n_expert_used, n_ctx, .. } = model;
    let mut line =
        format!("{name}: {}, {}, {n_layer} layers", description(model.description, *n_params), Bytes(*tensor_bytes));
    if *n_expert > 0 {
        let _ = write!(line, " of {n_expert} experts, {n_expert_used} per token");
    }
    match model.n_ctx_of {
        Some(trained) if *n_ctx < trained => line + &format!(", context {n_ctx} of {trained} (-c)"),
        _ => line + &format!(", context {n_ctx}"),
    }
}

/// What runs where no seam is needed: the words of an I/O choice that reads nothing.
fn regime(io_choice: &str) -> Option<&str> {
    io_choice.strip_prefix("none: ")
}

/// The second line: the memory there is, and what becomes of the experts. A session that runs as plain llama.cpp says so
/// here.
pub fn memory_line(plan: &MemoryPlan, io_choice: &str, warm: Option<WarmStart>) -> String {
    let origin = match plan.budget_source {
        BudgetSource::Given => "--mem-budget",
        BudgetSource::Cgroup => "limit of the control group",
        BudgetSource::MemAvailable => "available memory",
    };
    let mut line = format!("memory: {} ({origin})", Bytes(plan.budget));
    let (slots, experts) = (plan.n_slots, plan.n_experts);
    let _ = match (regime(io_choice), (slots * 100).checked_div(experts)) {
        (Some(words), _) => write!(line, "; {words}"),
        (None, _) if plan.is_fully_resident() => {
            write!(line, "; all {experts} experts fit, in {}", Bytes(plan.expert_cache))
        }
        (None, percent) => {
            let how = if io_choice.starts_with("direct") { "by direct I/O" } else { "through the page cache" };
            let low =
                if plan.n_low_slots > 0 { format!(" and {} low versions", plan.n_low_slots) } else { String::new() };
            let cache = Bytes(plan.expert_cache);
            let percent = percent.unwrap_or(0);
            write!(line, "; {slots} of {experts} experts ({percent} %){low} in {cache}, the others are read {how}")
        }
    };
    if let Some(WarmStart { saved, experts, .. }) = warm {
        let _ = write!(line, "; {experts} of the {saved} of an earlier run are back");
    }
    line
}

/// The third line: devices, and whatever is not bit for bit llama.cpp's. `None` where there is neither.
pub fn third_line(devices: &[DeviceReport], precision: &PrecisionReport) -> Option<String> {
    let mut parts: Vec<String> = devices.iter().map(device).collect();
    if let Some(words) = &precision.routing {
        parts.push(format!("routing: {words}; results are approximate"));
    }
    let is_fastest = precision.kernels == KernelChoice::Fastest;
    if precision.is_dynamic() {
        let low = precision
            .low
            .as_ref()
            .map_or_else(|| "no low".to_owned(), |low| format!("low {} from {}", low.types, low.source));
        let PrecisionReport { t1, t2, .. } = precision;
        parts.push(format!("precision: dynamic (T1 {t1:.2}, T2 {t2:.2}), {low}; results are approximate"));
    } else if precision.routing.is_some() {
        let unused = precision.low.as_ref().map(|low| format!("low {} from {} is not used", low.types, low.source));
        parts.extend(unused);
    } else if precision.divided || precision.cpu_helper || is_fastest || precision.low.is_some() {
        parts.push(precision.to_string());
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn device(device: &DeviceReport) -> String {
    let layers = if device.n_layers == 1 { "layer" } else { "layers" };
    let mut text = format!("{}: {} {layers}", device.name, device.n_layers);
    if let Some(percent) = (device.slots * 100).checked_div(device.experts) {
        let _ = write!(text, ", {} of {} experts ({percent} %)", device.slots, device.experts);
    }
    text
}

/// What a closing line is made of.
pub struct Closing<'a> {
    pub stats: &'a Stats,
    pub precision: &'a PrecisionReport,
    pub devices: &'a [DeviceReport],
    /// Whether the model ended the text.
    pub is_eog: bool,
    /// `None` where nothing is left to chance.
    pub seed: Option<u32>,
    /// Whether nobody had chosen it.
    pub is_seed_drawn: bool,
}

/// The closing lines.
pub fn closing_lines(run: &Closing) -> Vec<String> {
    let stats = run.stats;
    let mut lines = Vec::new();
    for (name, phase) in [("prompt", &stats.prompt), ("decode", &stats.decode)] {
        if let (tokens @ 1.., Some(rate)) = (phase.tokens, phase.tokens_per_second()) {
            let (s, time) = (if tokens == 1 { "" } else { "s" }, Seconds(phase.seconds));
            lines.push(format!("{name}: {tokens} token{s} in {time}, {rate:.2} tokens/s"));
        }
    }
    if let (Some(last), Some(latency)) = (lines.last_mut(), &stats.latency) {
        *last += &format!("; {latency}");
    }
    if let Some(last) = lines.last_mut().filter(|_| run.is_eog) {
        *last += "; end of text";
    }
    let phases = [("decode", &stats.decode), ("prompt", &stats.prompt)];
    if let Some((name, phase)) = phases.into_iter().find(|(_, phase)| phase.hit_rate().is_some()) {
        lines.push(experts_line(name, phase, run));
    }
    let drawn = if run.is_seed_drawn { " (drawn; repeat with -s)" } else { "" };
    let seed = run.seed.map(|seed| format!("seed {seed}{drawn}"));
    let peak = (stats.peak_rss_bytes > 0).then(|| format!("peak memory {}", Bytes(stats.peak_rss_bytes)));
    let last: Vec<String> = seed.into_iter().chain(peak).collect();
    if !last.is_empty() {
        lines.push(last.join(", "));
    }
    lines
}

fn experts_line(name: &str, phase: &PhaseStats, run: &Closing) -> String {
    let hit_rate = Percent(phase.hit_rate().unwrap_or(0.0));
    let per_token = Bytes(phase.bytes_read / phase.tokens.max(1));
    let (waited, time) = (Seconds(phase.io_wait_seconds), Seconds(phase.seconds));
    let mut line =
        format!("experts in {name}: hit rate {hit_rate}, {per_token} read per token, waited {waited} of {time}");
    if let Some(shares) = phase.used.shares().filter(|_| run.precision.is_dynamic()) {
        let _ = write!(line, "; computed {shares}");
    }
    if let (Some(share), true) = (rerouted_share(phase), run.precision.routing.is_some()) {
        let _ = write!(line, "; {} of uses went to experts in memory", Percent(share));
        let refused = phase.rerouted.refused;
        if refused > 0 {
            let _ = write!(line, " ({refused} choices were not understood and left alone)");
        }
    }
    if let (Some(changed), "decode") = (run.stats.virtual_experts, name) {
        let VirtualExpertsReport { replacements, failed, period_tokens } = changed;
        let _ = write!(line, "; {replacements} experts changed meanwhile, one of a layer in {period_tokens} tokens");
        if failed > 0 {
            let _ = write!(line, " ({failed} could not be read)");
        }
    }
    for (device, counters) in run.devices.iter().zip(&run.stats.devices) {
        if let Some(rate) = counters.hit_rate() {
            let _ = write!(line, "; {}: hit rate {}", device.name, Percent(rate));
        }
    }
    line
}

/// Of all uses, those that went elsewhere than the router said.
fn rerouted_share(phase: &PhaseStats) -> Option<f64> {
    let all = phase.used.total();
    (all > 0).then(|| phase.rerouted.uses as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit::options::PrecisionMode;
    use hobbit::plan::{Budget, ExpertCache, FixedCosts, MemoryLimits, PlanInput, PoolSpec, StagingWish};
    use hobbit::stats::{LowReport, PrecisionCounts};

    const MIB: u64 = 1 << 20;

    fn plan(budget: u64, n_layers: usize) -> MemoryPlan {
        let pool = PoolSpec {
            precision: hobbit::expert::Precision::High,
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
            kernels: Default::default(),
            routing: None,
            loss_bound: None,
            upgrade: true,
            high: Default::default(),
            low: None,
        }
    }

    fn stats() -> Stats {
        let decode = PhaseStats {
            tokens: 20,
            seconds: 0.2,
            hits: 75,
            misses: 25,
            used: PrecisionCounts { high: 134, low: 60, skipped: 6 },
            bytes_read: 20 * MIB,
            io_wait_seconds: 0.05,
            ..PhaseStats::default()
        };
        let prompt = PhaseStats { tokens: 10, seconds: 0.05, ..PhaseStats::default() };
        Stats { prompt, decode, peak_rss_bytes: 3 << 29, ..Stats::default() }
    }

    fn closing<'a>(stats: &'a Stats, precision: &'a PrecisionReport) -> Closing<'a> {
        Closing { stats, precision, devices: &[], is_eog: false, seed: Some(7), is_seed_drawn: false }
    }

    #[test]
    fn what_runs() {
        let mut model = ModelFacts {
            name: "demo.gguf",
            description: "llama ?B Q8_0 (guessed)",
            n_params: 11_700_000,
            tensor_bytes: 12 * MIB,
            n_layer: 6,
            n_expert: 8,
            n_expert_used: 2,
            n_ctx: 512,
            n_ctx_of: None,
        };
        let line = "demo.gguf: llama 11.7M Q8_0, 12.00 MiB, 6 layers of 8 experts, 2 per token, context 512";
        assert_eq!(model_line(&model), line);
        model.n_expert = 0;
        assert_eq!(model_line(&model), "demo.gguf: llama 11.7M Q8_0, 12.00 MiB, 6 layers, context 512");
        model.n_ctx_of = Some(512);
        assert!(model_line(&model).ends_with(", context 512"), "all of it");
        model.n_ctx_of = Some(4096);
        assert!(model_line(&model).ends_with(", context 512 of 4096 (-c)"), "less, and how to have more");
    }

    #[test]
    fn where_experts_are() {
        let words = |plan: &MemoryPlan, io| memory_line(plan, io, None);
        let part = plan(120, 4);
        let (slots, percent, cache) = (part.n_slots, part.n_slots * 100 / 32, Bytes(part.expert_cache));
        assert!(0 < slots && slots < 32, "{slots}");
        let expected = format!(
            "memory: 120.00 MiB (--mem-budget); {slots} of 32 experts ({percent} %) in {cache}, the others are read by direct I/O"
        );
        assert_eq!(words(&part, "direct (why)"), expected);
        assert!(words(&part, "buffered (why)").ends_with("read through the page cache"));
        let whole = plan(1024, 4);
        assert_eq!(
            words(&whole, "buffered (why)"),
            "memory: 1.00 GiB (--mem-budget); all 32 experts fit, in 128.00 MiB"
        );
        let warm = Some(WarmStart { saved: 32, experts: 30, bytes: 1 });
        assert!(memory_line(&whole, "direct (why)", warm).ends_with("; 30 of the 32 of an earlier run are back"));
        // A dense model, or any that needs no seam.
        assert_eq!(
            words(&plan(1024, 0), "none: run as llama.cpp"),
            "memory: 1.00 GiB (--mem-budget); run as llama.cpp"
        );
        assert_eq!(words(&whole, "none: it fits"), "memory: 1.00 GiB (--mem-budget); it fits");
    }

    #[test]
    fn approximations_are_always_announced() {
        assert_eq!(third_line(&[], &exact()), None);
        let dynamic = PrecisionReport { mode: PrecisionMode::Dynamic, ..exact() };
        let skipping = third_line(&[], &dynamic).unwrap();
        assert_eq!(skipping, "precision: dynamic (T1 0.60, T2 0.90), no low; results are approximate");
        let low = LowReport { source: "a.gguf".into(), types: "q2_K".into(), ..LowReport::default() };
        let with_low = PrecisionReport { low: Some(low.clone()), ..dynamic };
        assert!(third_line(&[], &with_low).unwrap().contains("low q2_K from a.gguf; results are approximate"));
        for report in [
            PrecisionReport { cpu_helper: true, ..exact() },
            PrecisionReport { divided: true, ..exact() },
            PrecisionReport { low: Some(low), ..exact() },
        ] {
            assert_eq!(third_line(&[], &report), Some(report.to_string()));
        }
        let routing = Some("cache bias 0.2".to_owned());
        let routed = third_line(&[], &PrecisionReport { routing, mode: PrecisionMode::Exact, ..with_low }).unwrap();
        assert_eq!(routed, "routing: cache bias 0.2; results are approximate; low q2_K from a.gguf is not used");
        let device = DeviceReport { name: "CUDA0".into(), n_layers: 2, slots: 4, experts: 16, ..Default::default() };
        assert_eq!(third_line(&[device], &exact()).unwrap(), "CUDA0: 2 layers, 4 of 16 experts (25 %)");
    }

    #[test]
    fn four_lines_at_the_end() {
        let (stats, precision) = (stats(), exact());
        let lines = closing_lines(&closing(&stats, &precision));
        assert_eq!(
            lines,
            [
                "prompt: 10 tokens in 0.05 s, 200.00 tokens/s",
                "decode: 20 tokens in 0.20 s, 100.00 tokens/s",
                "experts in decode: hit rate 75.0 %, 1.00 MiB read per token, waited 0.05 s of 0.20 s",
                "seed 7, peak memory 1.50 GiB",
            ]
        );
        let dynamic = PrecisionReport { mode: PrecisionMode::Dynamic, ..exact() };
        let run = Closing { is_eog: true, is_seed_drawn: true, ..closing(&stats, &dynamic) };
        let lines = closing_lines(&run);
        assert!(lines[1].ends_with("; end of text") && lines[3].starts_with("seed 7 (drawn; repeat with -s), "));
        assert!(lines[2].ends_with("; computed 67.0 % high, 30.0 % low, 3.0 % skipped"), "{}", lines[2]);
        // Nothing was counted: a dense model, and no tokens.
        let none = Stats::default();
        let run = closing(&none, &precision);
        assert_eq!(closing_lines(&run), ["seed 7"]);
        assert!(closing_lines(&Closing { seed: None, ..run }).is_empty(), "greedy");
    }
}
