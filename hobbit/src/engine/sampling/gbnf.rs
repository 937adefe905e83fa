//! A grammar's text, looked at before llama.cpp does.
//!
//! * Of a repetition `{m,n}` with `n` below `m` llama.cpp makes rules without end (`handle_repetitions` in `src/llama-grammar.cpp`
//!   subtracts unsigned numbers), and it writes such a thing itself for a schema that wants an integer of 2^53 or more.
//! * Its parser calls itself for every parenthesis.

use crate::engine::error::Error;

/// Parentheses within each other.
const NESTING_MAX: usize = 256;

/// Characters and classes that repetitions may make of literals: llama.cpp writes each out as often as it may come.
const REPEATED_MAX: u64 = 1 << 22;

/// llama.cpp refuses to repeat more often.
const REPETITIONS_MAX: u128 = 2000;

/// Refuses a grammar in GBNF that llama.cpp's parser would not survive.
///
/// # Errors
/// [`Error::Grammar`], with the repetition that ends before it begins, or the bound on nesting.
pub(super) fn check(grammar: &str) -> Result<(), Error> {
    let mut rest = grammar;
    let mut depth = 0_usize;
    // Characters that what was read last stands for: bytes of a literal or class, 1 for anything else, times its repetitions.
    let (mut last, mut repeated) = (1_u64, 0_u64);
    while let Some(start) = rest.find(['"', '[', '#', '{', '(', ')']) {
        let (opening, after) = (rest.as_bytes()[start], &rest[start + 1..]);
        let is_behind_repetition = |character: char| character.is_whitespace() || "*+?".contains(character);
        if !rest[..start].chars().all(is_behind_repetition) || matches!(opening, b'(' | b')') {
            last = 1;
        }
        rest = match opening {
            b'"' | b'[' => {
                let rest = after_closing(after, if opening == b'"' { '"' } else { ']' });
                last = (after.len() - rest.len()) as u64;
                rest
            }
            b'#' => after.find('\n').map_or("", |end| &after[end..]),
            b'(' => {
                depth += 1;
                if depth > NESTING_MAX {
                    let message = format!("more than {NESTING_MAX} parentheses are open at once");
                    return Err(Error::Grammar(message));
                }
                after
            }
            b')' => {
                depth = depth.saturating_sub(1);
                after
            }
            _ => {
                let (inside, rest) = after.split_once('}').unwrap_or((after, ""));
                let most = inside.split(',').filter_map(number).max().unwrap_or(1).min(REPETITIONS_MAX);
                last = last.saturating_mul((most as u64).max(1));
                repeated = repeated.saturating_add(last);
                if repeated > REPEATED_MAX {
                    return Err(Error::Grammar(format!("what it repeats is longer than {REPEATED_MAX} characters")));
                }
                if let Some((least, most)) = bounds(inside)
                    && most < least
                {
                    let message = format!("the repetition {{{least},{most}}} ends before it begins");
                    return Err(Error::Grammar(message));
                }
                rest
            }
        };
    }
    Ok(())
}

/// What follows a literal or a class of characters, of which `text` begins with the inside.
fn after_closing(text: &str, closing: char) -> &str {
    let mut is_escaped = false;
    for (at, character) in text.char_indices() {
        match character {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if character == closing => return &text[at + character.len_utf8()..],
            _ => {}
        }
    }
    ""
}

/// The numbers of `m,n`; a number that is too large for llama.cpp is so for any repetition.
fn bounds(inside: &str) -> Option<(u128, u128)> {
    let (least, most) = inside.split_once(',')?;
    Some((number(least)?, number(most)?))
}

fn number(text: &str) -> Option<u128> {
    let digits = text.trim();
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().unwrap_or(u128::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_must_end_after_they_begin() {
        for refused in [
            r#"root ::= "a"{3,2}"#,
            "root ::= [0-9]{16,15}",
            "root ::= (\"a\" | b){ 2 , 1 }\nb ::= \"b\"",
            "root ::= \"{1,2\" \"a\"{5,4}",
            "root ::= \"\\\"\" \"a\"{5,4}",
            "root ::= [\\]{] \"a\"{5,4}",
            "# \"\nroot ::= \"a\"{5,4}",
        ] {
            let error = check(refused).unwrap_err().to_string();
            assert!(error.contains("ends before it begins"), "{refused}: {error}");
        }
        for allowed in [
            "root ::= \"a\"{2,3}",
            "root ::= \"a\"{3}",
            "root ::= \"a\"{3,}",
            "root ::= \"a\"{2,2} # \"a\"{3,2}",
            "root ::= \"a{3,2}\" [{3,2}] \"\\\"{3,2}\"",
            "root ::= \"a\"{x,y}",
            "root ::= \"unclosed {3,2}",
            "root ::= \"a\"{",
            "",
            "root ::= ((\"a\") (\"b\"))",
        ] {
            assert!(check(allowed).is_ok(), "{allowed}");
        }
    }

    #[test]
    fn what_is_repeated_is_bounded() {
        let literal = "a".repeat(1 << 20);
        for bounds in ["{2000}", "{0,5}", "{9,}", "{99999999999999999999}"] {
            let error = check(&format!("root ::= \"{literal}\" {bounds}")).unwrap_err().to_string();
            assert!(error.contains("longer than"), "{bounds}: {error}");
        }
        let class = format!("root ::= [{literal}]{{8}}");
        assert!(check(&class).is_err());
        for again in ["+{2000}", "* + {9}", "{2}{2}{2}", "{3}?{3}"] {
            assert!(check(&format!("root ::= \"{literal}\"{again}")).is_err(), "{again}");
        }
        for allowed in ["{2}", " b{2000}", " (\"b\"){2000}", "", "?"] {
            assert!(check(&format!("root ::= \"{literal}\"{allowed}\nb ::= \"b\"")).is_ok(), "{allowed}");
        }
        assert!(check(&"root ::= [a-z]{2000} ".repeat(100)).is_ok());
    }

    #[test]
    fn nesting_is_bounded() {
        let nested = |n: usize| format!("root ::= {}\"a\"{}", "(".repeat(n), ")".repeat(n));
        assert!(check(&nested(NESTING_MAX)).is_ok());
        assert!(check(&nested(NESTING_MAX + 1)).is_err());
        assert!(check(&"(".repeat(1 << 20)).is_err());
        assert!(check(&"root ::= (\"a\") ".repeat(1000)).is_ok());
        assert!(check("root ::= \"((((\" [(((]").is_ok());
    }
}
