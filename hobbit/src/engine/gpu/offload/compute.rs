//! One graph on a device: other nodes are passed on, expert products are computed from device slots.
//!
//! A layer's *region* is its expert products with the nodes between them. The host waits once per region, for the
//! router's choice, while the device begins to multiply ([`super::early`]); everything else is submitted and ordered by
//! events. Experts that are on the device are multiplied while the others are being copied; each of these follows as
//! its upload is submitted.

mod layer;

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::slice;
use std::sync::Arc;

use ggml_sys::llama::{
    self, GGML_STATUS_ABORTED, GGML_STATUS_ALLOC_FAILED, GGML_STATUS_FAILED, GGML_STATUS_SUCCESS, ggml_tensor,
};
use ggml_sys::shim;

use super::Wrapper;
use super::early::{Early, EarlyProducts};
use super::helper::{Helper, Node};
use super::launch::{Launch, Product};
use crate::engine::ggml::Stream;
use crate::engine::memory::device_tier::{Tier, Uploads, Weights};
use crate::engine::memory::gates;
use crate::engine::memory::host_reads::{Host, HostReads};
use crate::engine::memory::pinned::HostMemory;
use crate::engine::memory::recorder::Recorder;
use crate::engine::memory::tiers::{OtherTiers, Routers, TiersView};
use crate::engine::seam::calling::phase;
use crate::engine::seam::experts::{ExpertTag, Experts, RouterValues};
use crate::engine::seam::layer_router::{self, Abort, Failed, LayerRouter, rows_of, shown_input, weights_tensor};
use crate::engine::seam::registration::Computes;
use hobbit_core::expert::{ExpertId, Precision, SliceId, SliceKind, Version};
use hobbit_core::load::balance::{Miss, helps_prompt};
use hobbit_core::residency::{Compute, DeviceResidency, LayerStep, Selection, Split, Used, run_layer};
use hobbit_core::route::{Pair, Phase};

use self::layer::{Help, Work, stages};

/// Alignment of results on the host, in bytes.
const RESULT_ALIGNMENT: usize = 64;

/// Initial room for the results that one layer reads back.
const RESULT_ROOM: usize = 64 << 10;

/// One context's backend on one device.
pub(super) struct Offload {
    wrapper: &'static Wrapper,
    launch: Launch,
    abort: Abort,
    /// The running layer's selection.
    selection: Selection,
    helper: Option<Helper>,
    n_threads: c_int,
    /// The experts of the context's model, once a layer has been computed.
    experts: Option<Arc<Experts>>,
    /// The device has refused memory to the nodes behind the last region.
    is_refused: bool,
    /// Where results are read back to, in every layer: pinned where the device pins memory.
    results: Option<HostMemory>,
    /// Products that currently use weights in their layer's slots, and the weights these replace.
    borrowed: Vec<(*mut ggml_tensor, *mut ggml_tensor)>,
    /// To begin products before the router's choice is known: `None` before it was tried, or if the device cannot.
    early: Option<Early>,
    tried_early: bool,
}

/// A tensor on the device, and a copy of its bytes in [`Offload::results`], which stays until the next layer.
#[derive(Clone, Copy)]
struct OnHost {
    tensor: *mut ggml_tensor,
    data: *mut u8,
    bytes: usize,
}

/// A layer's expert products with the nodes between them: nodes `from..to` of a graph's.
#[derive(Clone, Copy)]
struct Region<'a> {
    graph: *mut llama::ggml_cgraph,
    all: &'a [*mut ggml_tensor],
    from: usize,
    to: usize,
}

impl<'a> Region<'a> {
    fn nodes(&self) -> &'a [*mut ggml_tensor] {
        &self.all[self.from..self.to]
    }
}

/// A layer on a device.
struct DeviceLayer<'a, 'b> {
    offload: &'a mut Offload,
    tier: &'a mut Tier,
    others: &'a mut OtherTiers<'b>,
    router: LayerRouter<'a>,
    region: Region<'a>,
    work: Work,
    /// Products that were submitted before the router's choice was known.
    early: Option<EarlyProducts>,
    /// Nodes of the graph before this one have been submitted.
    submitted: usize,
    /// The router's choice and weights.
    read_back: [Option<OnHost>; 2],
    /// The bytes of the first product's input, if the CPU helper may compute; else empty.
    input: &'a [f32],
    uploads: Uploads,
    /// The CPU helper's part.
    help: Option<Help>,
}

