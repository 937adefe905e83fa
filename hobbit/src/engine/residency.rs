//! Cache, staging, loader and slot memory of one model, driven by one expert split at a time.
//!
//! A split of layer `l` goes through [`Residency::begin`] (in which precision each needed expert is used, what is
//! resident is pinned, a read is submitted for everything else), then, product by product, [`Residency::locate`] /
//! [`Residency::wait`], and [`Residency::end`]. Versions beyond their layer's share stream through staging slots, in
//! the order in which the products use them; while they do, the slots of the next layer are filled ahead when the
//! batch is dense.
//!
//! While the disk has nothing else to do, a frequently used low version is replaced by its high version
//! ([`Residency::upgrade`]): the low one serves until the high one is complete.

mod books;
mod devices;
mod fill;
pub(super) mod foresee;
mod reads;
mod resize;
mod upgrades;
mod waiting;
mod warm;

use std::collections::VecDeque;

use ggml_sys::llama::{ggml_backend_dev_t, ggml_tensor};

use self::foresee::Foresight;
use super::gates;
use super::offload::Tier;
use super::precision::Precisions;
use super::recorder::{Recorder, as_recorded};
use super::staging::{Staged, Staging};
use super::state_file::StateFile;
use crate::cache::policy::PolicyKind;
use crate::cache::{Cache, ShareId, SlotId, Use};
use crate::expert::{ExpertId, Precision, SliceId, SliceKind, Version};
use crate::gguf::{Catalog, SliceShape, SliceSource, VersionSource};
use crate::load::{LoadClass, Loader};
use crate::plan::MemoryPlan;
use crate::predict::GateStack;
use crate::route::{Choice, Demand, Resident, resolve};
use crate::routing::Routing;
use crate::stats::{
    CachingReport, DeviceCounters, DeviceReport, LayerStats, PrecisionCounts, PrecisionReport, WarmStart,
};
use crate::store::{Arena, StoreError};

/// Records up to this many bytes are read at once: measured, a read of 1.5 MiB wins over three of 0.5. Of larger ones the
/// first product need not wait for the last slice: at 5 MiB one read is 10 % slower than three.
const RECORD_BYTES_MAX: u64 = 2 << 20;

/// The same where at most [`FEW_READS`] versions are read: slice by slice would be no earlier.
const RECORD_BYTES_MAX_OF_FEW: u64 = 8 << 20;
const FEW_READS: usize = 2;

/// Experts of a layer that are read at once before the first token.
const PRELOAD_AT_ONCE: usize = 8;

/// High versions on their way in the background.
const UPGRADES_MAX: usize = 2;

/// Where the bytes of a needed slice are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In a share of the cache, in the row that [`Used::row`] names.
    Cached,
    /// In a staging slot: address of the first byte.
    Staged(*mut u8),
    /// On its way, or waiting for a staging slot.
    Pending,
}

/// All slots of a share for one kind, as a tensor `[ne0, ne1, n_slots]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShareView {
    /// First byte of slot 0's slice.
    pub(super) base: *mut u8,
    /// Bytes from slot to slot.
    pub(super) stride: usize,
    /// Slots in the share.
    pub(super) n_slots: u32,
    /// Id of the element type, as ggml counts.
    pub(super) type_id: u32,
    /// Bytes of a block, and of a row.
    pub(super) row: (usize, usize),
}

/// A needed expert and the version of it that is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Used {
    /// Expert of the layer.
    pub(super) index: u16,
    /// Which version.
    pub(super) precision: Precision,
    /// The layer's share that the version belongs to.
    pub(super) share: u16,
    /// Its row of the share's view; `None` for one that streams through staging, or is elsewhere.
    pub(super) row: Option<u32>,
    /// It is on the device already: nothing of it is wanted from the host.
    pub(super) elsewhere: bool,
}

