//! Token generation: evaluates the last token, samples the next.

use ggml_sys::llama;

use super::{Session, StopReason};
use crate::engine::error::Error;
use crate::engine::sampling::Sampler;
use hobbit_core::options::Token;

/// The tokens of a generation. See [`Session::generate`].
pub struct Generation<'a> {
    pub(super) session: &'a mut Session,
    pub(super) sampler: &'a mut Sampler,
    pub(super) left: Option<usize>,
    pub(super) stop: Option<StopReason>,
    pub(super) failed: bool,
}

impl Generation<'_> {
    /// Why the iterator ended; `None` before its end and after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop
    }

    fn step(&mut self) -> Result<Result<Token, StopReason>, Error> {
        if self.left == Some(0) {
            return Ok(Err(StopReason::Length));
        }
        let session = &mut *self.session;
        if let Some(mut token) = session.pending.take() {
            let room = session.make_room(1);
            // SAFETY: the batch borrows `token`, which outlives its evaluation.
            let batch = unsafe { llama::llama_batch_get_one(&raw mut token, 1) };
            let before = session.n_past;
            match room.and_then(|()| session.decode(batch, &[(0, before as i32)])) {
                Ok(()) => session.n_past += 1,
                Err(error) => {
                    // Unless the whole context was lost, the token stays pending for another try.
                    session.pending = (session.n_past == before).then_some(token);
                    return match error {
                        Error::ContextFull { .. } => Ok(Err(StopReason::ContextFull)),
                        Error::Interrupted => Ok(Err(StopReason::Interrupted)),
                        error => Err(error),
                    };
                }
            }
        }
        let token = session.sample(self.sampler, -1)?;
        if session.model.is_eog(token) {
            return Ok(Err(StopReason::Eog(token)));
        }
        session.pending = Some(token);
        self.left = self.left.map(|left| left - 1);
        Ok(Ok(token))
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Token, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.stop.is_some() || self.failed {
            return None;
        }
        match self.step() {
            Ok(Ok(token)) => Some(Ok(token)),
            Ok(Err(reason)) => {
                self.stop = Some(reason);
                self.session.idle();
                None
            }
            Err(error) => {
                self.failed = true;
                Some(Err(error))
            }
        }
    }
}
