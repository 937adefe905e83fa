//! The probabilities of a token's candidates.

use hobbit::options::Token;
use hobbit::{Model, Sampler};

use super::job::{Candidate, Generate, Probabilities};

/// The candidates of the last choice, `token`; `None` if the request asked for none. Probabilities before sampling
/// need a sampler that keeps logits.
pub fn of(model: &Model, sampler: &Sampler, token: Token, generate: &Generate) -> Option<Probabilities> {
    if generate.n_probs == 0 {
        return None;
    }
    let found = sampler.probabilities(generate.n_probs, generate.post_sampling_probs)?;
    let candidate =
        |token: Token, log: f32| Candidate { token, bytes: model.piece(token, true), probability: log.exp() };
    // A token forced by a grammar may be missing among the earlier candidates.
    let chosen = if found.chosen == f32::NEG_INFINITY { 0.0 } else { found.chosen };
    Some(Probabilities {
        chosen: candidate(token, chosen),
        top: found.top.into_iter().map(|(token, log)| candidate(token, log)).collect(),
        is_post_sampling: generate.post_sampling_probs,
    })
}
