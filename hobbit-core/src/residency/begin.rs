//! Begins and ends a layer: which versions it uses, which of them are there, and what has to be read.

use super::devices::DeviceResidency;
use super::selection::Selection;
use super::step::{LayerStep, Used};
use super::{Lookahead, Observer, Reads, Residency};
use crate::cache::{SliceState, SlotId};
use crate::expert::{ExpertId, Precision, SliceId, SliceKind, Version};
use crate::load::LoadClass;
use crate::predict::RouterScores;
use crate::route::{Demand, Location, Rates, Weighing, resolve};

impl<R: Reads, O: Observer> Residency<R, O> {
    /// Takes what has landed, and what follows of that, before a layer begins.
    pub fn catch_up(&mut self) {
        self.poll();
        if !self.precisions.options.deterministic {
            self.settle_upgrades();
        }
    }

    /// Reads versions of one layer and precision into slots or staging, without a use: nothing is counted. `None` for
    /// no versions.
    pub fn load(&mut self, versions: &[Version]) -> Option<LayerStep> {
        let layer = versions.first()?.expert.layer;
        let n_expert = usize::from(self.layout.n_expert(layer));
        let mut selection = Selection::unused(versions, self.layout.kinds(layer), n_expert);
        Some(self.begin(&mut selection, &[], &()))
    }

    /// Counts the layer's tokens, before policies see anything of them.
    pub(super) fn enter(&mut self, selection: &Selection) {
        self.cache.begin_layer(selection.layer(), self.drafts.n_certain_of(selection));
    }

    /// High versions of selected experts that rerouting counts as missing.
    pub(super) fn missing(&self, selection: &Selection, devices: &dyn DeviceResidency) -> Vec<Version> {
        let needed = selection.routing.needed.iter();
        let experts = needed.map(|&index| ExpertId { layer: selection.layer(), index });
        experts.filter(|&expert| !self.is_present(expert, devices)).map(Version::high).collect()
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
        let is_present = |index| self.is_present(ExpertId { layer, index }, devices);
        let (outcome, weights) = selection.reroute(&self.rerouting, before, scores, &is_present);
        self.counts.rerouted(layer, outcome);
        weights
    }

