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
    /// SMoE: enabling MoE on the edge via importance-driven expert scheduling.
    Smoe,
    /// SwapMoE: serving off-the-shelf MoE-based language models with tunable memory budget.
    SwapMoe,
}

named! { Preset, "preset":
    None = "none", Hobbit = "hobbit", EdgeMoe = "edgemoe", Fate = "fate", Smoe = "smoe", SwapMoe = "swapmoe",
}

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
    /// When experts in memory stand in.
    pub routing: RoutingRules,
}

/// When experts that are in memory stand in for others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RoutingRules {
    /// α of SMoE's substitution, and how many of a token's best experts stay whatever it says; `None`: no substitution.
    pub substitute: Option<(f32, u32)>,
    /// Tokens wait for no expert.
    pub virtual_experts: bool,
}

impl RoutingRules {
    const OFF: Self = Self { substitute: None, virtual_experts: false };

    /// Whether every token gets what its router chose.
    pub const fn is_off(&self) -> bool {
        self.substitute.is_none() && !self.virtual_experts
    }
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
    /// What the paper says; `None` for [`Preset::None`]. HOBBIT, EdgeMoE and Fate load what a device misses: of HOBBIT's two modes
    /// the device-centric one is what its paper is about (section 4).
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
                routing: RoutingRules::OFF,
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
                routing: RoutingRules::OFF,
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
                routing: RoutingRules::OFF,
            },
            // IV-B: scores within 0.3 of the best that was not chosen (VI-B: 0.35, 0.3 and 0.25 on three machines), the lowest mean
            // score leaves; IV-C: the next layer's gate, of which what will not be substituted is read ahead; V: what is missing all
            // the same is copied or computed by the CPU, whichever ends sooner.
            Self::Smoe => PresetSettings {
                policy: PolicyKind::Smoe,
                slots: Allocation::Even,
                predictor: PredictorKind::StackedGate,
                distance: 1,
                prefetch: Prefetch::On,
                overlap: true,
                cpu_helper: CpuHelper::Auto,
                low: None,
                routing: RoutingRules { substitute: Some((0.3, 0)), virtual_experts: false },
            },
            // 3.1: tokens use what is in memory, and that alone; 3.2: by importance it is exchanged in the background. Nothing is
            // foretold; who leaves while a prompt is read, the paper leaves open.
            Self::SwapMoe => PresetSettings {
                policy: PolicyKind::Learned,
                slots: Allocation::Even,
                predictor: PredictorKind::None,
                distance: 1,
                prefetch: Prefetch::Off,
                overlap: true,
                cpu_helper: CpuHelper::Off,
                low: None,
                routing: RoutingRules { substitute: None, virtual_experts: true },
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
        let error = "lina".parse::<Preset>().unwrap_err().to_string();
        assert_eq!(error, "unknown preset 'lina' (expected one of: none, hobbit, edgemoe, fate, smoe, swapmoe)");
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
        for preset in [Preset::Hobbit, Preset::EdgeMoe, Preset::Fate] {
            assert!(of(preset).routing.is_off(), "routing is never changed");
        }
        let smoe = of(Preset::Smoe);
        assert_eq!((smoe.routing.substitute, smoe.policy.name(), smoe.low), (Some((0.3, 0)), "smoe", None));
        assert_eq!((smoe.predictor.name(), smoe.distance, smoe.prefetch), ("stacked-gate", 1, Prefetch::On));
        let swapmoe = of(Preset::SwapMoe);
        assert_eq!((swapmoe.routing.virtual_experts, swapmoe.prefetch), (true, Prefetch::Off));
        assert_eq!(of(Preset::Fate).slots.to_string(), "shallow-first:3");
    }
}
