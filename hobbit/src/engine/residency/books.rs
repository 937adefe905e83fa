//! What is chosen of an expert, and the books on it: counters, statistics, the trace.

use std::collections::BTreeMap;

use super::*;
use crate::predict::Predictor;
use crate::trace::ReadClass;

impl Residency {
    /// Counters since the model was opened.
    pub(in super::super) fn counters(&self) -> Counters {
        self.counters
    }

    /// Seconds with at least one read in flight since the model was opened.
    pub(in super::super) fn busy_seconds(&self) -> f64 {
        self.loader.stats().busy.as_secs_f64()
    }

    /// Counters of each MoE layer, ascending.
    pub(in super::super) fn layer_stats(&self) -> Vec<LayerStats> {
        let layers = self.layers.iter().zip(0u16..);
        layers
            .filter_map(|(layer, number)| {
                let layer = layer.as_ref()?;
                let slots = self.cache.capacity_of_layer(number, Precision::High);
                Some(LayerStats { layer: number, slots, hits: layer.hits, misses: layer.misses })
            })
            .collect()
    }

    /// An expert product of this tensor reached the expert backend.
    pub(in super::super) fn mark_seen(&mut self, layer: u16, kind: SliceKind) {
        if let Some(layer) = self.layers[usize::from(layer)].as_mut() {
            layer.seen[kind.index()] = true;
        }
    }

    /// Names of expert tensors whose products never reached the expert backend.
    pub(in super::super) fn unseen(&self) -> Vec<String> {
        let layers = self.layers.iter().flatten();
        layers
            .flat_map(|layer| layer.names.iter().filter(|(kind, _)| !layer.seen[kind.index()]))
            .map(|(_, name)| name.clone())
            .collect()
    }

    /// Notes which layer is computed, and what its router chose if somebody wants a trace. As [`Recorder::begin_layer`].
    pub(in super::super) fn record(&mut self, layer: u16, routing: &Routing, weights: &[f32], scores: Option<&[f32]>) {
        self.counters.layer = layer;
        let waited = self.counters.wait_seconds;
        self.recorder.iter_mut().for_each(|recorder| recorder.begin_layer(layer, routing, weights, scores, waited));
    }

    pub(super) fn end_record(&mut self) {
        let waited = self.counters.wait_seconds;
        self.recorder.iter_mut().for_each(|recorder| recorder.end_layer(waited));
    }

    /// A batch was evaluated in so many seconds, for the trace. As [`Residency::next_token`].
    pub(in super::super) fn end_batch(&mut self, n_tokens: u32, seconds: f64) {
        let loader = &self.loader;
        self.recorder.iter_mut().for_each(|recorder| recorder.end_batch(n_tokens, seconds, || loader.stats()));
        self.counters.layer = 0;
        self.foresight_end_batch(n_tokens, seconds);
        self.next_token();
        if n_tokens == 1 {
            self.fill_between_tokens();
        }
    }

    /// The next token begins, for the policy.
    pub(super) fn next_token(&mut self) {
        self.cache.next_token();
        self.tiers.iter_mut().flatten().for_each(Tier::next_token);
        self.may_upgrade = true;
        if self.precisions.options.deterministic {
            self.upgrade_in_step();
        }
    }

    /// A new sequence begins, for the policy.
    pub(in super::super) fn begin_sequence(&mut self) {
        self.cache.begin_sequence();
        self.recorder.iter_mut().for_each(Recorder::begin_sequence);
        self.foresight_begin_sequence();
        self.tiers.iter_mut().flatten().for_each(Tier::begin_sequence);
    }

