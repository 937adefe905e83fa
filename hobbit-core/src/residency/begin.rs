//! Begins and ends a layer: which versions it uses, which of them are there, and what has to be read.

use super::interfaces::{DeviceResidency, NeededExpert, Observer, Reads};
use super::layout::Layout;
use super::selection::{LayerStep, Selection, TokenChoices, Used};
use super::{Lookahead, Residency, ScoresByLayer};
use crate::cache::{Cache, SlotId};
use crate::expert::{ExpertId, Precision, SliceId, SliceKind, Version};
use crate::load::LoadClass;
use crate::predict::RouterScores;
use crate::route::{Demand, Flatness, Location, Phase, Rates, Weighing, resolve};
use crate::stats::{LayerStats, PrecisionCounts, RerouteCounts};

impl<R: Reads, O: Observer> Residency<R, O> {
    /// Takes what has landed, and what follows of that, before a layer begins.
    pub fn catch_up(&mut self) {
        self.memory.poll();
        self.hear();
        if !self.precisions.options.deterministic {
            self.upgrades.settle(&mut self.memory);
        }
    }

    /// Tells the planner of prefetches which reads have ended.
    pub(super) fn hear(&mut self) {
        match &mut self.lookahead {
            Some(lookahead) => lookahead.hear(&mut self.memory.ended),
            None => self.memory.ended.clear(),
        }
    }

    /// Reads versions of one layer and precision into slots or staging, without a use: nothing is counted. `None` for
    /// no versions.
    pub fn load(&mut self, versions: &[Version]) -> Option<LayerStep> {
        let layer = versions.first()?.expert.layer;
        let n_expert = usize::from(self.memory.layout.n_expert(layer));
        let mut selection = Selection::unused(versions, self.memory.layout.kinds(layer), n_expert);
        Some(self.begin(&mut selection, &[], &()))
    }

    /// Counts the layer's tokens, before policies see anything of them.
    pub(super) fn enter(&mut self, selection: &Selection) {
        self.memory.cache.begin_layer(selection.layer(), self.drafts.n_certain_of(selection));
    }

    /// Reroutes tokens to experts that are in memory, as far as [`Residency::rerouting`] allows. New weights, if ids or
    /// weights change.
    pub(super) fn reroute(
        &mut self,
        selection: &mut Selection,
        before: &[f32],
        scores: (&[RouterScores], Weighing),
        devices: &dyn DeviceResidency,
    ) -> Option<Vec<f32>> {
        let layer = selection.layer();
        let mut rules = self.rerouting;
        if rules.substitute > 0.0 {
            selection.observe_flatness(&mut self.flatness, &rules, before, scores.0);
            if rules.spares_flat && self.flatness.is_flat(layer) {
                rules.substitute = 0.0;
            }
        }
        let is_present = |index| self.is_present(ExpertId { layer, index }, devices);
        let (outcome, weights) = selection.reroute(&rules, before, scores, &is_present);
        self.counts.rerouted(layer, outcome);
        weights
    }

    /// Tells policies, counters and the observer of a layer's first split. `scores`: the router's, of all experts,
    /// `[n_tokens][n_expert]`; empty if they are not known.
    fn tell(&mut self, selection: &mut Selection, scores: &[f32]) {
        let layer = selection.layer();
        let of_tokens = scores.chunks_exact(selection.n_expert.max(1)).take(selection.routing.n_tokens);
        for (token, scores) in of_tokens.enumerate() {
            self.drafts.scores(&mut self.memory.cache, selection, token, scores);
        }
        selection.know(scores);
        let (routing, weights) = selection.unmasked();
        let (observed, inputs) = selection.observed();
        if let Some(virtual_experts) = &mut self.virtual_experts {
            virtual_experts.observe(layer, routing, observed, inputs);
        }
        self.counts.all.layer = layer;
        self.memory.observer.begin_layer(layer, routing, weights, scores, self.memory.moved.wait_seconds);
        if selection.is_rerouted() {
            self.memory.observer.rerouted(&selection.routing.ids);
        }
        selection.sum_fractions();
    }

