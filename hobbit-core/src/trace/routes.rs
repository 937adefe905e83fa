//! Recorded routes that replace a router: a model with random weights then has the locality of a real one.
//!
//! The tokens of a trace follow each other, whatever batches they came in, and start over after the last one. A token
//! without a record of a layer (the last layer, for tokens without logits) uses the next token's route there.

use std::path::Path;
use std::sync::Arc;

use super::{LayerRecord, Record, TraceError, TraceReader};
use crate::random::SplitMix64;

/// Maximum uses of experts in a trace that is followed; each takes six bytes of memory.
const USES_MAX: usize = 64 << 20;

/// A model's layers with experts: block number, experts, experts per token.
pub type Shape = [(u16, usize, usize)];

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    layers: Vec<LayerRoutes>,
    n_tokens: usize,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct LayerRoutes {
    layer: u16,
    n_expert: usize,
    n_used: usize,
    /// Row of `chosen` and `weights` for each token; `None` only while a trace is being read.
    rows: Vec<Option<usize>>,
    /// `[n_rows][n_used]`.
    chosen: Vec<u16>,
    weights: Vec<f32>,
}

impl Routes {
    /// Reads the routes of a file, for a `model` that may have fewer layers.
    pub fn open(path: &Path, model: &Shape) -> Result<Self, TraceError> {
        let unfit = |reason: String| TraceError::Routes { path: path.to_owned(), reason };
        let mut reader = TraceReader::open(path)?;
        if model.is_empty() {
            return Err(unfit("the model has no layers with experts".into()));
        }
        let recorded = &reader.header().model.layers;
        if recorded.len() < model.len() {
            return Err(unfit(format!("{} layers were recorded, the model has {}", recorded.len(), model.len())));
        }
        let mut routes = Self::default();
        for (layer, &(number, n_expert, n_used)) in recorded.iter().zip(model) {
            let found = (usize::from(layer.n_expert), usize::from(layer.n_used));
            if found != (n_expert, n_used) {
                return Err(unfit(format!(
                    "layer {} used {} of {} experts, the model's layer {number} uses {n_used} of {n_expert}",
                    layer.layer, found.1, found.0
                )));
            }
            routes.layers.push(LayerRoutes { layer: layer.layer, n_expert, n_used, ..LayerRoutes::default() });
        }
        let (mut batch, mut n_uses) = (Vec::new(), 0);
        while let Some(record) = reader.next().transpose()? {
            match record {
                Record::Layer(layer) => {
                    n_uses += layer.chosen.len();
                    if n_uses > USES_MAX {
                        return Err(unfit(format!("more than {USES_MAX} uses of experts; record a shorter run")));
                    }
                    batch.push(layer);
                }
                Record::Batch { .. } => routes.batch(&std::mem::take(&mut batch)).map_err(unfit)?,
                _ => {}
            }
        }
        routes.fill().map_err(unfit)?;
        // From here on, layers have the model's numbers.
        routes.layers.iter_mut().zip(model).for_each(|(layer, &(number, ..))| layer.layer = number);
        Ok(routes)
    }

    /// Tokens before the routes repeat.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Adds the layers of a batch in the order they ran. A part of the batch begins where layer numbers start over.
    fn batch(&mut self, records: &[LayerRecord]) -> Result<(), String> {
        for part in records.chunk_by(|a, b| a.layer < b.layer) {
            let n_tokens = part.iter().map(|record| record.n_tokens as usize).max().unwrap_or(0);
            self.n_tokens += n_tokens;
            // Count a row per token in every layer, even if few were recorded.
            if self.n_tokens.saturating_mul(self.layers.len()) > USES_MAX {
                return Err(format!("{} tokens; record a shorter run", self.n_tokens));
            }
            if let Some(record) = part.iter().find(|record| !record.weights.iter().all(|weight| weight.is_finite())) {
                return Err(format!("a weight of layer {} is no number", record.layer));
            }
            for layer in &mut self.layers {
                layer.rows.resize(self.n_tokens, None);
                let Some(record) = part.iter().find(|record| record.layer == layer.layer) else { continue };
                if usize::from(record.n_used) != layer.n_used {
                    return Err(format!("a token used {} experts of layer {}", record.n_used, layer.layer));
                }
                // If a layer has fewer tokens, they are the last ones.
                let first = self.n_tokens - record.n_tokens as usize;
                let n_rows = layer.chosen.len() / layer.n_used;
                for (nth, row) in layer.rows[first..].iter_mut().enumerate() {
                    *row = Some(n_rows + nth);
                }
                layer.chosen.extend_from_slice(&record.chosen);
                layer.weights.extend_from_slice(&record.weights);
            }
        }
        Ok(())
    }

