//! What a predictor must know of a model.

/// The layers with experts, in the order in which they run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PredictShape {
    /// Block number, experts, experts used per token; block numbers ascend.
    pub layers: Vec<(u16, u16, u16)>,
}

impl PredictShape {
    /// How many layers with experts run before this one; `None` for a layer without.
    pub fn position(&self, layer: u16) -> Option<usize> {
        self.layers.iter().position(|&(own, ..)| own == layer)
    }

    /// The entry of the layer at `distance` from `layer`; `None` beyond the last one, and at distance 0.
    pub fn target(&self, layer: u16, distance: u8) -> Option<(u16, u16, u16)> {
        if distance == 0 {
            return None;
        }
        self.layers.get(self.position(layer)? + usize::from(distance)).copied()
    }
}
