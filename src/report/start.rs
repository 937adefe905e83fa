//! The start-up lines: the model, its memory, its devices, and every deviation from llama.cpp's exact results.

use std::fmt::Write as _;

use super::{Line, brief, description, detail, parameters};
use hobbit::options::{Allocation, CpuHelper, KernelChoice};
use hobbit::stats::{CachingReport, DeviceReport, LowReport, PrecisionReport, TunedReport, VersionsReport, WarmStart};
use hobbit_core::plan::{BudgetSource, MemoryPlan};
use hobbit_core::units::{Bytes, ShortBytes};

/// The model of a run.
pub struct ModelFacts<'a> {
    /// The model's file as shown.
    pub name: &'a str,
    /// llama.cpp's description.
    pub description: &'a str,
    pub n_params: u64,
    pub tensor_bytes: u64,
    pub expert_bytes: u64,
    pub n_layer: u32,
    /// 0 for a dense model.
    pub n_expert: u32,
    pub n_expert_used: u32,
    /// Tokens of the session's context.
    pub n_ctx: u32,
    pub n_ctx_train: u32,
    /// Whether the user gave the context's length.
    pub is_n_ctx_given: bool,
}

pub fn model(model: &ModelFacts) -> [Line; 2] {
    let ModelFacts { name, n_params, tensor_bytes, n_layer, n_expert, n_expert_used, n_ctx, n_ctx_train, .. } = model;
    let mut line =
        format!("{name}: {}, {}, {n_layer} layers", description(model.description, *n_params), Bytes(*tensor_bytes));
    if *n_expert > 0 {
        let _ = write!(line, " of {n_expert} experts, {n_expert_used} per token");
    }
    let _ = write!(line, ", context {n_ctx}");
    if !model.is_n_ctx_given && n_ctx < n_ctx_train {
        let _ = write!(line, " of {n_ctx_train} (-c)");
    }
    let (parameters, experts) = (parameters(*n_params), Bytes(model.expert_bytes));
    [brief(line), detail(format!("{parameters} parameters, {experts} of experts, trained on {n_ctx_train} tokens"))]
}

/// The available memory, and the experts in it; also reports a session that runs as plain llama.cpp.
pub fn memory(plan: &MemoryPlan, io_choice: &str, warm: Option<WarmStart>) -> [Line; 2] {
    let origin = match plan.budget_source {
        BudgetSource::Given => "--mem-budget",
        BudgetSource::Cgroup => "limit of the control group",
        BudgetSource::MemAvailable => "available memory",
    };
    let mut line = format!("memory: {} ({origin})", Bytes(plan.budget));
    let (slots, experts) = (plan.n_slots, plan.n_experts);
    let _ = match (io_choice.strip_prefix("none: "), percent(slots, experts)) {
        (Some(words), _) => write!(line, "; {words}"),
        (None, _) if plan.is_fully_resident() => {
            write!(line, "; all {experts} experts fit, in {}", Bytes(plan.expert_cache))
        }
        (None, percent) => {
            let how = if io_choice.starts_with("direct") { "by direct I/O" } else { "through the page cache" };
            let low =
                if plan.n_low_slots > 0 { format!(" and {} low versions", plan.n_low_slots) } else { String::new() };
            let (cache, percent) = (Bytes(plan.expert_cache), percent.unwrap_or(0));
            write!(line, "; {slots} of {experts} experts ({percent} %){low} in {cache}, the others are read {how}")
        }
    };
    if let Some(WarmStart { saved, experts, bytes }) = warm {
        let _ = write!(line, "; {experts} of the {saved} of an earlier run are back ({} read)", Bytes(bytes));
    }
    [brief(line), detail(format!("reading experts: {io_choice}"))]
}

/// One line with the devices and everything that makes results differ from llama.cpp's; then details. A dense model's
/// precision is not reported.
pub fn devices_and_precision(
    devices: &[DeviceReport],
    precision: &PrecisionReport,
    helper: CpuHelper,
    is_moe: bool,
) -> Vec<Line> {
    let mut parts: Vec<String> = devices.iter().map(device).collect();
    if let Some(words) = &precision.routing {
        parts.push(format!("routing: {words}; results are approximate"));
    }
    let (words, is_brief) = precision_in_words(precision);
    parts.extend(is_brief.then(|| words.clone()));
    let mut lines = Vec::new();
    if !parts.is_empty() {
        lines.push(brief(parts.join("; ")));
    }
    if !is_brief && is_moe {
        lines.push(detail(words));
    }
    lines.extend(devices.iter().map(|device| detail(device_details(device))));
    if devices.iter().any(|device| device.slots > 0) {
        let pinned = if devices.iter().any(|device| device.pinned) { "pinned" } else { "not pinned" };
        lines.push(detail(format!("host cache: {pinned}; CPU helper: {helper}")));
    }
    if precision.is_dynamic() {
        lines.push(detail(dynamic_details(precision)));
    }
    lines
}

