//! Predictions for several layers, up to the first one with misses (HOBBIT, section 3.3), and for several tokens.

use super::{Predicted, Predictor};

/// Predictions for the next layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ahead {
    /// All experts predicted for the layers looked at, nearest layer first: not to be evicted meanwhile.
    pub predicted: Vec<Predicted>,
    /// Missing experts of the last layer looked at, best first: to be loaded. Layers before it have no misses.
    pub wanted: Vec<Predicted>,
    /// Layers looked at.
    pub depth: u8,
}

impl Ahead {
    /// The predictions for one layer, best first.
    pub fn of_layer(&self, layer: u16) -> impl Iterator<Item = &Predicted> {
        self.predicted.iter().filter(move |predicted| predicted.expert.layer == layer)
    }
}

/// Looks at the layers behind `layer`, one after the other and at most `p_max`, until one has misses or nothing is
/// predicted. `missing` gets the predictions for one layer, best first, and appends those to load, in the same order.
pub fn ahead(
    predictor: &mut dyn Predictor,
    layer: u16,
    p_max: u8,
    missing: &mut dyn FnMut(&[Predicted], &mut Vec<Predicted>),
) -> Ahead {
    let mut ahead = Ahead::default();
    for distance in 1..=p_max {
        let before = ahead.predicted.len();
        predictor.predict(layer, distance, &mut ahead.predicted);
        if ahead.predicted.len() == before {
            break;
        }
        ahead.depth = distance;
        missing(&ahead.predicted[before..], &mut ahead.wanted);
        if !ahead.wanted.is_empty() {
            break;
        }
    }
    ahead
}

/// One predictor per position of a decode batch, made as batches become wider. While sequences keep their positions,
/// each predictor sees the tokens of one sequence. As a [`Predictor`] it lists the predictions of all tokens, one
/// token after the other.
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
