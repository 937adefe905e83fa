//! A layer on a device, in stages of independent products: each product is submitted as its experts arrive. The CPU
//! helper computes its part beside it.

use super::*;
use crate::engine::ggml::graph::may_swap;
use crate::engine::gpu::offload::helper::{HostChain, chain_of};
use crate::engine::gpu::offload::launch::Members;
use crate::engine::memory::device_tier::DeviceSlots;
use crate::engine::memory::host_reads::{ShareView, host_bytes};
use hobbit_core::residency::Router;
use hobbit_core::route::Routing;

/// The device's part of a step.
struct Part {
    used: Vec<Used>,
    /// Experts that are multiplied one by one, with their rows.
    coming: Vec<(Used, u32)>,
    /// Experts whose products were begun early.
    done: Vec<u16>,
}

impl DeviceResidency for DeviceLayer<'_, '_> {
    fn has(&self, version: Version) -> bool {
        self.tier.slots.has(version, self.router.kinds())
    }

    fn has_on_any(&self, version: Version) -> bool {
        self.tier.slots.is_resident(version) || self.others.have(version)
    }

    fn is_uploading(&self, slice: SliceId) -> bool {
        self.others.read(slice)
    }

    fn seconds_per_byte(&self) -> f64 {
        if self.tier.is_unified() { 0.0 } else { self.tier.seconds_per_byte() }
    }

    fn has_empty_slot(&self, version: Version) -> bool {
        self.tier.slots.cache.has_empty_slot(version)
    }
}

impl<'a> Compute<HostReads, Recorder> for DeviceLayer<'a, '_> {
    type Error = Failed;
    type Router = LayerRouter<'a>;

    const PREDICTS_BEHIND_PRODUCTS: bool = true;

    fn router(&mut self) -> &mut LayerRouter<'a> {
        &mut self.router
    }

    fn write(&mut self, ids: Option<&[u16]>, weights: &[f32]) {
        self.router.write(ids, weights);
        self.write_back(ids.is_some());
    }

    fn enter(&mut self, _: &mut Host, selection: &Selection, scores: &[f32]) {
        let DeviceSlots { cache, drafts, .. } = &mut self.tier.slots;
        cache.begin_layer(selection.layer(), drafts.n_certain_of(selection));
        // Its policy knows no layers of the CPU.
        let scored = if cache.pools().shares().any(|share| share.layer == selection.layer()) { scores } else { &[] };
        let by_token = scored.chunks_exact(selection.n_expert).enumerate();
        by_token.for_each(|(token, scores)| drafts.scores(cache, selection, token, scores));
    }

    fn products(&mut self, host: &mut Host, selection: &Selection, step: &LayerStep) -> Result<(), Failed> {
        // SAFETY: `Offload::layer` made this of a live graph's nodes.
        unsafe {
            self.submit_products(host, selection, step)?;
            self.submit_following()
        }
    }

    fn finish(&mut self, host: &mut Host, selection: &Selection, step: &LayerStep) -> Result<(), Failed> {
        if selection.is_new_decode() {
            self.tier.upload_ahead(host, step, selection);
        }
        // SAFETY: as above.
        unsafe { self.finish_help(host, selection, step) }
    }

    fn end(&mut self, host: &mut Host, _: &Selection, step: LayerStep) {
        // Uploads may still read these slots.
        self.tier.on_host.pins.extend(host.finish(step));
        self.tier.leave(&self.offload.launch.stream);
    }
}

impl DeviceLayer<'_, '_> {
    /// Sends the router's weights to the device, and its ids if they have changed.
    fn write_back(&mut self, with_ids: bool) {
        let [ids, weights] = &self.read_back;
        for own in ids.iter().filter(|_| with_ids).chain(weights) {
            // SAFETY: the tensors are on the device until the ubatch is done, and have as many bytes. The launch keeps
            // a copy until the stream is waited for: the values may change again before.
            unsafe { self.offload.launch.set(own.tensor, own.bytes().to_vec(), 0) };
        }
    }