impl Computes for Offload {
    fn set_n_threads(&mut self, n_threads: c_int) {
        self.n_threads = n_threads;
    }

    fn set_abort_callback(&mut self, callback: llama::ggml_abort_callback, data: *mut c_void) {
        self.abort = Abort(callback, data);
    }

    unsafe fn graph_compute(&mut self, graph: *mut llama::ggml_cgraph) -> Result<(), Failed> {
        self.launch.discard();
        self.is_refused = false;
        // SAFETY: by the caller.
        let computed = unsafe {
            let nodes = layer_router::nodes_of(graph);
            self.borrow_complete(nodes);
            let computed = catch_unwind(AssertUnwindSafe(|| self.compute_parts(graph, nodes)));
            self.return_complete();
            computed.unwrap_or_else(|panic| resume_unwind(panic))
        };
        computed.inspect_err(|&status| {
            if status != GGML_STATUS_ABORTED {
                layer_router::failed(reason(&self.wrapper.name, status));
            }
        })
    }
}

impl Offload {
    /// `None` if ggml refuses a graph.
    pub(super) fn new(wrapper: &'static Wrapper, stream: Stream) -> Option<Self> {
        Some(Self {
            wrapper,
            launch: Launch::new(stream, wrapper.inner)?,
            abort: Abort(None, std::ptr::null_mut()),
            selection: Selection::default(),
            helper: None,
            n_threads: 1,
            experts: None,
            is_refused: false,
            results: None,
            borrowed: Vec::new(),
            early: None,
            tried_early: false,
        })
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.launch.stream
    }

