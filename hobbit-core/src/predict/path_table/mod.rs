//! EdgeMoE's statistical predictor (section III-C1): paths through the layers are skewed, so the experts of two layers
//! predict those of the next.
//!
//! The paper's dictionary has the experts of two layers as its key. Where a token uses many of many experts, hardly any
//! key is ever seen twice. So each layer of a table has three levels, and each level is the prior of the one below
//! (Dirichlet smoothing, [`SMOOTHING`] imagined uses):
//!
//! ```text
//! popularity   p0(e) = uses of e / tokens
//! one layer    p1(e) = mean over experts i of the layer before of (c_i(e) + a * p0(e)) / (n_i + a)
//! two layers   p2(e) = (c(e) + a * p1(e)) / (n + a)                where this pair of sets is in the table
//! ```
//!
//! `n` counts the tokens that a key was seen with, `c(e)` those of them that used `e`. Tables are bounded
//! (`PathLimits`); pairs and experts beyond the bounds count as never seen.

mod builder;
mod format;

#[cfg(test)]
mod tests;

pub use builder::{PathBatches, PathTableBuilder};
pub use format::PathTableError;

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use super::{PredictShape, Predicted, Predictor, predicted, top_k};
use crate::expert::ExpertId;

/// Uses that the level above counts as.
pub(crate) const SMOOTHING: f32 = 2.0;

/// How often experts of one layer followed those of the layers before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathTable {
    /// In the order in which they run.
    layers: Vec<LayerTable>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct LayerTable {
    layer: u16,
    k: u16,
    tokens: u32,
    /// Uses by expert: `[n_expert]`, each at most `tokens`.
    popularity: Vec<u32>,
    /// By expert of the layer before; empty for the first layer.
    rows: Vec<Row>,
    /// By [`pair_key`], ascending.
    pairs: Vec<(u64, Row)>,
}

/// Uses after one key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Row {
    /// Tokens with this key.
    tokens: u32,
    /// Distinct experts and their uses by those tokens, the most used first.
    next: Vec<(u16, u32)>,
}

impl Row {
    /// Adds `weight` of this row's probabilities to `sum`; `above[e]` is the level above's.
    fn mix(&self, above: &[f32], weight: f32, sum: &mut [f32]) {
        let scale = weight / (self.tokens as f32 + SMOOTHING);
        sum.iter_mut().zip(above).for_each(|(sum, above)| *sum += scale * SMOOTHING * above);
        self.next.iter().for_each(|&(expert, uses)| sum[usize::from(expert)] += scale * uses as f32);
    }
}

/// Two sets of experts as one number; both ascend.
fn pair_key(before: &[u16], last: &[u16]) -> u64 {
    let numbers = [before.len() as u16].into_iter().chain(before.iter().chain(last).copied());
    let bytes: Vec<u8> = numbers.flat_map(u16::to_le_bytes).collect();
    xxh3_64(&bytes)
}

/// A router's choice as a set: ascending, distinct, in range.
fn set_of(chosen: impl Iterator<Item = u16>, n_expert: u16) -> Vec<u16> {
    let mut set: Vec<u16> = chosen.filter(|&index| index < n_expert).collect();
    set.sort_unstable();
    set.dedup();
    set
}

impl LayerTable {
    /// Each expert's probability; `out` is replaced by `[n_expert]`. `last` and `before` are the sets that the layers
    /// one and two before used, if known.
    fn probabilities(&self, last: Option<&[u16]>, before: Option<&[u16]>, out: &mut Vec<f32>) {
        let n_expert = self.popularity.len();
        let tokens = self.tokens.max(1) as f32;
        out.clear();
        out.extend(self.popularity.iter().map(|&uses| uses as f32 / tokens));
        let Some(last) = last else { return };
        let rows: Vec<&Row> = last.iter().filter_map(|&index| self.rows.get(usize::from(index))).collect();
        if !rows.is_empty() {
            let mut mixed = vec![0.0; n_expert];
            rows.iter().for_each(|row| row.mix(out, 1.0 / rows.len() as f32, &mut mixed));
            *out = mixed;
        }
        let Some(before) = before else { return };
        if let Ok(found) = self.pairs.binary_search_by_key(&pair_key(before, last), |(key, _)| *key) {
            let mut mixed = vec![0.0; n_expert];
            self.pairs[found].1.mix(out, 1.0, &mut mixed);
            *out = mixed;
        }
    }
}

impl PathTable {
    /// Maximum bytes of a table: beyond the table of any real model.
    pub const BYTES_MAX: u64 = 64 << 20;

    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// Block number of the last layer in the table.
    pub fn last_layer(&self) -> Option<u16> {
        self.layers.last().map(|layer| layer.layer)
    }

    /// Pairs of expert sets in the table, of all layers.
    pub fn n_pairs(&self) -> usize {
        self.layers.iter().map(|layer| layer.pairs.len()).sum()
    }

