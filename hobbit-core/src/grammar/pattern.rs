//! Patterns of JSON schemas (ECMAScript), written for llama.cpp's converter, which knows few escapes, requires anchors
//! and puts the pattern's characters into the JSON text as they are.
//!
//! The result describes JSON texts of strings: a quote, a backslash and control characters appear escaped only. It is
//! anchored, and consists of classes, groups, alternatives and repetitions.

use std::fmt::Write as _;

use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Class, ClassUnicode, Hir, HirKind, Look};

/// Most repetitions that llama.cpp's parser of grammars takes.
pub const REPETITIONS_MAX: u64 = 2000;

/// Longest pattern, before and after, in bytes.
const PATTERN_MAX: usize = 8 << 10;
const WRITTEN_MAX: usize = 64 << 10;

/// Deepest nesting of groups.
const NESTING_MAX: u32 = 40;

/// Any character of a JSON string.
const ANY: &str = r#"(?:[^\x22\x5C\x00-\x1F\x7F]|\\[\x22\\bfnrt]|\\u[0-9a-fA-F]{4})*"#;

/// A pattern for llama.cpp.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    pub text: String,
    /// Least and most characters of the strings that it describes.
    pub length: (usize, Option<usize>),
}

impl Pattern {
    /// # Errors
    /// A pattern that is invalid, or that a grammar cannot express.
    pub fn new(pattern: &str) -> Result<Self, String> {
        if pattern.len() > PATTERN_MAX {
            return Err(format!("it is longer than {PATTERN_MAX} bytes"));
        }
        let plain = without_shorthands(pattern)?;
        let hir = ParserBuilder::new().nest_limit(NESTING_MAX).build().parse(&plain);
        let hir = hir.map_err(|error| match error {
            regex_syntax::Error::Parse(error) => error.kind().to_string(),
            regex_syntax::Error::Translate(error) => error.kind().to_string(),
            _ => "it is no regular expression".to_owned(),
        })?;
        let mut text = "^".to_owned();
        let (least, most) = anchored(&hir, false, false, &mut text)?;
        text.push('$');
        Ok(Self { text, length: (least, most) })
    }
}

/// ECMAScript's `\d`, `\w`, `\s` and `.` written out, because the parser's own cover all of Unicode. Within a class, a
/// bracket and signs that join classes are characters.
fn without_shorthands(pattern: &str) -> Result<String, String> {
    const SPACES: &str =
        r"\t\n\x0B\x0C\r \xA0\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}";
    let mut out = String::new();
    let mut is_in_class = false;
    let mut characters = pattern.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\\' => {
                let next = characters.next().ok_or("it ends with a backslash")?;
                let set = match next.to_ascii_lowercase() {
                    'd' => "0-9",
                    'w' => "0-9A-Za-z_",
                    's' => SPACES,
                    _ => "",
                };
                if !set.is_empty() {
                    let negation = if next.is_ascii_uppercase() { "^" } else { "" };
                    let _ = write!(out, "[{negation}{set}]");
                    continue;
                }
                match next {
                    'b' if is_in_class => out.push_str(r"\x08"),
                    'b' | 'B' | 'A' | 'z' | 'Z' | 'G' | '<' | '>' => {
                        return Err(format!("\\{next} is not supported"));
                    }
                    '0' => out.push_str(r"\x00"),
                    '1'..='9' | 'k' => return Err("references to groups are not supported".to_owned()),
                    _ if next.is_ascii_alphanumeric() => out.extend(['\\', next]),
                    // Any other character stands for itself.
                    _ => out.push_str(&regex_syntax::escape(next.encode_utf8(&mut [0; 4]))),
                }
            }
            '[' if is_in_class => out.push_str(r"\["),
            '&' | '~' if is_in_class => out.extend(['\\', character]),
            '[' => {
                is_in_class = true;
                out.push('[');
                if characters.next_if_eq(&'^').is_some() {
                    out.push('^');
                }
                if characters.peek() == Some(&']') {
                    return Err("an empty class is not supported".to_owned());
                }
            }
            ']' if is_in_class => {
                is_in_class = false;
                out.push(']');
            }
            '.' if !is_in_class => out.push_str(r"[^\n\r\x{2028}\x{2029}]"),
            _ => out.push(character),
        }
    }
    Ok(out)
}

type Length = (usize, Option<usize>);

