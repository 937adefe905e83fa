//! Turns tokens into text that may be shown: complete characters, and no part of a stop text.

use hobbit_programs::text::{StopMatcher, Utf8Decoder};

/// The text of one generation.
#[derive(Debug)]
pub struct Text {
    decoder: Utf8Decoder,
    matcher: StopMatcher,
    /// Byte offset at which each token's text begins, for tokens whose text may still be held back.
    starts: Vec<usize>,
    n_decoded_bytes: usize,
    n_shown_bytes: usize,
    /// A line has ended.
    pub has_new_line: bool,
    /// Spaces at the beginning of the current line, while it has nothing else.
    indent: Option<usize>,
    n_indent: usize,
}

/// The result of one token.
#[derive(Debug, PartialEq, Eq)]
pub struct Piece {
    /// Text that is final now.
    pub text: String,
    /// The completed stop text, and how many of the last tokens belong to it.
    pub stop: Option<(String, usize)>,
    /// A line has fewer spaces than required.
    pub is_outdented: bool,
}

impl Text {
    /// `stops` end the text; lines after the first must begin with `n_indent` spaces.
    pub fn new(stops: &[String], n_indent: usize) -> Self {
        Self {
            decoder: Utf8Decoder::default(),
            matcher: StopMatcher::new(stops),
            starts: Vec::new(),
            n_decoded_bytes: 0,
            n_shown_bytes: 0,
            has_new_line: false,
            indent: None,
            n_indent,
        }
    }

    /// Adds the bytes of the next token.
    pub fn push(&mut self, bytes: &[u8]) -> Piece {
        let decoded = self.decoder.push(bytes);
        self.starts.push(self.n_decoded_bytes);
        self.n_decoded_bytes += decoded.len();
        let (text, stop) = self.matcher.push(&decoded);
        self.n_shown_bytes += text.len();
        let shown = self.n_shown_bytes;
        let stop = stop.map(|word| {
            let swallowed = self.starts.iter().rev().take_while(|start| **start >= shown).count();
            (word, swallowed)
        });
        let is_outdented = self.look_at_lines(&text);
        Piece { text, stop, is_outdented }
    }

    /// The held-back text, once the generation has ended without a stop text.
    pub fn finish(&mut self) -> String {
        let mut rest = self.matcher.finish();
        rest.push_str(self.decoder.finish());
        rest
    }

    fn look_at_lines(&mut self, text: &str) -> bool {
        let mut is_outdented = false;
        for character in text.chars() {
            match (character, self.indent) {
                ('\n', _) => (self.has_new_line, self.indent) = (true, Some(0)),
                (' ' | '\t', Some(n)) => self.indent = Some(n + 1),
                (_, Some(n)) => {
                    is_outdented |= self.n_indent > 0 && n < self.n_indent;
                    self.indent = None;
                }
                _ => {}
            }
        }
        is_outdented
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_wait_for_their_end() {
        let mut text = Text::new(&[], 0);
        assert_eq!(text.push(&[0xC3]).text, "");
        assert_eq!(text.push(&[0xA9, b'!']).text, "é!");
        text.push(&[0xC3]);
        assert_eq!(text.finish(), "\u{FFFD}");
    }

    #[test]
    fn stop_texts_swallow_their_tokens() {
        let mut text = Text::new(&["END".to_owned()], 0);
        assert_eq!(text.push(b"ab").text, "ab");
        assert_eq!(text.push(b"E"), Piece { text: String::new(), stop: None, is_outdented: false });
        let piece = text.push(b"NDx");
        assert_eq!(piece.stop, Some(("END".to_owned(), 2)));
    }

    #[test]
    fn lines_are_seen() {
        let mut text = Text::new(&[], 2);
        assert!(!text.push(b"first").is_outdented && !text.has_new_line);
        assert!(!text.push(b"\n  second").is_outdented && text.has_new_line);
        assert!(text.push(b"\n third").is_outdented);
    }
}
