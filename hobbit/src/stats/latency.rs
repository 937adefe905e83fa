//! How tokens are kept to the time that they may take.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Of all sessions of a model, since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyReport {
    /// What a token may take.
    pub target_seconds: f64,
    /// λ that was found: the next token's, but in a trial.
    pub cache_bias: f32,
    /// Whether several are being tried.
    pub is_trying: bool,
    /// What a token takes with it, as far as that was measured.
    pub seconds: Option<f64>,
    /// Whether any λ that may be taken meets the target; `None` before the first trial's end.
    pub is_reachable: Option<bool>,
    /// What a token takes with the highest λ that may be taken, as far as that was measured.
    pub least_seconds: Option<f64>,
    /// Trials that ended.
    pub trials: u64,
    /// What was measured last, by λ, ascending.
    pub measured: Vec<LatencyStep>,
}

/// Tokens with one λ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyStep {
    /// λ.
    pub cache_bias: f32,
    /// Mean time of a token.
    pub seconds: f64,
}

impl fmt::Display for LatencyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |seconds: f64| match seconds * 1e3 {
            ms if ms < 1.0 => format!("{ms:.3} ms"),
            ms => format!("{ms:.1} ms"),
        };
        let target = ms(self.target_seconds);
        match (self.is_reachable, self.seconds, self.least_seconds) {
            (Some(false), _, Some(least)) => {
                write!(f, "a token takes {} at least (cache bias {}), target {target}", ms(least), self.cache_bias)
            }
            (Some(_), Some(seconds), _) => {
                write!(f, "a token takes {} (cache bias {}), target {target}", ms(seconds), self.cache_bias)
            }
            _ => write!(f, "too few tokens for a trial, target {target}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_is_said() {
        let found = LatencyReport {
            target_seconds: 0.05,
            cache_bias: 0.15,
            seconds: Some(0.04),
            is_reachable: Some(true),
            least_seconds: Some(0.03),
            ..LatencyReport::default()
        };
        let text = found.to_string();
        assert_eq!(text, "a token takes 40.0 ms (cache bias 0.15), target 50.0 ms");
        let missed = LatencyReport { is_reachable: Some(false), cache_bias: 0.3, ..found };
        assert_eq!(missed.to_string(), "a token takes 30.0 ms at least (cache bias 0.3), target 50.0 ms");
        assert!(LatencyReport::default().to_string().starts_with("too few tokens"));
    }
}