    /// Begins a split: versions are chosen, slots given, reads submitted. `scores`: the router's, of all experts,
    /// `[n_tokens][n_expert]`; empty if they are not known.
    pub(super) fn begin(
        &mut self,
        selection: &mut Selection,
        scores: &[f32],
        devices: &dyn DeviceResidency,
    ) -> LayerStep {
        if !selection.is_later_split() {
            self.tell(selection, scores);
        }
        self.catch_up();
        self.memory.in_flight.failure = None;
        let layer = selection.layer();
        self.memory.in_flight.running = Some(layer);
        let order = self.memory.layout.load_order(layer, selection.split_kinds());
        let (mut step, missing) = self.choose_versions(selection, &order, devices);
        self.promote(&step);
        // Virtual experts come while layers run.
        if self.virtual_experts.is_none() {
            self.memory.stop_filling(Some(layer));
        }
        self.memory.drop_ahead(layer);
        self.hear();
        let mut reads: Vec<(SlotId, Version)> = Vec::new();
        for position in missing {
            let used = step.used[position];
            let version = step.version(used);
            let is_staged = self.memory.in_flight.is_staged(version, &self.memory.layout);
            if let Some(slot) = if is_staged { None } else { self.memory.acquire(version) } {
                step.used[position].row = Some(self.memory.layout.row(layer, used.share, slot));
                self.memory.cache.pin(slot);
                step.pinned.push(slot);
                reads.push((slot, version));
            }
        }
        self.queue_for_staging(selection, &step, devices);
        for precision in Precision::ALL {
            let wanted: Vec<_> = reads.iter().copied().filter(|(_, version)| version.precision == precision).collect();
            self.memory.read_slots(LoadClass::on_demand(precision), &wanted, &order);
        }
        // How far a read ahead has come decides what may be evicted for the next: a matter of speed.
        let may_depend_on_speed =
            !self.precisions.options.deterministic || self.precisions.is_exact() && self.rerouting.is_off();
        if selection.is_dense() && self.precisions.loads_high() && may_depend_on_speed {
            // About as many as here are wanted in high precision.
            let n_high = || step.used.iter().filter(|used| used.precision == Precision::High).count();
            let most = (!self.precisions.is_exact()).then(n_high);
            let low_share = self.precisions.low_by_popularity(selection.phase());
            self.memory.read_next_layer(layer, (most, low_share), &selection.expected, devices);
        }
        self.memory.pump();
        step
    }

    /// Chooses the versions that are used, and pins those that have slots. Returns the others: positions in
    /// [`LayerStep::used`].
    fn choose_versions(
        &mut self,
        selection: &mut Selection,
        order: &[SliceKind],
        devices: &dyn DeviceResidency,
    ) -> (LayerStep, Vec<usize>) {
        let layer = selection.layer();
        let n_needed = selection.routing.needed.len();
        let used = Vec::with_capacity(n_needed);
        let mut step = LayerStep { layer, used, skipped: Vec::new(), n_hits: 0, pinned: Vec::new() };
        let mut missing = Vec::new();
        let decides = !selection.is_later_split();
        if decides {
            selection.precisions = vec![None; selection.demands.len()];
            // Experts that the router chose and no token uses are missing.
            for expert in selection.passed_over() {
                self.drafts.touch(&mut self.memory.cache, selection, expert, false, Some(Precision::High));
            }
        }
        for position in 0..n_needed {
            let index = selection.routing.needed[position];
            let expert = ExpertId { layer, index };
            if decides {
                let precision = self.choose_precision(expert, selection.demands[usize::from(index)], devices);
                selection.precisions[usize::from(index)] = precision;
                step.n_hits += u64::from(self.count_use(expert, precision, selection, devices));
            }
            let Some(precision) = selection.precisions[usize::from(index)] else {
                step.skipped.push(index);
                continue;
            };
            let version = Version { expert, precision };
            let share = self.memory.layout.share_of(version);
            if devices.has(version) {
                step.used.push(Used { index, precision, share, row: None, is_on_device: true });
                continue;
            }
            let slot = self.memory.cache.lookup(version);
            let row = slot.map(|slot| self.memory.layout.row(layer, share, slot));
            step.used.push(Used { index, precision, share, row, is_on_device: false });
            match slot {
                Some(slot) => {
                    self.memory.load_free_slices(slot, version, order);
                    step.pinned.push(slot);
                }
                None => missing.push(step.used.len() - 1),
            }
        }
        (step, missing)
    }

