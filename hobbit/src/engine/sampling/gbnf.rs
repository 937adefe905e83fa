//! Checks a grammar's text for constructs that llama.cpp's parser (`llama_grammar_parser` in `src/llama-grammar.cpp`)
//! cannot survive.
//!
//! * For a repetition `{m,n}` with `n` below `m` it makes endless rules (`handle_repetitions` subtracts unsigned
//!   numbers), and llama.cpp itself writes such a repetition for a schema that wants an integer of 2^53 or more.
//! * It writes out repeated elements, again for every repetition that follows, and names each rule it makes.
//! * It recurses for every parenthesis.

use crate::engine::error::Error;

/// Maximum bytes of a grammar.
const TEXT_MAX: usize = 1 << 20;

/// Deepest nesting of parentheses.
const NESTING_MAX: usize = 256;

/// Maximum characters, classes and references that repetitions may make.
const REPEATED_MAX: u64 = 1 << 22;

/// Maximum bytes of the rules made for repetitions and parentheses; the next constant is the size of one, without its
/// name.
const RULES_BYTES_MAX: u64 = 32 << 20;
const RULE_BYTES: u64 = 128;

/// llama.cpp refuses more repetitions, and treats more as unbounded.
const REPETITIONS_MAX: u64 = 2000;

/// Refuses a grammar in GBNF that llama.cpp's parser would not survive. Leaves other errors to that parser.
///
/// # Errors
/// [`Error::Grammar`] with the repetition whose bounds are reversed, or the exceeded limit.
pub(super) fn check(grammar: &str) -> Result<(), Error> {
    if grammar.len() > TEXT_MAX {
        return Err(Error::Grammar(format!("it is longer than {TEXT_MAX} bytes")));
    }
    let mut made = Made::default();
    let mut rest = grammar;
    let mut depth = 0_usize;
    while let Some(first) = rest.chars().next() {
        let after = &rest[first.len_utf8()..];
        rest = match first {
            '"' | '[' => {
                let rest = after_closing(after, if first == '"' { '"' } else { ']' });
                made.last = (after.len() - rest.len()).saturating_sub(1) as u64;
                rest
            }
            '#' => behind_comment(after),
            '<' => {
                made.last = 1;
                after.split_once('>').map_or("", |(_, rest)| rest)
            }
            '(' => {
                depth += 1;
                made.rules += 1;
                if depth > NESTING_MAX {
                    return Err(Error::Grammar(format!("more than {NESTING_MAX} parentheses are open at once")));
                }
                after
            }
            ')' => {
                depth = depth.saturating_sub(1);
                made.last = 1;
                after
            }
            '*' | '+' | '?' => {
                made.repeat(u64::from(first == '+'), (first == '?').then_some(1));
                after
            }
            '{' => {
                let Some((least, most, rest)) = repetition(after) else { return made.check() };
                if most.is_some_and(|most| most < least) {
                    let message = format!("the repetition {{{least},{}}} ends before it begins", most.unwrap_or(0));
                    return Err(Error::Grammar(message));
                }
                made.repeat(least, most.filter(|most| *most <= REPETITIONS_MAX));
                rest
            }
            _ if is_of_words(first) => {
                let end = rest.find(|character| !is_of_words(character)).unwrap_or(rest.len());
                made.longest_name = made.longest_name.max(end as u64);
                made.last = 1;
                &rest[end..]
            }
            _ if first.is_whitespace() => after,
            _ => {
                made.last = 1;
                after
            }
        };
    }
    made.check()
}

/// Counts of elements and rules that llama.cpp makes for repetitions and parentheses.
#[derive(Default)]
struct Made {
    elements: u64,
    rules: u64,
    longest_name: u64,
    /// Elements in the operand of the next repetition.
    last: u64,
}

impl Made {
    /// `S{m,n}` becomes S m times, and a rule with S for each of the others; without `n`, a rule that refers to itself.
    fn repeat(&mut self, least: u64, most: Option<u64>) {
        let least = least.min(REPETITIONS_MAX);
        let n_rules = most.map_or(1, |most| most.saturating_sub(least));
        let written = least.saturating_sub(1).saturating_mul(self.last);
        let in_rules = n_rules.saturating_mul(self.last.saturating_add(3));
        self.elements = self.elements.saturating_add(written).saturating_add(in_rules);
        self.rules = self.rules.saturating_add(n_rules);
        self.last = least.saturating_mul(self.last).saturating_add(u64::from(n_rules > 0));
    }

    fn check(&self) -> Result<(), Error> {
        if self.elements > REPEATED_MAX {
            return Err(Error::Grammar(format!("what it repeats is longer than {REPEATED_MAX} characters")));
        }
        if self.rules.saturating_mul(RULE_BYTES + self.longest_name) > RULES_BYTES_MAX {
            let message =
                format!("its repetitions make {} rules, too many for names of {}", self.rules, self.longest_name);
            return Err(Error::Grammar(message + " characters"));
        }
        Ok(())
    }
}

