//! The file as the simulator sees it: a queue with classes, a few reads at once, one link.
//!
//! A read waits until none of a more urgent class can start and one of the places in flight is free; it then takes its
//! latency, beside the others, and its bytes over the link, after the others. What has started cannot be taken back.
//! This is [`crate::load::Loader`] over a device that is given by three numbers.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

use crate::load::{LoadClass, LoaderOptions};

/// What a read costs; by default of an NVMe drive: 3 GB/s, 80 µs, 16 reads at a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, SmartDefault)]
pub struct LinkModel {
    /// Bytes per second of all reads together.
    #[default(3e9)]
    pub bytes_per_second: f64,
    /// Seconds from the start of a read to its first byte.
    #[default(80e-6)]
    pub latency_seconds: f64,
    /// Reads that are under way at a time.
    #[default(16)]
    pub in_flight: usize,
}

impl LinkModel {
    /// Seconds in which the link moves so much, waiting aside.
    pub fn transfer_seconds(&self, bytes: u64) -> f64 {
        bytes as f64 / self.bytes_per_second.max(1.0)
    }
}

#[derive(Clone, Copy, Debug)]
struct Read<T> {
    target: T,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct UnderWay<T> {
    done: f64,
    class: LoadClass,
    bytes: u64,
    target: T,
}

/// Reads that wait and reads under way. `T` says what for.
#[derive(Debug)]
pub(super) struct Link<T> {
    model: LinkModel,
    waiting: [VecDeque<Read<T>>; LoadClass::COUNT],
    /// By time of completion: the link serves one after the other.
    under_way: VecDeque<UnderWay<T>>,
    now: f64,
    /// The link has moved everything that has started.
    free_at: f64,
}

impl<T: Copy> Link<T> {
    pub(super) fn new(model: LinkModel) -> Self {
        Self { model, waiting: Default::default(), under_way: VecDeque::new(), now: 0.0, free_at: 0.0 }
    }

    pub(super) fn submit(&mut self, class: LoadClass, target: T, bytes: u64) {
        self.waiting[class.index()].push_back(Read { target, bytes });
    }

    /// Reads that wait or are under way.
    pub(super) fn outstanding(&self) -> usize {
        self.under_way.len() + self.waiting.iter().map(VecDeque::len).sum::<usize>()
    }

    /// Bytes of reads of some classes that wait or are under way.
    pub(super) fn bytes_of(&self, is_of: impl Fn(LoadClass) -> bool) -> u64 {
        let waiting =
            LoadClass::ALL.into_iter().filter(|class| is_of(*class)).flat_map(|class| &self.waiting[class.index()]);
        let under_way = self.under_way.iter().filter(|read| is_of(read.class));
        waiting.map(|read| read.bytes).chain(under_way.map(|read| read.bytes)).sum()
    }

    /// Waiting reads that are wanted become as urgent as `class`.
    pub(super) fn promote(&mut self, mut is_wanted: impl FnMut(&T) -> bool, class: LoadClass) {
        for less in LoadClass::ALL.into_iter().filter(|less| *less > class) {
            let mut promoted = VecDeque::new();
            self.waiting[less.index()].retain(|read| {
                let wanted = is_wanted(&read.target);
                if wanted {
                    promoted.push_back(*read);
                }
                !wanted
            });
            self.waiting[class.index()].append(&mut promoted);
        }
    }

    /// Takes back reads of a class that have not started.
    pub(super) fn withdraw(&mut self, class: LoadClass, mut is_obsolete: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut withdrawn = Vec::new();
        self.waiting[class.index()].retain(|read| {
            let obsolete = is_obsolete(&read.target);
            if obsolete {
                withdrawn.push(read.target);
            }
            !obsolete
        });
        withdrawn
    }

    /// When the next read that is under way, or could start now, lands.
    pub(super) fn next_landing(&mut self) -> Option<f64> {
        self.start();
        self.under_way.front().map(|read| read.done)
    }

    /// Lets time pass until `now`; what has landed by then, in order.
    pub(super) fn advance(&mut self, now: f64, landed: &mut Vec<T>) {
        while let Some(done) = self.next_landing().filter(|done| *done <= now) {
            self.now = self.now.max(done);
            landed.extend(self.under_way.pop_front().map(|read| read.target));
        }
        self.now = self.now.max(now);
    }

