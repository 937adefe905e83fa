//! How a session keeps experts in memory.

use serde::Serialize;

use crate::cache::{Allocation, Cache};
use crate::expert::Precision;

/// How a session keeps experts in memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CachingReport {
    /// `--policy`.
    pub policy: String,
    /// The weights of HOBBIT's policy, as they apply: lru,lfu,lhu,fld.
    pub policy_weights: String,
    /// The profile that was loaded, and what it has to say; `None` without.
    pub profile: Option<TunedReport>,
    /// `--slots`: how slots are divided among layers.
    pub slots: String,
    /// What came of it, the host's cache first.
    pub slots_by_layer: Vec<CacheSlots>,
}

/// A tuned policy that was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TunedReport {
    /// Its file, or the pack.
    pub file: String,
    /// Name of its policy.
    pub policy: String,
    /// Whether it has T1 and T2.
    pub thresholds: bool,
    /// Whether it says what each layer's misses cost.
    pub penalties: bool,
}

/// Slots of one cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CacheSlots {
    /// `the host`, or a device's name.
    pub cache: String,
    /// High slots of the layer that has the fewest.
    pub least: u32,
    /// High slots of the layer that has the most.
    pub most: u32,
}

impl CacheSlots {
    /// The fewest and the most high slots that a layer has in a cache; `None` where no layer has experts.
    pub fn of(name: &str, cache: &Cache, layers: impl Iterator<Item = u16>) -> Option<Self> {
        let slots: Vec<u32> = layers.map(|layer| cache.capacity_of_layer(layer, Precision::High)).collect();
        let (least, most) = (slots.iter().min()?, slots.iter().max()?);
        Some(Self { cache: name.to_owned(), least: *least, most: *most })
    }
}

impl CachingReport {
    /// The start-up lines: what a profile brought, and how layers differ. Empty without a profile where they do not.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(TunedReport { file, policy, thresholds, penalties }) = &self.profile {
            let parts = [(true, format!("weights of {policy}")), (*thresholds, "T1 and T2".into())];
            let parts = parts.into_iter().chain([(*penalties, "what each layer's misses cost".into())]);
            let parts: Vec<String> = parts.filter(|(is_there, _)| *is_there).map(|(_, part)| part).collect();
            lines.push(format!("profile {file}: {}", parts.join(", ")));
        }
        if self.slots != Allocation::Even.to_string() {
            let part = |slots: &CacheSlots| format!("{} to {} on {}", slots.least, slots.most, slots.cache);
            let parts: Vec<String> = self.slots_by_layer.iter().map(part).collect();
            lines.push(format!("slots of a layer: {}: {}", self.slots, parts.join(", ")));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_tell_what_differs_from_the_defaults() {
        let slots = |cache: &str, least, most| CacheSlots { cache: cache.into(), least, most };
        let report = CachingReport {
            slots: "shallow-first:4".into(),
            slots_by_layer: vec![slots("the host", 2, 8), slots("CUDA0", 1, 5)],
            ..CachingReport::default()
        };
        assert_eq!(report.lines(), ["slots of a layer: shallow-first:4: 2 to 8 on the host, 1 to 5 on CUDA0"]);
        let profile = TunedReport { file: "a.json".into(), policy: "hobbit".into(), thresholds: true, penalties: true };
        let even = CachingReport { slots: "even".into(), profile: Some(profile), ..report };
        assert_eq!(even.lines(), ["profile a.json: weights of hobbit, T1 and T2, what each layer's misses cost"]);
        assert!(CachingReport { profile: None, ..even }.lines().is_empty());
    }
}