    pub(super) fn wrapper(&self) -> &'static Wrapper {
        self.wrapper
    }

    /// # Safety
    /// As [`Computes::graph_compute`]; `nodes` are the graph's.
    unsafe fn compute_parts(
        &mut self,
        graph: *mut llama::ggml_cgraph,
        nodes: &[*mut ggml_tensor],
    ) -> Result<(), Failed> {
        let mut at = 0;
        // These nodes were already refused memory once.
        let mut relieved = false;
        while at < nodes.len() {
            let submitted = match std::mem::take(&mut self.is_refused) {
                true => Err(GGML_STATUS_ALLOC_FAILED),
                // SAFETY: by the caller.
                false => unsafe { self.submit_plain(graph, nodes, at) },
            };
            match submitted {
                Ok(first) => {
                    relieved &= first == at;
                    at = first;
                }
                // SAFETY: by the caller.
                Err(GGML_STATUS_ALLOC_FAILED) if !relieved && unsafe { self.relieve() } => {
                    // Some of these nodes are expert products again.
                    relieved = true;
                    continue;
                }
                Err(status) => return Err(status),
            }
            if at == nodes.len() {
                break;
            }
            // SAFETY: nodes of a live graph; by the caller.
            unsafe {
                let n = layer_router::leading(&nodes[at..], |node| self.product(node));
                let last = nodes[at..at + n].iter().rposition(|&node| self.product(node).is_some());
                let to = at + last.map_or(1, |last| last + 1);
                let tag = self.product(nodes[at]).expect("a region starts with a product");
                at = self.layer(tag, Region { graph, all: nodes, from: at, to })?;
                relieved &= at == to;
            }
        }
        Ok(())
    }

    /// Submits the nodes from `at` to the next expert product, whose position it returns.
    ///
    /// # Errors
    /// The device's status.
    ///
    /// # Safety
    /// As [`Offload::compute_parts`].
    unsafe fn submit_plain(
        &mut self,
        graph: *mut llama::ggml_cgraph,
        nodes: &[*mut ggml_tensor],
        at: usize,
    ) -> Result<usize, Failed> {
        // SAFETY: nodes of a live graph.
        let first = nodes[at..].iter().position(|&node| unsafe { self.product(node) }.is_some());
        let first = first.map_or(nodes.len(), |first| at + first);
        if first > at {
            let (from, to, cut) = (at as c_int, first as c_int, self.wrapper.is_remote);
            // SAFETY: by the caller; nodes of a live graph.
            match unsafe { shim::hobbit_compute_nodes(self.stream().raw(), graph, from, to, cut) } {
                GGML_STATUS_SUCCESS => {}
                status => return Err(status),
            }
        }
        Ok(first)
    }

    /// As [`Wrapper::product`].
    ///
    /// # Safety
    /// `node` is live.
    unsafe fn product<'a>(&self, node: *mut ggml_tensor) -> Option<&'a ExpertTag> {
        // SAFETY: by the caller; sources of a live node are live.
        unsafe { self.wrapper.product(node) }
    }

    /// Computes one layer's region, and perhaps nodes after it. Returns the position of the next node to be submitted.
    ///
    /// # Safety
    /// As [`Computes::graph_compute`]; the region begins with an expert product with tag `tag`, and all nodes before it
    /// have been submitted.
    unsafe fn layer(&mut self, tag: &ExpertTag, region: Region) -> Result<usize, Failed> {
        let mut guard = tag.experts.memories();
        let memories = guard.as_mut().and_then(|memories| memories.for_device(self.wrapper.inner));
        let Some((tier, mut beside)) = memories else {
            return Err(layer_router::failed(format!(
                "no session has set up the expert cache of {}",
                self.wrapper.name
            )));
        };
        if self.experts.is_none() {
            self.experts = Some(Arc::clone(&tag.experts));
        }
        // SAFETY: by the caller.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { self.layer_on(tag, tier, &mut beside, region) }));
        if !matches!(result, Ok(Ok(_))) {
            // Nothing may still read the memory given back below.
            self.launch.synchronize();
            tier.abandon();
            tier.settled(beside.host);
        }
        tier.busy = None;
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// # Safety
    /// As [`Offload::layer`].
    unsafe fn layer_on(
        &mut self,
        tag: &ExpertTag,
        tier: &mut Tier,
        beside: &mut TiersView,
        region: Region,
    ) -> Result<usize, Failed> {
        let TiersView { host, routers, unseen, others } = beside;
        let nodes = region.nodes();
        // SAFETY: a product's sources are live.
        let (ids, n_expert) = unsafe { ((*nodes[0]).src[2], (*(*nodes[0]).src[0]).ne[2] as usize) };
        // SAFETY: nodes of a live graph.
        let tags: Vec<_> = nodes.iter().map(|&node| (node, unsafe { self.product(node) })).collect();
        let kinds = layer_router::kinds_of(tags.iter().filter_map(|(_, tag)| *tag), unseen);
        // SAFETY: live.
        let [n_used, n_tokens] = unsafe { [(*ids).ne[0], (*ids).ne[1]] };
        // The last layer of a batch without logits.
        if n_used == 0 || n_tokens == 0 {
            return Ok(region.to);
        }
        let phase = phase();
        // SAFETY: by the caller.
        let known = unsafe { wanted_values(tag.layer, tier, host, routers, &region, (ids, n_expert), phase) };
        let is_pinned = tier.report.pinned || others.are_pinned();
        tier.enter(&self.launch.stream, Some(tag.layer));
        let own: Vec<Node> = tags.iter().map(|(node, tag)| (*node, tag.map(|tag| tag.kind))).collect();
        // SAFETY: nodes of a live graph.
        let stages = unsafe { stages(&own) };
        let wanted = known.wanted;
        let is_single = phase.is_decode() && n_tokens == 1 && kinds.len() == host.layout().kinds(tag.layer).len();
        let mut early = if is_single && host.memory.overlaps() && routers.walk.is_none() && !tier.is_unified() {
            // SAFETY: by the caller.
            unsafe { self.begin_early(tier, host, (tag.layer, ids), &stages[0].products, &wanted)? }
        } else {
            None
        };
        // SAFETY: by the caller: all are allocated on the device.
        let read = unsafe { self.read_back(wanted, is_pinned, early.as_ref())? };
        let [ids_read, weights, of_router, of_experts, logits] = read;
        tier.settled_so_far(host);
        if let (Some(early), Some(own)) = (&mut early, ids_read) {
            // SAFETY: read back just now.
            unsafe {
                let chosen = RouterValues::of_copy(&*own.tensor, own.data, 0);
                early.chose(chosen.read());
            }
        }
        if phase.is_decode() {
            tier.chose(tag.layer, host.counters().wait_seconds);
        }
        let (n_used, key) = (n_used as usize, ids as usize);
        let split = Split { layer: tag.layer, n_expert, n_used, kinds: &kinds, key, phase };
        // SAFETY: read back just now, and kept until the layer is done.
        let input =
            of_experts.or(of_router.filter(|_| known.is_one)).map_or(&[] as &[f32], |own| unsafe { own.floats() });
        // SAFETY: read back just now, and kept until the layer is done.
        let router =
            unsafe { router_of(routers, split, nodes[0], [ids_read, weights, of_router, logits], known.shown) };
        let read_back = [ids_read, weights];
        let mut selection = std::mem::take(&mut self.selection);
        let mut layer = DeviceLayer {
            offload: self,
            tier,
            others,
            router,
            region,
            work: Work { nodes: own, stages },
            early,
            submitted: region.to,
            read_back,
            input,
            uploads: Uploads::default(),
            help: None,
        };
        let result = run_layer(&mut layer, host, &mut selection).map(|()| layer.submitted);
        self.selection = selection;
        result
    }

    /// Submits `products`, the first stage of a layer for a single token, before the host knows its experts `ids`.
    /// `read`: what the host is going to read.
    ///
    /// # Errors
    /// As [`Early::begin`].
    ///
    /// # Safety
    /// As [`Early::begin`].
    unsafe fn begin_early(
        &mut self,
        tier: &mut Tier,
        host: &Host,
        (layer, ids): (u16, *mut ggml_tensor),
        products: &[Node],
        read: &[Option<*mut ggml_tensor>],
    ) -> Result<Option<EarlyProducts>, Failed> {
        if !std::mem::replace(&mut self.tried_early, true) && !self.wrapper.is_remote {
            self.early = Early::new(self.wrapper.inner, host.layout());
        }
        let slots = tier.slots.of_layer(layer, host.layout().n_expert(layer), &tier.copies.arriving(layer));
        let (Some(early), Some(slots)) = (&mut self.early, slots) else { return Ok(None) };
        // SAFETY: by the caller.
        unsafe { early.begin(&mut self.launch, tier, (layer, ids), slots, products, read) }
    }

    /// Copies tensors to the host, one behind the other, and waits once, for all submitted work but `early`.
    ///
    /// # Errors
    /// The system refuses memory for them.
    ///
    /// # Safety
    /// The tensors are live and allocated on the device. Results of an earlier call are not used any more.
    unsafe fn read_back<const N: usize>(
        &mut self,
        tensors: [Option<*mut ggml_tensor>; N],
        is_pinned: bool,
        early: Option<&EarlyProducts>,
    ) -> Result<[Option<OnHost>; N], Failed> {
        let mut end = 0;
        let mut place = |tensor: *mut ggml_tensor| {
            // SAFETY: by the caller.
            let (at, bytes) = (end, unsafe { llama::ggml_nbytes(tensor) });
            end = (at + bytes).next_multiple_of(RESULT_ALIGNMENT);
            (tensor, at, bytes)
        };
        let places = tensors.map(|own| own.map(&mut place));
        let base = match &self.results {
            Some(memory) if memory.arena.len() >= end => memory.arena.as_ptr(),
            _ => {
                let bytes = end.next_power_of_two().max(RESULT_ROOM);
                let memory = HostMemory::for_results(self.wrapper.inner, is_pinned, bytes);
                let memory = memory.map_err(|error| layer_router::failed(error.to_string()))?;
                // The last call has waited for all copies into the memory that this replaces.
                self.results.insert(memory).arena.as_ptr()
            }
        };
        let beside = early.zip(self.early.as_ref()).map(|(products, early)| {
            early.results.wait(&products.chosen);
            &early.results
        });
        let stream = beside.unwrap_or(&self.launch.stream);
        let read = places.map(|own| {
            own.map(|(tensor, at, bytes)| {
                // SAFETY: by the caller; each has room of its own, which is not touched before the wait below.
                unsafe {
                    let data = base.add(at);
                    stream.get(tensor, slice::from_raw_parts_mut(data, bytes));
                    OnHost { tensor, data, bytes }
                }
            })
        });
        stream.synchronize();
        // They were submitted before what has been read.
        self.launch.copied();
        self.early.iter_mut().for_each(|early| early.events.tidy(true));
        Ok(read)
    }
}

