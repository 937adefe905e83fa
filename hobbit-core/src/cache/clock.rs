//! The policies' clock: tokens of the sequence, however many are evaluated at once.

/// Counts a sequence's tokens. A batch comes in ubatches, each of which goes through all layers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TokenClock {
    /// Tokens before the running batch, and before its running ubatch.
    before_batch: u64,
    before_part: u64,
    /// Tokens of the running ubatch: the maximum of its layers, because the last layer may see only those whose logits
    /// are wanted.
    n_tokens: u32,
    /// The layer of the running ubatch that has chosen last.
    layer: Option<u16>,
}

impl TokenClock {
    /// A batch that was not ended does not count.
    pub(super) fn begin_batch(&mut self) {
        *self = Self { before_batch: self.before_batch, before_part: self.before_batch, n_tokens: 0, layer: None };
    }

    /// The router of a layer has chosen. Layers of a ubatch ascend: one that does not begins the next ubatch.
    pub(super) fn begin_layer(&mut self, layer: u16, n_tokens: u32) {
        if self.layer.is_some_and(|before| layer <= before) {
            self.before_part += u64::from(self.n_tokens);
            self.n_tokens = 0;
        }
        (self.layer, self.n_tokens) = (Some(layer), self.n_tokens.max(n_tokens));
    }

    pub(super) fn end_batch(&mut self, n_tokens: u32) {
        self.before_batch += u64::from(n_tokens);
        self.begin_batch();
    }

    /// Tokens of the sequence before the last one of the running ubatch; between two batches, all of them.
    pub(super) fn token(&self) -> u64 {
        self.before_part + u64::from(self.n_tokens.saturating_sub(1))
    }

    /// Tokens of the running ubatch, at least one.
    pub(super) fn n_tokens(&self) -> u32 {
        self.n_tokens.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_counts_all_of_its_tokens_part_by_part() {
        let mut clock = TokenClock::default();
        clock.end_batch(10);
        clock.begin_batch();
        let mut seen = Vec::new();
        // In the second ubatch the last layer sees only the token whose logits are wanted.
        for (layer, n_tokens) in [(0, 4), (1, 4), (2, 4), (0, 3), (1, 3), (2, 1)] {
            clock.begin_layer(layer, n_tokens);
            seen.push(clock.token());
        }
        assert_eq!(seen, [13, 13, 13, 16, 16, 16]);
        clock.end_batch(7);
        assert_eq!(clock.token(), 17);
        // A batch that failed.
        clock.begin_batch();
        [0, 1, 0].into_iter().for_each(|layer| clock.begin_layer(layer, 4));
        assert_eq!(clock.token(), 24);
        clock.begin_batch();
        assert_eq!((clock.token(), clock.n_tokens()), (17, 1));
    }
}
