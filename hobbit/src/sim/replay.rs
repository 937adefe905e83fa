//! A recording from its beginning to its end.

use std::collections::BTreeSet;

use super::budget::slots;
use super::config::{Config, Eviction, Foresight};
use super::curves::hit_curves;
use super::error::SimError;
use super::link::Link;
use super::outcome::{LayerOutcome, Outcome};
use super::recall::{future, predict_shape};
use super::recording::{Batch, Event, Recording};
use super::step::{demands, need_order};
use super::upgrades::Upgrades;
use crate::cache::policy::{self, Belady, Shape, Upcoming};
use crate::cache::{Allocation, Cache, LayerLayout, PoolLayout, SavedCache, SliceKinds, SlotId};
use crate::expert::{ExpertId, Precision, SliceKind, Version};
use crate::load::prefetch::{Estimates, Pace, PrefetchOptions, Prefetcher};
use crate::options::PrecisionMode;
use crate::predict::{self, Oracle, Predictor};
use crate::route::{Demand, Thresholds};
use crate::trace::{Header, Phase, ResidentsRecord};

/// Experts move as a whole: one slice stands for all.
pub(super) const WHOLE: SliceKind = SliceKind::Gate;

/// What a read is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Slot(SlotId, Version),
    /// Beyond the layer's slots: read, multiplied, forgotten.
    Staging(Version),
}

impl Target {
    pub(super) fn version(&self) -> Version {
        match *self {
            Self::Slot(_, version) | Self::Staging(version) => version,
        }
    }
}

/// Replays a recording; `observe` is told of every needed expert: layer, expert, precision used, hit.
///
/// # Errors
/// [`SimError::NoLow`] for dynamic precision where the model had no low versions.
pub fn replay(
    recording: &Recording,
    config: &Config,
    observe: &mut dyn FnMut(ExpertId, Option<Precision>, bool),
) -> Result<Outcome, SimError> {
    let mut replay = Replay::new(recording, config)?;
    replay.warm_up();
    for event in &recording.events {
        match event {
            Event::Sequence => {
                replay.cache.begin_sequence();
                replay.predictor.begin_sequence();
            }
            Event::Batch(batch) => replay.batch(batch, observe),
        }
    }
    Ok(replay.finish())
}

pub(super) struct Replay<'a> {
    pub(super) recording: &'a Recording,
    pub(super) config: &'a Config,
    pub(super) cache: Cache,
    pub(super) predictor: Box<dyn Predictor>,
    /// Decides what is loaded on a guess.
    pub(super) planner: Prefetcher,
    pub(super) link: Link<Target>,
    /// Virtual seconds.
    pub(super) now: f64,
    pub(super) upgrades: Upgrades,
    /// Staged versions of the running layer that have landed.
    pub(super) staged: Vec<Version>,
    /// Resident on a guess, and not used yet.
    pub(super) guessed: BTreeSet<Version>,
    pub(super) low_cost: f64,
    pub(super) outcome: Outcome,
    /// Reused.
    pub(super) landed: Vec<Target>,
    pub(super) scores: Vec<f32>,
}

