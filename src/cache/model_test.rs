//! The cache against a plain model: a `HashMap` of residents, a `Vec` in order of use, and counts that every token
//! makes smaller.
//!
//! A script of bytes decides the pools and then the calls; steps that would break the cache's order of calls are
//! left out. Used by the tests below and by the fuzz target `cache_model`.

use super::upgrade::{UPGRADE_HYSTERESIS, UPGRADE_USES_MIN};
use super::{Acquired, Cache, LayerLayout, Lru, PoolLayout, ShareId, SliceKinds, SliceState, SlotId, Use};
use crate::expert::{ExpertId, Precision, SliceKind, Version};
use std::collections::{HashMap, HashSet};

/// The cache counts in `f32`: what differs by less than this part may be decided either way.
const ROUNDING: f64 = 1e-3;

/// What the model knows of a resident.
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

/// A version and where it belongs.
struct Member {
    version: Version,
    share: ShareId,
    kinds: SliceKinds,
}

struct Model {
    members: Vec<Member>,
    cache: Cache,
    residents: HashMap<Version, Resident>,
    /// Residents, least recently used first.
    recency: Vec<Version>,
    /// Recent uses.
    uses: HashMap<ExpertId, f64>,
    /// The first slot of each share, how many it has, and with how many it was made.
    firsts: HashMap<ShareId, u32>,
    sizes: HashMap<ShareId, (u32, u32)>,
}

/// What a call that moves versions gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// [`Cache::acquire`].
    Acquired(Option<Acquired>),
    /// [`Cache::acquire_upgrade`], which [`Cache::upgrade`] asked for or the script did.
    Upgraded(Option<ExpertId>, Option<Acquired>),
    /// [`Cache::release`].
    Released(Version, bool),
    /// [`Cache::resize_share`]: slots after the call, and how many residents left; `None` if it was refused.
    Resized(u32, Option<usize>),
}

