//! Reads: what is asked of the loader, in which order, and where the answers go.

use super::{FEW_READS, RECORD_BYTES_MAX, RECORD_BYTES_MAX_OF_FEW, Residency, Step, Target, class_of};
use crate::cache::{SliceState, SlotId};
use crate::expert::{ExpertId, Extent, SliceId, SliceKind, Version};
use crate::gguf::{SliceSource, VersionSource};
use crate::load::LoadClass;
use crate::store::{ReadDone, ReadRequest, SlotPtr, StoreError};

impl Residency {
    /// Pins a resident version and requests slices of it that an earlier failure left free.
    pub(super) fn load_free_slices(&mut self, slot: SlotId, version: Version, order: &[SliceKind]) {
        let free: Vec<SliceKind> =
            order.iter().copied().filter(|&kind| self.cache.state(slot, kind) == SliceState::Free).collect();
        for &kind in &free {
            self.cache.set_loading(slot, kind);
        }
        self.cache.pin(slot);
        let requests = free.iter().map(|&kind| self.slot_request(slot, SliceId { version, kind })).collect();
        self.submit(class_of(version.precision), requests);
    }

    /// What was to be read sometime is needed now.
    pub(super) fn hurry(&mut self, step: &Step) {
        if self.upgrades.is_empty() && !self.is_reading_ahead && !self.is_filling() {
            return;
        }
        let needed = |version: Version| {
            version.expert.layer == step.layer
                && step
                    .used
                    .iter()
                    .any(|used| used.index == version.expert.index && used.precision == version.precision)
        };
        // From here on its read is one like any other: if it fails, the batch does.
        let cache = &mut self.cache;
        self.upgrades.retain(|upgrade| {
            let needed = needed(upgrade.version);
            if needed {
                cache.unpin(upgrade.slot);
            }
            !needed
        });
        let targets = &self.targets;
        let ticket_needed = |ticket: u64| targets[ticket as usize].is_some_and(|target| needed(target.version()));
        self.loader.promote(ticket_needed, LoadClass::OnDemandHigh);
    }

    /// Drops reads ahead that have not started and that the running layer has no use for: what the router chose is
    /// known now.
    pub(super) fn drop_obsolete(&mut self, layer: u16) {
        self.stop_filling(Some(layer));
        if !self.is_reading_ahead {
            return;
        }
        let targets = &self.targets;
        let obsolete =
            |ticket: u64| targets[ticket as usize].is_some_and(|target| target.version().expert.layer == layer);
        let [mut withdrawn, guessed] =
            [LoadClass::ReadAhead, LoadClass::Prefetch].map(|class| self.loader.withdraw(class, obsolete));
        withdrawn.extend(guessed);
        for ticket in withdrawn {
            let target = self.targets[ticket as usize].take().expect("a waiting read has a target");
            self.read_ahead_dropped(target.version());
            let bytes = self.bytes_of(target);
            self.recorder.iter_mut().for_each(|recorder| recorder.withdrawn(target.version(), bytes));
            self.unread(target);
        }
        self.is_reading_ahead = !self.loader.is_idle();
    }

    /// Fills what is free of the next layer's high share, and lines the rest up for staging.
    pub(super) fn look_ahead(&mut self, layer: u16, elsewhere: &dyn Fn(Version) -> bool) {
        let Some(next) = (layer + 1..self.layers.len() as u16).find(|&l| self.layers[usize::from(l)].is_some()) else {
            return;
        };
        // How far a read ahead has come decides what may be evicted for the next: a matter of speed.
        if !self.precisions.loads_high() || (self.precisions.options.deterministic && !self.precisions.is_exact()) {
            return;
        }
        let order = self.load_order(next, &[]);
        let missing: Vec<Version> = (0..self.layer(next).n_expert)
            .map(|index| Version::high(ExpertId { layer: next, index }))
            .filter(|&version| self.cache.lookup(version).is_none() && !elsewhere(version))
            .filter(|&version| self.precisions.is_exact() || self.cache.lookup(Version::low(version.expert)).is_none())
            .take(self.precisions.at_most_high(usize::from(self.layer(next).n_expert)))
            .collect();
        let mut filled = Vec::new();
        let mut rest = Vec::new();
        for version in missing {
            let slot = if self.cache.has_empty_slot(version) { self.cache.acquire(version) } else { None };
            match slot {
                Some(acquired) => {
                    order.iter().for_each(|&kind| self.cache.set_loading(acquired.slot, kind));
                    filled.push((acquired.slot, version));
                }
                None => rest.push(version),
            }
        }
        for &kind in &order {
            self.ahead.extend(rest.iter().map(|&version| SliceId { version, kind }));
        }
        self.read_slots(LoadClass::ReadAhead, &filled, &order);
    }

