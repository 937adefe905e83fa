//! Escape sequences in prompts, as llama.cpp's `string_process_escapes` reads them.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table() {
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
}
