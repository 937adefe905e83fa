//! Reads in a device's virtual time: for devices that have a clock and the speed of a disk, as the tests' device has.

use std::collections::BTreeMap;

use crate::engine::memory::device_tier::Clock;
use hobbit_core::load::LoadClass;
use hobbit_core::residency::{Read, Reads};
use hobbit_core::sim::{Link, LinkModel};
use hobbit_core::store::ReadDone;

/// Answers of reads that have been made, until their virtual time has come.
pub(crate) struct VirtualDisk {
    clock: Clock,
    link: Link,
    answers: BTreeMap<u64, (LoadClass, ReadDone)>,
}

impl VirtualDisk {
    /// `None` if the clock's device has no such disk.
    pub(crate) fn of(clock: Clock) -> Option<Self> {
        let bytes_per_second = clock.disk_bandwidth()?;
        let link = Link::new(LinkModel { bytes_per_second, ..LinkModel::default() });
        Some(Self { clock, link, answers: BTreeMap::new() })
    }

    /// Queues reads whose answers are known.
    pub(crate) fn submit(&mut self, class: LoadClass, reads: &[Read], answers: impl Iterator<Item = ReadDone>) {
        self.link.advance(self.clock.seconds());
        self.answers.extend(answers.map(|done| (done.ticket, (class, done))));
        self.link.submit(class, reads);
    }

    pub(crate) fn withdraw(&mut self, class: LoadClass, unwanted: &mut dyn FnMut(u64) -> bool) -> Vec<u64> {
        self.link.advance(self.clock.seconds());
        let withdrawn = self.link.withdraw(class, unwanted);
        withdrawn.iter().for_each(|ticket| drop(self.answers.remove(ticket)));
        withdrawn
    }

    pub(crate) fn promote(&mut self, needed: &mut dyn FnMut(u64) -> bool, to: LoadClass) {
        let answers = &mut self.answers;
        let mut needed = |ticket| {
            let is_needed = needed(ticket);
            if let Some((class, _)) = answers.get_mut(&ticket).filter(|_| is_needed) {
                *class = to;
            }
            is_needed
        };
        self.link.promote(&mut needed, to);
    }

    /// Appends the answers that have come by now.
    pub(crate) fn poll(&mut self, landed: &mut Vec<ReadDone>) {
        self.link.advance(self.clock.seconds());
        let mut ended = Vec::new();
        self.link.poll(&mut ended);
        landed.extend(ended.into_iter().filter_map(|done| Some(self.answers.remove(&done.ticket)?.1)));
    }

    /// As [`Reads::wait`]; the device's clock waits, too.
    pub(crate) fn wait(&mut self, landed: &mut Vec<ReadDone>) -> bool {
        self.answers.values().any(|(class, _)| *class != LoadClass::Fill) && self.wait_for_any(landed)
    }

    pub(crate) fn drain(&mut self, landed: &mut Vec<ReadDone>) {
        while self.wait_for_any(landed) {}
    }

    fn wait_for_any(&mut self, landed: &mut Vec<ReadDone>) -> bool {
        let n_before = landed.len();
        self.poll(landed);
        if landed.len() > n_before {
            return true;
        }
        let Some(at) = self.link.next_landing() else { return false };
        self.clock.wait_until(at);
        self.link.advance(at);
        self.poll(landed);
        true
    }

    pub(crate) fn outstanding(&self) -> usize {
        self.link.outstanding()
    }

    pub(crate) fn seconds(&self) -> f64 {
        self.clock.seconds()
    }
}
