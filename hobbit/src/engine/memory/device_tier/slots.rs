//! Versions in a device's slots: which are resident, pinned and lent, and the memory that they are in.

use std::collections::HashSet;
use std::rc::Rc;

use ggml_sys::llama::ggml_tensor;

use super::{Copies, Memory};
use crate::engine::ggml::{Event, Stream};
use hobbit_core::cache::{Cache, SavedCache, ShareId, SliceState, SlotId};
use hobbit_core::expert::{ExpertId, Precision, SliceKind, Version};
use hobbit_core::residency::Drafts;
use hobbit_core::route::Phase;
use hobbit_core::stats::CacheSlots;

/// Slots of a tier.
pub(crate) struct DeviceSlots {
    pub(crate) cache: Cache,
    /// Uses that its policy will see if the text takes the drafts.
    pub(crate) drafts: Drafts,
    pub(super) memory: Memory,
    /// Slots that the running region uses.
    pub(super) pins: Vec<SlotId>,
    /// Layers with every expert in the slot of its number: [`super::Tier::fill`] was called for all, in order.
    pub(crate) whole: HashSet<u16>,
    /// Streams that compute with them.
    pub(super) loans: Vec<Loan>,
    /// Bytes that the slots will have once no layer is lent, if they differ from the current bytes.
    pub(crate) pending: Option<u64>,
}

/// The slots of a layer's experts in high precision that products need not wait for.
pub(crate) struct SlotsOfLayer {
    pub(crate) pool: u16,
    /// By expert.
    pub(crate) rows: Vec<Option<u32>>,
}

/// A layer's slots of one pool.
pub(super) struct Share {
    /// First slot, counted in the pool.
    pub(super) first: u32,
    /// By slice of the class: `[ne0, ne1, n_slots]`.
    pub(super) tensors: Vec<(SliceKind, *mut ggml_tensor)>,
}

/// A stream that computes with layers that are wholly on the device.
pub(super) struct Loan {
    pub(super) user: usize,
    pub(super) is_running: bool,
    /// Event after the last work it submitted.
    pub(super) fence: Option<Rc<Event>>,
}

impl DeviceSlots {
    pub(super) fn new(cache: Cache, memory: Memory) -> Self {
        let (drafts, pins, whole, loans) = Default::default();
        Self { cache, drafts, memory, pins, whole, loans, pending: None }
    }

    /// Whether a version has a slot.
    pub(crate) fn is_resident(&self, version: Version) -> bool {
        self.cache.lookup(version).is_some()
    }

    /// Whether these slices of a version are in its slot, or on their way into it.
    pub(crate) fn has(&self, version: Version, kinds: &[SliceKind]) -> bool {
        let is_ready = |slot| kinds.iter().all(|&kind| self.cache.state(slot, kind) == SliceState::Ready);
        self.cache.lookup(version).is_some_and(is_ready)
    }

    /// Loads the policy's statistics from an earlier run. Returns the versions that have room in the slots, least
    /// recently used first.
    pub(crate) fn begin_warm_up(&mut self, saved: &SavedCache) -> Vec<Version> {
        self.cache.load_statistics(saved);
        self.cache.pools().that_fit(saved)
    }

    /// Layers that have one share with a slot for each of their `n_expert` experts.
    pub(crate) fn whole_layers(&self, n_expert: impl Fn(u16) -> u16) -> Vec<u16> {
        let n_slots = |layer: u16| self.cache.pools().capacity_of_layer(layer, Precision::High);
        let mut layers = self.memory.layers_of_one_share();
        layers.retain(|&layer| n_slots(layer) == u32::from(n_expert(layer)));
        layers
    }

    /// A batch begins.
    pub(crate) fn begin_batch(&mut self, phase: Phase) {
        self.drafts.forget();
        self.cache.begin_batch(!phase.is_decode());
    }

    /// How the slots are divided among layers, under the name of the device; `None` if there are none.
    pub(crate) fn by_layer(&self, name: &str) -> Option<CacheSlots> {
        CacheSlots::of(name, &self.cache, self.cache.pools().shares().map(|share| share.layer))
    }

    /// Whether no version of a layer has a slot.
    pub(crate) fn is_empty(&self, layer: u16) -> bool {
        self.cache.residents().all(|(version, _)| version.expert.layer != layer)
    }

    /// Pool and row of a version's slot.
    pub(crate) fn place(&self, version: Version) -> Option<(u16, u32)> {
        let slot = self.cache.lookup(version)?;
        Some((slot.pool, slot.index - self.memory.share(version.expert.layer, slot.pool).first))
    }

    /// The slots of a layer's experts; `None` if none of them has one. `arriving`: versions that products wait for.
    pub(crate) fn of_layer(&self, layer: u16, n_expert: u16, arriving: &[Version]) -> Option<SlotsOfLayer> {
        let mut share = None;
        let row = |index| {
            let version = Version::high(ExpertId { layer, index });
            let slot = self.cache.lookup(version).filter(|slot| self.cache.is_ready(*slot))?;
            let (pool, first) = *share.get_or_insert_with(|| (slot.pool, self.memory.share(layer, slot.pool).first));
            (slot.pool == pool && !arriving.contains(&version)).then_some(slot.index - first)
        };
        let rows: Vec<Option<u32>> = (0..n_expert).map(row).collect();
        rows.iter().any(Option::is_some).then(|| SlotsOfLayer { pool: share.map_or(0, |(pool, _)| pool), rows })
    }

