//! What a replay measured, and who counts it while it happens.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::expert::{ExpertId, Precision, Version};
use crate::load::LoadClass;
use crate::residency::{NeededExpert, Observer};
use crate::stats::{PrecisionCounts, RerouteCounts};
use crate::trace::Phase;

/// What a replay measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Batches of prompt tokens.
    pub prefill: PhaseOutcome,
    /// Generated tokens.
    pub decode: PhaseOutcome,
    /// Layers with experts, ascending; both phases.
    pub layers: Vec<LayerOutcome>,
    /// Guesses.
    pub prefetch: PrefetchOutcome,
    /// Low versions that were replaced by high ones in the background.
    pub upgrades: u64,
    /// Bytes of all reads, whoever asked.
    pub bytes_read: u64,
}

/// One phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PhaseOutcome {
    /// Tokens.
    pub tokens: u64,
    /// Needed experts whose version was there: one per distinct expert, layer and batch.
    pub hits: u64,
    /// The others, by what was done.
    pub misses: PrecisionCounts,
    /// Uses that went elsewhere than the router said.
    pub rerouted: RerouteCounts,
    /// Bytes of all reads that were submitted meanwhile, whoever asked.
    pub bytes: u64,
    /// HOBBIT's: 1 per miss that was loaded high, B_l / B_h per miss that was loaded low.
    pub penalty: f64,
    /// Virtual seconds in which computation waited for reads.
    pub stall_seconds: f64,
    /// Virtual seconds.
    pub seconds: f64,
}

/// What became of needed experts, as shares of all of them: of single tokens these are the uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Shares {
    /// In memory, as the router chose.
    pub hit: f64,
    /// In the place of one that was missing.
    pub reranked: f64,
    /// Missing, and read in low precision.
    pub low: f64,
    /// Missing, and left out.
    pub dropped: f64,
    /// Missing, and read.
    pub loaded: f64,
}

/// One layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerOutcome {
    /// Block number.
    pub layer: u16,
    /// Slots for high versions.
    pub slots: u32,
    /// As in [`PhaseOutcome::hits`].
    pub hits: u64,
    /// Needed experts that were not there.
    pub misses: u64,
    /// As in [`PhaseOutcome::penalty`].
    pub penalty: f64,
    /// Virtual seconds.
    pub stall_seconds: f64,
}

/// Versions that were given slots on a guess.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrefetchOutcome {
    /// Asked for.
    pub issued: u64,
    /// Used at least once before they left.
    pub useful: u64,
    /// Read, and never used: evicted before, or still there at the end.
    pub wasted: u64,
    /// Taken back before they were read: the router had disagreed.
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

crate::stats::field_by_field!(PhaseOutcome: Add::add { tokens, hits, misses, rerouted, bytes, penalty, stall_seconds, seconds });

impl PhaseOutcome {
    /// Needed experts that were not there.
    pub fn n_misses(&self) -> u64 {
        self.misses.total()
    }

    /// Share of needed experts that were there; `None` when none was needed.
    pub fn hit_rate(&self) -> Option<f64> {
        let needed = self.hits + self.n_misses();
        (needed > 0).then(|| self.hits as f64 / needed as f64)
    }

    /// What became of the needed experts; `None` when none was needed.
    pub fn shares(&self) -> Option<Shares> {
        let needed = self.hits + self.n_misses();
        let share = |part: u64| part as f64 / needed as f64;
        // Who is on its way may be gone to, and is no hit.
        let reranked = self.rerouted.uses.min(needed);
        (needed > 0).then(|| Shares {
            hit: share(self.hits.saturating_sub(reranked)),
            reranked: share(reranked),
            low: share(self.misses.low),
            dropped: share(self.misses.skipped),
            loaded: share(self.misses.high),
        })
    }

    /// `None` when nothing took time.
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.tokens > 0 && self.seconds > 0.0).then(|| self.tokens as f64 / self.seconds)
    }
}

/// HOBBIT's cost of a miss.
fn penalty(used: Option<Precision>, low_cost: f64) -> f64 {
    match used {
        Some(Precision::High) => 1.0,
        Some(Precision::Low) => low_cost,
        None => 0.0,
    }
}

/// Is told of every needed expert: which, the precision used, hit.
pub(super) type Observe<'a> = &'a mut dyn FnMut(ExpertId, Option<Precision>, bool);

/// Counts what happens.
pub(super) struct Books<'a> {
    pub(super) outcome: Outcome,
    /// Of the running batch.
    pub(super) phase: Phase,
    /// Resident on a guess, and not used yet.
    guessed: BTreeSet<Version>,
    low_cost: f64,
    observe: Observe<'a>,
}

impl<'a> Books<'a> {
    pub(super) fn new(outcome: Outcome, low_cost: f64, observe: Observe<'a>) -> Self {
        Self { outcome, phase: Phase::Prompt, guessed: BTreeSet::new(), low_cost, observe }
    }

    /// Products of a layer stood still for so many seconds.
    pub(super) fn stalled(&mut self, layer: u16, seconds: f64) {
        if let Some(own) = self.layer(layer) {
            own.stall_seconds += seconds;
        }
        self.outcome.phase_mut(self.phase).stall_seconds += seconds;
    }

    /// The recording is over.
    pub(super) fn end(&mut self) -> Outcome {
        self.outcome.prefetch.wasted += self.guessed.len() as u64;
        std::mem::take(&mut self.outcome)
    }

    fn layer(&mut self, layer: u16) -> Option<&mut LayerOutcome> {
        let layers = &mut self.outcome.layers;
        layers.binary_search_by_key(&layer, |own| own.layer).ok().map(|at| &mut layers[at])
    }

    fn count(&mut self, layer: u16, used: Option<Precision>, hit: bool) {
        let penalty = if hit { 0.0 } else { penalty(used, self.low_cost) };
        if let Some(own) = self.layer(layer) {
            own.hits += u64::from(hit);
            own.misses += u64::from(!hit);
            own.penalty += penalty;
        }
        let phase = self.outcome.phase_mut(self.phase);
        phase.hits += u64::from(hit);
        phase.penalty += penalty;
        if !hit {
            phase.misses.count(used, 1);
        }
    }
}

impl Observer for Books<'_> {
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

    /// A guess that was evicted unused.
    fn evicted(&mut self, version: Version) {
        if self.guessed.remove(&version) {
            self.outcome.prefetch.wasted += 1;
        }
    }
}
