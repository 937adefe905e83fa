//! Which versions of which experts are resident, in which slot, and which one is evicted when a slot is needed.
//!
//! The cache owns no memory: it hands out slot numbers, and the engine keeps the arenas behind them. It is
//! single-threaded and deterministic: equal calls give equal answers. The life of a miss:
//!
//! ```text
//! touch(expert, miss) -> acquire(version) -> set_loading(slot, kind) for each kind -> pin(slot)
//!     -> set_ready(slot, kind) as reads land -> products -> unpin(slot)
//! ```
//!
//! A [`Version`] is *resident* from `acquire` until it is evicted or released, also while its slices load, so one
//! version is never loaded twice. A pinned or loading version is never evicted. After a failed read the version stays
//! resident with that slice free: the next use requests it again.
//!
//! An expert's high and low version may both be resident. Slots of equal shape form a pool. A layer's part of a pool
//! is a *share* ([`ShareId`]), or the whole pool is one share of all its layers: a version competes for slots with the
//! members of its share only. A layer has as many shares as its versions have shapes.
//!
//! The life of an upgrade, from a low version to the high one while the link is idle:
//!
//! ```text
//! upgrade(layer) -> acquire_upgrade(high) -> set_loading / set_ready -> release(low)
//! ```
//!
//! A cache can be saved and restored in another run ([`CacheState`]). Predicted versions can be *shielded*
//! ([`Cache::shield`]): others are evicted before them.
//!
//! Methods panic when a caller breaks this order (a bug in the engine, not bad input), and for slots that do not exist.

mod allocate;
mod bytes;
mod evict;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod model_test;
pub mod policy;
mod pools;
mod slots;
mod state;
#[cfg(test)]
mod tests;
mod uses;

pub use allocate::{Allocation, LayerDemand, allocate};
pub use policy::{Candidate, Lru, Now, Policy, Use};
pub use pools::Pools;
pub use slots::{LayerLayout, PoolLayout, ShareId, SliceKinds, SliceState, SlotId};
pub use state::{CacheState, ModelMark, SavedCache, StateError};

use crate::expert::{ExpertId, SliceKind, Version};
use uses::{RecentUses, TokenClock, Uses};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acquired {
    /// The slot, all of its slices free.
    pub slot: SlotId,
    /// The previous version in the slot.
    pub evicted: Option<Version>,
}

/// Residency of all versions of all experts of a model: the pools, and the policy that chooses what leaves.
pub struct Cache {
    pools: Pools,
    policy: Box<dyn Policy>,
    recent: RecentUses,
    now: Now,
    clock: TokenClock,
    is_prompt: bool,
    /// Reused by `acquire`.
    candidates: Vec<Candidate>,
}

impl Cache {
    /// An empty cache; [`PoolLayout::capacities`] divides the slots of a pool among its layers.
    ///
    /// # Panics
    /// If a pool names a layer twice, a version belongs to two shares, a member is of another layer than its share, or
    /// capacities are not one for each layer or more than the pool's slots.
    pub fn new(pools: Vec<PoolLayout>, mut policy: Box<dyn Policy>) -> Self {
        let pools = Pools::new(pools, |share, members| policy.on_share(share, members));
        Self {
            pools,
            policy,
            recent: RecentUses::default(),
            now: Now { token: 0, layer: 0 },
            clock: TokenClock::default(),
            is_prompt: false,
            candidates: Vec::new(),
        }
    }

    pub fn pools(&self) -> &Pools {
        &self.pools
    }

    /// The slot of a resident version, ready or not. `None` also for versions the model does not have.
    pub fn lookup(&self, version: Version) -> Option<SlotId> {
        self.pools.lookup(version)
    }

    /// # Panics
    /// If the slot's layer has no such slice.
    pub fn state(&self, slot: SlotId, kind: SliceKind) -> SliceState {
        self.pools.slot(slot).state(kind)
    }

    /// Whether every slice of the slot's version is ready: a *hit* if it is used now.
    pub fn is_ready(&self, slot: SlotId) -> bool {
        self.pools.slot(slot).is_ready()
    }

    pub fn is_complete(&self, version: Version) -> bool {
        self.lookup(version).is_some_and(|slot| self.is_ready(slot))
    }

    /// Makes `version` resident: in the lowest empty slot of its share, else in place of the policy's victim. `None`,
    /// without a change, if the share has no slots or everything in it is pinned or loading; during a batch the layer's
    /// part of a common share counts ([`Cache::begin_batch`]).
    ///
    /// The slot may be evicted again until a slice of it is loading.
    ///
    /// # Panics
    /// If `version` is resident already, or no share has it.
    pub fn acquire(&mut self, version: Version) -> Option<Acquired> {
        self.acquire_from(version, |cache, share| cache.victim(version, share))
    }

    /// Evicts `version` if it is resident and neither pinned nor loading; `false` otherwise.
    pub fn release(&mut self, version: Version) -> bool {
        let is_evictable = self.lookup(version).is_some_and(|slot| self.pools.slot(slot).is_evictable());
        if is_evictable {
            self.pools.vacate(version);
            self.policy.on_remove(version, self.now);
        }
        is_evictable
    }

    /// A read of the slice has been requested.
    ///
    /// # Panics
    /// If the slot is empty or the slice is not `Free`.
    pub fn set_loading(&mut self, slot: SlotId, kind: SliceKind) {
        self.pools.slot_mut(slot).step(kind, SliceState::Free, SliceState::Loading);
    }

