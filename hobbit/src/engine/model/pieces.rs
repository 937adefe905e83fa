//! The texts of all tokens, for code that needs every one at once.

use crate::engine::raw::RawModel;
use hobbit_core::options::Token;

/// Text of every token, control tokens included.
pub(in crate::engine) struct Pieces {
    bytes: Vec<u8>,
    /// End offset of each token's text.
    ends: Vec<usize>,
    is_end: Vec<bool>,
}

impl Pieces {
    pub(super) fn new(model: &RawModel, is_end: impl Fn(Token) -> bool) -> Self {
        let tokens = 0..model.n_vocab() as Token;
        let mut bytes = Vec::new();
        let mut ends = Vec::with_capacity(tokens.len());
        for token in tokens.clone() {
            bytes.extend_from_slice(&model.piece(token, true));
            ends.push(bytes.len());
        }
        Self { bytes, ends, is_end: tokens.map(is_end).collect() }
    }

    /// Empty for an id outside the vocabulary.
    pub(in crate::engine) fn piece(&self, token: Token) -> &[u8] {
        let Some((at, end)) = usize::try_from(token).ok().and_then(|at| Some((at, *self.ends.get(at)?))) else {
            return &[];
        };
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..end]
    }

    /// Whether generation ends at this token.
    pub(in crate::engine) fn is_end(&self, token: Token) -> bool {
        usize::try_from(token).is_ok_and(|at| self.is_end.get(at) == Some(&true))
    }
}
