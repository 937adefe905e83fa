//! The choice of a token from what the last batch has left.

use std::time::Instant;

use super::Session;
use crate::engine::error::Error;
use crate::engine::sampling::Sampler;
use crate::options::Token;

impl Session {
    /// Chooses a token from the logits of entry `index` of the last batch (-1: the last), and has the sampler remember it as
    /// generated. For callers of [`Session::evaluate`]; what is chosen waits for them to evaluate it.
    ///
    /// # Errors
    /// [`Error::NothingEvaluated`] where the last evaluation failed or there was none, [`Error::Decode`] where the entry asked
    /// for no logits, [`Error::Sampling`] and [`Error::Grammar`] where no token can be chosen.
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
}
