//! Options of precision, kernels and caching: which versions of experts are used, multiplied how, and kept in memory.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

use crate::cache::Allocation;
use crate::cache::policy::{PolicyKind, Weights};
use crate::load::prefetch::PrefetchRule;
use crate::named::named;
use crate::predict::PredictorKind;
use crate::route::Thresholds;

/// Whether results may differ from llama.cpp's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PrecisionMode {
    /// Every expert at high precision: bit-identical to llama.cpp.
    Exact,
    /// A missing expert of little weight is read in low precision or skipped (HOBBIT, section 3.2).
    Dynamic,
}

named!(PrecisionMode, "precision mode": Exact = "exact", Dynamic = "dynamic");

/// When a low-precision version may replace the high one.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault)]
pub struct PrecisionOptions {
    /// `None`: dynamic if there are low versions, otherwise exact.
    pub mode: Option<PrecisionMode>,
    /// Highest unimportance loaded in high precision, `0.0..=1.0`; 0 loads nothing in high precision. `None` takes the
    /// pack's, otherwise [`PrecisionOptions::T1`].
    pub t1: Option<f32>,
    /// Highest unimportance loaded at all, `0.0..=1.0`; `None` as for `t1`, with [`PrecisionOptions::T2`].
    pub t2: Option<f32>,
    /// Scale a token's remaining router weights up when an expert is skipped.
    pub renormalise: bool,
    /// Share of a layer's active experts read in low precision in prompt batches, `0.0..=1.0`: least popular first, but
    /// no token's first expert. `None`: `PrecisionOptions::PREFILL_LOW`, but none if T1 is 1.
    pub prefill_low: Option<f32>,
    /// Replace often used low versions by high ones while the disk is idle.
    #[default(true)]
    pub upgrade: bool,
    /// Nothing depends on the speed of reads: same seed, budget and prompt give the same text.
    pub deterministic: bool,
}

impl PrecisionOptions {
    pub const T1: f32 = Thresholds::MIXTRAL.t1;
    pub const T2: f32 = Thresholds::MIXTRAL.t2;
    /// Fate's share of a prompt's experts.
    pub(crate) const PREFILL_LOW: f32 = 0.25;

    /// [`PrecisionOptions::prefill_low`] in effect if T1 is `t1`.
    pub fn prefill_low_at(&self, t1: f32) -> f32 {
        self.prefill_low.unwrap_or(if t1 < 1.0 { Self::PREFILL_LOW } else { 0.0 })
    }

    /// Whether results must be independent of this machine's speed, or equal to llama.cpp's bit by bit.
    pub fn demands_exactness(&self) -> bool {
        self.deterministic || self.mode == Some(PrecisionMode::Exact)
    }

    /// T1 and T2 in effect: the given ones, else `fitted`, else HOBBIT's. A given threshold moves one that was not
    /// given, so that T1 is never above T2 unless both were given so.
    pub fn thresholds(&self, fitted: Option<(f32, f32)>) -> (f32, f32) {
        let (t1, t2) = fitted.unwrap_or((Self::T1, Self::T2));
        match (self.t1, self.t2) {
            (None, None) => (t1, t2),
            (Some(given), None) => (given, t2.max(given)),
            (None, Some(given)) => (t1.min(given), given),
            (Some(t1), Some(t2)) => (t1, t2),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LowSource {
    /// A GGUF of the same model in a smaller quant, or a low pack.
    File(PathBuf),
    /// Made once from the model, in a file beside it: types as in `gguf-tools pack --low`, such as `q2_k,down=q3_k`.
    Quantise {
        types: String,
        /// Where the file goes; `None` for the model's own directory.
        directory: Option<PathBuf>,
    },
}

/// ggml kernels allowed to multiply the experts' rows in batches, if one is faster than llama.cpp's choice. Single
/// tokens always use llama.cpp's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KernelChoice {
    /// Kernels that give the same bits, as tried on this machine.
    #[default]
    Identical,
    /// The fastest: the last bits of some types' results (f16, bf16, iq4_nl) then differ from llama.cpp's, and the
    /// fastest kernel may differ from run to run. Not used if results must repeat or be exact: see
    /// [`ModelOptions::kernels`](super::ModelOptions::kernels).
    Fastest,
}

named!(KernelChoice, "choice of kernels": Identical = "identical", Fastest = "fastest");

/// Whether experts are read before their layer asks for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Prefetch {
    /// While tokens are faster with it, as measured in trials.
    #[default]
    Auto,
    On,
    /// [`PrefetchRule::All`]. This setting and the two below judge no guess for its worth.
    All,
    /// [`PrefetchRule::Budget`].
    Budget,
    /// [`PrefetchRule::First`] with three experts: EdgeMoE preloads one to three of the next layer (section III-C1).
    Top3,
    /// Never. Predictions are still made and judged.
    Off,
}

named! { Prefetch, "prefetch setting":
    Auto = "auto", On = "on", All = "all", Budget = "budget", Top3 = "top-3", Off = "off",
}

impl Prefetch {
    /// How reads ahead are chosen.
    pub const fn rule(self) -> PrefetchRule {
        match self {
            Self::All => PrefetchRule::All,
            Self::Budget => PrefetchRule::Budget,
            Self::Top3 => PrefetchRule::First(3),
            Self::Auto | Self::On | Self::Off => PrefetchRule::Timed,
        }
    }

