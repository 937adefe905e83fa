//! The papers' systems as they were published, as far as the engine has their parts: one table.

use crate::cache::Allocation;
use crate::cache::policy::PolicyKind;
use crate::predict::PredictorKind;
use crate::route::Thresholds;
use crate::words::named;

use super::{CpuHelper, Prefetch};

/// Whose settings are taken where nothing else is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preset {
    /// Nobody's: hobbit's own defaults.
    #[default]
    None,
    /// HOBBIT: a mixed precision expert offloading system for fast MoE inference.
    Hobbit,
    /// EdgeMoE: empowering sparse large language models on mobile devices.
    EdgeMoe,
    /// Fate: accurate expert predictions in MoE inference via cross-layer gate.
    Fate,
}

named!(Preset, "preset": None = "none", Hobbit = "hobbit", EdgeMoe = "edgemoe", Fate = "fate");

/// What a paper says of each choice that the engine has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PresetSettings {
    /// Who leaves when a slot is needed. The weights of HOBBIT's sum are not given by its paper: they are fitted to each model.
    pub policy: PolicyKind,
    /// How layers share the slots.
    pub slots: Allocation,
    /// Who guesses what comes.
    pub predictor: PredictorKind,
    /// How many layers ahead.
    pub distance: u8,
    /// Whether that is read ahead. No paper stops where it does not pay.
    pub prefetch: Prefetch,
    /// Whether a layer computes with the experts that are there while others are read.
    pub overlap: bool,
    /// Whether the CPU computes experts that a device misses.
    pub cpu_helper: CpuHelper,
    /// When low versions stand in; `None`: never.
    pub low: Option<LowRules>,
}

/// When low versions stand in. Of none of the papers a low version is replaced while nothing else is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LowRules {
    /// Highest unimportance of a missing expert that comes high.
    pub t1: f32,
    /// Highest unimportance of one that comes at all.
    pub t2: f32,
    /// Share of the cache that low versions have for themselves, `0.0..=1.0`.
    pub low_share: f32,
    /// Share of a prompt batch's active experts that come low, least popular first, `0.0..=1.0`.
    pub prefill_low: f32,
}

impl Preset {
    /// What the paper says; `None` for [`Preset::None`]. All three load what a device misses: of HOBBIT's two modes the
    /// device-centric one is what its paper is about (section 4).
    pub const fn settings(self) -> Option<PresetSettings> {
        let Thresholds { t1, t2 } = Thresholds::MIXTRAL;
        Some(match self {
            Self::None => return None,
            // 3.2: T1 and T2, as for Mixtral; 3.3: gates of p layers, of which 1 to 3 are recommended (5.5.2), predictions read
            // ahead whatever they turn out to be worth; 3.4: the weighted sum, and caches apart of which the high one is the larger:
            // the fifth is ours; 3.1: all on-demand loads end before the layer is computed.
            Self::Hobbit => PresetSettings {
                policy: PolicyKind::Hobbit,
                slots: Allocation::Even,
                predictor: PredictorKind::StackedGate,
                distance: 2,
                prefetch: Prefetch::On,
                overlap: false,
                cpu_helper: CpuHelper::Off,
                low: Some(LowRules { t1, t2, low_share: 0.2, prefill_low: 0.0 }),
            },
            // III-B: widths are chosen before the run, not in it; III-C1: the table's next layer is preloaded until the router
            // has spoken; III-C2: frequency over distance.
            Self::EdgeMoe => PresetSettings {
                policy: PolicyKind::EdgeMoe,
                slots: Allocation::Even,
                predictor: PredictorKind::PathTable,
                distance: 1,
                prefetch: Prefetch::On,
                overlap: true,
                cpu_helper: CpuHelper::Off,
                low: None,
            },
            // 4.2: the next layer's gate, everything above the 75th percentile; 4.3: computed in the order in which transfers
            // end; 4.4: the first L layers whole (L = 3 for Qwen1.5-MoE), ARC in each; 4.5: 25 % of a prompt's experts low, in
            // decode none, and none cached.
            Self::Fate => PresetSettings {
                policy: PolicyKind::Arc,
                slots: Allocation::ShallowFirst { layers: 3 },
                predictor: PredictorKind::CrossLayer,
                distance: 1,
                prefetch: Prefetch::On,
                overlap: true,
                cpu_helper: CpuHelper::Off,
                low: Some(LowRules { t1: 1.0, t2: 1.0, low_share: 0.0, prefill_low: 0.25 }),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip() {
        for preset in Preset::ALL {
            assert_eq!(preset.to_string().parse(), Ok(preset));
            assert_eq!(preset.settings().is_none(), preset == Preset::None);
        }
        let error = "swapmoe".parse::<Preset>().unwrap_err().to_string();
        assert_eq!(error, "unknown preset 'swapmoe' (expected one of: none, hobbit, edgemoe, fate)");
    }

    #[test]
    fn settings_are_the_papers() {
        let of = |preset: Preset| preset.settings().unwrap();
        let low = |preset| of(preset).low.map(|low| (low.t1, low.t2, low.prefill_low));
        assert_eq!(low(Preset::Hobbit), Some((0.6, 0.9, 0.0)), "the scorer alone, for Mixtral");
        assert_eq!(low(Preset::EdgeMoe), None, "no choice of widths at run time");
        assert_eq!(low(Preset::Fate), Some((1.0, 1.0, 0.25)), "decode is all high");
        assert_eq!([Preset::Hobbit, Preset::Fate].map(|preset| of(preset).low.unwrap().low_share), [0.2, 0.0]);
        assert!((1..=3).contains(&of(Preset::Hobbit).distance));
        for (preset, policy, predictor) in [
            (Preset::Hobbit, "hobbit", "stacked-gate"),
            (Preset::EdgeMoe, "edgemoe", "path-table"),
            (Preset::Fate, "arc", "cross-layer"),
        ] {
            let settings = of(preset);
            assert_eq!((settings.policy.name(), settings.predictor.name()), (policy, predictor));
            assert_eq!(settings.prefetch, Prefetch::On);
        }
        assert_eq!(of(Preset::Fate).slots.to_string(), "shallow-first:3");
    }
}
