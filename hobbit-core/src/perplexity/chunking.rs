//! Division of a text into chunks of one context each. Only tokens of a chunk's second half are scored, so that each
//! has some context.

use std::ops::Range;

/// Tokens of a chunk of `n_ctx` that are scored.
pub const fn n_scored(n_ctx: usize) -> usize {
    n_ctx.saturating_sub(1 + n_ctx / 2)
}

/// Chunks of one context each, evaluated in batches and computed in ubatches. All numbers but `n_chunk` are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunking {
    pub n_ctx: usize,
    pub n_batch: usize,
    pub n_ubatch: usize,
    pub n_chunk: usize,
}

/// Tokens that are computed at once: the same positions of neighbouring chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub chunks: Range<usize>,
    pub positions: Range<usize>,
}

impl Piece {
    /// Chunk and position of each token, chunk after chunk.
    pub fn places(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let positions = self.positions.clone();
        self.chunks.clone().flat_map(move |chunk| positions.clone().map(move |position| (chunk, position)))
    }
}

impl Chunking {
    /// Chunks that fit in a batch and are evaluated together, as sequences.
    pub fn n_seq(&self) -> usize {
        (self.n_batch / self.n_ctx).max(1)
    }

    /// First position whose logits are wanted.
    pub fn first(&self) -> usize {
        self.n_ctx / 2
    }

    /// Whether the logits of this position predict a token that is scored. A chunk's last token predicts nothing.
    pub fn is_scored(&self, position: usize) -> bool {
        (self.first()..self.n_ctx - 1).contains(&position)
    }

    /// Chunks that are evaluated together, in order.
    pub fn passes(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (n_seq, n_chunk) = (self.n_seq(), self.n_chunk);
        (0..n_chunk).step_by(n_seq).map(move |chunk| chunk..(chunk + n_seq).min(n_chunk))
    }

    /// The ubatches of a pass, as llama.cpp cuts its batches: equally many tokens of each sequence.
    pub fn pieces(&self, pass: Range<usize>) -> Vec<Piece> {
        let n_seq = pass.len().max(1);
        // A ubatch too small for all sequences takes one after the other.
        let (group, positions) = match self.n_ubatch / n_seq {
            0 => (1, self.n_ubatch),
            positions => (n_seq, positions),
        };
        let mut pieces = Vec::new();
        for first in pass.clone().step_by(group) {
            for batch in (0..self.n_ctx).step_by(self.n_batch.min(self.n_ctx)) {
                let end = (batch + self.n_batch).min(self.n_ctx);
                pieces.extend((batch..end).step_by(positions).map(|start| Piece {
                    chunks: first..(first + group).min(pass.end),
                    positions: start..(start + positions).min(end),
                }));
            }
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn windows(n_ctx: usize, n_batch: usize, n_ubatch: usize, n_chunk: usize) -> Chunking {
        Chunking { n_ctx, n_batch, n_ubatch, n_chunk }
    }

    #[test]
    fn the_second_half_is_scored() {
        let w = windows(512, 2048, 512, 9);
        assert_eq!((w.n_seq(), w.first(), n_scored(512)), (4, 256, 255));
        assert_eq!((0..512).filter(|&position| w.is_scored(position)).count(), n_scored(512));
        for n_ctx in 1..20 {
            let w = windows(n_ctx, 1, 1, 1);
            assert_eq!((0..n_ctx).filter(|&position| w.is_scored(position)).count(), n_scored(n_ctx), "{n_ctx}");
        }
        assert_eq!(w.passes().collect::<Vec<_>>(), [0..4, 4..8, 8..9]);
    }

    #[test]
    fn sequences_share_a_ubatch_equally() {
        let w = windows(512, 2048, 512, 9);
        let pieces = w.pieces(0..4);
        assert_eq!(pieces.len(), 4);
        assert_eq!(pieces[1], Piece { chunks: 0..4, positions: 128..256 });
        assert_eq!(w.pieces(8..9), [Piece { chunks: 8..9, positions: 0..512 }]);
        assert_eq!(w.pieces(0..3)[0], Piece { chunks: 0..3, positions: 0..170 });
    }

    #[test]
    fn every_token_is_computed_once_after_its_context() {
        for (n_ctx, n_batch, n_ubatch) in [(8, 32, 5), (8, 3, 2), (8, 16, 64), (5, 5, 1), (7, 1, 9)] {
            let w = windows(n_ctx, n_batch, n_ubatch, 5);
            let mut seen = HashSet::new();
            for piece in w.passes().flat_map(|pass| w.pieces(pass)) {
                assert!(piece.places().count() <= n_ubatch);
                for (chunk, position) in piece.places() {
                    assert!(position == 0 || seen.contains(&(chunk, position - 1)), "{w:?} {piece:?}");
                    assert!(seen.insert((chunk, position)), "{w:?} {piece:?}");
                }
            }
            assert_eq!(seen.len(), 5 * n_ctx);
        }
    }
}
