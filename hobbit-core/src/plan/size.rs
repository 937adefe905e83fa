//! Parsing of sizes.
//!
//! All prefixes are powers of 1024, as users of llama.cpp expect: `1G`, `1GB` and `1GiB` are the same. A bare
//! number is bytes.

use serde::Serialize;
use std::str::FromStr;

use crate::named::UnknownName;
use crate::units::{MIB, parse_bytes, parse_percent};

/// Value of `--mem-budget`: memory of the whole process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Budget {
    #[default]
    Auto,
    Bytes(u64),
}

/// Value of `--expert-cache`: the part of the budget for experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub enum ExpertCache {
    #[default]
    Auto,
    Bytes(u64),
    /// Percent of all experts of the model, `0.0..=100.0`.
    Percent(f64),
}

impl ExpertCache {
    /// Bytes of `all`; `None` for automatic.
    pub fn of(self, all: u64) -> Option<u64> {
        match self {
            Self::Auto => None,
            Self::Bytes(bytes) => Some(bytes.min(all)),
            // A product of whole numbers below 2^53 is exact: 29 % of 100 experts are 29.
            Self::Percent(percent) => Some((all as f64 * percent / 100.0).round() as u64),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{found}' is not a {what} (expected {expected})")]
pub struct SizeError {
    pub found: String,
    pub what: &'static str,
    pub expected: &'static str,
}

impl FromStr for Budget {
    type Err = SizeError;

    /// `auto` or a size (`2.5GiB`, `1800M`).
    fn from_str(text: &str) -> Result<Self, SizeError> {
        let error = || SizeError { found: text.to_owned(), what: "size", expected: "auto, 2.5GiB or 1800M" };
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
        let error =
            || SizeError { found: text.to_owned(), what: "size", expected: "auto, 2.5GiB, 1800M, or 0% to 100%" };
        if text == "auto" {
            return Ok(Self::Auto);
        }
        match text.strip_suffix('%') {
            Some(_) => parse_percent(text, 100.0).map(Self::Percent).ok_or_else(error),
            None => parse_bytes(text).map(Self::Bytes).ok_or_else(error),
        }
    }
}

/// Value of the low share: the part of the expert cache, in bytes, for low-precision versions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub enum LowShare {
    /// The share that measured best.
    #[default]
    Auto,
    /// Percent, `0.0..=100.0`.
    Percent(f64),
}

impl FromStr for LowShare {
    type Err = UnknownName;

    /// `auto` or a percentage (`25%`, `25`).
    fn from_str(text: &str) -> Result<Self, UnknownName> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let percent = parse_percent(text, 100.0).map(Self::Percent);
        percent.ok_or_else(|| UnknownName::new("low share", text, "auto, or 0% to 100%"))
    }
}

/// Bytes for a flag, rounded up to whole MiB so that the printed value suffices.
pub(super) fn whole_mib_up(bytes: u64) -> u64 {
    bytes.div_ceil(MIB).saturating_mul(MIB)
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
    fn malformed_sizes_are_refused_with_an_example() {
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
            let given = whole_mib_up(bytes);
            assert!(bytes <= given && given < bytes + MIB && given.is_multiple_of(MIB), "{bytes}");
        }
    }

    #[test]
    fn low_shares() {
        for (text, share) in
            [("auto", LowShare::Auto), ("25%", LowShare::Percent(25.0)), ("12.5 %", LowShare::Percent(12.5))]
        {
            assert_eq!(text.parse(), Ok(share));
        }
        for bad in ["", "%", "-1%", "101", "nan", "2G"] {
            assert!(bad.parse::<LowShare>().is_err(), "{bad}");
        }
    }
}
