//! Statistics of a session.

/// Adds or subtracts counts: `field_by_field!(Counts: Add::add { hits, misses })`.
macro_rules! field_by_field {
    ($counts:ident: $operator:ident::$operate:ident { $($field:ident),+ }) => {
        impl std::ops::$operator for $counts {
            type Output = Self;

            fn $operate(self, other: Self) -> Self {
                Self { $($field: std::ops::$operator::$operate(self.$field, other.$field)),+ }
            }
        }
    };
}
pub(crate) use field_by_field;

mod kernels;
mod precision;
mod reports;

use serde::Serialize;

use crate::plan::WidthReport;
use crate::speculation::GateReport;

pub use kernels::{KernelReport, KernelSpeed, KernelTrial};
pub use precision::{LowReport, PrecisionCounts, PrecisionReport, PrecisionShares, VersionsReport};
pub use reports::{
    CacheSlots, CachingReport, DeviceCounters, DeviceReport, LatencyReport, LatencyStep, NormsSource, PrefetchReport,
    RecallReport, VirtualExpertsReport,
};

#[doc(inline)]
pub use crate::plan::MemoryPlan;
#[doc(inline)]
pub use crate::route::RerouteCounts;
#[doc(inline)]
pub use crate::store::CopyReport;

/// Expert traffic of one phase: prompt processing or decoding. Warm-up is never counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PhaseStats {
    pub tokens: u64,
    /// Wall time spent evaluating them.
    pub seconds: f64,
    /// Resident experts: one for each distinct expert that a layer needed in an evaluated ubatch.
    pub hits: u64,
    /// Missing experts, counted alike.
    pub misses: u64,
    /// Uses, one for each token and each expert its router chose, by computed precision.
    pub used: PrecisionCounts,
    /// Chosen experts that were not resident in high precision, counted as [`PhaseStats::hits`], by outcome: loaded in
    /// high precision, computed in low precision (loaded or resident), or skipped.
    pub missed: PrecisionCounts,
    /// Uses of other experts than the router's.
    pub rerouted: RerouteCounts,
    /// Low-precision versions replaced by high-precision ones in the background.
    pub upgrades: u64,
    /// Layers of few tokens with missing experts that were computed product by product, in ggml's order: expert by
    /// expert was not proven to give the same results.
    pub in_order: u64,
    pub slices_loaded: u64,
    /// Bytes moved from the files, alignment included.
    pub bytes_read: u64,
    /// Wall time with at least one read in flight.
    pub io_busy_seconds: f64,
    /// Wall time in which the computation stood still for a read.
    pub io_wait_seconds: f64,
}

impl PhaseStats {
    /// Share of needed experts that were resident, 0..=1; `None` when none was needed.
    pub fn hit_rate(&self) -> Option<f64> {
        ratio(self.hits as f64, (self.hits + self.misses) as f64)
    }

    /// Bytes per second while reading; `None` when nothing was read.
    pub fn read_bandwidth(&self) -> Option<f64> {
        if self.bytes_read == 0 {
            return None;
        }
        ratio(self.bytes_read as f64, self.io_busy_seconds)
    }

    /// Tokens per second; `None` when no token was evaluated.
    pub fn tokens_per_second(&self) -> Option<f64> {
        if self.tokens == 0 {
            return None;
        }
        ratio(self.tokens as f64, self.seconds)
    }

    /// Tokens per second if only reading took time: tokens / (bytes read / bandwidth), in bytes per second. `None` when
    /// nothing was read.
    pub fn roofline_tokens_per_second(&self, bandwidth: f64) -> Option<f64> {
        if self.tokens == 0 || self.bytes_read == 0 || bandwidth <= 0.0 {
            return None;
        }
        ratio(self.tokens as f64, self.bytes_read as f64 / bandwidth)
    }

    /// Ratio to reading and computing in perfect overlap; see [`efficiency`]. `None` when nothing was evaluated.
    pub fn efficiency(&self, bandwidth: f64) -> Option<f64> {
        (self.tokens > 0).then(|| efficiency(self.seconds, self.io_wait_seconds, self.bytes_read, bandwidth)).flatten()
    }
}

