//! One layer of a batch, in the order of `engine::residency`.

use super::config::{Compute, Config};
use super::recall::has_router_scores;
use super::recording::{Batch, Recording};
use super::replay::{Replay, Target, WHOLE};
use crate::cache::{Cache, SlotId, Use};
use crate::expert::{ExpertId, Precision, Version};
use crate::load::LoadClass;
use crate::load::prefetch::{Holdings, Link as PlannedLink};
use crate::options::PrecisionMode;
use crate::predict::Predictor;
use crate::route::{Choice, Demand, Resident, lower_least_popular, merge, resolve};
use crate::trace::{Header, LayerRecord};

/// The distinct experts of a layer in the order in which the engine asks for them: as recorded; else the router's order for a
/// single token, falling popularity for a batch.
pub(super) fn need_order(record: &LayerRecord, order: &mut Vec<u16>) {
    order.clear();
    if !record.needed.is_empty() || record.n_tokens == 1 {
        match record.needed.is_empty() {
            true => order.extend_from_slice(&record.chosen),
            false => order.extend(record.needed.iter().map(|needed| needed.expert)),
        }
        // Nobody promises that a file names each once.
        let mut n = 0;
        for i in 0..order.len() {
            if !order[..n].contains(&order[i]) {
                order[n] = order[i];
                n += 1;
            }
        }
        order.truncate(n);
        return;
    }
    order.extend_from_slice(&record.chosen);
    order.sort_unstable();
    order.dedup();
    let uses = uses(record);
    order.sort_by_key(|index| std::cmp::Reverse(uses[usize::from(*index)]));
}

/// How often a batch uses each expert, by index.
fn uses(record: &LayerRecord) -> Vec<u32> {
    let mut uses = vec![0; record.chosen.iter().max().map_or(0, |most| usize::from(*most) + 1)];
    record.chosen.iter().for_each(|&index| uses[usize::from(index)] += 1);
    uses
}

/// The router weight of each expert, summed over the batch's tokens in their order, by index.
fn summed_weights(record: &LayerRecord) -> Vec<f32> {
    let mut weights = vec![0.0f32; record.chosen.iter().max().map_or(0, |most| usize::from(*most) + 1)];
    for (&index, &weight) in record.chosen.iter().zip(&record.weights) {
        weights[usize::from(index)] += weight;
    }
    weights
}

/// What the batch asks for, by expert index (`engine::precision`).
pub(super) fn demands(recording: &Recording, config: &Config, record: &LayerRecord, order: &[u16]) -> Vec<Demand> {
    let n_expert = recording.header.layer(record.layer).map_or(0, |layer| usize::from(layer.n_expert));
    if config.mode == PrecisionMode::Exact {
        return vec![Demand::High; n_expert];
    }
    let mut demands = vec![Demand::Skip; n_expert];
    if config.asks_as_recorded(recording) && !record.needed.is_empty() {
        // Weights in half precision might fall on the other side of a threshold.
        record.needed.iter().for_each(|needed| demands[usize::from(needed.expert)] = needed.demand);
        return demands;
    }
    let n_used = usize::from(record.n_used).max(1);
    let (mut of_token, mut asked) = (Vec::new(), Vec::with_capacity(record.chosen.len()));
    for (ids, weights) in record.chosen.chunks(n_used).zip(record.weights.chunks(n_used)) {
        config.thresholds.demands(weights, &mut of_token);
        asked.extend(ids.iter().copied().zip(of_token.iter().copied()));
    }
    merge(asked, &mut demands);
    if record.n_tokens > 1 && config.thresholds.t1 < 1.0 {
        lower_least_popular(order, config.prefill_low, &mut demands);
    }
    demands
}

/// An expert in use by the running layer.
struct Used {
    version: Version,
    slot: Option<SlotId>,
}

