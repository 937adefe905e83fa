//! Text in pieces: escapes of typed text as llama.cpp's `string_process_escapes` reads them, bytes to text where a
//! token may end in the middle of a character, and reverse prompts, which end a generation independent of token
//! boundaries.

/// Replaces `\n \r \t \' \" \\ \xHH`; any other backslash stays. `\xHH` gives a byte, so the result need not be UTF-8.
pub fn unescape(bytes: &[u8]) -> Vec<u8> {
    let hex = |digit: u8| char::from(digit).to_digit(16).unwrap_or(0) as u8;
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let (byte, taken) = match bytes[at..] {
            [b'\\', b'n', ..] => (b'\n', 2),
            [b'\\', b'r', ..] => (b'\r', 2),
            [b'\\', b't', ..] => (b'\t', 2),
            [b'\\', quoted @ (b'\'' | b'"' | b'\\'), ..] => (quoted, 2),
            [b'\\', b'x', high, low, ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                (hex(high) << 4 | hex(low), 4)
            }
            [b'\\', ..] => {
                // The next character stays too, so that `\\q` cannot turn into a new escape.
                out.push(b'\\');
                match bytes.get(at + 1) {
                    Some(&next) => (next, 2),
                    None => break,
                }
            }
            _ => (bytes[at], 1),
        };
        out.push(byte);
        at += taken;
    }
    out
}

/// Incremental UTF-8 decoder. What it has returned, plus [`Utf8Decoder::finish`], is what
/// [`String::from_utf8_lossy`] gives for all bytes at once.
#[derive(Debug, Default)]
pub struct Utf8Decoder {
    /// The start of a character whose end has not arrived; at most 3 bytes between calls.
    pending: Vec<u8>,
}

impl Utf8Decoder {
    /// The characters that `bytes` complete. Invalid sequences become U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let bytes = std::mem::take(&mut self.pending);
        let mut text = String::with_capacity(bytes.len());
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            let is_begun = str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            if is_begun && chunks.peek().is_none() {
                self.pending = invalid.to_vec();
            } else if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        text
    }

    /// U+FFFD if the bytes ended inside a character, else nothing. The decoder is empty afterwards.
    pub fn finish(&mut self) -> &'static str {
        let cut_off = !self.pending.is_empty();
        self.pending.clear();
        if cut_off { "\u{FFFD}" } else { "" }
    }
}

/// Finds the first of several texts in a stream, and holds back text that may become part of one.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The end of the stream that may still become a stop text; always a proper prefix of one.
    held: String,
}