/// Ratio, 0..=1, of the least possible time to `seconds`. The least time is the longer of reading `bytes` at
/// `bandwidth` bytes per second and computing, in perfect overlap; computing took the time that was not spent waiting
/// for reads. `None` for no time, or reads at no speed.
pub fn efficiency(seconds: f64, waited_seconds: f64, bytes: u64, bandwidth: f64) -> Option<f64> {
    let reading = if bytes == 0 { Some(0.0) } else { ratio(bytes as f64, bandwidth) };
    let computing = seconds - waited_seconds;
    ratio(reading?.max(computing).min(seconds), seconds)
}

field_by_field!(PhaseStats: Add::add {
    tokens, seconds, hits, misses, used, missed, rerouted, upgrades, in_order, slices_loaded, bytes_read,
    io_busy_seconds, io_wait_seconds
});

field_by_field!(RerouteCounts: Add::add { uses, refused, given_up });
field_by_field!(RerouteCounts: Sub::sub { uses, refused, given_up });

impl RerouteCounts {
    /// Mean share of a token's weight that a rerouted use lost; `None` without rerouted uses.
    pub fn mean_given_up(&self) -> Option<f64> {
        ratio(self.given_up, self.uses as f64)
    }
}

/// Traffic of one layer, both phases together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerStats {
    /// Block number.
    pub layer: u16,
    /// Slots of the layer in its pool.
    pub slots: u32,
    /// Resident experts, counted as [`PhaseStats::hits`].
    pub hits: u64,
    /// Missing experts, counted alike.
    pub misses: u64,
    /// Uses by computed precision.
    pub used: PrecisionCounts,
    /// Uses of other experts than the router's.
    pub rerouted: u64,
    /// Tokens that were left alone ([`RerouteCounts::refused`]).
    pub refused: u64,
    /// The part of a token's weight that substitution may exchange, the mean of the last tokens; `None` without it.
    pub exchangeable: Option<f32>,
    /// Whether that is most of it.
    pub is_flat: bool,
}

/// All counters of a session.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Batches of prompt tokens.
    pub prompt: PhaseStats,
    /// Single generated tokens.
    pub decode: PhaseStats,
    /// MoE layers, ascending; empty for a dense model.
    pub layers: Vec<LayerStats>,
    /// Devices that hold layers, in the order of [`DeviceReport`]s; empty if everything is on the CPU.
    pub devices: Vec<DeviceCounters>,
    /// Prefetching; `None` without lookahead.
    pub prefetch: Option<PrefetchReport>,
    /// Changes of virtual experts; `None` if tokens wait for their choice.
    pub virtual_experts: Option<VirtualExpertsReport>,
    /// State of the control for [`RoutingOptions::target_latency`](crate::options::RoutingOptions::target_latency);
    /// `None` without a target.
    #[serde(rename = "target_latency")]
    pub latency: Option<LatencyReport>,
    /// Drafts; `None` if the session does not speculate.
    pub speculation: Option<GateReport>,
    /// Kernels that multiply in batches.
    pub kernels: KernelReport,
    /// Widths of prompts' ubatches; `None` where they are fixed.
    pub prompt_width: Option<WidthReport>,
    /// Copies of the model's files that experts were read from since it was opened, its own first; empty without
    /// mirrors.
    pub copies: Vec<CopyReport>,
    /// Largest resident set of the process so far, in bytes; 0 if the system does not report it.
    pub peak_rss_bytes: u64,
}

impl Stats {
    /// Both phases together.
    pub fn total(&self) -> PhaseStats {
        self.prompt + self.decode
    }
}

/// Times of a session in llama.cpp's categories (`llama_perf_context_data`, `llama_perf_sampler_data`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Opening the model and preparing the session, in milliseconds.
    pub load_ms: f64,
    /// Prompt processing, in milliseconds.
    pub prompt_ms: f64,
    pub prompt_tokens: u64,
    /// Single-token evaluation, in milliseconds.
    pub eval_ms: f64,
    /// Single-token evaluations.
    pub eval_runs: u64,
    pub sample_ms: f64,
    pub sample_count: u64,
    /// From the start of loading until now, in milliseconds.
    pub total_ms: f64,
    /// Evaluations that reused the previous compute graph.
    pub graphs_reused: u64,
}

