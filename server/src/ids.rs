//! Random ids, and the time of an answer.

use std::hash::{BuildHasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// An unguessable and unique id: 32 random letters and digits.
pub fn random_id() -> String {
    random(32)
}

/// The id of a tool call: 9 letters and digits, because Mistral's templates take no others.
pub fn call_id() -> String {
    random(9)
}

fn random(n: usize) -> String {
    const LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let mut id = String::with_capacity(n);
    while id.len() < n {
        // The standard library's hashers are keyed from the operating system's randomness.
        let mut bits = RandomState::new().hash_one(id.as_str());
        for _ in id.len()..n.min(id.len() + 8) {
            id.push(char::from(LETTERS[(bits % 62) as usize]));
            bits /= 62;
        }
    }
    id
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ() {
        let ids: std::collections::BTreeSet<String> = (0..100).map(|_| random_id()).collect();
        assert_eq!(ids.len(), 100);
        assert!(ids.iter().all(|id| id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_alphanumeric())));
        let (one, two) = (call_id(), call_id());
        assert!(one != two && one.len() == 9 && one.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{one} {two}");
    }
}