impl Replay<'_> {
    pub(super) fn layer(
        &mut self,
        batch: &Batch,
        record: &LayerRecord,
        observe: &mut dyn FnMut(ExpertId, Option<Precision>, bool),
    ) {
        let layer = record.layer;
        let layer_seconds = match self.config.compute {
            Compute::Recorded => batch.other_seconds_per_layer(),
            Compute::Given { layer_seconds, .. } => layer_seconds,
        };
        self.pass(self.now + layer_seconds);
        if !self.config.deterministic {
            self.settle_upgrades();
        }
        self.show_scores(record);
        let mut order = Vec::new();
        need_order(record, &mut order);
        let demands = demands(self.recording, self.config, record, &order);
        let weights = summed_weights(record);
        let mut used = Vec::with_capacity(order.len());
        for &index in &order {
            let expert = ExpertId { layer, index };
            let weight = weights.get(usize::from(index)).copied().unwrap_or(0.0);
            let (precision, hit) = self.choose(expert, demands[usize::from(index)], weight);
            observe(expert, precision, hit);
            self.count(batch.phase, layer, precision, hit);
            let Some(precision) = precision else { continue };
            let version = Version { expert, precision };
            if self.guessed.remove(&version) {
                self.outcome.prefetch.useful += 1;
            }
            let slot = self.cache.lookup(version);
            if let Some(slot) = slot {
                self.cache.pin(slot);
            }
            used.push(Used { version, slot });
        }
        self.hurry(&used);
        self.drop_obsolete(layer);
        self.load_missing(&mut used);
        if record.n_tokens > 1 && order.len() * 10 >= demands.len() * 9 {
            self.look_ahead(layer);
        }
        self.predict(record, layer_seconds, &used);
        self.multiply(batch, record, &used);
        used.iter().filter_map(|used| used.slot).for_each(|slot| self.cache.unpin(slot));
        self.staged.clear();
        if !self.config.deterministic {
            self.settle_upgrades();
            if record.n_tokens == 1 {
                self.upgrade_if_idle();
            }
        }
    }

    /// Router scores for the policy, token by token, where they were recorded.
    fn show_scores(&mut self, record: &LayerRecord) {
        if record.scores.is_empty() {
            return;
        }
        let n_expert = self.recording.header.layer(record.layer).map_or(0, |layer| usize::from(layer.n_expert));
        let mut scores = std::mem::take(&mut self.scores);
        for token in 0..record.n_tokens as usize {
            if record.scores_of(token, n_expert, &mut scores) {
                self.cache.scores(record.layer, &scores);
            }
        }
        self.scores = scores;
    }

    fn choose(&mut self, expert: ExpertId, demand: Demand, weight: f32) -> (Option<Precision>, bool) {
        let [high, low] = [Version::high(expert), Version::low(expert)];
        let has_low = self.has_low(expert.layer);
        let resident = Resident {
            high: self.cache.lookup(high).is_some() && !self.upgrades.is_underway(high),
            low: has_low && self.cache.lookup(low).is_some(),
        };
        let precision = match resolve(demand, resident, has_low) {
            Choice::High => Some(Precision::High),
            Choice::Low => Some(Precision::Low),
            Choice::Skip => None,
        };
        let slot = precision.and_then(|precision| self.cache.lookup(Version { expert, precision }));
        let hit = slot.is_some_and(|slot| self.cache.is_ready(slot));
        self.cache.touch(expert, Use { hit, precision, weight });
        (precision, hit)
    }

    /// What was to be read sometime is needed now.
    fn hurry(&mut self, used: &[Used]) {
        let is_needed = |version: Version| used.iter().any(|used| used.version == version);
        for slot in self.upgrades.take_over(is_needed) {
            self.cache.unpin(slot);
        }
        self.link.promote(|target| is_needed(target.version()), LoadClass::OnDemandHigh);
    }

    /// Takes back guesses about the running layer that the router did not confirm and that have not started.
    fn drop_obsolete(&mut self, layer: u16) {
        let obsolete = |target: &Target| target.version().expert.layer == layer;
        let [mut withdrawn, guesses] =
            [LoadClass::ReadAhead, LoadClass::Prefetch].map(|class| self.link.withdraw(class, obsolete));
        withdrawn.extend(guesses);
        for target in withdrawn {
            let version = target.version();
            self.planner.dropped(version);
            if let Target::Slot(slot, _) = target {
                self.cache.set_failed(slot, WHOLE);
                self.cache.release(version);
            }
            self.outcome.bytes_read -= self.bytes(version);
            if self.guessed.remove(&version) {
                self.outcome.prefetch.dropped += 1;
            }
        }
    }

    fn load_missing(&mut self, used: &mut [Used]) {
        let mut reads = Vec::new();
        let mut overflow = Vec::new();
        for used in used.iter_mut().filter(|used| used.slot.is_none()) {
            used.slot = self.acquire(used.version);
            match used.slot {
                Some(slot) => {
                    self.cache.pin(slot);
                    reads.push(Target::Slot(slot, used.version));
                }
                None => overflow.push(Target::Staging(used.version)),
            }
        }
        for target in reads.into_iter().chain(overflow) {
            let class = match target.version().precision {
                Precision::High => LoadClass::OnDemandHigh,
                Precision::Low => LoadClass::OnDemandLow,
            };
            self.submit(class, target);
        }
    }

    pub(super) fn submit(&mut self, class: LoadClass, target: Target) {
        let bytes = self.bytes(target.version());
        self.outcome.bytes_read += bytes;
        self.link.submit(class, target, bytes);
    }

    /// A dense batch fills what is free of the next layer's slots.
    fn look_ahead(&mut self, layer: u16) {
        let layers = &self.recording.header.model.layers;
        let Some(next) = layers.iter().find(|own| own.layer > layer).copied() else { return };
        let is_exact = self.config.mode == PrecisionMode::Exact;
        if !is_exact && (self.config.thresholds.t1 <= 0.0 || self.config.deterministic) {
            return;
        }
        let at_most = match is_exact || self.config.thresholds.t1 >= 1.0 {
            true => usize::from(next.n_expert),
            false => ((1.0 - self.config.prefill_low) * f32::from(next.n_expert)).ceil() as usize,
        };
        let experts = (0..next.n_expert).map(|index| ExpertId { layer: next.layer, index });
        let missing: Vec<Version> = experts
            .filter(|&expert| self.cache.lookup(Version::high(expert)).is_none())
            .filter(|&expert| is_exact || self.cache.lookup(Version::low(expert)).is_none())
            .map(Version::high)
            .take(at_most)
            .collect();
        for version in missing {
            if !self.cache.has_empty_slot(version) {
                return;
            }
            if let Some(slot) = self.acquire(version) {
                self.submit(LoadClass::ReadAhead, Target::Slot(slot, version));
            }
        }
    }

    /// Shows a single token to the predictor, and loads what it expects, as the engine does.
    fn predict(&mut self, record: &LayerRecord, layer_seconds: f64, used: &[Used]) {
        if record.n_tokens != 1 {
            return;
        }
        let chosen = chosen(record);
        show(self.predictor.as_mut(), record, &chosen, &self.recording.header, &mut self.scores);
        let Some(prefetch) = self.config.prefetch else { return };
        let versions: Vec<Version> = used.iter().map(|used| used.version).collect();
        let bytes: u64 = versions.iter().map(|version| self.bytes(*version)).sum();
        let missing = self.link.bytes_of(|class| !class.is_background());
        let n_hits = used.iter().filter(|used| used.slot.is_some_and(|slot| self.cache.is_ready(slot))).count();
        let experts = self.expert_seconds(record, usize::from(record.n_used)) * f64::from(record.n_used);
        let planner = &mut self.planner;
        planner.estimates.observe_layer(layer_seconds + experts);
        planner.estimates.observe_uses(n_hits as u64, used.len() as u64);
        planner.settle(record.layer, &chosen, &versions, missing > 0);
        let held = Held {
            cache: &self.cache,
            header: &self.recording.header,
            has_low: self.has_low(record.layer),
            n_used: record.n_used,
        };
        let ahead = self.planner.look_ahead(self.predictor.as_mut(), record.layer, prefetch.distance_max, &held);
        let likely = self.planner.likely(&ahead, &held);
        let there = 1.0 - missing as f64 / bytes.max(missing).max(1) as f64;
        let elapsed = there * self.planner.estimates.layer_seconds().unwrap_or(0.0);
        let link = PlannedLink {
            is_busy: false,
            queued_bytes: self.link.bytes_of(LoadClass::is_background),
            elapsed_seconds: self.config.link.transfer_seconds(missing).min(elapsed),
        };
        let loads = self.planner.plan(&ahead, link, &held);
        self.cache.unshield_all();
        if prefetch.shield {
            let both = |expert| [Version::high(expert), Version::low(expert)];
            self.cache.shield(likely.into_iter().flat_map(both));
        }
        for version in loads.into_iter().map(|load| load.version) {
            match self.acquire(version) {
                Some(slot) => {
                    self.guessed.insert(version);
                    self.outcome.prefetch.issued += 1;
                    self.submit(LoadClass::Prefetch, Target::Slot(slot, version));
                }
                None => self.planner.failed(version),
            }
        }
    }

    /// Seconds of one of `n_multiplied` experts' products.
    fn expert_seconds(&self, record: &LayerRecord, n_multiplied: usize) -> f64 {
        match self.config.compute {
            Compute::Given { expert_seconds, .. } => expert_seconds,
            Compute::Recorded => {
                let recorded = record.needed.iter().filter(|needed| needed.used.is_some()).count();
                let n = if recorded > 0 { recorded } else { n_multiplied };
                f64::from(record.compute_seconds) / n.max(1) as f64
            }
        }
    }

    /// Products of what is there run first, then each as it lands.
    fn multiply(&mut self, batch: &Batch, record: &LayerRecord, used: &[Used]) {
        let seconds = self.expert_seconds(record, used.len());
        let mut stalled = 0.0;
        let mut left: Vec<&Used> = used.iter().collect();
        while !left.is_empty() {
            self.pass(self.now);
            let is_there = |used: &&Used| match used.slot {
                Some(slot) => self.cache.is_ready(slot),
                None => self.staged.contains(&used.version),
            };
            if let Some(at) = left.iter().position(is_there) {
                left.remove(at);
                self.pass(self.now + seconds);
            } else if let Some(lands_at) = self.link.next_landing() {
                stalled += lands_at - self.now;
                self.pass(lands_at);
            } else {
                debug_assert!(false, "every version in use is there or on its way");
                break;
            }
        }
        if let Some(own) = self.layer_outcome(record.layer) {
            own.stall_seconds += stalled;
        }
        self.outcome.phase_mut(batch.phase).stall_seconds += stalled;
    }
}

