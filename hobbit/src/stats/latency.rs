//! How tokens are kept to the time that they may take.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::options::Knob;

/// Of all sessions of a model, since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyReport {
    /// What a token may take.
    pub target_seconds: f64,
    /// What is set.
    pub knob: Knob,
    /// How strong it was found to have to be: the next token's, but in a trial.
    pub strength: f32,
    /// Whether several are being tried.
    pub is_trying: bool,
    /// What a token takes with it, as far as that was measured.
    pub seconds: Option<f64>,
    /// Whether any strength that may be taken meets the target; `None` before the first trial's end.
    pub is_reachable: Option<bool>,
    /// What a token takes with the highest strength that may be taken, as far as that was measured.
    pub least_seconds: Option<f64>,
    /// Trials that ended.
    pub trials: u64,
    /// What was measured last, by strength, ascending.
    pub measured: Vec<LatencyStep>,
}

/// Tokens with one strength.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyStep {
    /// Of what is set.
    pub strength: f32,
    /// Mean time of a token.
    pub seconds: f64,
}

impl fmt::Display for LatencyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |seconds: f64| match seconds * 1e3 {
            ms if ms < 1.0 => format!("{ms:.3} ms"),
            ms => format!("{ms:.1} ms"),
        };
        let (target, Self { knob, strength, .. }) = (ms(self.target_seconds), self);
        match (self.is_reachable, self.seconds, self.least_seconds) {
            (Some(false), _, Some(least)) => {
                write!(f, "a token takes {} at least ({knob} {strength}), target {target}", ms(least))
            }
            (Some(_), Some(seconds), _) => {
                write!(f, "a token takes {} ({knob} {strength}), target {target}", ms(seconds))
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
            strength: 0.15,
            seconds: Some(0.04),
            is_reachable: Some(true),
            least_seconds: Some(0.03),
            ..LatencyReport::default()
        };
        let text = found.to_string();
        assert_eq!(text, "a token takes 40.0 ms (cache bias 0.15), target 50.0 ms");
        let missed = LatencyReport { is_reachable: Some(false), strength: 0.3, ..found.clone() };
        assert_eq!(missed.to_string(), "a token takes 30.0 ms at least (cache bias 0.3), target 50.0 ms");
        let alpha = LatencyReport { knob: Knob::Substitute, ..found };
        assert_eq!(alpha.to_string(), "a token takes 40.0 ms (substitutes within 0.15), target 50.0 ms");
        assert!(LatencyReport::default().to_string().starts_with("too few tokens"));
    }
}
