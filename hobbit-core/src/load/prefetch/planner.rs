//! Chooses the prefetches, and judges them once the router has chosen.

use smart_default::SmartDefault;

use super::estimates::{Chances, Estimates, Guess, Odds, Presence};
use crate::expert::{ExpertId, Precision, Version};
use crate::predict::{Ahead, Predicted, Predictor, ahead};
use crate::route::{Demand, Thresholds, resolve, unimportance};

/// By default exact, and as much as there is time for.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault)]
pub struct PrefetchOptions {
    /// Map predicted router weights to precisions. T1 = 1 reads high versions only.
    #[default(Thresholds { t1: 1.0, t2: 1.0 })]
    pub thresholds: Thresholds,
    pub rule: PrefetchRule,
    /// Maximum of versions read ahead and not settled yet: enough for two layers of the widest predictions of today's
    /// models.
    #[default(64)]
    pub outstanding_max: usize,
    /// Part of a read that must end before its layer begins. A wrong guess is withdrawn then, apart from what is in
    /// flight.
    #[default(0.25)]
    pub in_time_min: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefetchRule {
    /// The guesses that are more likely right than not, as many as there is time for; see the module.
    #[default]
    Timed,
    /// Every guess, whatever the time, and no predicted expert is evicted before its layer has run (HOBBIT, section
    /// 3.3).
    All,
    /// At most this many versions per layer, best scores first, whatever the time. As with [`PrefetchRule::All`],
    /// residency depends on tokens only, provided that [`Holdings::is_resident`] does and the governor is fixed.
    First(usize),
    /// The best guesses of a layer, as many as can be read while a layer runs: Fate's `n = T / t_expert` (section
    /// 4.3), and SMoE's bound (section IV-A).
    Budget,
}

impl PrefetchRule {
    /// Guesses of a layer that a predictor must make for the rule.
    pub const fn at_least(self) -> usize {
        if let Self::First(n) = self { n } else { 0 }
    }
}

/// The planner's view of the cache.
pub trait Holdings {
    /// Whether a version is in memory where products need it, or on its way there.
    fn is_resident(&self, version: Version) -> bool;

    /// Bytes to read for a version; `None` if it does not exist or may not be used.
    fn bytes(&self, version: Version) -> Option<u64>;