    fn start(&mut self) {
        while self.under_way.len() < self.model.in_flight.max(1) {
            let may_start = |class: &LoadClass| !self.waiting[class.index()].is_empty() && self.may_start(*class);
            let Some(class) = LoadClass::ALL.into_iter().find(may_start) else { return };
            let Some(read) = self.waiting[class.index()].pop_front() else { return };
            let moves_at = self.free_at.max(self.now + self.model.latency_seconds);
            self.free_at = moves_at + self.model.transfer_seconds(read.bytes);
            let (done, bytes, target) = (self.free_at, read.bytes, read.target);
            self.under_way.push_back(UnderWay { done, class, bytes, target });
        }
    }

    /// As in [`crate::load::Loader`]: prefetches wait for what is waited for, and few of them are under way.
    fn may_start(&self, class: LoadClass) -> bool {
        let of_class = self.under_way.iter().filter(|read| read.class == class);
        let is_waited_for = || self.under_way.iter().any(|read| !read.class.is_background());
        class != LoadClass::Prefetch
            || of_class.map(|read| read.bytes).sum::<u64>() < LoaderOptions::PREFETCH_BYTES && !is_waited_for()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LoadClass::{OnDemandHigh, OnDemandLow, Prefetch, ReadAhead};

    /// A byte a second, two seconds of latency.
    fn link(in_flight: usize) -> Link<u8> {
        Link::new(LinkModel { bytes_per_second: 1.0, latency_seconds: 2.0, in_flight })
    }

    fn landings(link: &mut Link<u8>) -> Vec<(f64, u8)> {
        let mut all = Vec::new();
        while let Some(done) = link.next_landing() {
            let mut landed = Vec::new();
            link.advance(done, &mut landed);
            all.extend(landed.into_iter().map(|target| (done, target)));
        }
        all
    }

    #[test]
    fn latencies_overlap_and_transfers_do_not() {
        let mut one = link(1);
        let mut two = link(2);
        for target in 0..3 {
            one.submit(OnDemandHigh, target, 4);
            two.submit(OnDemandHigh, target, 4);
        }
        assert_eq!((two.bytes_of(|class| class == OnDemandHigh), two.bytes_of(LoadClass::is_background)), (12, 0));
        assert_eq!(landings(&mut one), [(6.0, 0), (12.0, 1), (18.0, 2)]);
        assert_eq!(landings(&mut two), [(6.0, 0), (10.0, 1), (14.0, 2)]);
        assert_eq!(one.outstanding(), 0);
    }

    #[test]
    fn on_demand_goes_first_but_takes_nothing_back() {
        let mut link = link(1);
        link.submit(ReadAhead, 0, 4);
        link.submit(ReadAhead, 1, 4);
        let mut landed = Vec::new();
        link.advance(1.0, &mut landed);
        link.submit(OnDemandLow, 2, 4);
        link.submit(OnDemandHigh, 3, 4);
        assert_eq!(landings(&mut link), [(6.0, 0), (12.0, 3), (18.0, 2), (24.0, 1)]);
    }

    #[test]
    fn what_waits_can_be_promoted_or_withdrawn() {
        let mut link = link(1);
        (0..4).for_each(|target| link.submit(Prefetch, target, 1));
        link.advance(0.0, &mut Vec::new());
        link.promote(|target| *target == 3, OnDemandHigh);
        assert_eq!(link.withdraw(Prefetch, |target| *target <= 1), [1], "0 has started");
        let order: Vec<u8> = landings(&mut link).into_iter().map(|(_, target)| target).collect();
        assert_eq!(order, [0, 3, 2]);
    }

    #[test]
    fn guesses_wait_until_nothing_is_waited_for() {
        let mut link = link(4);
        let large = LoaderOptions::PREFETCH_BYTES;
        link.submit(OnDemandHigh, 0, 4);
        link.submit(Prefetch, 1, large);
        link.submit(Prefetch, 2, 1);
        link.submit(ReadAhead, 3, 4);
        let mut landed = Vec::new();
        link.advance(0.0, &mut landed);
        assert_eq!(link.withdraw(Prefetch, |target| *target == 2), [2]);
        let order: Vec<u8> = landings(&mut link).into_iter().map(|(_, target)| target).collect();
        assert_eq!(order, [0, 3, 1]);
    }

    #[test]
    fn an_idle_link_starts_at_once() {
        let mut link = link(4);
        link.advance(100.0, &mut Vec::new());
        link.submit(Prefetch, 7, 1);
        assert_eq!(link.next_landing(), Some(103.0));
    }
}
