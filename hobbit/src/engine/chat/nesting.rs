//! JSON that llama.cpp may be shown: it recurses with its depth, so that deep nesting would end the process.

use serde::de::IgnoredAny;

/// Brackets within each other that are passed on.
pub(super) const DEPTH_MAX: usize = 100;

/// The longest text that is passed on, in bytes.
pub(super) const BYTES_MAX: usize = 64 << 20;

/// That `text` is JSON of bearable length and depth.
///
/// # Errors
/// What is wrong with `what`.
pub(super) fn check_json(text: &str, what: &str) -> Result<(), String> {
    check_depth(text, what)?;
    serde_json::from_str::<IgnoredAny>(text).map_err(|error| format!("{what}: this is not JSON: {error}"))?;
    Ok(())
}

/// That `text`, should it be JSON, is of bearable length and depth.
///
/// # Errors
/// What is wrong with `what`.
pub(super) fn check_depth(text: &str, what: &str) -> Result<(), String> {
    if text.len() > BYTES_MAX {
        return Err(format!("{what}: {} bytes are too many, at most {BYTES_MAX} are read", text.len()));
    }
    if depth(text) > DEPTH_MAX {
        return Err(format!("{what}: brackets are nested more than {DEPTH_MAX} deep"));
    }
    Ok(())
}

/// How many brackets are open at once, at most; brackets in strings do not count.
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