impl<'a> Replay<'a> {
    fn new(recording: &'a Recording, config: &'a Config) -> Result<Self, SimError> {
        let header = &recording.header;
        let layers = &header.model.layers;
        let (high, low) = layers.iter().fold((0, 0), |(high, low), l| (high + l.bytes_high, low + l.bytes_low));
        if config.mode == PrecisionMode::Dynamic && low == 0 {
            return Err(SimError::NoLow { path: recording.path.clone() });
        }
        let low_cost = if low > 0 { low as f64 / high as f64 } else { 1.0 };
        let curves = if config.allocation == Allocation::ByPenalty { hit_curves(recording) } else { Vec::new() };
        let pools = pools(header, config, &curves);
        let n_layers = layers.last().map_or(0, |layer| layer.layer.saturating_add(1));
        let policy = match config.eviction {
            Eviction::Policy(kind) => {
                policy::build(kind, &config.weights, Shape { n_layers, low_cost: low_cost as f32 })
            }
            Eviction::Belady => Box::new(Belady::with_demands(uses_to_come(recording, config), low_cost as f32)),
        };
        let predictor: Box<dyn Predictor> = match config.foresight {
            Foresight::Predictor(kind) => predict::build(kind, predict_shape(header), None),
            Foresight::Oracle => Box::new(Oracle::new(predict_shape(header), future(recording).into_iter())),
        };
        let cache = Cache::new(pools, policy);
        let of_layer = |layer: &crate::trace::Layer| LayerOutcome {
            layer: layer.layer,
            slots: cache.capacity_of_layer(layer.layer, Precision::High),
            ..LayerOutcome::default()
        };
        let outcome = Outcome { layers: layers.iter().map(of_layer).collect(), ..Outcome::default() };
        Ok(Self {
            recording,
            config,
            cache,
            predictor,
            planner: planner(config),
            link: Link::new(config.link),
            now: 0.0,
            upgrades: Upgrades::new(layers.iter().map(|layer| layer.layer).collect()),
            staged: Vec::new(),
            guessed: BTreeSet::new(),
            low_cost,
            outcome,
            landed: Vec::new(),
            scores: Vec::new(),
        })
    }

    /// What was resident when the recording began is resident, as far as there are slots; a policy of the recorded kind knows
    /// what that one had learned.
    fn warm_up(&mut self) {
        let ResidentsRecord { versions, statistics } = self.recording.start.clone();
        let saved = SavedCache { name: String::new(), residents: versions, statistics };
        let is_recorded = self.config.eviction.to_string() == self.recording.header.settings.policy;
        if is_recorded {
            self.cache.load_statistics(&saved);
        }
        for (slot, _) in self.cache.restore(&saved) {
            self.cache.set_loading(slot, WHOLE);
            self.cache.set_ready(slot, WHOLE);
        }
    }

    fn batch(&mut self, batch: &Batch, observe: &mut dyn FnMut(ExpertId, Option<Precision>, bool)) {
        let started = self.now;
        if batch.n_tokens == 1 {
            self.predictor.begin_token();
        }
        self.planner.abandon();
        for record in &batch.layers {
            self.layer(batch, record, observe);
        }
        self.cache.next_token();
        self.upgrades.next_token();
        if self.config.deterministic {
            self.upgrade_in_step();
        }
        let seconds = self.now - started;
        let phase = self.outcome.phase_mut(batch.phase);
        phase.tokens += u64::from(batch.n_tokens);
        phase.seconds += seconds;
    }

    fn finish(mut self) -> Outcome {
        self.outcome.prefetch.wasted += self.guessed.len() as u64;
        self.outcome
    }

    /// Time passes; what has landed is there.
    pub(super) fn pass(&mut self, until: f64) {
        self.now = self.now.max(until);
        let mut landed = std::mem::take(&mut self.landed);
        self.link.advance(self.now, &mut landed);
        for target in landed.drain(..) {
            match target {
                Target::Slot(slot, version) => {
                    self.cache.set_ready(slot, WHOLE);
                    self.planner.landed(version);
                }
                Target::Staging(version) => self.staged.push(version),
            }
        }
        self.landed = landed;
    }

    /// Makes a version resident and its slot loading; `None` where it finds no slot.
    pub(super) fn acquire(&mut self, version: Version) -> Option<SlotId> {
        let acquired = self.cache.acquire(version)?;
        self.leaves(acquired.evicted);
        self.cache.set_loading(acquired.slot, WHOLE);
        Some(acquired.slot)
    }

    /// Books on a guess that was evicted unused.
    pub(super) fn leaves(&mut self, evicted: Option<Version>) {
        if evicted.is_some_and(|version| self.guessed.remove(&version)) {
            self.outcome.prefetch.wasted += 1;
        }
    }

