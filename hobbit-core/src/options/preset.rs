//! Settings of the papers' systems as published, as far as the engine has their parts: one table.

use crate::cache::Allocation;
use crate::cache::policy::PolicyKind;
use crate::named::named;
use crate::predict::PredictorKind;
use crate::route::Thresholds;

use super::{CpuHelper, Prefetch};

/// Source of default settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preset {
    /// hobbit's own defaults.
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

/// A paper's settings for each choice of the engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PresetSettings {
    /// Eviction policy. HOBBIT's paper does not give the weights of its sum: they are fitted to each model.
    pub policy: PolicyKind,
    pub slots: Allocation,
    pub predictor: PredictorKind,
    pub distance: u8,
    /// Which predicted experts are read ahead. No paper judges whether that pays.
    pub prefetch: Prefetch,
    /// Whether a layer computes with resident experts while others are read.
    pub overlap: bool,
    /// Whether the CPU computes experts that a device misses.
    pub cpu_helper: CpuHelper,
    /// Rules for low versions; `None` without them.
    pub low: Option<LowRules>,
    /// Rules for experts in memory to replace missing ones.
    pub routing: RoutingRules,
}

/// Rules for experts in memory to replace missing ones.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RoutingRules {
    /// α of SMoE's substitution, and the number of a token's best experts that are always kept; `None`: no
    /// substitution.
    pub substitute: Option<(f32, u32)>,
    /// Tokens never wait for an expert.
    pub virtual_experts: bool,
}

impl RoutingRules {
    /// Whether every token uses its router's choice.
    pub const fn is_off(&self) -> bool {
        self.substitute.is_none() && !self.virtual_experts
    }
}

/// Rules for low versions. In all papers, no low version is upgraded while the disk is idle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LowRules {
    /// Highest unimportance of a missing expert read in high precision.
    pub t1: f32,
    /// Highest unimportance of a missing expert read at all.
    pub t2: f32,
    /// Share of the cache reserved for low versions, `0.0..=1.0`.
    pub low_share: f32,
    /// Share of a prompt batch's active experts read in low precision, least popular first, `0.0..=1.0`.
    pub prefill_low: f32,
}

impl Preset {
    /// The paper's settings; `None` for [`Preset::None`]. With HOBBIT, EdgeMoE and Fate a device loads its missing
    /// experts: of HOBBIT's two modes, its paper is about the device-centric one (section 4).
    pub const fn settings(self) -> Option<PresetSettings> {
        let Thresholds { t1, t2 } = Thresholds::MIXTRAL;
        // The settings of most papers.
        let base = PresetSettings {
            policy: PolicyKind::Learned,
            slots: Allocation::Even,
            predictor: PredictorKind::StackedGate,
            distance: 1,
            prefetch: Prefetch::All,
            overlap: true,
            cpu_helper: CpuHelper::Off,
            low: None,
            routing: RoutingRules { substitute: None, virtual_experts: false },
        };
        Some(match self {
            Self::None => return None,
            // 3.2: T1 and T2, as for Mixtral. 3.3: gates of p layers, with 1 to 3 recommended (5.5.2); predicted
            // experts are always read ahead. 3.4: the weighted sum, and separate caches, the high one larger; the
            // share of a fifth is ours. 3.1: all on-demand loads end before the layer is computed.
            Self::Hobbit => PresetSettings {
                policy: PolicyKind::Hobbit,
                distance: 2,
                overlap: false,
                low: Some(LowRules { t1, t2, low_share: 0.1, prefill_low: 0.0 }),
                ..base
            },
            // III-B: widths are chosen before the run. III-C1: 1 to 3 experts of the next layer are preloaded by the
            // table until the router decides. III-C2: frequency over distance.
            Self::EdgeMoe => PresetSettings {
                policy: PolicyKind::EdgeMoe,
                predictor: PredictorKind::PathTable,
                prefetch: Prefetch::Top3,
                ..base
            },
            // 4.2: the next layer's gate, everything above the 75th percentile. 4.3: as many experts as can be read
            // while a layer runs; experts are computed in the order in which their transfers end. 4.4: the first L
            // layers whole (L = 3 for Qwen1.5-MoE), ARC in each. 4.5: 25 % of a prompt's experts low, none in decode,
            // and none cached.
            Self::Fate => PresetSettings {
                policy: PolicyKind::Arc,
                slots: Allocation::ShallowFirst { layers: 3 },
                predictor: PredictorKind::CrossLayer,
                prefetch: Prefetch::Budget,
                low: Some(LowRules { t1: 1.0, t2: 1.0, low_share: 0.0, prefill_low: 0.25 }),
                ..base
            },
            // IV-B: scores within 0.3 of the best that was not chosen (VI-B: 0.35, 0.3 and 0.25 on three machines); the
            // lowest mean score is evicted. IV-C: the next layer's gate; experts that will not be substituted are read
            // ahead, best scores first, as far as there is time until the layer (IV-A). V: experts that are still
            // missing are copied or computed by the CPU, whichever is faster.
            Self::Smoe => PresetSettings {
                policy: PolicyKind::Smoe,
                prefetch: Prefetch::Budget,
                cpu_helper: CpuHelper::Auto,
                routing: RoutingRules { substitute: Some((0.3, 0)), virtual_experts: false },
                ..base
            },
            // 3.1: tokens use only experts in memory. 3.2: experts are exchanged in the background by importance. No
            // predictions; the paper leaves the eviction policy while a prompt is read open.
            Self::SwapMoe => PresetSettings {
                predictor: PredictorKind::None,
                prefetch: Prefetch::Off,
                routing: RoutingRules { substitute: None, virtual_experts: true },
                ..base
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
    }

    #[test]
    fn settings_are_the_papers() {
        let of = |preset: Preset| preset.settings().unwrap();
        let low = |preset| of(preset).low.map(|low| (low.t1, low.t2, low.prefill_low));
        assert_eq!(low(Preset::Hobbit), Some((0.6, 0.9, 0.0)), "the scorer alone, for Mixtral");
        assert_eq!(low(Preset::EdgeMoe), None, "no choice of widths at run time");
        assert_eq!(low(Preset::Fate), Some((1.0, 1.0, 0.25)), "decode is all high");
        assert_eq!([Preset::Hobbit, Preset::Fate].map(|preset| of(preset).low.unwrap().low_share), [0.1, 0.0]);
        assert!((1..=3).contains(&of(Preset::Hobbit).distance));
        for (preset, policy, predictor, prefetch) in [
            (Preset::Hobbit, "hobbit", "stacked-gate", Prefetch::All),
            (Preset::EdgeMoe, "edgemoe", "path-table", Prefetch::Top3),
            (Preset::Fate, "arc", "cross-layer", Prefetch::Budget),
            (Preset::Smoe, "smoe", "stacked-gate", Prefetch::Budget),
        ] {
            let settings = of(preset);
            assert_eq!((settings.policy.name(), settings.predictor.name()), (policy, predictor));
            assert_eq!(settings.prefetch, prefetch);
        }
        for preset in [Preset::Hobbit, Preset::EdgeMoe, Preset::Fate] {
            assert!(of(preset).routing.is_off(), "routing is never changed");
        }
        let smoe = of(Preset::Smoe);
        assert_eq!((smoe.routing.substitute, smoe.distance, smoe.low), (Some((0.3, 0)), 1, None));
        let swapmoe = of(Preset::SwapMoe);
        assert_eq!((swapmoe.routing.virtual_experts, swapmoe.prefetch), (true, Prefetch::Off));
        assert_eq!(of(Preset::Fate).slots.to_string(), "shallow-first:3");
    }
}
