//! Reads in virtual time: a file as a link with three parameters, and a clock.

use std::collections::VecDeque;
use std::convert::Infallible;

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

use crate::load::{LoadClass, LoadStats, LoaderOptions};
use crate::residency::{Read, Reads};
use crate::store::ReadDone;

/// Cost of reads; by default of an NVMe drive: 3 GB/s, 80 µs, 16 reads at a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, SmartDefault)]
pub struct LinkModel {
    #[default(3e9)]
    pub bytes_per_second: f64,
    /// Seconds from the start of a read to its first byte.
    #[default(80e-6)]
    pub latency_seconds: f64,
    /// Maximum reads under way at a time.
    #[default(16)]
    pub in_flight: usize,
}

#[derive(Clone, Copy, Debug)]
struct UnderWay {
    done: f64,
    class: LoadClass,
    read: Read,
}

/// Reads that wait, reads under way, and the clock.
#[derive(Debug)]
pub struct Link {
    model: LinkModel,
    waiting: [VecDeque<Read>; LoadClass::COUNT],
    /// Ascending by time of completion: the link serves one read after the other.
    under_way: VecDeque<UnderWay>,
    /// Completed reads that were not polled yet.
    landed: Vec<Read>,
    /// Virtual seconds.
    now: f64,
    /// Time at which the link has moved everything that has started.
    free_at: f64,
    /// Bytes of all reads of any class that were not withdrawn.
    pub(super) bytes: u64,
}

impl Link {
    /// A link at rest, at virtual time 0.
    pub fn new(model: LinkModel) -> Self {
        let (waiting, under_way) = Default::default();
        Self { model, waiting, under_way, landed: Vec::new(), now: 0.0, free_at: 0.0, bytes: 0 }
    }

    /// Advances the clock; the next [`Reads::poll`] returns the completed reads.
    pub(super) fn pass(&mut self, seconds: f64) {
        self.advance(self.now + seconds);
    }

    /// Completion time of the next read that is under way or could start now.
    pub fn next_landing(&mut self) -> Option<f64> {
        self.start();
        self.under_way.front().map(|read| read.done)
    }

    /// Advances the clock to `until`, in seconds, and completes reads in order. Earlier times change nothing.
    pub fn advance(&mut self, until: f64) {
        while let Some(done) = self.next_landing().filter(|done| *done <= until) {
            self.now = self.now.max(done);
            self.landed.extend(self.under_way.pop_front().map(|under_way| under_way.read));
        }
        self.now = self.now.max(until);
    }

    fn start(&mut self) {
        while self.under_way.len() < self.model.in_flight.max(1) {
            let may_start = |class: &LoadClass| !self.waiting[class.index()].is_empty() && self.may_start(*class);
            let Some(class) = LoadClass::ALL.into_iter().find(may_start) else { return };
            let Some(read) = self.waiting[class.index()].pop_front() else { return };
            let moves_at = self.free_at.max(self.now + self.model.latency_seconds);
            self.free_at = moves_at + read.bytes as f64 / self.model.bytes_per_second.max(1.0);
            self.under_way.push_back(UnderWay { done: self.free_at, class, read });
        }
    }

    /// As in [`crate::load::Loader`]: prefetches yield to demand reads, and few of them are under way.
    fn may_start(&self, class: LoadClass) -> bool {
        let of_class = self.under_way.iter().filter(|under_way| under_way.class == class);
        let is_waited_for = || self.under_way.iter().any(|under_way| !under_way.class.is_background());
        class != LoadClass::Prefetch
            || of_class.map(|under_way| under_way.read.bytes).sum::<u64>() < LoaderOptions::PREFETCH_BYTES
                && !is_waited_for()
    }
}

impl Reads for Link {
    type Error = Infallible;

    fn submit(&mut self, class: LoadClass, reads: &[Read]) -> Vec<ReadDone<Infallible>> {
        self.bytes += reads.iter().map(|read| read.bytes).sum::<u64>();
        self.waiting[class.index()].extend(reads);
        Vec::new()
    }

    fn withdraw(&mut self, class: LoadClass, unwanted: &mut dyn FnMut(u64) -> bool) -> Vec<u64> {
        let withdrawn = take(&mut self.waiting[class.index()], unwanted);
        self.bytes -= withdrawn.iter().map(|read| read.bytes).sum::<u64>();
        withdrawn.into_iter().map(|read| read.ticket).collect()
    }

    fn promote(&mut self, needed: &mut dyn FnMut(u64) -> bool, to: LoadClass) {
        for less in LoadClass::ALL.into_iter().filter(|less| *less > to) {
            let promoted = take(&mut self.waiting[less.index()], needed);
            self.waiting[to.index()].extend(promoted);
        }
    }

