//! A byte-level BPE vocabulary that tokenises any text: 256 byte tokens, then merged pseudo-words made of frequent
//! English letters, then the control tokens of ChatML.

use std::collections::{HashMap, HashSet};

/// Bytes and control tokens.
pub const TOKENS_MIN: u32 = 256 + CONTROL.len() as u32;
/// As many as the letter combinations yield.
pub const TOKENS_MAX: u32 = 400_000;

const CONTROL: [&str; 4] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"];

/// `tokenizer.ggml.token_type`: normal.
const NORMAL: i32 = 1;
/// `tokenizer.ggml.token_type`: control.
const CONTROL_TYPE: i32 = 3;

/// ChatML, as llama.cpp recognises it without a template engine.
pub(super) const CHAT_TEMPLATE: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + \
    message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\n' }}{% endif %}";

/// Frequent words, each also with a leading space.
const WORDS: &[&str] = &[
    "the", "of", "and", "to", "in", "that", "is", "was", "he", "for", "it", "with", "as", "his", "on", "be", "at",
    "by", "had", "not", "are", "but", "from", "or", "have", "an", "they", "which", "one", "you", "were", "her", "all",
    "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will", "more", "no", "if", "out",
    "so", "said", "what", "up", "its", "about", "into", "than", "them", "can", "only", "other", "new", "some", "could",
    "time", "these", "two", "may", "then", "do", "first", "any", "my", "now", "such", "like", "our", "over", "man",
    "me", "even", "most", "made", "after", "also", "did", "many", "before", "must", "through", "back", "years",
    "where", "much", "your", "way", "well", "down", "should", "because", "each", "just", "those", "people", "how",
    "too", "little", "state", "good", "very", "make", "world", "still", "own", "see", "men", "work", "long", "get",
    "here", "between", "both", "life", "being", "under", "never", "day", "same", "another", "know", "while", "last",
];

/// Letters by frequency in English text.
const LETTERS: &str = "etaoinshrdlucmfwypvbgkjqxz";

/// Vocabulary as the GGUF keys want it.
pub(super) struct Vocab {
    pub tokens: Vec<String>,
    pub types: Vec<i32>,
    pub merges: Vec<String>,
    pub end_of_text: u32,
    pub im_end: u32,
    pub pad: u32,
}

impl Vocab {
    /// `size` tokens, `TOKENS_MIN..=TOKENS_MAX`.
    pub(super) fn new(size: u32) -> Vocab {
        let mut builder = Builder::bytes(size as usize - CONTROL.len());
        for word in WORDS {
            builder.add_word(word);
            builder.add_word(&format!("{SPACE}{word}"));
        }
        let letters: Vec<String> = LETTERS.chars().map(String::from).collect();
        for letter in &letters {
            builder.add(&SPACE.to_string(), letter);
        }
        let pairs: Vec<String> = letters.iter().flat_map(|a| letters.iter().map(move |b| format!("{a}{b}"))).collect();
        for pair in &pairs {
            builder.add(&pair[..1], &pair[1..]);
        }
        for pair in &pairs {
            builder.add(&SPACE.to_string(), pair);
        }
        for pair in &pairs {
            for letter in &letters {
                builder.add(pair, letter);
            }
        }
        for first in &pairs {
            for second in &pairs {
                builder.add(first, second);
            }
        }
        builder.finish()
    }
}

/// How byte-level BPE writes a space.
const SPACE: char = '\u{120}';

struct Builder {
    /// Tokens, at the most.
    limit: usize,
    tokens: Vec<String>,
    known: HashSet<String>,
    merges: Vec<String>,
}

impl Builder {
    /// The 256 bytes in GPT-2's printable spelling.
    fn bytes(limit: usize) -> Builder {
        let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let mut shifted = 256;
        let tokens: Vec<String> = (0..256)
            .map(|byte| {
                let code = if printable(byte) { byte } else { shifted };
                shifted += u32::from(!printable(byte));
                char::from_u32(code).expect("below the surrogates").to_string()
            })
            .collect();
        Builder { limit, known: tokens.iter().cloned().collect(), tokens, merges: Vec::new() }
    }

    /// Adds `left` + `right`, both of which are tokens already, unless it is known. Once the limit is reached nothing
    /// is added, so parts may be missing, too.
    fn add(&mut self, left: &str, right: &str) {
        if self.tokens.len() >= self.limit {
            return;
        }
        debug_assert!(self.known.contains(left) && self.known.contains(right), "{left} {right}");
        let token = format!("{left}{right}");
        if self.known.insert(token.clone()) {
            self.merges.push(format!("{left} {right}"));
            self.tokens.push(token);
        }
    }

    /// Adds every beginning of `word` and `word`, as far as the limit permits.
    fn add_word(&mut self, word: &str) {
        for (end, letter) in word.char_indices().skip(1) {
            if self.known.contains(&word[..end]) {
                self.add(&word[..end], &word[end..end + letter.len_utf8()]);
            }
        }
    }

    fn finish(mut self) -> Vocab {
        let mut types = vec![NORMAL; self.tokens.len()];
        let mut ids = HashMap::new();
        for control in CONTROL {
            ids.insert(control, self.tokens.len() as u32);
            self.tokens.push(control.to_owned());
            types.push(CONTROL_TYPE);
        }
        Vocab {
            types,
            merges: self.merges,
            end_of_text: ids[CONTROL[0]],
            im_end: ids[CONTROL[2]],
            pad: ids[CONTROL[3]],
            tokens: self.tokens,
        }
    }
}
