//! What is read ahead, and what became of it.

use super::{Estimates, Odds, PrefetchCounters};
use crate::expert::{ExpertId, Version};
use crate::predict::{Ahead, Predicted, Predictor, ahead_by};
use crate::route::{Choice, Resident, Thresholds, resolve, unimportance};

/// What a plan is made by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefetchOptions {
    /// What predicted experts are worth, by their predicted router weights. T1 = 1 reads high versions only.
    pub thresholds: Thresholds,
    /// How much is read.
    pub pace: Pace,
    /// Most versions read ahead and not settled yet.
    pub outstanding_max: usize,
}

impl PrefetchOptions {
    /// Enough for two layers of the widest predictions of today's models.
    pub const OUTSTANDING_MAX: usize = 64;
}

impl Default for PrefetchOptions {
    /// Exact, and as much as there is time for.
    fn default() -> Self {
        Self { thresholds: Thresholds { t1: 1.0, t2: 1.0 }, pace: Pace::Timed, outstanding_max: Self::OUTSTANDING_MAX }
    }
}

/// How much is read ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pace {
    /// As much as there is time for; see the module.
    #[default]
    Timed,
    /// So many versions per layer, best scores first, whatever the time; and none is taken back. What is resident then
    /// depends on tokens only, provided that [`Holdings::is_resident`] does and the governor is fixed.
    Deterministic(usize),
}

/// What the planner asks about experts.
pub trait Holdings {
    /// Whether a version is in memory where products need it, or on its way there.
    fn is_resident(&self, version: Version) -> bool;

    /// Bytes to read for a version; `None` where there is no such version, or none that may be used.
    fn bytes(&self, version: Version) -> Option<u64>;

    /// Experts that a token uses in this layer.
    fn n_used(&self, layer: u16) -> usize;
}

/// What the link has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Link {
    /// A read that a product waits for is queued or in flight.
    pub is_busy: bool,
    /// Bytes of other reads (upgrades, earlier prefetches) that are queued or in flight: they come first.
    pub queued_bytes: u64,
    /// Seconds since the running layer's router chose.
    pub elapsed_seconds: f64,
}

/// A version to be read ahead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Which.
    pub version: Version,
    /// Bytes to read.
    pub bytes: u64,
    /// MoE layers until its own.
    pub distance: u8,
    /// Seconds that its read takes; 0 where that is unknown.
    pub load_seconds: f64,
    /// Seconds until its layer begins, less what is read before it; 0 where that is unknown.
    pub slack_seconds: f64,
    /// Expected saved wait, `p * min(load, slack)`, in seconds; in deterministic mode the score instead.
    pub saved: f64,
}

/// What became of the loads for one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settled {
    /// Not used and not landed: to be withdrawn where they have not started. Empty in deterministic mode.
    pub drop: Vec<Version>,
    /// Seconds that nothing waited thanks to those that were used, by the estimates.
    pub saved_seconds: f64,
    /// Seconds that the others may have stood before reads that are waited for, by the estimates.
    pub delayed_seconds: f64,
}

/// Decides what to read ahead. One per link.
///
/// For each layer of a single token: [`Prefetcher::settle`] with what it uses, [`Prefetcher::look_ahead`], then
/// [`Prefetcher::plan`], as often as the link falls idle.
#[derive(Clone, Debug)]
pub struct Prefetcher {
    options: PrefetchOptions,
    /// How long things take: to be told what was measured.
    pub estimates: Estimates,
    odds: Odds,
    outstanding: Vec<Outstanding>,
    /// Predictions that no router has judged yet.
    predicted: Vec<Predicted>,
    counters: PrefetchCounters,
}

#[derive(Clone, Copy, Debug)]
struct Outstanding {
    load: Load,
    has_landed: bool,
}

impl Prefetcher {
    /// `estimates` may be seeded from a calibration.
    pub fn new(options: PrefetchOptions, estimates: Estimates) -> Self {
        Self {
            options,
            estimates,
            odds: Odds::new(),
            outstanding: Vec::new(),
            predicted: Vec::new(),
            counters: PrefetchCounters::default(),
        }
    }

    /// Looks ahead as [`crate::predict::ahead`] does; an expert is missing where the version that its predicted weight is
    /// worth would have to be read. What this planner is reading already is not missing.
    pub fn look_ahead(&self, predictor: &mut dyn Predictor, layer: u16, p_max: u8, holdings: &dyn Holdings) -> Ahead {
        ahead_by(predictor, layer, p_max, &mut |predicted, wanted| {
            let versions = self.versions(predicted, holdings);
            wanted.extend(versions.into_iter().map(|(predicted, ..)| predicted));
        })
    }