    /// Submits the nodes after the region, so that the device has work while the next layers are predicted; not if the
    /// CPU helper has yet to give its part.
    ///
    /// # Safety
    /// As [`Offload::layer`]; the region has been submitted.
    unsafe fn submit_following(&mut self) -> Result<(), Failed> {
        let Region { graph, all, to, .. } = self.region;
        if self.help.is_none() {
            // SAFETY: by the caller.
            match unsafe { self.offload.submit_plain(graph, all, to) } {
                Ok(next) => self.submitted = next,
                // The tier can give up memory once the layer is done.
                Err(GGML_STATUS_ALLOC_FAILED) => self.offload.is_refused = true,
                Err(status) => return Err(status),
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Offload::layer`].
    unsafe fn submit_products(
        &mut self,
        host: &mut Host,
        selection: &Selection,
        step: &LayerStep,
    ) -> Result<(), Failed> {
        let (kinds, routing) = (self.router.kinds(), &selection.routing);
        let upgrades = host.precisions.options.upgrade && host.precisions.loads_high();
        let missing = pin_present(self.tier, step, kinds, selection, upgrades);
        let region = std::mem::take(&mut self.work.nodes);
        // SAFETY: by the caller.
        self.help = unsafe { self.divide(host, selection, step, &missing, &region) };
        // The most important last: it is copied first.
        let helped = self.help.iter().flat_map(|help| help.experts.iter().rev());
        helped.for_each(|&used| self.tier.want(step.version(used)));
        let is_helped = |used: &Used| self.help.as_ref().is_some_and(|help| help.experts.contains(used));
        let copied: Vec<Used> = missing.into_iter().filter(|used| !is_helped(used)).collect();
        let used: Vec<Used> = step.used.iter().copied().filter(|used| !is_helped(used)).collect();
        for &used in &copied {
            self.tier.slots.acquire(step.version(used), host.layout().kinds(step.layer));
        }
        let products: Vec<*mut ggml_tensor> =
            region.iter().filter(|(_, kind)| kind.is_some()).map(|(node, _)| *node).collect();
        let (mut present, coming) = by_place(self.tier, step, kinds, &used, &copied);
        let done = self.done_early(step, routing, &present);
        // The device knows all slots.
        let slots = self.early.as_ref().filter(|_| done.len() == step.used.len() && step.skipped.is_empty());
        self.offload.launch.slots = slots.map(|early| early.ids);
        if slots.is_some() {
            present.clear();
        }
        // Skipped experts have rows of zeros.
        let skipped: Vec<Pair> =
            step.skipped.iter().flat_map(|&index| routing.pairs_of(index).iter().copied()).collect();
        let Offload { launch, early, .. } = &mut *self.offload;
        let beside = early.as_mut().filter(|_| self.early.is_some());
        let members = Members { present: &present, coming: &coming, skipped: &skipped };
        // SAFETY: by the caller; when the choice was read back, all regions before had run.
        unsafe { launch.prepare(self.tier, routing, &products, members, beside)? };
        self.uploads = Uploads::new(step, kinds, &copied);
        // SAFETY: the host slots of the step are pinned until the uploads have run: `OnHost::pins`.
        unsafe { self.uploads.pump(host, self.tier) };
        if !host.memory.overlaps() {
            // HOBBIT computes a layer once its missing experts are loaded (section 3.1). Those that stream through
            // staging cannot be there all at once, and follow one by one.
            host.memory.wait_for_all(step, kinds);
            // SAFETY: as above.
            unsafe { self.uploads.pump(host, self.tier) };
            self.tier.copies.wait_for_all(&self.offload.launch.stream);
        }
        // Products that wait for a file would be timed with it.
        let is_timed = (selection.phase().is_decode() || !self.input.is_empty()) && self.uploads.is_empty();
        let began = self.tier.measure_link().filter(|_| is_timed);
        let part = Part { used, coming, done };
        for stage in std::mem::take(&mut self.work.stages) {
            // SAFETY: by the caller.
            unsafe {
                for &(node, _) in &stage.products {
                    self.offload.launch.zero(self.tier, routing, node, &skipped)?;
                }
                self.stage(host, selection, step, &part, &stage)?;
                for &node in &stage.plain {
                    self.offload.launch.plain(self.tier, node)?;
                }
            }
        }
        self.offload.launch.submit(self.tier)?;
        if let Some(began) = began {
            self.offload.launch.synchronize();
            let mut bytes = 0;
            for (node, kind) in region.iter().filter_map(|&(node, kind)| Some((node, kind?))) {
                for &used in part.used.iter().filter(|used| !self.is_done(&part, node, used.index)) {
                    bytes += host.reads().shape(SliceId { version: step.version(used), kind }).bytes;
                }
            }
            self.tier.speed.observe_products(bytes, self.tier.speed.clock.seconds() - began);
        }
        Ok(())
    }
}

// Stages.

/// Pins a step's experts that are on the device. Returns the others, in the order of need. `upgrades`: high versions of
/// experts that are used in low precision are wanted there.
fn pin_present(
    tier: &mut Tier,
    step: &LayerStep,
    kinds: &[SliceKind],
    selection: &Selection,
    upgrades: bool,
) -> Vec<Used> {
    let mut missing = Vec::new();
    if tier.is_unified() {
        return missing;
    }
    if !selection.is_later_split() {
        tier.pass_over(selection);
    }
    for &used in &step.used {
        let version = step.version(used);
        // If a layer comes in several splits, an earlier one may have taken the slot for slices that it left to this
        // one.
        let hit = tier.slots.pin(version) && tier.slots.has(version, kinds);
        if !selection.is_later_split() {
            tier.touch(version, hit, selection);
            if upgrades && used.precision == Precision::Low {
                tier.want(Version::high(version.expert));
            }
        }
        if !hit {
            missing.push(used);
        }
    }
    missing
}

/// Divides a step's experts, with their rows, into groups that are multiplied together and experts that are multiplied
/// one by one. The latter include prefetched experts that may not have arrived.
#[allow(clippy::type_complexity)]
fn by_place(
    tier: &Tier,
    step: &LayerStep,
    kinds: &[SliceKind],
    all: &[Used],
    missing: &[Used],
) -> (Vec<Vec<(Used, u32)>>, Vec<(Used, u32)>) {
    let mut present: Vec<(u16, Vec<(Used, u32)>)> = Vec::new();
    let mut coming = Vec::new();
    for &used in all {
        let version = step.version(used);
        let is_coming =
            missing.iter().any(|other| other.index == used.index) || tier.copies.is_version_arriving(version, kinds);
        match tier.slots.place(version) {
            Some((pool, row)) if !is_coming => match present.iter_mut().find(|(known, _)| *known == pool) {
                Some((_, members)) => members.push((used, row)),
                None => present.push((pool, vec![(used, row)])),
            },
            place => coming.push((used, place.map_or(0, |(_, row)| row))),
        }
    }
    (present.into_iter().map(|(_, members)| members).collect(), coming)
}

/// A region's nodes, as they are and in stages; taken once they are submitted.
pub(super) struct Work {
    pub(super) nodes: Vec<Node>,
    pub(super) stages: Vec<Stage>,
}

/// Products that do not depend on each other, and the nodes after them.
pub(super) struct Stage {
    pub(super) products: Vec<Node>,
    plain: Vec<*mut ggml_tensor>,
}

/// Divides a region into stages. A product joins the stage before it, and so is computed before that stage's other
/// nodes, if neither its place in ggml's order nor its memory depends on them.
///
/// # Safety
/// Nodes of a live graph, allocated on one device, the first of which is a product.
pub(super) unsafe fn stages(region: &[Node]) -> Vec<Stage> {
    let mut stages: Vec<Stage> = Vec::new();
    for &(node, kind) in region {
        if kind.is_none() {
            stages.last_mut().expect("a region starts with a product").plain.push(node);
            continue;
        }
        let is_apart = |stage: &&mut Stage| {
            let mut earlier = stage.products.iter().map(|(node, _)| node).chain(&stage.plain);
            // SAFETY: by the caller.
            earlier.all(|&earlier| unsafe { may_swap(earlier, node) })
        };
        match stages.last_mut().filter(is_apart) {
            Some(stage) => stage.products.push((node, kind)),
            None => stages.push(Stage { products: vec![(node, kind)], plain: Vec::new() }),
        }
    }
    stages
}

impl DeviceLayer<'_, '_> {
    /// Computes the products of a stage, those of present experts first.
    ///
    /// # Safety
    /// As [`Offload::layer`]; the inputs of the products have been submitted.
    unsafe fn stage(
        &mut self,
        host: &mut Host,
        selection: &Selection,
        step: &LayerStep,
        part: &Part,
        stage: &Stage,
    ) -> Result<(), Failed> {
        let routing = &selection.routing;
        let mut pending: Vec<Product> = Vec::new();
        for (node, kind) in stage.products.iter().filter_map(|&(node, kind)| Some((node, kind?))) {
            let used = part.used.iter().filter(|used| !self.is_done(part, node, used.index));
            pending.extend(used.map(|&used| {
                let slice = SliceId { version: step.version(used), kind };
                Product { node, used, slice }
            }));
        }
        loop {
            let mut here = Vec::new();
            pending.retain(|product| match locate(product, host, self.tier) {
                Some(weights) => {
                    here.push((*product, weights));
                    false
                }
                None => true,
            });
            let progress = !here.is_empty();
            // Experts are multiplied one by one as their indices were uploaded.
            let is_coming =
                |index: u16| !self.tier.is_unified() && part.coming.iter().any(|(used, _)| used.index == index);
            let (arriving, here): (Vec<_>, Vec<_>) =
                here.into_iter().partition(|(product, _)| is_coming(product.used.index));
            if !here.is_empty() {
                // SAFETY: by the caller.
                unsafe { self.offload.launch.products(routing, self.tier, &here, false)? };
            }
            let is_together = selection.phase().is_decode() && self.tier.speed.is_link_slow();
            let at_once = if is_together { arriving.len().max(1) } else { 1 };
            for group in arriving.chunks(at_once) {
                if group.iter().any(|(product, _)| self.tier.copies.is_arriving(product.slice)) {
                    // The graph built so far must not wait for slices that are still arriving.
                    self.offload.launch.submit_products(self.tier)?;
                }
                for (product, _) in group {
                    self.tier.copies.wait_for(&self.offload.launch.stream, product.slice);
                }
                // SAFETY: by the caller.
                unsafe { self.offload.launch.products(routing, self.tier, group, true)? };
            }
            let Some(&Product { slice, used, .. }) = pending.first() else { return Ok(()) };
            // The device computes the experts it has while the host waits for others.
            self.offload.launch.submit(self.tier)?;
            layer_router::poll(host, &self.offload.abort)?;
            // SAFETY: as above.
            if unsafe { self.uploads.pump(host, self.tier) } || progress {
                continue;
            }
            // Slices that have just landed are no longer in flight.
            if pending.iter().any(|product| locate(product, host, self.tier).is_some()) {
                continue;
            }
            // SAFETY: by the caller.
            if unsafe { self.help_once(host, selection, step)? } || host.memory.wait() {
                continue;
            }
            let released = self.tier.wait_for_host_staging();
            if !released.is_empty() {
                released.into_iter().for_each(|slice| host.memory.release(slice));
                continue;
            }
            if !self.others.force_staging(host, slice, used) {
                return Err(layer_router::failed(format!("{slice}: nothing will ever load it")));
            }
        }
    }
}

impl DeviceLayer<'_, '_> {
    /// The experts whose products were begun early, by the weights in their slots. `present`: those that are there.
    fn done_early(&self, step: &LayerStep, routing: &Routing, present: &[Vec<(Used, u32)>]) -> Vec<u16> {
        let Some(early) = &self.early else { return Vec::new() };
        let is_done = |&&(used, _): &&(Used, u32)| {
            let place = self.tier.slots.place(step.version(used));
            place.is_some_and(|place| early.have(place, routing.pairs_of(used.index)))
        };
        present.iter().flatten().filter(is_done).map(|(used, _)| used.index).collect()
    }

    /// Whether an expert's rows of a product were begun early.
    fn is_done(&self, part: &Part, product: *mut ggml_tensor, expert: u16) -> bool {
        part.done.contains(&expert) && self.early.as_ref().is_some_and(|early| early.nodes.contains(&product))
    }
}

/// The location of weights that the device can multiply by, now or once submitted uploads have arrived.
fn locate(product: &Product, host: &Host, tier: &Tier) -> Option<Weights> {
    if tier.is_unified() { tier.on_host.locate(host, product.slice, product.used) } else { tier.locate(product.slice) }
}

// The CPU's part.

/// Rows that the CPU computes in one graph: their results take memory.
const HELPED_AT_ONCE: usize = 256;

/// Work of the CPU in a region.
pub(super) struct Help {
    chain: HostChain,
    /// The input of the region's first product, `[n_in, 1 or n_used, n_tokens]`, and the region's last product.
    input: *mut ggml_tensor,
    last: *mut ggml_tensor,
    /// Experts that are not computed yet, in the order of need.
    experts: Vec<Used>,
    /// Rows of the last product that have been computed.
    rows: Vec<(Pair, Vec<f32>)>,
    /// All of its experts, their work ([`Miss::work`]) and the time that they took.
    n_experts: u64,
    work: u64,
    seconds: f64,
}

impl DeviceLayer<'_, '_> {
    /// Decides which of the missing experts the CPU computes.
    ///
    /// # Safety
    /// As [`Offload::layer`].
    unsafe fn divide(
        &mut self,
        host: &Host,
        selection: &Selection,
        step: &LayerStep,
        missing: &[Used],
        region: &[Node],
    ) -> Option<Help> {
        let balancer = self.tier.helper.of(selection.phase())?;
        let kinds = || region.iter().filter_map(|(_, kind)| *kind);
        // A part of a layer has results besides the last product's.
        let is_whole = kinds().count() == host.layout().kinds(step.layer).len();
        if missing.is_empty() || !is_whole || self.input.is_empty() {
            return None;
        }
        let routing = &selection.routing;
        // SAFETY: nodes of a live graph.
        let chain = unsafe { chain_of(self.region.graph, region, routing)? };
        let score = |pair: &Pair| {
            let position = pair.token as usize * routing.n_used + pair.rank as usize;
            // The router's order replaces its weights if these were not read.
            let weight = selection.weights.get(position).copied();
            weight.unwrap_or((routing.n_used - pair.rank as usize) as f32)
        };
        let miss = |&used: &Used| {
            let slices = kinds().map(|kind| SliceId { version: step.version(used), kind });
            let pairs = routing.pairs_of(used.index);
            Miss {
                index: used.index,
                bytes: slices.clone().map(|slice| host.reads().shape(slice).bytes).sum(),
                rows: pairs.len() as u32,
                score: pairs.iter().map(score).fold(0.0, f32::max),
                on_host: used.row.is_some() && slices.clone().all(|slice| host_bytes(host, slice, used).is_some()),
            }
        };
        let mut misses: Vec<Miss> = missing.iter().map(miss).collect();
        // An expert of many tokens is likely to be used again, and takes the CPU longer.
        misses.sort_by(|a, b| b.rows.cmp(&a.rows).then(b.score.total_cmp(&a.score)));
        let split = balancer.split(&misses, 0.0);
        if split.probes_link {
            self.tier.speed.measure_next();
        }
        if split.cpu.is_empty() {
            return None;
        }
        if self.offload.helper.is_none() {
            self.offload.helper = Helper::new();
        }
        let helper = self.offload.helper.as_mut()?;
        let experts: Vec<Used> = missing.iter().copied().filter(|used| split.cpu.contains(&used.index)).collect();
        let work = misses.iter().filter(|miss| split.cpu.contains(&miss.index)).map(Miss::work).sum();
        let n_experts = experts.len() as u64;
        // SAFETY: by the caller.
        unsafe {
            let (input, last) = ((*region[0].0).src[1], region[region.len() - 1].0);
            let chain = helper.on_host(&self.offload.launch.stream, chain);
            Some(Help { chain, input, last, experts, rows: Vec::new(), n_experts, work, seconds: 0.0 })
        }
    }

    /// Computes experts that are left to the CPU: the first of them if copies still wait for what the host does between
    /// two experts, else all. Returns whether there were any.
    ///
    /// # Safety
    /// As [`Offload::layer`].
    unsafe fn help_once(&mut self, host: &Host, selection: &Selection, step: &LayerStep) -> Result<bool, Failed> {
        let Some(help) = self.help.as_mut().filter(|help| !help.experts.is_empty()) else { return Ok(false) };
        let started = self.tier.speed.clock.seconds();
        let mut n_rows = 0;
        let fits = |used: &&Used| {
            n_rows += selection.routing.pairs_of(used.index).len();
            n_rows <= HELPED_AT_ONCE
        };
        let n = help.experts.iter().take_while(fits).count().max(1);
        let n = if self.uploads.is_empty() { n } else { 1 };
        let experts: Vec<Used> = help.experts.drain(..n).collect();
        let n_threads = self.tier.helper.n_threads.map_or(self.offload.n_threads, c_int::from);
        let Some(helper) = self.offload.helper.as_mut() else { return Err(GGML_STATUS_FAILED) };
        let view_of = |used: Used, kind: SliceKind| {
            let slice = SliceId { version: step.version(used), kind };
            let (data, _) = host_bytes(host, slice, used).expect("what the CPU computes is on the host");
            let view = host.reads().view(step.layer, used.share, kind);
            ShareView { base: data.cast_mut(), n_slots: 1, ..view }
        };
        // SAFETY: the source of a live product.
        let (ne, nb) = unsafe { ((*help.input).ne, (*help.input).nb) };
        let input_of = |pair: Pair| {
            let row = pair.token as usize * nb[2] + (i64::from(pair.rank) % ne[1]) as usize * nb[1];
            &self.input[row / size_of::<f32>()..][..ne[0] as usize]
        };
        // SAFETY: by the caller; host slots of a step are pinned.
        let rows = unsafe { helper.rows(&help.chain, n_threads, &selection.routing, &experts, input_of, view_of)? };
        help.rows.extend(rows);
        let kinds = self.router.kinds();
        let work_of = |&used: &Used| {
            let bytes = |&kind| host.reads().shape(SliceId { version: step.version(used), kind }).bytes;
            Miss::work_of(kinds.iter().map(bytes).sum(), selection.routing.pairs_of(used.index).len() as u32)
        };
        self.tier.speed.clock.host_worked(experts.iter().map(work_of).sum());
        help.seconds += self.tier.speed.clock.seconds() - started;
        Ok(true)
    }

    /// Computes the rest of the CPU's experts, and writes their rows to the device.
    ///
    /// # Safety
    /// As [`Offload::layer`]; the region has been submitted.
    unsafe fn finish_help(&mut self, host: &mut Host, selection: &Selection, step: &LayerStep) -> Result<(), Failed> {
        // SAFETY: by the caller.
        while unsafe { self.help_once(host, selection, step)? } {
            host.memory.poll();
            // SAFETY: the host slots of the step are pinned until the uploads have run.
            unsafe { self.uploads.pump(host, self.tier) };
        }
        let Some(help) = self.help.take() else { return Ok(()) };
        self.tier.helped(selection.phase(), help.n_experts, help.work, help.seconds);
        // SAFETY: a live product.
        let nb = unsafe { (*help.last).nb };
        let place = |(pair, row): (Pair, Vec<f32>)| (pair.token as usize * nb[2] + pair.rank as usize * nb[1], row);
        let mut rows: Vec<(usize, Vec<f32>)> = help.rows.into_iter().map(place).collect();
        rows.sort_unstable_by_key(|(offset, _)| *offset);
        // Rows side by side are one copy.
        for run in rows.chunk_by(|(a, row), (b, _)| a + size_of_val(&row[..]) == *b) {
            let bytes = run.iter().flat_map(|(_, row)| row).flat_map(|value| value.to_ne_bytes()).collect();
            // SAFETY: the last product is allocated on the device and has these rows.
            unsafe { self.offload.launch.set(help.last, bytes, run[0].0) };
        }
        Ok(())
    }
}