    /// Gives every token a route through every layer.
    fn fill(&mut self) -> Result<(), String> {
        for layer in &mut self.layers {
            let mut known = layer.rows.iter().copied().rev().find(Option::is_some).flatten();
            if known.is_none() {
                return Err(format!("it has none of layer {}", layer.layer));
            }
            for row in layer.rows.iter_mut().rev() {
                known = row.or(known);
                *row = known;
            }
        }
        Ok(())
    }

    /// A token's experts of a layer, best first, and their weights, `[n_used]` each.
    fn of(&self, layer: &LayerRoutes, token: usize) -> (Vec<u16>, Vec<f32>) {
        let row = layer.rows[token % self.n_tokens].unwrap_or(0);
        let row = row * layer.n_used..(row + 1) * layer.n_used;
        (layer.chosen[row.clone()].to_vec(), layer.weights[row].to_vec())
    }
}

/// A walk along recorded routes, one ubatch after the other.
#[derive(Clone, Debug)]
pub struct Walk {
    routes: Arc<Routes>,
    /// Share of later layers' uses that is predicted.
    recall: f64,
    /// First token and number of tokens of the running ubatch.
    ubatch: (usize, usize),
    last_layer: Option<u16>,
}

impl Walk {
    /// A walk that starts at the first token. It predicts the share `recall` (0 to 1) of later layers' experts, the
    /// same ones each time.
    pub fn new(routes: Arc<Routes>, recall: f64) -> Self {
        Self { routes, recall, ubatch: (0, 0), last_layer: None }
    }

    /// Returns to the first token.
    pub fn rewind(&mut self) {
        (self.ubatch, self.last_layer) = ((0, 0), None);
    }

    /// Enters a layer with `n_tokens` tokens; a ubatch begins if `layer` is not above the last one. Returns each
    /// token's experts, best first, and their weights; nothing for a layer without routes.
    pub fn enter(&mut self, layer: u16, n_tokens: usize) -> Vec<(Vec<u16>, Vec<f32>)> {
        if self.last_layer.is_none_or(|last| layer <= last) {
            self.ubatch = (self.ubatch.0 + self.ubatch.1, n_tokens);
        }
        self.last_layer = Some(layer);
        let Some(of_layer) = self.layer(layer) else { return Vec::new() };
        // If logits are wanted for some tokens only, the last layer has only these, usually the last ones.
        let end = self.ubatch.0 + self.ubatch.1;
        (end.saturating_sub(n_tokens)..end).map(|token| self.routes.of(of_layer, token)).collect()
    }

    /// Router scores of a layer for the ubatch's tokens: the weights of used experts, 0 for others,
    /// `[n_tokens][n_expert]`. Empty for a layer without routes.
    pub fn scores(&self, layer: u16) -> Vec<f32> {
        let Some(of_layer) = self.layer(layer) else { return Vec::new() };
        let of_token = |token: usize| {
            let (chosen, weights) = self.routes.of(of_layer, token);
            let mut scores = vec![0.0; of_layer.n_expert];
            chosen.iter().zip(weights).for_each(|(&expert, weight)| scores[usize::from(expert)] = weight);
            scores
        };
        self.tokens().flat_map(of_token).collect()
    }