/// One expert split in progress.
pub(super) struct Step {
    /// Block number.
    pub(super) layer: u16,
    /// Needed experts that are multiplied, in the order of need.
    pub(super) used: Vec<Used>,
    /// Needed experts that are left out.
    pub(super) skipped: Vec<u16>,
    /// What was chosen, by expert index: for the layer's later splits.
    pub(super) choices: Vec<Option<Precision>>,
    pinned: Vec<SlotId>,
}

impl Step {
    /// The version of an expert that this step multiplies.
    pub(super) fn version(&self, used: Used) -> Version {
        Version { expert: ExpertId { layer: self.layer, index: used.index }, precision: used.precision }
    }
}

/// What a split asks of one layer.
pub(super) struct Need<'a> {
    /// Block number.
    pub(super) layer: u16,
    /// Experts, each once, most urgent first.
    pub(super) experts: &'a [u16],
    /// How often the batch uses each of them, by expert index.
    pub(super) uses: &'a dyn Fn(u16) -> u64,
    /// Their shares of the router's weight, by expert index: a token's sum to 1.
    pub(super) weights: &'a dyn Fn(u16) -> f32,
    /// In which precision, by expert index.
    pub(super) demands: &'a [Demand],
    /// The matrices, in the order of the split's products.
    pub(super) kinds: &'a [SliceKind],
    /// The next layer will need nearly all of its experts too.
    pub(super) dense: bool,
    /// Of a later split of a layer that comes in several: what its first one chose, by expert index, stands and is not
    /// counted again. The backend keeps it: between two splits of a session, another one may begin a layer.
    pub(super) chosen: Option<&'a [Option<Precision>]>,
    /// Whether a version is where the products run, so that nothing needs to be read.
    pub(super) elsewhere: &'a dyn Fn(Version) -> bool,
}

/// Counted since the model was opened.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) slices_loaded: u64,
    pub(super) bytes_read: u64,
    pub(super) wait_seconds: f64,
    pub(super) used: PrecisionCounts,
    pub(super) missed: PrecisionCounts,
    pub(super) upgrades: u64,
    /// The layer that is computed, or was last; 0 between two batches.
    pub(super) layer: u16,
}

struct Layer {
    n_expert: u16,
    kinds: Vec<SliceKind>,
    /// Tensor names by kind, for messages.
    names: Vec<(SliceKind, String)>,
    shares: Vec<Share>,
    /// By precision and expert: position in `shares`.
    share_of: [Vec<Option<u16>>; Precision::COUNT],
    hits: u64,
    misses: u64,
    seen: [bool; SliceKind::COUNT],
}

/// A layer's slots of one class.
struct Share {
    class: u16,
    pool: u16,
    /// Of the pool.
    first_slot: u32,
    n_slots: u32,
    /// First byte of the share's first slot.
    base: *mut u8,
    /// By slice of the class.
    leads: Vec<u64>,
}

#[derive(Clone, Copy)]
enum Target {
    Slot { slot: SlotId, slice: SliceId },
    Record { slot: SlotId, version: Version },
    Staging { slot: usize, slice: SliceId },
}

impl Target {
    fn version(&self) -> Version {
        match *self {
            Self::Slot { slice, .. } | Self::Staging { slice, .. } => slice.version,
            Self::Record { version, .. } => version,
        }
    }
}

/// A high version that is loaded in the background.
#[derive(Clone, Copy, Debug)]
struct Upgrade {
    version: Version,
    slot: SlotId,
    failed: bool,
}

/// What [`Residency`] is made of.
pub(super) struct Parts {
    pub(super) catalog: Catalog,
    pub(super) cache: Cache,
    /// The policy wants to know the router's probabilities of all experts.
    pub(super) wants_scores: bool,
    /// Experts are computed while others are read.
    pub(super) overlaps: bool,
    /// Of a run that is traced.
    pub(super) recorder: Option<Recorder>,
    /// Looks ahead.
    pub(super) foresight: Option<Foresight>,
    /// Where what is resident is kept between runs.
    pub(super) state_file: Option<StateFile>,
    /// One arena per pool of the cache.
    pub(super) pools: Vec<Arena>,
    pub(super) staging_memory: Arena,
    /// Bytes of a staging slot.
    pub(super) staging_stride: usize,
    pub(super) loader: Loader,
    pub(super) precisions: Precisions,
    /// One per device that has layers with experts.
    pub(super) tiers: Vec<Tier>,
}

