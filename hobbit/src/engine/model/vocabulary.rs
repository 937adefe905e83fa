//! A model's vocabulary: tokens of a text, texts of tokens, special tokens.

use ggml_sys::llama;

use super::Model;
use crate::engine::error::TokenizeError;
use hobbit_core::options::Token;

/// Tokens with a meaning of their own; `None` where the vocabulary has no such token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Beginning of a text.
    pub bos: Option<Token>,
    /// End of a text.
    pub eos: Option<Token>,
    /// End of a turn.
    pub eot: Option<Token>,
    /// Between two texts.
    pub sep: Option<Token>,
    /// Fill in the middle: before the prefix.
    pub fim_prefix: Option<Token>,
    /// Before the suffix.
    pub fim_suffix: Option<Token>,
    /// Before the text to be filled in.
    pub fim_middle: Option<Token>,
    /// Before a repository's name.
    pub fim_repository: Option<Token>,
    /// Before a file's name.
    pub fim_separator: Option<Token>,
}

impl Model {
    /// The tokens of `text`, which is UTF-8 or, as llama.cpp accepts, any bytes. `add_special` adds BOS and the like
    /// where the model wants them, `parse_special` recognises special tokens written in the text.
    ///
    /// # Errors
    /// Text that the vocabulary cannot encode.
    pub fn tokenize(
        &self,
        text: impl AsRef<[u8]>,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<Token>, TokenizeError> {
        self.shared.raw.tokenize(text.as_ref(), add_special, parse_special).map_err(TokenizeError)
    }

    /// The bytes a token stands for; they may be part of a UTF-8 character. `special` spells out control tokens.
    pub fn piece(&self, token: Token, special: bool) -> Vec<u8> {
        self.shared.raw.piece(token, special)
    }

    /// Number of tokens in the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.shared.raw.n_vocab()
    }

    /// Whether generation ends at this token.
    pub fn is_eog(&self, token: Token) -> bool {
        // SAFETY: the vocabulary lives as long as the model; ids are compared, not used as an index.
        unsafe { llama::llama_vocab_is_eog(self.shared.raw.vocab(), token) }
    }

    /// Whether a token is for templates alone: no text becomes it.
    pub fn is_control(&self, token: Token) -> bool {
        // SAFETY: the vocabulary lives as long as the model; llama.cpp is asked for tokens of the vocabulary only.
        (0..self.n_vocab() as Token).contains(&token)
            && unsafe { llama::llama_vocab_is_control(self.shared.raw.vocab(), token) }
    }

    /// Whether the model wants a BOS token before a prompt.
    pub fn adds_bos(&self) -> bool {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_get_add_bos(self.shared.raw.vocab()) }
    }

    /// The vocabulary's special tokens.
    pub fn special_tokens(&self) -> SpecialTokens {
        let vocab = self.shared.raw.vocab();
        let some = |token: Token| (token >= 0).then_some(token);
        // SAFETY: the vocabulary lives as long as the model.
        unsafe {
            SpecialTokens {
                bos: some(llama::llama_vocab_bos(vocab)),
                eos: some(llama::llama_vocab_eos(vocab)),
                eot: some(llama::llama_vocab_eot(vocab)),
                sep: some(llama::llama_vocab_sep(vocab)),
                fim_prefix: some(llama::llama_vocab_fim_pre(vocab)),
                fim_suffix: some(llama::llama_vocab_fim_suf(vocab)),
                fim_middle: some(llama::llama_vocab_fim_mid(vocab)),
                fim_repository: some(llama::llama_vocab_fim_rep(vocab)),
                fim_separator: some(llama::llama_vocab_fim_sep(vocab)),
            }
        }
    }

    /// Values per embedding.
    pub fn n_embd(&self) -> usize {
        // SAFETY: the model is live.
        usize::try_from(unsafe { llama::llama_model_n_embd_out(self.shared.raw.as_ptr()) }).unwrap_or(0)
    }

    /// The vocabulary's type, as llama.cpp numbers them.
    pub fn vocab_type(&self) -> u32 {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_type(self.shared.raw.vocab()) as u32 }
    }
}
