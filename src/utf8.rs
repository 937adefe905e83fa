//! Bytes to text, piece by piece: a token may end in the middle of a character.

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

#[cfg(test)]
mod tests {
    use super::*;

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
        for bytes in [
            &b"\xff"[..],
            b"a\x80b",
            b"\xe2\x82",
            b"\xe2\x82a",
            b"\xc0\xaf",
            b"\xed\xa0\x80",
            b"\xf4\x90\x80\x80",
            b"\xf0\x9f\x98\xe2\x82\xac",
        ] {
            let expected = String::from_utf8_lossy(bytes);
            let one_by_one: Vec<&[u8]> = bytes.chunks(1).collect();
            assert_eq!(decode(&one_by_one), expected);
            for split in 0..=bytes.len() {
                assert_eq!(decode(&[&bytes[..split], &bytes[split..]]), expected, "{bytes:x?} at {split}");
            }
        }
    }

    #[test]
    fn nothing_is_printed_before_its_character_is_complete() {
        let mut decoder = Utf8Decoder::default();
        assert_eq!(decoder.push(&[0xf0, 0x9f]), "");
        assert_eq!(decoder.push(&[0x98]), "");
        assert_eq!(decoder.push(&[0x80, b'!']), "😀!");
        assert_eq!(decoder.finish(), "");
    }
}
