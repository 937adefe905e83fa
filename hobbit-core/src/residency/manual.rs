//! A test double whose reads are completed manually. Its memory is a map of slots and staging slots.

use std::collections::HashMap;

use super::{
    DeviceResidency, LayerShape, LayerStep, Layout, Parts, Place, Precisions, Read, Reads, Residency, RestBytes,
    Selection, Split, StagingOptions, Target, VersionBytes,
};
use crate::cache::policy::{self, PolicyKind, Shape, Weights};
use crate::cache::{Cache, LayerLayout, PoolLayout, SliceKinds, SlotId};
use crate::expert::{ExpertId, SliceId, SliceKind, Version};
use crate::load::{LoadClass, LoadStats};
use crate::options::{PrecisionMode, PrecisionOptions};
use crate::route::{Phase, Thresholds};
use crate::store::ReadDone;

/// The matrices of every expert.
pub(super) const KINDS: [SliceKind; 3] = [SliceKind::Gate, SliceKind::Up, SliceKind::Down];

/// Submitted reads, and memory filled by completed ones.
#[derive(Default)]
pub(super) struct Manual {
    /// By order of submission.
    pub(super) waiting: Vec<(LoadClass, Read)>,
    landed: Vec<ReadDone<Read>>,
    /// Contents of each slot's region. Missing while it is being written.
    pub(super) slots: HashMap<(SlotId, SliceKind), Version>,
    /// Contents of staging slots.
    pub(super) staged: HashMap<usize, SliceId>,
    /// Number of next reads that find no room.
    pub(super) refuses: usize,
    /// The reads that [`Reads::wait`] lands next: positions among the expected ones, and whether they fail.
    pub(super) script: Vec<(usize, bool)>,
    /// Every read that was submitted and not refused.
    pub(super) n_submitted: usize,
    /// Their answers, and those that were withdrawn.
    pub(super) n_answered: usize,
    now: f64,
}

impl Manual {
    /// The regions that a read fills.
    fn regions(target: Target) -> Vec<(SlotId, SliceKind)> {
        match target {
            Target::Slot { slot, slice } => vec![(slot, slice.kind)],
            Target::Record { slot, .. } => KINDS.map(|kind| (slot, kind)).to_vec(),
            Target::Staging { .. } => Vec::new(),
        }
    }

    /// Lands the read at a position; the residency has yet to ask.
    pub(super) fn land(&mut self, position: usize, fails: bool) {
        let (_, read) = self.waiting.remove(position);
        self.n_answered += 1;
        self.now += 1.0;
        if let (Some(held), Target::Slot { .. } | Target::Record { .. }) = (read.held, read.target) {
            // Only what the held version lacks is read.
            let low = Version::low(read.target.version().expert);
            for (_, kind) in Self::regions(read.target) {
                assert_eq!(self.slots.get(&(held, kind)), Some(&low), "{read:?}: what it is a part of has gone");
            }
        }
        if !fails {
            for region in Self::regions(read.target) {
                self.slots.insert(region, read.target.version());
            }
            if let Target::Staging { slot, slice } = read.target {
                self.staged.insert(slot, slice);
            }
        }
        let result = if fails { Err(read) } else { Ok(read.bytes) };
        self.landed.push(ReadDone { ticket: read.ticket, result });
    }
}

impl Reads for Manual {
    /// The read that failed.
    type Error = Read;

    fn submit(&mut self, class: LoadClass, reads: &[Read]) -> Vec<ReadDone<Read>> {
        let mut refused = Vec::new();
        for &read in reads {
            assert!(self.waiting.iter().all(|(_, own)| own.ticket != read.ticket), "{read:?}: the ticket is in use");
            for region in Self::regions(read.target) {
                let is_written = |own: &Read| Self::regions(own.target).contains(&region);
                assert!(!self.waiting.iter().any(|(_, own)| is_written(own)), "{read:?}: two reads into one place");
                self.slots.remove(&region);
            }
            if let Target::Staging { slot, .. } = read.target {
                self.staged.remove(&slot);
            }
            if self.refuses > 0 {
                self.refuses -= 1;
                refused.push(ReadDone { ticket: read.ticket, result: Err(read) });
                continue;
            }
            self.n_submitted += 1;
            self.waiting.push((class, read));
        }
        refused
    }

    fn withdraw(&mut self, class: LoadClass, unwanted: &mut dyn FnMut(u64) -> bool) -> Vec<u64> {
        assert!(class.is_background());
        let mut withdrawn = Vec::new();
        self.waiting.retain(|(own, read)| {
            let goes = *own == class && unwanted(read.ticket);
            if goes {
                withdrawn.push(read.ticket);
            }
            !goes
        });
        self.n_answered += withdrawn.len();
        withdrawn
    }

    fn promote(&mut self, needed: &mut dyn FnMut(u64) -> bool, to: LoadClass) {
        for (class, read) in &mut self.waiting {
            if class.is_background() && needed(read.ticket) {
                *class = to;
            }
        }
    }

    fn poll(&mut self, landed: &mut Vec<ReadDone<Read>>) {
        landed.append(&mut self.landed);
    }

