//! Reads that take virtual time.

use std::convert::Infallible;

use super::link::{Link, LinkModel};
use crate::load::{LoadClass, LoadStats};
use crate::residency::{Landed, Read, Reads};

/// A link and its clock.
pub(super) struct VirtualReads {
    link: Link<Read>,
    /// Virtual seconds.
    now: f64,
    bytes: u64,
    /// Reused.
    landed: Vec<Read>,
}

impl VirtualReads {
    pub(super) fn new(model: LinkModel) -> Self {
        Self { link: Link::new(model), now: 0.0, bytes: 0, landed: Vec::new() }
    }

    /// So many seconds pass.
    pub(super) fn pass(&mut self, seconds: f64) {
        self.now = self.now.max(self.now + seconds);
    }

    /// Bytes of all reads that were not taken back, whoever asked.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn advance(&mut self, landed: &mut Vec<Landed<Infallible>>) {
        self.link.advance(self.now, &mut self.landed);
        landed.extend(self.landed.drain(..).map(|read| Landed { ticket: read.ticket, result: Ok(read.bytes) }));
    }
}

impl Reads for VirtualReads {
    type Error = Infallible;

    fn submit(&mut self, class: LoadClass, reads: &[Read]) -> Vec<Landed<Infallible>> {
        for &read in reads {
            self.bytes += read.bytes;
            self.link.submit(class, read, read.bytes);
        }
        Vec::new()
    }

    fn withdraw(&mut self, class: LoadClass, unwanted: &mut dyn FnMut(u64) -> bool) -> Vec<u64> {
        let withdrawn = self.link.withdraw(class, |read| unwanted(read.ticket));
        self.bytes -= withdrawn.iter().map(|read| read.bytes).sum::<u64>();
        withdrawn.into_iter().map(|read| read.ticket).collect()
    }

    fn promote(&mut self, needed: &mut dyn FnMut(u64) -> bool, to: LoadClass) {
        self.link.promote(|read| needed(read.ticket), to);
    }

    fn poll(&mut self, landed: &mut Vec<Landed<Infallible>>) {
        self.advance(landed);
    }

    fn wait(&mut self, landed: &mut Vec<Landed<Infallible>>) -> bool {
        let Some(at) = self.link.next_landing() else { return false };
        self.now = self.now.max(at);
        self.advance(landed);
        true
    }

    fn drain(&mut self, landed: &mut Vec<Landed<Infallible>>) {
        while self.wait(landed) {}
    }

    fn outstanding(&self) -> usize {
        self.link.outstanding()
    }

    /// Its speed is given, and not measured.
    fn stats(&self) -> LoadStats {
        LoadStats::default()
    }

    fn seconds(&self) -> f64 {
        self.now
    }
}
