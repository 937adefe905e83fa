//! Report of the precision in which a session computes experts.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::expert::Precision;
use crate::options::{KernelChoice, PrecisionMode};

/// Experts by precision; the meaning of a count depends on the place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrecisionCounts {
    pub high: u64,
    pub low: u64,
    pub skipped: u64,
}

impl PrecisionCounts {
    pub fn total(&self) -> u64 {
        self.high + self.low + self.skipped
    }

    /// Counts `n` more in a precision; `None` is skipped.
    pub fn count(&mut self, precision: Option<Precision>, n: u64) {
        *match precision {
            Some(Precision::High) => &mut self.high,
            Some(Precision::Low) => &mut self.low,
            None => &mut self.skipped,
        } += n;
    }

    /// Each as a share of the total; `None` when nothing was counted.
    pub fn shares(&self) -> Option<PrecisionShares> {
        let share = |count: u64| super::ratio(count as f64, self.total() as f64);
        Some(PrecisionShares { high: share(self.high)?, low: share(self.low)?, skipped: share(self.skipped)? })
    }
}

super::field_by_field!(PrecisionCounts: Add::add { high, low, skipped });
super::field_by_field!(PrecisionCounts: Sub::sub { high, low, skipped });

impl fmt::Display for PrecisionCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} high, {} low, {} skipped", self.high, self.low, self.skipped)
    }
}

/// [`PrecisionCounts`] as shares of their total, `0.0..=1.0`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PrecisionShares {
    pub high: f64,
    pub low: f64,
    pub skipped: f64,
}

impl fmt::Display for PrecisionShares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { high, low, skipped } = self;
        write!(f, "{:.1} % high, {:.1} % low, {:.1} % skipped", 100.0 * high, 100.0 * low, 100.0 * skipped)
    }
}

/// Precision settings of a session and their sources.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PrecisionReport {
    /// Whether results may differ from llama.cpp's.
    pub mode: PrecisionMode,
    /// Highest unimportance loaded in high precision, `0.0..=1.0`.
    #[serde(serialize_with = "decimal")]
    pub t1: f32,
    /// Highest unimportance loaded at all, `0.0..=1.0`.
    #[serde(serialize_with = "decimal")]
    pub t2: f32,
    /// Maximum share of a layer's active experts in low precision in a batch, `0.0..=1.0`.
    #[serde(serialize_with = "decimal")]
    pub prefill_low: f32,
    /// Whether a token's remaining router weights are scaled up when an expert is skipped.
    pub renormalise: bool,
    /// Whether nothing depends on the speed of reads.
    pub deterministic: bool,
    /// Whether often used low versions are replaced by high ones.
    pub upgrade: bool,
    /// Whether the CPU may compute experts missing on a device: their results are rounded as on the CPU.
    pub cpu_helper: bool,
    /// Whether a device computes prompts expert by expert: its kernels may round a row differently in a smaller batch.
    pub divided: bool,
    /// Kernels that multiply in batches: the fastest may round differently from llama.cpp's.
    pub kernels: KernelChoice,
    /// Quality that routing gives up for fewer reads, as text; `None` if every token uses its routers' choices.
    pub routing: Option<String>,
    /// Whether the host has every expert in high precision, so that low versions save copies to a device only.
    pub over_link: bool,
    /// Choice for the loss bound, as text; `None` without a bound.
    pub loss_bound: Option<String>,
    pub high: VersionsReport,
    /// The low-precision versions, if there are any.
    pub low: Option<LowReport>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VersionsReport {
    /// ggml's names of their types, such as `q8_0`, or `q4_K, q6_K` where they differ.
    pub types: String,
    pub bytes: u64,
    pub slots: u64,
    /// Number of versions, over all layers.
    pub experts: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LowReport {
    /// Name of the file they come from.
    pub source: String,
    #[serde(flatten)]
    pub versions: VersionsReport,
    pub cache_bytes: u64,
}

impl PrecisionReport {
    /// Whether experts may be computed in low precision or skipped.
    pub fn is_dynamic(&self) -> bool {
        self.mode == PrecisionMode::Dynamic
    }
}

/// Shortest decimal form of the number: 0.6, not 0.6000000238418579, the exact value of the nearest `f32`.
fn decimal<S: Serializer>(value: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(value.to_string().parse().unwrap_or(f64::from(*value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares() {
        assert_eq!(PrecisionCounts::default().shares(), None);
        let counts =
            PrecisionCounts { high: 66, low: 30, skipped: 4 } + PrecisionCounts { high: 1, low: 0, skipped: 0 };
        assert_eq!(counts, PrecisionCounts { high: 67, low: 30, skipped: 4 });
        assert_eq!(counts.total(), 101);
        assert_eq!(counts.to_string(), "67 high, 30 low, 4 skipped");
        let shares = PrecisionCounts { high: 5, low: 2, skipped: 1 }.shares().unwrap();
        assert_eq!(shares, PrecisionShares { high: 0.625, low: 0.25, skipped: 0.125 });
        assert_eq!(shares.to_string(), "62.5 % high, 25.0 % low, 12.5 % skipped");
    }
}