    /// Which of the wanted experts to read now, in this order. They count as outstanding from now on.
    pub fn plan(&mut self, ahead: &Ahead, link: Link, holdings: &dyn Holdings) -> Vec<Load> {
        self.remember(&ahead.predicted);
        let room = self.options.outstanding_max.saturating_sub(self.outstanding.len());
        let candidates = self.candidates(ahead, holdings);
        let loads = match self.options.pace {
            Pace::Timed => self.in_time(candidates, link, room),
            Pace::Deterministic(n) => self.first(candidates, n, room),
        };
        for &load in &loads {
            self.counters.issued += 1;
            self.counters.issued_bytes += load.bytes;
            self.outstanding.push(Outstanding { load, has_landed: false });
        }
        loads
    }

    /// Every slice of a version that was read ahead is there.
    pub fn landed(&mut self, version: Version) {
        let own = self.outstanding.iter_mut().find(|own| own.load.version == version);
        own.into_iter().for_each(|own| own.has_landed = true);
    }

    /// A load of a plan was not carried out: there was no slot, the loader refused it, or its read failed.
    pub fn failed(&mut self, version: Version) {
        let before = self.outstanding.len();
        self.outstanding.retain(|own| own.load.version != version);
        self.counters.failed += (before - self.outstanding.len()) as u64;
    }

    /// The router of `layer` chose, and these versions are used. `waits`: others are read on demand now, so that wrong
    /// guesses may stand in their way.
    pub fn settle(&mut self, layer: u16, used: &[Version], waits: bool) -> Settled {
        let odds = &mut self.odds;
        self.predicted.retain(|predicted| {
            let is_here = predicted.expert.layer == layer;
            if is_here {
                let is_used = used.iter().any(|version| version.expert == predicted.expert);
                odds.observe(predicted.distance, predicted.score, is_used);
            }
            !is_here
        });
        let mut settled = Settled::default();
        let (counters, takes_back) = (&mut self.counters, self.options.pace == Pace::Timed);
        self.outstanding.retain(|&Outstanding { load, has_landed }| {
            if load.version.expert.layer != layer {
                return true;
            }
            if used.contains(&load.version) {
                *(if has_landed { &mut counters.useful } else { &mut counters.late }) += 1;
                // Of one that is late, its slack has passed.
                let saved = if has_landed { load.load_seconds } else { load.load_seconds.min(load.slack_seconds) };
                settled.saved_seconds += saved;
                return false;
            }
            counters.wasted += 1;
            counters.wasted_bytes += load.bytes;
            if !has_landed {
                if takes_back {
                    settled.drop.push(load.version);
                }
                if waits {
                    settled.delayed_seconds += (load.load_seconds - load.slack_seconds).max(0.0);
                }
            }
            false
        });
        self.counters.saved_seconds += settled.saved_seconds;
        self.counters.delayed_seconds += settled.delayed_seconds;
        settled
    }

    /// The token is given up, or its layers are over: everything outstanding, to be withdrawn where it has not started.
    /// It counts as wasted. Empty where every layer was settled, and in deterministic mode.
    pub fn abandon(&mut self) -> Vec<Version> {
        self.predicted.clear();
        let mut left = Vec::new();
        for Outstanding { load, has_landed } in std::mem::take(&mut self.outstanding) {
            self.counters.wasted += 1;
            self.counters.wasted_bytes += load.bytes;
            if !has_landed && self.options.pace == Pace::Timed {
                left.push(load.version);
            }
        }
        left
    }

    /// Whether a version was read ahead and its layer has not begun: it must stay.
    pub fn is_outstanding(&self, version: Version) -> bool {
        self.outstanding.iter().any(|own| own.load.version == version)
    }

    /// Counts so far.
    pub fn counters(&self) -> &PrefetchCounters {
        &self.counters
    }

    /// How often scores came true so far.
    pub fn odds(&self) -> &Odds {
        &self.odds
    }

    /// For the odds: the last prediction of each layer at each distance.
    fn remember(&mut self, predicted: &[Predicted]) {
        let place = |p: &Predicted| (p.expert.layer, p.distance);
        self.predicted.retain(|old| !predicted.iter().any(|new| place(new) == place(old)));
        self.predicted.extend_from_slice(predicted);
    }

