//! A layer in progress: which versions it uses, what of them is there, and what has to be read.

use super::wanted::Wanted;
use super::{Observer, Reads, Residency, Target};
use crate::cache::{SliceState, SlotId};
use crate::expert::{ExpertId, Precision, SliceId, SliceKind, Version};
use crate::load::LoadClass;
use crate::predict::Popularity;
use crate::route::{Demand, Routing};

/// What other memories hold, as far as it concerns a layer.
#[derive(Clone, Copy)]
pub struct Elsewhere<'a> {
    /// Whether a version is where the products run, so that nothing of it needs to be read.
    pub has: &'a dyn Fn(Version) -> bool,
    /// Whether somebody still reads a staged slice, so that it must stay.
    pub reads: &'a dyn Fn(SliceId) -> bool,
}

impl Elsewhere<'_> {
    /// There are no other memories.
    pub const NOTHING: Self = Self { has: &|_| false, reads: &|_| false };
}

/// A needed expert and the version of it that is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Expert of the layer.
    pub index: u16,
    /// Which version.
    pub precision: Precision,
    /// The number of the layer's share that the version belongs to.
    pub share: u16,
    /// Its row in the share; `None` for one that streams through staging, or is elsewhere.
    pub row: Option<u32>,
    /// Nothing of it is wanted from here.
    pub elsewhere: bool,
}

/// A layer in progress, or one of the splits in which it comes.
#[derive(Debug)]
pub struct LayerStep {
    /// Block number.
    pub layer: u16,
    /// Needed experts that are multiplied, in the order of need.
    pub used: Vec<Used>,
    /// Needed experts that are left out.
    pub skipped: Vec<u16>,
    /// Of the used ones, how many were there.
    pub(super) n_hits: u64,
    /// What was chosen, by expert index: for the layer's later splits.
    pub(super) choices: Vec<Option<Precision>>,
    pinned: Vec<SlotId>,
}

impl LayerStep {
    /// The version of an expert that this step multiplies.
    pub fn version(&self, used: Used) -> Version {
        Version { expert: ExpertId { layer: self.layer, index: used.index }, precision: used.precision }
    }

    /// All of them.
    pub(super) fn versions(&self) -> impl Iterator<Item = Version> {
        self.used.iter().map(|&used| self.version(used))
    }
}

/// What a split asks of one layer.
pub(super) struct Need<'a> {
    pub(super) layer: u16,
    /// Experts, each once, most urgent first.
    pub(super) experts: &'a [u16],
    /// The matrices, in the order of the split's products.
    pub(super) kinds: &'a [SliceKind],
    /// The next layer will need nearly all of its experts too.
    pub(super) is_dense: bool,
    /// How many of the tokens are expected to use which of these.
    pub(super) expected: &'a Popularity,
    pub(super) choices: Choices<'a>,
}

/// What a layer's router asks for.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    /// Who is routed where.
    pub(super) routing: &'a Routing,
    /// Of each expert, by expert index.
    pub(super) demands: &'a [Demand],
    /// Each expert's share of the router's weights, by expert index.
    pub(super) shares: &'a [f32],
    /// What it had chosen, where tokens have been sent elsewhere.
    pub(super) wanted: Option<&'a Wanted>,
}

