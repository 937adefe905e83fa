//! Copy a missing expert to the device, or compute it on the CPU: whichever is done sooner.
//!
//! HOBBIT's cooperative mode lets a CPU helper compute experts that the device misses; SMoE's Algorithm 2
//! ("CPU-assisted Computing Loading Scheduling") divides them: misses in falling order of router score, two pointers,
//! from the front what is copied, from the back what the CPU computes, with running means as costs. High scores are
//! copied because such experts are likely to be used again.
//!
//! Algorithm 2 takes the next expert for the side that is behind and can miss the best place by one expert. Here every
//! cut of the list is tried instead: there are as many as experts used per token.
//!
//! # Model of a step
//!
//! A step is one MoE layer of one batch. In seconds from the router's choice:
//!
//! ```text
//! copy   = sum over copied experts of (link latency + bytes / bandwidth)
//! device = max(copy, device_busy) + tail          without a copy: device_busy
//! cpu    = overhead + sum over computed experts of work * seconds per byte      without any: 0
//! finish = max(device, cpu)
//! ```
//!
//! `device_busy` is what the device computes anyway, behind which copies hide; `tail` is the product of the expert that
//! lands last. Experts that are not in host memory yet can only be copied. An expert is copied once for all tokens of a
//! batch, but the CPU multiplies each of its rows: `work` is [`Miss::work`]. [`split`] is exact in this model: no other
//! cut of the list finishes sooner, all-copy and all-CPU included; among equals the one that copies most wins.
//!
//! With an unknown cost everything is copied until [`Balancer`] has tried. [`split`] and
//! [`Costs`] are pure; [`Balancer`] keeps the costs fresh.

mod probe;

#[cfg(test)]
mod sweep;
#[cfg(test)]
mod tests;

pub use probe::Balancer;

use smart_default::SmartDefault;

use crate::trial::FadingMean;

/// Most tokens of an expert, in the mean of a layer, with which the CPU may compute some: with more, a copy serves so
/// many that the CPU would take longer to multiply.
const HELPED_ROWS_MAX: usize = 64;
/// Weights that a prompt misses in a layer, at least, by the bytes of the layer's input, which the helper reads back.
const HELPED_BYTES_MIN: u64 = 16;

/// Most bytes of a prompt's results in a layer: the helper's part of them waits in host memory.
const HELPED_RESULT_MAX: u64 = 32 << 20;

/// Whether the CPU may compute misses of a prompt's layer. `n_rows`: of all `n_expert` experts together. `missing`,
/// `input` and `result`: bytes.
pub fn helps_prompt(n_rows: usize, n_expert: usize, missing: u64, [input, result]: [u64; 2]) -> bool {
    let is_small = n_rows <= HELPED_ROWS_MAX * n_expert && result <= HELPED_RESULT_MAX;
    is_small && missing >= HELPED_BYTES_MIN * input
}

/// A selected expert without a copy in device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Miss {
    pub index: u16,
    /// Bytes of its slices in the version that is wanted.
    pub bytes: u64,
    /// Tokens of the batch that use it.
    pub rows: u32,
    /// Router weight by size, the highest of the batch.
    pub score: f32,
    /// Whether it is in host memory. If not it is being read, and can only be copied.
    pub on_host: bool,
}

impl Miss {
    /// Rows that the CPU multiplies in the time in which memory delivers the weights. An assumption: its cores compute
    /// about four times as fast as they read.
    pub(crate) const ROWS_AT_ONCE: u32 = 4;

    /// Bytes that take the CPU as long to read as this expert takes to compute.
    pub fn work(&self) -> u64 {
        Self::work_of(self.bytes, self.rows)
    }

    /// [`Miss::work`] of so many bytes of weights and rows.
    pub fn work_of(bytes: u64, rows: u32) -> u64 {
        bytes * u64::from(rows.max(Self::ROWS_AT_ONCE)) / u64::from(Self::ROWS_AT_ONCE)
    }
}

/// Experts that the CPU may compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum HelperMode {
    Off,
    #[default]
    Auto,
    /// Every miss that is in host memory.
    On,
}

/// A division of the misses, each side in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Split {
    /// Experts to be copied, most important first.
    pub copy: Vec<u16>,
    pub cpu: Vec<u16>,
    /// End of the step by the model, in seconds; 0 if a cost that counts is unknown.
    pub finish: f64,
    /// One expert is copied to learn the link's cost: the caller has to measure it, or the next step probes again.
    pub probes_link: bool,
}

