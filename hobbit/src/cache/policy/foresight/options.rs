//! What can be tuned in [`super::Foresight`].

/// Half-lives of what is remembered of scores and uses.
pub(super) const N_RATES: usize = 3;

/// Constant, scores and uses per half-life, frequency in this sequence and ever, recency as two curves, habit.
pub(super) const N_FEATURES: usize = 6 + 2 * N_RATES;

/// Parameters of [`super::Foresight`]. Weights are in the order: constant; mean router score per half-life; mean use per
/// half-life; log frequency in this sequence; log frequency in the whole run; `1 / (1 + age)` and `-ln(1 + age)`
/// of the last use; log chance of a use after what the running token uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForesightOptions {
    /// Tokens after which a score or a use counts half, shortest first.
    pub half_lives: [f32; N_RATES],
    /// Tokens of a sequence after which its own frequencies count as much as the whole run's.
    pub prior_tokens: f32,
    /// What is predicted is a use within so many tokens: about how long a version stays that is not used again.
    pub horizon_tokens: u32,
    /// Step size of the learner; 0 keeps the weights as they are.
    pub learning_rate: f32,
    /// Part of the way back to the given weights with each step of the learner.
    pub pull: f32,
    /// Weights for layers whose scores are known.
    pub scored: [f32; N_FEATURES],
    /// Weights for layers of which only the chosen experts' weights are known.
    pub blind: [f32; N_FEATURES],
}

impl Default for ForesightOptions {
    /// Tuned by coordinate search on calibration traces: the bundled demo model on prose and code, and a model of random
    /// weights with 64 experts, top-8, on the same texts, at 25 to 75 % of the experts (`benches/policies` replays other parts
    /// of the texts). The weights for scores are the means of what was learned there; the learner goes on from them. Those
    /// without scores come from made-up routers (the tests have their like).
    fn default() -> Self {
        Self {
            half_lives: [0.35, 16.0, 96.0],
            prior_tokens: 8.0,
            horizon_tokens: 2,
            learning_rate: 1.0,
            pull: 0.000_25,
            scored: [0.97, 0.26, 0.72, -0.39, 0.83, 1.11, 1.42, 1.27, -1.28, -0.84, 0.66, 3.59],
            blind: [0.4, 1.0, 0.7, 0.5, 0.5, 1.0, 2.1, 1.5, 0.2, -0.5, 1.4, 2.0],
        }
    }
}
