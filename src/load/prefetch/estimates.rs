//! How long things take, learned while they happen.

use crate::load::balance::RunningMean;

/// Running means of what a plan needs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimates {
    layer: RunningMean,
    byte: RunningMean,
}

impl Estimates {
    /// Nothing is known, so nothing is planned before both were observed.
    pub const fn new() -> Self {
        Self { layer: RunningMean::new(), byte: RunningMean::new() }
    }

    /// With the bandwidth of the link as it was measured on this machine (file or host memory, whichever loads come
    /// from); a figure that is not positive is none.
    pub fn seeded(bytes_per_s: f64) -> Self {
        Self { byte: RunningMean::seeded(bytes_per_s.recip()), ..Self::new() }
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

    /// Seconds from one router's choice to the next one's, if known.
    pub fn layer_seconds(&self) -> Option<f64> {
        self.layer.get()
    }

    /// Seconds that the link takes for so many bytes, if known.
    pub fn load_seconds(&self, bytes: u64) -> Option<f64> {
        self.byte.get().map(|seconds| seconds * bytes as f64)
    }
}
