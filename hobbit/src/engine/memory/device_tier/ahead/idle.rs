//! Idle time of the link after a layer's own copies, until the next router has chosen: the time available for
//! prefetches and promotions. Learned while layers run. Reads no clock: the caller gives the times.

use hobbit_core::load::balance::RunningMean;
use hobbit_core::load::prefetch::Estimates;

/// Idle time of a link that is never idle; running means do not accept zero.
const NEVER_SECONDS: f64 = 1e-9;

/// Running means of the link's speed and of its idle time per layer.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::engine::memory::device_tier) struct Idle {
    byte: RunningMean,
    /// After layers without copies of their own, and after layers with some: little is left to compute after those
    /// copies.
    per_layer: [RunningMean; 2],
    running: Option<Running>,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    layer: u16,
    since: f64,
    /// Bytes of its own copies, once they were submitted.
    bytes: Option<u64>,
}

impl Idle {
    /// Measured seconds per byte of the link.
    pub(super) fn seconds_per_byte(&self) -> Option<f64> {
        self.byte.get()
    }

    /// `bytes` bytes took `seconds` on the link.
    pub(in crate::engine::memory::device_tier) fn observe_link(&mut self, bytes: u64, seconds: f64) {
        if bytes > 0 {
            self.byte.add(seconds / bytes as f64);
        }
    }

    /// The router of `layer` has chosen for a decode batch at the time `now`, which excludes waits for files.
    pub(super) fn chose(&mut self, layer: u16, now: f64) {
        let Some(before) = self.running.replace(Running { layer, since: now, bytes: None }) else { return };
        let (Some(bytes), Some(copying)) = (before.bytes, before.bytes.and_then(|bytes| self.seconds_of(bytes))) else {
            return;
        };
        // The time from the last layer to the first includes more than a layer.
        if before.layer < layer {
            let idle = (now - before.since - copying).max(NEVER_SECONDS);
            self.per_layer[usize::from(bytes > 0)].add(idle);
        }
    }

    /// The layer that chose last has submitted `bytes` bytes of its own. `is_alone`: nothing else is on the link while
    /// it runs.
    pub(super) fn submitted(&mut self, bytes: u64, is_alone: bool) {
        self.running.iter_mut().for_each(|running| running.bytes = is_alone.then_some(bytes));
    }

    /// Estimates for the planner after a layer that has copied `bytes` bytes of its own; times count from the end of
    /// these copies.
    pub(super) fn estimates(&self, bytes: u64) -> Estimates {
        let mut estimates = Estimates::seeded(self.byte.get().map_or(0.0, f64::recip));
        let [without, with] = self.per_layer.map(|mean| mean.get());
        // If layers always have copies, the idle time after these is a lower bound.
        let idle = if bytes > 0 { with } else { without.or(with) };
        if let Some(seconds) = idle {
            estimates.observe_layer(seconds);
        }
        estimates
    }

    fn seconds_of(&self, bytes: u64) -> Option<f64> {
        if bytes == 0 { Some(0.0) } else { self.byte.get().map(|seconds| seconds * bytes as f64) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_is_idle_between_a_layers_copies() {
        let mut idle = Idle::default();
        assert_eq!(idle.estimates(0), Estimates::default());
        idle.observe_link(1000, 2.0);
        // Layer, time of its choice, its bytes, and whether it had the link to itself.
        for (layer, at, bytes, is_alone) in
            [(0, 10.0, 0, true), (1, 13.0, 500, true), (2, 15.0, 0, false), (3, 22.0, 0, true), (0, 99.0, 0, true)]
        {
            idle.chose(layer, at);
            idle.submitted(bytes, is_alone);
        }
        assert_eq!(idle.estimates(0).layer_seconds(), Some(3.0), "layer 0: layer 2 was disturbed, 3 was the last");
        assert_eq!(idle.estimates(500).layer_seconds(), Some(1.0), "layer 1: 2 seconds, in one of which it copied");
        assert_eq!(idle.estimates(0).load_seconds(250), Some(0.5));
    }

    #[test]
    fn a_saturated_link_is_never_idle() {
        let mut idle = Idle::default();
        idle.observe_link(1000, 1.0);
        for layer in 0..2 {
            idle.chose(layer, f64::from(layer));
            idle.submitted(2000, true);
        }
        assert_eq!(idle.estimates(1).layer_seconds(), Some(NEVER_SECONDS));
        assert_eq!(idle.estimates(0).layer_seconds(), Some(NEVER_SECONDS));
    }
}
