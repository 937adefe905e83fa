//! Plans in words.

use super::{BudgetSource, MemoryPlan};
use crate::expert::Precision;
use crate::units::{MIB, ShortBytes};
use std::fmt;

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (budget, from) = (ShortBytes(self.budget), origin(self.budget_source));
        write!(f, "{:<14}{budget:>9}  {from}", "memory budget")?;
        let mut row = |name: &str, bytes: u64, note: &str| {
            let gap = if note.is_empty() { "" } else { "  " };
            write!(f, "\n  {name:<12}{:>9}{gap}{note}", ShortBytes(bytes))
        };
        row("weights", self.fixed.weights, "")?;
        row("KV cache", self.fixed.kv, "")?;
        row("compute", self.fixed.compute, "")?;
        row("runtime", self.fixed.runtime, "")?;
        if self.fixed.prediction >= 1 << 20 {
            row("prediction", self.fixed.prediction, "tables of policy and predictor")?;
        }
        row("margin", self.margin, "kept free")?;
        if let Some(note) = share(self.n_slots, self.n_experts) {
            row("expert cache", self.expert_cache - self.low_cache, &note)?;
            let low = self.pools.iter().filter(|pool| pool.precision == Precision::Low);
            if let Some(note) = share(self.n_low_slots, low.map(|pool| u64::from(pool.n_versions)).sum()) {
                row("low cache", self.low_cache, &format!("{note} in low precision"))?;
            }
            let note = match self.staging_slots {
                0 => "not needed: every expert has a slot".to_owned(),
                1 => format!("1 slice of {}", ShortBytes(self.staging_slot_bytes)),
                n => format!("{n} slices of {}", ShortBytes(self.staging_slot_bytes)),
            };
            row("staging", self.staging, &note)?;
        }
        row("unused", self.unused(), "")
    }
}

/// None without experts.
fn share(n_slots: u64, n_experts: u64) -> Option<String> {
    let percent = (n_slots * 100).checked_div(n_experts)?;
    Some(format!("{n_slots} of {n_experts} experts ({percent} %)"))
}

pub(super) fn origin(source: BudgetSource) -> &'static str {
    match source {
        BudgetSource::Given => "--mem-budget",
        BudgetSource::Cgroup => "auto: limit of the control group",
        BudgetSource::MemAvailable => "auto: available memory",
    }
}

/// The flags of an advice.
pub(super) fn flags(mem_budget: Option<u64>, expert_cache: Option<u64>) -> String {
    let flag = |name: &str, bytes: Option<u64>| bytes.map(|bytes| format!("{name} {}", mib_up(bytes)));
    let given = [flag("--mem-budget", mem_budget), flag("--expert-cache", expert_cache)];
    given.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// What to do where `minimum` bytes are needed: give them if they can be had.
pub(super) fn more_memory(minimum: u64, available: Option<u64>, or_else: &str) -> String {
    match available.filter(|available| minimum > *available) {
        Some(available) => {
            let advice = or_else.trim_start_matches("or ");
            format!("{} are available here: {advice}, or run it where there is more memory", ShortBytes(available))
        }
        None => format!("give --mem-budget {}, {or_else}", mib_up(minimum)),
    }
}

/// The other way to have an expert cache, where there is one.
pub(super) fn or_budget(minimum: u64, available: Option<u64>) -> String {
    match available.filter(|available| minimum > *available) {
        Some(available) => format!(" ({} are available here)", ShortBytes(available)),
        None => format!(", or --mem-budget {}", mib_up(minimum)),
    }
}

/// A budget that can be had, if it is worth naming.
pub(super) fn or_less(available: u64) -> String {
    match available >> 20 {
        0 => String::new(),
        mib => format!(" or at most {mib}MiB"),
    }
}

/// Bytes for a flag, rounded up: a lower limit.
fn mib_up(bytes: u64) -> String {
    format!("{}MiB", bytes.div_ceil(MIB))
}

/// Bytes for a flag, rounded down: an upper limit.
pub(super) fn whole_mib(bytes: u64) -> String {
    format!("{}MiB", bytes >> 20)
}
