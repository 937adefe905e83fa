//! hobbit's own policy: evicts the version that is least likely to be missed soon, as learned during the run.
//!
//! Five features predict the next uses of an expert:
//! - *Router scores*, chosen or not: an expert that just missed selection is more likely to come than one with a low
//!   score. The evidence is `ln(score / score of the last selected)`, whose sign is selection itself, averaged over a
//!   short, a middle and a long memory (SMoE averages plain scores over one window, where a few large ones decide).
//! - *Uses*, over the same memories: from recency to frequency (LRU and LFU are the ends).
//! - *Frequency in this sequence*, drawn towards *frequency in the whole run* while the sequence is young.
//! - *Recency*, as `1 / (1 + age)` and `-ln(1 + age)`, age in tokens since the last use.
//! - *Habit*: how often it was used by the token after one that used what the running token uses.
//!
//! Their logistic mixture is the probability `P` of a use within some tokens. Its weights are learned online: after
//! some tokens of a layer, earlier features of each expert are compared with its uses since. All layers share one set
//! of weights for known scores and one for unknown ones, so a hundred tokens teach a lot.
//!
//! A version's worth is `P` times the cost of its loss: a low load if the expert's uses ask for no more, 0 while its
//! other version serves them. Among candidates of several layers it is that cost divided by the expected tokens until
//! a use, `1 / p - 1` and the part of a token until the layer runs; `p` is the chance of a use by one token.

mod layer;
mod learner;
#[cfg(test)]
mod tests;

use super::{Candidate, Now, Policy, Use, lowest};
use crate::cache::ShareId;
use crate::cache::bytes::{Cursor, Writer};
use crate::expert::{ExpertId, Version};
use layer::Layer;
use learner::Learner;
pub(super) use learner::table_bytes;

const N_RATES: usize = 3;

/// Constant, scores and uses per half-life, frequency in this sequence and ever, recency as two curves, habit.
const N_FEATURES: usize = 6 + 2 * N_RATES;

// The numbers were tuned by coordinate search on calibration traces: the bundled demo model on prose and code, and a
// model of random weights with 64 experts, top-8, on the same texts, at 25 to 75 % of the experts (`benches/policies`
// replays other parts of the texts). The weights for scores are the means of the learned ones, from which the learner
// continues. Those without scores come from synthetic routers like those of the tests.

/// Tokens after which a score or a use counts half, shortest first.
const HALF_LIVES: [f32; N_RATES] = [0.35, 16.0, 96.0];

/// Tokens of a sequence after which its own frequencies count as much as the whole run's.
const PRIOR_TOKENS: f32 = 8.0;

/// The prediction is a use within this many tokens: about how long an unused version stays.
const HORIZON_TOKENS: u32 = 2;

/// Step size of the learner.
const LEARNING_RATE: f32 = 1.0;

/// Part of the way back to the given weights with each step of the learner.
const PULL: f32 = 0.000_25;

/// Weights for layers whose scores are known, in the order: constant; mean router score per half-life; mean use per
/// half-life; log frequency in this sequence; log frequency in the whole run; `1 / (1 + age)` and `-ln(1 + age)` of the
/// last use; log chance of a use after what the running token uses.
const SCORED: [f32; N_FEATURES] = [0.97, 0.26, 0.72, -0.39, 0.83, 1.11, 1.42, 1.27, -1.28, -0.84, 0.66, 3.59];

/// Weights for layers of which only the chosen experts' weights are known.
const BLIND: [f32; N_FEATURES] = [0.4, 1.0, 0.7, 0.5, 0.5, 1.0, 2.1, 1.5, 0.2, -0.5, 1.4, 2.0];

/// Evicts the version of the least expected cost of being missed; of equal ones the least recently used.
///
/// It takes about 45 ns per expert and token (64 experts, half of them resident), and 4 bytes per pair of a layer's
/// experts.
#[derive(Clone, Debug)]
pub struct Learned {
    /// Part of a mean that is left after one token, by half-life.
    keep: [f32; N_RATES],
    low_cost: f32,
    layers: Vec<Layer>,
    scored: Learner,
    blind: Learner,
    /// Candidates may be of several layers.
    has_common: bool,
}

impl Learned {
    /// `low_cost` as in [`super::Shape`].
    pub fn new(low_cost: f32) -> Self {
        let keep = HALF_LIVES.map(|half_life| (-1.0 / half_life).exp2());
        let learner = |origin| Learner::new(origin, LEARNING_RATE, PULL);
        Self { keep, low_cost, layers: Vec::new(), scored: learner(SCORED), blind: learner(BLIND), has_common: false }
    }

