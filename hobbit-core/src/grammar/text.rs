//! Characters of pieces of text that may begin and end within one (`decode_utf8`).

/// The beginning of a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Part {
    value: u32,
    lacks: u32,
}

impl Part {
    pub(super) const NONE: Part = Part { value: 0, lacks: 0 };
    /// After invalid UTF-8: the text continues as if nothing were left.
    pub(super) const BROKEN: Part = Part::NONE;

    /// Decodes this part and `piece` into characters; returns the beginning of a last one. `None`, without characters,
    /// for invalid UTF-8. As in llama.cpp, a piece ends at a zero, and continuation bytes are not checked.
    pub(super) fn decode(self, piece: &[u8], characters: &mut Vec<u32>) -> Option<Part> {
        characters.clear();
        let mut bytes = piece.iter().copied().take_while(|byte| *byte != 0);
        let Part { mut value, mut lacks } = self;
        let more = |value: u32, byte: u8| (value << 6) + u32::from(byte & 0x3f);
        while lacks > 0 {
            let Some(byte) = bytes.next() else { return Some(Part { value, lacks }) };
            if byte >> 6 != 2 {
                return None;
            }
            value = more(value, byte);
            lacks -= 1;
        }
        if self.lacks > 0 {
            characters.push(value);
        }
        while let Some(first) = bytes.next() {
            lacks = match first >> 4 {
                0..8 => 0,
                8..12 => {
                    characters.clear();
                    return None;
                }
                12 | 13 => 1,
                14 => 2,
                _ => 3,
            };
            value = u32::from(first) & ((1 << (7 - lacks)) - 1);
            while lacks > 0 {
                let Some(byte) = bytes.next() else { return Some(Part { value, lacks }) };
                value = more(value, byte);
                lacks -= 1;
            }
            characters.push(value);
        }
        Some(Part::NONE)
    }

    /// The first and the last character that it may become; `None` for 7 bits in two bytes, which become none.
    pub(super) fn becomes(self) -> Option<(u32, u32)> {
        let Part { value, lacks } = self;
        if lacks == 1 && value < 2 {
            return None;
        }
        let low = value << (lacks * 6);
        let high = low | ((1 << (lacks * 6)) - 1);
        let least = match (low, lacks) {
            (0, 2) => 1 << 11,
            (0, 3) => 1 << 16,
            _ => low,
        };
        Some((least, high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_go_on_from_piece_to_piece() {
        let mut characters = Vec::new();
        let rest = Part::NONE.decode("aé日😀".as_bytes(), &mut characters);
        assert_eq!((characters.as_slice(), rest), (&[0x61, 0xe9, 0x65e5, 0x1f600][..], Some(Part::NONE)));
        let (front, back) = "x😀y".as_bytes().split_at(3);
        let part = Part::NONE.decode(front, &mut characters).unwrap();
        assert_eq!(characters, [0x78]);
        assert_eq!(part.becomes(), Some((0x1f000, 0x1ffff)));
        assert_eq!(part.decode(back, &mut characters), Some(Part::NONE));
        assert_eq!(characters, [0x1f600, 0x79]);
        assert_eq!(part.decode(b"", &mut characters), Some(part));
        assert_eq!(part.decode(b"x", &mut characters), None);
        assert_eq!(Part::NONE.decode(b"ab\x80", &mut characters), None);
        assert!(characters.is_empty());
        assert_eq!(Part::NONE.decode(b"a\0b", &mut characters), Some(Part::NONE));
        assert_eq!(characters, [0x61]);
    }

    #[test]
    fn impossible_beginnings() {
        let mut characters = Vec::new();
        assert_eq!(Part::NONE.decode(b"\xc0", &mut characters).unwrap().becomes(), None);
        assert_eq!(Part::NONE.decode(b"\xe0", &mut characters).unwrap().becomes(), Some((0x800, 0xfff)));
        assert_eq!(Part::NONE.decode(b"\xf0", &mut characters).unwrap().becomes(), Some((0x10000, 0x3ffff)));
    }
}