    /// Scores of several layers for each of the ubatch's tokens, from a predictor with this walk's recall.
    pub fn predicted(&self, layers: &[u16]) -> Vec<Vec<(u16, Vec<f32>)>> {
        let of_layer = |token: usize, layer: u16| {
            let of_layer = self.layer(layer)?;
            let (chosen, weights) = self.routes.of(of_layer, token);
            let used: Vec<(u16, f32)> = chosen.into_iter().zip(weights).collect();
            Some((layer, foretell(&used, of_layer.n_expert, self.recall, token as u64, layer)))
        };
        self.tokens().map(|token| layers.iter().filter_map(|&layer| of_layer(token, layer)).collect()).collect()
    }

    /// The running ubatch's tokens.
    fn tokens(&self) -> std::ops::Range<usize> {
        self.ubatch.0..self.ubatch.0 + self.ubatch.1
    }

    fn layer(&self, layer: u16) -> Option<&LayerRoutes> {
        self.routes.layers.iter().find(|of_layer| of_layer.layer == layer)
    }
}

/// Scores of all experts of a layer, `[n_expert]`, from a predictor that finds the share `recall` (0 to 1) of a token's
/// uses. Each used expert is found with that probability; for one that is not found, an unused expert is named. `used`:
/// experts and weights, best first. Deterministic by token and layer.
pub(crate) fn foretell(used: &[(u16, f32)], n_expert: usize, recall: f64, token: u64, layer: u16) -> Vec<f32> {
    let mut scores = vec![0.0; n_expert];
    for (rank, &(expert, weight)) in used.iter().enumerate() {
        let dice = mixed(token, u64::from(layer), rank as u64);
        let is_found = (mixed(dice, 0, 0) >> 11) as f64 / (1u64 << 53) as f64;
        let is_used = |named: &usize| used.iter().any(|(expert, _)| usize::from(*expert) == *named);
        let is_free = |named: &usize| !is_used(named) && scores[*named] == 0.0;
        let from = dice as usize % n_expert.max(1);
        let named = if is_found < recall {
            Some(usize::from(expert)).filter(|named| *named < n_expert)
        } else {
            (from..n_expert).chain(0..from).find(is_free)
        };
        // A weight of 0 must differ from no prediction.
        if let Some(named) = named {
            scores[named] = weight.max(f32::MIN_POSITIVE);
        }
    }
    scores
}