    /// Submits reads as long as there are staging slots and slices to stage.
    pub(super) fn pump(&mut self) {
        loop {
            let (class, slice) = match (self.queue.front(), self.ahead.front()) {
                (Some(&slice), _) => (class_of(slice.version.precision), slice),
                (None, Some(&slice)) => (LoadClass::ReadAhead, slice),
                (None, None) => return,
            };
            let already = self.staging.get(slice).is_some();
            if !already {
                let Some(slot) = self.staging.take(slice) else { return };
                let request = self.staging_request(slot, slice);
                self.submit(class, vec![request]);
            }
            match class {
                LoadClass::ReadAhead => self.ahead.pop_front(),
                _ => self.queue.pop_front(),
            };
        }
    }

    /// Reads versions into their slots, whose slices are all loading: small records at once, others slice by slice,
    /// first the slices that are multiplied first.
    pub(super) fn read_slots(&mut self, class: LoadClass, reads: &[(SlotId, Version)], order: &[SliceKind]) {
        let mut requests = Vec::with_capacity(reads.len() * order.len());
        let most = if reads.len() <= FEW_READS { RECORD_BYTES_MAX_OF_FEW } else { RECORD_BYTES_MAX };
        let whole = |source: &VersionSource| source.record.filter(|record| record.len <= most);
        for &(slot, version) in reads {
            if let Some(extent) = whole(self.source(version)) {
                let dst = self.slot_start(slot, version);
                let target = Target::Record { slot, version };
                requests.push(self.request(extent, 0, dst, extent.len as usize, target));
            }
        }
        for &kind in order {
            for &(slot, version) in reads {
                if whole(self.source(version)).is_none() {
                    requests.push(self.slot_request(slot, SliceId { version, kind }));
                }
            }
        }
        self.submit(class, requests);
    }

    /// Whether the running split waits for this read.
    pub(super) fn is_wanted(&self, target: Target) -> bool {
        self.running == Some(target.version().expert.layer)
            && match target {
                Target::Slot { slot, .. } | Target::Record { slot, .. } => self.cache.is_pinned(slot),
                Target::Staging { slice, .. } => self.staging.get(slice).is_some(),
            }
    }

    pub(super) fn land(&mut self, done: Vec<ReadDone>) {
        for ReadDone { ticket, result, .. } in done {
            let target = self.targets[ticket as usize].take().expect("every ticket is answered once");
            let version = target.version();
            let is_wanted = self.is_wanted(target);
            let kinds: Vec<SliceKind> = match target {
                Target::Record { .. } => self.layer(version.expert.layer).kinds.clone(),
                Target::Slot { slice, .. } | Target::Staging { slice, .. } => vec![slice.kind],
            };
            match target {
                Target::Slot { slot, .. } | Target::Record { slot, .. } => {
                    for &kind in &kinds {
                        match result.is_ok() {
                            true => self.cache.set_ready(slot, kind),
                            false => self.cache.set_failed(slot, kind),
                        }
                    }
                }
                Target::Staging { slot, .. } => self.staging.landed(slot, result.is_ok()),
            }
            let is_staged = matches!(target, Target::Staging { .. });
            self.read_ahead_landed(version, result.is_ok());
            let upgrade = self.upgrades.iter_mut().find(|upgrade| upgrade.version == version && !is_staged);
            match (result, upgrade) {
                (Ok(bytes), _) => {
                    self.counters.slices_loaded += kinds.len() as u64;
                    self.counters.bytes_read += bytes;
                }
                // The low version goes on serving.
                (Err(_), Some(upgrade)) => upgrade.failed = true,
                // A read ahead that failed is tried again when its layer runs, if it is needed at all.
                (Err(error), None) if is_wanted => {
                    self.failure.get_or_insert(error);
                }
                (Err(_), None) => {}
            }
        }
        self.pump();
    }

