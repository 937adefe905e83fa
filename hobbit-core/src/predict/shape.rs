//! What a predictor must know of a model.

use crate::gguf::{ExpertMap, Gguf};

/// The layers with experts, in the order in which they run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PredictShape {
    /// Block number, experts, experts used per token; block numbers ascend.
    pub layers: Vec<(u16, u16, u16)>,
}

impl PredictShape {
    /// Layers as block number and experts, in the order in which they run; `n_used` experts per token, or all of a layer
    /// that has fewer.
    pub fn new(layers: impl IntoIterator<Item = (u16, u16)>, n_used: u32) -> Self {
        let n_used = u16::try_from(n_used).unwrap_or(u16::MAX);
        let layers = layers.into_iter().map(|(layer, n_expert)| (layer, n_expert, n_used.min(n_expert).max(1)));
        Self { layers: layers.collect() }
    }

    /// The layers of a model whose table ends with block `last_layer`, to judge by its header alone. What lies behind is for
    /// multi-token prediction, and does not run; without `last_layer`, every layer with experts.
    pub fn of_header(gguf: &Gguf, experts: &ExpertMap, last_layer: Option<u16>) -> Self {
        let used = gguf.metadata.get_u64(&format!("{}.expert_used_count", gguf.architecture())).unwrap_or(0);
        let layers = experts.layers.iter().filter(|layer| last_layer.is_none_or(|last| layer.layer <= last));
        let layers = layers.map(|layer| (layer.layer, u16::try_from(layer.n_expert).unwrap_or(u16::MAX)));
        Self::new(layers, u32::try_from(used).unwrap_or(u32::MAX))
    }

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
