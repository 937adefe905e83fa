//! Two grammars in GBNF as one.

/// A grammar of the texts of either grammar.
pub fn either(one: &str, other: &str) -> String {
    format!("root ::= one-root | other-root\n{}\n{}", renamed(one, "one-"), renamed(other, "other-"))
}

/// The grammar with a prefix before each rule's name.
fn renamed(grammar: &str, prefix: &str) -> String {
    let mut out = String::with_capacity(2 * grammar.len());
    let mut rest = grammar;
    while let Some(first) = rest.chars().next() {
        let end = match first {
            '"' => after(rest, '"'),
            '[' => after(rest, ']'),
            '{' => rest.find('}').map_or(rest.len(), |end| end + 1),
            '<' => rest.find('>').map_or(rest.len(), |end| end + 1),
            '#' => rest.find('\n').unwrap_or(rest.len()),
            _ if is_of_name(first) => {
                out.push_str(prefix);
                rest.find(|character| !is_of_name(character)).unwrap_or(rest.len())
            }
            _ => first.len_utf8(),
        };
        out.push_str(&rest[..end]);
        rest = &rest[end..];
    }
    out
}

fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '-'
}

/// The end of a literal or class that begins here.
fn after(text: &str, closing: char) -> usize {
    let mut is_escaped = false;
    for (at, character) in text.char_indices().skip(1) {
        match character {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if character == closing => return at + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_two_grammars_stay_apart() {
        let joined = either("root ::= \"a b\\\"c\" [a-z\\]x]{1,20} x-1 # y\n", "root ::= <tool> x | \"\" (x)*");
        let expected = "root ::= one-root | other-root\n\
                        one-root ::= \"a b\\\"c\" [a-z\\]x]{1,20} one-x-1 # y\n\n\
                        other-root ::= <tool> other-x | \"\" (other-x)*";
        assert_eq!(joined, expected);
    }
}