    /// Of the predictions for one layer, best first, those that have to be read, and in which version.
    ///
    /// Weights beyond those of the experts that a token uses do not count: what is predicted there is used at most as the
    /// token's least important expert.
    fn versions(&self, predicted: &[Predicted], holdings: &dyn Holdings) -> Vec<(Predicted, Version, u64)> {
        let Some(first) = predicted.first() else { return Vec::new() };
        let n_used = holdings.n_used(first.expert.layer);
        let weights: Vec<f32> = predicted.iter().take(n_used).map(|predicted| predicted.score).collect();
        let mut importance = Vec::with_capacity(predicted.len());
        unimportance(&weights, &mut importance);
        importance.resize(predicted.len(), 1.0);
        let missing = predicted.iter().zip(importance).filter_map(|(&predicted, unimportance)| {
            let (version, bytes) = self.missing(predicted.expert, unimportance, holdings)?;
            Some((predicted, version, bytes))
        });
        missing.collect()
    }

    /// The version to read for an expert of this unimportance; `None` where there is nothing to read.
    fn missing(&self, expert: ExpertId, unimportance: f32, holdings: &dyn Holdings) -> Option<(Version, u64)> {
        let [high, low] = [Version::high(expert), Version::low(expert)];
        let is_there = |version| holdings.is_resident(version) || self.is_outstanding(version);
        let resident = Resident { high: is_there(high), low: is_there(low) };
        let demand = self.options.thresholds.demand(unimportance);
        let version = match resolve(demand, resident, holdings.bytes(low).is_some()) {
            Choice::High if holdings.bytes(high).is_none() => low,
            Choice::High => high,
            Choice::Low => low,
            Choice::Skip => return None,
        };
        if is_there(version) {
            return None;
        }
        holdings.bytes(version).map(|bytes| (version, bytes))
    }

    /// Wanted experts with the version to read, each once.
    fn candidates(&self, ahead: &Ahead, holdings: &dyn Holdings) -> Vec<(Predicted, Version, u64)> {
        let mut layers: Vec<u16> = ahead.wanted.iter().map(|wanted| wanted.expert.layer).collect();
        layers.dedup();
        let mut candidates: Vec<(Predicted, Version, u64)> = Vec::new();
        for layer in layers {
            let predicted: Vec<Predicted> = ahead.of_layer(layer).copied().collect();
            for candidate in self.versions(&predicted, holdings) {
                let is_wanted = ahead.wanted.iter().any(|wanted| wanted.expert == candidate.0.expert);
                if is_wanted && candidates.iter().all(|(other, ..)| other.expert != candidate.0.expert) {
                    candidates.push(candidate);
                }
            }
        }
        candidates
    }

    /// Again and again the candidate that saves most in the time that is left, as long as it saves more than it risks.
    fn in_time(&self, mut candidates: Vec<(Predicted, Version, u64)>, link: Link, room: usize) -> Vec<Load> {
        let (Some(layer_seconds), Some(mut taken)) =
            (self.estimates.layer_seconds(), self.estimates.load_seconds(link.queued_bytes))
        else {
            return Vec::new();
        };
        let mut loads = Vec::new();
        if link.is_busy {
            return loads;
        }
        taken += link.elapsed_seconds.max(0.0);
        while loads.len() < room {
            let mut best: Option<(usize, Load)> = None;
            for (i, &(predicted, version, bytes)) in candidates.iter().enumerate() {
                let distance = predicted.distance;
                let Some(load_seconds) = self.estimates.load_seconds(bytes) else { continue };
                let slack_seconds = f64::from(distance) * layer_seconds - taken;
                let p = f64::from(self.odds.probability(distance, predicted.score));
                let saved = p * load_seconds.min(slack_seconds);
                let delayed = (1.0 - p) * (load_seconds - slack_seconds).max(0.0);
                if slack_seconds > 0.0 && saved > delayed && best.is_none_or(|(_, best)| saved > best.saved) {
                    best = Some((i, Load { version, bytes, distance, load_seconds, slack_seconds, saved }));
                }
            }
            let Some((i, load)) = best else { break };
            candidates.remove(i);
            taken += load.load_seconds;
            loads.push(load);
        }
        loads
    }

    /// The first `n` of each layer, by score, what is outstanding for it counted in.
    fn first(&self, candidates: Vec<(Predicted, Version, u64)>, n: usize, room: usize) -> Vec<Load> {
        let mut loads: Vec<Load> = Vec::new();
        for (predicted, version, bytes) in candidates {
            let layer = version.expert.layer;
            let is_here = |load: &Load| load.version.expert.layer == layer;
            let outstanding = self.outstanding.iter().filter(|own| is_here(&own.load)).count();
            if loads.len() < room && outstanding + loads.iter().filter(|load| is_here(load)).count() < n {
                let saved = f64::from(predicted.score);
                let (distance, load_seconds, slack_seconds) = (predicted.distance, 0.0, 0.0);
                loads.push(Load { version, bytes, distance, load_seconds, slack_seconds, saved });
            }
        }
        loads
    }
}