    /// Tells policies, counters and the observer of a layer's first split. `scores`: the router's, of all experts,
    /// `[n_tokens][n_expert]`; empty if they are not known.
    fn tell(&mut self, selection: &mut Selection, scores: &[f32]) {
        let layer = selection.layer();
        let of_tokens = scores.chunks_exact(selection.n_expert.max(1)).take(selection.routing.n_tokens);
        for (token, scores) in of_tokens.enumerate() {
            self.drafts.scores(&mut self.cache, selection, token, scores);
        }
        selection.know(scores);
        let (routing, weights) = selection.unmasked();
        let (observed, inputs) = selection.observed();
        self.count_wanted(layer, routing, observed, inputs);
        self.counts.all.layer = layer;
        self.observer.begin_layer(layer, routing, weights, scores, self.counts.all.wait_seconds);
        if selection.is_rerouted() {
            self.observer.rerouted(&selection.routing.ids);
        }
        selection.sum_shares();
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
        self.in_flight.failure = None;
        let layer = selection.layer();
        self.in_flight.running = Some(layer);
        let order = self.layout.load_order(layer, selection.split_kinds());
        let (mut step, missing) = self.choose_versions(selection, &order, devices);
        self.promote(&step);
        self.drop_obsolete(layer);
        let mut reads: Vec<(SlotId, Version)> = Vec::new();
        for position in missing {
            let used = step.used[position];
            let version = step.version(used);
            let is_staged = self.in_flight.is_staged(version, &self.layout);
            if let Some(slot) = if is_staged { None } else { self.acquire(version) } {
                step.used[position].row = Some(self.layout.row(layer, used.share, slot));
                self.cache.pin(slot);
                step.pinned.push(slot);
                reads.push((slot, version));
            }
        }
        self.queue_for_staging(selection, &step, devices);
        for precision in Precision::ALL {
            let wanted: Vec<_> = reads.iter().copied().filter(|(_, version)| version.precision == precision).collect();
            self.read_slots(LoadClass::on_demand(precision), &wanted, &order);
        }
        if selection.is_dense() {
            let n_high = step.used.iter().filter(|used| used.precision == Precision::High).count();
            self.look_ahead(layer, n_high, &selection.expected, devices);
        }
        self.pump();
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
            self.touch_unused(selection);
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
            let share = self.layout.share_of(version);
            if devices.has(version) {
                step.used.push(Used { index, precision, share, row: None, is_on_device: true });
                continue;
            }
            let slot = self.cache.lookup(version);
            let row = slot.map(|slot| self.layout.row(layer, share, slot));
            step.used.push(Used { index, precision, share, row, is_on_device: false });
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

    /// The precision in which a needed expert is used; `None`: it is left out. A low version is used if it is forced or
    /// demanded, and in place of nothing; a resident high version wins otherwise.
    fn choose_precision(&self, expert: ExpertId, demand: Demand, devices: &dyn DeviceResidency) -> Option<Precision> {
        let [high, low] = [Version::high(expert), Version::low(expert)];
        let has_low = !self.precisions.is_exact() && self.layout.has_version(low);
        if has_low && self.precisions.is_forced_low(expert) {
            return Some(Precision::Low);
        }
        let is_here = [high, low].map(|version| self.location(version, devices) == Location::Here);
        // The low version may be in a file and the high one in host memory: then the high one can come sooner.
        let is_quick = || self.seconds(low, devices) <= self.seconds(high, devices);
        let may_load_low = || !devices.copies() || !self.precisions.loads_high() || is_quick();
        resolve(demand, [is_here[0], has_low && is_here[1]], has_low && may_load_low())
    }

    /// The nearest memory that has a version, seen from where products run.
    fn location(&self, version: Version, devices: &dyn DeviceResidency) -> Location {
        // A high version that arrives in the background does not count before it is complete.
        let is_on_host = || self.cache.lookup(version).is_some() && !self.background.upgrades.is_underway(version);
        match devices.has(version) {
            true => Location::Here,
            false if !is_on_host() => Location::File,
            false if devices.copies() => Location::Host,
            false => Location::Here,
        }
    }

    /// Seconds until the device that multiplies has a version, at the speeds measured so far.
    fn seconds(&self, version: Version, devices: &dyn DeviceResidency) -> f64 {
        let disk = self.background.lookahead.as_ref().and_then(Lookahead::seconds_per_byte);
        let rates = Rates { link: devices.seconds_per_byte(), disk: disk.unwrap_or(Rates::DISK) };
        let bytes = self.layout.bytes(version).unwrap_or(0);
        let missing = self.layout.bytes_missing(&self.cache, version).unwrap_or(bytes);
        rates.seconds(self.location(version, devices), (bytes, missing))
    }

    /// Lines up the slices that a step uses without a slot, and drops staged slices that are no longer wanted.
    fn queue_for_staging(&mut self, selection: &Selection, step: &LayerStep, devices: &dyn DeviceResidency) {
        let without_slot = step.used.iter().filter(|used| used.row.is_none() && !used.is_on_device);
        let overflow: Vec<Version> = without_slot.map(|&used| step.version(used)).collect();
        let is_kept = |slice: SliceId| {
            overflow.contains(&slice.version)
                || devices.is_uploading(slice)
                || self.background.is_staged_ahead(slice.version, step.layer)
        };
        // Only what this split multiplies: of a layer that comes in several splits, nothing is read twice.
        let kinds = selection.split_kinds().iter();
        let slices = kinds.flat_map(|&kind| overflow.iter().map(move |&version| SliceId { version, kind }));
        self.in_flight.stage(slices, is_kept);
    }

    /// Pins a resident version, and asks for slices of it that an earlier failure left free.
    fn load_free_slices(&mut self, slot: SlotId, version: Version, order: &[SliceKind]) {
        let free: Vec<SliceKind> =
            order.iter().copied().filter(|&kind| self.cache.state(slot, kind) == SliceState::Free).collect();
        for &kind in &free {
            self.cache.set_loading(slot, kind);
        }
        self.cache.pin(slot);
        let reads = self.in_flight.of_slices(slot, version, &free, &self.layout);
        self.submit(LoadClass::on_demand(version.precision), reads);
    }

    /// Ends a step: its experts may be evicted again.
    pub(super) fn end(&mut self, step: LayerStep, selection: &Selection) {
        let may_upgrade = selection.ends_decoded_layer(self.layout.kinds(step.layer).len());
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
        self.observer.end_layer(self.counts.all.wait_seconds);
        self.in_flight.forget_queue(false);
        self.in_flight.running = None;
        step.pinned
    }

    /// Slots of a finished step may be evicted again.
    pub fn unpin(&mut self, slots: Vec<SlotId>) {
        slots.into_iter().for_each(|slot| self.cache.unpin(slot));
    }
}
