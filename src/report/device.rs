//! Devices in words: those there are, what a session placed on them, and what they did.

use std::fmt::Write as _;

use hobbit::options::CpuHelper;
use hobbit::plan::MemoryPlan;
use hobbit::stats::{DeviceCounters, DeviceReport};
use hobbit::units::{Bytes, Percent, Seconds};

/// The start-up lines: a line for each device, then what is behind them. Empty where everything is on the CPU.
pub fn start_up_lines(devices: &[DeviceReport], plan: &MemoryPlan, helper: CpuHelper) -> String {
    let mut lines = String::new();
    for device in devices {
        let _ = writeln!(lines, "hobbit: {}", placed(device));
    }
    let share = |slots: u64, experts: u64| (slots * 100).checked_div(experts);
    // Devices without experts, or a dense model, have nothing behind them.
    if let Some(percent) = share(plan.n_slots, plan.n_experts).filter(|_| devices.iter().any(|device| device.slots > 0))
    {
        let pinned = if devices.iter().any(|device| device.pinned) { "pinned" } else { "not pinned" };
        let _ = writeln!(
            lines,
            "hobbit: host cache: {} for {} of {} experts ({percent} %), {pinned}; CPU helper: {helper}",
            Bytes(plan.expert_cache),
            plan.n_slots,
            plan.n_experts,
        );
    }
    lines
}