/// What the first session was told, for the next ones.
#[derive(Clone)]
pub(super) struct Description {
    pub(super) plan: MemoryPlan,
    pub(super) io_choice: String,
    pub(super) precision: PrecisionReport,
    pub(super) caching: CachingReport,
    pub(super) devices: Vec<DeviceReport>,
    pub(super) warm_start: Option<WarmStart>,
}

/// See the module.
pub(super) struct Residency {
    // Dropped first: uploads from the memory below end, then reads into it. A place is empty while its tier is in use.
    tiers: Vec<Option<Tier>>,
    loader: Loader,
    cache: Cache,
    /// Routers, as far as somebody wants to know what they say.
    gates: GateStack,
    wants_scores: bool,
    overlaps: bool,
    recorder: Option<Recorder>,
    foresight: Option<Foresight>,
    state_file: Option<StateFile>,
    staging: Staging,
    catalog: Catalog,
    layers: Vec<Option<Layer>>,
    targets: Vec<Option<Target>>,
    /// Where the search for a free one begins.
    last_ticket: usize,
    /// Slices the running layer still has to stage, in the order of use.
    queue: VecDeque<SliceId>,
    /// Slices of the next layer to stage when nothing of the running layer is left to submit.
    ahead: VecDeque<SliceId>,
    /// Reads ahead may be waiting or in flight.
    is_reading_ahead: bool,
    /// Free slots are filled while nobody waits.
    fills: bool,
    fills_between_tokens: bool,
    fill: fill::Fill,
    upgrades: Vec<Upgrade>,
    /// The layer that upgrades are looked for next.
    upgrade_layer: u16,
    /// No upgrade has started since the last token: one per token bounds what a wrong guess can cost.
    may_upgrade: bool,
    /// The layer of the split in progress.
    running: Option<u16>,
    failure: Option<StoreError>,
    counters: Counters,
    pub(super) precisions: Precisions,
    staging_memory: Arena,
    staging_stride: usize,
    pools: Vec<Arena>,
    description: Description,
}

// SAFETY: the pointers in `Share` lead into arenas owned by the same value.
unsafe impl Send for Residency {}

impl Residency {
    /// Puts cache, memory and loader together.
    pub(super) fn new(parts: Parts, description: Description) -> Self {
        let Parts {
            catalog,
            cache,
            wants_scores,
            overlaps,
            recorder,
            foresight,
            state_file,
            pools,
            staging_memory,
            staging_stride,
            loader,
            precisions,
            tiers,
        } = parts;
        let n_layer = catalog.layers.last().map_or(0, |layer| usize::from(layer.layer) + 1);
        let mut layers: Vec<Option<Layer>> = (0..n_layer).map(|_| None).collect();
        for layer in &catalog.layers {
            let class = &catalog.classes[usize::from(layer.high[0].class)];
            let kinds: Vec<SliceKind> = class.slices.iter().map(|slice| slice.kind).collect();
            let name = |kind: SliceKind| format!("blk.{}.{}.weight", layer.layer, kind.tensor_stem());
            let mut new = Layer {
                n_expert: layer.n_expert,
                names: kinds.iter().map(|&kind| (kind, name(kind))).collect(),
                kinds,
                shares: Vec::new(),
                share_of: [const { Vec::new() }; Precision::COUNT],
                hits: 0,
                misses: 0,
                seen: [false; SliceKind::COUNT],
            };
            let mut known: Vec<ShareId> = Vec::new();
            for precision in Precision::ALL {
                for index in 0..layer.n_expert {
                    let version = Version { expert: ExpertId { layer: layer.layer, index }, precision };
                    let source = layer.source(index, precision);
                    let share = source.and_then(|source| Some((source, cache.share_of(version)?)));
                    let position = share.map(|(source, id)| {
                        let position = known.iter().position(|known| *known == id).unwrap_or_else(|| {
                            known.push(id);
                            new.shares.push(Share::new(source, id, &catalog, &cache, &pools));
                            known.len() - 1
                        });
                        let leads = source.slices.iter().map(|slice| slice.lead);
                        assert!(leads.eq(new.shares[position].leads.iter().copied()), "{version}: another lead");
                        position as u16
                    });
                    new.share_of[precision.index()].push(position);
                }
            }
            layers[usize::from(layer.layer)] = Some(new);
        }
        let n_staging = staging_memory.len() / staging_stride.max(1);
        Self {
            tiers: tiers.into_iter().map(Some).collect(),
            loader,
            cache,
            gates: GateStack::default(),
            wants_scores,
            overlaps,
            recorder,
            foresight,
            state_file,
            staging: Staging::new(n_staging),
            catalog,
            layers,
            targets: Vec::new(),
            last_ticket: 0,
            queue: VecDeque::new(),
            ahead: VecDeque::new(),
            is_reading_ahead: false,
            fills: false,
            fills_between_tokens: false,
            fill: fill::Fill::default(),
            upgrades: Vec::new(),
            upgrade_layer: 0,
            may_upgrade: false,
            running: None,
            failure: None,
            counters: Counters::default(),
            precisions,
            staging_memory,
            staging_stride,
            pools,
            description,
        }
    }

