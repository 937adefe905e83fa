//! S3-FIFO (Yang and others, SOSP 2023): a small queue for what comes, a main one for what comes back.

use super::by_share::{Arrivals, ByShare};
use super::{Now, Policy, Use};
use crate::cache::ShareId;
use crate::expert::{ExpertId, Version};
use std::collections::VecDeque;

/// Re-uses that an entry remembers at most.
const USES_MAX: u8 = 3;

/// Slots per slot of the small queue.
const SLOTS_PER_SMALL: usize = 10;

/// A share's residents in two first-in-first-out queues. Newcomers join the small one, a tenth of the slots; whoever is
/// evicted from it is remembered, and joins the main queue when it comes back. At the end of the small queue an entry
/// with at least two re-uses moves to the main one. At the end of the main queue an entry with re-uses goes round once
/// more with one less. As many are remembered as the main queue has entries, at least one.
#[derive(Clone, Debug, Default)]
pub struct S3Fifo {
    queues: ByShare<Queues>,
    arrivals: Arrivals,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    version: Version,
    uses: u8,
}

/// Oldest first.
#[derive(Clone, Debug, Default)]
struct Queues {
    small: VecDeque<Entry>,
    main: VecDeque<Entry>,
    ghosts: VecDeque<Version>,
}

fn remove(queue: &mut VecDeque<Entry>, version: Version) {
    queue.retain(|entry| entry.version != version);
}

/// Position of the oldest entry that may leave.
fn oldest(queue: &VecDeque<Entry>, candidates: &[Version]) -> Option<usize> {
    queue.iter().position(|entry| candidates.contains(&entry.version))
}

impl Queues {
    /// Evicts a candidate; `None` if no candidate is in a queue.
    fn evict(&mut self, candidates: &[Version]) -> Option<Version> {
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

    fn remember(&mut self, version: Version, n_slots: usize) {
        self.ghosts.push_back(version);
        let most = (n_slots - n_slots / SLOTS_PER_SMALL).max(1);
        while self.ghosts.len() > most {
            self.ghosts.pop_front();
        }
    }
}

impl Policy for S3Fifo {
    fn on_share(&mut self, share: ShareId, members: &[Version]) {
        self.queues.join(share, members);
    }

    fn on_insert(&mut self, version: Version, _now: Now) {
        self.arrivals.on_insert(version);
        let Queues { small, main, ghosts } = self.queues.of(version);
        let n_ghosts = ghosts.len();
        ghosts.retain(|ghost| *ghost != version);
        let queue = if ghosts.len() < n_ghosts { main } else { small };
        queue.push_back(Entry { version, uses: 0 });
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, _now: Now) {
        let Some(precision) = usage.precision else { return };
        let version = Version { expert, precision };
        if self.arrivals.on_use(version) {
            let Queues { small, main, .. } = self.queues.of(version);
            let entry = small.iter_mut().chain(main).find(|entry| entry.version == version);
            entry.into_iter().for_each(|entry| entry.uses = (entry.uses + 1).min(USES_MAX));
        }
    }

    fn on_remove(&mut self, version: Version, _now: Now) {
        self.arrivals.on_leave(version);
        let Queues { small, main, .. } = self.queues.of(version);
        remove(small, version);
        remove(main, version);
    }

    fn victim(&mut self, incoming: Version, candidates: &[Version], _now: Now) -> usize {
        let evicted = self.queues.of(incoming).evict(candidates);
        let position = candidates.iter().position(|candidate| Some(*candidate) == evicted).unwrap_or(0);
        self.arrivals.on_leave(candidates[position]);
        position
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{high, miss, token, victim_of};

    #[test]
    fn one_hit_wonders_leave_before_what_came_back() {
        let (mut s3fifo, mut residents) = (S3Fifo::default(), Vec::new());
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
        let (mut s3fifo, mut residents) = (S3Fifo::default(), Vec::new());
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
        let (mut s3fifo, mut residents) = (S3Fifo::default(), Vec::new());
        for index in 0..50 {
            miss(&mut s3fifo, index, &mut residents, 5);
        }
        assert_eq!(s3fifo.queues.of(high(0)).ghosts, (40..45).map(high).collect::<Vec<_>>());
    }
}
