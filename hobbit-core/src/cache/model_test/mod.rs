//! The cache against a plain model: a `HashMap` of residents, a `Vec` in order of use, and counts that every token
//! makes smaller.
//!
//! A script of bytes decides the policy, the pools and then the calls; steps that would break the cache's order of
//! calls are left out. Used by the tests below and by the fuzz target `cache_model`. Whom a policy evicts is known
//! beforehand for LRU; of the others the model knows whom they may evict.

mod compare;
#[cfg(test)]
mod tests;

use super::policy::{self, PolicyKind, Shape, Weights};
use super::{
    Acquired, Allocation, Cache, LayerDemand, LayerLayout, Policy, PoolLayout, ShareId, SliceKinds, SliceState, SlotId,
    Use, allocate,
};
use crate::expert::{ExpertId, Precision, SliceKind, Version};
use std::collections::{HashMap, HashSet};

/// The cache counts in `f32`: what differs by less than this part may be decided either way.
const ROUNDING: f64 = 1e-3;

struct Resident {
    slot: SlotId,
    states: HashMap<SliceKind, SliceState>,
    pins: u32,
}

impl Resident {
    fn is_evictable(&self) -> bool {
        self.pins == 0 && !self.states.values().any(|state| *state == SliceState::Loading)
    }

    fn is_ready(&self) -> bool {
        self.states.values().all(|state| *state == SliceState::Ready)
    }
}

struct Member {
    version: Version,
    share: ShareId,
    kinds: SliceKinds,
}

struct Model {
    /// Whether the policy evicts whom [`Lru`](policy::Lru) would.
    is_lru: bool,
    members: Vec<Member>,
    cache: Cache,
    residents: HashMap<Version, Resident>,
    /// Residents, least recently used first.
    recency: Vec<Version>,
    shielded: HashSet<Version>,
    uses: HashMap<ExpertId, f64>,
    /// The first slot of each share, how many it has, and with how many it was made.
    firsts: HashMap<ShareId, u32>,
    sizes: HashMap<ShareId, (u32, u32)>,
}

/// Result of a call that moves versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Acquired(Option<Acquired>),
    /// [`Cache::acquire_upgrade`], which [`Cache::upgrade`] asked for or the script did.
    Upgraded(Option<ExpertId>, Option<Acquired>),
    Released(Version, bool),
    /// [`Cache::resize_share`]: slots after the call, and how many residents left; `None` if it was refused.
    Resized(u32, Option<usize>),
}

/// Runs `script` with the policy that its first byte names and checks the cache against the model after every call.
/// Returns what moved: equal scripts give equal lists.
///
/// # Panics
/// When the cache and the model differ.
pub fn run(script: &[u8]) -> Vec<Event> {
    let kind = PolicyKind::ALL[usize::from(script.first().copied().unwrap_or(0)) % PolicyKind::ALL.len()];
    run_kind(kind, script.get(1..).unwrap_or_default())
}

fn run_kind(kind: PolicyKind, script: &[u8]) -> Vec<Event> {
    let policy = policy::build(kind, &Weights::default(), Shape { n_layers: 6, low_cost: 0.25 });
    run_policy(policy, kind == PolicyKind::Lru, script)
}

fn run_policy(policy: Box<dyn Policy>, is_lru: bool, script: &[u8]) -> Vec<Event> {
    let mut bytes = script.iter().copied();
    let mut model = Model::new(read_pools(&mut bytes), policy, is_lru);
    let mut log = Vec::new();
    if model.members.is_empty() {
        return log;
    }
    while let (Some(op), Some(a), Some(b)) = (bytes.next(), bytes.next(), bytes.next()) {
        model.call(op, a, b, &mut log);
        model.compare();
    }
    log
}

impl Model {
    fn new(pools: Vec<PoolLayout>, policy: Box<dyn Policy>, is_lru: bool) -> Self {
        compare::shares_are_as_asked(&pools);
        let mut members = Vec::new();
        for (pool, number) in pools.iter().zip(0..) {
            for layout in &pool.layers {
                let of = if pool.is_common { &pool.layers[0] } else { layout };
                let (share, kinds) = (ShareId { pool: number, layer: of.layer }, layout.kinds);
                members.extend(layout.members.iter().map(|&version| Member { version, share, kinds }));
            }
        }
        let cache = Cache::new(pools, policy);
        let slots: Vec<_> = cache.pools().shares().map(|share| (share, cache.pools().slots_of_share(share))).collect();
        let firsts = slots.iter().map(|(share, slots)| (*share, slots.start)).collect();
        let sizes = slots.iter().map(|(share, slots)| (*share, (slots.len() as u32, slots.len() as u32))).collect();
        Self {
            is_lru,
            members,
            cache,
            residents: HashMap::new(),
            recency: Vec::new(),
            shielded: HashSet::new(),
            uses: HashMap::new(),
            firsts,
            sizes,
        }
    }

