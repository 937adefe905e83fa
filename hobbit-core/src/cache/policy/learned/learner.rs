//! The learner: logistic regression one step at a time, and habits (which experts tend to be used by the token after
//! one that used others).

use super::N_FEATURES;
use crate::cache::bytes::{Cursor, Writer};

/// Statistics of an expert at some token, each about 1 in size.
pub(super) type Features = [f32; N_FEATURES];

/// Weights by gradient ascent on the log likelihood with AdaGrad's step sizes, and a pull towards their origin.
#[derive(Clone, Debug)]
pub(super) struct Learner {
    pub(super) weights: Features,
    origin: Features,
    /// Sums of squared gradients; they begin at 1, so that the first steps are small.
    squares: Features,
    rate: f32,
    pull: f32,
}

impl Learner {
    pub(super) fn new(origin: Features, rate: f32, pull: f32) -> Self {
        Self { weights: origin, origin, squares: [1.0; N_FEATURES], rate, pull }
    }

    pub(super) fn predict(&self, features: &Features) -> f32 {
        let logit: f32 = self.weights.iter().zip(features).map(|(weight, feature)| weight * feature).sum();
        1.0 / (1.0 + (-logit).exp())
    }

    /// One step along the mean gradient of these examples: features, and whether the use came.
    pub(super) fn learn(&mut self, examples: &[(Features, bool)]) {
        if self.rate == 0.0 || examples.is_empty() {
            return;
        }
        let mut gradient = [0.0; N_FEATURES];
        for (features, came) in examples {
            let error = f32::from(*came) - self.predict(features);
            gradient.iter_mut().zip(features).for_each(|(sum, feature)| *sum += error * feature);
        }
        for (i, sum) in gradient.into_iter().enumerate() {
            let slope = sum / examples.len() as f32;
            self.squares[i] += slope * slope;
            self.weights[i] += self.rate * slope / self.squares[i].sqrt();
            self.weights[i] += self.pull * (self.origin[i] - self.weights[i]);
        }
    }

    pub(super) fn save(&self, out: &mut Writer) {
        out.f32s(&self.weights);
        out.f32s(&self.squares);
    }

    /// Reads the output of [`Learner::save`]; origin, rate and pull stay.
    pub(super) fn loaded(&self, saved: &mut Cursor) -> Option<Self> {
        let (weights, squares): (Features, Features) = (saved.f32s()?, saved.f32s()?);
        squares.iter().all(|square| *square >= 1.0).then(|| Self { weights, squares, ..self.clone() })
    }
}

// Habits

/// Layers with more experts learn nothing: their pairs would take too much memory.
const N_EXPERT_MAX: usize = 256;

/// Prior chance of a pair.
const PRESUMED: f32 = 0.125;

/// Observations that the prior counts as.
const PRIOR_TOKENS: f32 = 8.0;

/// Observations after which old ones begin to fade.
const MEMORY_TOKENS: f32 = 512.0;

#[derive(Clone, Debug, Default)]
pub(super) struct Follow {
    n_expert: usize,
    /// `[n_expert][n_expert]`: chance that a token uses the second if the one before used the first.
    chances: Vec<f32>,
    n_seen: Vec<f32>,
    /// Experts used in the running step and in the one before, if both were single tokens.
    pub(super) used: [Vec<u16>; 2],
}

pub(in super::super) fn table_bytes(n_expert: usize) -> u64 {
    let n_pairs = if n_expert > N_EXPERT_MAX { 0 } else { n_expert * n_expert };
    ((n_pairs + n_expert) * size_of::<f32>()) as u64
}

impl Follow {
    /// Learns from the running step and the one before it, of a layer with `n_expert` experts.
    pub(super) fn learn(&mut self, n_expert: usize) {
        if n_expert > N_EXPERT_MAX {
            return;
        }
        if n_expert > self.n_expert {
            self.grow(n_expert);
        }
        let n_expert = self.n_expert;
        let [now, before] = &self.used;
        for first in before.iter().map(|&first| usize::from(first)) {
            let step = 1.0 / self.n_seen[first];
            self.n_seen[first] = (self.n_seen[first] + 1.0).min(MEMORY_TOKENS);
            let row = &mut self.chances[first * n_expert..][..n_expert];
            row.iter_mut().for_each(|chance| *chance -= *chance * step);
            now.iter().for_each(|&second| row[usize::from(second)] += step);
        }
    }

    fn grow(&mut self, n_expert: usize) {
        let mut chances = vec![PRESUMED; n_expert * n_expert];
        for (row, known) in chances.chunks_mut(n_expert).zip(self.chances.chunks(self.n_expert.max(1))) {
            row[..known.len()].copy_from_slice(known);
        }
        self.chances = chances;
        self.n_seen.resize(n_expert, PRIOR_TOKENS);
        self.n_expert = n_expert;
    }

