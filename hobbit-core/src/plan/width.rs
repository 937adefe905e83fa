//! Width of a prompt's ubatches. Every ubatch reads nearly every missing expert, so fewer and wider ones read less; the
//! memory of their activations is taken from the slots meanwhile.

use serde::Serialize;

use crate::stats::PhaseStats;

/// Most tokens of a ubatch by default.
pub const UBATCH_MAX: u32 = 16_384;

/// Widths are multiples of this: kernels process tiles of rows.
const STEP: usize = 64;

/// Batches of fewer tokens do not tell what a prompt's batch costs.
const MEASURED_TOKENS_MIN: u64 = 256;

/// Most passes over a prompt to consider: beyond that, one more or less saves little.
const PASSES_MAX: usize = 64;

/// A wider ubatch must promise at most this share of the usual width's time.
const WORTH_IT: f64 = 0.9;

/// Take the narrowest width whose time is within this factor of the best.
const AS_GOOD: f64 = 1.05;

/// Usual multiplications a second of a core and bytes a second of a disk, and those of a GPU and its link. They stand
/// until the first batch has measured the costs: a batch of the usual width would read every expert once more.
const USUAL_CPU: (f64, f64) = (20e9, 1.5e9);
const USUAL_DEVICE: (f64, f64) = (2e13, 16e9);

/// Costs of a prompt's batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PromptCosts {
    /// Seconds of products and attention for a token.
    pub seconds_per_token: f64,
    /// Rate of the reads.
    pub bytes_per_second: f64,
    /// Bytes that one pass read.
    pub bytes_per_pass: f64,
}

impl PromptCosts {
    /// Usual costs, for a model of which a token uses `n_params` weights and a batch reads `bytes`: on as many threads,
    /// or on a device.
    pub fn usual(n_params: f64, bytes: u64, threads: Option<u32>) -> Self {
        let (products, rate) = threads.map_or(USUAL_DEVICE, |n| (USUAL_CPU.0 * f64::from(n.max(1)), USUAL_CPU.1));
        Self { seconds_per_token: n_params / products, bytes_per_second: rate, bytes_per_pass: bytes as f64 }
    }

    /// The costs after another batch; `None` if this one is the first and tells nothing. A batch counts as much as all
    /// before it.
    pub fn after(before: Option<Self>, batch: &PhaseStats) -> Option<Self> {
        if batch.tokens < MEASURED_TOKENS_MIN {
            return before;
        }
        let new = Self {
            seconds_per_token: (batch.seconds - batch.io_wait_seconds).max(0.0) / batch.tokens as f64,
            bytes_per_second: if batch.io_busy_seconds > 0.0 {
                batch.bytes_read as f64 / batch.io_busy_seconds
            } else {
                0.0
            },
            bytes_per_pass: batch.bytes_read as f64,
        };
        let Some(old) = before else { return Some(new) };
        let mean = |old: f64, new: f64| f64::midpoint(old, new);
        Some(Self {
            seconds_per_token: mean(old.seconds_per_token, new.seconds_per_token),
            bytes_per_second: match (old.bytes_per_second, new.bytes_per_second) {
                (old, 0.0) => old,
                (0.0, new) => new,
                (old, new) => mean(old, new),
            },
            bytes_per_pass: new.bytes_per_pass,
        })
    }
}

/// Widths of a session's ubatches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WidthReport {
    pub usual: usize,
    pub widest: usize,
    /// Width of the last ubatch of a prompt; `None` before the first.
    pub last: Option<usize>,
    pub costs: Option<PromptCosts>,
}

/// Input of the choice of a width. Sizes are bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WidthInput {
    /// Tokens of the prompt that are not evaluated yet.
    pub n_prompt: usize,
    pub usual: usize,
    /// Tokens for which the context has buffers.
    pub widest: usize,
    /// All experts in high precision.
    pub expert_bytes: u64,
    /// Slots while a ubatch of the usual width is evaluated.
    pub cache_bytes: u64,
    /// Memory of a ubatch for each of its tokens.
    pub token_bytes: u64,
    /// Layers with experts.
    pub n_layers: usize,
    pub costs: PromptCosts,
}

impl WidthInput {
    /// Tokens of the next ubatch: the usual width unless a wider one saves at least a tenth of the prompt's time.
    pub fn choose(&self) -> usize {
        if self.n_prompt <= self.usual {
            return self.usual;
        }
        let costs = &self.costs;
        let longest = self.n_prompt.min(self.widest);
        let most = longest.div_ceil(self.usual.max(1)).min(PASSES_MAX);
        // The narrowest width for each number of passes.
        let widths = (1..most).map(|passes| longest.div_ceil(passes).next_multiple_of(STEP).min(self.widest));
        let timed = |width: usize| (width, self.seconds(width, costs));
        let timed: Vec<(usize, f64)> = widths.filter(|width| *width > self.usual).map(timed).collect();
        let least = timed.iter().map(|(_, seconds)| *seconds).fold(f64::INFINITY, f64::min);
        if least > WORTH_IT * self.seconds(self.usual, costs) {
            return self.usual;
        }
        let good = timed.iter().filter(|(_, seconds)| *seconds <= AS_GOOD * least).map(|(width, _)| *width);
        good.min().unwrap_or(self.usual)
    }