/// Writes an expression, with any text before and after it unless it is anchored there.
fn anchored(hir: &Hir, mut is_begun: bool, mut is_ended: bool, out: &mut String) -> Result<Length, String> {
    match hir.kind() {
        HirKind::Capture(capture) => anchored(&capture.sub, is_begun, is_ended, out),
        HirKind::Alternation(all) => alternatives(all, out, |one, out| anchored(one, is_begun, is_ended, out)),
        kind => {
            let alone = std::slice::from_ref(hir);
            let parts = if let HirKind::Concat(parts) = kind { &parts[..] } else { alone };
            let is = |part: &Hir, look: Look| matches!(part.kind(), HirKind::Look(found) if *found == look);
            let begun = parts.iter().take_while(|part| is(part, Look::Start)).count();
            let ended = parts[begun..].iter().rev().take_while(|part| is(part, Look::End)).count();
            let inner = &parts[begun..parts.len() - ended];
            (is_begun, is_ended) = (is_begun || begun > 0, is_ended || ended > 0);
            // `^a$|^b$` begins once.
            if let [one] = inner
                && matches!(one.kind(), HirKind::Capture(_) | HirKind::Alternation(_))
            {
                return anchored(one, is_begun, is_ended, out);
            }
            let mut length = (0, (is_begun && is_ended).then_some(0));
            if !is_begun {
                out.push_str(ANY);
            }
            for part in inner {
                length = both(length, written(part, out)?);
            }
            let is_empty = inner.iter().all(|part| matches!(part.kind(), HirKind::Empty));
            if !is_ended && (is_begun || !is_empty) {
                out.push_str(ANY);
            }
            Ok(length)
        }
    }
}

/// Writes alternatives, each by `write`.
fn alternatives(
    all: &[Hir],
    out: &mut String,
    mut write: impl FnMut(&Hir, &mut String) -> Result<Length, String>,
) -> Result<Length, String> {
    out.push_str("(?:");
    let mut length: Option<Length> = None;
    for (at, one) in all.iter().enumerate() {
        out.push_str(if at > 0 { "|" } else { "" });
        let own = write(one, out)?;
        length = Some(length.map_or(own, |before| either(before, own)));
    }
    out.push(')');
    Ok(length.unwrap_or_default())
}

fn either(one: Length, other: Length) -> Length {
    (one.0.min(other.0), one.1.zip(other.1).map(|(one, other)| one.max(other)))
}

fn both(one: Length, other: Length) -> Length {
    (one.0.saturating_add(other.0), one.1.zip(other.1).map(|(one, other)| one.saturating_add(other)))
}

/// Writes an expression; returns the characters that it takes.
fn written(hir: &Hir, out: &mut String) -> Result<Length, String> {
    if out.len() > WRITTEN_MAX {
        return Err("it takes too many characters when it is written out".to_owned());
    }
    match hir.kind() {
        HirKind::Empty => Ok((0, Some(0))),
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).map_err(|_| "it describes bytes")?;
            for character in text.chars() {
                write_in_json(character, out);
            }
            let n = text.chars().count();
            Ok((n, Some(n)))
        }
        HirKind::Class(Class::Unicode(class)) => {
            write_class(class, out)?;
            Ok((1, Some(1)))
        }
        HirKind::Class(Class::Bytes(_)) => Err("it describes bytes".to_owned()),
        HirKind::Look(_) => Err("^ and $ are supported at the beginning and the end only".to_owned()),
        HirKind::Capture(capture) => {
            out.push_str("(?:");
            let length = written(&capture.sub, out)?;
            out.push(')');
            Ok(length)
        }
        HirKind::Repetition(repetition) => {
            let (least, most) = (repetition.min, repetition.max);
            if u64::from(most.unwrap_or(least)) > REPETITIONS_MAX {
                return Err(format!("more than {REPETITIONS_MAX} repetitions are not supported"));
            }
            if most == Some(0) {
                return Ok((0, Some(0)));
            }
            out.push_str("(?:");
            let own = written(&repetition.sub, out)?;
            out.push(')');
            let _ = match (least, most) {
                (0, None) => write!(out, "*"),
                (1, None) => write!(out, "+"),
                (0, Some(1)) => write!(out, "?"),
                (1, Some(1)) => Ok(()),
                (least, None) => write!(out, "{{{least},}}"),
                (least, Some(most)) => write!(out, "{{{least},{most}}}"),
            };
            let times = |n: usize, times: u32| n.saturating_mul(times as usize);
            Ok((times(own.0, least), own.1.zip(most).map(|(longest, most)| times(longest, most))))
        }
        HirKind::Concat(parts) => {
            parts.iter().try_fold((0, Some(0)), |length, part| Ok(both(length, written(part, out)?)))
        }
        HirKind::Alternation(all) => alternatives(all, out, written),
    }
}

/// Control characters with an escape of one letter in JSON.
const ESCAPED: [(char, char); 7] =
    [('"', '"'), ('\\', '\\'), ('\x08', 'b'), ('\x0C', 'f'), ('\n', 'n'), ('\r', 'r'), ('\t', 't')];

fn is_plain(character: char) -> bool {
    !matches!(character, '"' | '\\' | '\0'..='\x1F' | '\x7F')
}

