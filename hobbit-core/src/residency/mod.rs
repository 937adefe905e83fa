//! The residency of experts: which are in memory, which are read, and which versions a layer multiplies.
//!
//! ```text
//! router's choice ─► Selection ─► LayerStep ─► products as slices land ─► end
//!                      │             │   ▲
//!    route: demands ◄──┤             │   └── poll, wait ◄──┐
//!  Precisions          │             ▼                     │
//!                      │     Residency ── in_flight ────► Reads (a loader, or a virtual link)
//!                      │       │  └─ background: ahead (predict, load::prefetch), upgrades, fill
//!                      │       └─ cache (slots) ◄ policy
//!                      └─► Observer (a trace, or counters of a simulation)
//! ```
//!
//! [`run_layer`] takes a layer through its steps, for the engine's CPU and device paths and for the simulator; each
//! implements [`Compute`]. Products ask [`Residency::locate`] and [`Residency::wait`] for slices.
//!
//! Versions beyond their layer's share of the cache stream through staging slots, in the order in which the
//! products use them; meanwhile the next layer's slots are filled ahead if the batch is dense. While nothing else is
//! read, a frequently used low version is replaced by its high version and free slots are filled (`background`). With
//! virtual experts, the present ones change in the background (`virtual_experts`).
//!
//! Pure: no ggml, no memory, no I/O. Bytes and time come from [`Reads`]; router values and device residency are data.

mod ahead;
mod background;
mod begin;
mod counters;
mod devices;
mod drafts;
mod in_flight;
mod latency;
mod layer;
mod layout;
#[cfg(test)]
mod manual;
#[cfg(test)]
mod model_test;
mod observer;
mod precisions;
mod reading;
mod reads;
mod selection;
mod step;
#[cfg(test)]
mod tests;
mod upgrades;
mod virtual_experts;

pub use ahead::{Later, Lookahead, LookaheadOptions, ScoresByLayer, Slots};
pub use counters::Counters;
pub use devices::DeviceResidency;
pub use drafts::Drafts;
pub use in_flight::Place;
pub use latency::Latency;
pub use layer::{Compute, Router, WeightsFor, run_layer};
pub use layout::{LayerShape, LayerShare, Layout, RestBytes, VersionBytes};
pub use observer::{NeededExpert, Observer};
pub use precisions::Precisions;
pub use reads::{Landed, Read, Reads, Target};
pub use selection::{Selection, Split, TokenChoices};
pub use step::{LayerStep, Used};
pub use virtual_experts::VirtualExpertsOptions;

use std::collections::HashSet;

use self::background::Background;
use self::counters::Counts;
use self::in_flight::InFlight;
use crate::cache::{Cache, ShareId, SlotId};
use crate::expert::{ExpertId, Version};
use crate::route::Rerouting;

pub struct Parts<R, O> {
    pub reads: R,
    pub observer: O,
    pub cache: Cache,
    pub layout: Layout,
    pub staging: StagingOptions,
    /// Experts are computed while others are read.
    pub overlaps: bool,
    pub precisions: Precisions,
    /// Predicts the next layers; `None`: nothing is read ahead.
    pub lookahead: Option<Lookahead>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingOptions {
    /// Staging slots; `None` are as many as it takes.
    pub n_slots: Option<usize>,
    /// Whether later layers' experts may use them.
    pub ahead: bool,
}

/// The cache, the reads in flight and the background work, which know nothing of each other: its own methods bring them
/// together. See the [module](self).
pub struct Residency<R: Reads, O> {
    cache: Cache,
    in_flight: InFlight<R>,
    background: Background,
    layout: Layout,
    observer: O,
    counts: Counts,
    drafts: Drafts,
    overlaps: bool,
    pub precisions: Precisions,
    pub rerouting: Rerouting,
    pub reroutes_prompts: bool,
    /// These alone count as missing, wherever experts are; `None` goes by what is in memory.
    pub masked: Option<HashSet<ExpertId>>,
    /// Chooses [`Rerouting::bias`] by the time of tokens; `None`: it stays.
    pub latency: Option<Latency>,
}

impl<R: Reads, O: Observer> Residency<R, O> {
    /// Nothing is resident.
    pub fn new(parts: Parts<R, O>) -> Self {
        let Parts { reads, observer, cache, layout, staging, overlaps, precisions, lookahead } = parts;
        Self {
            cache,
            in_flight: InFlight::new(reads, staging),
            background: Background { lookahead, ..Background::default() },
            counts: Counts::new(layout.n_blocks()),
            drafts: Drafts::default(),
            layout,
            observer,
            overlaps,
            precisions,
            rerouting: Rerouting::default(),
            reroutes_prompts: false,
            masked: None,
            latency: None,
        }
    }

    /// Whether experts are computed while others of their layer are read or copied.
    pub fn overlaps(&self) -> bool {
        self.overlaps
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    pub fn reads(&self) -> &R {
        &self.in_flight.reader
    }

    pub fn reads_mut(&mut self) -> &mut R {
        &mut self.in_flight.reader
    }

    pub fn observer_mut(&mut self) -> &mut O {
        &mut self.observer
    }

    /// Gives a version a slot, whose slices are loading from then on; `None` where it finds none.
    fn acquire(&mut self, version: Version) -> Option<SlotId> {
        let acquired = self.cache.acquire(version)?;
        self.takes(acquired.slot, version, acquired.evicted);
        Some(acquired.slot)
    }

    /// A version has a slot from now on, and will be read.
    fn takes(&mut self, slot: SlotId, version: Version, evicted: Option<Version>) {
        if let Some(evicted) = evicted {
            self.observer.evicted(evicted);
        }
        for &kind in self.layout.kinds(version.expert.layer) {
            self.cache.set_loading(slot, kind);
        }
    }

    /// Sets the number of slots of a share, at most its first number; residents of dropped slots leave.
    /// `false`, and no change, if one of them is in use. To be called after [`Residency::quiesce`].
    pub fn resize_share(&mut self, share: ShareId, n_slots: u32) -> bool {
        let Some(evicted) = self.cache.resize_share(share, n_slots) else { return false };
        evicted.into_iter().for_each(|version| self.observer.evicted(version));
        self.background.fill.is_done = false;
        true
    }

    /// Waits for all that is being read, and for nothing more. Failures are forgotten.
    pub fn quiesce(&mut self) {
        self.settle();
        self.settle_upgrades();
    }

    pub fn n_staging(&self) -> usize {
        self.in_flight.staging.len()
    }

    /// There are so many staging slots from now on.
    ///
    /// # Panics
    /// If there were some before.
    pub fn set_staging(&mut self, n_slots: usize) {
        assert!(self.in_flight.staging.len() == 0, "what is staged would be lost");
        self.in_flight.staging = in_flight::Staging::new(Some(n_slots));
    }
}
