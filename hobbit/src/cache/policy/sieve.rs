//! SIEVE (Zhang and others, NSDI 2024): a queue with a hand.

use super::by_share::{Arrivals, ByShare};
use super::{Now, Policy, Use};
use crate::cache::ShareId;
use crate::expert::{ExpertId, Version};

/// Residents of a share in order of insertion. A re-use marks a version and moves nothing. The hand goes from the
/// oldest to the newest and round again, takes marks away, and evicts the first candidate that has none; it goes on
/// from there the next time.
#[derive(Clone, Debug, Default)]
pub struct Sieve {
    queues: ByShare<Queue>,
    arrivals: Arrivals,
}

#[derive(Clone, Debug, Default)]
struct Queue {
    /// Oldest first, with their marks.
    entries: Vec<(Version, bool)>,
    /// Where the hand looks next; beyond the end it is at the oldest.
    hand: usize,
}

impl Queue {
    fn remove(&mut self, version: Version) {
        if let Some(position) = self.entries.iter().position(|(entry, _)| *entry == version) {
            self.entries.remove(position);
            // What came after it moved up by one.
            self.hand -= usize::from(position < self.hand);
        }
    }

    fn sweep(&mut self, candidates: &[Version]) -> Option<usize> {
        // Twice round: the first takes every mark away, the second finds none.
        for _ in 0..2 * self.entries.len() {
            let position = if self.hand < self.entries.len() { self.hand } else { 0 };
            self.hand = position + 1;
            let (version, is_marked) = &mut self.entries[position];
            let Some(candidate) = candidates.iter().position(|candidate| candidate == version) else { continue };
            if !std::mem::take(is_marked) {
                return Some(candidate);
            }
        }
        None
    }
}

impl Policy for Sieve {
    fn on_share(&mut self, share: ShareId, members: &[Version]) {
        self.queues.join(share, members);
    }

    fn on_insert(&mut self, version: Version, _now: Now) {
        self.arrivals.on_insert(version);
        self.queues.of(version).entries.push((version, false));
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, _now: Now) {
        let Some(precision) = usage.precision else { return };
        let version = Version { expert, precision };
        if self.arrivals.on_use(version) {
            let entries = &mut self.queues.of(version).entries;
            entries.iter_mut().filter(|(entry, _)| *entry == version).for_each(|(_, is_marked)| *is_marked = true);
        }
    }

    fn on_remove(&mut self, version: Version, _now: Now) {
        self.arrivals.on_leave(version);
        self.queues.of(version).remove(version);
    }

    fn victim(&mut self, incoming: Version, candidates: &[Version], now: Now) -> usize {
        let position = self.queues.of(incoming).sweep(candidates).unwrap_or(0);
        self.on_remove(candidates[position], now);
        position
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{miss, token, victim_of};

    /// The example of the authors' first figure, on our letters.
    #[test]
    fn the_hand_goes_on_where_it_stopped() {
        let (mut sieve, mut residents) = (Sieve::default(), Vec::new());
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
        let (mut sieve, mut residents) = (Sieve::default(), Vec::new());
        (0..3).for_each(|index| assert_eq!(miss(&mut sieve, index, &mut residents, 3), None));
        token(&mut sieve, 1, &[0, 2]);
        assert_eq!(victim_of(&mut sieve, &[2]), 2, "marked, but the only candidate");
        assert_eq!(victim_of(&mut sieve, &[0, 1]), 1, "0 lost its mark only now");
        assert_eq!(victim_of(&mut sieve, &[0]), 0);
        assert_eq!(victim_of(&mut sieve, &[0]), 0, "unknown residents are taken in slot order");
    }
}
