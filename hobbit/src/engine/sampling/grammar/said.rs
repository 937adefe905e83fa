//! Text generated since a lazy grammar began to wait.

use std::collections::VecDeque;

use hobbit_core::options::Token;

/// Longest text, in bytes, that patterns search for a trigger. Each token makes them search all of it again, and the
/// C++ library's regular expressions recurse with the length of a match, using about 350 bytes of stack per byte.
pub(in crate::engine::sampling) const SEARCHED_BYTES_MAX: usize = 2 << 10;

/// Tokens, and their bytes, kept from the end of a text that grows too long: a trigger may have begun there.
const TAIL_TOKENS: usize = 64;
const TAIL_BYTES: usize = SEARCHED_BYTES_MAX / 2;

/// Maximum tokens of a trigger.
const TRIGGER_TOKENS: usize = 16;

#[derive(Default)]
pub(super) struct Said {
    text: Vec<u8>,
    /// Its tokens, and the start of each.
    tokens: VecDeque<(Token, usize)>,
}

impl Said {
    pub(super) fn text(&self) -> &[u8] {
        &self.text
    }

    pub(super) fn push(&mut self, token: Token, piece: &[u8]) {
        self.tokens.push_back((token, self.text.len()));
        self.text.extend_from_slice(piece);
        if self.text.len() > SEARCHED_BYTES_MAX {
            self.shorten();
        }
    }

    /// The tokens that end after `start`; the first one without the bytes before it.
    pub(super) fn since(&self, start: usize) -> Vec<(Token, &[u8])> {
        let ends = self.tokens.iter().skip(1).map(|(_, begin)| *begin).chain([self.text.len()]);
        let tokens = self.tokens.iter().zip(ends).filter(|(_, end)| *end > start);
        tokens.map(|((token, begin), end)| (*token, &self.text[start.max(*begin)..end])).collect()
    }

    /// Keeps only the last tokens, starting with one that begins with a letter, so that a pattern for the beginning of
    /// the text does not match here. A trigger in progress is not cut: that letter must be well before the end, or else
    /// any token is the first.
    fn shorten(&mut self) {
        let len = self.text.len();
        let fits = |begin: usize| len - begin <= TAIL_BYTES;
        let begins = |begin: usize| self.text.get(begin).is_some_and(u8::is_ascii_alphabetic);
        let earliest = self.tokens.len().saturating_sub(TAIL_TOKENS);
        let mut fitting =
            (earliest..).zip(self.tokens.iter().skip(earliest)).filter(|(_, (_, begin))| fits(*begin)).peekable();
        let any = fitting.peek().map_or(self.tokens.len(), |(at, _)| *at);
        let with_letter = fitting.find(|(_, (_, begin))| begins(*begin)).map(|(at, _)| at);
        let first = with_letter.filter(|at| at + TRIGGER_TOKENS <= self.tokens.len()).unwrap_or(any);
        let start = self.tokens.get(first).map_or(len, |(_, begin)| *begin);
        self.tokens.drain(..first);
        self.text.drain(..start);
        for (_, begin) in &mut self.tokens {
            *begin -= start;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_behind_a_place() {
        let mut said = Said::default();
        for (token, piece) in [(1, "ab"), (2, ""), (3, "cde"), (4, "f")] {
            said.push(token, piece.as_bytes());
        }
        assert_eq!(said.text(), b"abcdef");
        assert_eq!(said.since(3), [(3, &b"de"[..]), (4, b"f")]);
        assert_eq!(said.since(0).len(), 4);
        assert_eq!(said.since(6), []);
    }

    #[test]
    fn of_what_is_long_the_end_is_kept() {
        let mut said = Said::default();
        for n in 0..400 {
            said.push(n, b" 12 word"[..8 - 4 * (n as usize % 2)].as_ref());
            assert!(said.text.len() <= SEARCHED_BYTES_MAX);
            said.push(1000 + n, b"word");
        }
        assert!(said.text().starts_with(b"word") && said.text().ends_with(b"word"));
        assert_eq!(said.since(0).iter().map(|(_, piece)| piece.len()).sum::<usize>(), said.text().len());
        // Cut at various points within a trigger.
        for n_before in 0..40 {
            let mut said = Said::default();
            for n in 0..SEARCHED_BYTES_MAX as Token - n_before {
                said.push(n, b"1");
            }
            for piece in ["<", "tool", "_", "call", ">"] {
                said.push(9, piece.as_bytes());
            }
            assert!(said.text().ends_with(b"<tool_call>"), "{n_before}");
        }
        said.push(7, &[b' '; 5000]);
        assert!(said.text().is_empty() && said.tokens.is_empty());
    }
}
