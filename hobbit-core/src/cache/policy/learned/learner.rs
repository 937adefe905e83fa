//! Logistic regression, one step at a time.

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
}