    /// The precision in which a needed expert is used; `None`: it is left out. A low version is used if it is forced or
    /// demanded, and in place of nothing; a resident high version wins otherwise.
    fn choose_precision(&self, expert: ExpertId, demand: Demand, devices: &dyn DeviceResidency) -> Option<Precision> {
        let [high, low] = [Version::high(expert), Version::low(expert)];
        let has_low = !self.precisions.is_exact() && self.memory.layout.has_version(low);
        if has_low && self.precisions.is_forced_low(expert) {
            return Some(Precision::Low);
        }
        let is_here = [high, low].map(|version| self.location(version, devices) == Location::Here);
        // Until the device that multiplies has a version, at the speeds measured so far.
        let seconds = |version| {
            let disk = self.lookahead.as_ref().and_then(Lookahead::seconds_per_byte);
            let rates = Rates { link: devices.seconds_per_byte(), disk: disk.unwrap_or(Rates::DISK) };
            let bytes = self.memory.layout.bytes(version).unwrap_or(0);
            let missing = self.memory.layout.bytes_missing(&self.memory.cache, version).unwrap_or(bytes);
            rates.seconds(self.location(version, devices), (bytes, missing))
        };
        // The low version may be in a file and the high one in host memory: then the high one can come sooner.
        let is_quick = || seconds(low) <= seconds(high);
        let may_load_low = || !devices.copies() || !self.precisions.loads_high() || is_quick();
        resolve(demand, [is_here[0], has_low && is_here[1]], has_low && may_load_low())
    }

    /// The nearest memory that has a version, seen from where products run.
    fn location(&self, version: Version, devices: &dyn DeviceResidency) -> Location {
        // A high version that arrives in the background does not count before it is complete.
        let is_on_host = || self.memory.cache.lookup(version).is_some() && !self.upgrades.is_underway(version);
        match devices.has(version) {
            true => Location::Here,
            false if !is_on_host() => Location::File,
            false if devices.copies() => Location::Host,
            false => Location::Here,
        }
    }

    /// Lines up the slices that a step uses without a slot, and drops staged slices that are no longer wanted.
    fn queue_for_staging(&mut self, selection: &Selection, step: &LayerStep, devices: &dyn DeviceResidency) {
        let without_slot = step.used.iter().filter(|used| used.row.is_none() && !used.is_on_device);
        let overflow: Vec<Version> = without_slot.map(|&used| step.version(used)).collect();
        let is_staged_ahead =
            |version| self.lookahead.as_ref().is_some_and(|ahead| ahead.is_staged_ahead(version, step.layer));
        let is_kept = |slice: SliceId| {
            overflow.contains(&slice.version) || devices.is_uploading(slice) || is_staged_ahead(slice.version)
        };
        // Only what this split multiplies: of a layer that comes in several splits, nothing is read twice.
        let kinds = selection.split_kinds().iter();
        let slices = kinds.flat_map(|&kind| overflow.iter().map(move |&version| SliceId { version, kind }));
        self.memory.in_flight.stage(slices, is_kept);
    }

    /// Ends a step: its experts may be evicted again.
    pub(super) fn end(&mut self, step: LayerStep, selection: &Selection) {
        let may_upgrade = selection.ends_decoded_layer(self.memory.layout.kinds(step.layer).len());
        let pinned = self.end_pinned(step);
        self.memory.unpin(pinned);
        if !self.precisions.options.deterministic {
            self.upgrades.settle(&mut self.memory);
            if may_upgrade {
                self.upgrades.start_if_idle(&mut self.memory, &self.precisions);
            }
        }
    }

    /// Ends a step whose slots are still being read; [`super::Memory::unpin`] gives them back.
    pub fn finish(&mut self, step: LayerStep) -> Vec<SlotId> {
        let pinned = self.end_pinned(step);
        if !self.precisions.options.deterministic {
            self.upgrades.settle(&mut self.memory);
        }
        pinned
    }

