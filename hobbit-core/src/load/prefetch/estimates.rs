//! How long things take, learned while they happen.

use crate::load::balance::RunningMean;

/// Running means of what a plan needs. Where nothing is known, nothing is planned before both were observed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimates {
    layer: RunningMean,
    byte: RunningMean,
    hit_rate: f64,
    hit_rate_of_late: f64,
}

impl Estimates {
    /// Of a layer, in the hit rate.
    const WEIGHT: f64 = 1.0 / 256.0;
    /// Of a layer, in the hit rate of late.
    const WEIGHT_OF_LATE: f64 = 1.0 / 16.0;

    /// With the bandwidth of the link as it was measured on this machine (file or host memory, whichever loads come
    /// from); a figure that is not positive is none.
    pub fn seeded(bytes_per_s: f64) -> Self {
        Self { byte: RunningMean::seeded(bytes_per_s.recip()), ..Self::default() }
    }

    /// From one router's choice to the next one's took so long, waits for experts left out.
    pub fn observe_layer(&mut self, seconds: f64) {
        self.layer.add(seconds);
    }

    /// The link was busy for `seconds`, at whatever depth, and brought `bytes`.
    pub fn observe_load(&mut self, bytes: u64, seconds: f64) {
        if bytes > 0 {
            self.byte.add(seconds / bytes as f64);
        }
    }

    /// A token used `n_used` experts of a layer, `n_hits` of which were there.
    pub fn observe_uses(&mut self, n_hits: u64, n_used: u64) {
        if n_used > 0 {
            let share = n_hits.min(n_used) as f64 / n_used as f64;
            self.hit_rate += (share - self.hit_rate) * Self::WEIGHT;
            self.hit_rate_of_late += (share - self.hit_rate_of_late) * Self::WEIGHT_OF_LATE;
        }
    }

    /// How much of what is used is there, `0.0..=1.0`; 0 until something is known.
    pub const fn hit_rate(&self) -> f64 {
        self.hit_rate
    }

    /// The same of the last few layers: tokens that lead elsewhere miss more than others.
    pub const fn hit_rate_of_late(&self) -> f64 {
        self.hit_rate_of_late
    }

    /// Seconds from one router's choice to the next one's, if known.
    pub fn layer_seconds(&self) -> Option<f64> {
        self.layer.get()
    }

    /// Seconds that the link takes for so many bytes, if known.
    pub fn load_seconds(&self, bytes: u64) -> Option<f64> {
        self.byte.get().map(|seconds| seconds * bytes as f64)
    }
}
