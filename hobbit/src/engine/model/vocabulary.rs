//! Special tokens of a vocabulary, and the width of its embeddings.

use ggml_sys::llama;

use super::Model;
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
    /// The vocabulary's special tokens.
    #[doc(hidden)]
    pub fn special_tokens(&self) -> SpecialTokens {
        let vocab = self.vocab();
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
    #[doc(hidden)]
    pub fn n_embd(&self) -> usize {
        // SAFETY: the model is live.
        usize::try_from(unsafe { llama::llama_model_n_embd_out(self.shared.raw.as_ptr()) }).unwrap_or(0)
    }

    /// The vocabulary's type, as llama.cpp numbers them.
    #[doc(hidden)]
    pub fn vocab_type(&self) -> u32 {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_type(self.vocab()) as u32 }
    }

    /// Whether the model is an encoder: llama.cpp evaluates its text without a causal order and generates none.
    #[doc(hidden)]
    pub fn is_encoder(&self) -> bool {
        // SAFETY: the model is live.
        unsafe {
            llama::llama_model_has_encoder(self.shared.raw.as_ptr())
                && !llama::llama_model_has_decoder(self.shared.raw.as_ptr())
        }
    }
}
