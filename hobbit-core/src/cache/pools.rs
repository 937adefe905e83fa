//! The slots of all pools, and which of them each version has.

use std::collections::BTreeMap;
use std::ops::Range;

use super::slots::{ByExpert, PoolLayout, Share, ShareId, Slot, SlotId};
use crate::expert::{ExpertId, Precision, Version};

#[derive(Clone, Copy, Debug)]
struct Whereabouts {
    share: ShareId,
    /// Index into the pool's slots while it is resident.
    slot: Option<u32>,
    is_shielded: bool,
    /// Only rejected drafts wanted it.
    is_unwanted: bool,
    /// Number of the event that used or inserted it last; 0 for never.
    last_use: u64,
}

/// Slots by pool, and versions by expert.
#[derive(Default)]
pub struct Pools {
    slots: Vec<Vec<Slot>>,
    shares: BTreeMap<ShareId, Share>,
    /// By [`Precision::index`]; `None` for versions that do not exist.
    places: ByExpert<[Option<Whereabouts>; Precision::COUNT]>,
    shielded: Vec<Version>,
    /// Residents that are evicted before all others.
    n_unwanted: u32,
    events: u64,
}

impl Pools {
    /// Empty pools. `on_share` gets the members of each share.
    ///
    /// # Panics
    /// As [`super::Cache::new`].
    pub(super) fn new(layouts: Vec<PoolLayout>, mut on_share: impl FnMut(ShareId, &[Version])) -> Self {
        let mut new = Self::default();
        for (layouts, pool) in layouts.iter().zip(0u16..) {
            let mut slots = Vec::new();
            for (group, capacity) in layouts.groups() {
                let id = ShareId { pool, layer: group[0].layer };
                let mut layers = BTreeMap::new();
                for layout in group {
                    let mut holds = [false; Precision::COUNT];
                    for &member in &layout.members {
                        assert!(member.expert.layer == layout.layer, "{member} cannot belong to {id:?}");
                        let place = &mut new.places.entry(member.expert)[member.precision.index()];
                        assert!(place.is_none(), "{member} belongs to two shares");
                        *place = Some(Whereabouts {
                            share: id,
                            slot: None,
                            is_shielded: false,
                            is_unwanted: false,
                            last_use: 0,
                        });
                        holds[member.precision.index()] = true;
                    }
                    let known = layers.insert(layout.layer, (0, holds));
                    assert!(known.is_none(), "pool {pool} names layer {} twice", layout.layer);
                }
                let first = slots.len() as u32; // <= n_slots, a u32
                let known = new.shares.insert(id, Share { first, capacity, most: capacity, n_filled: 0, layers });
                assert!(known.is_none(), "pool {pool} names layer {} twice", id.layer);
                let members: Vec<Version> = group.iter().flat_map(|layout| layout.members.iter().copied()).collect();
                on_share(id, &members);
                slots.extend((0..capacity).map(|_| Slot::new(group[0].kinds)));
            }
            new.slots.push(slots);
        }
        new
    }

    // Shares

    /// `None` for versions that the model does not have.
    pub fn share_of(&self, version: Version) -> Option<ShareId> {
        self.place(version).map(|place| place.share)
    }

    /// Indices into the pool's arenas. Empty for unknown shares.
    pub fn slots_of_share(&self, share: ShareId) -> Range<u32> {
        self.shares.get(&share).map_or(0..0, Share::slots)
    }

    /// Slots that a share was made with, the most that [`super::Cache::resize_share`] gives. 0 for unknown shares.
    pub fn most_of_share(&self, share: ShareId) -> u32 {
        self.shares.get(&share).map_or(0, |share| share.most)
    }

    pub fn shares(&self) -> impl Iterator<Item = ShareId> {
        self.shares.keys().copied()
    }

