//! The vocabulary: tokens of a text, texts of tokens, special tokens.
//!
//! Most pre-tokenizers of llama.cpp match with `std::regex`, which recurses once per character of a match: a long word,
//! or a long run of spaces, overflows the stack of any ordinary thread. Such texts get a thread with enough stack, and
//! longer ones are refused.

use std::sync::{Mutex, PoisonError};

use ggml_sys::{llama, shim};

use super::error::TokenizeError;
use super::limits;
use super::model::Model;
use super::raw::{MESSAGE_BYTES, RawModel, text_of};
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

    /// The text of every token.
    pub(super) fn pieces(&self) -> &Pieces {
        self.shared.pieces.get_or_init(|| Pieces::new(&self.shared.raw, |token| self.is_eog(token)))
    }

    /// Number of tokens in the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.shared.raw.n_vocab()
    }

    /// Whether generation ends at this token.
    pub fn is_eog(&self, token: Token) -> bool {
        // SAFETY: the vocabulary lives as long as the model; ids are compared, not used as an index.
        unsafe { llama::llama_vocab_is_eog(self.vocab(), token) }
    }

    /// Whether a token is for templates alone: no text becomes it.
    pub fn is_control(&self, token: Token) -> bool {
        // SAFETY: the vocabulary lives as long as the model; llama.cpp is asked for tokens of the vocabulary only.
        (0..self.n_vocab() as Token).contains(&token) && unsafe { llama::llama_vocab_is_control(self.vocab(), token) }
    }

    /// Whether the model wants a BOS token before a prompt.
    pub fn adds_bos(&self) -> bool {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_get_add_bos(self.vocab()) }
    }

    pub(super) fn vocab(&self) -> *const llama::llama_vocab {
        self.shared.raw.vocab()
    }

    /// The vocabulary's special tokens.
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
    pub fn n_embd(&self) -> usize {
        // SAFETY: the model is live.
        usize::try_from(unsafe { llama::llama_model_n_embd_out(self.shared.raw.as_ptr()) }).unwrap_or(0)
    }

    /// The vocabulary's type, as llama.cpp numbers them.
    pub fn vocab_type(&self) -> u32 {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { llama::llama_vocab_type(self.vocab()) as u32 }
    }
}

/// Text of every token, control tokens included.
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// End offset of each token's text.
    ends: Vec<usize>,
    is_end: Vec<bool>,
}

impl Pieces {
    fn new(model: &RawModel, is_end: impl Fn(Token) -> bool) -> Self {
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
    pub(super) fn piece(&self, token: Token) -> &[u8] {
        let Some((at, end)) = usize::try_from(token).ok().and_then(|at| Some((at, *self.ends.get(at)?))) else {
            return &[];
        };
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..end]
    }