    /// Tokens of the layer that saw most.
    pub fn n_tokens(&self) -> u32 {
        self.layers.iter().map(|layer| layer.tokens).max().unwrap_or(0)
    }

    /// The experts that were used, by rising share of the tokens: the last ones are those that EdgeMoE's buffer begins
    /// with (III-C2).
    pub fn by_frequency(&self) -> Vec<ExpertId> {
        let of_layer = |table: &LayerTable| {
            let (layer, tokens) = (table.layer, f64::from(table.tokens.max(1)));
            let shares = table.popularity.iter().map(|&uses| f64::from(uses) / tokens).collect::<Vec<_>>();
            (0u16..).zip(shares).map(move |(index, share)| (share, ExpertId { layer, index }))
        };
        let mut experts: Vec<(f64, ExpertId)> = self.layers.iter().flat_map(of_layer).collect();
        experts.retain(|(share, _)| *share > 0.0);
        experts.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        experts.into_iter().map(|(_, expert)| expert).collect()
    }

    /// Checks that the table was made of a model of this shape; the error names the first difference.
    pub fn check_shape(&self, shape: &PredictShape) -> Result<(), PathTableError> {
        let differs = |what: String, found: usize, expected: usize| {
            if found == expected { Ok(()) } else { Err(PathTableError::Shape { what, found, expected }) }
        };
        differs("number of layers with experts".into(), self.layers.len(), shape.layers.len())?;
        for (table, &(layer, n_expert, k)) in self.layers.iter().zip(&shape.layers) {
            differs("block number of a layer with experts".into(), table.layer.into(), layer.into())?;
            differs(format!("experts of layer {layer}"), table.popularity.len(), n_expert.into())?;
            differs(format!("experts used per token of layer {layer}"), table.k.into(), k.into())?;
        }
        Ok(())
    }

    /// The table of a layer, if its experts and those of the layer before are as many as `shape` says.
    fn layer(&self, position: usize, shape: &PredictShape) -> Option<&LayerTable> {
        let &(layer, n_expert, _) = shape.layers.get(position)?;
        let n_before = position.checked_sub(1).map_or(0, |before| usize::from(shape.layers[before].1));
        let found = self.layers.iter().find(|table| table.layer == layer)?;
        (found.popularity.len() == usize::from(n_expert) && found.rows.len() == n_before).then_some(found)
    }
}

/// The most probable experts of the next layer by a [`PathTable`]: k, or `at_least` if that is more. Scores are
/// probabilities; those of all experts sum to k.
#[derive(Clone, Debug)]
pub(crate) struct PathPredictor {
    shape: PredictShape,
    table: Arc<PathTable>,
    at_least: usize,
    /// Experts of the running token, by position of the layer.
    chosen: Vec<Option<Vec<u16>>>,
    probabilities: Vec<f32>,
    best: Vec<u16>,
}

impl PathPredictor {
    /// Layers whose shape differs from the table's are not predicted.
    pub fn new(shape: PredictShape, table: impl Into<Arc<PathTable>>, at_least: usize) -> Self {
        let chosen = vec![None; shape.layers.len()];
        let table = table.into();
        Self { shape, table, at_least, chosen, probabilities: Vec::new(), best: Vec::new() }
    }
}

impl Predictor for PathPredictor {
    fn observe(&mut self, layer: u16, chosen: &[(u16, f32)]) {
        if let Some(position) = self.shape.position(layer) {
            let n_expert = self.shape.layers[position].1;
            self.chosen[position] = Some(set_of(chosen.iter().map(|&(index, _)| index), n_expert));
        }
    }

    fn predict(&mut self, layer: u16, distance: u8, out: &mut Vec<Predicted>) {
        // Further away, the layer before the target has not chosen yet.
        let Some(position) = self.shape.position(layer).filter(|_| distance == 1) else { return };
        let Some(&(target, _, k)) = self.shape.layers.get(position + 1) else { return };
        let Some(table) = self.table.layer(position + 1, &self.shape).filter(|table| table.tokens > 0) else { return };
        let last = self.chosen[position].as_deref();
        let before = position.checked_sub(1).and_then(|before| self.chosen[before].as_deref());
        table.probabilities(last, before, &mut self.probabilities);
        top_k(&self.probabilities, self.at_least.max(k.into()), &mut self.best);
        let probability = |&index: &u16| (index, self.probabilities[usize::from(index)]);
        out.extend(predicted(target, distance, &self.best, probability));
    }

    fn begin_token(&mut self) {
        self.chosen.fill(None);
    }

    fn begin_sequence(&mut self) {
        self.chosen.fill(None);
    }

    fn fork(&self) -> Option<Box<dyn Predictor>> {
        Some(Box::new(Self::new(self.shape.clone(), Arc::clone(&self.table), self.at_least)))
    }
}
