//! The reads in flight: what was asked for and is not answered yet, where its bytes go, and what waits for a staging
//! slot. The engine reads from a store, the simulator lets virtual time pass.

use std::collections::{HashMap, VecDeque};

use super::interfaces::{Asked, Read, Reads, Target};
use super::layout::Layout;
use super::selection::Used;
use crate::cache::{Cache, SliceState, SlotId};
use crate::expert::{SliceId, SliceKind, Version};
use crate::load::LoadClass;
use crate::store::ReadDone;

/// Records up to this many bytes are read at once: measured, a read of 1.5 MiB wins over three of 0.5. Of larger ones
/// the first product need not wait for the last slice: at 5 MiB one read is 10 % slower than three.
const RECORD_BYTES_MAX: u64 = 2 << 20;

/// Longest record read at once where at most [`FEW_READS`] versions are read: slices would not arrive earlier.
const RECORD_BYTES_MAX_OF_FEW: u64 = 8 << 20;
const FEW_READS: usize = 2;

/// Where the bytes of a needed slice are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a share of the cache, in the row that [`Used::row`] names.
    Cached,
    Staged(usize),
    /// On its way, or waiting for a staging slot.
    Pending,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingOptions {
    /// Staging slots; `None` are as many as it takes.
    pub n_slots: Option<usize>,
    /// Whether later layers' experts may use them.
    pub ahead: bool,
}

/// See the [module](self).
pub(super) struct InFlight<R: Reads> {
    pub(super) reader: R,
    /// By ticket. Tickets are small numbers: one that was answered is issued again.
    asked: Vec<Option<Asked>>,
    /// Where the search for a free ticket begins.
    last_ticket: usize,
    /// Answers that are to be taken.
    pub(super) landed: Vec<ReadDone<R::Error>>,
    pub(super) staging: Staging,
    /// Whether later layers' experts may be staged.
    stages_ahead: bool,
    /// Slices the running layer still has to stage, in the order of use.
    queue: VecDeque<SliceId>,
    /// Slices of the next layer to stage when nothing of the running layer is left to submit.
    ahead: VecDeque<SliceId>,
    /// Reads ahead may be waiting or in flight.
    pub(super) is_reading_ahead: bool,
    /// Reads for free slots may be: those of a layer that runs may have to be withdrawn.
    pub(super) is_filling: bool,
    /// The layer of the split in progress.
    pub(super) running: Option<u16>,
    /// The first wanted read that failed.
    pub(super) failure: Option<R::Error>,
}

impl<R: Reads> InFlight<R> {
    pub(super) fn new(reader: R, staging: StagingOptions) -> Self {
        Self {
            reader,
            asked: Vec::new(),
            last_ticket: 0,
            landed: Vec::new(),
            staging: Staging::new(staging.n_slots),
            stages_ahead: staging.ahead,
            queue: VecDeque::new(),
            ahead: VecDeque::new(),
            is_reading_ahead: false,
            is_filling: false,
            running: None,
            failure: None,
        }
    }

    // Tickets

    /// Adds a read of `bytes` bytes, with a ticket that no outstanding read has. `held`: see [`Read::held`].
    fn read(&mut self, class: LoadClass, target: Target, bytes: u64, held: Option<SlotId>) -> Read {
        let is_free = |ticket: &usize| self.asked[*ticket].is_none();
        let ticket = match (self.last_ticket..self.asked.len()).chain(0..self.last_ticket).find(is_free) {
            Some(free) => free,
            None => {
                self.asked.push(None);
                self.asked.len() - 1
            }
        };
        self.last_ticket = ticket;
        self.asked[ticket] = Some(Asked { target, held, class });
        Read { ticket: ticket as u64, target, bytes, held }
    }

    pub(super) fn outstanding(&self) -> impl Iterator<Item = Asked> {
        self.asked.iter().flatten().copied()
    }

    /// The read of a ticket is answered, refused or withdrawn: the slot that it held is unpinned.
    ///
    /// # Panics
    /// If it is not outstanding.
    pub(super) fn answer(&mut self, ticket: u64, cache: &mut Cache) -> Asked {
        let asked = self.asked[ticket as usize].take().expect("every ticket is answered once");
        if let Some(held) = asked.held {
            cache.unpin(held);
        }
        asked
    }

