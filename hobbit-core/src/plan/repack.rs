//! Default for rearranging experts for the CPU. The rule is fixed because rearranging changes the last bits of results,
//! which must not depend on the load of the machine.

use crate::gguf::GgmlType;
use crate::plan::ExpertCache;

/// Types whose products gain more than rearranging costs on arrival: 1.15x and more in batches, and for single tokens
/// if most experts are resident. K-quants gain nothing; `benches/README.md` has the figures.
const GAINING: [GgmlType; 3] = [GgmlType::MXFP4, GgmlType::Q4_0, GgmlType::IQ4_NL];

/// Minimum percentage of experts with slots. Each miss pays for rearranging on arrival: with fewer slots single tokens
/// become slower.
const SLOTS_PERCENT_MIN: u64 = 50;

/// Input of the rule. Sizes are bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RepackInput {
    /// All experts in high precision.
    pub expert_bytes: u64,
    /// Requested expert cache.
    pub expert_cache: ExpertCache,
    /// Memory that plain llama.cpp could take for the model.
    pub room: u64,
    /// Memory that the model needs besides the experts.
    pub besides: u64,
}

impl RepackInput {
    /// Whether experts of these types (the types of every matrix of every expert) are rearranged.
    pub fn pays(&self, types: impl IntoIterator<Item = GgmlType>) -> bool {
        let slots =
            self.expert_cache.of(self.expert_bytes).unwrap_or(u64::MAX).min(self.room.saturating_sub(self.besides));
        let mut types = types.into_iter().peekable();
        types.peek().is_some()
            && types.all(|dtype| GAINING.contains(&dtype))
            && u128::from(slots) * 100 >= u128::from(self.expert_bytes) * u128::from(SLOTS_PERCENT_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INPUT: RepackInput =
        RepackInput { expert_bytes: 1000, expert_cache: ExpertCache::Auto, room: 700, besides: 200 };

    #[test]
    fn half_of_the_experts_must_have_slots() {
        let types = [GgmlType::MXFP4, GgmlType::Q4_0];
        assert!(INPUT.pays(types));
        assert!(!RepackInput { besides: 201, ..INPUT }.pays(types));
        assert!(!RepackInput { besides: 701, ..INPUT }.pays(types), "no room at all");
        let with = |expert_cache| RepackInput { expert_cache, ..INPUT };
        assert!(with(ExpertCache::Percent(50.0)).pays(types));
        assert!(!with(ExpertCache::Percent(49.0)).pays(types));
        assert!(with(ExpertCache::Bytes(500)).pays(types));
        assert!(!with(ExpertCache::Bytes(499)).pays(types));
        assert!(!RepackInput { besides: 300, ..with(ExpertCache::Percent(100.0)) }.pays(types), "asked for, not there");
        let huge = RepackInput { expert_bytes: u64::MAX, room: u64::MAX, besides: 0, ..INPUT };
        assert!(huge.pays(types));
    }

    #[test]
    fn every_type_must_gain() {
        assert!(INPUT.pays([GgmlType::IQ4_NL]));
        assert!(!INPUT.pays([GgmlType::MXFP4, GgmlType::Q8_0]));
        assert!(!INPUT.pays([]), "no experts");
    }
}