    /// The slots of a layer in a pool, as the weights of a product.
    pub(crate) fn tensor(&self, layer: u16, pool: u16, kind: SliceKind) -> *mut ggml_tensor {
        self.memory.share(layer, pool).tensor(kind)
    }

    /// Pins a version if it is resident.
    pub(crate) fn pin(&mut self, version: Version) -> bool {
        let Some(slot) = self.cache.lookup(version) else { return false };
        self.cache.pin(slot);
        self.pins.push(slot);
        true
    }

    /// Gives a version a slot, if it has none and the share has one to give, and pins it there.
    pub(crate) fn acquire(&mut self, version: Version, kinds: &[SliceKind]) {
        if self.cache.pools().share_of(version).is_none() || self.cache.lookup(version).is_some() {
            return;
        }
        let Some(acquired) = self.cache.acquire(version) else { return };
        kinds.iter().for_each(|&kind| self.cache.set_loading(acquired.slot, kind));
        self.cache.pin(acquired.slot);
        self.pins.push(acquired.slot);
    }

    /// Unpins what the running region uses, and gives the slots back whose slices will not arrive.
    pub(super) fn abandon(&mut self) {
        let resident: Vec<(Version, SlotId)> = self.cache.residents().collect();
        self.unpin();
        for (version, slot) in resident {
            let tensors = &self.memory.share(version.expert.layer, slot.pool).tensors;
            if tensors.iter().all(|(kind, _)| self.cache.state(slot, *kind) == SliceState::Ready) {
                continue;
            }
            for &(kind, _) in tensors {
                if self.cache.state(slot, kind) == SliceState::Loading {
                    self.cache.set_failed(slot, kind);
                }
            }
            self.cache.release(version);
        }
    }

    /// The running region no longer uses its slots.
    pub(super) fn unpin(&mut self) {
        for pin in self.pins.drain(..) {
            self.cache.unpin(pin);
        }
    }

    pub(super) fn shares_of_layer(&self, layer: u16) -> Vec<ShareId> {
        self.cache.pools().shares().filter(|share| share.layer == layer).collect()
    }

    pub(super) fn bytes_of_layer(&self, layer: u16) -> u64 {
        let bytes =
            |share: ShareId| self.cache.pools().slots_of_share(share).len() as u64 * self.memory.slot_bytes(share.pool);
        self.shares_of_layer(layer).into_iter().map(bytes).sum()
    }

    /// The layer with the most bytes of slots.
    pub(super) fn largest_layer(&self, except: &[u16]) -> Option<u16> {
        let layers = self.cache.pools().shares().map(|share| share.layer).filter(|layer| !except.contains(layer));
        layers
            .map(|layer| (self.bytes_of_layer(layer), layer))
            .filter(|(bytes, _)| *bytes > 0)
            .max()
            .map(|(_, layer)| layer)
    }

    /// Bytes of all initial slots.
    pub(crate) fn planned_bytes(&self) -> u64 {
        let bytes =
            |share: ShareId| u64::from(self.cache.pools().most_of_share(share)) * self.memory.slot_bytes(share.pool);
        self.cache.pools().shares().map(bytes).sum()
    }

    /// Layers that have or had slots.
    pub(super) fn layers(&self) -> Vec<u16> {
        let mut layers: Vec<u16> = self.cache.pools().shares().map(|share| share.layer).collect();
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    /// The tensor of all experts of a layer, if it is wholly on the device.
    pub(crate) fn complete(&self, layer: u16, kind: SliceKind) -> Option<*mut ggml_tensor> {
        if self.whole.contains(&layer) { self.memory.only_tensor(layer, kind) } else { None }
    }

    /// `user` computes with [`DeviceSlots::complete`] tensors until [`DeviceSlots::returned`].
    pub(crate) fn lend(&mut self, copies: &mut Copies, user: &Stream) {
        // Without divided layers nothing else tidies.
        copies.events.tidy(copies.submitted == copies.done);
        let user = user.raw() as usize;
        self.loans.retain(|loan| loan.user != user);
        self.loans.push(Loan { user, is_running: true, fence: None });
    }

    /// `user` has submitted all work that reads these tensors.
    pub(crate) fn returned(&mut self, copies: &mut Copies, user: &Stream) {
        let fence = copies.events.record(user);
        let user = user.raw() as usize;
        if let Some(loan) = self.loans.iter_mut().find(|loan| loan.user == user) {
            *loan = Loan { user, is_running: false, fence };
        }
    }

    /// Whether a graph is being submitted that reads [`DeviceSlots::complete`] tensors.
    pub(crate) fn is_lent(&self) -> bool {
        self.loans.iter().any(|loan| loan.is_running)
    }

    /// A layer is no longer wholly on the device. Returns `false`, and changes nothing, while it is lent.
    pub(super) fn dissolve(&mut self, layer: u16) -> bool {
        if !self.whole.contains(&layer) {
            return true;
        }
        if self.is_lent() {
            return false;
        }
        self.loans.drain(..).filter_map(|loan| loan.fence).for_each(|fence| fence.synchronize());
        self.whole.remove(&layer)
    }
}

impl SlotsOfLayer {
    /// The row of every expert; of those that have none, that of another one.
    pub(crate) fn table(&self) -> Vec<i32> {
        let any = self.rows.iter().flatten().next().copied().unwrap_or(0);
        self.rows.iter().map(|row| row.unwrap_or(any) as i32).collect()
    }
}

impl Share {
    pub(super) fn tensor(&self, kind: SliceKind) -> *mut ggml_tensor {
        let known = self.tensors.iter().find(|(known, _)| *known == kind);
        known.expect("a share has a tensor for each kind of its class").1
    }
}