    /// Takes back reads of a class that have not started.
    pub(super) fn withdraw(
        &mut self,
        class: LoadClass,
        is_obsolete: impl Fn(Version) -> bool,
        cache: &mut Cache,
    ) -> Vec<Asked> {
        let Self { reader, asked, .. } = self;
        let withdrawn = reader.withdraw(class, &mut |ticket| is_of(asked, ticket, &is_obsolete));
        withdrawn.into_iter().map(|ticket| self.answer(ticket, cache)).collect()
    }

    /// Makes background reads of needed versions urgent.
    pub(super) fn promote(&mut self, is_needed: impl Fn(Version) -> bool) {
        let Self { reader, asked, .. } = self;
        for asked in asked.iter_mut().flatten().filter(|asked| is_needed(asked.target.version())) {
            asked.class = LoadClass::OnDemandHigh;
        }
        reader.promote(&mut |ticket| is_of(asked, ticket, &is_needed), LoadClass::OnDemandHigh);
    }

    /// Whether the running split waits for this read.
    pub(super) fn is_wanted(&self, target: Target, cache: &Cache) -> bool {
        self.running == Some(target.version().expert.layer)
            && match target {
                Target::Slot { slot, .. } | Target::Record { slot, .. } => cache.is_pinned(slot),
                Target::Staging { slice, .. } => self.staging.get(slice).is_some(),
            }
    }

    /// Bytes of outstanding reads: of those that the running split waits for, whatever they were asked for as, and of
    /// the others.
    pub(super) fn queued_bytes(&self, cache: &Cache, layout: &Layout) -> (u64, u64) {
        let (mut waited, mut background) = (0, 0);
        for asked in self.outstanding() {
            *(if self.is_wanted(asked.target, cache) { &mut waited } else { &mut background }) +=
                layout.bytes_of(asked);
        }
        (waited, background)
    }

    // Slots

    /// Reads of versions into their slots, whose slices are all loading: small records at once, others slice by slice,
    /// first the slices that are multiplied first.
    pub(super) fn of_slots(
        &mut self,
        class: LoadClass,
        slots: &[(SlotId, Version)],
        order: &[SliceKind],
        cache: &mut Cache,
        layout: &Layout,
    ) -> Vec<Read> {
        let most = if slots.len() <= FEW_READS { RECORD_BYTES_MAX_OF_FEW } else { RECORD_BYTES_MAX };
        let mut reads = Vec::with_capacity(slots.len() * order.len());
        let mut by_slice = Vec::new();
        for &(slot, version) in slots {
            let part = layout.part_of(cache, version);
            let whole = part.map_or(layout.record_bytes(version), |(_, rest)| rest.record);
            match whole.filter(|bytes| *bytes <= most) {
                Some(bytes) => {
                    let held = part.map(|(held, _)| held);
                    if let Some(held) = held {
                        cache.pin(held);
                    }
                    reads.push(self.read(class, Target::Record { slot, version }, bytes, held));
                }
                None => by_slice.push((slot, version, part)),
            }
        }
        for &kind in order {
            for &(slot, version, part) in &by_slice {
                let slice = SliceId { version, kind };
                let bytes = part.map_or(layout.slice_bytes(slice), |(_, rest)| rest.slices[kind.index()]);
                let held = part.map(|(held, _)| held);
                if let Some(held) = held {
                    cache.pin(held);
                }
                reads.push(self.read(class, Target::Slot { slot, slice }, bytes, held));
            }
        }
        reads
    }

    /// Reads of single slices of a version into its slot.
    pub(super) fn of_slices(
        &mut self,
        class: LoadClass,
        slot: SlotId,
        version: Version,
        kinds: &[SliceKind],
        layout: &Layout,
    ) -> Vec<Read> {
        let slices = kinds.iter().map(|&kind| SliceId { version, kind });
        slices.map(|slice| self.read(class, Target::Slot { slot, slice }, layout.slice_bytes(slice), None)).collect()
    }

    // Staging

