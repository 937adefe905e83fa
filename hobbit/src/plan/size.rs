//! Sizes as people write them.
//!
//! All prefixes are powers of 1024, as users of llama.cpp expect: `1G`, `1GB` and `1GiB` are the same. A bare
//! number is bytes.

use serde::Serialize;
use std::fmt;
use std::str::FromStr;

use crate::units::{MIB, parse_bytes, parse_percent};

/// What `--mem-budget` says: the memory the whole process may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Budget {
    /// What is available now, from [`super::MemoryLimits`].
    #[default]
    Auto,
    /// Bytes.
    Bytes(u64),
}

/// What `--expert-cache` says: the part of the budget that holds experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub enum ExpertCache {
    /// What the budget leaves.
    #[default]
    Auto,
    /// Bytes.
    Bytes(u64),
    /// Percent of all experts of the model, `0.0..=100.0`.
    Percent(f64),
}

/// A size that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{found}' is not a size (expected {expected})")]
pub struct SizeError {
    /// What was given.
    pub found: String,
    /// What would have been understood.
    pub expected: &'static str,
}

impl FromStr for Budget {
    type Err = SizeError;

    /// `auto` or a size (`2.5GiB`, `1800M`).
    fn from_str(text: &str) -> Result<Self, SizeError> {
        let error = || SizeError { found: text.to_owned(), expected: "auto, 2.5GiB or 1800M" };
        match text {
            "auto" => Ok(Self::Auto),
            _ => parse_bytes(text).map(Self::Bytes).ok_or_else(error),
        }
    }
}

impl FromStr for ExpertCache {
    type Err = SizeError;

    /// `auto`, a size (`2.5GiB`, `1800M`) or a percentage of all experts (`40%`).
    fn from_str(text: &str) -> Result<Self, SizeError> {
        let error = || SizeError { found: text.to_owned(), expected: "auto, 2.5GiB, 1800M, or 0% to 100%" };
        if text == "auto" {
            return Ok(Self::Auto);
        }
        match text.strip_suffix('%') {
            Some(_) => parse_percent(text, 100.0).map(Self::Percent).ok_or_else(error),
            None => parse_bytes(text).map(Self::Bytes).ok_or_else(error),
        }
    }
}

/// Bytes for a flag, rounded up to whole MiB so that giving them back is enough: `1229MiB`.
pub(super) struct FlagValue(pub(super) u64);

impl FlagValue {
    /// The bytes the text stands for.
    pub(super) fn bytes(&self) -> u64 {
        self.0.div_ceil(MIB).saturating_mul(MIB)
    }
}

impl fmt::Display for FlagValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}MiB", self.0.div_ceil(MIB))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary_whatever_the_prefix() {
        const GIB: u64 = 1 << 30;
        let table = [
            ("2.5GiB", GIB * 5 / 2),
            ("2.5GB", GIB * 5 / 2),
            ("2.5G", GIB * 5 / 2),
            ("1800M", 1800 * MIB),
            ("1800m", 1800 * MIB),
            ("512 MiB", 512 * MIB),
            ("64k", 65536),
            ("1T", GIB * 1024),
            ("4096", 4096),
            ("0", 0),
        ];
        for (text, bytes) in table {
            assert_eq!(text.parse(), Ok(Budget::Bytes(bytes)), "{text}");
            assert_eq!(text.parse(), Ok(ExpertCache::Bytes(bytes)), "{text}");
        }
        assert_eq!("auto".parse(), Ok(Budget::Auto));
        assert_eq!("auto".parse(), Ok(ExpertCache::Auto));
        assert_eq!("40%".parse(), Ok(ExpertCache::Percent(40.0)));
        assert_eq!("12.5 %".parse(), Ok(ExpertCache::Percent(12.5)));
    }

    #[test]
    fn what_is_no_size_is_refused_with_an_example() {
        for text in ["", "-1", "-1G", "G", "1X", "99999999999T", "NaN", "nan%", "101%", "-3%", "%", "inf%"] {
            assert!(text.parse::<Budget>().is_err(), "{text}");
            assert!(text.parse::<ExpertCache>().is_err(), "{text}");
        }
        let error = "40%".parse::<Budget>().unwrap_err();
        assert_eq!(error.to_string(), "'40%' is not a size (expected auto, 2.5GiB or 1800M)");
    }

    #[test]
    fn a_flag_value_is_never_less() {
        for bytes in [1, MIB, MIB + 1, 1234567890123] {
            let Ok(Budget::Bytes(given)) = FlagValue(bytes).to_string().parse() else { panic!("{bytes}") };
            assert_eq!(given, FlagValue(bytes).bytes());
            assert!(bytes <= given && given < bytes + MIB);
        }
    }
}