    /// Bytes of staging with which a ubatch of `width` tokens reads while it computes: what can be read in a layer's
    /// time, at most a layer's experts. None for the usual width, whose slots must outlive many short prompts.
    pub fn staging(&self, width: usize) -> u64 {
        if width <= self.usual {
            return 0;
        }
        let n_layers = self.n_layers.max(1);
        let seconds = width as f64 * self.costs.seconds_per_token / n_layers as f64;
        let meanwhile = (seconds * self.costs.bytes_per_second) as u64;
        meanwhile.min(self.expert_bytes / n_layers as u64)
    }

    /// Seconds of the prompt in ubatches of `width`: each takes the longer of its reads and its products, and what it
    /// takes from the slots is read again after the prompt.
    fn seconds(&self, width: usize, costs: &PromptCosts) -> f64 {
        let taken = (width - self.usual) as f64 * self.token_bytes as f64;
        let taken = taken.min(self.cache_bytes as f64);
        let reads = |bytes: f64| if costs.bytes_per_second > 0.0 { bytes / costs.bytes_per_second } else { 0.0 };
        let missing = self.expert_bytes as f64 - (self.cache_bytes as f64 - taken);
        let pass = if width == self.usual { costs.bytes_per_pass } else { missing.max(costs.bytes_per_pass) };
        let (whole, rest) = (self.n_prompt / width, self.n_prompt % width);
        let products = |tokens: usize| tokens as f64 * costs.seconds_per_token;
        let last = if rest > 0 { reads(pass).max(products(rest)) } else { 0.0 };
        whole as f64 * reads(pass).max(products(width)) + last + reads(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::GIB;

    /// 5 GiB of experts of which 1.5 have slots, read at `rate`; a token's products take `seconds`.
    fn input(n_prompt: usize, rate: f64, seconds: f64) -> WidthInput {
        let bytes_per_pass = 3.0 * GIB as f64;
        WidthInput {
            n_prompt,
            usual: 512,
            widest: 8192,
            expert_bytes: 5 * GIB,
            cache_bytes: 3 * GIB / 2,
            token_bytes: 100 << 10,
            n_layers: 10,
            costs: PromptCosts { seconds_per_token: seconds, bytes_per_second: rate, bytes_per_pass },
        }
    }

    #[test]
    fn slow_reads_widen_and_slow_products_do_not() {
        assert_eq!(input(8192, 3e8, 1e-3).choose(), 8192, "one pass");
        assert_eq!(input(8192, 3e9, 22e-3).choose(), 512, "products take all of the time");
        // Of 100 and of 10,000 million weights for a token, on 4 threads: reads take longer, and products do.
        let of = |n_params: f64| WidthInput {
            costs: PromptCosts::usual(n_params, 3 * GIB, Some(4)),
            ..input(8192, 0.0, 0.0)
        };
        assert_eq!([1e8, 1e10].map(|n_params| of(n_params).choose()), [2048, 512], "nothing is measured");
        let device = PromptCosts::usual(1e9, 3 * GIB, None);
        assert!(WidthInput { costs: device, ..input(8192, 0.0, 0.0) }.choose() > 512);
        assert_eq!(input(512, 3e8, 1e-3).choose(), 512, "one ubatch anyway");
        assert_eq!(input(600, 3e8, 1e-3).choose(), 640, "whole tiles");
        assert_eq!(input(20_000, 3e8, 1e-3).choose(), 8192, "as wide as the buffers");
    }

    #[test]
    fn a_wide_ubatch_stages_what_is_read_while_a_layer_computes() {
        assert_eq!(input(8192, 3e8, 1e-3).staging(8192), 245_760_000, "0.8 s of a layer at 300 MB/s");
        assert_eq!(input(8192, 3e9, 1e-3).staging(8192), GIB / 2, "no more than a layer's experts");
        assert_eq!(input(8192, 3e9, 1e-3).staging(512), 0);
    }

    #[test]
    fn wider_is_no_wider_than_what_saves_time() {
        // A pass reads for 3.6 s, and products of 2,048 tokens take as long: wider ubatches save nothing more.
        let width = input(8192, 1e9, 3.6 / 2048.0).choose();
        assert!((1024..=2752).contains(&width), "{width}");
        // The memory of a wide one is taken from slots that are read again.
        let two_passes = input(1024, 1e9, 1e-3);
        assert_eq!(two_passes.choose(), 1024);
        assert_eq!(WidthInput { token_bytes: 4 << 20, ..two_passes }.choose(), 512);
    }

    #[test]
    fn short_batches_and_passes_without_reads_tell_nothing_of_the_rate() {
        let batch = |tokens, bytes_read, busy| PhaseStats {
            tokens,
            seconds: 2.0,
            io_wait_seconds: 1.0,
            bytes_read,
            io_busy_seconds: busy,
            ..PhaseStats::default()
        };
        assert_eq!(PromptCosts::after(None, &batch(16, 100, 1.0)), None);
        let first = PromptCosts::after(None, &batch(500, 1000, 2.0));
        let expected = PromptCosts { seconds_per_token: 0.002, bytes_per_second: 500.0, bytes_per_pass: 1000.0 };
        assert_eq!(first, Some(expected));
        let second = PromptCosts::after(first, &batch(500, 0, 0.0));
        assert_eq!(second, Some(PromptCosts { bytes_per_pass: 0.0, ..expected }));
        let third = PromptCosts::after(first, &batch(1000, 3000, 2.0)).unwrap();
        assert_eq!((third.seconds_per_token, third.bytes_per_second), (0.0015, 1000.0));
        assert_eq!(PromptCosts::after(first, &batch(64, 1 << 30, 1.0)), first);
    }
}
