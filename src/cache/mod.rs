//! Which experts are resident, in which slot, and who leaves when a slot is needed.
//!
//! The cache owns no memory: it hands out slot numbers, and the engine keeps the arenas behind them. It is
//! single-threaded and deterministic: equal calls give equal answers. The life of a miss:
//!
//! ```text
//! touch(expert, miss) -> acquire(expert) -> set_loading(slot, kind) for each kind -> pin(slot)
//!     -> set_ready(slot, kind) as reads land -> products -> unpin(slot)
//! ```
//!
//! An expert is *resident* from `acquire` until it is evicted, also while its slices load, so one expert is never
//! loaded twice. What is pinned or loading is never evicted. After a failed read the expert stays resident with that
//! slice free: the next use requests it again.
//!
//! Methods panic when a caller breaks this order (a bug in the engine, not bad input): each says when.

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod model_test;
pub mod policy;
mod pools;
mod residency;
mod slots;
#[cfg(test)]
mod tests;

pub use policy::{Lru, Now, Policy, Use};
pub use pools::{LayerLayout, PoolLayout};
pub use slots::{SliceKinds, SliceState, SlotId};

use crate::expert::{ExpertId, SliceKind};
use residency::LayerResidency;
use slots::Slot;

/// What [`Cache::acquire`] gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acquired {
    /// The slot, all of its slices free.
    pub slot: SlotId,
    /// Who had the slot until now.
    pub evicted: Option<ExpertId>,
}

/// Residency of all experts of a model.
pub struct Cache {
    pools: Vec<Vec<Slot>>,
    /// By layer number; `None` for dense layers.
    layers: Vec<Option<LayerResidency>>,
    policy: Box<dyn Policy>,
    now: Now,
    /// Reused by `acquire`.
    candidates: Vec<ExpertId>,
}

impl Cache {
    /// An empty cache; slots of a pool are divided among its layers, equally to within one.
    ///
    /// # Panics
    /// If two pools name the same layer.
    pub fn new(pools: Vec<PoolLayout>, policy: Box<dyn Policy>) -> Self {
        let n_layer = pools.iter().flat_map(|pool| &pool.layers).map(|l| usize::from(l.layer) + 1).max().unwrap_or(0);
        let mut layers = vec![None; n_layer];
        let mut slots = Vec::with_capacity(pools.len());
        for (pool, number) in pools.iter().zip(0u16..) {
            let mut pool_slots = Vec::new();
            for (layout, capacity) in pool.layers.iter().zip(pool.shares()) {
                let first = pool_slots.len() as u32; // <= n_slots, a u32
                let entry = &mut layers[usize::from(layout.layer)];
                assert!(entry.is_none(), "layer {} belongs to two pools", layout.layer);
                *entry = Some(LayerResidency::new(number, first, capacity, layout.n_expert));
                pool_slots.extend((0..capacity).map(|_| Slot::new(layout.kinds)));
            }
            slots.push(pool_slots);
        }
        Self { pools: slots, layers, policy, now: Now { token: 0, layer: 0 }, candidates: Vec::new() }
    }

    /// The slot of a resident expert, ready or not. `None` also for experts the model does not have.
    pub fn lookup(&self, expert: ExpertId) -> Option<SlotId> {
        let layer = self.layer(expert.layer)?;
        layer.slot_of(expert.index).map(|index| SlotId { pool: layer.pool, index })
    }

    /// How far a slice has come.
    ///
    /// # Panics
    /// If the slot does not exist or its layer has no such slice.
    pub fn state(&self, slot: SlotId, kind: SliceKind) -> SliceState {
        self.slot(slot).state(kind)
    }

    /// Whether every slice of the slot's expert is ready: a *hit* if it is used now.
    ///
    /// # Panics
    /// If the slot does not exist.
    pub fn is_ready(&self, slot: SlotId) -> bool {
        self.slot(slot).is_ready()
    }

