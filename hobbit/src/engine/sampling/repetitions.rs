//! Repetitions of a grammar, looked at before llama.cpp does: of `{m,n}` with `n` below `m` it makes rules without end
//! (`handle_repetitions` in `src/llama-grammar.cpp` subtracts unsigned numbers), and it writes such a thing itself for a schema that
//! wants an integer of 2^53 or more.

use crate::engine::error::Error;

/// Refuses a grammar in GBNF with a repetition that ends before it begins.
///
/// # Errors
/// [`Error::Grammar`], with the repetition.
pub(super) fn check(grammar: &str) -> Result<(), Error> {
    let mut rest = grammar;
    while let Some(start) = rest.find(['"', '[', '#', '{']) {
        let (opening, after) = (rest.as_bytes()[start], &rest[start + 1..]);
        rest = match opening {
            b'"' => after_closing(after, '"'),
            b'[' => after_closing(after, ']'),
            b'#' => after.find('\n').map_or("", |end| &after[end..]),
            _ => {
                let (inside, rest) = after.split_once('}').unwrap_or((after, ""));
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
    let number = |text: &str| {
        let digits = text.trim();
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| digits.parse().unwrap_or(u128::MAX))
    };
    Some((number(least)?, number(most)?))
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
        ] {
            assert!(check(allowed).is_ok(), "{allowed}");
        }
    }
}
