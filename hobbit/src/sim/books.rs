//! What a replay's outcome is made of, while it happens.

use std::collections::BTreeSet;

use super::outcome::{LayerOutcome, Outcome, penalty};
use crate::expert::{ExpertId, Precision, Version};
use crate::load::LoadClass;
use crate::residency::{NeededExpert, Observer};
use crate::trace::Phase;

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
        Self { outcome, phase: Phase::Prefill, guessed: BTreeSet::new(), low_cost, observe }
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