    fn call(&mut self, op: u8, a: u8, b: u8, log: &mut Vec<Event>) {
        let Member { version, kinds, .. } = self.members[usize::from(b) % self.members.len()];
        match op % 16 {
            0 | 1 => return self.acquire(version, log),
            8 | 9 => {
                let precision = [None, Some(Precision::High), Some(Precision::Low)][usize::from(a) % 3];
                // As many tokens of a batch as make some experts clearly more used than others.
                let weight = f32::from(a) / 64.0;
                return (0..op / 16 % 8).for_each(|_| self.touch(version.expert, precision, weight));
            }
            10 if a < 8 => return self.begin_sequence(),
            10 => return self.next_token(),
            11 if a < 64 => return self.release(version, log),
            3 | 11..=13 => return self.load(version),
            15 if a < 64 => return self.acquire_upgrade(None, version, log),
            15 if a < 96 => return self.resize(version, u32::from(a - 64), log),
            14 if a < 48 => return self.shield(version),
            14 if a < 64 => return self.unshield_all(),
            14 if a < 112 => return self.scores(version, a),
            14 | 15 => return self.upgrade(version.expert.layer, log),
            _ => {}
        }
        let kinds: Vec<_> = kinds.iter().collect();
        let kind = kinds[usize::from(op / 16) % kinds.len()];
        let Some(resident) = self.residents.get_mut(&version) else { return };
        let (slot, state) = (resident.slot, resident.states[&kind]);
        match (op % 16, state) {
            (2, SliceState::Free) => {
                self.cache.set_loading(slot, kind);
                resident.states.insert(kind, SliceState::Loading);
            }
            (4, SliceState::Loading) => {
                self.cache.set_ready(slot, kind);
                resident.states.insert(kind, SliceState::Ready);
            }
            (5, SliceState::Loading) => {
                self.cache.set_failed(slot, kind);
                resident.states.insert(kind, SliceState::Free);
            }
            (6, _) if a < 64 && resident.states.values().all(|state| *state != SliceState::Free) => {
                self.cache.pin(slot);
                resident.pins += 1;
            }
            (7, _) if resident.pins > 0 => {
                self.cache.unpin(slot);
                resident.pins -= 1;
            }
            _ => {}
        }
    }

    fn acquire(&mut self, version: Version, log: &mut Vec<Event>) {
        if self.residents.contains_key(&version) {
            return;
        }
        let share = self.share_of(version);
        let room = self.empty_slot(share);
        let candidates = self.evictable(share);
        let acquired = self.cache.acquire(version);
        log.push(Event::Acquired(acquired));
        assert_eq!(acquired.is_some(), room.is_some() || !candidates.is_empty(), "acquire of {version}");
        let Some(acquired) = acquired else { return };
        assert_eq!(acquired.evicted.is_some(), room.is_none(), "an empty slot comes first");
        if let Some(evicted) = acquired.evicted {
            assert!(candidates.contains(&evicted), "{evicted} cannot leave for {version}: {candidates:?}");
            assert!(!self.is_lru || evicted == candidates[0], "victim for {version}");
        }
        self.moved_in(version, acquired, room);
    }

    fn acquire_upgrade(&mut self, asked: Option<ExpertId>, version: Version, log: &mut Vec<Event>) {
        if self.residents.contains_key(&version) {
            return;
        }
        let share = self.share_of(version);
        let room = self.empty_slot(share);
        let coldest = self.coldest(share);
        let acquired = self.cache.acquire_upgrade(version);
        log.push(Event::Upgraded(asked, acquired));
        assert_eq!(acquired.is_some(), room.is_some() || coldest.is_some(), "upgrade to {version}");
        let Some(acquired) = acquired else { return };
        assert_eq!(acquired.evicted.is_some(), room.is_none(), "an empty slot comes first");
        if let Some(evicted) = acquired.evicted {
            assert!(self.evictable(share).contains(&evicted), "{evicted} cannot leave for {version}");
            let is_coldest = coldest.is_some_and(|least| self.uses_of(evicted) <= least * (1.0 + ROUNDING));
            assert!(is_coldest, "{evicted} is not the coldest: {:?}", self.uses);
        }
        self.moved_in(version, acquired, room);
    }

