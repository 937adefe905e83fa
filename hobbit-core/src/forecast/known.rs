//! Recorded curves of models, with their sources.
//!
//! 128 experts: two recordings of real models published by the project BigMoeOnEdge (docs/bench-data, Apache-2.0). They
//! are short: an expert used for the first time would have been used before, had the recording begun earlier. So a
//! first use counts as a censored observation (Kaplan and Meier's estimator on LRU's distances), and replays give the
//! part of LRU's misses that the default policy and the optimum save. 8 experts: the bundled demo model on three texts.
//! 64 experts: a model with random weights. The last two are from `benches/results/*/policies-demo.json`; a test
//! compares them.

use super::locality::Locality;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Known {
    pub name: &'static str,
    pub n_expert: u16,
    pub n_used: u16,
    /// Share of slots, hit rate with the default policy, hit rate of the optimum, which knows the future.
    pub points: &'static [(f64, f64, f64)],
}

#[rustfmt::skip]
pub const TRAINED: [Known; 5] = [
    Known { name: "demo-prose-eval", n_expert: 8, n_used: 2, points: &[
        (0.25, 0.3651, 0.3651), (0.375, 0.5360, 0.6101), (0.5, 0.6729, 0.7542), (0.625, 0.7878, 0.8537),
        (0.75, 0.8823, 0.9247)] },
    Known { name: "demo-code-eval", n_expert: 8, n_used: 2, points: &[
        (0.25, 0.4392, 0.4392), (0.375, 0.6107, 0.6694), (0.5, 0.7286, 0.7947), (0.625, 0.8189, 0.8766),
        (0.75, 0.8902, 0.9337)] },
    Known { name: "demo-chat", n_expert: 8, n_used: 2, points: &[
        (0.25, 0.3989, 0.3989), (0.375, 0.5596, 0.6351), (0.5, 0.6803, 0.7700), (0.625, 0.7834, 0.8608),
        (0.75, 0.8708, 0.9248)] },
    Known { name: "Qwen3-30B-A3B", n_expert: 128, n_used: 6, points: &[
        (0.03, 0.2111, 0.2111), (0.05, 0.3922, 0.4061), (0.08, 0.5380, 0.6250), (0.12, 0.6431, 0.7533),
        (0.18, 0.7464, 0.8511), (0.25, 0.8207, 0.9141),
        (0.32, 0.8823, 0.9516), (0.4, 0.9305, 0.9798), (0.5, 0.9646, 0.9942), (0.62, 0.9752, 0.9942),
        (0.75, 0.9903, 0.9942), (0.87, 0.9963, 0.9963)] },
    Known { name: "gpt-oss-120b", n_expert: 128, n_used: 2, points: &[
        (0.03, 0.3386, 0.4798), (0.05, 0.4459, 0.6233), (0.08, 0.5435, 0.7208), (0.12, 0.6359, 0.8041),
        (0.18, 0.7075, 0.8439), (0.25, 0.7760, 0.8842),
        (0.32, 0.8431, 0.9210), (0.4, 0.8990, 0.9581), (0.5, 0.9162, 0.9798), (0.62, 0.9340, 0.9798),
        (0.75, 0.9533, 0.9798), (0.87, 0.9757, 0.9798)] },
];

/// Models with random weights, as used by benchmarks: their routers know no topics. The first is from the runs of the
/// Mixtral shape (`benches/results/*/prove/curve.jsonl`; its optimum is unknown), the other was replayed.
#[rustfmt::skip]
pub(crate) const UNTRAINED: [Known; 2] = [
    Known { name: "mixtral-bench, 8 layers", n_expert: 8, n_used: 2, points: &[
        (0.0625, 0.084, 1.0), (0.141, 0.191, 1.0), (0.234, 0.293, 1.0), (0.406, 0.594, 1.0), (0.578, 0.768, 1.0)] },
    Known { name: "syn-prose-eval", n_expert: 64, n_used: 8, points: &[
        (0.25, 0.6032, 0.6860), (0.375, 0.7591, 0.8327), (0.5, 0.8553, 0.9097), (0.625, 0.9182, 0.9533),
        (0.75, 0.9587, 0.9784)] },
];

impl Known {
    pub fn locality(&self) -> Locality {
        Locality::new(self.points.iter().map(|(share, hit, _)| (*share, *hit)))
    }

    /// Hit rates of the optimum, the upper bound of all policies.
    pub fn optimum(&self) -> Locality {
        Locality::new(self.points.iter().map(|(share, _, hit)| (*share, *hit)))
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Expectation {
    /// Minimum of the recorded curves.
    pub low: Locality,
    /// Mean of the recorded curves.
    pub expected: Locality,
    /// Maximum of the recorded curves.
    pub high: Locality,
    /// Mean of the optima.
    pub optimum: Locality,
}

impl Expectation {
    /// Expectation for trained models with `n_expert` experts per layer: interpolated in the logarithm between recorded
    /// numbers of experts, the nearest recording beyond them.
    pub fn of(n_expert: u16) -> Self {
        Self::among(&TRAINED, n_expert)
    }

    /// Hit rates of models with random weights.
    pub fn untrained(n_expert: u16) -> Self {
        Self::among(&UNTRAINED, n_expert)
    }

    fn among(known: &[Known], n_expert: u16) -> Self {
        let mut counts: Vec<u16> = known.iter().map(|known| known.n_expert).collect();
        counts.dedup();
        let after = counts.partition_point(|count| *count < n_expert).min(counts.len() - 1);
        let before = after.saturating_sub(usize::from(counts[after] > n_expert));
        let log = |n: u16| f64::from(n.max(1)).log2();
        let part = if before == after {
            0.0
        } else {
            (log(n_expert) - log(counts[before])) / (log(counts[after]) - log(counts[before]))
        };
        let between = |curve: fn(&Known) -> Locality, pick: fn(&[f64]) -> f64| {
            let at = |count: u16| {
                let curves: Vec<Locality> = known.iter().filter(|known| known.n_expert == count).map(curve).collect();
                Locality::of_several(&curves.iter().collect::<Vec<_>>(), pick)
            };
            at(counts[before]).towards(&at(counts[after]), part)
        };
        let mean = |hits: &[f64]| hits.iter().sum::<f64>() / hits.len().max(1) as f64;
        Self {
            low: between(Known::locality, |hits| hits.iter().copied().fold(1.0, f64::min)),
            expected: between(Known::locality, mean),
            high: between(Known::locality, |hits| hits.iter().copied().fold(0.0, f64::max)),
            optimum: between(Known::optimum, mean),
        }
    }
}
