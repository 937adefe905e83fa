//! SMoE's score eviction (section IV-B, equation 3).

use super::{Candidate, Now, Policy, Use, lowest};
use crate::expert::{ExpertId, Version};
use std::collections::{BTreeMap, VecDeque};

/// Evicts the lowest mean router score over the last `n` tokens, whether they selected the expert or not; among equals
/// the least recently used. For tokens that were evaluated at once only their mean is known: it counts for as many of
/// them as are among the last `n`. The paper's shield for the running layer's experts is the cache's pin.
///
/// If a token's scores are unknown, the weights of its chosen experts are its scores; other experts score 0.
#[derive(Clone, Debug)]
pub struct Smoe {
    n_tokens: usize,
    layers: BTreeMap<u16, Window>,
}

/// The last tokens' scores of one layer, oldest first.
#[derive(Clone, Debug, Default)]
struct Window {
    rows: VecDeque<Row>,
    /// The token that [`Policy::on_scores`] told scores of, and the token whose weights are the last row.
    scored: Option<u64>,
    weighed: Option<u64>,
}

/// Scores by expert index; those beyond the end are 0.
#[derive(Clone, Debug, Default)]
struct Row {
    scores: Vec<f32>,
    /// Divisor for the mean of one token: a batch's weights sum to its tokens.
    total: f32,
}

impl Row {
    /// Tokens whose mean it is.
    fn n_tokens(&self) -> usize {
        // Weights that a trace has rounded sum to about that.
        self.total.round().max(1.0) as usize
    }
}

impl Smoe {
    /// The paper does not give its `n`; it shows that scores tell the next three tokens.
    pub const N_TOKENS: usize = 8;

    /// Tokens of the means, at least one.
    pub fn new(n_tokens: usize) -> Self {
        Self { n_tokens: n_tokens.max(1), layers: BTreeMap::new() }
    }

    fn mean(&self, expert: ExpertId) -> f64 {
        let Some(window) = self.layers.get(&expert.layer) else { return 0.0 };
        let score = |row: &Row| row.scores.get(usize::from(expert.index)).map_or(0.0, |score| score / row.total);
        let mut too_old = window.n_tokens().saturating_sub(self.n_tokens);
        let (mut sum, mut n_tokens) = (0.0, 0);
        for row in &window.rows {
            let n_left_out = row.n_tokens().min(too_old);
            too_old -= n_left_out;
            let n = row.n_tokens() - n_left_out;
            n_tokens += n;
            let score = f64::from(score(row));
            if score.is_finite() {
                sum += score * n as f64;
            }
        }
        sum / n_tokens.max(1) as f64
    }
}

impl Default for Smoe {
    fn default() -> Self {
        Self::new(Self::N_TOKENS)
    }
}

impl Window {
    fn n_tokens(&self) -> usize {
        self.rows.iter().map(Row::n_tokens).sum()
    }

    /// A new row. Drops the rows that the new one, of at least one token, pushes out of the last `n_tokens`, and reuses
    /// their memory.
    fn next_row(&mut self, n_tokens: usize) -> &mut Row {
        let mut row = Row::default();
        let mut n = self.n_tokens() + 1;
        while let Some(oldest) = self.rows.front().filter(|oldest| n - oldest.n_tokens() >= n_tokens) {
            n -= oldest.n_tokens();
            row = self.rows.pop_front().unwrap_or_default();
        }
        row.scores.clear();
        row.total = 0.0;
        self.rows.push_back(row);
        self.rows.back_mut().expect("just pushed")
    }
}

