//! Interfaces of a residency: [`Reads`] bring bytes, [`DeviceResidency`] says what devices have, and an [`Observer`]
//! sees events.

use crate::cache::SlotId;
use crate::expert::{ExpertId, SliceId, Version};
use crate::load::{LoadClass, LoadStats};
use crate::predict::Predicted;
use crate::route::{Demand, Routing};
use crate::store::ReadDone;

// Reads.

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
    /// Names the read until it is answered: comes back in [`ReadDone`].
    pub ticket: u64,
    /// Where the bytes go.
    pub target: Target,
    pub bytes: u64,
    /// The slot of the same expert's low version, whose bits are part of the high one that is read: only what it
    /// lacks comes from the file ([`super::VersionBytes::rest`]). It is complete, and stays as it is until the read
    /// is answered.
    pub held: Option<SlotId>,
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
    fn submit(&mut self, class: LoadClass, reads: &[Read]) -> Vec<ReadDone<Self::Error>>;

    /// Takes back reads of a background class that have not started: the tickets of those that `unwanted` accepts, in
    /// order. They get no answer.
    fn withdraw(&mut self, class: LoadClass, unwanted: &mut dyn FnMut(u64) -> bool) -> Vec<u64>;

    /// Background reads that have not started and whose ticket `needed` accepts become as urgent as `to`.
    fn promote(&mut self, needed: &mut dyn FnMut(u64) -> bool, to: LoadClass);

    /// Appends the answers that have come, without waiting.
    fn poll(&mut self, landed: &mut Vec<ReadDone<Self::Error>>);

    /// Waits for an answer at least, and appends all that have come. False, and no answer, when none is to come that
    /// a token waits for; reads that fill free slots are not.
    fn wait(&mut self, landed: &mut Vec<ReadDone<Self::Error>>) -> bool;

    /// Waits until every read is answered, and appends the answers.
    fn drain(&mut self, landed: &mut Vec<ReadDone<Self::Error>>);

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

// Devices.

/// Experts in the memory of devices, as far as they concern a layer. By default there are no devices.
pub trait DeviceResidency {
    /// Whether the device that multiplies has a version, so that nothing of it needs to be read.
    fn has(&self, _version: Version) -> bool {
        false
    }

    /// Whether any device has a version, so that it need not be read ahead.
    fn has_on_any(&self, version: Version) -> bool {
        self.has(version)
    }

    /// Whether an upload may still read a staged slice, which must stay until then.
    fn is_uploading(&self, _slice: SliceId) -> bool {
        false
    }

    /// Seconds per byte from the host's slots to the memory where products run, or of the CPU's products where these
    /// are quicker; 0 where products run on the host's slots.
    fn seconds_per_byte(&self) -> f64 {
        0.0
    }

    /// Whether products run in another memory than the host's slots, so that experts there have to be copied.
    fn copies(&self) -> bool {
        self.seconds_per_byte() > 0.0
    }

    /// Whether the device that multiplies has an empty slot for a version, which then stays there.
    fn has_empty_slot(&self, _version: Version) -> bool {
        false
    }
}

impl DeviceResidency for () {}

// Observers: a trace, or the counters of a simulation.

/// An expert that a layer needs, and what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeededExpert {
    pub expert: ExpertId,
    pub demand: Demand,
    /// The version that is used; `None`: it is left out.
    pub version: Option<Version>,
    /// The version was complete where the products run.
    pub hit: bool,
    /// It is resident, staged, or on its way.
    pub is_there: bool,
    /// Bytes of the version; 0 for none.
    pub bytes: u64,
}

/// Sees events, and changes none.
pub trait Observer {
    /// False: skip work that only an observer needs.
    fn is_watching(&self) -> bool {
        true
    }

    /// A layer runs: what its router chose for each token, `weights` `[n_tokens][n_used]` and the router's `scores`
    /// `[n_tokens][n_expert]` where they are known, else empty. `waited`: seconds of waiting for reads so far.
    fn begin_layer(&mut self, _layer: u16, _routing: &Routing, _weights: &[f32], _scores: &[f32], _waited: f64) {}

    /// Tokens of the layer that has begun use these experts in place of its router's choice, `[n_tokens][n_used]`.
    fn rerouted(&mut self, _ids: &[u16]) {}

    /// It has been computed, or the first of its splits has.
    fn end_layer(&mut self, _waited: f64) {}

    /// Experts in the order in which they are asked for.
    fn needed(&mut self, _needed: &NeededExpert) {}

    /// A background read of a version, or of a part of it, was submitted. `whole`: bytes of all of it.
    fn loading(&mut self, _version: Version, _class: LoadClass, _bytes: u64, _whole: u64) {}

    /// A background read, or a part of one, was taken back.
    fn withdrawn(&mut self, _version: Version, _bytes: u64) {}

    /// A version left for another one.
    fn evicted(&mut self, _version: Version) {}

    /// The router of a layer at a `distance` of layers with experts says this about the running layer's input of a
    /// token, `[n_expert]`; `n_used` of them will be chosen.
    fn router_scores(&mut self, _token: usize, _distance: u8, _scores: &[f32], _n_used: usize) {}

    /// A predictor that works without scores expects these.
    fn predicted(&mut self, _predicted: &[Predicted]) {}
}

impl Observer for () {
    fn is_watching(&self) -> bool {
        false
    }
}