    /// Makes `expert` resident: in an empty slot of its layer's share, else in place of the policy's victim.
    /// `None` when the share is empty or everything in it is pinned or loading; the cache is then unchanged.
    ///
    /// The slot may be evicted again until a slice of it is loading.
    ///
    /// # Panics
    /// If `expert` is resident already, or is not an expert of the pools' layers.
    pub fn acquire(&mut self, expert: ExpertId) -> Option<Acquired> {
        let Some(layer) = self.layers.get_mut(usize::from(expert.layer)).and_then(Option::as_mut) else {
            panic!("{expert}: no pool has this layer");
        };
        assert!(layer.slot_of(expert.index).is_none(), "{expert} is resident already");
        let slots = &mut self.pools[usize::from(layer.pool)];

        let (index, evicted) = match layer.take_empty() {
            Some(index) => (index, None),
            None => {
                self.candidates.clear();
                let filled = layer.filled().map(|index| &slots[index as usize]);
                self.candidates.extend(filled.filter(|slot| slot.is_evictable()).filter_map(|slot| slot.expert));
                if self.candidates.is_empty() {
                    return None;
                }
                let victim = self.candidates[self.policy.victim(expert, &self.candidates, self.now)];
                let index = layer.slot_of(victim.index)?; // candidates are resident
                layer.remove(victim.index);
                (index, Some(victim))
            }
        };
        slots[index as usize].assign(expert);
        layer.insert(expert.index, index);
        self.policy.on_insert(expert, self.now);
        Some(Acquired { slot: SlotId { pool: layer.pool, index }, evicted })
    }

    /// A read of the slice has been requested.
    ///
    /// # Panics
    /// If the slot is empty or the slice is not `Free`.
    pub fn set_loading(&mut self, slot: SlotId, kind: SliceKind) {
        self.slot_mut(slot).step(kind, SliceState::Free, SliceState::Loading);
    }

    /// The slice's bytes have arrived.
    ///
    /// # Panics
    /// If the slice is not `Loading`.
    pub fn set_ready(&mut self, slot: SlotId, kind: SliceKind) {
        self.slot_mut(slot).step(kind, SliceState::Loading, SliceState::Ready);
    }

    /// The read failed; the slice is `Free` and may be requested again.
    ///
    /// # Panics
    /// If the slice is not `Loading`.
    pub fn set_failed(&mut self, slot: SlotId, kind: SliceKind) {
        self.slot_mut(slot).step(kind, SliceState::Loading, SliceState::Free);
    }

    /// Keeps the slot's expert until a matching [`Cache::unpin`]. Pins count.
    ///
    /// # Panics
    /// If the slot is empty or a slice of it is neither loading nor ready.
    pub fn pin(&mut self, slot: SlotId) {
        self.slot_mut(slot).pin();
    }

    /// Undoes one [`Cache::pin`].
    ///
    /// # Panics
    /// If the slot is not pinned.
    pub fn unpin(&mut self, slot: SlotId) {
        self.slot_mut(slot).unpin();
    }

    /// The router chose `expert`: tells the policy, once per token and expert, before the `acquire` a miss leads to.
    /// The layer of the expert is from now on the layer that runs.
    ///
    /// # Panics
    /// If the use is called a hit and the expert is not resident.
    pub fn touch(&mut self, expert: ExpertId, usage: Use) {
        assert!(!usage.hit || self.lookup(expert).is_some(), "{expert} is not resident: not a hit");
        self.now.layer = expert.layer;
        self.policy.on_use(expert, usage, self.now);
    }

    /// The next token begins.
    pub fn next_token(&mut self) {
        self.now.token += 1;
    }

    /// A new sequence begins: tokens count from 0 again. Residents stay.
    pub fn begin_sequence(&mut self) {
        self.now.token = 0;
        self.policy.begin_sequence();
    }

    /// Slots of a layer's share: how many of its experts can be resident at once. 0 for layers without experts.
    pub fn capacity_of_layer(&self, layer: u16) -> u32 {
        self.layer(layer).map_or(0, |layer| layer.capacity)
    }

    /// The slots of a layer's share, as indices into its pool's arenas. Empty for layers without experts.
    pub fn slots_of_layer(&self, layer: u16) -> std::ops::Range<u32> {
        self.layer(layer).map_or(0..0, |layer| layer.first..layer.first + layer.capacity)
    }

    /// Whether the layer's share has a slot that nobody has used yet: `acquire` then evicts nobody.
    pub fn has_empty_slot(&self, layer: u16) -> bool {
        self.layer(layer).is_some_and(LayerResidency::has_empty)
    }

    /// Every resident expert and its slot, by pool and slot.
    pub fn residents(&self) -> impl Iterator<Item = (ExpertId, SlotId)> {
        self.pools.iter().zip(0u16..).flat_map(|(slots, pool)| {
            slots.iter().zip(0u32..).filter_map(move |(slot, index)| Some((slot.expert?, SlotId { pool, index })))
        })
    }

    fn layer(&self, layer: u16) -> Option<&LayerResidency> {
        self.layers.get(usize::from(layer))?.as_ref()
    }

    fn slot(&self, slot: SlotId) -> &Slot {
        &self.pools[usize::from(slot.pool)][slot.index as usize]
    }

    fn slot_mut(&mut self, slot: SlotId) -> &mut Slot {
        &mut self.pools[usize::from(slot.pool)][slot.index as usize]
    }
}