    /// The slice's bytes have arrived.
    ///
    /// # Panics
    /// If the slice is not `Loading`.
    pub fn set_ready(&mut self, slot: SlotId, kind: SliceKind) {
        self.pools.slot_mut(slot).step(kind, SliceState::Loading, SliceState::Ready);
    }

    /// The read failed; the slice is `Free` and may be requested again.
    ///
    /// # Panics
    /// If the slice is not `Loading`.
    pub fn set_failed(&mut self, slot: SlotId, kind: SliceKind) {
        self.pools.slot_mut(slot).step(kind, SliceState::Loading, SliceState::Free);
    }

    /// Keeps the slot's version until a matching [`Cache::unpin`]. Pins count.
    ///
    /// # Panics
    /// If the slot is empty or a slice of it is neither loading nor ready.
    pub fn pin(&mut self, slot: SlotId) {
        self.pools.slot_mut(slot).pin();
    }

    pub fn is_pinned(&self, slot: SlotId) -> bool {
        self.pools.slot(slot).pins > 0
    }

    /// Undoes one [`Cache::pin`].
    ///
    /// # Panics
    /// If the slot is not pinned.
    pub fn unpin(&mut self, slot: SlotId) {
        self.pools.slot_mut(slot).unpin();
    }

    /// The router chose `expert`: call it once per ubatch and expert, before the `acquire` of a miss. The expert's
    /// layer is the running layer from now on. A use that is not skipped counts once for each token that chose the
    /// expert.
    ///
    /// # Panics
    /// If a hit is reported and the expert is not resident in that precision.
    pub fn touch(&mut self, expert: ExpertId, usage: Use) {
        let used = usage.precision.map(|precision| Version { expert, precision });
        let is_resident = used.is_some_and(|version| self.lookup(version).is_some());
        assert!(!usage.hit || is_resident, "{expert}, used as {:?}, is not resident: not a hit", usage.precision);
        self.now.layer = expert.layer;
        if let Some(version) = used {
            let Use { n_tokens, since, .. } = usage;
            self.recent.add(expert, self.now.token, Uses { n: n_tokens, since, of: self.clock.n_tokens() });
            self.pools.mark(version);
        }
        self.policy.on_use(expert, usage, self.now);
    }

    /// The router's probabilities of all experts of `layer` for one token, `[n_expert]`, before the uses of that
    /// token. The layer is the running layer from now on.
    pub fn scores(&mut self, layer: u16, scores: &[f32]) {
        self.now.layer = layer;
        self.policy.on_scores(layer, scores, self.now);
    }

    /// Begins a batch. While a prompt is read, a layer that has an equal part of a common share takes no more slots
    /// from others.
    pub fn begin_batch(&mut self, is_prompt: bool) {
        self.is_prompt = is_prompt;
        self.clock.begin_batch();
        self.now.token = self.clock.token();
    }

    /// The router of `layer` has chosen for this many tokens of the batch or of one of its ubatches. Call it once per
    /// layer and ubatch, before scores and uses. The layer is the running layer from now on.
    pub fn begin_layer(&mut self, layer: u16, n_tokens: u32) {
        self.clock.begin_layer(layer, n_tokens);
        self.now = Now { token: self.clock.token(), layer };
    }

    pub fn end_batch(&mut self, n_tokens: u32) {
        self.clock.end_batch(n_tokens);
        self.now.token = self.clock.token();
    }

    /// Tokens count from 0 again and recent uses are forgotten. Residents stay.
    pub fn begin_sequence(&mut self) {
        self.clock = TokenClock::default();
        self.now.token = 0;
        self.recent.clear();
        self.policy.begin_sequence();
    }

    #[cfg(test)]
    pub(crate) fn recent_uses(&self, expert: ExpertId) -> f32 {
        self.recent.get(expert, self.now.token)
    }

    /// Whether the version's share has an empty slot, so that `acquire` evicts nothing. `false` for unknown versions.
    pub fn has_empty_slot(&self, version: Version) -> bool {
        self.pools.share_of(version).is_some_and(|share| self.may_take_empty(version, share))
    }

    /// Every resident version and its slot, by pool and slot.
    pub fn residents(&self) -> impl Iterator<Item = (Version, SlotId)> {
        self.pools.residents()
    }

    /// Puts `version` into the lowest empty slot of its share, or into that of the victim that `choose` returns.
    fn acquire_from(
        &mut self,
        version: Version,
        choose: impl FnOnce(&mut Self, ShareId) -> Option<Version>,
    ) -> Option<Acquired> {
        let share = self.pools.share_for(version);
        let evicted = if self.may_take_empty(version, share) { None } else { Some(choose(self, share)?) };
        if let Some(evicted) = evicted {
            self.pools.vacate(evicted);
        }
        let slot = self.pools.fill(version, share);
        self.policy.on_insert(version, self.now);
        Some(Acquired { slot, evicted })
    }

    fn may_take_empty(&self, version: Version, share: ShareId) -> bool {
        self.pools.has_empty(share) && !self.stays_in_its_layer(version, share)
    }

    /// Whether the version may only have a slot of its own layer.
    fn stays_in_its_layer(&self, version: Version, share: ShareId) -> bool {
        self.is_prompt && self.pools.has_its_part(version.expert.layer, share)
    }
}
