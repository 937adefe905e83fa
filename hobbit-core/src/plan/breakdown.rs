//! Plans in words.

use super::{BudgetSource, MemoryPlan};
use crate::expert::Precision;
use crate::units::ShortBytes;
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
        BudgetSource::Given => "as given",
        BudgetSource::Cgroup => "auto: limit of the control group",
        BudgetSource::MemAvailable => "auto: available memory",
    }
}