/// The router of a layer by values that were read back: its choice, weights, input and logits. `shown`: its input, as
/// the router hook keeps it until the next layer.
///
/// # Safety
/// As [`LayerRouter::new`]; the next layer has not begun.
unsafe fn router_of<'a>(
    routers: &'a mut Routers,
    split: Split<'a>,
    product: *mut ggml_tensor,
    [ids, weights, input, logits]: [Option<OnHost>; 4],
    shown: Option<RouterValues>,
) -> LayerRouter<'a> {
    // SAFETY: by the caller.
    unsafe {
        let values = |own: Option<OnHost>, d| own.map(|own| RouterValues::of_copy(&*own.tensor, own.data, d));
        let inputs = rows_of(shown.or(values(input, 0)));
        let router = [values(ids, 0), values(weights, 1)];
        LayerRouter::new(routers, split, product, router, inputs, " on the device")
            .with_logits(logits.map(|own| own.floats()))
    }
}

/// Values of a layer's router for the host.
struct WantedValues {
    /// To be read back: its choice, weights, its input, the experts' input and its logits.
    wanted: [Option<*mut ggml_tensor>; 5],
    /// Its input, if the router hook keeps a copy.
    shown: Option<RouterValues>,
    /// The router's input is the experts', too.
    is_one: bool,
}