    /// What the first session was told.
    pub(super) fn description(&self) -> &Description {
        &self.description
    }

    /// From now on free slots are filled while nobody waits, if that is well with everything else; `between_tokens`: also
    /// between two tokens of an answer.
    pub(super) fn fill_free_slots(&mut self, policy: PolicyKind, between_tokens: bool) {
        self.fills = self.may_fill(policy);
        self.fills_between_tokens = self.fills && between_tokens;
        self.idle();
    }

    /// What the router of `layer` says of all of its experts for one token with the input `x`, `[n_expert]`: tells the
    /// policy. `None` where nobody wants to know, or its router is not understood.
    ///
    /// # Safety
    /// `ids` is a live node that was computed: the router's choice.
    pub(super) unsafe fn scores(
        &mut self,
        layer: u16,
        ids: *mut ggml_tensor,
        x: &[f32],
        n_expert: usize,
    ) -> Option<Vec<f32>> {
        // SAFETY: by the caller.
        if !self.wants_input()
            || !(self.gates.knows(layer) || unsafe { gates::learn(&mut self.gates, layer, ids, n_expert) })
        {
            return None;
        }
        if !self.wants_scores {
            return None;
        }
        let (_, mut scores) = self.gates.scores(x, &[layer]).pop()?;
        as_recorded(&mut scores);
        self.cache.scores(layer, &scores);
        Some(scores)
    }

