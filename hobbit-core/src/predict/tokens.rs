//! Predictors by the uses of whole tokens: the previous token, or this one, which only the simulator knows. Also routes
//! by the token alone.

use super::{PredictShape, Predicted, Predictor, predicted};
use crate::gguf::{Gguf, TensorInfo};

/// Predicts that a layer uses the experts of the previous token again. A score is the router weight there.
#[derive(Clone, Debug)]
pub struct Previous {
    shape: PredictShape,
    /// By position of the layer.
    chosen: Vec<Vec<(u16, f32)>>,
}

impl Previous {
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
        out.extend(predicted(target, distance, chosen, |chosen| *chosen));
    }

    fn begin_sequence(&mut self) {
        self.chosen.iter_mut().for_each(Vec::clear);
    }

    fn fork(&self) -> Option<Box<dyn Predictor>> {
        Some(Box::new(Self::new(self.shape.clone())))
    }
}

/// Uses of one token: by layer, experts and their router weights in falling order.
pub type FutureToken = Vec<(u16, Vec<(u16, f32)>)>;

/// Predicts a trace's own uses, to measure the worth of a perfect predictor. [`Predictor::begin_token`] takes the next
/// batch of tokens.
#[derive(Clone, Debug)]
pub struct Oracle<I> {
    shape: PredictShape,
    future: I,
    tokens: Vec<FutureToken>,
}

impl<I: Iterator<Item = Vec<FutureToken>> + Send> Oracle<I> {
    /// `future` gives the tokens of each batch in order; after its end nothing is predicted.
    pub fn new(shape: PredictShape, future: I) -> Self {
        Self { shape, future, tokens: Vec::new() }
    }
}

impl<I: Iterator<Item = Vec<FutureToken>> + Send> Predictor for Oracle<I> {
    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>) {
        let Some((target, n_expert, _)) = self.shape.target(layer, distance) else { return };
        for (token, layers) in (0..).zip(&self.tokens) {
            let Some((_, chosen)) = layers.iter().find(|(layer, _)| *layer == target) else { continue };
            let chosen = chosen.iter().filter(|(index, _)| *index < n_expert);
            let of_token = predicted(target, distance, chosen, |chosen| *chosen);
            out.extend(of_token.map(|predicted| Predicted { token, ..predicted }));
        }
    }

    fn begin_token(&mut self) {
        self.tokens = self.future.next().unwrap_or_default();
    }
}

/// Experts of layers that route by the token alone (hash routing): a table for each such layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenRoutes {
    /// In the order in which they run.
    layers: Vec<OfLayer>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct OfLayer {
    layer: u16,
    n_used: usize,
    /// `[n_vocab][n_used]`.
    experts: Vec<u16>,
}

impl TokenRoutes {
    /// Maximum bytes of a layer's table in a file: 16 experts of each of 256 thousand tokens.
    const BYTES_MAX: u64 = 16 << 20;

    /// The table of a layer in a model's file, `[n_vocab][n_used]`; `None` if the layer has none, or one of another
    /// form.
    pub fn table(gguf: &Gguf, layer: u16) -> Option<&TensorInfo> {
        let table = gguf.tensor(&format!("blk.{layer}.ffn_gate_tid2eid.weight"))?;
        let is_known = table.dtype.name() == "i32" && table.dims.len() == 2 && table.dims[0] > 0;
        (is_known && table.extent.len <= Self::BYTES_MAX).then_some(table)
    }

    /// Bytes of the tables of `layers` in memory.
    pub fn bytes(gguf: &Gguf, layers: impl Iterator<Item = u16>) -> u64 {
        layers.filter_map(|layer| Self::table(gguf, layer)).map(|table| table.extent.len / 2).sum()
    }

    /// Adds a layer behind the others, with the bytes of its [`TokenRoutes::table`] of `n_used` experts per token.
    pub fn add(&mut self, layer: u16, n_used: usize, bytes: &[u8]) {
        let experts = bytes.as_chunks().0.iter().map(|id| u16::try_from(i32::from_le_bytes(*id)).unwrap_or(u16::MAX));
        self.layers.push(OfLayer { layer, n_used, experts: experts.collect() });
    }

    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Experts that a batch of tokens will use, layer by layer, each once. Unknown tokens use none.
    pub fn of(&self, tokens: &[i32]) -> impl Iterator<Item = (u16, u16)> {
        self.layers.iter().flat_map(|own| {
            let mut used: Vec<u16> = Vec::new();
            let row = |&token: &i32| own.experts.chunks_exact(own.n_used.max(1)).nth(usize::try_from(token).ok()?);
            for expert in tokens.iter().filter_map(row).flatten() {
                if !used.contains(expert) {
                    used.push(*expert);
                }
            }
            used.into_iter().map(|expert| (own.layer, expert))
        })
    }
}