    fn end_pinned(&mut self, step: LayerStep) -> Vec<SlotId> {
        self.memory.observer.end_layer(self.memory.moved.wait_seconds);
        self.memory.in_flight.forget_queue(false);
        self.memory.in_flight.running = None;
        step.pinned
    }

    /// Makes background reads of versions that a step uses urgent.
    fn promote(&mut self, step: &LayerStep) {
        let in_flight = &self.memory.in_flight;
        if !in_flight.is_reading_ahead && !in_flight.is_filling && !self.upgrades.are_underway() {
            return;
        }
        // An upgrade whose expert a device has remains one: without its pin, its slot could be evicted at once.
        let is_needed = |version| step.used.iter().any(|&used| !used.is_on_device && step.version(used) == version);
        self.upgrades.take_over(&mut self.memory.cache, is_needed);
        self.memory.in_flight.promote(is_needed);
    }

    /// After the choice of a layer's router for a batch that decodes, and the `step` made of it: shields what comes
    /// next from eviction, and reads what is worth it. `seconds` of the layer without waits; `None`: measured.
    pub(super) fn predict(
        &mut self,
        step: &LayerStep,
        tokens: &TokenChoices,
        scores: Vec<ScoresByLayer>,
        seconds: Option<f64>,
        devices: &dyn DeviceResidency,
    ) {
        self.hear();
        let Self { lookahead, memory, upgrades, rerouting, .. } = self;
        let Some(lookahead) = lookahead else { return };
        lookahead.time(step.layer, memory.in_flight.reader.seconds(), memory.moved.wait_seconds, seconds);
        let lower = |cache: &Cache, layer: u16, scores: &mut [f32], n_used: usize| {
            let is_there = |index| {
                let expert = ExpertId { layer, index };
                let is_on_device = devices.has_on_any(Version::high(expert));
                is_on_device || !devices.copies() && upgrades.is_present(cache, rerouting, expert)
            };
            rerouting.lower_missing(scores, n_used, &is_there);
        };
        lookahead.predict(memory, step, tokens, scores, devices, &lower);
        self.hear();
    }

    /// Counts a needed expert, which is used in this precision, and tells the policy and the observer. Whether it is
    /// there.
    fn count_use(
        &mut self,
        expert: ExpertId,
        precision: Option<Precision>,
        selection: &Selection,
        devices: &dyn DeviceResidency,
    ) -> bool {
        let memory = &mut self.memory;
        let version = precision.map(|precision| Version { expert, precision });
        let is_on_device = version.is_some_and(|version| devices.has(version));
        let slot = version.and_then(|version| memory.cache.lookup(version));
        // How far a read has come depends on the disk's speed.
        let is_ready = |slot| self.precisions.options.deterministic || memory.cache.is_ready(slot);
        let hit = is_on_device || slot.is_some_and(is_ready);
        // A device has its own policy: its residents may age here.
        if !is_on_device {
            self.drafts.touch(&mut memory.cache, selection, expert, hit, precision);
        }
        let n_uses = selection.routing.pairs_of(expert.index).len() as u64;
        self.counts.used(expert.layer, precision, n_uses);
        let high = Version::high(expert);
        if !devices.has(high) && (devices.copies() || !memory.cache.is_complete(high)) {
            self.counts.all.missed.count(precision, 1);
        }
        self.counts.needed(expert.layer, hit);
        self.counts.all.draft_misses += u64::from(!hit && self.drafts.is_alone(selection, expert));
        if memory.observer.is_watching() {
            let demand = selection.demands[usize::from(expert.index)];
            let bytes = version.and_then(|version| memory.layout.bytes_missing(&memory.cache, version)).unwrap_or(0);
            let is_there = is_on_device
                || slot.is_some()
                || version.is_some_and(|version| memory.in_flight.is_staged(version, &memory.layout));
            memory.observer.needed(&NeededExpert { expert, demand, version, hit, is_there, bytes });
        }
        hit
    }