/// Largest resident set of this process so far, in bytes; 0 if the system does not report it.
pub fn peak_rss_bytes() -> u64 {
    #[cfg(windows)]
    return crate::windows::own_memory().map_or(0, |own| own.resident_peak);
    #[cfg(not(windows))]
    own("status", "VmHWM:")
}

/// Experts that caches begin with: those of an earlier run
/// ([`ModelOptions::cache_state`](crate::options::ModelOptions::cache_state)), or the most frequent of a path table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct WarmStart {
    /// They are the most frequent of the path table.
    pub by_frequency: bool,
    /// Versions of experts that were resident when the model was closed, in all caches; or experts in the table.
    pub saved: u64,
    /// Versions that have slots again before the first token: fewer if caches are smaller now.
    pub experts: u64,
    pub bytes: u64,
    /// This many versions are read into free slots while no product waits, and none before the first token
    /// ([`ModelOptions::cache_state_dir`](crate::options::ModelOptions::cache_state_dir)).
    pub later: u64,
}

/// Resident set of this process now, in bytes; 0 if the system does not report it. The kernel counts
/// it for `smaps_rollup`; its documentation calls the sum in `status` inaccurate.
pub fn rss_bytes() -> u64 {
    #[cfg(windows)]
    return crate::windows::own_memory().map_or(0, |own| own.resident);
    #[cfg(not(windows))]
    match own("smaps_rollup", "Rss:") {
        0 => own("status", "VmRSS:"),
        counted => counted,
    }
}

#[cfg(not(windows))]
fn own(file: &str, key: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/self/{file}")).ok();
    text.and_then(|text| crate::plan::kib_field(&text, key)).unwrap_or(0)
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_nothing_are_absent() {
        let none = PhaseStats::default();
        assert_eq!(none.hit_rate(), None);
        assert_eq!(none.read_bandwidth(), None);
        assert_eq!(none.tokens_per_second(), None);
        assert_eq!(none.roofline_tokens_per_second(1e9), None);
        assert_eq!(none.efficiency(1e9), None);
    }

    #[test]
    fn rates() {
        let decode = PhaseStats {
            tokens: 10,
            seconds: 4.0,
            hits: 3,
            misses: 1,
            used: PrecisionCounts { high: 6, low: 1, skipped: 1 },
            missed: PrecisionCounts { high: 1, low: 2, skipped: 3 },
            rerouted: RerouteCounts { uses: 2, refused: 1, given_up: 0.25 },
            upgrades: 4,
            in_order: 1,
            slices_loaded: 3,
            bytes_read: 2_000_000_000,
            io_busy_seconds: 2.0,
            io_wait_seconds: 1.0,
        };
        assert_eq!(decode.hit_rate(), Some(0.75));
        assert_eq!(decode.read_bandwidth(), Some(1e9));
        assert_eq!(decode.tokens_per_second(), Some(2.5));
        assert_eq!(decode.roofline_tokens_per_second(1e9), Some(5.0));
        // Computing took 3 of 4 seconds, and reading would have taken 2; at half the speed, 4.
        assert_eq!((decode.efficiency(1e9), decode.efficiency(5e8)), (Some(0.75), Some(1.0)));
        let resident = PhaseStats { bytes_read: 0, io_wait_seconds: 0.0, ..decode };
        assert_eq!((resident.efficiency(0.0), decode.efficiency(0.0)), (Some(1.0), None));
        let stats = Stats { prompt: decode, decode, ..Stats::default() };
        assert_eq!(stats.total().bytes_read, 4_000_000_000);
        assert_eq!(stats.total().hit_rate(), Some(0.75));
        assert_eq!(stats.total().used, PrecisionCounts { high: 12, low: 2, skipped: 2 });
        assert_eq!(stats.total().missed, PrecisionCounts { high: 2, low: 4, skipped: 6 });
        assert_eq!(stats.total().upgrades, 8);
        assert_eq!(stats.total().rerouted.mean_given_up(), Some(0.125));
    }
}