    fn wait(&mut self, landed: &mut Vec<ReadDone<Read>>) -> bool {
        if self.landed.is_empty() {
            let expected: Vec<usize> =
                (0..self.waiting.len()).filter(|at| self.waiting[*at].0 != LoadClass::Fill).collect();
            if expected.is_empty() {
                return false;
            }
            let (position, fails) = self.script.pop().unwrap_or((0, false));
            self.land(expected[position % expected.len()], fails);
        }
        self.poll(landed);
        true
    }

    fn drain(&mut self, landed: &mut Vec<ReadDone<Read>>) {
        while !self.waiting.is_empty() {
            self.land(0, false);
        }
        self.poll(landed);
    }

    fn outstanding(&self) -> usize {
        self.waiting.len()
    }

    fn stats(&self) -> LoadStats {
        LoadStats::default()
    }

    fn seconds(&self) -> f64 {
        self.now
    }
}

/// A small model, and how it is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Small {
    pub(super) n_layers: u16,
    pub(super) n_expert: u16,
    /// Slots of each layer for high and low versions. Without low ones there are no low versions.
    pub(super) slots: (u32, Option<u32>),
    pub(super) n_staging: usize,
    pub(super) policy: PolicyKind,
    pub(super) thresholds: Thresholds,
    pub(super) deterministic: bool,
    /// Bytes of the read that brings a whole version, if there is one.
    pub(super) record: Option<u64>,
    /// Low versions are parts of the high ones.
    pub(super) nested: bool,
}

impl Default for Small {
    fn default() -> Self {
        Self {
            n_layers: 2,
            n_expert: 8,
            slots: (2, None),
            n_staging: 6,
            policy: PolicyKind::Lru,
            thresholds: Thresholds { t1: 1.0, t2: 1.0 },
            deterministic: false,
            record: None,
            nested: false,
        }
    }
}

impl Small {
    pub(super) fn residency(self) -> Residency<Manual, ()> {
        let pool = |of: fn(ExpertId) -> Version, slots: u32| {
            let members = |layer| (0..self.n_expert).map(move |index| of(ExpertId { layer, index })).collect();
            let layout = |layer| LayerLayout { layer, members: members(layer), kinds: SliceKinds::from_iter(KINDS) };
            let layers = (0..self.n_layers).map(layout).collect();
            PoolLayout { layers, n_slots: slots * u32::from(self.n_layers), capacities: None, is_common: false }
        };
        let mut pools = vec![pool(Version::high, self.slots.0)];
        pools.extend(self.slots.1.map(|slots| pool(Version::low, slots)));
        let shape = Shape { n_layers: self.n_layers, low_cost: 0.25 };
        let cache = Cache::new(pools, policy::build(self.policy, &Weights::default(), shape));
        let shape = |layer| LayerShape { layer, n_expert: self.n_expert, kinds: KINDS.to_vec() };
        let bytes = |version: Version| {
            let bytes = if version == Version::high(version.expert) { 4000 } else { 1000 };
            let mut slices = [0; SliceKind::COUNT];
            KINDS.iter().for_each(|kind| slices[kind.index()] = bytes);
            let is_there = bytes == 4000 || self.slots.1.is_some();
            let rest = RestBytes { slices: slices.map(|bytes| bytes / 4 * 3), record: self.record };
            let rest = (self.nested && bytes == 4000).then_some(rest);
            is_there.then_some(VersionBytes { slices, record: self.record, rest })
        };
        let layout = Layout::new((0..self.n_layers).map(shape), &cache, bytes);
        let mode = if self.slots.1.is_some() { PrecisionMode::Dynamic } else { PrecisionMode::Exact };
        let options = PrecisionOptions { deterministic: self.deterministic, ..PrecisionOptions::default() };
        Residency::new(Parts {
            reads: Manual::default(),
            observer: (),
            cache,
            layout,
            staging: StagingOptions { n_slots: Some(self.n_staging), ahead: true },
            overlaps: true,
            precisions: Precisions::new(mode, self.thresholds, options),
            lookahead: None,
        })
    }
}

/// A step's split of all matrices.
pub(super) fn split(small: &Small, layer: u16, n_used: usize) -> Split<'static> {
    Split {
        layer,
        n_expert: small.n_expert.into(),
        n_used,
        kinds: &KINDS,
        key: usize::from(layer),
        phase: Phase::Decode,
    }
}

/// Begins a split whose selection and demands are set.
pub(super) fn begin_split(
    residency: &mut Residency<Manual, ()>,
    selection: &mut Selection,
    devices: &dyn DeviceResidency,
) -> LayerStep {
    if !selection.is_later_split() {
        residency.enter(selection);
    }
    residency.begin(selection, &[], devices)
}

/// Lands all that the products of a step wait for, matrix by matrix.
pub(super) fn multiply(residency: &mut Residency<Manual, ()>, step: &LayerStep, kinds: &[SliceKind]) {
    for (&kind, &used) in kinds.iter().flat_map(|kind| step.used.iter().map(move |used| (kind, used))) {
        let slice = SliceId { version: step.version(used), kind };
        while residency.memory.locate(slice, used) == Place::Pending {
            assert!(residency.memory.wait() || residency.memory.force_staging(slice, used), "{slice}");
        }
        if used.row.is_none() {
            residency.memory.release(slice);
        }
    }
}
