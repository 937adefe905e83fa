//! SIEVE (Zhang and others, NSDI 2024): a queue with a hand.

use super::Candidate;
use super::queues::{Queue, Queues};
use crate::expert::Version;

/// Residents of a share in order of insertion. A re-use marks a version and moves nothing. The hand goes from the
/// oldest to the newest and round again, takes marks away, and evicts the first candidate that has none; it goes on
/// from there the next time.
pub type Sieve = Queues<Ring>;

/// See [`Sieve`].
#[derive(Clone, Debug, Default)]
pub struct Ring {
    /// Oldest first, with their marks.
    entries: Vec<(Version, bool)>,
    /// Where the hand looks next; beyond the end it is at the oldest.
    hand: usize,
}

impl Queue for Ring {
    fn insert(&mut self, version: Version) {
        self.entries.push((version, false));
    }

    fn use_one(&mut self, version: Version, is_re_use: bool) {
        let mut entries = self.entries.iter_mut();
        if is_re_use && let Some((_, is_marked)) = entries.find(|(entry, _)| *entry == version) {
            *is_marked = true;
        }
    }

    fn remove(&mut self, version: Version) {
        if let Some(position) = self.entries.iter().position(|(entry, _)| *entry == version) {
            self.entries.remove(position);
            // What came after it moved up by one.
            self.hand -= usize::from(position < self.hand);
        }
    }

    fn evict(&mut self, _incoming: Version, candidates: &[Candidate]) -> Option<Version> {
        // Twice round: the first takes every mark away, the second finds none.
        for _ in 0..2 * self.entries.len() {
            let position = if self.hand < self.entries.len() { self.hand } else { 0 };
            self.hand = position + 1;
            let (version, is_marked) = &mut self.entries[position];
            if candidates.iter().all(|candidate| candidate.version != *version) || std::mem::take(is_marked) {
                continue;
            }
            self.hand = position;
            return Some(self.entries.remove(position).0);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{aged, miss, token, victim_of};

    /// The example of the authors' first figure, on our letters.
    #[test]
    fn the_hand_goes_on_where_it_stopped() {
        let (mut sieve, mut residents) = (aged(Sieve::default()), Vec::new());
        for index in 0..4 {
            assert_eq!(miss(&mut sieve, index, &mut residents, 4), None);
        }
        token(&mut sieve, 1, &[0, 1]);
        assert_eq!(miss(&mut sieve, 4, &mut residents, 4), Some(2), "0 and 1 lose their marks");
        token(&mut sieve, 2, &[0]);
        assert_eq!(miss(&mut sieve, 5, &mut residents, 4), Some(3), "1 has no mark, but the hand is past it");
        token(&mut sieve, 3, &[4]);
        assert_eq!(miss(&mut sieve, 6, &mut residents, 4), Some(5), "4 was marked; 5 is new and was not used again");
        assert_eq!(miss(&mut sieve, 7, &mut residents, 4), Some(6));
        assert_eq!(miss(&mut sieve, 8, &mut residents, 4), Some(7));
    }

    #[test]
    fn what_may_not_leave_keeps_its_mark() {
        let (mut sieve, mut residents) = (aged(Sieve::default()), Vec::new());
        (0..3).for_each(|index| assert_eq!(miss(&mut sieve, index, &mut residents, 3), None));
        token(&mut sieve, 1, &[0, 2]);
        assert_eq!(victim_of(&mut sieve, &[2]), 2, "marked, but the only candidate");
        assert_eq!(victim_of(&mut sieve, &[0, 1]), 1, "0 lost its mark only now");
        assert_eq!(victim_of(&mut sieve, &[0]), 0);
        assert_eq!(victim_of(&mut sieve, &[0]), 0, "unknown residents are taken in slot order");
    }
}