    /// Starts a split.
    pub(super) fn begin(&mut self, need: &Need) -> Step {
        self.poll();
        if !self.precisions.options.deterministic {
            self.settle_upgrades();
        }
        self.failure = None;
        let layer = need.layer;
        self.running = Some(layer);
        let mut step = Step {
            layer,
            used: Vec::with_capacity(need.experts.len()),
            skipped: Vec::new(),
            choices: need.chosen.map_or_else(|| vec![None; need.demands.len()], <[_]>::to_vec),
            pinned: Vec::new(),
        };
        let order = self.load_order(layer, need.kinds);
        let mut missing = Vec::new();
        for &index in need.experts {
            let expert = ExpertId { layer, index };
            if need.chosen.is_none() {
                let (demand, n_uses) = (need.demands[usize::from(index)], (need.uses)(index));
                step.choices[usize::from(index)] =
                    self.choose(expert, demand, n_uses, (need.weights)(index), need.elsewhere);
            }
            let Some(precision) = step.choices[usize::from(index)] else {
                step.skipped.push(index);
                continue;
            };
            let version = Version { expert, precision };
            let share = self.share_of(version);
            if (need.elsewhere)(version) {
                step.used.push(Used { index, precision, share, row: None, elsewhere: true });
                continue;
            }
            let slot = self.cache.lookup(version);
            let row = slot.map(|slot| slot.index - self.layer(layer).shares[usize::from(share)].first_slot);
            step.used.push(Used { index, precision, share, row, elsewhere: false });
            match slot {
                Some(slot) => {
                    self.load_free_slices(slot, version, &order);
                    step.pinned.push(slot);
                }
                None => missing.push(step.used.len() - 1),
            }
        }
        self.hurry(&step);
        self.drop_obsolete(layer);
        let mut reads: Vec<(SlotId, Version)> = Vec::new();
        for position in missing {
            let used = step.used[position];
            let version = step.version(used);
            let staged = order.iter().any(|&kind| self.staging.get(SliceId { version, kind }).is_some());
            if let Some(acquired) = if staged { None } else { self.cache.acquire(version) } {
                let first = self.layer(layer).shares[usize::from(used.share)].first_slot;
                step.used[position].row = Some(acquired.slot.index - first);
                order.iter().for_each(|&kind| self.cache.set_loading(acquired.slot, kind));
                self.cache.pin(acquired.slot);
                step.pinned.push(acquired.slot);
                reads.push((acquired.slot, version));
            }
        }
        let overflow: Vec<Version> = step
            .used
            .iter()
            .filter(|used| used.row.is_none() && !used.elsewhere)
            .map(|&used| step.version(used))
            .collect();
        let kept: Vec<SliceId> = self
            .staging
            .slices()
            .filter(|&slice| {
                overflow.contains(&slice.version)
                    || is_being_uploaded(&self.tiers, slice)
                    || self.is_staged_ahead(slice, layer)
            })
            .collect();
        self.staging.retain(|slice| kept.contains(&slice));
        // Only what this split multiplies: of a layer that comes in several splits, nothing is read twice.
        self.queue = need
            .kinds
            .iter()
            .flat_map(|&kind| overflow.iter().map(move |&version| SliceId { version, kind }))
            .filter(|slice| self.staging.get(*slice).is_none())
            .collect();
        self.ahead.clear();
        for (class, precision) in [(LoadClass::OnDemandHigh, Precision::High), (LoadClass::OnDemandLow, Precision::Low)]
        {
            let wanted: Vec<_> = reads.iter().copied().filter(|(_, version)| version.precision == precision).collect();
            self.read_slots(class, &wanted, &order);
        }
        if need.dense {
            self.look_ahead(layer, need.elsewhere);
        }
        self.pump();
        step
    }

    /// Ends a split whose slots are still being read; [`Residency::unpin`] gives them back.
    pub(super) fn finish(&mut self, step: Step) -> Vec<SlotId> {
        self.end_record();
        self.queue.clear();
        self.running = None;
        if !self.precisions.options.deterministic {
            self.settle_upgrades();
        }
        step.pinned
    }

    /// Slots of a finished step may be evicted again.
    pub(super) fn unpin(&mut self, slots: Vec<SlotId>) {
        slots.into_iter().for_each(|slot| self.cache.unpin(slot));
    }

    /// The matrices of a layer's experts.
    pub(super) fn kinds(&self, layer: u16) -> &[SliceKind] {
        &self.layer(layer).kinds
    }

    /// What a slice looks like.
    pub(super) fn shape(&self, slice: SliceId) -> &SliceShape {
        self.slice(slice).0
    }

    /// The bytes of a slice that a step uses, once they are complete, and whether they are in a staging slot, to be
    /// released after use.
    pub(super) fn host_bytes(&self, slice: SliceId, used: Used) -> Option<(*const u8, bool)> {
        match self.locate(slice, used) {
            Place::Cached => {
                let view = self.view(slice.version.expert.layer, used.share, slice.kind);
                let row = used.row.expect("what is cached has a row") as usize;
                Some((view.base.wrapping_add(row * view.stride), false))
            }
            Place::Staged(data) => Some((data, true)),
            Place::Pending => None,
        }
    }

