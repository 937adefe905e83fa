//! What configurations lose, learned from some that were measured.

use rand_mt::Mt;

/// Hidden units.
const HIDDEN: usize = 16;
/// Steps over all samples.
const STEPS: u32 = 3000;
/// Adam's.
const RATE: f64 = 0.01;
const DECAY: [f64; 2] = [0.9, 0.999];
/// By so much weights shrink: a few hundred samples tell little of many layers.
const SHRINK: f64 = 1e-3;
/// What a loss counts at the least, in nats: logarithms are learned.
const LOSS_MIN: f64 = 1e-6;

/// A small network of two layers (SwapMoE, section 3.4.2), from experts by layer to the logarithm of the loss.
#[derive(Clone, Debug)]
pub struct Regressor {
    n_inputs: usize,
    /// `HIDDEN` rows of the inputs' weights and a bias, then the output's weights and bias.
    weights: Vec<f64>,
    /// Mean and deviation of inputs, then of the output.
    scales: Vec<(f64, f64)>,
}

impl Regressor {
    /// Learns from configurations, experts by layer, and what they were measured to lose, nats. Of equal samples the same. `None`
    /// for no samples, or configurations of different lengths.
    pub fn learn(samples: &[(Vec<u16>, f64)]) -> Option<Self> {
        let n_inputs = samples.first()?.0.len();
        if samples.iter().any(|(own, loss)| own.len() != n_inputs || !loss.is_finite()) {
            return None;
        }
        let column = |at: usize| samples.iter().map(move |(own, _)| f64::from(own[at])).collect::<Vec<_>>();
        let losses: Vec<f64> = samples.iter().map(|(_, loss)| loss.max(LOSS_MIN).ln()).collect();
        let mut scales: Vec<(f64, f64)> = (0..n_inputs).map(|at| scale(&column(at))).collect();
        scales.push(scale(&losses));
        let mut mt = Mt::new(1);
        let spread = 1.0 / (n_inputs.max(1) as f64).sqrt();
        let mut by_chance = |_| (f64::from(mt.next_u32()) / f64::from(u32::MAX) - 0.5) * 2.0 * spread;
        let weights = (0..HIDDEN * (n_inputs + 2) + 1).map(&mut by_chance).collect();
        let mut own = Self { n_inputs, weights, scales };
        let inputs: Vec<Vec<f64>> = samples.iter().map(|(experts, _)| own.inputs(experts)).collect();
        let (mean, deviation) = own.scales[n_inputs];
        let wanted: Vec<f64> = losses.iter().map(|loss| (loss - mean) / deviation).collect();
        own.fit(&inputs, &wanted);
        Some(own)
    }

    /// Expected loss, nats.
    pub fn loss(&self, experts: &[u16]) -> f64 {
        let (mean, deviation) = self.scales[self.n_inputs];
        let (output, _) = self.forward(&self.inputs(experts));
        (output * deviation + mean).exp()
    }

    fn inputs(&self, experts: &[u16]) -> Vec<f64> {
        experts.iter().zip(&self.scales).map(|(n, (mean, deviation))| (f64::from(*n) - mean) / deviation).collect()
    }

    /// The output, and what the hidden units say.
    fn forward(&self, inputs: &[f64]) -> (f64, [f64; HIDDEN]) {
        let width = self.n_inputs + 1;
        let mut hidden = [0.0; HIDDEN];
        for (unit, row) in hidden.iter_mut().zip(self.weights.chunks_exact(width)) {
            let sum: f64 = row.iter().zip(inputs).map(|(weight, x)| weight * x).sum();
            *unit = (sum + row[self.n_inputs]).tanh();
        }
        let output = &self.weights[HIDDEN * width..];
        let sum: f64 = hidden.iter().zip(output).map(|(unit, weight)| unit * weight).sum();
        (sum + output[HIDDEN], hidden)
    }

    /// Least squares, by Adam over all samples at once.
    fn fit(&mut self, inputs: &[Vec<f64>], wanted: &[f64]) {
        let (width, n) = (self.n_inputs + 1, self.weights.len());
        let (mut first, mut second) = (vec![0.0; n], vec![0.0; n]);
        for step in 1..=STEPS {
            let mut slopes: Vec<f64> = self.weights.iter().map(|weight| SHRINK * weight).collect();
            for (x, wanted) in inputs.iter().zip(wanted) {
                let (found, hidden) = self.forward(x);
                let error = (found - wanted) / inputs.len() as f64;
                for (unit, says) in hidden.iter().enumerate() {
                    let output = HIDDEN * width + unit;
                    slopes[output] += error * says;
                    let back = error * self.weights[output] * (1.0 - says * says);
                    let row = &mut slopes[unit * width..(unit + 1) * width];
                    row.iter_mut().zip(x).for_each(|(slope, x)| *slope += back * x);
                    row[self.n_inputs] += back;
                }
                slopes[n - 1] += error;
            }
            let unbiased = DECAY.map(|decay| 1.0 - decay.powi(step as i32));
            for ((weight, slope), (m, v)) in self.weights.iter_mut().zip(slopes).zip(first.iter_mut().zip(&mut second))
            {
                *m = DECAY[0] * *m + (1.0 - DECAY[0]) * slope;
                *v = DECAY[1] * *v + (1.0 - DECAY[1]) * slope * slope;
                *weight -= RATE * (*m / unbiased[0]) / ((*v / unbiased[1]).sqrt() + 1e-8);
            }
        }
    }
}

/// Mean and deviation; 1 where all are equal.
fn scale(values: &[f64]) -> (f64, f64) {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / n).sqrt();
    (mean, if deviation > 0.0 { deviation } else { 1.0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::spearman;

    #[test]
    fn what_was_not_measured_is_told_from_what_was() {
        let mut mt = Mt::new(3);
        let mut any = || (0..6).map(|_| 2 + (mt.next_u32() % 15) as u16).collect::<Vec<u16>>();
        let loss =
            |own: &[u16]| (0..6).map(|at| f64::from(at + 1) * (-f64::from(own[at as usize]) / 5.0).exp()).sum::<f64>();
        let samples: Vec<(Vec<u16>, f64)> = (0..200).map(|_| any()).map(|own| (own.clone(), loss(&own))).collect();
        let regressor = Regressor::learn(&samples).unwrap();
        let others: Vec<Vec<u16>> = (0..100).map(|_| any()).collect();
        let expected: Vec<f64> = others.iter().map(|own| loss(own)).collect();
        let found: Vec<f64> = others.iter().map(|own| regressor.loss(own)).collect();
        assert!(spearman(&expected, &found).unwrap() > 0.95, "{:?}", spearman(&expected, &found));
        let far = expected.iter().zip(&found).map(|(a, b)| (a / b).ln().abs()).fold(0.0, f64::max);
        assert!(far < 0.5, "{far}");
    }

    #[test]
    fn nothing_is_learned_of_nothing() {
        assert!(Regressor::learn(&[]).is_none());
        assert!(Regressor::learn(&[(vec![1], 0.1), (vec![1, 2], 0.1)]).is_none());
        assert!(Regressor::learn(&[(vec![1], f64::NAN)]).is_none());
        let one = Regressor::learn(&[(vec![4, 4], 0.0), (vec![4, 4], 0.0)]).unwrap();
        assert!(one.loss(&[4, 4]).is_finite());
    }
}