fn is_of_words(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '-'
}

fn behind_comment(text: &str) -> &str {
    text.find(['\r', '\n']).map_or("", |end| &text[end..])
}

fn behind_space(mut text: &str) -> &str {
    loop {
        text = text.trim_start();
        match text.strip_prefix('#') {
            Some(comment) => text = behind_comment(comment),
            None => return text,
        }
    }
}

/// The text after a literal or class of characters; `text` begins inside it.
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

/// The numbers of `m}`, `m,}` or `m,n}`, and the text after; `None` for anything else.
fn repetition(text: &str) -> Option<(u64, Option<u64>, &str)> {
    let (least, rest) = number(behind_space(text))?;
    let rest = behind_space(rest);
    if let Some(rest) = rest.strip_prefix('}') {
        return Some((least, Some(least), rest));
    }
    let rest = behind_space(rest.strip_prefix(',')?);
    let (most, rest) = number(rest).map_or((None, rest), |(most, rest)| (Some(most), rest));
    Some((least, most, behind_space(rest).strip_prefix('}')?))
}

/// An overflowing number is too large for any repetition.
fn number(text: &str) -> Option<(u64, &str)> {
    let end = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    (end > 0).then(|| (text[..end].parse().unwrap_or(u64::MAX), &text[end..]))
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
            "# \"\rroot ::= \"a\"{5,4}",
            "root ::= (\"a\"{5,#}\n4})",
            "root ::= (\"a\"{5 #}\r,4})",
            "root ::= <|\"|> \"a\"{5,4}",
            "root ::= !<[7]> \"a\"{5,4}",
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
            "root ::= <|{3,2}|> \"a\"",
            "root ::= \"a\"{",
            "",
            "root ::= ((\"a\") (\"b\"))",
        ] {
            assert!(check(allowed).is_ok(), "{allowed}");
        }
    }

    #[test]
    fn what_is_repeated_is_bounded() {
        let literal = "a".repeat(1 << 19);
        for again in ["{2000}", "{0,8}", "{9,}", "{99999999999999999999}", "+{2000}", "{3}{4}", "{3}+{3}"] {
            let error = check(&format!("root ::= \"{literal}\" {again}")).unwrap_err().to_string();
            assert!(error.contains("longer than"), "{again}: {error}");
        }
        let comment = format!("root ::= (\"{literal}\"{{#}}\n2000}})");
        assert!(check(&comment).is_err());
        let class = format!("root ::= [{literal}]{{10}}");
        assert!(check(&class).is_err());
        for allowed in ["{2}", "* + {9}", " b{2000}", " (\"b\"){2000}", "", "?", "+", "<|\"|>{9}"] {
            assert!(check(&format!("root ::= \"{literal}\"{allowed}\nb ::= \"b\"")).is_ok(), "{allowed}");
        }
        // Each repeats everything that the previous one made.
        assert!(check(&format!("root ::= \"a\"{}", "+".repeat(10_000))).is_err());
        assert!(check(&format!("root ::= \"a\"{}", "+".repeat(100))).is_ok());
        assert!(check(&"root ::= [a-z]{2000} ".repeat(100)).is_ok());
    }

    #[test]
    fn rules_that_are_made_are_bounded() {
        let error = check(&format!("root ::= {}", "a{0,2000} ".repeat(400))).unwrap_err().to_string();
        assert!(error.contains("make 800000 rules"), "{error}");
        assert!(check(&format!("root ::= {}", "a{0,2000} ".repeat(20))).is_ok());
        let name = "n".repeat(1 << 16);
        assert!(check(&format!("{name} ::= {}", "x? ".repeat(1000))).is_err());
        assert!(check(&format!("{name} ::= {}", "x ".repeat(1000))).is_ok());
        assert!(check(&"x ".repeat(TEXT_MAX)).unwrap_err().to_string().contains("it is longer than"));
    }

    #[test]
    fn nesting_is_bounded() {
        let nested = |n: usize| format!("root ::= {}\"a\"{}", "(".repeat(n), ")".repeat(n));
        assert!(check(&nested(NESTING_MAX)).is_ok());
        assert!(check(&nested(NESTING_MAX + 1)).is_err());
        assert!(check(&"(".repeat(1 << 20)).is_err());
        assert!(check(&format!("#\rroot ::= {}", "(".repeat(1000))).is_err());
        assert!(check(&"root ::= (\"a\") ".repeat(1000)).is_ok());
        assert!(check("root ::= \"((((\" [(((]").is_ok());
    }
}