    pub(super) fn bytes(&self, version: Version) -> u64 {
        let layer = self.recording.header.layer(version.expert.layer);
        layer.map_or(0, |layer| match version.precision {
            Precision::High => layer.bytes_high,
            Precision::Low => layer.bytes_low,
        })
    }

    pub(super) fn has_low(&self, layer: u16) -> bool {
        self.config.mode == PrecisionMode::Dynamic
            && self.recording.header.layer(layer).is_some_and(|layer| layer.bytes_low > 0)
    }

    pub(super) fn layer_outcome(&mut self, layer: u16) -> Option<&mut LayerOutcome> {
        let layers = &mut self.outcome.layers;
        layers.binary_search_by_key(&layer, |own| own.layer).ok().map(|at| &mut layers[at])
    }

    pub(super) fn count(&mut self, phase: Phase, layer: u16, used: Option<Precision>, hit: bool) {
        let penalty = if hit { 0.0 } else { super::outcome::penalty(used, self.low_cost) };
        if let Some(own) = self.layer_outcome(layer) {
            own.hits += u64::from(hit);
            own.misses += u64::from(!hit);
            own.penalty += penalty;
        }
        let phase = self.outcome.phase_mut(phase);
        phase.hits += u64::from(hit);
        phase.penalty += penalty;
        if !hit {
            phase.misses.count(used, 1);
        }
    }
}

/// The engine's, told the speed of the link and what experts are asked for.
fn planner(config: &Config) -> Prefetcher {
    let thresholds = match config.mode {
        PrecisionMode::Exact => Thresholds { t1: 1.0, t2: 1.0 },
        PrecisionMode::Dynamic => config.thresholds,
    };
    let pace = match config.prefetch {
        Some(prefetch) if !prefetch.in_time => Pace::Deterministic(usize::MAX),
        _ => Pace::Timed,
    };
    let options = PrefetchOptions { thresholds, pace, ..PrefetchOptions::default() };
    Prefetcher::new(options, Estimates::seeded(config.link.bytes_per_second))
}

/// Every use of a recording, with what it will ask for.
fn uses_to_come(recording: &Recording, config: &Config) -> Vec<Upcoming> {
    let (mut uses, mut order) = (Vec::new(), Vec::new());
    for (time, record) in (0..).zip(recording.batches().flat_map(|batch| &batch.layers)) {
        need_order(record, &mut order);
        let demands = demands(recording, config, record, &order);
        uses.extend(order.iter().map(|&index| Upcoming {
            time,
            expert: ExpertId { layer: record.layer, index },
            demand: match demands[usize::from(index)] {
                Demand::High => Some(Precision::High),
                Demand::Low => Some(Precision::Low),
                Demand::Skip => None,
            },
        }));
    }
    uses
}

/// A pool for each layer and precision: shares of a common pool are as separate.
fn pools(header: &Header, config: &Config, curves: &[super::HitCurve]) -> Vec<PoolLayout> {
    let low_percent = if config.mode == PrecisionMode::Dynamic { config.low_percent } else { 0.0 };
    let slots = slots(header, config.budget, config.allocation, low_percent, curves);
    let kinds = SliceKinds::from_iter([WHOLE]);
    let mut pools = Vec::new();
    for (layer, slots) in header.model.layers.iter().zip(slots) {
        let mut pool = |precision, n_slots: u32| {
            let of = |index| Version { expert: ExpertId { layer: layer.layer, index }, precision };
            let members: Vec<Version> = (0..layer.n_expert).map(of).collect();
            let n_slots = n_slots.min(layer.n_expert.into());
            pools.push(PoolLayout {
                layers: vec![LayerLayout { layer: layer.layer, members, kinds }],
                n_slots,
                capacities: None,
            });
        };
        pool(Precision::High, slots.high);
        if config.mode == PrecisionMode::Dynamic && layer.bytes_low > 0 {
            pool(Precision::Low, slots.low);
        }
    }
    pools
}