    /// A read that never started.
    pub(super) fn unread(&mut self, target: Target) {
        self.read_ahead_landed(target.version(), false);
        if let Some(upgrade) = self.upgrades.iter_mut().find(|upgrade| upgrade.version == target.version()) {
            upgrade.failed = true;
        }
        match target {
            Target::Slot { slot, slice } => {
                self.cache.set_failed(slot, slice.kind);
                self.cache.release(slice.version);
            }
            Target::Record { slot, version } => {
                for kind in self.layer(version.expert.layer).kinds.clone() {
                    self.cache.set_failed(slot, kind);
                }
                self.cache.release(version);
            }
            Target::Staging { slot, .. } => self.staging.landed(slot, false),
        }
    }

    pub(super) fn submit(&mut self, class: LoadClass, requests: Vec<ReadRequest>) {
        if requests.is_empty() {
            return;
        }
        self.is_reading_ahead |= matches!(class, LoadClass::ReadAhead | LoadClass::Prefetch);
        let mut parts: Vec<(u64, Version, u64)> = Vec::new();
        if class.is_background() && self.recorder.is_some() {
            let version = |ticket: u64| self.targets[ticket as usize].map(|target| target.version());
            let part = |r: &ReadRequest| Some((r.ticket, version(r.ticket)?, r.extent.len));
            parts.extend(requests.iter().filter_map(part));
        }
        for arena in self.pools.iter().chain([&self.staging_memory]) {
            requests.iter().for_each(|request| arena.need(request.dst.as_ptr(), request.capacity));
        }
        for refused in self.loader.submit(class, requests) {
            parts.retain(|(ticket, ..)| *ticket != refused.ticket);
            let target = self.targets[refused.ticket as usize].take().expect("just requested");
            if !class.is_background() {
                let extent = refused.extent;
                self.failure.get_or_insert(StoreError::TooManyReads { offset: extent.offset, len: extent.len });
            }
            self.unread(target);
        }
        if !parts.is_empty() {
            let parts: Vec<_> = parts.into_iter().map(|(_, version, bytes)| (version, bytes)).collect();
            self.record_loads(class, &parts);
        }
    }

    /// First byte of a version's slot.
    pub(super) fn slot_start(&self, slot: SlotId, version: Version) -> *mut u8 {
        let share = &self.layer(version.expert.layer).shares[usize::from(self.share_of(version))];
        let stride = self.catalog.classes[usize::from(share.class)].stride as usize;
        share.base.wrapping_add((slot.index - share.first_slot) as usize * stride)
    }

    pub(super) fn slot_request(&mut self, slot: SlotId, slice: SliceId) -> ReadRequest {
        let start = self.slot_start(slot, slice.version);
        let (shape, SliceSource { extent, lead }) = self.slice(slice);
        let (dst, capacity) = (start.wrapping_add(shape.region as usize), shape.capacity as usize);
        self.request(extent, lead, dst, capacity, Target::Slot { slot, slice })
    }

    pub(super) fn staging_request(&mut self, slot: usize, slice: SliceId) -> ReadRequest {
        let dst = self.staging_memory.as_ptr().wrapping_add(slot * self.staging_stride);
        let SliceSource { extent, lead } = self.slice(slice).1;
        self.request(extent, lead, dst, self.staging_stride, Target::Staging { slot, slice })
    }

    pub(super) fn request(
        &mut self,
        extent: Extent,
        lead: u64,
        dst: *mut u8,
        capacity: usize,
        target: Target,
    ) -> ReadRequest {
        let is_free = |ticket: &usize| self.targets[*ticket].is_none();
        let ticket = match (self.last_ticket..self.targets.len()).chain(0..self.last_ticket).find(is_free) {
            Some(free) => free,
            None => {
                self.targets.push(None);
                self.targets.len() - 1
            }
        };
        self.last_ticket = ticket;
        self.targets[ticket] = Some(target);
        // SAFETY: `dst` is a slot, or a slice's region of one, of `capacity` bytes in an arena of this value that
        // outlives the loader. Its state is loading from now until `land`: nothing else reads or writes it, and it
        // cannot be taken again.
        let dst = unsafe { SlotPtr::new(dst) };
        ReadRequest { ticket: ticket as u64, extent, dst, capacity, lead: lead as usize }
    }
}