    /// The mean chance that `second` comes after one of the running step's experts; the prior if unknown.
    pub(super) fn chance(&self, second: usize) -> f32 {
        let before = &self.used[0];
        let of_first = |&first: &u16| self.chances.get(usize::from(first) * self.n_expert + second);
        if second >= self.n_expert || before.is_empty() {
            return PRESUMED;
        }
        before.iter().map(|first| of_first(first).copied().unwrap_or(PRESUMED)).sum::<f32>() / before.len() as f32
    }

    pub(super) fn save(&self, out: &mut Writer) {
        out.count(self.n_expert);
        out.f32s(&self.n_seen);
        out.f32s(&self.chances);
    }

    pub(super) fn load(saved: &mut Cursor) -> Option<Self> {
        // Each expert has at least its row's count and one chance.
        let n_expert = saved.count(8).filter(|n| *n <= N_EXPERT_MAX)?;
        let is_seen = |n: &f32| (PRIOR_TOKENS..=MEMORY_TOKENS).contains(n);
        let n_seen: Option<Vec<f32>> = (0..n_expert).map(|_| saved.f32().filter(is_seen)).collect();
        let is_chance = |chance: &f32| (0.0..=1.0).contains(chance);
        let chances: Option<Vec<f32>> = (0..n_expert * n_expert).map(|_| saved.f32().filter(is_chance)).collect();
        Some(Self { n_expert, chances: chances?, n_seen: n_seen?, ..Self::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feature 1 tells the use, feature 2 nothing.
    fn examples() -> Vec<(Features, bool)> {
        [(1.0, 1.0, true), (1.0, -1.0, true), (-1.0, 1.0, false), (-1.0, -1.0, false)]
            .map(|(telling, idle, came)| {
                let mut features = [0.0; N_FEATURES];
                (features[0], features[1], features[2]) = (1.0, telling, idle);
                (features, came)
            })
            .to_vec()
    }

    #[test]
    fn it_finds_the_feature_that_tells() {
        let mut learner = Learner::new([0.0; N_FEATURES], 0.3, 0.0);
        (0..200).for_each(|_| learner.learn(&examples()));
        let [constant, telling, idle, ..] = learner.weights;
        assert!(telling > 2.0 && idle.abs() < 0.01 && constant.abs() < 0.01, "{:?}", learner.weights);
        assert!(examples().iter().all(|(features, came)| (learner.predict(features) > 0.85) == *came));
    }

    #[test]
    fn without_examples_or_rate_nothing_moves() {
        let mut origin = [0.0; N_FEATURES];
        origin[1] = -1.0;
        let mut frozen = Learner::new(origin, 0.0, 0.5);
        frozen.learn(&examples());
        assert_eq!(frozen.weights, origin);
        let mut learner = Learner::new(origin, 0.3, 0.5);
        learner.learn(&[]);
        assert_eq!(learner.weights, origin);
        (0..1000).for_each(|_| learner.learn(&examples()));
        assert!(learner.weights[1] < 0.0, "a strong pull holds it back");
    }

    fn learn(follow: &mut Follow, n_expert: usize, before: &[u16], now: &[u16]) {
        follow.used = [now.to_vec(), before.to_vec()];
        follow.learn(n_expert);
    }

    fn chance(follow: &mut Follow, before: &[u16], second: usize) -> f32 {
        follow.used[0] = before.to_vec();
        follow.chance(second)
    }

    #[test]
    fn habits_are_learned_and_unlearned() {
        let mut follow = Follow::default();
        assert_eq!(chance(&mut follow, &[0], 1), PRESUMED);
        (0..100).for_each(|_| learn(&mut follow, 4, &[0, 2], &[1, 2]));
        assert!(chance(&mut follow, &[0], 1) > 0.9 && chance(&mut follow, &[0], 3) < 0.05);
        assert_eq!(chance(&mut follow, &[1], 3), PRESUMED, "no expert has followed 1 yet");
        assert_eq!([chance(&mut follow, &[], 1), chance(&mut follow, &[0], 9)], [PRESUMED; 2]);
        (0..2000).for_each(|_| learn(&mut follow, 4, &[0], &[3]));
        assert!(chance(&mut follow, &[0], 3) > 0.9 && chance(&mut follow, &[0], 1) < 0.05);
    }

    #[test]
    fn pairs_of_too_many_experts_are_left_alone() {
        let mut follow = Follow::default();
        learn(&mut follow, N_EXPERT_MAX + 1, &[0], &[1]);
        assert_eq!(chance(&mut follow, &[0], 1), PRESUMED);
        assert!(follow.chances.is_empty());
    }
}
