//! Reads: where bytes go, what is asked for and answered, and the interface of what brings them.

use crate::cache::SlotId;
use crate::expert::{SliceId, Version};
use crate::load::{LoadClass, LoadStats};

/// Destination of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// One slice's region of a slot.
    Slot { slot: SlotId, slice: SliceId },
    /// All of a slot.
    Record { slot: SlotId, version: Version },
    /// A staging slot.
    Staging { slot: usize, slice: SliceId },
}

impl Target {
    /// The version that is read, or a slice of it.
    pub fn version(&self) -> Version {
        match *self {
            Self::Slot { slice, .. } | Self::Staging { slice, .. } => slice.version,
            Self::Record { version, .. } => version,
        }
    }
}

/// Asks for bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Names the read until it is answered: comes back in [`Landed`].
    pub ticket: u64,
    /// Where the bytes go.
    pub target: Target,
    pub bytes: u64,
    /// The slot of the same expert's low version, whose bits are part of the high one that is read: only what it
    /// lacks comes from the file ([`super::VersionBytes::rest`]). It is complete, and stays as it is until the read
    /// is answered.
    pub held: Option<SlotId>,
}

/// The answer to a [`Read`].
#[derive(Debug)]
pub struct Landed<E> {
    /// The read's ticket.
    pub ticket: u64,
    /// Bytes moved: at least those of the read, more where whole blocks were read.
    pub result: Result<u64, E>,
}

/// Brings bytes, and knows the time.
///
/// An implementation guarantees that
/// - every read that was submitted, and neither refused nor withdrawn, is answered exactly once, also when it fails;
/// - what it answers may be waited for: [`Reads::wait`] ends.
pub trait Reads {
    /// Why a read fails.
    type Error;

    /// Queues reads, in this order within their class. Those that find no room in the queue get no answer, and are
    /// returned with the error for a product that waits for them.
    fn submit(&mut self, class: LoadClass, reads: &[Read]) -> Vec<Landed<Self::Error>>;

    /// Takes back reads of a background class that have not started: the tickets of those that `unwanted` accepts, in
    /// order. They get no answer.
    fn withdraw(&mut self, class: LoadClass, unwanted: &mut dyn FnMut(u64) -> bool) -> Vec<u64>;

    /// Background reads that have not started and whose ticket `needed` accepts become as urgent as `to`.
    fn promote(&mut self, needed: &mut dyn FnMut(u64) -> bool, to: LoadClass);

    /// Appends the answers that have come, without waiting.
    fn poll(&mut self, landed: &mut Vec<Landed<Self::Error>>);

    /// Waits for an answer at least, and appends all that have come. False, and no answer, when none is to come that
    /// a token waits for; reads that fill free slots are not.
    fn wait(&mut self, landed: &mut Vec<Landed<Self::Error>>) -> bool;

    /// Waits until every read is answered, and appends the answers.
    fn drain(&mut self, landed: &mut Vec<Landed<Self::Error>>);

    /// Reads submitted and not yet answered.
    fn outstanding(&self) -> usize;

    /// Bytes read so far, and their time.
    fn stats(&self) -> LoadStats;

    /// Seconds since some moment.
    fn seconds(&self) -> f64;

    /// Nothing that was submitted for free slots has to be prepared for any more.
    fn forget_fills(&mut self) {}
}

/// An outstanding read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    /// Where the bytes go.
    pub(super) target: Target,
    /// See [`Read::held`]. Pinned.
    pub(super) held: Option<SlotId>,
    /// Why it is read now.
    pub(super) class: LoadClass,
}