/// In which precision the experts are used.
pub(super) enum Choices<'a> {
    /// To be decided of what is asked, and counted.
    Of(Asked<'a>),
    /// Decided before, by expert index: nothing is counted again.
    Made(&'a [Option<Precision>]),
}

impl<R: Reads, O: Observer> Residency<R, O> {
    /// Takes what has landed, and what follows of that, before a layer begins.
    pub fn catch_up(&mut self) {
        self.poll();
        if !self.precisions.options.deterministic {
            self.settle_upgrades();
        }
    }

    /// Brings versions of one layer and precision into slots or staging though nobody uses them yet: nothing is
    /// counted. `None` for no versions.
    pub fn bring(&mut self, versions: &[Version]) -> Option<LayerStep> {
        let Version { expert: ExpertId { layer, .. }, precision } = *versions.first()?;
        let experts: Vec<u16> = versions.iter().map(|version| version.expert.index).collect();
        let kinds = self.layout.kinds(layer).to_vec();
        let choices = vec![Some(precision); usize::from(self.layout.n_expert(layer))];
        let choices = Choices::Made(&choices);
        let expected = &Popularity::default();
        let need = Need { layer, experts: &experts, kinds: &kinds, is_dense: false, expected, choices };
        Some(self.begin(&need, &Elsewhere::NOTHING))
    }

    /// Starts a split: chooses versions, pins those that are there, and asks for the others.
    pub(super) fn begin(&mut self, need: &Need, elsewhere: &Elsewhere) -> LayerStep {
        self.catch_up();
        self.failure = None;
        let layer = need.layer;
        self.running = Some(layer);
        let order = self.layout.load_order(layer, need.kinds);
        let (mut step, missing) = self.choose_versions(need, &order, elsewhere);
        self.hurry(&step);
        self.drop_obsolete(layer);
        let mut reads: Vec<(SlotId, Version)> = Vec::new();
        for position in missing {
            let used = step.used[position];
            let version = step.version(used);
            let is_staged = order.iter().any(|&kind| self.staging.get(SliceId { version, kind }).is_some());
            if let Some(slot) = if is_staged { None } else { self.acquire(version) } {
                step.used[position].row = Some(self.layout.row(layer, used.share, slot));
                self.cache.pin(slot);
                step.pinned.push(slot);
                reads.push((slot, version));
            }
        }
        self.queue_for_staging(need, &step, elsewhere);
        for precision in Precision::ALL {
            let wanted: Vec<_> = reads.iter().copied().filter(|(_, version)| version.precision == precision).collect();
            self.read_slots(LoadClass::on_demand(precision), &wanted, &order);
        }
        if need.is_dense {
            let n_high = step.used.iter().filter(|used| used.precision == Precision::High).count();
            self.look_ahead(layer, n_high, need.expected, elsewhere.has);
        }
        self.pump();
        step
    }

    /// Decides which versions are used, pins those that have slots, and says which of them have none: positions in
    /// [`LayerStep::used`].
    fn choose_versions(&mut self, need: &Need, order: &[SliceKind], elsewhere: &Elsewhere) -> (LayerStep, Vec<usize>) {
        let layer = need.layer;
        let mut step = LayerStep {
            layer,
            used: Vec::with_capacity(need.experts.len()),
            skipped: Vec::new(),
            n_hits: 0,
            choices: match need.choices {
                Choices::Of(asked) => vec![None; asked.demands.len()],
                Choices::Made(choices) => choices.to_vec(),
            },
            pinned: Vec::new(),
        };
        let mut missing = Vec::new();
        if let Choices::Of(Asked { routing, wanted: Some(wanted), .. }) = need.choices {
            self.touch_unused(layer, wanted, routing);
        }
        for &index in need.experts {
            let expert = ExpertId { layer, index };
            if let Choices::Of(asked) = need.choices {
                let (precision, is_hit) = self.choose(expert, asked, elsewhere.has);
                step.choices[usize::from(index)] = precision;
                step.n_hits += u64::from(is_hit);
            }
            let Some(precision) = step.choices[usize::from(index)] else {
                step.skipped.push(index);
                continue;
            };
            let version = Version { expert, precision };
            let share = self.layout.share_of(version);
            if (elsewhere.has)(version) {
                step.used.push(Used { index, precision, share, row: None, elsewhere: true });
                continue;
            }
            let slot = self.cache.lookup(version);
            let row = slot.map(|slot| self.layout.row(layer, share, slot));
            step.used.push(Used { index, precision, share, row, elsewhere: false });
            match slot {
                Some(slot) => {
                    self.load_free_slices(slot, version, order);
                    step.pinned.push(slot);
                }
                None => missing.push(step.used.len() - 1),
            }
        }
        (step, missing)
    }

    /// Lines up what a step uses without a slot, and forgets what is staged and nobody wants any more.
    fn queue_for_staging(&mut self, need: &Need, step: &LayerStep, elsewhere: &Elsewhere) {
        let without_slot = step.used.iter().filter(|used| used.row.is_none() && !used.elsewhere);
        let overflow: Vec<Version> = without_slot.map(|&used| step.version(used)).collect();
        let is_kept = |slice: &SliceId| {
            overflow.contains(&slice.version) || (elsewhere.reads)(*slice) || self.is_staged_ahead(*slice, need.layer)
        };
        let kept: Vec<SliceId> = self.staging.slices().filter(is_kept).collect();
        self.staging.retain(|slice| kept.contains(&slice));
        // Only what this split multiplies: of a layer that comes in several splits, nothing is read twice.
        self.queue = need
            .kinds
            .iter()
            .flat_map(|&kind| overflow.iter().map(move |&version| SliceId { version, kind }))
            .filter(|slice| self.staging.get(*slice).is_none())
            .collect();
        self.ahead.clear();
    }

    /// Pins a resident version, and asks for slices of it that an earlier failure left free.
    fn load_free_slices(&mut self, slot: SlotId, version: Version, order: &[SliceKind]) {
        let free: Vec<SliceKind> =
            order.iter().copied().filter(|&kind| self.cache.state(slot, kind) == SliceState::Free).collect();
        for &kind in &free {
            self.cache.set_loading(slot, kind);
        }
        self.cache.pin(slot);
        let Self { layout, tickets, .. } = self;
        let slices = free.iter().map(|&kind| SliceId { version, kind });
        let reads = slices.map(|slice| tickets.read(Target::Slot { slot, slice }, layout.slice_bytes(slice))).collect();
        self.submit(LoadClass::on_demand(version.precision), reads);
    }

    /// Ends a step: its experts may be evicted again. `may_upgrade`: it was decoded, and its layer's last.
    pub(super) fn end(&mut self, step: LayerStep, may_upgrade: bool) {
        let pinned = self.end_pinned(step);
        self.unpin(pinned);
        if !self.precisions.options.deterministic {
            self.settle_upgrades();
            if may_upgrade {
                self.upgrade_if_idle();
            }
        }
    }

    /// Ends a step whose slots are still being read; [`Residency::unpin`] gives them back.
    pub fn finish(&mut self, step: LayerStep) -> Vec<SlotId> {
        let pinned = self.end_pinned(step);
        if !self.precisions.options.deterministic {
            self.settle_upgrades();
        }
        pinned
    }

    fn end_pinned(&mut self, step: LayerStep) -> Vec<SlotId> {
        self.observer.end_layer(self.counters.wait_seconds);
        self.queue.clear();
        self.running = None;
        step.pinned
    }

    /// Slots of a finished step may be evicted again.
    pub fn unpin(&mut self, slots: Vec<SlotId>) {
        slots.into_iter().for_each(|slot| self.cache.unpin(slot));
    }
}