    /// Where a slice that a step uses is now.
    pub(super) fn locate(&self, slice: SliceId, used: Used, cache: &Cache) -> Place {
        match (used.row, self.staging.get(slice)) {
            (Some(_), _) => {
                let slot = cache.lookup(slice.version).expect("a pinned version is resident");
                if cache.state(slot, slice.kind) == SliceState::Ready { Place::Cached } else { Place::Pending }
            }
            (None, Some(Staged::Ready(slot))) => Place::Staged(slot),
            (None, _) => Place::Pending,
        }
    }

    /// The running layer stages these slices, in the order of use, and nothing staged but them and what `is_kept`
    /// names stays.
    pub(super) fn stage(&mut self, slices: impl Iterator<Item = SliceId>, is_kept: impl Fn(SliceId) -> bool) {
        self.staging.retain(is_kept);
        self.queue = slices.filter(|slice| self.staging.get(*slice).is_none()).collect();
        self.ahead.clear();
    }

    /// The next layer's slices are staged when nothing of the running layer is left to submit, if that is allowed.
    pub(super) fn stage_next_layer(&mut self, versions: &[Version], order: &[SliceKind]) {
        if self.stages_ahead {
            for &kind in order {
                self.ahead.extend(versions.iter().map(|&version| SliceId { version, kind }));
            }
        }
    }

    /// Reads of a later layer's version into staging, of which half stays free for what products wait for. `None` where
    /// there is no room.
    pub(super) fn stage_ahead(&mut self, version: Version, order: &[SliceKind], layout: &Layout) -> Option<Vec<Read>> {
        if !self.stages_ahead || self.staging.n_free() < order.len() + self.staging.len() / 2 {
            return None;
        }
        let slices = order.iter().map(|&kind| SliceId { version, kind });
        let read = |slice| {
            let slot = self.staging.take(slice)?;
            Some(self.read(LoadClass::Prefetch, Target::Staging { slot, slice }, layout.slice_bytes(slice), None))
        };
        Some(slices.filter_map(read).collect())
    }

    /// The next read into a free staging slot: the running layer's come first.
    pub(super) fn next_staged(&mut self, layout: &Layout) -> Option<(LoadClass, Read)> {
        loop {
            let running = self.queue.front().map(|slice| LoadClass::on_demand(slice.version.precision));
            let queue = if running.is_some() { &mut self.queue } else { &mut self.ahead };
            let slice = *queue.front()?;
            if self.staging.get(slice).is_some() {
                queue.pop_front();
                continue;
            }
            let slot = self.staging.take(slice)?;
            queue.pop_front();
            let class = running.unwrap_or(LoadClass::ReadAhead);
            return Some((class, self.read(class, Target::Staging { slot, slice }, layout.slice_bytes(slice), None)));
        }
    }

    /// Makes room for `slice` in staging, whatever is there, and lines it up first.
    pub(super) fn force_staging(&mut self, slice: SliceId) {
        self.staging.retain(|_| false);
        self.ahead.clear();
        self.queue.retain(|queued| *queued != slice);
        self.queue.push_front(slice);
    }

    /// Nothing waits for a staging slot any more: of the running layer, and with `ahead` of the next.
    pub(super) fn forget_queue(&mut self, ahead: bool) {
        self.queue.clear();
        if ahead {
            self.ahead.clear();
        }
    }

    /// Whether some slice of a version is staged, or on its way there.
    pub(super) fn is_staged(&self, version: Version, layout: &Layout) -> bool {
        let kinds = layout.kinds(version.expert.layer);
        kinds.iter().any(|&kind| self.staging.get(SliceId { version, kind }).is_some())
    }
}

/// Whether an outstanding read's version is one of those asked for.
fn is_of(asked: &[Option<Asked>], ticket: u64, is_one: &impl Fn(Version) -> bool) -> bool {
    asked.get(ticket as usize).copied().flatten().is_some_and(|asked| is_one(asked.target.version()))
}

// Staging slots.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Loading(SliceId),
    /// The slice is not wanted any more, but its read is in flight.
    Dropped,
    Ready(SliceId),
}

/// Which slice is in which staging slot. A staging slot holds one slice on its way through a product, for working sets
/// larger than a layer's share of the cache: from the moment its read is submitted until its product is done.
#[derive(Debug)]
pub(super) struct Staging {
    slots: Vec<State>,
    /// A slot more is made where all are taken.
    grows: bool,
    by_slice: HashMap<SliceId, usize>,
}

