//! How much of the expert cache is for low precision.

use std::str::FromStr;

use serde::Serialize;

use crate::words::UnknownWord;

/// The part of the expert cache, in bytes, that low-precision versions get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub enum LowShare {
    /// What measured best.
    #[default]
    Auto,
    /// Percent, `0.0..=100.0`.
    Percent(f64),
}

impl FromStr for LowShare {
    type Err = UnknownWord;

    /// `auto` or a percentage (`25%`, `25`).
    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let number = text.strip_suffix('%').unwrap_or(text).trim_end();
        let percent = number.parse().ok().filter(|percent| (0.0..=100.0).contains(percent));
        percent.map(Self::Percent).ok_or_else(|| UnknownWord::new("low share", text, "auto, or 0% to 100%"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
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
