//! The vocabulary: tokens of a text, texts of tokens.
//!
//! Most pre-tokenizers of llama.cpp match with `std::regex`, which recurses once per character of a match: a long word,
//! or a long run of spaces, overflows the stack of any ordinary thread. Such texts get a thread with enough stack, and
//! longer ones are refused.

use std::sync::{Mutex, PoisonError};

use ggml_sys::shim;

use crate::engine::ggml::limits;
use crate::engine::ggml::raw::{MESSAGE_BYTES, RawModel, text_of};
use hobbit_core::options::Token;

/// Text of every token, control tokens included.
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    /// End offset of each token's text.
    ends: Vec<usize>,
    is_end: Vec<bool>,
}

impl Pieces {
    pub(crate) fn new(model: &RawModel, is_end: impl Fn(Token) -> bool) -> Self {
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
    pub(crate) fn piece(&self, token: Token) -> &[u8] {
        let Some((at, end)) = usize::try_from(token).ok().and_then(|at| Some((at, *self.ends.get(at)?))) else {
            return &[];
        };
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..end]
    }

    /// Whether generation ends at this token.
    pub(crate) fn is_end(&self, token: Token) -> bool {
        usize::try_from(token).is_ok_and(|at| self.is_end.get(at) == Some(&true))
    }
}

// Tokenising with enough stack.

/// Stack per character of a match, in bytes. GCC 12's `std::regex` uses 321 with each of the pre-tokenizers; other
/// compilers and sanitizers may use more.
const BYTES_PER_CHAR: usize = 1024;

/// Deep texts are tokenised one after another: no budget counts the memory of their stacks.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

impl RawModel {
    /// The tokens of a text. `add_special` adds BOS and the like where the model wants them, `parse_special` recognises
    /// special tokens written in the text.
    ///
    /// # Errors
    /// The reason why the vocabulary cannot encode the text.
    pub(crate) fn tokenize(&self, text: &[u8], add_special: bool, parse_special: bool) -> Result<Vec<Token>, String> {
        let encode = || self.encode(text, add_special, parse_special);
        let Some(matches) = self.matches else { return encode() };
        let (start, length) = matches.longest(text);
        let most = matches.most();
        if length > most {
            return Err(format!(
                "the text has {length} characters from byte {start} on without a break, and this model's tokenizer \
                 takes at most {most}: divide them by spaces, line breaks or other characters"
            ));
        }
        let bytes = length * BYTES_PER_CHAR;
        let _turn = (bytes > limits::ANY_THREAD).then(|| ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner));
        limits::with_stack(bytes, encode)?
    }

    fn encode(&self, text: &[u8], add_special: bool, parse_special: bool) -> Result<Vec<Token>, String> {
        let text_len = i32::try_from(text.len()).map_err(|_| "text of 2 GiB or more".to_owned())?;
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
            let wanted = n.unsigned_abs() as usize;
            match n {
                0.. => {
                    tokens.truncate(wanted);
                    return Ok(tokens);
                }
                // A negative result is the required size.
                _ if n > i32::MIN && wanted > tokens.len() => tokens.resize(wanted, 0),
                _ => return Err(text_of(&message)),
            }
        }
    }
}
