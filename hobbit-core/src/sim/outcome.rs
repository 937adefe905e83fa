//! Results of a replay, and their counters.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::expert::{ExpertId, Precision, Version};
use crate::load::LoadClass;
use crate::residency::{NeededExpert, Observer};
use crate::stats::{PrecisionCounts, RerouteCounts};
use crate::trace::Phase;

/// Result of a replay.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Batches of prompt tokens.
    pub prefill: PhaseOutcome,
    /// Generated tokens.
    pub decode: PhaseOutcome,
    /// Layers with experts, ascending; both phases.
    pub layers: Vec<LayerOutcome>,
    pub prefetch: PrefetchOutcome,
    /// Low versions that were replaced by high ones in the background.
    pub upgrades: u64,
    pub bytes_read: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PhaseOutcome {
    pub tokens: u64,
    /// Needed experts whose version was there: one per distinct expert, layer and batch.
    pub hits: u64,
    pub misses: PrecisionCounts,
    /// Uses of other experts than the router's.
    pub rerouted: RerouteCounts,
    /// Bytes of all reads of any class submitted during the phase.
    pub bytes: u64,
    /// HOBBIT's penalty: 1 per miss loaded high, B_l / B_h per miss loaded low.
    pub penalty: f64,
    /// Virtual seconds in which computation waited for reads.
    pub stall_seconds: f64,
    pub seconds: f64,
}

/// Outcomes of needed experts, as shares of all of them; for single tokens, of all uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Shares {
    /// Resident, and chosen by the router.
    pub hit: f64,
    /// Used in place of a missing expert.
    pub reranked: f64,
    /// Missing, and read in low precision.
    pub low: f64,
    /// Missing, and left out.
    pub dropped: f64,
    /// Missing, and read.
    pub loaded: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerOutcome {
    /// Block number.
    pub layer: u16,
    /// Slots for high versions.
    pub slots: u32,
    /// Needed experts that were resident.
    pub hits: u64,
    /// Needed experts that were not resident.
    pub misses: u64,
    /// HOBBIT's penalty, summed over misses.
    pub penalty: f64,
    pub stall_seconds: f64,
}

/// Versions that prefetches gave slots to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrefetchOutcome {
    /// Prefetches started.
    pub issued: u64,
    /// Used at least once before eviction.
    pub useful: u64,
    /// Read but never used: evicted unused, or unused at the end.
    pub wasted: u64,
    /// Withdrawn before they were read, because the router disagreed.
    pub dropped: u64,
}

impl Outcome {
    /// Both phases together.
    pub fn total(&self) -> PhaseOutcome {
        self.prefill + self.decode
    }

    pub(super) fn phase_mut(&mut self, phase: Phase) -> &mut PhaseOutcome {
        match phase {
            Phase::Prompt => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        }
    }
}

crate::stats::field_by_field!(PhaseOutcome: Add::add {
    tokens, hits, misses, rerouted, bytes, penalty, stall_seconds, seconds
});

impl PhaseOutcome {
    /// Needed experts that were not resident.
    pub fn n_misses(&self) -> u64 {
        self.misses.total()
    }

    /// Share of needed experts that were resident; `None` when none was needed.
    pub fn hit_rate(&self) -> Option<f64> {
        let needed = self.hits + self.n_misses();
        (needed > 0).then(|| self.hits as f64 / needed as f64)
    }

    /// Outcomes of the needed experts; `None` when none was needed.
    pub fn shares(&self) -> Option<Shares> {
        let needed = self.hits + self.n_misses();
        let share = |part: u64| part as f64 / needed as f64;
        // A rerouted use may go to an expert that is still being read, which is not a hit.
        let reranked = self.rerouted.uses.min(needed);
        (needed > 0).then(|| Shares {
            hit: share(self.hits.saturating_sub(reranked)),
            reranked: share(reranked),
            low: share(self.misses.low),
            dropped: share(self.misses.skipped),
            loaded: share(self.misses.high),
        })
    }

    /// Tokens per virtual second; `None` if no time passed.
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.tokens > 0 && self.seconds > 0.0).then(|| self.tokens as f64 / self.seconds)
    }
}

/// HOBBIT's penalty of a miss.
fn penalty(used: Option<Precision>, low_cost: f64) -> f64 {
    match used {
        Some(Precision::High) => 1.0,
        Some(Precision::Low) => low_cost,
        None => 0.0,
    }
}

/// Called for every needed expert: the expert, the precision used, whether it was a hit.
pub(super) type Observe<'a> = &'a mut dyn FnMut(ExpertId, Option<Precision>, bool);

/// Counters of a replay.
pub(super) struct Tally<'a> {
    pub(super) outcome: Outcome,
    /// Phase of the running batch.
    pub(super) phase: Phase,
    /// Prefetched versions that are resident and not used yet.
    guessed: BTreeSet<Version>,
    low_cost: f64,
    observe: Observe<'a>,
}

impl<'a> Tally<'a> {
    pub(super) fn new(outcome: Outcome, low_cost: f64, observe: Observe<'a>) -> Self {
        Self { outcome, phase: Phase::Prompt, guessed: BTreeSet::new(), low_cost, observe }
    }

    /// The layer's products waited this many seconds.
    pub(super) fn stalled(&mut self, layer: u16, seconds: f64) {
        if let Some(of_layer) = self.layer(layer) {
            of_layer.stall_seconds += seconds;
        }
        self.outcome.phase_mut(self.phase).stall_seconds += seconds;
    }

    pub(super) fn end(&mut self) -> Outcome {
        self.outcome.prefetch.wasted += self.guessed.len() as u64;
        std::mem::take(&mut self.outcome)
    }

    fn layer(&mut self, layer: u16) -> Option<&mut LayerOutcome> {
        let layers = &mut self.outcome.layers;
        layers.binary_search_by_key(&layer, |outcome| outcome.layer).ok().map(|at| &mut layers[at])
    }

    fn count(&mut self, layer: u16, used: Option<Precision>, hit: bool) {
        let penalty = if hit { 0.0 } else { penalty(used, self.low_cost) };
        if let Some(of_layer) = self.layer(layer) {
            of_layer.hits += u64::from(hit);
            of_layer.misses += u64::from(!hit);
            of_layer.penalty += penalty;
        }
        let phase = self.outcome.phase_mut(self.phase);
        phase.hits += u64::from(hit);
        phase.penalty += penalty;
        if !hit {
            phase.misses.count(used, 1);
        }
    }
}

impl Observer for Tally<'_> {
    fn needed(&mut self, needed: &NeededExpert) {
        let precision = needed.version.map(|version| version.precision);
        (self.observe)(needed.expert, precision, needed.hit);
        self.count(needed.expert.layer, precision, needed.hit);
        if needed.version.is_some_and(|version| self.guessed.remove(&version)) {
            self.outcome.prefetch.useful += 1;
        }
    }

    fn loading(&mut self, version: Version, class: LoadClass, _bytes: u64, _whole: u64) {
        if class == LoadClass::Prefetch {
            self.guessed.insert(version);
            self.outcome.prefetch.issued += 1;
        }
    }

    fn withdrawn(&mut self, version: Version, _bytes: u64) {
        if self.guessed.remove(&version) {
            self.outcome.prefetch.dropped += 1;
        }
    }

    /// Counts a prefetched version that was evicted unused.
    fn evicted(&mut self, version: Version) {
        if self.guessed.remove(&version) {
            self.outcome.prefetch.wasted += 1;
        }
    }
}
