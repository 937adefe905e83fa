//! What outstanding reads are for.

use super::reads::{Read, Target};
use crate::cache::SlotId;

/// What a read is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    /// Where the bytes go.
    pub(super) target: Target,
    /// See [`Read::held`]. Pinned.
    pub(super) held: Option<SlotId>,
}

/// Targets by ticket. Tickets are small numbers: one that was answered is issued again.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    targets: Vec<Option<Asked>>,
    /// Where the search for a free one begins.
    last: usize,
}

impl Tickets {
    /// Asks for so many bytes, with a ticket that no outstanding read has.
    pub(super) fn read(&mut self, target: Target, bytes: u64) -> Read {
        self.read_beside(target, bytes, None)
    }

    /// The same, with a slot that is pinned for it.
    pub(super) fn read_beside(&mut self, target: Target, bytes: u64, held: Option<SlotId>) -> Read {
        Read { ticket: self.issue(Asked { target, held }), target, bytes, held }
    }

    fn issue(&mut self, asked: Asked) -> u64 {
        let is_free = |ticket: &usize| self.targets[*ticket].is_none();
        let ticket = match (self.last..self.targets.len()).chain(0..self.last).find(is_free) {
            Some(free) => free,
            None => {
                self.targets.push(None);
                self.targets.len() - 1
            }
        };
        self.last = ticket;
        self.targets[ticket] = Some(asked);
        ticket as u64
    }

    /// What an outstanding read is for.
    pub(super) fn get(&self, ticket: u64) -> Option<Target> {
        Some((*self.targets.get(ticket as usize)?)?.target)
    }

    /// The read is answered, refused or withdrawn.
    ///
    /// # Panics
    /// If it is not outstanding.
    pub(super) fn answer(&mut self, ticket: u64) -> Asked {
        self.targets[ticket as usize].take().expect("every ticket is answered once")
    }

    /// What all outstanding reads are for.
    pub(super) fn outstanding(&self) -> impl Iterator<Item = Asked> {
        self.targets.iter().flatten().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expert::{ExpertId, SliceId, SliceKind, Version};

    fn target(slot: usize) -> Asked {
        let version = Version::high(ExpertId { layer: 0, index: 0 });
        Asked { target: Target::Staging { slot, slice: SliceId { version, kind: SliceKind::Up } }, held: None }
    }

    #[test]
    fn a_ticket_is_issued_again_once_it_is_answered() {
        let mut tickets = Tickets::default();
        assert_eq!((0..3).map(|slot| tickets.issue(target(slot))).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(tickets.answer(0), target(0));
        assert_eq!((tickets.get(0), tickets.get(1), tickets.get(9)), (None, Some(target(1).target), None));
        assert_eq!(tickets.issue(target(7)), 0);
        assert_eq!(tickets.issue(target(8)), 3);
        assert_eq!(tickets.outstanding().collect::<Vec<_>>(), [7, 1, 2, 8].map(target));
    }

    #[test]
    #[should_panic(expected = "answered once")]
    fn nobody_is_answered_twice() {
        let mut tickets = Tickets::default();
        let ticket = tickets.issue(target(0));
        tickets.answer(ticket);
        tickets.answer(ticket);
    }
}