/// How far a staged slice has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Staged {
    /// Its read is in flight.
    Loading,
    /// Its bytes are complete, in this slot.
    Ready(usize),
}

impl Staging {
    /// `None`: with as many slots as it takes.
    pub(super) fn new(n_slots: Option<usize>) -> Self {
        let slots = vec![State::Free; n_slots.unwrap_or(0)];
        Self { slots, grows: n_slots.is_none(), by_slice: HashMap::new() }
    }

    /// Number of slots.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Slots that can be taken now.
    pub(super) fn n_free(&self) -> usize {
        self.slots.iter().filter(|state| **state == State::Free).count()
    }

    /// Every slice that has a slot.
    pub(super) fn slices(&self) -> impl Iterator<Item = SliceId> {
        self.by_slice.keys().copied()
    }

    pub(super) fn get(&self, slice: SliceId) -> Option<Staged> {
        let slot = *self.by_slice.get(&slice)?;
        Some(if self.slots[slot] == State::Loading(slice) { Staged::Loading } else { Staged::Ready(slot) })
    }

    /// Whether a slice has been read.
    pub(super) fn is_ready(&self, slice: SliceId) -> bool {
        matches!(self.get(slice), Some(Staged::Ready(_)))
    }

    /// Gives `slice` a free slot in state loading; `None` when all are taken.
    pub(super) fn take(&mut self, slice: SliceId) -> Option<usize> {
        debug_assert!(!self.by_slice.contains_key(&slice), "{slice} is staged already");
        let free = self.slots.iter().position(|state| *state == State::Free);
        let slot = free.or_else(|| self.grows.then_some(self.slots.len()))?;
        if slot == self.slots.len() {
            self.slots.push(State::Free);
        }
        self.slots[slot] = State::Loading(slice);
        self.by_slice.insert(slice, slot);
        Some(slot)
    }

    /// The read into `slot` ended.
    pub(super) fn landed(&mut self, slot: usize, complete: bool) {
        match self.slots[slot] {
            State::Loading(slice) if complete => self.slots[slot] = State::Ready(slice),
            State::Loading(slice) => {
                self.by_slice.remove(&slice);
                self.slots[slot] = State::Free;
            }
            State::Dropped => self.slots[slot] = State::Free,
            state => panic!("staging slot {slot} is {state:?}: no read was in flight"),
        }
    }

    /// The slice is no longer wanted.
    pub(super) fn release(&mut self, slice: SliceId) {
        if let Some(slot) = self.by_slice.remove(&slice) {
            self.slots[slot] = match self.slots[slot] {
                State::Loading(_) => State::Dropped,
                _ => State::Free,
            };
        }
    }

    /// Releases every slice for which `keep` is false.
    pub(super) fn retain(&mut self, keep: impl Fn(SliceId) -> bool) {
        let gone: Vec<SliceId> = self.slices().filter(|slice| !keep(*slice)).collect();
        gone.into_iter().for_each(|slice| self.release(slice));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expert::ExpertId;

    fn slice(index: u16) -> SliceId {
        SliceId { version: Version::high(ExpertId { layer: 0, index }), kind: SliceKind::Up }
    }

    #[test]
    fn a_slot_is_reused_only_after_its_read_landed() {
        let mut staging = Staging::new(Some(1));
        assert_eq!(staging.take(slice(0)), Some(0));
        assert_eq!(staging.get(slice(0)), Some(Staged::Loading));
        staging.release(slice(0));
        assert_eq!(staging.get(slice(0)), None);
        assert_eq!(staging.take(slice(1)), None, "the read of slice 0 still writes there");
        staging.landed(0, true);
        assert_eq!(staging.take(slice(1)), Some(0));
        staging.landed(0, true);
        assert_eq!(staging.get(slice(1)), Some(Staged::Ready(0)));
        assert_eq!(staging.len(), 1);
    }

    #[test]
    fn unbounded_staging_grows_only_as_needed() {
        let mut staging = Staging::new(None);
        assert_eq!((staging.take(slice(0)), staging.take(slice(1))), (Some(0), Some(1)));
        staging.landed(0, false);
        assert_eq!((staging.take(slice(2)), staging.len()), (Some(0), 2));
    }
}