    /// Ends a split: its experts may be evicted again. `may_upgrade`: it was one token's, and its layer's last.
    pub(super) fn end(&mut self, step: Step, may_upgrade: bool) {
        self.end_record();
        step.pinned.into_iter().for_each(|slot| self.cache.unpin(slot));
        self.queue.clear();
        self.running = None;
        if !self.precisions.options.deterministic {
            self.settle_upgrades();
            if may_upgrade && self.may_upgrade && self.upgrades.len() < UPGRADES_MAX && self.loader.is_idle() {
                self.upgrade();
            }
        }
    }

    /// Matrices of the layer's experts.
    pub(super) fn n_kinds(&self, layer: u16) -> usize {
        self.layer(layer).kinds.len()
    }

    /// The slots of a layer's share for one kind.
    pub(super) fn view(&self, layer: u16, share: u16, kind: SliceKind) -> ShareView {
        let share = &self.layer(layer).shares[usize::from(share)];
        let class = &self.catalog.classes[usize::from(share.class)];
        let (position, slice) = slice_of(&class.slices, kind);
        ShareView {
            base: share.base.wrapping_add((slice.region + share.leads[position]) as usize),
            stride: class.stride as usize,
            n_slots: share.n_slots,
            type_id: slice.dtype.id(),
            row: (slice.dtype.type_size() as usize, (slice.bytes / slice.ne1.max(1)) as usize),
        }
    }

    fn layer(&self, layer: u16) -> &Layer {
        self.layers[usize::from(layer)].as_ref().expect("only MoE layers have expert products")
    }

    fn share_of(&self, version: Version) -> u16 {
        let ExpertId { layer, index } = version.expert;
        let share = self.layer(layer).share_of[version.precision.index()][usize::from(index)];
        share.expect("every version in use belongs to a share")
    }

    fn source(&self, version: Version) -> &VersionSource {
        self.catalog.source(version).expect("only versions of the catalog are asked for")
    }

    fn slice(&self, slice: SliceId) -> (&SliceShape, SliceSource) {
        let source = self.source(slice.version);
        let (position, shape) = slice_of(&self.catalog.classes[usize::from(source.class)].slices, slice.kind);
        (shape, source.slices[position])
    }

    /// All kinds of the layer: those of the split in its order, then the rest.
    fn load_order(&self, layer: u16, kinds: &[SliceKind]) -> Vec<SliceKind> {
        let mut order = kinds.to_vec();
        order.extend(self.layer(layer).kinds.iter().copied().filter(|kind| !kinds.contains(kind)));
        order
    }
}

impl Share {
    fn new(source: &VersionSource, id: ShareId, catalog: &Catalog, cache: &Cache, pools: &[Arena]) -> Self {
        let stride = catalog.classes[usize::from(source.class)].stride as usize;
        let slots = cache.slots_of_share(id);
        let arena = &pools[usize::from(id.pool)];
        assert!(slots.end as usize * stride <= arena.len(), "the share's slots have no room");
        Self {
            class: source.class,
            pool: id.pool,
            first_slot: slots.start,
            n_slots: slots.len() as u32,
            base: arena.as_ptr().wrapping_add(slots.start as usize * stride),
            leads: source.slices.iter().map(|slice| slice.lead).collect(),
        }
    }
}

fn slice_of(slices: &[SliceShape], kind: SliceKind) -> (usize, &SliceShape) {
    let position = slices.iter().position(|slice| slice.kind == kind).expect("tags are made from the same map");
    (position, &slices[position])
}

fn class_of(precision: Precision) -> LoadClass {
    match precision {
        Precision::High => LoadClass::OnDemandHigh,
        Precision::Low => LoadClass::OnDemandLow,
    }
}

/// Whether a device other than the running one still reads a staged slice.
fn is_being_uploaded(tiers: &[Option<Tier>], slice: SliceId) -> bool {
    tiers.iter().flatten().any(|tier| tier.is_reading(slice))
}
