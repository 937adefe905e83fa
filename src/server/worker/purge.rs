//! Logits that are not finite. All slots share one KV cache, where a masked cell still counts (0 · NaN is NaN), and a
//! forgotten one keeps its data: the cells of one request would spoil all other and all later ones.
//!
//! The tokens of the failed evaluation are removed, and its requests are evaluated again one by one. The state of
//! recurrent and hybrid models cannot go back: there every request that shared the failed evaluation fails with 503.

use hobbit::Error;

use super::Worker;
use crate::server::job::{Failure, FailureKind, Work};

impl Worker {
    /// Whether the last evaluation's results for a slot, `n` entries from `first` on, are finite.
    pub(super) fn is_finite(&self, at: usize, first: usize, n: usize) -> bool {
        let slot = &self.slots[at];
        match slot.run.as_ref().map(|run| &run.job.work) {
            Some(Work::Embed) => super::prompt::rows(&self.session, slot.sequence(), first, n)
                .is_none_or(|rows| rows.iter().flatten().all(|value| value.is_finite())),
            _ => self.session.has_finite_logits(first + n - 1),
        }
    }

    /// Reverts an evaluation of `members` whose results are not finite, and clears the whole cache with its data. A
    /// single member fails; several are evaluated again one by one, which finds the one that fails. Other working
    /// slots get their state back bit for bit; idle slots lose theirs.
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
            // A slot restored earlier may have taken its room.
            if self.slots[at].is_free() {
                continue;
            }
            while self.session.set_sequence_state(self.slots[at].sequence(), &state).is_err() {
                // Cells that were shared are separate copies now.
                if !matches!(self.give_way(Some(at), &[]), Ok(Some(_))) {
                    self.lose(at);
                    break;
                }
            }
        }
    }

    /// Fails a slot whose context could not be restored.
    fn lose(&mut self, at: usize) {
        let message =
            "the request's context was lost with that of another one, whose logits were not finite; send it again";
        self.slots[at].tokens.clear();
        self.fail(at, &Failure { kind: FailureKind::Unavailable, message: message.to_owned() });
    }
}