/// Divides the misses of a step.
///
/// `misses` come in falling order of importance. `device_busy` is in seconds. Time and memory are linear in the number
/// of misses.
pub fn split(misses: &[Miss], costs: &Costs, device_busy: f64, mode: HelperMode) -> Split {
    let n_host = misses.iter().filter(|miss| miss.on_host).count();
    let n_copied = match mode {
        HelperMode::Off => n_host,
        HelperMode::On => 0,
        HelperMode::Auto => best_cut(misses, n_host, costs, device_busy),
    };
    cut(misses, n_copied, costs, device_busy)
}

/// Number of misses in host memory that the best split copies.
fn best_cut(misses: &[Miss], n_host: usize, costs: &Costs, device_busy: f64) -> usize {
    if costs.copy(1, 0).is_none() || costs.cpu(0).is_none() {
        return n_host;
    }
    let mut load = load_of(misses, 0);
    let mut best = (0, load.finish(costs, device_busy).unwrap_or(f64::INFINITY));
    for (i, miss) in misses.iter().filter(|miss| miss.on_host).enumerate() {
        load.move_to_link(miss);
        if let Some(finish) = load.finish(costs, device_busy)
            && finish <= best.1
        {
            best = (i + 1, finish);
        }
    }
    best.0
}

/// The split that copies the first `n_copied` misses in host memory and all that are not.
fn cut(misses: &[Miss], n_copied: usize, costs: &Costs, device_busy: f64) -> Split {
    let finish = load_of(misses, n_copied).finish(costs, device_busy).unwrap_or(0.0);
    let mut split = Split { finish, ..Split::default() };
    let mut n_host = 0;
    for miss in misses {
        let computed = miss.on_host && n_host >= n_copied;
        n_host += usize::from(miss.on_host);
        if computed { split.cpu.push(miss.index) } else { split.copy.push(miss.index) }
    }
    split
}

fn load_of(misses: &[Miss], n_copied: usize) -> Load {
    let mut load = Load::default();
    for miss in misses {
        let (number, bytes, more) = if miss.on_host {
            (&mut load.computed, &mut load.cpu_work, miss.work())
        } else {
            (&mut load.copies, &mut load.copy_bytes, miss.bytes)
        };
        *number += 1;
        *bytes += more;
    }
    misses.iter().filter(|miss| miss.on_host).take(n_copied).for_each(|miss| load.move_to_link(miss));
    load
}

/// Work of each side. Whole numbers: equal loads take equal times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Load {
    copies: u64,
    copy_bytes: u64,
    computed: u64,
    cpu_work: u64,
}

impl Load {
    fn move_to_link(&mut self, miss: &Miss) {
        self.computed -= 1;
        self.cpu_work -= miss.work();
        self.copies += 1;
        self.copy_bytes += miss.bytes;
    }

    /// End of the step, in seconds; `None` if a cost that counts is unknown.
    fn finish(&self, costs: &Costs, device_busy: f64) -> Option<f64> {
        let device = match self.copies {
            0 => device_busy,
            copies => costs.copy(copies, self.copy_bytes)?.max(device_busy) + costs.tail,
        };
        let cpu = if self.computed == 0 { 0.0 } else { costs.cpu(self.cpu_work)? };
        Some(device.max(cpu))
    }
}

/// An exponentially weighted running mean that one outlier cannot carry away.
///
/// The first samples count evenly (the mean of `n` samples moves by `1 / (n + 1)`) until a sample's weight has fallen
/// to `RunningMean::WEIGHT_MIN`; a seed counts as one sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunningMean(FadingMean);

impl RunningMean {
    /// Weight of a sample in a long series: half of the past is forgotten after five.
    pub(crate) const WEIGHT_MIN: f64 = 0.125;
    /// A sample counts as at most this multiple of the mean, and as at least this fraction of it.
    pub(crate) const OUTLIER: f64 = 8.0;

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
        let sample = self.get().map_or(sample, |mean| sample.clamp(mean / Self::OUTLIER, mean * Self::OUTLIER));
        self.0.weight = self.0.weight.min(1.0 / Self::WEIGHT_MIN - 1.0);
        self.0.take(sample, 1.0);
    }

    /// Lets the past count as one sample.
    pub fn age(&mut self) {
        self.0.weight = self.0.weight.min(1.0);
    }

    /// The mean; `None` before the first sample.
    pub fn get(&self) -> Option<f64> {
        (self.0.weight > 0.0).then_some(self.0.mean)
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
    pub(crate) const LINK_LATENCY: f64 = 10e-6;
    /// Two small copies and the wake-up of a pool of threads, in seconds.
    pub(crate) const CPU_OVERHEAD: f64 = 40e-6;

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

    /// Seconds that experts of this [`Miss::work`] together take on the CPU, if known.
    pub fn cpu(&self, work: u64) -> Option<f64> {
        Some(self.cpu_overhead + work as f64 * self.cpu.get()?)
    }
}