impl Policy for Smoe {
    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now) {
        let window = self.layers.entry(expert.layer).or_default();
        if window.scored == Some(now.token) || !usage.weight.is_finite() {
            return;
        }
        if window.weighed != Some(now.token) {
            window.weighed = Some(now.token);
            window.next_row(self.n_tokens);
        }
        let row = window.rows.back_mut().expect("this token's row");
        let index = usize::from(expert.index);
        row.scores.resize(row.scores.len().max(index + 1), 0.0);
        row.scores[index] += usage.weight;
        row.total += usage.weight;
    }

    fn on_scores(&mut self, layer: u16, scores: &[f32], now: Now) {
        let window = self.layers.entry(layer).or_default();
        window.scored = Some(now.token);
        let row = window.next_row(self.n_tokens);
        row.scores.extend_from_slice(scores);
        row.total = 1.0;
    }

    fn begin_sequence(&mut self) {
        for window in self.layers.values_mut() {
            (window.scored, window.weighed) = (None, None);
        }
    }

    fn victim(&mut self, _incoming: Version, candidates: &[Candidate], _now: Now) -> usize {
        lowest(candidates, |version| self.mean(version.expert))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::tests::scripts::{Aged, aged, at, high, insert, token, used, victim_of};
    use crate::expert::Precision;

    #[test]
    fn the_lowest_mean_goes_even_if_it_was_selected() {
        let mut smoe = aged(Smoe::new(2));
        insert(&mut smoe, &[0, 1, 2]);
        smoe.on_scores(3, &[0.1, 0.3, 0.6], at(0));
        smoe.on_scores(3, &[0.4, 0.3, 0.3], at(1));
        token(&mut smoe, 1, &[0]);
        assert_eq!(victim_of(&mut smoe, &[0, 1, 2]), 0);
        assert_eq!(smoe.mean(high(2).expert), f64::midpoint(f64::from(0.6f32), f64::from(0.3f32)));
        smoe.on_scores(3, &[0.4, 0.2, 0.4], at(2));
        assert_eq!(victim_of(&mut smoe, &[0, 1, 2]), 1, "the first token fell out");
        smoe.on_scores(4, &[0.0, 1.0, 0.0], at(2));
        assert_eq!(victim_of(&mut smoe, &[0, 1, 2]), 1, "another layer's");
    }

    #[test]
    fn without_scores_the_weights_of_the_chosen_count() {
        let mut smoe = aged(Smoe::new(3));
        insert(&mut smoe, &[0, 1, 2]);
        let weigh = |smoe: &mut Aged<Smoe>, index: u16, weight: f32, time| {
            smoe.on_use(high(index).expert, Use { weight, ..used(Precision::High) }, at(time));
        };
        for (index, weight) in [(0, 0.3), (1, 0.7)] {
            weigh(&mut smoe, index, weight, 0);
        }
        // A batch of eight tokens fills the last three.
        for (index, weight) in [(0, 4.0), (1, 1.0), (2, 3.0)] {
            weigh(&mut smoe, index, weight, 1);
        }
        let means = [0, 1, 2].map(|index| (smoe.mean(high(index).expert) * 1000.0).round());
        assert_eq!(means, [500.0, 125.0, 375.0]);
        assert_eq!(victim_of(&mut smoe, &[0, 1, 2]), 1);
        // Token 2 has scores: its weights are not counted again.
        smoe.on_scores(3, &[0.0, 0.0, 1.0], at(2));
        weigh(&mut smoe, 0, 1.0, 2);
        assert_eq!(smoe.mean(high(0).expert), 1.0 / 3.0, "two tokens of the batch are among the last three");
        assert_eq!(victim_of(&mut smoe, &[0, 1, 2]), 1);
        // Token 0 of another sequence is not the one that was known.
        smoe.on_scores(3, &[0.0, 1.0, 0.0], at(0));
        smoe.begin_sequence();
        weigh(&mut smoe, 2, 1.0, 0);
        assert_eq!(smoe.layers[&3].rows.len(), 3);
        assert_eq!(smoe.mean(high(2).expert), 2.0 / 3.0);
    }

    #[test]
    fn nan_scores_are_ignored() {
        let mut smoe = aged(Smoe::default());
        insert(&mut smoe, &[0, 1]);
        smoe.on_scores(3, &[f32::NAN, 0.1], at(0));
        smoe.on_use(high(0).expert, Use { weight: f32::NAN, ..used(Precision::High) }, at(1));
        smoe.on_use(high(0).expert, Use { weight: 0.0, ..used(Precision::High) }, at(2));
        assert_eq!(victim_of(&mut smoe, &[1, 0]), 0);
    }
}
