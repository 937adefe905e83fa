//! S3-FIFO (Yang and others, SOSP 2023): a small queue for what comes, a main one for what comes back.

use super::Candidate;
use super::queues::{Queue, Queues};
use crate::expert::Version;
use std::collections::VecDeque;

/// Re-uses that an entry remembers at most.
const USES_MAX: u8 = 3;

/// Slots per slot of the small queue.
const SLOTS_PER_SMALL: usize = 10;

/// A share's residents in two first-in-first-out queues. Newcomers join the small one, a tenth of the slots; whoever is
/// evicted from it is remembered, and joins the main queue when it comes back. At the end of the small queue an entry
/// with at least two re-uses moves to the main one. At the end of the main queue an entry with re-uses goes round once
/// more with one less. As many are remembered as the main queue has entries, at least one.
pub type S3Fifo = Queues<SmallAndMain>;

#[derive(Clone, Copy, Debug)]
struct Entry {
    version: Version,
    uses: u8,
}

/// Oldest first.
#[derive(Clone, Debug, Default)]
pub struct SmallAndMain {
    small: VecDeque<Entry>,
    main: VecDeque<Entry>,
    ghosts: VecDeque<Version>,
}

/// Position of the oldest entry that may leave.
fn oldest(queue: &VecDeque<Entry>, candidates: &[Candidate]) -> Option<usize> {
    queue.iter().position(|entry| candidates.iter().any(|candidate| candidate.version == entry.version))
}

impl SmallAndMain {
    fn remember(&mut self, version: Version, n_slots: usize) {
        self.ghosts.push_back(version);
        let most = (n_slots - n_slots / SLOTS_PER_SMALL).max(1);
        while self.ghosts.len() > most {
            self.ghosts.pop_front();
        }
    }
}

impl Queue for SmallAndMain {
    fn insert(&mut self, version: Version) {
        let n_ghosts = self.ghosts.len();
        self.ghosts.retain(|ghost| *ghost != version);
        let queue = if self.ghosts.len() < n_ghosts { &mut self.main } else { &mut self.small };
        queue.push_back(Entry { version, uses: 0 });
    }

    fn use_one(&mut self, version: Version, is_re_use: bool) {
        let mut entries = self.small.iter_mut().chain(&mut self.main);
        if is_re_use && let Some(entry) = entries.find(|entry| entry.version == version) {
            entry.uses = (entry.uses + 1).min(USES_MAX);
        }
    }

    fn remove(&mut self, version: Version) {
        self.small.retain(|entry| entry.version != version);
        self.main.retain(|entry| entry.version != version);
    }

    fn evict(&mut self, _incoming: Version, candidates: &[Candidate]) -> Option<Version> {
        let n_slots = self.small.len() + self.main.len();
        // Every round evicts, empties the small queue by one, or lowers a count of the main queue.
        loop {
            let of_small = oldest(&self.small, candidates);
            let of_main = oldest(&self.main, candidates);
            let small_is_due = self.small.len() >= (n_slots / SLOTS_PER_SMALL).max(1);
            match (of_small, of_main) {
                (Some(position), main) if small_is_due || main.is_none() => {
                    let entry = self.small.remove(position)?;
                    if entry.uses <= 1 {
                        self.remember(entry.version, n_slots);
                        return Some(entry.version);
                    }
                    self.main.push_back(Entry { uses: 0, ..entry });
                }
                (_, Some(position)) => {
                    let entry = self.main.remove(position)?;
                    if entry.uses == 0 {
                        return Some(entry.version);
                    }
                    self.main.push_back(Entry { uses: entry.uses - 1, ..entry });
                }
                (_, None) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{aged, high, miss, token, victim_of};

    #[test]
    fn one_hit_wonders_leave_before_what_came_back() {
        let (mut s3fifo, mut residents) = (aged(S3Fifo::default()), Vec::new());
        (0..4).for_each(|index| assert_eq!(miss(&mut s3fifo, index, &mut residents, 4), None));
        (1..3).for_each(|time| token(&mut s3fifo, time, &[0]));
        token(&mut s3fifo, 3, &[1]);
        assert_eq!(
            miss(&mut s3fifo, 4, &mut residents, 4),
            Some(1),
            "0 moves to the main queue; one re-use is not enough"
        );
        assert_eq!(miss(&mut s3fifo, 5, &mut residents, 4), Some(2));
        assert_eq!(miss(&mut s3fifo, 1, &mut residents, 4), Some(3), "1 is remembered: to the main queue");
        assert_eq!(miss(&mut s3fifo, 6, &mut residents, 4), Some(4));
        assert_eq!(miss(&mut s3fifo, 7, &mut residents, 4), Some(5));
        assert_eq!(miss(&mut s3fifo, 8, &mut residents, 4), Some(6));
        residents.sort_unstable();
        assert_eq!(residents, [0, 1, 7, 8]);
    }

    #[test]
    fn the_main_queue_gives_second_chances() {
        let (mut s3fifo, mut residents) = (aged(S3Fifo::default()), Vec::new());
        (0..2).for_each(|index| assert_eq!(miss(&mut s3fifo, index, &mut residents, 2), None));
        (1..4).for_each(|time| token(&mut s3fifo, time, &[0, 1]));
        assert_eq!(
            miss(&mut s3fifo, 2, &mut residents, 2),
            Some(0),
            "both move to the main queue; the first leaves it"
        );
        (4..6).for_each(|time| token(&mut s3fifo, time, &[1]));
        assert_eq!(victim_of(&mut s3fifo, &[1]), 1, "the only candidate, whatever its re-uses");
        assert_eq!(victim_of(&mut s3fifo, &[2]), 2);
    }

    #[test]
    fn ghosts_are_bounded() {
        let (mut s3fifo, mut residents) = (aged(S3Fifo::default()), Vec::new());
        for index in 0..50 {
            miss(&mut s3fifo, index, &mut residents, 5);
        }
        assert_eq!(s3fifo.of(high(0)).0.ghosts, (40..45).map(high).collect::<Vec<_>>());
    }
}
