//! From batches, in which a layer shows all tokens at once, to the tokens that a builder counts.

use super::{PathTable, PathTableBuilder};

/// Makes a [`PathTable`] of what routers chose for whole batches.
///
/// llama.cpp computes the last layer only for tokens whose logits are wanted. Which these are a router's choice does not
/// say, so of a batch where a layer has fewer tokens than the first one, that layer is not counted.
#[derive(Clone, Debug)]
pub struct PathBatches {
    builder: PathTableBuilder,
    /// Of the running batch: block number, experts per token, and what was chosen, `[n_tokens, n_used]`.
    layers: Vec<(u16, usize, Vec<u16>)>,
}

impl PathBatches {
    /// Adds to what `builder` has counted.
    pub fn new(builder: PathTableBuilder) -> Self {
        Self { builder, layers: Vec::new() }
    }

    /// The router of `layer` chose `experts`, `[n_tokens, n_used]`. Layers come in the order in which they run; one that is
    /// not behind the last one begins the next batch.
    pub fn layer(&mut self, layer: u16, n_used: usize, experts: impl IntoIterator<Item = u16>) {
        if self.layers.last().is_some_and(|(last, ..)| *last >= layer) {
            self.end_batch();
        }
        self.layers.push((layer, n_used.max(1), experts.into_iter().collect()));
    }

    /// The batch is over.
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