    /// Whether experts that are missing may be replaced by others in this phase.
    pub fn may_reroute(&self, phase: Phase) -> bool {
        !self.rerouting.is_off() && (phase.is_decode() || self.reroutes_prompts)
    }

    /// Whether using an expert now in high precision costs nothing where products run. One that is on its way costs
    /// nothing either, unless tokens use only complete experts.
    pub(super) fn is_present(&self, expert: ExpertId, devices: &dyn DeviceResidency) -> bool {
        if let Some(masked) = &self.masked {
            return !masked.contains(&expert);
        }
        let high = Version::high(expert);
        if devices.copies() {
            return devices.has(high);
        }
        let virtual_experts = self.virtual_experts.as_ref();
        if virtual_experts.is_some_and(|experts| experts.is_whole(expert.layer)) || devices.has(high) {
            return true;
        }
        let is_arriving = virtual_experts.is_some_and(|experts| experts.is_underway(high));
        !is_arriving && self.upgrades.is_present(&self.memory.cache, &self.rerouting, expert)
    }
}

// Counters.

/// Counted since a residency was made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Needed experts that were there: one for each distinct expert that a layer needed.
    pub hits: u64,
    /// Needed experts that were not.
    pub misses: u64,
    /// Those of them that only drafts needed.
    pub draft_misses: u64,
    pub slices_loaded: u64,
    pub bytes_read: u64,
    pub wait_seconds: f64,
    /// Uses, one for each token and each expert its router chose, by precision.
    pub used: PrecisionCounts,
    /// Needed experts whose high version was not there, by what was done.
    pub missed: PrecisionCounts,
    /// Uses that went elsewhere than their router said.
    pub rerouted: RerouteCounts,
    /// Low versions that a high one replaced in the background.
    pub upgrades: u64,
    /// As [`PhaseStats::in_order`](crate::stats::PhaseStats::in_order).
    pub in_order: u64,
    /// The layer that is computed, or was last; 0 between two batches.
    pub layer: u16,
}

/// Counts of all layers together, and of each by block.
pub(super) struct Counts {
    pub(super) all: Counters,
    by_layer: Vec<LayerCounts>,
}

impl Counts {
    pub(super) fn new(n_blocks: u16) -> Self {
        Self { all: Counters::default(), by_layer: vec![LayerCounts::default(); usize::from(n_blocks)] }
    }

    /// Counts of each layer with experts, ascending.
    pub(super) fn of_layers(&self, layout: &Layout, cache: &Cache, flatness: &Flatness) -> Vec<LayerStats> {
        let stats = |layer: u16| {
            let LayerCounts { hits, misses, used, rerouted } = self.by_layer[usize::from(layer)];
            let slots = cache.pools().capacity_of_layer(layer, Precision::High);
            let (uses, refused) = (rerouted.uses, rerouted.refused);
            let (exchangeable, is_flat) = (flatness.share(layer), flatness.is_flat(layer));
            LayerStats { layer, slots, hits, misses, used, rerouted: uses, refused, exchangeable, is_flat }
        };
        layout.layers().map(stats).collect()
    }

    pub(super) fn needed(&mut self, layer: u16, hit: bool) {
        let LayerCounts { hits, misses, .. } = &mut self.by_layer[usize::from(layer)];
        *(if hit { hits } else { misses }) += 1;
        *(if hit { &mut self.all.hits } else { &mut self.all.misses }) += 1;
    }

    /// Counts uses in a precision; `None`: they were left out.
    pub(super) fn used(&mut self, layer: u16, precision: Option<Precision>, n_uses: u64) {
        self.all.used.count(precision, n_uses);
        self.by_layer[usize::from(layer)].used.count(precision, n_uses);
    }

    pub(super) fn rerouted(&mut self, layer: u16, outcome: RerouteCounts) {
        let of_layer = &mut self.by_layer[usize::from(layer)].rerouted;
        *of_layer = *of_layer + outcome;
        self.all.rerouted = self.all.rerouted + outcome;
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct LayerCounts {
    hits: u64,
    misses: u64,
    used: PrecisionCounts,
    rerouted: RerouteCounts,
}