    fn n_used(&self, layer: u16) -> usize;
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Link {
    /// Bytes of background reads (upgrades, earlier prefetches) that are queued or in flight: they go first.
    pub queued_bytes: u64,
    pub elapsed_seconds: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    pub version: Version,
    pub bytes: u64,
    pub distance: u8,
}

/// Counted since the planner was made. Measured times are in [`super::GovernorReport`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct PrefetchCounters {
    pub issued: u64,
    pub issued_bytes: u64,
    /// Versions that were refused, or whose read failed.
    pub failed: u64,
    /// Versions that were withdrawn before they were read, because the router had chosen others.
    pub dropped: u64,
    /// Versions that were used and had arrived when their layer began.
    pub useful: u64,
    /// Versions that were used and were still being read.
    pub late: u64,
    /// Versions that their layer did not use.
    pub wasted: u64,
    /// Their bytes, those never read included.
    pub wasted_bytes: u64,
}

/// Decides what to read ahead. One per link.
///
/// For each layer of a decode batch: [`Prefetcher::settle`] with what it uses, [`Prefetcher::look_ahead`], then
/// [`Prefetcher::plan`], as often as the link falls idle, and [`Prefetcher::shielded`].
#[derive(Clone, Debug)]
pub struct Prefetcher {
    options: PrefetchOptions,
    /// The caller reports its measurements here.
    pub estimates: Estimates,
    pub odds: Odds,
    outstanding: Vec<Outstanding>,
    /// Predictions whose layer's router has not chosen yet.
    predicted: Vec<(ExpertId, Guess)>,
    /// Experts of the last plan that are not to be evicted.
    shielded: Vec<ExpertId>,
    pub counters: PrefetchCounters,
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
            odds: Odds::default(),
            outstanding: Vec::new(),
            predicted: Vec::new(),
            shielded: Vec::new(),
            counters: PrefetchCounters::default(),
        }
    }

    /// Looks ahead as [`crate::predict::ahead`] does. An expert is missing if the version that its predicted weight
    /// asks for would have to be read; a version that this planner is reading already is not missing.
    pub fn look_ahead(&self, predictor: &mut dyn Predictor, layer: u16, p_max: u8, holdings: &dyn Holdings) -> Ahead {
        ahead(predictor, layer, p_max, &mut |predicted, wanted| {
            let candidates = self.weighed(predicted, holdings).into_iter();
            wanted.extend(candidates.filter(|own| own.missing().is_some()).map(|own| own.predicted));
        })
    }

    /// The wanted experts to read now, in this order. They count as outstanding from now on.
    pub fn plan(&mut self, ahead: &Ahead, link: Link, holdings: &dyn Holdings) -> Vec<Load> {
        let candidates = self.candidates(ahead, holdings);
        self.remember(&candidates);
        self.shield(&candidates);
        let room = self.options.outstanding_max.saturating_sub(self.outstanding.len());
        let is_wanted = |own: &Candidate| ahead.wanted.iter().any(|wanted| wanted.expert == own.predicted.expert);
        let candidates = candidates.into_iter().filter(is_wanted).collect();
        let loads = match self.options.rule {
            PrefetchRule::Timed => self.in_time(candidates, link, room),
            PrefetchRule::All => self.first(candidates, |_| usize::MAX, room),
            PrefetchRule::First(n) => self.first(candidates, |_| n, room),
            PrefetchRule::Budget => self.first(candidates, |bytes| self.reads_per_layer(bytes), room),
        };
        for &load in &loads {
            self.counters.issued += 1;
            self.counters.issued_bytes += load.bytes;
            self.outstanding.push(Outstanding { load, has_landed: false });
        }
        loads
    }

    /// Versions not to evict before their layer has run: the experts that the last plan shielded, and what is read
    /// ahead for layers that have not begun.
    ///
    /// [`PrefetchRule::All`] shields all predicted experts, the others those that are more likely used than not.
    pub fn shielded(&self) -> impl Iterator<Item = Version> {
        let both = |&expert| [Version::high(expert), Version::low(expert)];
        self.shielded.iter().flat_map(both).chain(self.outstanding.iter().map(|own| own.load.version))
    }

    fn shield(&mut self, candidates: &[Candidate]) {
        let shields = |own: &&Candidate| self.options.rule == PrefetchRule::All || self.is_likely(own);
        self.shielded = candidates.iter().filter(shields).map(|own| own.predicted.expert).collect();
    }

    /// Whether the router is more likely to ask for the expert than not.
    fn is_likely(&self, candidate: &Candidate) -> bool {
        let Chances { high, low } = self.odds.chances(candidate.guess());
        high + low > 0.5
    }

    pub fn landed(&mut self, version: Version) {
        let own = self.outstanding.iter_mut().find(|own| own.load.version == version);
        if let Some(own) = own {
            own.has_landed = true;
        }
    }

    /// A load was withdrawn before all of it was read: its layer does not use it.
    pub fn dropped(&mut self, version: Version) {
        let before = self.outstanding.len();
        self.outstanding.retain(|own| own.load.version != version);
        self.counters.dropped += (before - self.outstanding.len()) as u64;
    }

    /// A load of a plan was not carried out: there was no slot, the loader refused it, or its read failed.
    pub fn failed(&mut self, version: Version) {
        let before = self.outstanding.len();
        self.outstanding.retain(|own| own.load.version != version);
        self.counters.failed += (before - self.outstanding.len()) as u64;
    }

    /// The router of `layer` chose these experts, with their weights, for each token of a batch; `used` versions are
    /// used.
    pub fn settle(&mut self, layer: u16, tokens: &[Vec<(u16, f32)>], used: &[Version]) {
        let demands = self.demands(tokens);
        let asked = |index: u16| demands.iter().find(|(own, _)| *own == index).map(|(_, demand)| *demand);
        let odds = &mut self.odds;
        self.predicted.retain(|(expert, guess)| {
            let is_here = expert.layer == layer;
            if is_here {
                odds.observe(*guess, asked(expert.index));
            }
            !is_here
        });
        let counters = &mut self.counters;
        self.outstanding.retain(|&Outstanding { load, has_landed }| {
            if load.version.expert.layer != layer {
                return true;
            }
            if used.contains(&load.version) {
                *(if has_landed { &mut counters.useful } else { &mut counters.late }) += 1;
            } else {
                counters.wasted += 1;
                counters.wasted_bytes += load.bytes;
            }
            false
        });
    }

    /// The tokens' demands, each expert once: the highest demand of all tokens.
    fn demands(&self, tokens: &[Vec<(u16, f32)>]) -> Vec<(u16, Demand)> {
        let mut asked: Vec<(u16, Demand)> = Vec::with_capacity(tokens.iter().map(Vec::len).sum());
        for chosen in tokens {
            let weights: Vec<f32> = chosen.iter().map(|(_, weight)| *weight).collect();
            let mut demands = Vec::with_capacity(weights.len());
            self.options.thresholds.demands(&weights, &mut demands);
            let own = chosen.iter().zip(demands).map(|(&(index, _), demand)| (index, demand));
            if asked.is_empty() {
                asked.extend(own);
                continue;
            }
            for (index, demand) in own {
                match asked.iter_mut().find(|(known, _)| *known == index) {
                    Some((_, highest)) => *highest = demand.max(*highest),
                    None => asked.push((index, demand)),
                }
            }
        }
        asked
    }

    /// The token was abandoned or its layers are over: everything outstanding counts as wasted.
    pub fn abandon(&mut self) {
        self.predicted.clear();
        self.shielded.clear();
        for Outstanding { load, .. } in self.outstanding.drain(..) {
            self.counters.wasted += 1;
            self.counters.wasted_bytes += load.bytes;
        }
    }

    /// Whether a version was prefetched and its layer has not begun: it must not be evicted.
    pub fn is_outstanding(&self, version: Version) -> bool {
        self.outstanding.iter().any(|own| own.load.version == version)
    }

    /// Keeps the last prediction of each layer at each distance, for the odds.
    fn remember(&mut self, candidates: &[Candidate]) {
        let place = |own: &Candidate| (own.predicted.expert.layer, own.predicted.distance);
        self.predicted.retain(|(old, guess)| !candidates.iter().any(|new| place(new) == (old.layer, guess.distance)));
        self.predicted.extend(candidates.iter().map(|own| (own.predicted.expert, own.guess())));
    }

    /// The predictions for one layer, best first, with the precisions that they ask for and the state of memory. An
    /// expert that several tokens are expected to use counts once: with its best score and its highest demand.
    ///
    /// Only as many weights count as a token uses experts: a prediction beyond them is at most the token's least
    /// important expert.
    fn weighed(&self, predicted: &[Predicted], holdings: &dyn Holdings) -> Vec<Candidate> {
        let Some(first) = predicted.first() else { return Vec::new() };
        let n_used = holdings.n_used(first.expert.layer);
        let miss_rate = self.estimates.miss_rate();
        let candidate = |(predicted, worth): (Predicted, Demand)| {
            let versions = Precision::ALL.map(|precision| Version { expert: predicted.expert, precision });
            let is_outstanding = versions.map(|version| self.is_outstanding(version));
            let is_resident = versions.map(|version| holdings.is_resident(version));
            let bytes = versions.map(|version| holdings.bytes(version));
            let candidate = |is_resident, presence| Candidate { predicted, worth, presence, is_resident, bytes };
            // This planner's own reads do not count: without them the version would be missing.
            let before = [0, 1].map(|i| is_resident[i] && !is_outstanding[i]);
            let is_missing = candidate(before, Presence::Resident).missing().is_some();
            let presence = if is_missing { Presence::Missing(miss_rate) } else { Presence::Resident };
            candidate([0, 1].map(|i| is_resident[i] || is_outstanding[i]), presence)
        };
        if predicted[predicted.len() - 1].token == first.token {
            let worths = self.worths(predicted, n_used);
            return predicted.iter().copied().zip(worths).map(candidate).collect();
        }
        let mut all: Vec<(Predicted, Demand)> = Vec::with_capacity(predicted.len());
        for of_token in predicted.chunk_by(|a, b| a.token == b.token) {
            for (&predicted, worth) in of_token.iter().zip(self.worths(of_token, n_used)) {
                match all.iter_mut().find(|(own, _)| own.expert == predicted.expert) {
                    None => all.push((predicted, worth)),
                    Some((best, highest)) => {
                        *highest = worth.max(*highest);
                        if predicted.score > best.score {
                            *best = predicted;
                        }
                    }
                }
            }
        }
        all.sort_by(|(a, _), (b, _)| b.score.total_cmp(&a.score));
        all.into_iter().map(candidate).collect()
    }

    /// The precisions that one token's predictions for a layer ask for; `predicted` is sorted best first.
    fn worths(&self, predicted: &[Predicted], n_used: usize) -> impl Iterator<Item = Demand> {
        let weights: Vec<f32> = predicted.iter().take(n_used).map(|predicted| predicted.score).collect();
        let mut importance = Vec::with_capacity(predicted.len());
        unimportance(&weights, &mut importance);
        importance.resize(predicted.len(), 1.0);
        let thresholds = self.options.thresholds;
        importance.into_iter().map(move |unimportance| thresholds.demand(unimportance))
    }

    /// All predictions, layer by layer, each expert once.
    fn candidates(&self, ahead: &Ahead, holdings: &dyn Holdings) -> Vec<Candidate> {
        let mut layers: Vec<u16> = ahead.predicted.iter().map(|predicted| predicted.expert.layer).collect();
        layers.dedup();
        let mut candidates: Vec<Candidate> = Vec::new();
        for layer in layers {
            let predicted: Vec<Predicted> = ahead.of_layer(layer).copied().collect();
            for candidate in self.weighed(&predicted, holdings) {
                if candidates.iter().all(|other| other.predicted.expert != candidate.predicted.expert) {
                    candidates.push(candidate);
                }
            }
        }
        candidates
    }

    /// The likely ones, best first, for which there is time.
    fn in_time(&self, candidates: Vec<Candidate>, link: Link, room: usize) -> Vec<Load> {
        let (Some(layer_seconds), Some(mut taken)) =
            (self.estimates.layer_seconds(), self.estimates.load_seconds(link.queued_bytes))
        else {
            return Vec::new();
        };
        taken += link.elapsed_seconds.max(0.0);
        let mut loads = Vec::new();
        for candidate in candidates.into_iter().filter(|own| self.is_likely(own)) {
            let Some((version, bytes)) = candidate.missing() else { continue };
            let Some(seconds) = self.estimates.load_seconds(bytes) else { continue };
            let distance = candidate.predicted.distance;
            let slack = f64::from(distance) * layer_seconds - taken;
            if loads.len() < room && slack >= self.options.in_time_min * seconds {
                taken += seconds;
                loads.push(Load { version, bytes, distance });
            }
        }
        loads
    }

    /// Reads of this many bytes that end while a layer runs; 0 before both times were observed.
    fn reads_per_layer(&self, bytes: u64) -> usize {
        match (self.estimates.layer_seconds(), self.estimates.load_seconds(bytes)) {
            (Some(layer), Some(load)) if load > 0.0 => (layer / load) as usize,
            _ => 0,
        }
    }

    /// The first `n` of each layer by score, outstanding ones included. Experts with a score of 0 will be replaced by
    /// others: SMoE prefetches predicted experts less the predicted substitutes.
    fn first(&self, candidates: Vec<Candidate>, n: impl Fn(u64) -> usize, room: usize) -> Vec<Load> {
        let mut loads: Vec<Load> = Vec::new();
        for candidate in candidates.into_iter().filter(|own| own.predicted.score > 0.0) {
            let Some((version, bytes)) = candidate.missing() else { continue };
            let layer = version.expert.layer;
            let is_here = |load: &Load| load.version.expert.layer == layer;
            let outstanding = self.outstanding.iter().filter(|own| is_here(&own.load)).count();
            if loads.len() < room && outstanding + loads.iter().filter(|load| is_here(load)).count() < n(bytes) {
                loads.push(Load { version, bytes, distance: candidate.predicted.distance });
            }
        }
        loads
    }
}

/// A predicted expert against the state of memory. Arrays are by [`Precision::index`].
#[derive(Clone, Copy, Debug)]
struct Candidate {
    predicted: Predicted,
    /// Precision that its predicted weight asks for.
    worth: Demand,
    presence: Presence,
    is_resident: [bool; Precision::COUNT],
    /// `None` for versions that do not exist.
    bytes: [Option<u64>; Precision::COUNT],
}

impl Candidate {
    fn guess(&self) -> Guess {
        let Predicted { distance, score, .. } = self.predicted;
        Guess { distance, score, worth: self.worth, presence: self.presence }
    }

    /// The version to read for the predicted weight, and its bytes.
    fn missing(&self) -> Option<(Version, u64)> {
        let [has_high, has_low] = self.bytes.map(|bytes| bytes.is_some());
        let wanted = resolve(self.worth, self.is_resident, has_low)?;
        let precision = if has_high { wanted } else { Precision::Low };
        let bytes = self.bytes[precision.index()].filter(|_| !self.is_resident[precision.index()])?;
        Some((Version { expert: self.predicted.expert, precision }, bytes))
    }
}