    /// Whether generation ends at this token.
    pub(super) fn is_end(&self, token: Token) -> bool {
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
    pub(super) fn tokenize(&self, text: &[u8], add_special: bool, parse_special: bool) -> Result<Vec<Token>, String> {
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

// The longest match of a pre-tokenizer on a text, which bounds the recursion.

/// Characters of the longest match accepted: 20 MiB of stack, and seconds with the slowest patterns.
const MATCH_MAX: usize = 64 << 10;

/// Characters that a match may have before and after those of its class: a space, a contraction.
const AROUND: usize = 8;

/// Pre-tokenizers (`tokenizer.ggml.pre`) without deep matches: llama.cpp has code instead of their patterns, or the
/// patterns match few characters.
const SHALLOW: &str = "\
    a.x-4.0 chatglm-bpe codeshell command-r dbrx deepseek-r1-qwen exaone exaone4 f2llmv2 falcon-h1 falcon3 gemma4 \
    gigachat glm4 glm5 gpt-2 granite-docling granite-embed-multi-311m grok-2 hunyuan jais jina-de jina-es \
    jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-v5-nano kimi-k2 kormo laguna lfm2 llama-bpe llama-v3 llama3 \
    megrez mellum mellum2 midm-2.0 minerva-7b mmbert modern-bert mpt olmo phi-2 pixtral qwen2 qwen35 refact \
    roberta-bpe sarvam-moe smaug-bpe smollm solar-open stablelm2 starcoder trillion";

/// Pre-tokenizers whose matches extend over characters of one class.
const BY_CLASS: &str = "\
    afmoe bailingmoe bailingmoe2 chameleon cohere2moe deepseek-coder deepseek-v3 default falcon gpt-4o \
    granite-embed-multi-97m hunyuan-dense hy_v4 jais-2 joyai-llm kanana2 llada-moe llama4 minicpm5 minimax-m2 \
    seed-coder spark2_5 talkie tekken tiny_aya ufakzeka youtu";

/// Text that one match of a pre-tokenizer's patterns may span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Matches {
    /// Characters of one class: letters, digits, spaces, or punctuation with the line breaks after it.
    Class,
    /// As [`Matches::Class`], with patterns that are tried at each character of a run and scan it to its end.
    Quadratic,
    /// Everything except white space.
    NonSpace,
    /// Letters with single spaces between them.
    Phrase,
    /// Any characters.
    Anything,
}

impl Matches {
    /// The longest matches of a pre-tokenizer (`tokenizer.ggml.pre`); `None` if none is deep.
    pub(super) fn of(pre: &str) -> Option<Self> {
        let is_in = |names: &str| names.split_whitespace().any(|name| name == pre);
        match pre {
            _ if is_in(SHALLOW) => None,
            _ if is_in(BY_CLASS) => Some(Self::Class),
            "deepseek-llm" | "superbpe" => Some(Self::Quadratic),
            "bloom" | "gpt3-finnish" | "poro-chat" | "viking" | "whitespace" => Some(Self::NonSpace),
            "exaone-moe" => Some(Self::Phrase),
            // Unknown names are newer than these lists.
            _ => Some(Self::Anything),
        }
    }

    /// Characters of the longest match accepted.
    pub(super) fn most(self) -> usize {
        if self == Self::Quadratic { MATCH_MAX >> 3 } else { MATCH_MAX }
    }

    /// The longest possible match: its start in bytes, and its maximum length in characters.
    pub(super) fn longest(self, text: &[u8]) -> (usize, usize) {
        let (mut longest, mut own) = ((0, 0), (0, 0));
        let mut before = None;
        let mut at = 0;
        for chunk in text.utf8_chunks() {
            let valid = chunk.valid().chars().map(|character| (Class::of(character), character.len_utf8()));
            // llama.cpp decodes overlong forms as the characters they encode.
            let invalid = chunk.invalid().iter().map(|_| (Class::Any, 1));
            for (class, bytes) in valid.chain(invalid) {
                if !before.is_some_and(|before| self.joins(before, class)) {
                    own = (at, 0);
                }
                own.1 += 1;
                if own.1 > longest.1 {
                    longest = own;
                }
                before = Some(class);
                at += bytes;
            }
        }
        (longest.0, longest.1 + AROUND)
    }

    /// Whether one match may continue from a character of class `a` to one of class `b`.
    fn joins(self, a: Class, b: Class) -> bool {
        use Class::{Any, Break, Letter, Punctuation, Slash, Space, Wide};
        if a == Any || b == Any {
            return true;
        }
        let is_space = |class| matches!(class, Space | Break);
        match self {
            Self::Anything => true,
            Self::NonSpace => is_space(a) == is_space(b),
            Self::Phrase if matches!((a, b), (Letter | Wide, Space) | (Space, Letter | Wide)) => true,
            Self::Class | Self::Quadratic | Self::Phrase => match (a, b) {
                // Pre-tokenizers split other scripts in different ways.
                (Wide, b) => !is_space(b) || b == Break,
                (a, Wide) => !is_space(a),
                (Punctuation | Slash, Punctuation | Slash | Break) | (Break, Slash) => true,
                (a, b) => a == b || is_space(a) && is_space(b),
            },
        }
    }
}

/// A character's class, as far as pre-tokenizers agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Letter,
    Digit,
    Space,
    /// A line break.
    Break,
    /// Grouped with line breaks by some patterns.
    Slash,
    Punctuation,
    /// Non-ASCII, except white space.
    Wide,
    /// An invalid UTF-8 byte.
    Any,
}

impl Class {
    fn of(character: char) -> Self {
        match character {
            '\r' | '\n' => Self::Break,
            _ if character.is_whitespace() => Self::Space,
            'a'..='z' | 'A'..='Z' => Self::Letter,
            '0'..='9' => Self::Digit,
            '/' => Self::Slash,
            _ if character.is_ascii() => Self::Punctuation,
            _ => Self::Wide,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_matches() {
        let longest = |pre: &str, text: &str| {
            let (start, length) = Matches::of(pre).unwrap().longest(text.as_bytes());
            (start, length - AROUND)
        };
        assert_eq!(longest("gpt-4o", "a word,  12345 and more"), (9, 5));
        assert_eq!(longest("gpt-4o", "ab \n\n  \n c"), (2, 7));
        assert_eq!(longest("gpt-4o", "x!!\n/\n/y"), (1, 6));
        assert_eq!(longest("gpt-4o", "x\n//y\n//"), (1, 3));
        assert_eq!(longest("gpt-4o", "no more 汉字。ok。"), (8, 6));
        assert_eq!(longest("bloom", "a {\"b\":1} c"), (2, 7));
        assert_eq!(longest("exaone-moe", "one, two more words."), (4, 15));
        assert_eq!(longest("of next year", "one, two"), (0, 8));
        assert_eq!(longest("gpt-4o", ""), (0, 0));
        assert_eq!(Matches::Class.longest(b"\xff\xff\xffa b"), (0, 4 + AROUND));
        assert_eq!(Matches::Class.longest(b" \xc0\xa0 \xc0\xa0"), (0, 6 + AROUND), "overlong spaces");
        assert_eq!(Matches::of("llama-bpe"), None);
    }
}
