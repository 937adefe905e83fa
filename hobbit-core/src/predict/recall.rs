//! Recall and precision of predictions.

use std::collections::BTreeMap;

use super::Predicted;

/// Predictions for one layer at one distance against what its router chose. Counts experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RecallCounts {
    pub predicted: u64,
    /// Chosen by the router.
    pub used: u64,
    pub both: u64,
}

impl RecallCounts {
    /// Share of the used experts that were predicted, 0..=1; `None` without uses.
    pub fn recall(&self) -> Option<f64> {
        (self.used > 0).then(|| self.both as f64 / self.used as f64)
    }

    /// Share of the predicted experts that were used, 0..=1; `None` without predictions.
    pub fn precision(&self) -> Option<f64> {
        (self.predicted > 0).then(|| self.both as f64 / self.predicted as f64)
    }

    fn add(&mut self, other: Self) {
        self.predicted += other.predicted;
        self.used += other.used;
        self.both += other.both;
    }
}

/// Counts by layer and distance. Predictions are announced with [`Recall::expect`] and judged by [`Recall::observe`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recall {
    counts: BTreeMap<(u16, u8), RecallCounts>,
    /// Announced and not judged yet: layer, distance, experts. At most one entry for each layer and distance.
    expected: Vec<(u16, u8, Vec<u16>)>,
}

impl Recall {
    /// The layer at `distance` before `layer` predicts these of its experts. An empty prediction counts as a miss of
    /// everything. Replaces an earlier prediction for the same layer and distance.
    pub fn expect(&mut self, layer: u16, distance: u8, predicted: &[Predicted]) {
        let mut experts: Vec<u16> = Vec::with_capacity(predicted.len());
        for guess in predicted.iter().filter(|guess| guess.expert.layer == layer) {
            // Several tokens of a batch may be expected to use one expert.
            if guess.token == 0 || !experts.contains(&guess.expert.index) {
                experts.push(guess.expert.index);
            }
        }
        self.expected.retain(|(of, at, _)| (*of, *at) != (layer, distance));
        self.expected.push((layer, distance, experts));
    }

    /// The router of `layer` chose these.
    pub fn observe(&mut self, layer: u16, chosen: &[(u16, f32)]) {
        let mut expected = std::mem::take(&mut self.expected);
        expected.retain(|(of, distance, predicted)| {
            if *of != layer {
                return true;
            }
            let used: Vec<u16> = chosen.iter().map(|&(index, _)| index).collect();
            self.add(layer, *distance, predicted, &used);
            false
        });
        self.expected = expected;
    }

    /// Counts one prediction: distinct experts of `layer` predicted, and distinct ones used.
    pub fn add(&mut self, layer: u16, distance: u8, predicted: &[u16], used: &[u16]) {
        self.counts.entry((layer, distance)).or_default().add(RecallCounts {
            predicted: predicted.len() as u64,
            used: used.len() as u64,
            both: predicted.iter().filter(|index| used.contains(index)).count() as u64,
        });
    }

    /// Forgets predictions that were not judged: a token was abandoned.
    pub(crate) fn forget_expected(&mut self) {
        self.expected.clear();
    }

    pub fn get(&self, layer: u16, distance: u8) -> RecallCounts {
        self.counts.get(&(layer, distance)).copied().unwrap_or_default()
    }

    pub fn total(&self, distance: u8) -> RecallCounts {
        let mut total = RecallCounts::default();
        self.counts.iter().filter(|((_, at), _)| *at == distance).for_each(|(_, counts)| total.add(*counts));
        total
    }

    /// Layer, distance and counts, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u16, u8, RecallCounts)> {
        self.counts.iter().map(|(&(layer, distance), &counts)| (layer, distance, counts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expert::ExpertId;

    fn predicted(layer: u16, experts: &[u16]) -> Vec<Predicted> {
        let one = |&index| Predicted { expert: ExpertId { layer, index }, score: 0.5, distance: 1, token: 0 };
        experts.iter().map(one).collect()
    }

    #[test]
    fn predictions_wait_for_their_layer() {
        let mut recall = Recall::default();
        recall.expect(1, 1, &predicted(1, &[3, 5, 6]));
        recall.expect(2, 2, &predicted(2, &[0, 1]));
        recall.expect(2, 1, &[]);
        recall.observe(1, &[(5, 0.9), (7, 0.1)]);
        assert_eq!(recall.get(1, 1), RecallCounts { predicted: 3, used: 2, both: 1 });
        assert_eq!(recall.get(2, 2), RecallCounts::default());
        recall.observe(2, &[(1, 0.9), (0, 0.1)]);
        recall.observe(2, &[(1, 0.9), (0, 0.1)]);
        assert_eq!(recall.get(2, 2), RecallCounts { predicted: 2, used: 2, both: 2 });
        assert_eq!(recall.get(2, 1), RecallCounts { predicted: 0, used: 2, both: 0 });
        let near = recall.total(1);
        assert_eq!((near.recall(), near.precision()), (Some(0.25), Some(1.0 / 3.0)));
        assert_eq!((recall.total(7).recall(), recall.get(2, 1).precision()), (None, None));
        assert!(recall.iter().map(|(layer, distance, _)| (layer, distance)).eq([(1, 1), (2, 1), (2, 2)]));
    }

    #[test]
    fn a_later_prediction_replaces_an_earlier_one() {
        let mut recall = Recall::default();
        recall.expect(1, 1, &predicted(1, &[3]));
        recall.expect(1, 1, &predicted(1, &[4]));
        recall.observe(1, &[(4, 1.0)]);
        assert_eq!(recall.get(1, 1), RecallCounts { predicted: 1, used: 1, both: 1 });
        recall.expect(1, 1, &predicted(1, &[3]));
        recall.forget_expected();
        recall.observe(1, &[(4, 1.0)]);
        assert_eq!(recall.get(1, 1).used, 1);
    }
}
