//! Replays a whole recording.

use std::convert::Infallible;

use super::SimError;
use super::budget::{LayerSlots, WHOLE, pools, slots_of_host};
use super::config::{Compute, Config, Eviction, PredictedBy, Prefetch};
use super::device::DeviceSlots;
use super::link::Link;
use super::outcome::{LayerOutcome, Observe, Outcome, Tally};
use super::recall::{oracle, predict_shape};
use super::recording::{Batch, Event, Recording, chosen, need_order, scores_at, summed_weights};
use crate::cache::policy::{self, Belady, Hobbit, Policy, Shape, Upcoming};
use crate::cache::{Cache, SavedCache};
use crate::expert::{ExpertId, Precision, SliceId, SliceKind, Version};
use crate::load::prefetch::{Estimates, Governor, PrefetchOptions, PrefetchRule, Prefetcher};
use crate::options::{PrecisionMode, VirtualExperts};
use crate::predict::RouterScores;
use crate::predict::{self, Predictor, PredictorKind};
use crate::residency::{
    self, DeviceResidency, Later, LayerShape, LayerStep, Layout, LookaheadOptions, Parts, Place, Precisions, Reads,
    Residency, RestBytes, Router, ScoresByLayer, Selection, Split, StagingOptions, TokenChoices, Used, VersionBytes,
    VirtualExpertsOptions, WeightsFor, run_layer,
};
use crate::route::{Demand, Phase, Thresholds, Weighing};
use crate::stats::NormsSource;
use crate::trace::{Header, Layer, LayerRecord, ResidentsRecord};

type Host<'a> = Residency<Link, Tally<'a>>;

/// Replays a recording. `observe` is called for every needed expert with layer, expert, precision used, and whether it
/// was a hit.
pub fn replay(
    recording: &Recording,
    config: &Config,
    observe: &mut dyn FnMut(ExpertId, Option<Precision>, bool),
) -> Result<Outcome, SimError> {
    let mut replay = Replay::new(recording, config, observe)?;
    replay.warm_up();
    for event in &recording.events {
        match event {
            Event::Sequence => {
                replay.residency.begin_sequence();
                replay.device.iter_mut().for_each(|device| device.cache.begin_sequence());
            }
            Event::Batch(batch) => replay.batch(batch),
        }
    }
    Ok(replay.finish())
}

/// A residency driven by a recording, with a clock that computing and reading advance.
struct Replay<'a> {
    recording: &'a Recording,
    config: &'a Config,
    residency: Host<'a>,
    device: Option<DeviceSlots>,
    selection: Selection,
}