/// The precision of a run, and whether it is reported without `-v`.
fn precision_in_words(precision: &PrecisionReport) -> (String, bool) {
    let low = precision.low.as_ref().map(|low| format!("low {} from {}", low.types, low.source));
    if precision.is_dynamic() {
        let PrecisionReport { t1, t2, .. } = precision;
        let low = low.unwrap_or_else(|| "no low".to_owned());
        return (format!("precision: dynamic (T1 {t1:.2}, T2 {t2:.2}), {low}; results are approximate"), true);
    }
    let is_resident = precision.high.slots == precision.high.experts;
    let unused = low.map(|low| match is_resident {
        true => format!("everything fits, {low} is not needed"),
        false => format!("{low} is not used"),
    });
    if precision.routing.is_some() {
        return match unused {
            Some(unused) => (unused, true),
            None => ("precision: as in the model".to_owned(), false),
        };
    }
    let mut line = "precision: exact (bit-identical to llama.cpp".to_owned();
    line += match (precision.divided, precision.cpu_helper) {
        (false, false) => "",
        (true, false) => ", except for the device's rounding in divided prompts",
        (_, true) => {
            ", except for the device's rounding in divided prompts, and for experts that the CPU helper computes"
        }
    };
    let is_fastest = precision.kernels == KernelChoice::Fastest;
    line +=
        if is_fastest { ", except for the fastest kernels' rounding of prompts: they are approximate)" } else { ")" };
    let is_brief = precision.divided || precision.cpu_helper || is_fastest || unused.is_some();
    let unused = unused.map_or_else(String::new, |unused| format!("; {unused}"));
    (line + &unused, is_brief)
}

fn dynamic_details(precision: &PrecisionReport) -> String {
    let mut line = format!("precision: prompt {:.0} % low", f64::from(precision.prefill_low) * 100.0);
    let rules = [
        (precision.renormalise, ", renormalised"),
        (!precision.upgrade, ", no upgrades"),
        (precision.deterministic, ", deterministic"),
    ];
    line.extend(rules.into_iter().filter(|(holds, _)| *holds).map(|(_, words)| words));
    let VersionsReport { types, bytes, slots, experts } = &precision.high;
    let _ = write!(line, "; high {types} {} ({slots} of {experts} resident)", ShortBytes(*bytes));
    if let Some(LowReport { types, bytes, slots, experts, .. }) = &precision.low {
        let _ = write!(line, "; low {types} {} ({slots} of {experts} resident)", ShortBytes(*bytes));
    }
    line
}

fn device(device: &DeviceReport) -> String {
    let layers = if device.n_layers == 1 { "layer" } else { "layers" };
    let mut text = format!("{}: {} {layers}", device.name, device.n_layers);
    if let Some(percent) = percent(device.slots, device.experts) {
        let _ = write!(text, ", {} of {} experts ({percent} %)", device.slots, device.experts);
    }
    text
}

fn device_details(device: &DeviceReport) -> String {
    let mut line = format!("{}: {}", device.name, device.description);
    match (device.experts, device.slots, device.staging_slots) {
        (0, ..) => (),
        (_, 0, 0) => line += ", experts of its layers on the CPU",
        (_, _, staging) => {
            let _ = write!(line, ", device cache {}", Bytes(device.cache_bytes));
            if staging > 0 {
                let _ = write!(line, " and {staging} slices that pass through");
            }
        }
    }
    if device.headroom_bytes > 0 {
        let _ = write!(line, ", head-room {}", Bytes(device.headroom_bytes));
    }
    if device.unified {
        line += ", memory shared with the host: nothing is copied";
    }
    line
}