    fn layer(&mut self, layer: u16) -> &mut Layer {
        let layer = usize::from(layer);
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, Layer::default());
        }
        &mut self.layers[layer]
    }

    fn step(&mut self, layer: u16, token: u64) -> &mut Layer {
        self.layer(layer);
        let Self { layers, keep, scored, blind, .. } = self;
        let layer = &mut layers[usize::from(layer)];
        layer.begin_step(token, keep, |is_scored, examples| {
            if is_scored { scored } else { blind }.learn(examples);
        });
        layer
    }

    fn loaded(&self, saved: &mut Cursor) -> Option<Self> {
        let (scored, blind) = (self.scored.loaded(saved)?, self.blind.loaded(saved)?);
        let n_layers = saved.count(1).filter(|n| *n <= usize::from(u16::MAX) + 1)?;
        let layers: Option<Vec<Layer>> = (0..n_layers).map(|_| Layer::load(saved)).collect();
        saved.end(Self { scored, blind, layers: layers?, ..self.clone() })
    }

    fn worth(&self, Version { expert, precision }: Version) -> f64 {
        let Some(layer) = self.layers.get(usize::from(expert.layer)) else { return 0.0 };
        let learner = if layer.is_scored() { &self.scored } else { &self.blind };
        let probability = learner.predict(&layer.features(usize::from(expert.index)));
        f64::from(probability) * f64::from(layer.cost(expert.index, precision, self.low_cost))
    }

    /// A candidate's worth, of any layer, while `running` runs. A layer's probabilities are computed once for each of
    /// its steps, by the weights of that time: candidates are many.
    fn worth_in_time(&mut self, Version { expert, precision }: Version, running: u16) -> f64 {
        let n_layers = self.layers.len() as f64;
        let Self { layers, scored, blind, low_cost, .. } = self;
        let Some(layer) = layers.get_mut(usize::from(expert.layer)) else { return 0.0 };
        let learner = if layer.is_scored() { scored } else { blind };
        let within =
            layer.probability(usize::from(expert.index), |layer, index| learner.predict(&layer.features(index)));
        let by_one = 1.0 - (1.0 - f64::from(within)).powf(1.0 / f64::from(HORIZON_TOKENS));
        let ahead = (f64::from(expert.layer) - f64::from(running)) / n_layers;
        let until_it_runs = if ahead > 0.0 { ahead } else { 1.0 + ahead };
        let tokens = 1.0 / by_one.max(1e-9) - 1.0 + until_it_runs;
        f64::from(layer.cost(expert.index, precision, *low_cost)) / tokens.max(1e-9)
    }
}

impl Policy for Learned {
    fn on_share(&mut self, _share: ShareId, members: &[Version]) {
        self.has_common |= members.windows(2).any(|pair| pair[0].expert.layer != pair[1].expert.layer);
    }

    fn on_insert(&mut self, version: Version, _now: Now) {
        self.layer(version.expert.layer).set_resident(version.expert.index, version.precision, true);
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        let keep = self.keep;
        self.step(expert.layer, now.token).on_use(expert.index, usage, &keep);
    }

    fn on_scores(&mut self, layer: u16, scores: &[f32], now: Now) {
        let keep = self.keep;
        self.step(layer, now.token).on_scores(scores, &keep);
    }

    fn on_remove(&mut self, version: Version, _now: Now) {
        self.layer(version.expert.layer).set_resident(version.expert.index, version.precision, false);
    }

    fn begin_sequence(&mut self) {
        self.layers.iter_mut().for_each(Layer::begin_sequence);
    }

    fn save(&self) -> Vec<u8> {
        let mut out = Writer::default();
        [&self.scored, &self.blind].into_iter().for_each(|learner| learner.save(&mut out));
        out.count(self.layers.len());
        self.layers.iter().for_each(|layer| layer.save(&mut out));
        out.0
    }

    fn load(&mut self, saved: &[u8]) -> bool {
        let loaded = self.loaded(&mut Cursor(saved));
        loaded.map(|loaded| *self = loaded).is_some()
    }

    fn victim(&mut self, _incoming: Version, candidates: &[Candidate], now: Now) -> usize {
        let position = if self.has_common {
            lowest(candidates, |version| self.worth_in_time(version, now.layer))
        } else {
            lowest(candidates, |version| self.worth(version))
        };
        self.on_remove(candidates[position].version, now);
        position
    }
}