    /// Whether nothing in the share is pinned or loading.
    pub fn is_share_idle(&self, share: ShareId) -> bool {
        let slots = self.slots_of_share(share);
        slots
            .map(|index| self.slot(SlotId { pool: share.pool, index }))
            .all(|slot| slot.version.is_none() || slot.is_evictable())
    }

    /// Slots of all shares of the layer with members of this precision: the maximum of these versions that can be
    /// resident. A share that mixes precisions counts for both, a common one for each of its layers.
    pub fn capacity_of_layer(&self, layer: u16, precision: Precision) -> u32 {
        let holds = |share: &&Share| share.layers.get(&layer).is_some_and(|(_, holds)| holds[precision.index()]);
        self.shares.values().filter(holds).map(|share| share.capacity).sum()
    }

    /// 0 for unknown shares.
    pub fn n_empty(&self, share: ShareId) -> u32 {
        self.shares.get(&share).map_or(0, |share| share.capacity.saturating_sub(share.n_filled))
    }

    pub(super) fn has_empty(&self, share: ShareId) -> bool {
        self.shares[&share].has_empty()
    }

    /// Whether a layer has its equal part of a share, among others.
    pub(super) fn has_its_part(&self, layer: u16, share: ShareId) -> bool {
        self.shares[&share].has_its_part(layer)
    }

    /// As [`super::Cache::resize_share`].
    pub(super) fn resize_share(&mut self, share: ShareId, n_slots: u32) -> Option<Vec<Version>> {
        let entry = &self.shares[&share];
        let n_slots = n_slots.min(entry.most);
        let slots = entry.slots();
        let going = (slots.start + n_slots).min(slots.end)..slots.end;
        let going = &self.slots[usize::from(share.pool)][going.start as usize..going.end as usize];
        if going.iter().any(|slot| slot.version.is_some() && !slot.is_evictable()) {
            return None;
        }
        let evicted: Vec<Version> = going.iter().filter_map(|slot| slot.version).collect();
        evicted.iter().for_each(|&version| self.vacate(version));
        self.shares.get_mut(&share).expect("looked up above").capacity = n_slots;
        Some(evicted)
    }

    // Slots

    pub fn occupant(&self, slot: SlotId) -> Option<Version> {
        self.slot(slot).version
    }

    pub(super) fn residents(&self) -> impl Iterator<Item = (Version, SlotId)> {
        self.slots.iter().zip(0u16..).flat_map(|(slots, pool)| {
            slots.iter().zip(0u32..).filter_map(move |(slot, index)| Some((slot.version?, SlotId { pool, index })))
        })
    }

    pub(super) fn slot(&self, slot: SlotId) -> &Slot {
        &self.slots[usize::from(slot.pool)][slot.index as usize]
    }

    pub(super) fn slot_mut(&mut self, slot: SlotId) -> &mut Slot {
        &mut self.slots[usize::from(slot.pool)][slot.index as usize]
    }