impl<'a> Replay<'a> {
    fn new(recording: &'a Recording, config: &'a Config, observe: Observe<'a>) -> Result<Self, SimError> {
        let header = &recording.header;
        let layers = &header.model.layers;
        let (high, low) = layers.iter().fold((0, 0), |(high, low), l| (high + l.bytes_high, low + l.bytes_low));
        if config.is_dynamic() && low == 0 {
            return Err(SimError::NoLow { path: recording.path.clone() });
        }
        let rerouting = config.routing.rerouting();
        if !rerouting.is_off() && !recording.has_unselected_scores() {
            return Err(SimError::NoScores { path: recording.path.clone() });
        }
        let low_cost = if low > 0 { low as f64 / high as f64 } else { 1.0 };
        let n_layers = layers.last().map_or(0, |layer| layer.layer.saturating_add(1));
        let policy = || -> Box<dyn Policy> {
            match config.eviction {
                Eviction::Policy(kind) => {
                    policy::build(kind, &config.weights, Shape { n_layers, low_cost: low_cost as f32 })
                }
                Eviction::Belady => Box::new(Belady::new(uses_to_come(recording, config), low_cost as f32)),
                Eviction::LfuOfModel => Box::new(Hobbit::lfu_of_model(n_layers)),
            }
        };
        let cache = Cache::new(pools(header, config, slots_of_host(header, config)), policy());
        let device = config.device.as_ref().map(|device| {
            let slots = device.slots.iter().map(|high| LayerSlots { high: *high, low: 0 }).collect();
            DeviceSlots::new(Cache::new(pools(header, config, slots), policy()), device)
        });
        let of_layer = |layer: &Layer| LayerOutcome {
            layer: layer.layer,
            slots: cache.pools().capacity_of_layer(layer.layer, Precision::High),
            ..LayerOutcome::default()
        };
        let outcome = Outcome { layers: layers.iter().map(of_layer).collect(), ..Outcome::default() };
        let mut residency = Residency::new(Parts {
            reads: Link::new(config.link),
            observer: Tally::new(outcome, low_cost, observe),
            layout: layout(header, config, &cache),
            cache,
            staging: StagingOptions { n_slots: None, ahead: false },
            overlaps: config.overlap,
            precisions: precisions(config),
            lookahead: config.prefetch.map(|prefetch| lookahead(recording, config, prefetch)),
        });
        residency.rerouting = rerouting;
        if config.routing.virtual_experts != VirtualExperts::Off {
            let update = config.routing.virtual_update;
            let norms = config.norms.clone();
            let norms_from = if norms.is_empty() { NormsSource::None } else { NormsSource::File };
            let n_used = layers.iter().map(|layer| usize::from(layer.n_used)).max().unwrap_or(0);
            residency.keep_virtual_experts(VirtualExpertsOptions { n_used, update, norms, norms_from });
        }
        Ok(Self { recording, config, residency, device, selection: Selection::default() })
    }

    /// Makes the recorded initial residents resident, as far as there are slots; if there are none, the most frequent
    /// of the path table. A policy of the recorded kind also loads the recorded statistics.
    fn warm_up(&mut self) {
        let ResidentsRecord { versions, statistics } = self.recording.start.clone();
        let by_paths = self.config.predictor == PredictedBy::Predictor(PredictorKind::PathTable);
        if let (true, true, Some(table)) = (by_paths, versions.is_empty(), &self.config.path_table) {
            let saved = self.residency.memory.that_fit(&table.by_frequency());
            return self.residency.memory.assume(&saved);
        }
        let saved = SavedCache { name: String::new(), residents: versions, statistics };
        if self.config.eviction.to_string() == self.recording.header.settings.policy {
            self.residency.memory.load_statistics(&saved);
        }
        self.residency.memory.assume(&saved);
    }

    fn batch(&mut self, batch: &Batch) {
        let started = self.residency.reads().seconds();
        let before = (self.residency.counters().rerouted, self.residency.reads().bytes);
        self.residency.observer_mut().phase = batch.phase;
        self.residency.begin_batch(batch.phase, batch.n_tokens);
        self.device.iter_mut().for_each(|device| device.cache.begin_batch(!batch.phase.is_decode()));
        for record in &batch.layers {
            self.layer(batch, record);
        }
        let seconds = self.residency.reads().seconds() - started;
        self.residency.end_batch(batch.phase, batch.n_tokens, seconds);
        self.device.iter_mut().for_each(|device| device.cache.end_batch(batch.n_tokens));
        let (rerouted, bytes) =
            (self.residency.counters().rerouted - before.0, self.residency.reads().bytes - before.1);
        let phase = self.residency.observer_mut().outcome.phase_mut(batch.phase);
        (phase.rerouted, phase.bytes) = (phase.rerouted + rerouted, phase.bytes + bytes);
        phase.tokens += u64::from(batch.n_tokens);
        phase.seconds += seconds;
    }

    fn layer(&mut self, batch: &Batch, record: &LayerRecord) {
        let Self { recording, config, residency, device, selection } = self;
        let layer_seconds = match config.compute {
            Compute::Recorded => batch.other_seconds_per_layer(),
            Compute::Given { layer_seconds, .. } => layer_seconds,
        };
        let (phase, device) = (batch.phase, device.as_mut());
        pass(residency, layer_seconds);
        residency.catch_up();
        let mut layer = RecordedLayer { recording, config, record, phase, device, layer_seconds, rerouted: None };
        let Ok(()) = run_layer(&mut layer, residency, selection);
    }

