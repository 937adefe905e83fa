//! Tokens to text and back.

use ggml_sys::{llama, shim};

use super::Model;
use crate::engine::error::Error;
use crate::engine::message::{MESSAGE_BYTES, text_of};
use crate::options::Token;

impl Model {
    /// The tokens of `text`, which is UTF-8 or, as llama.cpp takes it, any bytes. `add_special` adds BOS and the like where
    /// the model wants them, `parse_special` reads special tokens written in the text.
    ///
    /// # Errors
    /// Text that the vocabulary cannot encode.
    pub fn tokenize(
        &self,
        text: impl AsRef<[u8]>,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<Token>, Error> {
        let text = text.as_ref();
        let text_len = i32::try_from(text.len()).map_err(|_| Error::Tokenize("text of 2 GiB or more".into()))?;
        let mut tokens: Vec<Token> = vec![0; text.len() + 8];
        loop {
            let capacity = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
            let mut message = [0u8; MESSAGE_BYTES];
            // SAFETY: text and tokens are valid for the lengths passed.
            let n = unsafe {
                shim::hobbit_tokenize(
                    self.vocab(),
                    text.as_ptr().cast(),
                    text_len,
                    tokens.as_mut_ptr(),
                    capacity,
                    add_special,
                    parse_special,
                    message.as_mut_ptr().cast(),
                    message.len(),
                )
            };
            match n {
                i32::MIN => return Err(Error::Tokenize(text_of(&message))),
                n if n < 0 && n.unsigned_abs() as usize > tokens.len() => tokens.resize(n.unsigned_abs() as usize, 0),
                n if n < 0 => return Err(Error::Tokenize(text_of(&message))),
                n => {
                    tokens.truncate(n as usize);
                    return Ok(tokens);
                }
            }
        }
    }

    /// The bytes a token stands for; they may be part of a UTF-8 character. `special` spells out control tokens.
    pub fn piece(&self, token: Token, special: bool) -> Vec<u8> {
        if token < 0 || token >= self.n_vocab() as Token {
            return Vec::new();
        }
        let mut piece = vec![0u8; 32];
        loop {
            // SAFETY: the token is in the vocabulary and the buffer valid for its length.
            let n = unsafe {
                llama::llama_token_to_piece(
                    self.vocab(),
                    token,
                    piece.as_mut_ptr().cast(),
                    piece.len() as i32,
                    0,
                    special,
                )
            };
            if n >= 0 {
                piece.truncate(n as usize);
                return piece;
            }
            piece.resize(n.unsigned_abs() as usize, 0);
        }
    }

    /// Number of tokens in the vocabulary.
    pub fn n_vocab(&self) -> usize {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_n_tokens(self.vocab()).max(0) as usize }
    }

    /// Whether generation ends at this token.
    pub fn is_eog(&self, token: Token) -> bool {
        // SAFETY: the vocabulary lives as long as the model; ids are compared, not used as an index.
        unsafe { llama::llama_vocab_is_eog(self.vocab(), token) }
    }

    /// Whether the model wants a BOS token before a prompt.
    pub fn adds_bos(&self) -> bool {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_get_add_bos(self.vocab()) }
    }

    pub(in crate::engine) fn vocab(&self) -> *const llama::llama_vocab {
        // SAFETY: the model is live; its vocabulary lives as long.
        unsafe { llama::llama_model_get_vocab(self.as_ptr()) }
    }
}
