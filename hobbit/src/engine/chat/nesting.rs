//! Depth limits of JSON for llama.cpp, which recurses with the nesting: too deep nesting would end the process.

use serde::de::IgnoredAny;

use crate::engine::stack;

/// Deepest nesting of brackets that is accepted.
pub(super) const DEPTH_MAX: usize = 100;

/// Longest text that is accepted, in bytes.
pub(super) const BYTES_MAX: usize = 64 << 20;

/// Nesting of brackets in an answer that any thread can parse: llama.cpp's parsers use about 2.5 KiB of stack per
/// level.
const SHALLOW: usize = 100;

/// Deepest nesting in an answer that is parsed at all. Unclosed brackets, such as intervals in mathematics, count as
/// well.
pub(super) const ANSWER_DEPTH_MAX: usize = 5000;

/// Bytes of stack per level.
const STACK_BYTES: usize = 6 << 10;

/// Runs `read` with enough stack for its recursion, which follows the brackets of an answer (given in parts).
///
/// # Errors
/// Brackets that are nested too deep, or no memory for the stack.
pub(super) fn with_stack_for<T: Send>(answer: &[&str], read: impl FnOnce() -> T + Send) -> Result<T, String> {
    let depth = open_brackets(answer);
    if depth <= SHALLOW {
        return Ok(read());
    }
    if depth > ANSWER_DEPTH_MAX {
        return Err(format!("brackets are nested more than {ANSWER_DEPTH_MAX} deep"));
    }
    stack::with_bytes((1 << 20) + depth * STACK_BYTES, read)
}

/// Largest number of open brackets, including those in strings.
pub(super) fn open_brackets(parts: &[&str]) -> usize {
    let (mut open, mut most) = (0_usize, 0);
    for byte in parts.iter().flat_map(|part| part.bytes()) {
        match byte {
            b'[' | b'{' => open += 1,
            b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    most
}

/// Largest number of open parentheses.
pub(super) fn open_parentheses(text: &str) -> usize {
    let (mut open, mut most) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' => open += 1,
            b')' => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    most
}

/// Checks that `text` is JSON within the limits of length and depth.
///
/// # Errors
/// The problem with `what`.
pub(super) fn check_json(text: &str, what: &str) -> Result<(), String> {
    check_depth(text, what)?;
    serde_json::from_str::<IgnoredAny>(text).map_err(|error| format!("{what}: this is not JSON: {error}"))?;
    Ok(())
}

/// Checks the length of `text`, and its depth if it is JSON.
///
/// # Errors
/// The problem with `what`.
pub(super) fn check_depth(text: &str, what: &str) -> Result<(), String> {
    if text.len() > BYTES_MAX {
        return Err(format!("{what}: {} bytes are too many, at most {BYTES_MAX} are read", text.len()));
    }
    if depth(text) > DEPTH_MAX {
        return Err(format!("{what}: brackets are nested more than {DEPTH_MAX} deep"));
    }
    Ok(())
}

/// Largest number of open brackets outside strings.
fn depth(text: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let (mut in_string, mut escaped) = (false, false);
    for byte in text.bytes() {
        if in_string {
            in_string = escaped || byte != b'"';
            escaped = !escaped && byte == b'\\';
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths() {
        for (text, expected) in [
            ("", 0),
            ("1", 0),
            ("[]", 1),
            ("[[], {\"a\": [1]}]", 3),
            ("\"[[[\"", 0),
            ("[\"\\\"[[\", \"\\\\\", [] ]", 2),
            ("]]]][", 1),
        ] {
            assert_eq!(depth(text), expected, "{text}");
        }
    }

    #[test]
    fn answers_get_the_stack_that_they_take() {
        let own = std::thread::current().id();
        let id = || std::thread::current().id();
        assert_eq!(with_stack_for(&["plain [text]"], id), Ok(own));
        assert_ne!(with_stack_for(&[&"[0, 1) ".repeat(SHALLOW + 1)], id), Ok(own));
        let (prompt, answer) = ("[".repeat(SHALLOW), "[");
        assert_ne!(with_stack_for(&[&prompt, answer], id), Ok(own), "what stands before it counts");
        assert!(with_stack_for(&[&"[".repeat(ANSWER_DEPTH_MAX + 1)], id).unwrap_err().contains("deep"));
        assert_eq!(open_brackets(&["[\"[\" ]]] {"]), 2);
    }

    #[test]
    fn refusals_say_what() {
        let nested = |n: usize| "[".repeat(n) + &"]".repeat(n);
        assert_eq!(check_json(&nested(DEPTH_MAX), "tools"), Ok(()));
        let deep = check_json(&nested(DEPTH_MAX + 1), "tools").unwrap_err();
        assert!(deep.contains("tools") && deep.contains("100 deep"), "{deep}");
        let endless = check_json(&"[".repeat(1_000_000), "tools").unwrap_err();
        assert!(endless.contains("deep"), "{endless}");
        let none = check_json("{\"a\": ", "messages").unwrap_err();
        assert!(none.contains("messages: this is not JSON"), "{none}");
    }
}