    fn upgrade(&mut self, layer: u16, log: &mut Vec<Event>) {
        let Some(expert) = self.cache.upgrade(layer) else { return };
        self.acquire_upgrade(Some(expert), Version::high(expert), log);
        let low = self.residents.get(&Version::low(expert));
        // Unless the high version took its place in a share of both.
        if low.is_some_and(Resident::is_evictable) {
            self.release(Version::low(expert), log);
        }
    }

    /// `version` is in its slot now: `room`, if that is where there was room, or where the victim sat.
    fn moved_in(&mut self, version: Version, Acquired { slot, evicted }: Acquired, room: Option<u32>) {
        let left = evicted.map(|evicted| self.remove(evicted));
        let pool = self.share_of(version).pool;
        assert_eq!(Some(slot), left.or(room.map(|index| SlotId { pool, index })), "slot of {version}");
        let kinds = self.members.iter().find(|member| member.version == version).map(|member| member.kinds);
        let states = kinds.into_iter().flat_map(SliceKinds::iter).map(|kind| (kind, SliceState::Free)).collect();
        self.residents.insert(version, Resident { slot, states, pins: 0 });
        self.recency.push(version);
    }

    fn remove(&mut self, version: Version) -> SlotId {
        self.recency.retain(|other| *other != version);
        self.residents.remove(&version).map(|resident| resident.slot).expect("only residents leave")
    }

    fn release(&mut self, version: Version, log: &mut Vec<Event>) {
        let is_evictable = self.residents.get(&version).is_some_and(Resident::is_evictable);
        let released = self.cache.release(version);
        log.push(Event::Released(version, released));
        assert_eq!(released, is_evictable, "release of {version}");
        if released {
            let slot = self.remove(version);
            assert_eq!(self.cache.pools().occupant(slot), None, "{version} left");
        }
    }

    fn resize(&mut self, version: Version, n_slots: u32, log: &mut Vec<Event>) {
        let share = self.share_of(version);
        let first = self.firsts[&share];
        let (before, most) = (self.sizes[&share].0, self.sizes[&share].1);
        let n_slots = n_slots % (most + 2);
        let kept = n_slots.min(most);
        let mut going: Vec<(SlotId, Version)> = self
            .residents
            .iter()
            .filter(|(version, resident)| self.share_of(**version) == share && resident.slot.index >= first + kept)
            .map(|(version, resident)| (resident.slot, *version))
            .collect();
        going.sort_unstable();
        let is_refused = going.iter().any(|(_, version)| !self.residents[version].is_evictable());
        let evicted = self.cache.resize_share(share, n_slots);
        log.push(Event::Resized(if is_refused { before } else { kept }, evicted.as_ref().map(Vec::len)));
        assert_eq!(evicted.is_none(), is_refused, "resize of {share:?} to {n_slots}");
        let Some(evicted) = evicted else { return };
        assert_eq!(evicted, going.iter().map(|(_, version)| *version).collect::<Vec<_>>(), "who left {share:?}");
        for version in evicted {
            self.remove(version);
        }
        self.sizes.insert(share, (kept, most));
    }

    fn load(&mut self, version: Version) {
        let Some(resident) = self.residents.get_mut(&version) else { return };
        for (&kind, state) in &mut resident.states {
            if *state == SliceState::Free {
                self.cache.set_loading(resident.slot, kind);
            }
            if *state != SliceState::Ready {
                self.cache.set_ready(resident.slot, kind);
            }
            *state = SliceState::Ready;
        }
    }

    fn shield(&mut self, version: Version) {
        let stranger = Version::high(ExpertId { layer: 77, index: 7 });
        self.cache.shield([version, stranger, version].into_iter());
        self.shielded.insert(version);
    }

    fn unshield_all(&mut self) {
        self.cache.unshield_all();
        self.shielded.clear();
    }

    /// Scores that differ by expert and call; now and then of fewer experts than there are.
    fn scores(&mut self, version: Version, seed: u8) {
        let score = |index: u8| f32::from(seed.wrapping_mul(31).wrapping_add(index.wrapping_mul(97))) / 255.0;
        self.cache.scores(version.expert.layer, &(0..seed % 9).map(score).collect::<Vec<_>>());
    }

