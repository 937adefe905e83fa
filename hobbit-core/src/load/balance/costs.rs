//! Costs of a copy and of a product on the CPU, learned during the run.

use smart_default::SmartDefault;

/// An exponentially weighted running mean that one outlier cannot carry away.
///
/// The first samples count evenly (the mean of `n` samples moves by `1 / (n + 1)`) until a sample's weight has fallen
/// to [`RunningMean::WEIGHT_MIN`]; a seed counts as one sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunningMean {
    /// Value, and how many samples it stands for.
    mean: Option<(f64, u32)>,
}

impl RunningMean {
    /// Weight of a sample in a long series: half of the past is forgotten after five.
    pub const WEIGHT_MIN: f64 = 0.125;
    /// A sample counts as at most so many times the mean, and as at least that part of it.
    pub const OUTLIER: f64 = 8.0;

    /// Starts with a guess that counts as one sample; one that is not positive and finite is ignored.
    pub fn seeded(value: f64) -> Self {
        let mut mean = Self::default();
        mean.add(value);
        mean
    }

    /// Samples that are not positive and finite are ignored.
    pub fn add(&mut self, sample: f64) {
        if !(sample > 0.0 && sample.is_finite()) {
            return;
        }
        self.mean = Some(match self.mean {
            None => (sample, 1),
            Some((mean, n)) => {
                let sample = sample.clamp(mean / Self::OUTLIER, mean * Self::OUTLIER);
                let weight = (1.0 / (f64::from(n) + 1.0)).max(Self::WEIGHT_MIN);
                (mean + weight * (sample - mean), n.saturating_add(1))
            }
        });
    }

    /// Lets the past count as one sample.
    pub fn age(&mut self) {
        if let Some((_, n)) = &mut self.mean {
            *n = 1;
        }
    }

    /// The mean; `None` before the first sample.
    pub fn get(&self) -> Option<f64> {
        self.mean.map(|(mean, _)| mean)
    }
}

/// Costs of the two ways to compute a missing expert.
///
/// The constants (latency, overhead, tail) are small and stay as given; their errors go into the means.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault)]
pub struct Costs {
    pub link: RunningMean,
    /// Seconds that one copy takes however small it is.
    #[default(Self::LINK_LATENCY)]
    pub link_latency: f64,
    pub cpu: RunningMean,
    /// Seconds per step in which the CPU computes at all: activations down, results up, waking threads.
    #[default(Self::CPU_OVERHEAD)]
    pub cpu_overhead: f64,
    /// Seconds of the device's product of the expert that lands last.
    pub tail: f64,
}

impl Costs {
    /// An asynchronous copy over PCI Express, submitted and awaited, in seconds.
    pub const LINK_LATENCY: f64 = 10e-6;
    /// Two small copies and the wake-up of a pool of threads, in seconds.
    pub const CPU_OVERHEAD: f64 = 40e-6;

    /// Part of a measured time that constants may explain away; the rest is laid to the bytes.
    const CONSTANT_SHARE_MAX: f64 = 0.875;

    /// Seconds per byte beside the constant part; not positive without a measurement.
    pub(super) fn per_byte(bytes: u64, seconds: f64, constant: f64) -> f64 {
        if bytes == 0 {
            return 0.0;
        }
        (seconds - constant.min(seconds * Self::CONSTANT_SHARE_MAX)) / bytes as f64
    }

    /// Seconds that `copies` of `bytes` together hold the link, if known.
    pub fn copy(&self, copies: u64, bytes: u64) -> Option<f64> {
        Some(copies as f64 * self.link_latency + bytes as f64 * self.link.get()?)
    }

    /// Seconds that experts of this [`super::Miss::work`] together take on the CPU, if known.
    pub fn cpu(&self, work: u64) -> Option<f64> {
        Some(self.cpu_overhead + work as f64 * self.cpu.get()?)
    }
}