/// What the planner may know.
struct Held<'a> {
    cache: &'a Cache,
    header: &'a Header,
    has_low: bool,
    n_used: u16,
}

impl Holdings for Held<'_> {
    fn is_resident(&self, version: Version) -> bool {
        self.cache.lookup(version).is_some()
    }

    fn bytes(&self, version: Version) -> Option<u64> {
        let layer = self.header.layer(version.expert.layer)?;
        match version.precision {
            Precision::High => Some(layer.bytes_high),
            Precision::Low => self.has_low.then_some(layer.bytes_low),
        }
    }

    fn n_used(&self, _layer: u16) -> usize {
        self.n_used.into()
    }
}

/// What the router chose for a single token, best first; weights sum to 1.
pub(super) fn chosen(record: &LayerRecord) -> Vec<(u16, f32)> {
    let mut chosen: Vec<(u16, f32)> = record.token(0).collect();
    let total: f32 = chosen.iter().map(|(_, weight)| weight.abs()).sum();
    if total > 0.0 {
        chosen.iter_mut().for_each(|(_, weight)| *weight = weight.abs() / total);
    }
    chosen.sort_by(|a, b| b.1.total_cmp(&a.1));
    chosen
}

/// Tells a predictor what a single token's layer did, and the scores of later layers that were recorded.
pub(super) fn show(
    predictor: &mut dyn Predictor,
    record: &LayerRecord,
    chosen: &[(u16, f32)],
    header: &Header,
    scores: &mut Vec<f32>,
) {
    predictor.observe(record.layer, chosen);
    if !predictor.needs_scores() || !has_router_scores(header) {
        return;
    }
    let layers = &header.model.layers;
    let Some(at) = layers.iter().position(|own| own.layer == record.layer) else { return };
    let mut distances: Vec<u8> = record.predictions.iter().map(|prediction| prediction.distance).collect();
    distances.sort_unstable();
    distances.dedup();
    for distance in distances {
        let Some(target) = layers.get(at + usize::from(distance)) else { continue };
        scores.clear();
        scores.resize(usize::from(target.n_expert), 0.0);
        for prediction in record.predictions.iter().filter(|prediction| prediction.distance == distance) {
            if let Some(place) = scores.get_mut(usize::from(prediction.expert)) {
                *place = prediction.score;
            }
        }
        predictor.scores(record.layer, distance, scores);
    }
}