    fn finish(mut self) -> Outcome {
        let (upgrades, bytes_read) = (self.residency.counters().upgrades, self.residency.reads().bytes);
        Outcome { upgrades, bytes_read, ..self.residency.observer_mut().end() }
    }
}

/// A recorded layer: its router's values are read from the record, and products pass virtual time.
struct RecordedLayer<'a> {
    recording: &'a Recording,
    config: &'a Config,
    record: &'a LayerRecord,
    phase: Phase,
    device: Option<&'a mut DeviceSlots>,
    /// Seconds of what is no product of experts.
    layer_seconds: f64,
    /// The weights of rerouted tokens, `[n_tokens][n_used]`.
    rerouted: Option<Vec<f32>>,
}

impl DeviceResidency for RecordedLayer<'_> {
    fn has(&self, version: Version) -> bool {
        self.device.as_ref().is_some_and(|device| device.cache.lookup(version).is_some())
    }
}

impl Router for RecordedLayer<'_> {
    type Error = Infallible;

    fn select(&mut self, selection: &mut Selection) -> Result<Option<Vec<f32>>, Infallible> {
        select(selection, self.recording, self.phase, self.record);
        Ok(None)
    }

    fn write(&mut self, ids: Option<&[u16]>, weights: &[f32]) {
        if ids.is_some() {
            self.rerouted = Some(weights.to_vec());
        }
    }

    fn weights(&mut self, _: &Selection, _: WeightsFor) -> Result<Vec<f32>, Infallible> {
        Ok(self.rerouted.as_ref().unwrap_or(&self.record.weights).clone())
    }

    fn inputs(&self) -> Vec<&[f32]> {
        Vec::new()
    }

    fn weighing(&mut self, _: &Selection) -> Weighing {
        Weighing::Normalised
    }

    fn unmasked_scores(&mut self, selection: &Selection) -> Option<Vec<RouterScores>> {
        let of_token = |token: usize| {
            let mut scores = Vec::new();
            let is_known = self.record.scores_of(token, selection.n_expert, &mut scores);
            is_known.then(|| RouterScores { selection: scores.clone(), weights: scores })
        };
        let known: Option<Vec<RouterScores>> = (0..self.record.n_tokens as usize).map(of_token).collect();
        Some(known.unwrap_or_default())
    }

    fn later_scores(&mut self, later: &[Later]) -> Vec<ScoresByLayer> {
        let of_token = |token: usize| {
            let scores = |&(distance, layer): &Later| {
                Some((layer, scores_at(self.record, token, distance, &self.recording.header)?))
            };
            later.iter().filter_map(scores).collect()
        };
        (0..self.record.n_tokens as usize).map(of_token).collect()
    }
}

impl residency::Compute<Link, Tally<'_>> for RecordedLayer<'_> {
    type Error = Infallible;
    type Router = Self;

    fn router(&mut self) -> &mut Self {
        self
    }

    fn recorded_demands(&mut self, selection: &mut Selection) -> bool {
        !selection.is_rerouted() && recorded_demands(selection, self.recording, self.config, self.record)
    }

    /// A recording may have scores of some tokens only, so the policy gets them here.
    fn enter(&mut self, residency: &mut Host<'_>, selection: &Selection, _: &[f32]) {
        if let Some(device) = &mut self.device {
            device.cache.begin_layer(self.record.layer, self.record.n_tokens);
        }
        let mut scores = Vec::new();
        if !self.record.scores.is_empty() {
            for token in 0..self.record.n_tokens as usize {
                if self.record.scores_of(token, selection.n_expert, &mut scores) {
                    residency.tell_scores(self.record.layer, &scores);
                }
            }
        }
    }

