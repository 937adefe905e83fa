//! The longest match of a pre-tokenizer on a text, which bounds the recursion of `std::regex`.

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
pub(crate) enum Matches {
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
    pub(crate) fn of(pre: &str) -> Option<Self> {
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
    pub(crate) fn most(self) -> usize {
        if self == Self::Quadratic { MATCH_MAX >> 3 } else { MATCH_MAX }
    }

    /// The longest possible match: its start in bytes, and its maximum length in characters.
    pub(crate) fn longest(self, text: &[u8]) -> (usize, usize) {
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