/// Values that the host needs of the router of a region, which chose `ids` of `n_expert` experts.
///
/// # Safety
/// As [`Offload::layer`].
unsafe fn wanted_values(
    layer: u16,
    tier: &Tier,
    host: &Host,
    routers: &mut Routers,
    region: &Region,
    (ids, n_expert): (*mut ggml_tensor, usize),
    phase: Phase,
) -> WantedValues {
    let first = region.nodes()[0];
    // SAFETY: nodes of a live graph.
    let weights = unsafe { region.all[region.from..].iter().find_map(|&node| weights_tensor(node)) };
    // The first of a layer's splits decides for all of them.
    let reroutes = host.may_reroute(phase);
    let asks = !host.precisions.is_exact() || host.precisions.asks_weights(phase) || reroutes;
    let weights = weights.filter(|_| asks || routers.walk.is_some());
    // SAFETY: nodes of a live graph; those before the region have been submitted.
    let logits = if phase.is_decode() && routers.wants_scores && routers.walk.is_none() {
        unsafe { gates::intact_logits(&region.all[..region.from], layer, n_expert) }
    } else {
        None
    };
    let needs_input =
        phase.is_decode() && routers.want_input(host.asks_routers()) && (logits.is_none() || host.asks_routers());
    // SAFETY: nodes of a live graph; those before the region have been submitted, and none behind.
    let (shown, of_router) = unsafe {
        match (needs_input || reroutes).then(|| shown_input(layer, ids)) {
            None => (None, None),
            Some(Some(shown)) => (Some(shown), None),
            Some(None) => {
                let input = gates::input_of(first, ids).filter(|&input| llama::ggml_is_contiguous(input));
                if input.is_none() {
                    routers.misses_input(layer, ids);
                }
                (None, input)
            }
        }
    };
    // SAFETY: a product's sources are live.
    let (input, n_rows) = unsafe { ((*first).src[1], ((*ids).ne[0] * (*ids).ne[1]) as usize) };
    let helps = || {
        let n_slots = tier.slots.cache.pools().capacity_of_layer(layer, Precision::High) as usize;
        let expert = host.layout().bytes(Version::high(ExpertId { layer, index: 0 })).unwrap_or(0);
        let missing = n_expert.saturating_sub(n_slots) as u64 * expert;
        let last = region.nodes()[region.nodes().len() - 1];
        // SAFETY: live.
        let bytes = [input, last].map(|tensor| unsafe { llama::ggml_nbytes(tensor) } as u64);
        helps_prompt(n_rows, n_expert, missing, bytes)
    };
    let may_help = tier.has_helper() && (phase.is_decode() || helps());
    let of_experts = may_help.then_some(input);
    // Usually they are one.
    // SAFETY: live tensors.
    let is_one = of_experts.zip(of_router).is_some_and(|(a, b)| unsafe { (*a).data == (*b).data });
    let of_experts = of_experts.filter(|_| !is_one);
    WantedValues { wanted: [Some(ids), weights, of_router, of_experts, logits], shown, is_one }
}

