//! Probes, which keep both costs known: a side without work is never measured.

use super::{Costs, HelperMode, Miss, RunningMean, Split, best_cut, cut, load_of, split};

/// [`split`] over many steps, with costs that follow the machine.
///
/// If one side has had no work for a while, one expert goes there against the model's advice. Such a probe
/// * comes at most every `Balancer::STEPS_MIN` steps at first; each one that confirms the estimate doubles that, up
///   to [`Balancer::STEPS_MAX`], and one that contradicts it starts again;
/// * waits until the time that it will cost by the model is at most `Balancer::SHARE` of the time that steps have
///   taken since the last one, so that all probes together stay below that share;
/// * is one expert: the least important miss in host memory for the CPU, the most important one for the link.
///
/// One engine thread uses a balancer: `split`, then what was observed in that step.
#[derive(Clone, Debug)]
pub struct Balancer {
    mode: HelperMode,
    pub costs: Costs,
    link: Side,
    cpu: Side,
}

#[derive(Clone, Copy, Debug)]
struct Side {
    /// Steps with a choice since this side was last observed.
    steps: u32,
    interval: u32,
    /// Seconds that those steps took by the model.
    elapsed: f64,
    /// The last observation, in seconds per byte, if it was far below the mean: the next probe will cost that.
    surprise: Option<f64>,
}

impl Side {
    const NEW: Self = Self { steps: 0, interval: Balancer::STEPS_MIN, elapsed: 0.0, surprise: None };

    fn is_stale(&self) -> bool {
        self.steps >= self.interval
    }

    /// A side that was far cheaper than estimated is probed again at once.
    fn is_due(&self) -> bool {
        self.surprise.is_some() || self.is_stale()
    }

    /// Expected cost of the next probe, in seconds per byte.
    fn expected(&self, mean: RunningMean) -> RunningMean {
        self.surprise.map_or(mean, RunningMean::seeded)
    }

    /// Takes an observation in seconds per byte into the mean, and notes whether it confirms the mean.
    fn observed(&mut self, mean: &mut RunningMean, seen: f64) {
        if !(seen > 0.0 && seen.is_finite()) {
            return;
        }
        let ratio = mean.get().map_or(f64::INFINITY, |mean| seen / mean);
        if self.is_stale() {
            mean.age();
        }
        mean.add(seen);
        let confirmed = (Balancer::CONFIRMED.recip()..=Balancer::CONFIRMED).contains(&ratio);
        if !confirmed {
            self.interval = Balancer::STEPS_MIN;
        } else if self.is_stale() {
            self.interval = (self.interval * 2).min(Balancer::STEPS_MAX);
        }
        self.surprise = (ratio < Balancer::CONFIRMED.recip()).then_some(seen);
        self.steps = 0;
        self.elapsed = 0.0;
    }
}

impl Balancer {
    pub(crate) const STEPS_MIN: u32 = 8;
    /// Most steps between two probes of a side, if their cost allows: a few tokens.
    pub const STEPS_MAX: u32 = 256;
    /// Part of a run's time that probes of one side may cost.
    pub(crate) const SHARE: f64 = 1.0 / 32.0;
    /// An observation within this factor of the mean confirms it.
    const CONFIRMED: f64 = 1.5;

    pub fn new(costs: Costs, mode: HelperMode) -> Self {
        Self { mode, costs, link: Side::NEW, cpu: Side::NEW }
    }

    /// Divides the misses of the next step, as [`split`] does, but for probes.
    pub fn split(&mut self, misses: &[Miss], device_busy: f64) -> Split {
        let n_host = misses.iter().filter(|miss| miss.on_host).count();
        if self.mode != HelperMode::Auto || n_host == 0 {
            return split(misses, &self.costs, device_busy, self.mode);
        }
        let best = best_cut(misses, n_host, &self.costs, device_busy);
        let n_copied = self.probe(misses, best, n_host, device_busy).unwrap_or(best);
        let split = Split { probes_link: n_copied > best, ..cut(misses, n_copied, &self.costs, device_busy) };
        for side in [&mut self.link, &mut self.cpu] {
            side.steps = side.steps.saturating_add(1);
            side.elapsed += split.finish;
        }
        split
    }

    /// How many are copied instead of `best` if a side is due.
    fn probe(&self, misses: &[Miss], best: usize, n_host: usize, device_busy: f64) -> Option<usize> {
        let all_host = misses.len() == n_host;
        let (side, n_copied, costs) = if best == n_host {
            (&self.cpu, best - 1, Costs { cpu: self.cpu.expected(self.costs.cpu), ..self.costs })
        } else if best == 0 && all_host {
            (&self.link, 1, Costs { link: self.link.expected(self.costs.link), ..self.costs })
        } else {
            return None;
        };
        let seconds = |n_copied| load_of(misses, n_copied).finish(&costs, device_busy);
        match (seconds(best), seconds(n_copied)) {
            (Some(best), Some(probe)) => side.is_due() && probe - best <= side.elapsed * Self::SHARE,
            // The probe's cost is unknown: probe at once.
            (Some(_), None) => true,
            // The other side's cost is unknown, and this step will measure it.
            (None, _) => false,
        }
        .then_some(n_copied)
    }

    /// Learns from one copy of `bytes` that held the link for `seconds`.
    pub fn observe_copy(&mut self, bytes: u64, seconds: f64) {
        let seen = Costs::per_byte(bytes, seconds, self.costs.link_latency);
        self.link.observed(&mut self.costs.link, seen);
    }

    /// Learns from the CPU's part of one step: experts of this [`Miss::work`] together, `seconds` from its start to its
    /// end.
    pub fn observe_cpu(&mut self, work: u64, seconds: f64) {
        let seen = Costs::per_byte(work, seconds, self.costs.cpu_overhead);
        self.cpu.observed(&mut self.costs.cpu, seen);
    }
}