    /// The precision in which a needed expert is used, and the books on it. `None`: not at all.
    pub(super) fn choose(
        &mut self,
        expert: ExpertId,
        demand: Demand,
        n_uses: u64,
        weight: f32,
        elsewhere: &dyn Fn(Version) -> bool,
    ) -> Option<Precision> {
        let [high, low] = [Version::high(expert), Version::low(expert)];
        let has_low = self.catalog.source(low).is_some() && !self.precisions.is_exact();
        let high_slot = self.cache.lookup(high);
        // A high version that arrives in the background does not count before it is complete.
        let underway = self.upgrades.iter().any(|upgrade| upgrade.version == high);
        let high_elsewhere = elsewhere(high);
        let resident = Resident {
            high: high_elsewhere || high_slot.is_some() && !underway,
            low: has_low && (elsewhere(low) || self.cache.lookup(low).is_some()),
        };
        let choice = match self.precisions.is_forced_low(expert) && has_low {
            true => Choice::Low,
            false => resolve(demand, resident, has_low),
        };
        let precision = match choice {
            Choice::High => Some(Precision::High),
            Choice::Low => Some(Precision::Low),
            Choice::Skip => None,
        };
        let version = precision.map(|precision| Version { expert, precision });
        let is_elsewhere = version.is_some_and(elsewhere);
        let slot = version.and_then(|version| self.cache.lookup(version));
        let hit = is_elsewhere || slot.is_some_and(|slot| self.cache.is_ready(slot));
        // What the device has is not used here: it may age.
        if !is_elsewhere {
            self.cache.touch(expert, Use { hit, precision, weight });
        }
        self.counters.used.count(precision, n_uses);
        if !high_elsewhere && high_slot.is_none_or(|slot| !self.cache.is_ready(slot)) {
            self.counters.missed.count(precision, 1);
        }
        self.count(expert.layer, hit);
        if self.recorder.is_some() {
            let bytes = version.and_then(|version| self.version_bytes(version)).unwrap_or(0);
            let is_there = is_elsewhere || slot.is_some() || version.is_some_and(|version| self.is_staged(version));
            let needed = (expert.index, demand);
            self.recorder.iter_mut().for_each(|recorder| recorder.needed(needed, version, hit, is_there, bytes));
        }
        precision
    }

    /// Whether some of a version without a slot has been read into staging, or is on its way there.
    fn is_staged(&self, version: Version) -> bool {
        self.kinds(version.expert.layer).iter().any(|&kind| self.staging.get(SliceId { version, kind }).is_some())
    }

    /// What the cache begins with, for the trace.
    pub(in super::super) fn record_residents(&mut self) {
        if self.recorder.is_some() && self.description.warm_start.is_some() {
            let saved = self.cache.save("");
            self.recorder.iter_mut().for_each(|recorder| recorder.residents(saved.clone()));
        }
    }

    /// Reads that no product waits for were submitted, for the trace: versions and bytes, parts of a version apart.
    pub(super) fn record_loads(&mut self, class: LoadClass, parts: &[(Version, u64)]) {
        let class = if class == LoadClass::Upgrade { ReadClass::Upgrade } else { ReadClass::Prefetch };
        let mut whole: BTreeMap<Version, u64> = BTreeMap::new();
        parts.iter().for_each(|(version, bytes)| *whole.entry(*version).or_default() += bytes);
        for (version, bytes) in whole {
            let all = self.version_bytes(version).unwrap_or(bytes);
            self.recorder.iter_mut().for_each(|recorder| recorder.load(version, class, bytes, all));
        }
    }

    /// Predictions that need no scores, for the trace: of every layer in reach, not only of those that were looked at.
    pub(super) fn record_predictions(&mut self, predictor: &mut dyn Predictor, layer: u16, distance_max: u8) {
        let Some(recorder) = self.recorder.as_mut().filter(|_| !predictor.needs_scores()) else { return };
        let mut predicted = Vec::new();
        (1..=distance_max).for_each(|distance| predictor.predict(layer, distance, &mut predicted));
        recorder.predicted(&predicted);
    }

    pub(super) fn count(&mut self, layer: u16, hit: bool) {
        let layer = self.layers[usize::from(layer)].as_mut().expect("only MoE layers have expert products");
        let (counter, total) = match hit {
            true => (&mut layer.hits, &mut self.counters.hits),
            false => (&mut layer.misses, &mut self.counters.misses),
        };
        *counter += 1;
        *total += 1;
    }
}