/// Pseudo-random bits that depend only on these numbers.
fn mixed(a: u64, b: u64, c: u64) -> u64 {
    let seed = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.rotate_left(24) ^ c.rotate_left(48);
    SplitMix64::new(seed).bits()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Header, Layer, ModelDescription, Phase, TraceWriter};

    const SHAPE: [(u16, usize, usize); 2] = [(3, 16, 2), (5, 16, 2)];

    /// A prompt of two tokens, one of which ran in the second layer, and a decoded token.
    fn file(dir: &tempfile::TempDir) -> std::path::PathBuf {
        let layer = |layer| Layer { layer, n_expert: 16, n_used: 2, bytes_high: 1, slots_high: 1, ..Layer::default() };
        let model = ModelDescription { layers: vec![layer(0), layer(1)], ..ModelDescription::default() };
        let mut writer = TraceWriter::new(Vec::new(), &Header { model, ..Header::default() }).unwrap();
        type Tokens = &'static [[u16; 2]];
        let batches: [([Tokens; 2], [f32; 2], Phase); 2] = [
            ([&[[1, 2], [3, 4]], &[[5, 6]]], [0.75, 0.25], Phase::Prompt),
            ([&[[7, 8]], &[[9, 10]]], [0.5, 0.5], Phase::Decode),
        ];
        for (layers, weights, phase) in batches {
            for (number, tokens) in (0..).zip(layers) {
                let mut record = LayerRecord::new(number, 2);
                tokens.iter().for_each(|chosen| record.push_token(chosen, &weights, None, 0));
                writer.layer(&record).unwrap();
            }
            writer.batch(phase, layers[0].len() as u32, 0.0).unwrap();
        }
        let path = dir.path().join("a.trace");
        std::fs::write(&path, writer.finish().unwrap()).unwrap();
        path
    }

    fn experts(tokens: &[(Vec<u16>, Vec<f32>)]) -> Vec<u16> {
        tokens.iter().flat_map(|(chosen, _)| chosen.clone()).collect()
    }

    #[test]
    fn tokens_follow_the_recorded_routes_repeatedly() {
        let dir = tempfile::tempdir().unwrap();
        let routes = Arc::new(Routes::open(&file(&dir), &SHAPE).unwrap());
        assert_eq!(routes.n_tokens(), 3);
        let mut walk = Walk::new(routes, 1.0);
        // Two tokens, of which the last layer has only the second; then one token; then the first one again.
        assert_eq!(experts(&walk.enter(3, 2)), [1, 2, 3, 4]);
        assert_eq!(experts(&walk.enter(5, 1)), [5, 6]);
        assert_eq!(walk.enter(3, 1), [(vec![7, 8], vec![0.5, 0.5])]);
        assert_eq!(experts(&walk.enter(5, 1)), [9, 10]);
        assert_eq!(experts(&walk.enter(3, 2)), [1, 2, 3, 4]);
        // The first token was not recorded in this layer.
        assert_eq!(experts(&walk.enter(5, 2)), [5, 6, 5, 6]);
        walk.rewind();
        assert_eq!(experts(&walk.enter(3, 1)), [1, 2]);
        assert!(walk.enter(4, 1).is_empty());
    }

    #[test]
    fn the_recall_of_predictions_is_as_asked() {
        let dir = tempfile::tempdir().unwrap();
        let routes = Arc::new(Routes::open(&file(&dir), &SHAPE).unwrap());
        for (recall, least, most) in [(1.0, 600, 600), (0.8, 430, 530), (0.0, 0, 0)] {
            let mut walk = Walk::new(Arc::clone(&routes), recall);
            let mut found = 0;
            for _ in 0..300 {
                let of_token = walk.enter(3, 1);
                let scores = walk.predicted(&[5])[0][0].1.clone();
                assert_eq!(scores.iter().filter(|score| **score > 0.0).count(), 2, "of {of_token:?}");
                let used = walk.scores(5);
                found += scores.iter().zip(used).filter(|(score, used)| **score > 0.0 && *used > 0.0).count();
            }
            assert!((least..=most).contains(&found), "{found} of 600 at {recall}");
        }
    }

    #[test]
    fn other_shapes_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(&dir);
        let cases: [(&Shape, &str); 4] = [
            (&[(0, 16, 2), (1, 16, 2), (2, 16, 2)], "2 layers were recorded, the model has 3"),
            (&[(0, 16, 4)], "layer 0 used 2 of 16 experts, the model's layer 0 uses 4 of 16"),
            (&[(0, 8, 2)], "layer 0 used 2 of 16 experts"),
            (&[], "no layers with experts"),
        ];
        for (shape, expected) in cases {
            let error = Routes::open(&path, shape).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("a.trace"), "{error}");
        }
        let mut routes = Routes { layers: vec![LayerRoutes::default(); 2], n_tokens: USES_MAX / 2 };
        let mut record = LayerRecord::new(0, 2);
        record.push_token(&[1, 2], &[0.5, 0.5], None, 0);
        assert!(routes.batch(&[record.clone()]).unwrap_err().contains("record a shorter run"));
        (routes.n_tokens, record.weights[1]) = (0, f32::NAN);
        assert!(routes.batch(&[record]).unwrap_err().contains("no number"));
        // A model with fewer layers is accepted.
        assert_eq!(Routes::open(&path, &SHAPE[..1]).unwrap().n_tokens(), 3);
    }
}
