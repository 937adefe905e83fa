//! Logits that are not finite. All slots share one KV cache, where a masked cell still counts (0 · NaN is NaN), and a
//! forgotten one keeps its data: the cells of one request would spoil all other and all later ones.
//!
//! The tokens of the failed evaluation are removed, and its requests are evaluated again one by one. The state of
//! recurrent and hybrid models cannot go back: there every request that shared the failed evaluation fails with 503.

use hobbit::Error;

use super::Worker;
use crate::server::job::{Failure, FailureKind, Work};

impl Worker {
    /// Whether what the last evaluation computed for a slot, `n` entries from `first` on, is finite.
    pub(super) fn is_finite(&self, at: usize, first: usize, n: usize) -> bool {
        let slot = &self.slots[at];
        match slot.run.as_ref().map(|run| &run.job.work) {
            Some(Work::Embed) => super::prompt::rows(&self.session, slot.sequence(), first, n)
                .is_none_or(|rows| rows.iter().flatten().all(|value| value.is_finite())),
            _ => self.session.has_finite_logits(first + n - 1),
        }
    }

    /// Takes back an evaluation of `members` that was not finite, and clears the whole cache with its data. A single
    /// member fails; several are to be evaluated again, each by itself, which finds the one that is to fail. The other
    /// slots that work get back what they held, bit for bit; what idle ones held is forgotten.
    pub(super) fn purge(&mut self, members: &[usize]) {
        if let [at] = members {
            self.fail(*at, &Failure::server(Error::NotFinite.to_string()));
        }
        let mut kept = Vec::new();
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            slot.is_shared = false;
            if slot.is_free() {
                slot.tokens.clear();
            }
            let (sequence, n) = (slot.sequence(), slot.tokens.len());
            if n == 0 {
                continue;
            }
            let state = match self.session.keep_of(sequence, n) {
                Ok(left) if left == n => self.session.sequence_state(sequence).ok(),
                _ => None,
            };
            match state {
                Some(state) => kept.push((at, state)),
                None => self.lose(at),
            }
        }
        self.session.reset();
        for (at, state) in kept {
            // An earlier one may have taken its room.
            if self.slots[at].is_free() {
                continue;
            }
            while self.session.set_sequence_state(self.slots[at].sequence(), &state).is_err() {
                // Cells that were shared are no more.
                if !matches!(self.give_way(Some(at), &[]), Ok(Some(_))) {
                    self.lose(at);
                    break;
                }
            }
        }
    }

    /// A slot's context could not be kept.
    fn lose(&mut self, at: usize) {
        let message =
            "the request's context was lost with that of another one, whose logits were not finite; send it again";
        self.slots[at].tokens.clear();
        self.fail(at, &Failure { kind: FailureKind::Unavailable, message: message.to_owned() });
    }
}