impl OnHost {
    /// # Safety
    /// The next layer has not begun.
    unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: by the caller.
        unsafe { slice::from_raw_parts(self.data, self.bytes) }
    }

    /// # Safety
    /// As [`OnHost::bytes`]; the tensor is of floats.
    unsafe fn floats<'a>(self) -> &'a [f32] {
        // SAFETY: by the caller; results are aligned.
        unsafe { slice::from_raw_parts(self.data.cast(), self.bytes / size_of::<f32>()) }
    }
}

/// Why a device's part of a batch failed.
fn reason(device: &str, status: Failed) -> String {
    match status {
        GGML_STATUS_ALLOC_FAILED => format!(
            "device {device} is out of memory, and nothing is left in its expert cache that could go; put fewer layers \
             there, give a smaller context or ubatch, or compute experts on the CPU"
        ),
        _ => format!(
            "device {device} failed (ggml status {status}): it may have been reset, removed or overheated; look at its \
             driver's log, then start again, or leave it out"
        ),
    }
}

// Layers that are wholly on the device: their products are ordinary nodes while a graph runs.

impl Offload {
    /// Gives products of layers that are wholly on the device the weights there, until [`Offload::return_complete`]:
    /// these products are then ordinary nodes.
    ///
    /// # Safety
    /// Nodes of a live graph.
    unsafe fn borrow_complete(&mut self, nodes: &[*mut ggml_tensor]) {
        // SAFETY: by the caller.
        let mut products = nodes.iter().filter_map(|&node| unsafe { Some((node, self.product(node)?)) }).peekable();
        let Some((_, first)) = products.peek() else { return };
        let experts = Arc::clone(&first.experts);
        let mut guard = experts.memories();
        let Some(memories) = guard.as_mut() else { return };
        memories.catch_up();
        if memories.needs_every_choice() {
            return;
        }
        let mut borrowed = Vec::new();
        for (node, tag) in products {
            let tier = memories.tier(self.wrapper.inner);
            if let Some(weights) = tier.and_then(|tier| tier.slots.complete(tag.layer, tag.kind)) {
                memories.unseen.remove(&(tag.layer, tag.kind));
                // SAFETY: by the caller.
                unsafe {
                    borrowed.push((node, (*node).src[0]));
                    (*node).src[0] = weights;
                }
            }
        }
        if let Some(tier) = memories.tier(self.wrapper.inner).filter(|_| !borrowed.is_empty()) {
            tier.slots.lend(&mut tier.copies, &self.launch.stream);
        }
        drop(guard);
        self.borrowed = borrowed;
        self.experts = Some(experts);
    }

    /// Undoes [`Offload::borrow_complete`].
    ///
    /// # Safety
    /// The graph is still live.
    unsafe fn return_complete(&mut self) {
        if self.borrowed.is_empty() {
            return;
        }
        for (node, weights) in self.borrowed.drain(..) {
            // SAFETY: by the caller.
            unsafe { (*node).src[0] = weights };
        }
        let mut guard = self.experts.as_ref().map(|experts| experts.memories());
        let memories = guard.as_mut().and_then(|guard| guard.as_mut());
        if let Some(tier) = memories.and_then(|memories| memories.tier(self.wrapper.inner)) {
            tier.slots.returned(&mut tier.copies, &self.launch.stream);
        }
    }

    /// Frees device memory of slots, between two regions. Returns whether there was any to free.
    ///
    /// # Safety
    /// The graph that is being computed is live.
    unsafe fn relieve(&mut self) -> bool {
        // SAFETY: by the caller.
        unsafe { self.return_complete() };
        let Some(experts) = &self.experts else { return false };
        let mut guard = experts.memories();
        let memories = guard.as_mut().and_then(|memories| memories.for_device(self.wrapper.inner));
        let Some((tier, beside)) = memories else { return false };
        self.launch.synchronize();
        tier.enter(&self.launch.stream, None);
        tier.settled(beside.host);
        let freed = tier.shrink(&self.launch.stream, 0);
        tier.leave(&self.launch.stream);
        freed > 0
    }
}