    fn token_choices(&self, selection: &Selection) -> TokenChoices {
        let wanted = (0..self.record.n_tokens as usize).map(|token| chosen(self.record, token)).collect();
        TokenChoices { wanted, used: selection.is_rerouted().then(|| selection.tokens()) }
    }

    fn layer_seconds(&self, step: &LayerStep) -> Option<f64> {
        let n_experts = step.used.len().max(usize::from(self.record.n_used));
        Some(self.layer_seconds + self.expert_seconds(n_experts) * n_experts as f64)
    }

    /// Multiplies resident experts first, those on the device before others, then each expert when its read completes.
    /// Without overlap, all of that comes behind the reads.
    fn products(
        &mut self,
        residency: &mut Host<'_>,
        selection: &Selection,
        step: &LayerStep,
    ) -> Result<(), Infallible> {
        let seconds = self.expert_seconds(step.used.len());
        let began = residency.reads().seconds();
        residency.memory.wait_for_all(step, &[WHOLE]);
        let mut stalled = residency.reads().seconds() - began;
        if let Some(device) = &mut self.device {
            device.use_experts(selection, step);
            let n_there = step.used.iter().filter(|used| used.is_on_device).count();
            pass(residency, device.expert_seconds * n_there as f64);
        }
        let elsewhere = step.used.iter().filter(|used| !used.is_on_device);
        let mut left: Vec<(Used, SliceId)> =
            elsewhere.map(|&used| (used, SliceId { version: step.version(used), kind: WHOLE })).collect();
        while !left.is_empty() {
            residency.memory.poll();
            let is_there = |(used, slice): &(Used, SliceId)| residency.memory.locate(*slice, *used) != Place::Pending;
            if let Some(at) = left.iter().position(is_there) {
                let (used, slice) = left.remove(at);
                pass(residency, seconds);
                if used.row.is_none() {
                    residency.memory.release(slice);
                }
                continue;
            }
            let before = residency.reads().seconds();
            if !residency.memory.wait() {
                debug_assert!(false, "every version in use is there or on its way");
                break;
            }
            stalled += residency.reads().seconds() - before;
        }
        residency.observer_mut().stalled(self.record.layer, stalled);
        Ok(())
    }
}

impl RecordedLayer<'_> {
    /// Seconds of one expert's products, if `n_multiplied` experts are multiplied.
    fn expert_seconds(&self, n_multiplied: usize) -> f64 {
        match self.config.compute {
            Compute::Given { expert_seconds, .. } => expert_seconds,
            Compute::Recorded => {
                let recorded = self.record.needed.iter().filter(|needed| needed.used.is_some()).count();
                let n = if recorded > 0 { recorded } else { n_multiplied };
                f64::from(self.record.compute_seconds) / n.max(1) as f64
            }
        }
    }
}

/// Advances the clock and marks completed reads.
fn pass(residency: &mut Host<'_>, seconds: f64) {
    residency.reads_mut().pass(seconds);
    residency.memory.poll();
}

/// Sets a layer's recorded router choice.
fn select(selection: &mut Selection, recording: &Recording, phase: Phase, record: &LayerRecord) {
    let n_expert = recording.header.layer(record.layer).map_or(0, |layer| usize::from(layer.n_expert));
    // Records are whole layers, so the next one is never a later split of the same layer.
    let n_used = record.n_used.into();
    let split = Split { layer: record.layer, n_expert, n_used, kinds: &[WHOLE], key: 0, phase };
    let ids = record.chosen.iter().map(|&index| i32::from(index));
    selection.set(&split, ids).expect("a trace's reader refuses other experts");
}

/// Sets the recorded order of need and, if this replay demands as the recorded run did, the demands. Whether it did.
fn recorded_demands(selection: &mut Selection, recording: &Recording, config: &Config, record: &LayerRecord) -> bool {
    let mut order = Vec::new();
    need_order(record, &mut order);
    selection.recorded(&order, &summed_weights(record));
    if !config.is_dynamic() || !config.asks_as_recorded(recording) || record.needed.is_empty() {
        return false;
    }
    let mut demands = vec![Demand::Skip; selection.n_expert];
    record.needed.iter().for_each(|needed| demands[usize::from(needed.expert)] = needed.demand);
    selection.demands = demands;
    true
}

