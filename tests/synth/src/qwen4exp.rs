//! Sizes of `qwen4exp` (Qwen3.8-Flash-Next) that other architectures have not.

use anyhow::ensure;

use super::arch::Dim;
use super::arch_sparse::INDEX_WIDTH;
use super::format::Format;
use super::spec::Sizes;

/// Start from [`Qwen4Exp::default`], a small one; `head_dim` and the like are fields of [`super::Spec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Qwen4Exp {
    /// Heads of queries and keys in layers with a recurrent state, a divisor of `value_heads`.
    pub key_heads: u32,
    /// Heads of values in these layers.
    pub value_heads: u32,
    /// Width of these heads; `None`: as in attention.
    pub state_width: Option<u32>,
    /// Numbers of a head that are rotated, at most the width of the indexer's heads, 128; `None`: as many as that
    /// allows.
    pub rotated: Option<u32>,
    /// Rank of the matrices that mix the residual streams.
    pub stream_rank: u32,
    /// Heads of the indexer.
    pub index_heads: u32,
    /// Tokens that the indexer chooses, a multiple of 4.
    pub index_budget: u32,
    /// Tokens of the longest n-gram that has an embedding: 2 or 3.
    pub ngram: u32,
    /// Hashes of each n-gram. Each takes a row of the table; these rows side by side have the width of the residual
    /// stream.
    pub ngram_heads: u32,
    /// Rows of the table for each hash; `None`: two for each token of the vocabulary.
    pub ngram_rows: Option<u32>,
    /// Format of the table; `None`: that of other matrices.
    pub ngram_type: Option<Format>,
}

/// Qwen3.8-Flash-Next's `ple.layer_multipliers`.
pub(super) const NGRAM_FACTORS: [u64; 3] = [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071];
/// llama.cpp: LLAMA_MAX_PLE_HEADS.
const NGRAM_HEADS_MAX: u64 = 64;

impl Default for Qwen4Exp {
    /// A small one.
    fn default() -> Self {
        Self {
            key_heads: 2,
            value_heads: 4,
            state_width: None,
            rotated: None,
            stream_rank: 32,
            index_heads: 2,
            index_budget: 8,
            ngram: 2,
            ngram_heads: 1,
            ngram_rows: None,
            ngram_type: None,
        }
    }
}

impl Qwen4Exp {
    /// Heads of the table of n-grams, of all lengths from 2.
    pub(super) fn heads(&self) -> u64 {
        u64::from(self.ngram.saturating_sub(1)) * u64::from(self.ngram_heads)
    }

    pub(super) fn check(&self, sizes: &Sizes) -> anyhow::Result<()> {
        let (heads, embd) = (self.heads(), sizes.embd);
        let is_range = |name, number, least, most| {
            ensure!((least..=most).contains(&number), "qwen4exp: {name} {number}: expected {least} to {most}");
            Ok(())
        };
        is_range("ngram", self.ngram.into(), 2, NGRAM_FACTORS.len() as u64)?;
        is_range("ngram_heads", self.ngram_heads.into(), 1, NGRAM_HEADS_MAX / (u64::from(self.ngram) - 1))?;
        ensure!(embd.is_multiple_of(heads), "qwen4exp: {heads} heads of n-grams: expected a divisor of {embd}");
        is_range("rows of n-grams", sizes.of(Dim::NGramRows), heads, i32::MAX as u64)?;
        is_range("state_width", sizes.state_width, 32, 1024)?;
        let rotated = sizes.of(Dim::Rotated);
        is_range("rotated", rotated, 8, sizes.head_dim.min(INDEX_WIDTH.into()))?;
        ensure!(rotated.is_multiple_of(2), "qwen4exp: rotated {rotated}: expected an even number");
        is_range("key_heads", self.key_heads.into(), 1, 1024)?;
        is_range("value_heads", self.value_heads.into(), 1, 1024)?;
        ensure!(
            self.value_heads.is_multiple_of(self.key_heads),
            "qwen4exp: key_heads {}: expected a divisor of {}",
            self.key_heads,
            self.value_heads
        );
        is_range("stream_rank", self.stream_rank.into(), 1, 1 << 17)?;
        is_range("index_heads", self.index_heads.into(), 1, 1024)?;
        is_range("index_budget", self.index_budget.into(), 4, 1 << 24)?;
        ensure!(self.index_budget.is_multiple_of(4), "qwen4exp: index_budget: expected a multiple of 4");
        Ok(())
    }
}
