//! How far to look: to the first layer with misses (HOBBIT, section 3.3).

use super::{Predicted, Predictor};

/// What the next layers are expected to use.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ahead {
    /// All experts predicted for the layers looked at, nearest layer first: not to be evicted meanwhile.
    pub predicted: Vec<Predicted>,
    /// Those of the last layer looked at that are missing, best first: to be loaded. Layers before it have no misses.
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
