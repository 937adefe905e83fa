//! What a layer used for the token before, it often uses again.

use super::{PredictShape, Predicted, Predictor};
use crate::expert::ExpertId;

/// The experts of the same layer at the token before. A score is the router weight it had there.
#[derive(Clone, Debug)]
pub struct Previous {
    shape: PredictShape,
    /// By position of the layer.
    chosen: Vec<Vec<(u16, f32)>>,
}

impl Previous {
    /// Nothing is known before the second token.
    pub fn new(shape: PredictShape) -> Self {
        let chosen = vec![Vec::new(); shape.layers.len()];
        Self { shape, chosen }
    }
}

impl Predictor for Previous {
    fn observe(&mut self, layer: u16, chosen: &[(u16, f32)]) {
        let Some(position) = self.shape.position(layer) else { return };
        let n_expert = self.shape.layers[position].1;
        let kept = &mut self.chosen[position];
        kept.clear();
        kept.extend(chosen.iter().filter(|(index, weight)| *index < n_expert && !weight.is_nan()));
    }

    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>) {
        let Some((target, ..)) = self.shape.target(layer, distance) else { return };
        // Later layers of the running token have not been observed: this is the token before.
        let position = self.shape.position(target);
        let chosen = position.map_or(&[][..], |position| &self.chosen[position]);
        out.extend(chosen.iter().map(|&(index, weight)| Predicted {
            expert: ExpertId { layer: target, index },
            score: weight.clamp(0.0, 1.0),
            distance,
        }));
    }

    fn begin_sequence(&mut self) {
        self.chosen.iter_mut().for_each(Vec::clear);
    }
}