    /// Whether guesses are read ahead without trials.
    pub const fn is_fixed_on(self) -> bool {
        !matches!(self, Self::Auto | Self::Off)
    }
}

/// Eviction, slots and prefetching of the caches of the host and of each device.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault)]
pub struct CachingOptions {
    pub policy: PolicyKind,
    /// The weights of [`PolicyKind::Hobbit`].
    pub weights: Weights,
    /// How slots are divided among layers.
    pub slots: Allocation,
    /// Predictor of later layers' experts. `None`: [`super::ModelOptions::predictor`].
    pub predictor: Option<PredictorKind>,
    /// Whether predicted experts are read ahead.
    pub prefetch: Prefetch,
    /// Maximum layers to look ahead.
    #[default(Self::DISTANCE)]
    pub distance: u8,
    /// Compute with resident experts while others of the layer are read. `false` only serves to measure the gain.
    #[default(true)]
    pub overlap: bool,
    /// Fill free slots while no product waits for a read, before the experts are needed. Only with
    /// [`PolicyKind::Learned`] or if every expert has a slot; not in traced or deterministic runs, nor with devices.
    /// With [`PredictorKind::PathTable`] the most frequent experts of the table are read before the first token.
    #[default(true)]
    pub fill: bool,
}

impl CachingOptions {
    /// HOBBIT found 1 to 3 to be best.
    pub const DISTANCE: u8 = 2;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_have_a_share_of_their_own() {
        let at = |prefill_low, t1| PrecisionOptions { prefill_low, ..Default::default() }.prefill_low_at(t1);
        assert_eq!([at(None, 0.6), at(None, 1.0)], [0.25, 0.0], "T1 = 1 alone takes everything in high precision");
        assert_eq!([at(Some(0.4), 0.6), at(Some(0.4), 1.0), at(Some(0.0), 0.6)], [0.4, 0.4, 0.0]);
    }

    #[test]
    fn thresholds_stay_in_order() {
        let of = |t1, t2, fitted| PrecisionOptions { t1, t2, ..Default::default() }.thresholds(fitted);
        for (t1, t2, fitted, expected) in [
            (None, None, None, (0.6, 0.9)),
            (None, None, Some((0.4, 0.7)), (0.4, 0.7)),
            (Some(0.5), None, Some((0.4, 0.7)), (0.5, 0.7)),
            (Some(1.0), None, None, (1.0, 1.0)),
            (None, Some(0.5), None, (0.5, 0.5)),
            (Some(0.0), Some(1.0), Some((0.4, 0.7)), (0.0, 1.0)),
        ] {
            assert_eq!(of(t1, t2, fitted), expected, "{t1:?} {t2:?} {fitted:?}");
        }
    }
}