    /// Puts a version into the lowest empty slot of its share.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn fill(&mut self, version: Version, share: ShareId) -> SlotId {
        let entry = self.shares.get_mut(&share).expect("places name shares there are");
        let slots = &mut self.slots[usize::from(share.pool)];
        let empty = entry.slots().find(|&index| slots[index as usize].version.is_none());
        let index = empty.expect("fewer filled than slots, or one just vacated");
        slots[index as usize].assign(version);
        entry.count(version.expert.layer, true);
        self.place_mut(version).slot = Some(index);
        self.mark(version);
        SlotId { pool: share.pool, index }
    }

    pub(super) fn vacate(&mut self, version: Version) {
        let Whereabouts { share, slot, is_unwanted, .. } = self.place_mut(version);
        let (share, index) = (*share, slot.take().unwrap_or_else(|| panic!("{version} is not resident")));
        let was_unwanted = std::mem::take(is_unwanted);
        self.n_unwanted -= u32::from(was_unwanted);
        self.slots[usize::from(share.pool)][index as usize].vacate();
        self.shares.get_mut(&share).expect("places name shares there are").count(version.expert.layer, false);
    }

    /// Evictable residents of the share, in slot order: neither pinned nor loading, and not shielded unless all are.
    pub(super) fn evictable(&self, share: ShareId) -> impl Iterator<Item = Version> {
        let Range { start, end } = self.shares[&share].slots();
        let slots = &self.slots[usize::from(share.pool)][start as usize..end as usize];
        let free = move || slots.iter().filter(|slot| slot.is_evictable()).filter_map(|slot| slot.version);
        let all_shielded = self.shielded.is_empty() || free().all(|version| self.is_shielded(version));
        free().filter(move |version| all_shielded || !self.is_shielded(*version))
    }

    // Versions

    pub(super) fn lookup(&self, version: Version) -> Option<SlotId> {
        let place = self.place(version)?;
        place.slot.map(|index| SlotId { pool: place.share.pool, index })
    }

    /// Experts of a layer whose low version is ready and whose high version is not resident, with the latter's share.
    pub(super) fn upgradable(&self, layer: u16) -> impl Iterator<Item = (ExpertId, ShareId)> {
        self.places.layer(layer).iter().zip(0..=u16::MAX).filter_map(move |(places, index)| {
            let expert = ExpertId { layer, index };
            let high = places[Precision::High.index()].as_ref()?;
            let is_ready = self.lookup(Version::low(expert)).is_some_and(|slot| self.slot(slot).is_ready());
            (is_ready && high.slot.is_none()).then_some((expert, high.share))
        })
    }

    /// The share of a version that is not resident.
    ///
    /// # Panics
    /// If it is, or no share has it.
    pub(super) fn share_for(&self, version: Version) -> ShareId {
        let Some(place) = self.place(version) else { panic!("{version}: no pool has this version") };
        assert!(place.slot.is_none(), "{version} is resident already");
        place.share
    }

    /// The version is used or inserted now.
    pub(super) fn mark(&mut self, version: Version) {
        self.events += 1;
        let events = self.events;
        let Some(place) = self.known_mut(version) else { return };
        place.last_use = events;
        let was_unwanted = std::mem::take(&mut place.is_unwanted);
        self.n_unwanted -= u32::from(was_unwanted);
    }

    pub(super) fn last_use(&self, version: Version) -> u64 {
        self.place(version).map_or(0, |place| place.last_use)
    }

    pub(super) fn shield(&mut self, version: Version) {
        let Some(place) = self.known_mut(version) else { return };
        if !std::mem::replace(&mut place.is_shielded, true) {
            self.shielded.push(version);
        }
    }

    pub(super) fn unshield_all(&mut self) {
        for version in std::mem::take(&mut self.shielded) {
            self.place_mut(version).is_shielded = false;
        }
    }

    pub(super) fn is_shielded(&self, version: Version) -> bool {
        self.place(version).is_some_and(|place| place.is_shielded)
    }

    pub(super) fn set_unwanted(&mut self, version: Version) {
        if let Some(place) = self.known_mut(version).filter(|place| place.slot.is_some() && !place.is_unwanted) {
            place.is_unwanted = true;
            self.n_unwanted += 1;
        }
    }

    pub(super) fn has_unwanted(&self) -> bool {
        self.n_unwanted > 0
    }

    pub(super) fn is_unwanted(&self, version: Version) -> bool {
        self.place(version).is_some_and(|place| place.is_unwanted)
    }

    fn place(&self, version: Version) -> Option<&Whereabouts> {
        self.places.get(version.expert)?[version.precision.index()].as_ref()
    }

    fn known_mut(&mut self, version: Version) -> Option<&mut Whereabouts> {
        self.places.get_mut(version.expert)?[version.precision.index()].as_mut()
    }

    fn place_mut(&mut self, version: Version) -> &mut Whereabouts {
        self.known_mut(version).unwrap_or_else(|| panic!("{version}: no pool has this version"))
    }
}
