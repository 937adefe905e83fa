//! Sampling a token from the last batch's logits.

use std::time::Instant;

use super::Session;
use crate::engine::error::Error;
use crate::engine::sampling::{Sampler, are_finite};
use hobbit_core::options::Token;

impl Session {
    /// Samples a token from the logits of entry `index` of the last batch (-1: the last), and records it in the sampler
    /// as generated. For callers of [`Session::evaluate`], who must evaluate the token themselves.
    ///
    /// # Errors
    /// [`Error::NothingEvaluated`] if the last evaluation failed or there was none, [`Error::Decode`] if the entry
    /// asked for no logits, [`Error::NotFinite`] if they are not finite, [`Error::Sampling`] and [`Error::Grammar`] if
    /// no token can be chosen.
    pub fn sample(&mut self, sampler: &mut Sampler, index: i32) -> Result<Token, Error> {
        if !self.is_current {
            return Err(Error::NothingEvaluated);
        }
        let started = Instant::now();
        let token = sampler.sample(&self.context, index)?;
        self.sample_ms += started.elapsed().as_secs_f64() * 1e3;
        self.sample_count += 1;
        Ok(token)
    }

    /// Whether the logits of an entry of the last batch, if it asked for any, are finite. If not, its keys and values
    /// corrupt all sequences of a shared cache, even through masked or freed cells, until [`Session::reset`] clears the
    /// data.
    #[doc(hidden)]
    pub fn has_finite_logits(&self, index: usize) -> bool {
        self.logits(index).is_none_or(are_finite)
    }
}