/// The loaded profile, and how layers share the slots if unevenly.
pub fn caching(report: &CachingReport) -> Vec<Line> {
    let mut lines = Vec::new();
    if let Some(TunedReport { file, policy, thresholds, penalties }) = &report.profile {
        let mut line = format!("profile {file}: weights of {policy}");
        line += if *thresholds { ", T1 and T2" } else { "" };
        line += if *penalties { ", the cost of each layer's misses" } else { "" };
        lines.push(detail(line));
    }
    if report.slots != Allocation::Even.to_string() {
        let parts =
            report.slots_by_layer.iter().map(|slots| format!("{} to {} on {}", slots.least, slots.most, slots.cache));
        lines.push(detail(format!("slots of a layer: {}: {}", report.slots, parts.collect::<Vec<_>>().join(", "))));
    }
    lines
}

fn percent(part: u64, whole: u64) -> Option<u64> {
    (part * 100).checked_div(whole)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use hobbit::options::PrecisionMode;
    use hobbit::stats::CacheSlots;
    use hobbit_core::plan::{Budget, ExpertCache, FixedCosts, MemoryLimits, PlanInput, PoolSpec, StagingWish};

    const MIB: u64 = 1 << 20;

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
            margin: None,
            pools: if n_layers > 0 { vec![pool] } else { Vec::new() },
            n_expert_used: 2,
            staging: StagingWish::default(),
        });
        plan.unwrap()
    }

    pub fn exact() -> PrecisionReport {
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
            loss_bound: None,
            upgrade: true,
            high: VersionsReport { types: "q8_0".into(), bytes: 5_798_205_850, slots: 210, experts: 768 },
            low: None,
        }
    }

    fn low() -> Option<LowReport> {
        let (source, types) = ("mixtral.low.gguf".into(), "q2_K".into());
        Some(LowReport { source, types, bytes: 1_793_148_846, slots: 96, experts: 768, cache_bytes: 224_143_605 })
    }

    fn lines(devices: &[DeviceReport], precision: &PrecisionReport) -> Vec<Line> {
        devices_and_precision(devices, precision, CpuHelper::Auto, true)
    }

    #[test]
    fn models_and_memory() {
        let mut facts = ModelFacts {
            name: "demo.gguf",
            description: "llama ?B Q8_0 (guessed)",
            n_params: 11_700_000,
            tensor_bytes: 12 * MIB,
            expert_bytes: 10 * MIB,
            n_layer: 6,
            n_expert: 8,
            n_expert_used: 2,
            n_ctx: 512,
            n_ctx_train: 4096,
            is_n_ctx_given: true,
        };
        let line = "demo.gguf: llama 11.7M Q8_0, 12.00 MiB, 6 layers of 8 experts, 2 per token, context 512";
        let more = "11.7M parameters, 10.00 MiB of experts, trained on 4096 tokens";
        assert_eq!(model(&facts), [brief(line), detail(more)]);
        (facts.n_expert, facts.is_n_ctx_given) = (0, false);
        assert!(model(&facts)[0].text.ends_with("6 layers, context 512 of 4096 (-c)"), "a dense model");
        let words = |plan: &MemoryPlan, io| memory(plan, io, None)[0].text.clone();
        let part = plan(120, 4);
        let (slots, percent, cache) = (part.n_slots, part.n_slots * 100 / 32, Bytes(part.expert_cache));
        let expected = format!("{slots} of 32 experts ({percent} %) in {cache}, the others are read by direct I/O");
        assert_eq!(words(&part, "direct (why)"), format!("memory: 120.00 MiB (--mem-budget); {expected}"));
        assert!(words(&part, "buffered (why)").ends_with("read through the page cache"));
        let whole = plan(1024, 4);
        let warm = Some(WarmStart { saved: 32, experts: 30, bytes: MIB });
        let all = "memory: 1.00 GiB (--mem-budget); all 32 experts fit, in 128.00 MiB; \
                   30 of the 32 of an earlier run are back (1.00 MiB read)";
        assert_eq!(memory(&whole, "direct (why)", warm), [brief(all), detail("reading experts: direct (why)")]);
        assert_eq!(
            words(&plan(1024, 0), "none: run as llama.cpp"),
            "memory: 1.00 GiB (--mem-budget); run as llama.cpp"
        );
    }

    #[test]
    fn approximations_are_always_announced() {
        assert_eq!(lines(&[], &exact()), [detail("precision: exact (bit-identical to llama.cpp)")]);
        assert!(devices_and_precision(&[], &exact(), CpuHelper::Auto, false).is_empty(), "a dense model");
        let dynamic = PrecisionReport { mode: PrecisionMode::Dynamic, ..exact() };
        let skipping = "precision: dynamic (T1 0.60, T2 0.90), no low; results are approximate";
        let details = "precision: prompt 25 % low; high q8_0 5.40 GiB (210 of 768 resident)";
        assert_eq!(lines(&[], &dynamic), [brief(skipping), detail(details)]);
        let with_low =
            PrecisionReport { low: low(), renormalise: true, deterministic: true, upgrade: false, ..dynamic };
        let lowered = "precision: dynamic (T1 0.60, T2 0.90), low q2_K from mixtral.low.gguf; results are approximate";
        let details = "precision: prompt 25 % low, renormalised, no upgrades, deterministic; high q8_0 5.40 GiB (210 \
                       of 768 resident); low q2_K 1.67 GiB (96 of 768 resident)";
        assert_eq!(lines(&[], &with_low), [brief(lowered), detail(details)]);
        for (report, words) in [
            (PrecisionReport { cpu_helper: true, ..exact() }, "experts that the CPU helper computes)"),
            (PrecisionReport { divided: true, ..exact() }, "rounding in divided prompts)"),
            (PrecisionReport { kernels: KernelChoice::Fastest, ..exact() }, "prompts: they are approximate)"),
            (PrecisionReport { low: low(), ..exact() }, "llama.cpp); low q2_K from mixtral.low.gguf is not used"),
        ] {
            let found = lines(&[], &report);
            assert!(found.len() == 1 && found[0].is_brief && found[0].text.ends_with(words), "{found:?}");
        }
        let routed = PrecisionReport { routing: Some("cache bias 0.2".into()), mode: PrecisionMode::Exact, ..with_low };
        let words = "routing: cache bias 0.2; results are approximate; low q2_K from mixtral.low.gguf is not used";
        assert_eq!(lines(&[], &routed), [brief(words)], "not llama.cpp's bits");
    }

    #[test]
    fn devices_and_caches() {
        let device = |slots, staging_slots, unified| DeviceReport {
            name: "CUDA0".into(),
            description: "NVIDIA GeForce RTX 4090".into(),
            n_layers: 4,
            cache_bytes: 4 * slots * MIB,
            slots,
            experts: 32,
            staging_slots,
            headroom_bytes: 2400 * MIB,
            pinned: true,
            unified,
        };
        for (slots, staging, unified, first, last) in [
            (
                8,
                24,
                false,
                "8 of 32 experts (25 %)",
                ", device cache 32.00 MiB and 24 slices that pass through, head-room 2.34 GiB",
            ),
            (0, 0, false, "0 of 32 experts (0 %)", ", experts of its layers on the CPU, head-room 2.34 GiB"),
            (
                0,
                24,
                false,
                "0 of 32 experts (0 %)",
                ", device cache 0 B and 24 slices that pass through, head-room 2.34 GiB",
            ),
            (32, 0, true, "32 of 32 experts (100 %)", ", memory shared with the host: nothing is copied"),
        ] {
            let found = lines(&[device(slots, staging, unified)], &exact());
            assert_eq!(found[0], brief(format!("CUDA0: 4 layers, {first}")));
            assert!(found[2].text.ends_with(last) && !found[2].is_brief, "{found:?}");
            assert_eq!(found.get(3).is_some_and(|line| line.text == "host cache: pinned; CPU helper: auto"), slots > 0);
        }
        let slots = |cache: &str, least, most| CacheSlots { cache: cache.into(), least, most };
        let report = CachingReport {
            slots: "shallow-first:4".into(),
            slots_by_layer: vec![slots("the host", 2, 8), slots("CUDA0", 1, 5)],
            ..CachingReport::default()
        };
        let line = "slots of a layer: shallow-first:4: 2 to 8 on the host, 1 to 5 on CUDA0";
        assert_eq!(caching(&report), [detail(line)]);
        let profile = TunedReport { file: "a.json".into(), policy: "hobbit".into(), thresholds: true, penalties: true };
        let even = CachingReport { slots: "even".into(), profile: Some(profile), ..report };
        let line = "profile a.json: weights of hobbit, T1 and T2, the cost of each layer's misses";
        assert_eq!(caching(&even), [detail(line)]);
    }
}