/// The engine's lookahead, with the link's speed and the precisions.
fn lookahead(recording: &Recording, config: &Config, prefetch: Prefetch) -> residency::Lookahead {
    let shape = predict_shape(&recording.header);
    let predictor: Box<dyn Predictor> = match config.predictor {
        PredictedBy::Predictor(kind) => {
            predict::build(kind, shape.clone(), config.path_table.clone(), prefetch.rule.at_least())
        }
        PredictedBy::Oracle => oracle(recording, shape.clone(), None, |_| true),
        PredictedBy::Partly(percent) => oracle(recording, shape.clone(), Some(percent), |_| true),
    };
    let options = LookaheadOptions { shape, distance_max: prefetch.distance_max, hides_waits: false };
    let governor = if prefetch.tries { Governor::of_prefetching() } else { Governor::fixed(true) };
    residency::Lookahead::new(predictor, planner(config), governor, options)
}

fn precisions(config: &Config) -> Precisions {
    let mode = config.precision.mode.unwrap_or(PrecisionMode::Exact);
    let mut precisions = Precisions::new(mode, config.thresholds(), config.precision);
    precisions.drop = config.routing.drop;
    precisions
}

/// Layers whose experts move as a whole.
fn layout(header: &Header, config: &Config, cache: &Cache) -> Layout {
    let shape = |layer: &Layer| LayerShape { layer: layer.layer, n_expert: layer.n_expert, kinds: vec![WHOLE] };
    let bytes = |version: Version| {
        let layer = header.layer(version.expert.layer)?;
        let bytes = match version.precision {
            Precision::High => layer.bytes_high,
            Precision::Low if config.is_dynamic() && layer.bytes_low > 0 => layer.bytes_low,
            Precision::Low => return None,
        };
        let mut slices = [0; SliceKind::COUNT];
        slices[WHOLE.index()] = bytes;
        let mut rest = RestBytes::default();
        rest.slices[WHOLE.index()] = layer.bytes_rest;
        let has_rest = version.precision == Precision::High && layer.bytes_rest > 0;
        Some(VersionBytes { slices, record: None, rest: has_rest.then_some(rest) })
    };
    Layout::new(header.model.layers.iter().map(shape), cache, bytes)
}

fn planner(config: &Config) -> Prefetcher {
    let thresholds = if config.is_dynamic() { config.thresholds() } else { Thresholds { t1: 1.0, t2: 1.0 } };
    let rule = config.prefetch.map_or(PrefetchRule::Timed, |prefetch| prefetch.rule);
    let options = PrefetchOptions { thresholds, rule, ..PrefetchOptions::default() };
    Prefetcher::new(options, Estimates::seeded(config.link.bytes_per_second))
}

/// Every use of a recording, with its demand.
fn uses_to_come(recording: &Recording, config: &Config) -> Vec<Upcoming> {
    let mut uses = Vec::new();
    let (mut selection, mut precisions) = (Selection::default(), precisions(config));
    let records = recording.batches().flat_map(|batch| batch.layers.iter().map(|record| (batch.phase, record)));
    for (time, (phase, record)) in (0..).zip(records) {
        select(&mut selection, recording, phase, record);
        if !recorded_demands(&mut selection, recording, config, record) {
            selection.demand(&mut precisions, &record.weights);
        }
        uses.extend(selection.routing.needed.iter().map(|&index| Upcoming {
            time,
            expert: ExpertId { layer: record.layer, index },
            demand: match selection.demands[usize::from(index)] {
                Demand::High => Some(Precision::High),
                Demand::Low => Some(Precision::Low),
                Demand::Skip => None,
            },
        }));
    }
    uses
}