    fn touch(&mut self, expert: ExpertId, precision: Option<Precision>, weight: f32) {
        let used = precision.map(|precision| Version { expert, precision });
        let hit = used.is_some_and(|version| self.residents.get(&version).is_some_and(Resident::is_ready));
        self.cache.touch(expert, Use::by_one(hit, precision, weight));
        let Some(version) = used else { return };
        *self.uses.entry(expert).or_default() += 1.0;
        if self.residents.contains_key(&version) {
            self.recency.retain(|other| *other != version);
            self.recency.push(version);
        }
    }

    fn next_token(&mut self) {
        self.cache.end_batch(1);
        self.uses.values_mut().for_each(|uses| *uses *= 0.5f64.powf(1.0 / 32.0));
    }

    fn begin_sequence(&mut self) {
        self.cache.begin_sequence();
        self.uses.clear();
    }

    fn share_of(&self, version: Version) -> ShareId {
        self.members.iter().find(|member| member.version == version).expect("scripts name members").share
    }

    fn uses_of(&self, version: Version) -> f64 {
        self.uses.get(&version.expert).copied().unwrap_or(0.0)
    }

    fn empty_slot(&self, share: ShareId) -> Option<u32> {
        let taken: HashSet<SlotId> = self.residents.values().map(|resident| resident.slot).collect();
        self.cache.pools().slots_of_share(share).find(|&index| !taken.contains(&SlotId { pool: share.pool, index }))
    }

    /// Residents of the share that may leave, least recently used first: unshielded ones if there are any.
    fn evictable(&self, share: ShareId) -> Vec<Version> {
        let of_share = self.recency.iter().copied().filter(|version| self.share_of(*version) == share);
        let free: Vec<_> = of_share.filter(|version| self.residents[version].is_evictable()).collect();
        let unshielded: Vec<_> = free.iter().copied().filter(|version| !self.shielded.contains(version)).collect();
        if unshielded.is_empty() { free } else { unshielded }
    }

    /// The least recent uses of a resident of the share that may leave.
    fn coldest(&self, share: ShareId) -> Option<f64> {
        self.evictable(share).into_iter().map(|version| self.uses_of(version)).min_by(f64::total_cmp)
    }
}

/// Every version lies in any pool or in none, so that layers have several shares and shares mix precisions.
pub(super) fn read_pools(bytes: &mut impl Iterator<Item = u8>) -> Vec<PoolLayout> {
    let mut below = |n: u8| bytes.next().map_or(0, |byte| byte % n);
    let split = [SliceKind::Gate, SliceKind::Up, SliceKind::Down].into_iter().collect::<SliceKinds>();
    let fused = [SliceKind::GateUp, SliceKind::Down].into_iter().collect::<SliceKinds>();
    let first = u16::from(below(3)); // leading dense layers
    let layers = first..first + u16::from(below(3)) + 1;
    let mut pools: Vec<PoolLayout> = (0..below(4) + 1)
        .map(|_| {
            let kinds = if below(2) == 0 { split } else { fused };
            let layers = layers.clone().map(|layer| LayerLayout { layer, members: Vec::new(), kinds });
            PoolLayout { layers: layers.collect(), n_slots: 0, capacities: None, is_common: false }
        })
        .collect();
    for layer in 0..layers.len() {
        for index in 0..u16::from(below(6)) + 1 {
            let expert = ExpertId { layer: first + layer as u16, index };
            for precision in Precision::ALL {
                // The last choice is no pool at all.
                if let Some(pool) = pools.get_mut(usize::from(below(5))) {
                    pool.layers[layer].members.push(Version { expert, precision });
                }
            }
        }
    }
    for pool in &mut pools {
        let n_member: usize = pool.layers.iter().map(|layer| layer.members.len()).sum();
        pool.n_slots = below(n_member as u8 + 2).into();
        let demand = |layout: &LayerLayout| LayerDemand {
            members: layout.members.len() as u32,
            depth: layout.layer - first,
            needs: 0,
        };
        let demands: Vec<_> = pool.layers.iter().map(demand).collect();
        let kind = [None, Some(Allocation::ShallowFirst { layers: 1 }), Some(Allocation::Even), None];
        let choice = usize::from(below(kind.len() as u8));
        pool.capacities = kind[choice].map(|kind| allocate(kind, pool.n_slots, &demands));
        pool.is_common = choice == 3;
    }
    pools
}
