//! Counting paths.

use std::collections::HashMap;

use super::{LayerTable, PathTable, Row, pair_key, set_of};
use crate::predict::PredictShape;

/// How large a table may become. A layer has at most
/// `4 * n_expert + (n_expert + pairs_max) * (14 + 6 * next_max)` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PathLimits {
    /// Pairs of expert sets per layer; the most frequent ones stay.
    pub(super) pairs_max: usize,
    /// Experts per key; the most frequent ones stay.
    pub(super) next_max: u16,
}

impl PathLimits {
    /// A pair that was seen once adds nothing to the levels above it.
    const PAIR_TOKENS_MIN: u32 = 2;
}

impl Default for PathLimits {
    fn default() -> Self {
        Self { pairs_max: 1024, next_max: 16 }
    }
}

/// Makes a [`PathTable`] of observed tokens. Equal observations make equal tables.
///
/// While counting, at most `2 * pairs_max` pairs per layer are kept: beyond that the rarest are dropped, and would
/// start again at 0.
#[derive(Clone, Debug)]
pub struct PathTableBuilder {
    shape: PredictShape,
    pub(super) limits: PathLimits,
    layers: Vec<Counting>,
    /// Experts of the running token, by position of the layer.
    chosen: Vec<Option<Vec<u16>>>,
}

#[derive(Clone, Debug, Default)]
struct Counting {
    tokens: u32,
    popularity: Vec<u32>,
    rows: Vec<Row>,
    pairs: HashMap<u64, Row>,
}

impl PathTableBuilder {
    pub fn new(shape: PredictShape) -> Self {
        let mut n_before = 0;
        let layers = shape.layers.iter().map(|&(_, n_expert, _)| {
            let n_rows = std::mem::replace(&mut n_before, usize::from(n_expert));
            let rows = vec![Row::default(); n_rows];
            Counting { popularity: vec![0; usize::from(n_expert)], rows, ..Counting::default() }
        });
        let (layers, chosen) = (layers.collect(), vec![None; shape.layers.len()]);
        Self { layers, chosen, shape, limits: PathLimits::default() }
    }

    pub(crate) fn begin_token(&mut self) {
        self.chosen.fill(None);
    }

    /// The router of `layer` chose these. Layers come in the order in which they run; unknown layers and experts are
    /// ignored.
    pub fn observe(&mut self, layer: u16, chosen: impl IntoIterator<Item = u16>) {
        let Some(position) = self.shape.position(layer) else { return };
        let used = set_of(chosen.into_iter(), self.shape.layers[position].1);
        let counting = &mut self.layers[position];
        let last = position.checked_sub(1).and_then(|last| self.chosen[last].as_deref());
        let before = position.checked_sub(2).and_then(|before| self.chosen[before].as_deref());
        counting.tokens = counting.tokens.saturating_add(1);
        for &index in &used {
            let uses = &mut counting.popularity[usize::from(index)];
            *uses = uses.saturating_add(1);
        }
        if let Some(last) = last {
            last.iter().for_each(|&index| counting.rows[usize::from(index)].count(&used));
            if let Some(before) = before
                && self.limits.pairs_max > 0
            {
                counting.pairs.entry(pair_key(before, last)).or_default().count(&used);
                if counting.pairs.len() > 2 * self.limits.pairs_max {
                    counting.keep_most_frequent(self.limits.pairs_max);
                }
            }
        }
        self.chosen[position] = Some(used);
    }

    pub fn build(&self) -> PathTable {
        let next_max = usize::from(self.limits.next_max);
        let layers = self.layers.iter().zip(&self.shape.layers).map(|(counting, &(layer, _, k))| {
            let mut kept = counting.clone();
            kept.pairs.retain(|_, row| row.tokens >= PathLimits::PAIR_TOKENS_MIN);
            kept.keep_most_frequent(self.limits.pairs_max);
            let mut pairs: Vec<_> = kept.pairs.into_iter().map(|(key, row)| (key, row.ranked(next_max))).collect();
            pairs.sort_unstable_by_key(|(key, _)| *key);
            LayerTable {
                layer,
                k,
                tokens: kept.tokens,
                popularity: kept.popularity,
                rows: kept.rows.into_iter().map(|row| row.ranked(next_max)).collect(),
                pairs,
            }
        });
        PathTable { layers: layers.collect() }
    }
}

impl Counting {
    fn keep_most_frequent(&mut self, n: usize) {
        if self.pairs.len() <= n {
            return;
        }
        let mut ranks: Vec<(u32, u64)> = self.pairs.iter().map(|(&key, row)| (row.tokens, key)).collect();
        // Equal counts by key: hash order must not matter.
        ranks.sort_unstable_by(|a, b| b.cmp(a));
        ranks[n..].iter().for_each(|(_, key)| drop(self.pairs.remove(key)));
    }
}

impl Row {
    fn count(&mut self, used: &[u16]) {
        // A full row stops counting, so that uses never exceed tokens.
        if self.tokens == u32::MAX {
            return;
        }
        self.tokens += 1;
        for &index in used {
            match self.next.iter_mut().find(|(known, _)| *known == index) {
                Some((_, uses)) => *uses += 1,
                None => self.next.push((index, 1)),
            }
        }
    }

    /// The most used first, `n` at most.
    fn ranked(mut self, n: usize) -> Self {
        self.next.sort_unstable_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
        self.next.truncate(n);
        self
    }
}

/// Makes a [`PathTable`] of routers' choices for whole batches.
///
/// llama.cpp computes the last layer only for tokens whose logits are wanted, and a router's choice does not tell
/// which. So a layer with fewer tokens than the batch's first layer is not counted.
#[derive(Clone, Debug)]
pub struct PathBatches {
    builder: PathTableBuilder,
    /// Layers of the running batch: block number, experts per token, and choices, `[n_tokens, n_used]`.
    layers: Vec<(u16, usize, Vec<u16>)>,
}

impl PathBatches {
    pub fn new(shape: PredictShape) -> Self {
        Self { builder: PathTableBuilder::new(shape), layers: Vec::new() }
    }

    /// The router of `layer` chose `experts`, `[n_tokens, n_used]`. Layers ascend; one that does not begins the next
    /// batch.
    pub fn layer(&mut self, layer: u16, n_used: usize, experts: impl IntoIterator<Item = u16>) {
        if self.layers.last().is_some_and(|(last, ..)| *last >= layer) {
            self.end_batch();
        }
        self.layers.push((layer, n_used.max(1), experts.into_iter().collect()));
    }

    pub fn end_batch(&mut self) {
        let n_tokens = self.layers.first().map_or(0, |(_, n_used, experts)| experts.len() / n_used);
        self.layers.retain(|(_, n_used, experts)| experts.len() == n_tokens * n_used);
        for token in 0..n_tokens {
            self.builder.begin_token();
            for (layer, n_used, experts) in &self.layers {
                self.builder.observe(*layer, experts[token * n_used..(token + 1) * n_used].iter().copied());
            }
        }
        self.layers.clear();
    }

    /// The table of everything seen so far; ends the running batch.
    pub fn build(&mut self) -> PathTable {
        self.end_batch();
        self.builder.build()
    }
}