/// Runs `script` and checks the cache against the model after every call.
/// Returns what moved: equal scripts give equal lists.
///
/// # Panics
/// When the cache and the model differ.
pub fn run(script: &[u8]) -> Vec<Event> {
    let mut bytes = script.iter().copied();
    let mut model = Model::new(read_pools(&mut bytes));
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

/// Every version lies in any pool or in none, so that layers have several shares and shares mix precisions.
fn read_pools(bytes: &mut impl Iterator<Item = u8>) -> Vec<PoolLayout> {
    let mut below = |n: u8| bytes.next().map_or(0, |byte| byte % n);
    let split = [SliceKind::Gate, SliceKind::Up, SliceKind::Down].into_iter().collect::<SliceKinds>();
    let fused = [SliceKind::GateUp, SliceKind::Down].into_iter().collect::<SliceKinds>();
    let first = u16::from(below(3)); // leading dense layers
    let layers = first..first + u16::from(below(3)) + 1;
    let mut pools: Vec<PoolLayout> = (0..below(4) + 1)
        .map(|_| {
            let kinds = if below(2) == 0 { split } else { fused };
            let layers = layers.clone().map(|layer| LayerLayout { layer, members: Vec::new(), kinds });
            PoolLayout { layers: layers.collect(), n_slots: 0 }
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
    }
    pools
}

impl Model {
    fn new(pools: Vec<PoolLayout>) -> Self {
        for_every_pool_shares_are_even(&pools);
        let mut members = Vec::new();
        for (pool, number) in pools.iter().zip(0..) {
            for layout in &pool.layers {
                let (share, kinds) = (ShareId { pool: number, layer: layout.layer }, layout.kinds);
                members.extend(layout.members.iter().map(|&version| Member { version, share, kinds }));
            }
        }
        let cache = Cache::new(pools, Box::new(Lru::default()));
        let slots: Vec<_> = cache.shares().map(|share| (share, cache.slots_of_share(share))).collect();
        let firsts = slots.iter().map(|(share, slots)| (*share, slots.start)).collect();
        let sizes = slots.iter().map(|(share, slots)| (*share, (slots.len() as u32, slots.len() as u32))).collect();
        Self { members, cache, residents: HashMap::new(), recency: Vec::new(), uses: HashMap::new(), firsts, sizes }
    }

    fn call(&mut self, op: u8, a: u8, b: u8, log: &mut Vec<Event>) {
        let Member { version, kinds, .. } = self.members[usize::from(b) % self.members.len()];
        match op % 16 {
            0 | 1 => return self.acquire(version, log),
            8 | 9 => {
                let precision = [None, Some(Precision::High), Some(Precision::Low)][usize::from(a) % 3];
                // As many tokens of a batch as make some experts clearly more used than others.
                return (0..op / 16 % 8).for_each(|_| self.touch(version.expert, precision));
            }
            10 if a < 8 => return self.begin_sequence(),
            10 => return self.next_token(),
            11 if a < 64 => return self.release(version, log),
            3 | 11..=13 => return self.load(version),
            15 if a < 64 => return self.acquire_upgrade(None, version, log),
            15 if a < 96 => return self.resize(version, u32::from(a - 64), log),
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
        let victim = self.evictable(share).next().filter(|_| room.is_none());
        let acquired = self.cache.acquire(version);
        log.push(Event::Acquired(acquired));
        assert_eq!(acquired.is_some(), room.is_some() || victim.is_some(), "acquire of {version}");
        let Some(acquired) = acquired else { return };
        assert_eq!(acquired.evicted, victim, "victim for {version}");
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
            assert!(self.evictable(share).any(|other| other == evicted), "{evicted} cannot leave for {version}");
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
            assert_eq!(self.cache.occupant(slot), None, "{version} left");
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

    /// Brings every slice of a resident.
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

    fn touch(&mut self, expert: ExpertId, precision: Option<Precision>) {
        let used = precision.map(|precision| Version { expert, precision });
        let hit = used.is_some_and(|version| self.residents.get(&version).is_some_and(Resident::is_ready));
        self.cache.touch(expert, Use { hit, precision });
        let Some(version) = used else { return };
        *self.uses.entry(expert).or_default() += 1.0;
        if self.residents.contains_key(&version) {
            self.recency.retain(|other| *other != version);
            self.recency.push(version);
        }
    }

    fn next_token(&mut self) {
        self.cache.next_token();
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

    /// The lowest slot of the share that no resident has.
    fn empty_slot(&self, share: ShareId) -> Option<u32> {
        let taken: HashSet<SlotId> = self.residents.values().map(|resident| resident.slot).collect();
        self.cache.slots_of_share(share).find(|&index| !taken.contains(&SlotId { pool: share.pool, index }))
    }

    /// Residents of the share that may leave, least recently used first.
    fn evictable(&self, share: ShareId) -> impl Iterator<Item = Version> {
        let of_share = self.recency.iter().copied().filter(move |version| self.share_of(*version) == share);
        of_share.filter(|version| self.residents[version].is_evictable())
    }

    /// The least recent uses of a resident of the share that may leave.
    fn coldest(&self, share: ShareId) -> Option<f64> {
        self.evictable(share).map(|version| self.uses_of(version)).min_by(f64::total_cmp)
    }

    /// Whether the expert may be upgraded, its uses taken `factor` times.
    fn may_be_upgraded(&self, high: &Member, factor: f64) -> bool {
        let low_is_ready = self.residents.get(&Version::low(high.version.expert)).is_some_and(Resident::is_ready);
        let uses = self.uses_of(high.version) * factor;
        let yields = || self.coldest(high.share).is_some_and(|coldest| coldest * f64::from(UPGRADE_HYSTERESIS) < uses);
        high.version.precision == Precision::High
            && low_is_ready
            && !self.residents.contains_key(&high.version)
            && uses >= f64::from(UPGRADE_USES_MIN)
            && (self.empty_slot(high.share).is_some() || yields())
    }

    /// Everything one can ask the cache, against the model.
    fn compare(&self) {
        for &Member { version, share, .. } in &self.members {
            let resident = self.residents.get(&version);
            assert_eq!(self.cache.lookup(version), resident.map(|r| r.slot), "slot of {version}");
            assert_eq!(self.cache.share_of(version), Some(share), "share of {version}");
            assert_eq!(self.cache.has_empty_slot(version), self.empty_slot(share).is_some(), "room for {version}");
            let Some(resident) = resident else { continue };
            assert_eq!(self.cache.occupant(resident.slot), Some(version), "who is in the slot of {version}");
            assert_eq!(self.cache.is_ready(resident.slot), resident.is_ready(), "{version} ready");
            assert!(resident.slot.pool == share.pool, "pool of {version}");
            assert!(self.cache.slots_of_share(share).contains(&resident.slot.index), "{version} left its share");
            for (&kind, &state) in &resident.states {
                assert_eq!(self.cache.state(resident.slot, kind), state, "{kind:?} of {version}");
            }
        }
        let listed: HashMap<Version, SlotId> = self.cache.residents().collect();
        let slots: HashSet<SlotId> = listed.values().copied().collect();
        for (&share, &(n_slots, most)) in &self.sizes {
            let first = self.firsts[&share];
            assert_eq!(self.cache.slots_of_share(share), first..first + n_slots, "slots of {share:?}");
            assert_eq!(self.cache.most_of_share(share), most, "most slots of {share:?}");
            let of_share = |version: &Version| self.share_of(*version) == share;
            let is_idle =
                self.residents.iter().filter(|(v, _)| of_share(v)).all(|(_, resident)| resident.is_evictable());
            assert_eq!(self.cache.is_share_idle(share), is_idle, "{share:?} idle");
        }
        assert_eq!(listed.len(), self.residents.len(), "residents");
        assert_eq!(slots.len(), listed.len(), "two versions in one slot");
        for layer in 0..6 {
            self.compare_upgrade(layer);
        }
    }

    fn compare_upgrade(&self, layer: u16) {
        let upgrade = self.cache.upgrade(layer);
        let of_layer = || self.members.iter().filter(|member| member.version.expert.layer == layer);
        let chosen = upgrade.and_then(|expert| of_layer().find(|member| member.version == Version::high(expert)));
        assert_eq!(upgrade.is_some(), chosen.is_some(), "{upgrade:?} has no high version");
        assert!(
            chosen.is_none_or(|member| self.may_be_upgraded(member, 1.0 + ROUNDING)),
            "upgrade of {upgrade:?}: {:?}",
            self.uses
        );
        let most = chosen.map_or(0.0, |member| self.uses_of(member.version));
        for member in of_layer().filter(|member| self.may_be_upgraded(member, 1.0 - ROUNDING)) {
            let uses = self.uses_of(member.version) * (1.0 - ROUNDING);
            assert!(uses <= most, "{} before {upgrade:?}: {:?}", member.version, self.uses);
        }
    }
}

fn for_every_pool_shares_are_even(pools: &[PoolLayout]) {
    let cache = Cache::new(pools.to_vec(), Box::new(Lru::default()));
    let size =
        |number: u16, layout: &LayerLayout| cache.slots_of_share(ShareId { pool: number, layer: layout.layer }).len();
    for (pool, number) in pools.iter().zip(0..) {
        let sizes: Vec<usize> = pool.layers.iter().map(|layout| size(number, layout)).collect();
        let n_member: usize = pool.layers.iter().map(|layout| layout.members.len()).sum();
        assert_eq!(sizes.iter().sum::<usize>(), n_member.min(pool.n_slots as usize), "slots of {pool:?}");
        let largest = sizes.iter().copied().max().unwrap_or(0);
        for (layout, size) in pool.layers.iter().zip(sizes) {
            assert!(size + 1 >= largest || size == layout.members.len(), "shares of {pool:?}");
        }
    }
    for layer in pools.iter().flat_map(|pool| &pool.layers).map(|layout| layout.layer) {
        for precision in Precision::ALL {
            let layouts = pools.iter().zip(0..).flat_map(|(pool, number)| pool.layers.iter().map(move |l| (number, l)));
            let holds = |layout: &LayerLayout| layout.members.iter().any(|member| member.precision == precision);
            let of_precision = layouts.filter(|(_, layout)| layout.layer == layer && holds(layout));
            let expected: usize = of_precision.map(|(number, layout)| size(number, layout)).sum();
            assert_eq!(cache.capacity_of_layer(layer, precision) as usize, expected, "{precision} of layer {layer}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Event, run};

    /// Bytes of xorshift64*, so that a failure names a seed that reproduces it everywhere.
    fn script(seed: u64, len: usize) -> Vec<u8> {
        let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = || {
            x ^= x >> 12;
            x ^= x << 25;
            x ^= x >> 27;
            (x.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 56) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn the_cache_equals_its_model_on_random_scripts() {
        let (mut evictions, mut refusals, mut upgrades, mut displacements, mut releases) = (0, 0, 0, 0, 0);
        let (mut resizes, mut lost, mut refused_resizes) = (0, 0, 0);
        for seed in 1..=300 {
            eprintln!("seed {seed}");
            let script = script(seed, 3000);
            let log = run(&script);
            assert_eq!(log, run(&script), "equal calls, equal answers");
            for event in log {
                match event {
                    Event::Acquired(None) => refusals += 1,
                    Event::Acquired(Some(acquired)) => evictions += usize::from(acquired.evicted.is_some()),
                    Event::Upgraded(asked, acquired) => {
                        upgrades += usize::from(asked.is_some());
                        displacements += usize::from(asked.is_some() && acquired.is_some_and(|a| a.evicted.is_some()));
                    }
                    Event::Released(_, released) => releases += usize::from(released),
                    Event::Resized(_, None) => refused_resizes += 1,
                    Event::Resized(_, Some(evicted)) => {
                        resizes += 1;
                        lost += evicted;
                    }
                }
            }
        }
        let reached = [evictions, refusals, upgrades, displacements, releases, resizes, lost, refused_resizes];
        eprintln!(
            "evictions, refusals, upgrades, of them by displacement, releases, resizes, evicted by these, refused ones: \
             {reached:?}"
        );
        assert!(
            reached.into_iter().zip([1000, 1000, 200, 100, 1000, 1000, 200, 100]).all(|(n, least)| n >= least),
            "scripts reach too little: {reached:?}"
        );
    }
}