fn placed(device: &DeviceReport) -> String {
    let layers = if device.n_layers == 1 { "layer" } else { "layers" };
    let mut line = format!("{} ({}): {} {layers}", device.name, device.description, device.n_layers);
    match (device.experts, device.slots * 100) {
        (0, _) => (),
        (_, 0) if device.staging_slots == 0 => line += ", their experts on the CPU",
        (experts, hundredfold) => {
            let (size, percent) = (Bytes(device.cache_bytes), hundredfold / experts);
            let _ = write!(line, ", device cache {size} for {} of {experts} experts ({percent} %)", device.slots);
            if device.staging_slots > 0 {
                let _ = write!(line, " and {} slices that pass through", device.staging_slots);
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

/// The closing lines: what devices that had experts did.
pub fn closing_lines(devices: &[DeviceReport], counters: &[DeviceCounters]) -> String {
    let mut lines = String::new();
    for (device, done) in devices.iter().zip(counters) {
        let Some(hit_rate) = done.hit_rate() else { continue };
        let _ = write!(
            lines,
            "hobbit: {}: {} hits, {} misses (hit rate {}), {} copied there",
            device.name,
            done.hits,
            done.misses,
            Percent(hit_rate),
            Bytes(done.uploaded_bytes),
        );
        if let Some(percent) = (100 * done.ahead_used).checked_div(done.ahead) {
            let _ = write!(lines, "; {} experts copied ahead ({percent} % used)", done.ahead);
        }
        if done.helper_experts > 0 {
            let _ = write!(lines, "; {} on the CPU in {}", done.helper_experts, Seconds(done.helper_seconds));
        }
        if done.cache_shrunk > 0 {
            let _ = write!(lines, "; out of memory, {} slots are left", device.slots);
        }
        lines.push('\n');
    }
    lines
}

/// A line of `--list-devices`, as llama.cpp prints it.
pub fn available_line(name: &str, description: &str, total: u64, free: u64) -> String {
    format!("  {name}: {description} ({} MiB, {} MiB free)", total >> 20, free >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit::plan::{Budget, BudgetSource, ExpertCache, FixedCosts, MemoryLimits, PlanInput, PoolSpec, StagingWish};

    const MIB: u64 = 1 << 20;

    /// 16 of 32 experts in 64 MiB.
    fn plan() -> MemoryPlan {
        let pool = PoolSpec {
            precision: hobbit::expert::Precision::High,
            n_versions: vec![8; 4],
            expert_stride: 4 * MIB,
            slice_stride_max: 2 * MIB,
        };
        let plan = MemoryPlan::new(&PlanInput {
            budget: Budget::Bytes(1024 * MIB),
            limits: MemoryLimits::default(),
            overcommit: false,
            expert_cache: ExpertCache::Percent(50.0),
            low_share: Default::default(),
            fixed: FixedCosts::default(),
            margin: None,
            pools: vec![pool],
            n_expert_used: 2,
            staging: StagingWish::default(),
        });
        let plan = plan.unwrap();
        assert_eq!((plan.n_slots, plan.budget_source), (16, BudgetSource::Given));
        plan
    }

    fn device() -> DeviceReport {
        DeviceReport {
            name: "CUDA0".into(),
            description: "NVIDIA GeForce RTX 4090".into(),
            n_layers: 4,
            cache_bytes: 32 * MIB,
            slots: 8,
            experts: 32,
            staging_slots: 24,
            headroom_bytes: 2400 * MIB,
            pinned: true,
            unified: false,
        }
    }

    #[test]
    fn start_up() {
        assert_eq!(
            start_up_lines(&[device()], &plan(), CpuHelper::Auto),
            "hobbit: CUDA0 (NVIDIA GeForce RTX 4090): 4 layers, device cache 32.00 MiB for 8 of 32 experts (25 %) and 24 \
             slices that pass through, head-room 2.34 GiB\n\
             hobbit: host cache: 64.00 MiB for 16 of 32 experts (50 %), pinned; CPU helper: auto\n"
        );
        assert_eq!(start_up_lines(&[], &plan(), CpuHelper::Auto), "");
    }

    #[test]
    fn start_up_of_other_devices() {
        let line = |change: fn(&mut DeviceReport)| {
            let mut device =
                DeviceReport { name: "D".into(), description: "d".into(), headroom_bytes: MIB, ..device() };
            change(&mut device);
            start_up_lines(&[device], &plan(), CpuHelper::Off).lines().next().unwrap().to_owned()
        };
        let cpu = line(|device| (device.slots, device.staging_slots, device.cache_bytes) = (0, 0, 0));
        assert_eq!(cpu, "hobbit: D (d): 4 layers, their experts on the CPU, head-room 1.00 MiB");
        let wave = line(|device| (device.slots, device.cache_bytes) = (0, 0));
        assert!(wave.contains("device cache 0 B for 0 of 32 experts (0 %) and 24 slices that pass through"), "{wave}");
        let dense = line(|device| (device.n_layers, device.experts, device.slots) = (1, 0, 0));
        assert_eq!(dense, "hobbit: D (d): 1 layer, head-room 1.00 MiB");
        let orin = line(|device| (device.slots, device.staging_slots, device.unified) = (32, 0, true));
        assert!(
            orin.ends_with(
                "32 of 32 experts (100 %), head-room 1.00 MiB, memory shared with the host: nothing is copied"
            )
        );
    }

    #[test]
    fn what_was_done() {
        let counters = DeviceCounters {
            hits: 30,
            misses: 10,
            uploads: 30,
            uploaded_bytes: 40 * MIB,
            ahead: 8,
            ahead_used: 6,
            helper_experts: 5,
            helper_seconds: 0.5,
            cache_shrunk: 1,
        };
        assert_eq!(
            closing_lines(&[device()], &[counters]),
            "hobbit: CUDA0: 30 hits, 10 misses (hit rate 75.0 %), 40.00 MiB copied there; 8 experts copied \
             ahead (75 % used); 5 on the CPU in 0.50 s; out of memory, 8 slots are left\n"
        );
        assert_eq!(closing_lines(&[device()], &[DeviceCounters::default()]), "");
    }

    #[test]
    fn available_devices_are_printed_as_by_llama_cpp() {
        let line = available_line("CUDA0", "NVIDIA GeForce RTX 4090", 24_210 * MIB, 23_000 * MIB + 1);
        assert_eq!(line, "  CUDA0: NVIDIA GeForce RTX 4090 (24210 MiB, 23000 MiB free)");
    }
}
