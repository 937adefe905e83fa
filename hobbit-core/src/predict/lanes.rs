//! The tokens of a decode batch, each with a predictor of its own.

use super::{Predicted, Predictor};

/// One predictor per position of the batch; they are made as batches become wider. As long as sequences keep their positions,
/// each predictor sees the tokens of one sequence.
///
/// As a [`Predictor`] it predicts what any token of the batch will use: the predictions of each token, one token after the other.
pub struct Lanes {
    lanes: Vec<Box<dyn Predictor>>,
    /// Tokens of the running batch.
    n_tokens: usize,
}

impl Lanes {
    /// For batches of any width; `first` predicts for the first token.
    pub fn new(first: Box<dyn Predictor>) -> Self {
        Self { lanes: vec![first], n_tokens: 1 }
    }

    /// A batch of so many tokens begins.
    pub fn begin_batch(&mut self, n_tokens: usize) {
        self.set_width(n_tokens);
        self.running().for_each(|lane| lane.begin_token());
    }

    /// The running layer has so many tokens: a batch may come in parts.
    pub fn set_width(&mut self, n_tokens: usize) {
        self.n_tokens = n_tokens.max(1);
        while self.lanes.len() < self.n_tokens {
            let Some(lane) = self.lanes[0].fork() else { return };
            self.lanes.push(lane);
        }
    }

    /// The predictor of a token of the batch; `None` where the first one knows all of them.
    pub fn of_token(&mut self, token: usize) -> Option<&mut dyn Predictor> {
        match self.lanes.get_mut(token) {
            Some(lane) => Some(&mut **lane),
            None => None,
        }
    }

    fn running(&mut self) -> impl Iterator<Item = &mut Box<dyn Predictor>> {
        self.lanes.iter_mut().take(self.n_tokens)
    }
}

impl Predictor for Lanes {
    fn needs_scores(&self) -> bool {
        self.lanes[0].needs_scores()
    }

    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>) {
        for (token, lane) in (0..).zip(self.running()) {
            let before = out.len();
            lane.predict(layer, distance, out);
            if token > 0 {
                out[before..].iter_mut().for_each(|predicted| predicted.token = token);
            }
        }
    }

    fn begin_sequence(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.begin_sequence());
    }
}