    fn poll(&mut self, landed: &mut Vec<ReadDone<Infallible>>) {
        self.advance(self.now);
        landed.extend(self.landed.drain(..).map(|read| ReadDone { ticket: read.ticket, result: Ok(read.bytes) }));
    }

    fn wait(&mut self, landed: &mut Vec<ReadDone<Infallible>>) -> bool {
        let Some(at) = self.next_landing() else { return false };
        self.advance(at);
        self.poll(landed);
        true
    }

    fn drain(&mut self, landed: &mut Vec<ReadDone<Infallible>>) {
        while self.wait(landed) {}
    }

    fn outstanding(&self) -> usize {
        self.landed.len() + self.under_way.len() + self.waiting.iter().map(VecDeque::len).sum::<usize>()
    }

    fn stats(&self) -> LoadStats {
        LoadStats::default()
    }

    fn seconds(&self) -> f64 {
        self.now
    }
}

/// Removes and returns the reads with accepted tickets, in order.
fn take(reads: &mut VecDeque<Read>, is_wanted: &mut dyn FnMut(u64) -> bool) -> VecDeque<Read> {
    let (taken, left) = reads.drain(..).partition(|read| is_wanted(read.ticket));
    *reads = left;
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expert::{ExpertId, SliceId, SliceKind, Version};
    use crate::residency::Target;
    use LoadClass::{OnDemandHigh, OnDemandLow, Prefetch, ReadAhead};

    /// A byte a second, two seconds of latency.
    fn link(in_flight: usize) -> Link {
        Link::new(LinkModel { bytes_per_second: 1.0, latency_seconds: 2.0, in_flight })
    }

    fn submit(link: &mut Link, class: LoadClass, ticket: u64, bytes: u64) {
        let slice = SliceId { version: Version::high(ExpertId { layer: 0, index: 0 }), kind: SliceKind::Gate };
        link.submit(class, &[Read { ticket, target: Target::Staging { slot: 0, slice }, bytes, held: None }]);
    }

    fn landings(link: &mut Link) -> Vec<(f64, u64)> {
        let mut all = Vec::new();
        while let Some(done) = link.next_landing() {
            link.advance(done);
            all.extend(link.landed.drain(..).map(|read| (done, read.ticket)));
        }
        all
    }

    #[test]
    fn latencies_overlap_and_transfers_do_not() {
        let mut one = link(1);
        let mut two = link(2);
        for target in 0..3 {
            submit(&mut one, OnDemandHigh, target, 4);
            submit(&mut two, OnDemandHigh, target, 4);
        }
        assert_eq!(landings(&mut one), [(6.0, 0), (12.0, 1), (18.0, 2)]);
        assert_eq!(landings(&mut two), [(6.0, 0), (10.0, 1), (14.0, 2)]);
        assert_eq!(one.outstanding(), 0);
    }

    #[test]
    fn on_demand_goes_first_but_takes_nothing_back() {
        let mut link = link(1);
        submit(&mut link, ReadAhead, 0, 4);
        submit(&mut link, ReadAhead, 1, 4);
        link.advance(1.0);
        submit(&mut link, OnDemandLow, 2, 4);
        submit(&mut link, OnDemandHigh, 3, 4);
        assert_eq!(landings(&mut link), [(6.0, 0), (12.0, 3), (18.0, 2), (24.0, 1)]);
    }

    #[test]
    fn waiting_reads_can_be_promoted_or_withdrawn() {
        let mut link = link(1);
        (0..4).for_each(|target| submit(&mut link, Prefetch, target, 1));
        link.advance(0.0);
        link.promote(&mut |ticket| ticket == 3, OnDemandHigh);
        assert_eq!(link.withdraw(Prefetch, &mut |ticket| ticket <= 1), [1], "0 has started");
        let order: Vec<u64> = landings(&mut link).into_iter().map(|(_, ticket)| ticket).collect();
        assert_eq!(order, [0, 3, 2]);
    }

    #[test]
    fn guesses_wait_until_nothing_is_waited_for() {
        let mut link = link(4);
        let large = LoaderOptions::PREFETCH_BYTES;
        submit(&mut link, OnDemandHigh, 0, 4);
        submit(&mut link, Prefetch, 1, large);
        submit(&mut link, Prefetch, 2, 1);
        submit(&mut link, ReadAhead, 3, 4);
        link.advance(0.0);
        assert_eq!(link.withdraw(Prefetch, &mut |ticket| ticket == 2), [2]);
        let order: Vec<u64> = landings(&mut link).into_iter().map(|(_, ticket)| ticket).collect();
        assert_eq!(order, [0, 3, 1]);
    }
}