impl StopMatcher {
    /// Matches any of `stops`; empty texts are ignored.
    pub fn new(stops: &[String]) -> Self {
        Self { stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Adds the next piece; returns the text outside stop texts, and the completed stop text. The rest of the piece
    /// after it is dropped, and the matcher starts over.
    pub fn push(&mut self, piece: &str) -> (String, Option<String>) {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        let earliest = self
            .stops
            .iter()
            .filter_map(|stop| text.find(stop.as_str()).map(|start| (start, stop)))
            .min_by_key(|&(start, stop)| (start + stop.len(), start));
        if let Some((start, stop)) = earliest {
            text.truncate(start);
            return (text, Some(stop.clone()));
        }
        let kept = text.len() - self.undecided(&text);
        self.held = text.split_off(kept);
        (text, None)
    }

    /// The held-back text when the stream ends without a stop.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length in bytes of the longest suffix of `text` that begins a stop text.
    fn undecided(&self, text: &str) -> usize {
        self.stops
            .iter()
            .flat_map(|stop| stop.char_indices().map(|(end, _)| &stop[..end]))
            .filter(|start| text.ends_with(start))
            .map(str::len)
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes() {
        for (typed, meant) in [
            ("", &b""[..]),
            ("plain é", "plain é".as_bytes()),
            (r"a\nb\r\t", b"a\nb\r\t"),
            (r#"\'\"\\"#, b"'\"\\"),
            (r"\\n", b"\\n"),
            (r"\x41\x7a\xE2\x82\xAC", b"Az\xe2\x82\xac"),
            (r"\xff", b"\xff"),
            (r"\xg1\x4", br"\xg1\x4"),
            (r"\q\", br"\q\"),
            (r"\é", r"\é".as_bytes()),
        ] {
            assert_eq!(unescape(typed.as_bytes()), meant, "{typed}");
        }
    }

    fn decode(pieces: &[&[u8]]) -> String {
        let mut decoder = Utf8Decoder::default();
        let mut text: String = pieces.iter().map(|piece| decoder.push(piece)).collect();
        text.push_str(decoder.finish());
        text
    }

    #[test]
    fn every_split_of_every_length_decodes_alike() {
        for whole in ["a", "é", "€", "😀", "é€😀a", "\u{FEFF}\u{10FFFF}\u{0}"] {
            let bytes = whole.as_bytes();
            for first in 0..=bytes.len() {
                for second in first..=bytes.len() {
                    let text = decode(&[&bytes[..first], &bytes[first..second], &bytes[second..]]);
                    assert_eq!(text, whole, "{first} {second}");
                }
            }
        }
    }

    #[test]
    fn invalid_bytes_are_replaced_as_in_lossy_decoding() {
        let eight: [&[u8]; 8] = [
            b"\xff",
            b"a\x80b",
            b"\xe2\x82",
            b"\xe2\x82a",
            b"\xc0\xaf",
            b"\xed\xa0\x80",
            b"\xf4\x90\x80\x80",
            b"\xf0\x9f\x98\xe2\x82\xac",
        ];
        for bytes in eight {
            let expected = String::from_utf8_lossy(bytes);
            let one_by_one: Vec<&[u8]> = bytes.chunks(1).collect();
            assert_eq!(decode(&one_by_one), expected);
            for split in 0..=bytes.len() {
                assert_eq!(decode(&[&bytes[..split], &bytes[split..]]), expected, "{bytes:x?} at {split}");
            }
        }
    }

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(&stops.iter().map(|stop| stop.to_string()).collect::<Vec<_>>())
    }

    /// Emitted text and the stop, for a stream cut into `pieces`.
    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let mut matcher = matcher(stops);
        let mut out = String::new();
        for piece in pieces {
            let (text, stop) = matcher.push(piece);
            out.push_str(&text);
            if stop.is_some() {
                return (out, stop);
            }
        }
        out.push_str(&matcher.finish());
        (out, None)
    }

    #[test]
    fn every_cut_finds_the_stop() {
        let stream = "Bob: hi\nUser: rest";
        for first in 0..=stream.len() {
            for second in first..=stream.len() {
                let pieces = [&stream[..first], &stream[first..second], &stream[second..]];
                assert_eq!(run(&["User:"], &pieces), ("Bob: hi\n".into(), Some("User:".into())));
            }
        }
    }

    #[test]
    fn stops() {
        let none = |text: &str| (text.to_owned(), None);
        let some = |text: &str, stop: &str| (text.to_owned(), Some(stop.to_owned()));
        for (stops, pieces, expected) in [
            (&[][..], &["abc"][..], none("abc")),
            (&[""], &["abc"], none("abc")),
            (&["x"], &["abc"], none("abc")),
            (&["aab"], &["a", "a", "a", "b"], some("a", "aab")),
            (&["User:"], &["Use", "less"], none("Useless")),
            (&["User:"], &["User"], none("User")),
            (&["bc", "abcd"], &["abcd"], some("a", "bc")),
            (&["abcd", "b"], &["abcd"], some("a", "b")),
            (&["é!"], &["caf", "é", "!"], some("caf", "é!")),
            (&["é!"], &["caf", "é", "?"], none("café?")),
        ] {
            assert_eq!(run(stops, pieces), expected, "{stops:?} {pieces:?}");
        }
    }

    #[test]
    fn only_a_possible_stop_is_held_back() {
        let mut matcher = matcher(&["\nUser:"]);
        assert_eq!(matcher.push("one\n"), ("one".into(), None));
        assert_eq!(matcher.push("two"), ("\ntwo".into(), None));
        assert_eq!(matcher.finish(), "");
    }
}