/// A character as it stands in a JSON text.
fn write_in_json(character: char, out: &mut String) {
    if is_plain(character) {
        write_escaped(character, out);
        return;
    }
    out.push_str(r"\\");
    match ESCAPED.iter().find(|(escaped, _)| *escaped == character) {
        Some((_, letter)) => write_escaped(*letter, out),
        None => drop(write!(out, "u{:04x}", u32::from(character))),
    }
}

/// A character by an escape that llama.cpp knows everywhere; the converter joins unescaped letters to words.
fn write_escaped(character: char, out: &mut String) {
    let _ = match u32::from(character) {
        code if character.is_ascii_alphanumeric() => write!(out, "{}", char::from_u32(code).unwrap_or_default()),
        code @ ..0x80 => write!(out, "\\x{code:02X}"),
        code @ ..0x1_0000 => write!(out, "\\u{code:04X}"),
        code => write!(out, "\\U{code:08X}"),
    };
}

fn write_class(class: &ClassUnicode, out: &mut String) -> Result<(), String> {
    let mut plain = String::new();
    for range in class.ranges() {
        // Parts of the range between characters that JSON escapes.
        for (first, last) in [(' ', '!'), ('#', '['), (']', '~'), ('\u{80}', char::MAX)] {
            let (first, last) = (first.max(range.start()), last.min(range.end()));
            if first > last {
                continue;
            }
            write_escaped(first, &mut plain);
            if first < last {
                plain.push('-');
                write_escaped(last, &mut plain);
            }
        }
    }
    let has = |character: char| class.ranges().iter().any(|range| (range.start()..=range.end()).contains(&character));
    let mut ways: Vec<String> = if plain.is_empty() { Vec::new() } else { vec![format!("[{plain}]")] };
    for (character, _) in ESCAPED.iter().filter(|(character, _)| has(*character)) {
        let mut way = String::new();
        write_in_json(*character, &mut way);
        ways.push(way);
    }
    match &ways[..] {
        [] => return Err("a class has only control characters, or none".to_owned()),
        [one] => out.push_str(one),
        ways => drop(write!(out, "(?:{})", ways.join("|"))),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(pattern: &str) -> String {
        Pattern::new(pattern).map(|own| own.text).unwrap_or_else(|error| panic!("{pattern}: {error}"))
    }

    #[test]
    fn shorthands_and_escapes_are_written_out() {
        assert_eq!(text(r"^\d{3}$"), "^(?:[0-9]){3,3}$");
        assert_eq!(text(r"^a\/b\!$"), r"^a\x2Fb\x21$");
        assert_eq!(text(r"^[\w-]+$"), r"^(?:[\x2D0-9A-Z\x5Fa-z])+$");
        assert_eq!(text("^(?:x|yz)?$"), "^(?:(?:x|yz))?$");
        assert_eq!(text("^é$"), r"^\u00E9$");
    }

    #[test]
    fn strings_stay_json() {
        assert_eq!(text("^\"$"), r"^\\\x22$");
        assert_eq!(text(r"^\\\n$"), r"^\\\x5C\\n$");
        for pattern in ["^.$", "^[^x]$", r"^\S$", r"^\W$"] {
            let text = text(pattern);
            assert!(!text.contains("[\\x00") && text.contains("|\\\\\\x22"), "{pattern}: {text}");
        }
        assert!(Pattern::new(r"^\x01$").is_ok() && Pattern::new(r"^[\x01-\x07]$").is_err());
    }

    #[test]
    fn patterns_without_anchors_allow_more_text() {
        assert_eq!(text("b"), format!("^{ANY}b{ANY}$"));
        assert_eq!(text("^b"), format!("^b{ANY}$"));
        assert_eq!(text("b$"), format!("^{ANY}b$"));
        assert_eq!(text("^ab$|^cd$"), "^(?:ab|cd)$");
        assert_eq!(text("(^ab|cd$)"), format!("^(?:ab{ANY}|{ANY}cd)$"));
        assert_eq!(text(""), format!("^{ANY}$"));
    }

    #[test]
    fn lengths() {
        let length = |pattern: &str| Pattern::new(pattern).unwrap().length;
        assert_eq!(length(r"^\d{2,5}$"), (2, Some(5)));
        assert_eq!(length("^(?:a|bcd)x?$"), (1, Some(4)));
        assert_eq!(length("abc"), (3, None));
        assert_eq!(length("^a+$"), (1, None));
    }

    #[test]
    fn patterns_without_a_grammar_are_refused() {
        for (pattern, reason) in [
            ("^(?=a)b$", "look-around"),
            (r"^(a)\1$", "references to groups"),
            (r"\bword\b", "\\b is not supported"),
            ("^a{3000}$", "more than 2000 repetitions"),
            ("a^b", "at the beginning and the end only"),
            ("(", "unclosed"),
            ("[]", "empty class"),
        ] {
            let error = Pattern::new(pattern).unwrap_err();
            assert!(error.contains(reason), "{pattern}: {error}");
        }
    }
}
