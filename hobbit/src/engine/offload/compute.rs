//! One graph on a device: what is not ours is passed on, the products of experts are computed from device slots.
//!
//! A layer's *region* is its expert products with the nodes between them. The host waits once per region, for the
//! router's choice; everything else is submitted and ordered by events. Experts that are on the device are multiplied
//! while the others are being copied; each of these follows as its upload is submitted.

mod borrow;
mod help;
mod place;
mod router;
mod stages;

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::slice;
use std::sync::Arc;
use std::time::Instant;

use ggml_sys::llama::{
    self, GGML_STATUS_ABORTED, GGML_STATUS_ALLOC_FAILED, GGML_STATUS_FAILED, GGML_STATUS_SUCCESS, ggml_status,
    ggml_tensor,
};
use ggml_sys::shim;

use super::failure::{self, Failed};
use super::graph::Graph;
use super::helper::{Helper, Region};
use super::launch::{Foreseen, Launch, Product};
use super::wrapper::Wrapper;
use crate::cache::SlotId;
use crate::engine::buffer::tag_of;
use crate::engine::compute::{read_ids, router_input_tensor, weights_tensor};
use crate::engine::experts::{ExpertTag, Experts, RouterWeights};
use crate::engine::hierarchy::{Beside, Tiers};
use crate::engine::host_reads::Host;
use crate::engine::tier::stream::Stream;
use crate::engine::tier::{Tier, Uploads, Weights};
use crate::expert::{SliceId, SliceKind};
use crate::load::balance::Miss;
use crate::residency::{Chosen, Elsewhere, LayerStep, Split, Used};
use crate::route::Pair;

use self::help::Help;
use self::place::{Wanted, by_place, pin_present, take_located};

/// One context's backend on one device.
pub(super) struct Offload {
    wrapper: &'static Wrapper,
    compute: Stream,
    launch: Launch,
    abort: (llama::ggml_abort_callback, *mut c_void),
    /// What the running layer's router chose.
    chosen: Chosen,
    /// The router's choice and weights as they lie on the device.
    ids: Vec<u8>,
    weight_bytes: Vec<u8>,
    /// What the router saw of a single token, `[n_embd]`; empty where nobody wants to know.
    input: Vec<f32>,
    helper: Option<Helper>,
    n_threads: c_int,
    /// Of the context's model, once a layer has been computed.
    experts: Option<Arc<Experts>>,
    /// Products that have weights of their layer's slots for now, and what these replace.
    borrowed: Vec<(*mut ggml_tensor, *mut ggml_tensor)>,
}

/// What the device multiplies of a step.
struct Part<'a> {
    step: &'a LayerStep,
    used: Vec<Used>,
    /// Those that come one by one, with their rows.
    coming: Vec<(Used, u32)>,
}

impl Offload {
    /// `None` when ggml refuses a graph.
    pub(super) fn new(wrapper: &'static Wrapper, compute: Stream) -> Option<Self> {
        Some(Self {
            wrapper,
            launch: Launch::new(Graph::new()?, wrapper.inner()),
            compute,
            abort: (None, std::ptr::null_mut()),
            chosen: Chosen::default(),
            ids: Vec::new(),
            weight_bytes: Vec::new(),
            input: Vec::new(),
            helper: None,
            n_threads: 1,
            experts: None,
            borrowed: Vec::new(),
        })
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.compute
    }

    pub(super) fn set_n_threads(&mut self, n_threads: c_int) {
        self.n_threads = n_threads;
    }

    pub(super) fn set_abort_callback(&mut self, callback: llama::ggml_abort_callback, data: *mut c_void) {
        self.abort = (callback, data);
    }

    /// Computes a split.
    ///
    /// # Safety
    /// The graph's nodes and their sources are live and allocated on the device, expert tensors excepted.
    pub(super) unsafe fn graph_compute(&mut self, graph: *mut llama::ggml_cgraph) -> ggml_status {
        // SAFETY: by the caller.
        let status = unsafe { self.compute_graph(graph) };
        if status != GGML_STATUS_SUCCESS && status != GGML_STATUS_ABORTED {
            failure::note(&self.wrapper.name(), status);
        }
        status
    }

    /// # Safety
    /// As [`Offload::graph_compute`].
    unsafe fn compute_graph(&mut self, graph: *mut llama::ggml_cgraph) -> ggml_status {
        // SAFETY: by the caller.
        let nodes = unsafe {
            let n_nodes = llama::ggml_graph_n_nodes(graph) as usize;
            if n_nodes == 0 {
                return GGML_STATUS_SUCCESS;
            }
            slice::from_raw_parts(llama::ggml_graph_nodes(graph), n_nodes)
        };
        self.launch.discard();
        // SAFETY: by the caller.
        unsafe {
            self.borrow_complete(nodes);
            let status = catch_unwind(AssertUnwindSafe(|| self.compute_parts(graph, nodes)));
            self.return_complete();
            status.unwrap_or_else(|panic| resume_unwind(panic))
        }
    }

    /// # Safety
    /// As [`Offload::graph_compute`]; `nodes` are the graph's.
    unsafe fn compute_parts(&mut self, graph: *mut llama::ggml_cgraph, nodes: &[*mut ggml_tensor]) -> ggml_status {
        let cut = self.wrapper.is_remote();
        let mut at = 0;
        // These nodes have been refused memory before.
        let mut relieved = false;
        while at < nodes.len() {
            // SAFETY: nodes of a live graph.
            let first = nodes[at..].iter().position(|&node| unsafe { self.product(node) }.is_some());
            let first = first.map_or(nodes.len(), |first| at + first);
            if first > at {
                // SAFETY: by the caller.
                let start = || unsafe {
                    shim::hobbit_compute_nodes(self.compute.raw(), graph, at as c_int, first as c_int, cut)
                };
                let status = start();
                // SAFETY: nodes of a live graph.
                if status == GGML_STATUS_ALLOC_FAILED && !relieved && unsafe { self.relieve() } {
                    relieved = true;
                    continue;
                }
                relieved = false;
                if status != GGML_STATUS_SUCCESS {
                    return status;
                }
            }
            if first == nodes.len() {
                break;
            }
            // SAFETY: nodes of a live graph; by the caller.
            unsafe {
                let n = self.region(&nodes[first..]);
                let tag = self.product(nodes[first]).expect("a region starts with a product");
                if let Err(status) = self.layer(tag, &nodes[first..first + n], &nodes[first + n..]) {
                    return status;
                }
                at = first + n;
            }
        }
        GGML_STATUS_SUCCESS
    }

    /// How many of the leading nodes are one layer's region: up to its last product.
    ///
    /// # Safety
    /// Nodes of a live graph, the first of which is an expert product.
    unsafe fn region(&self, nodes: &[*mut ggml_tensor]) -> usize {
        // SAFETY: by the caller.
        let key = |&node: &*mut ggml_tensor| unsafe {
            self.product(node).map(|tag| (Arc::as_ptr(&tag.experts), tag.layer, (*node).src[2]))
        };
        let first = key(&nodes[0]);
        let mut len = 1;
        for (position, node) in nodes.iter().enumerate().skip(1) {
            match key(node) {
                None => {}
                other if other == first => len = position + 1,
                Some(_) => break,
            }
        }
        len
    }

    /// The tag of the expert tensor that a node multiplies by, if it is an expert product.
    ///
    /// # Safety
    /// `node` is live.
    unsafe fn product<'a>(&self, node: *mut ggml_tensor) -> Option<&'a ExpertTag> {
        // SAFETY: by the caller; sources of a live node are live.
        unsafe {
            match (*node).op == llama::GGML_OP_MUL_MAT_ID {
                true => tag_of((*node).src[0], self.wrapper.buffer_type()),
                false => None,
            }
        }
    }

    /// Computes one layer's region. `rest`: the nodes after it.
    ///
    /// # Safety
    /// As [`Offload::graph_compute`]; `nodes[0]` is an expert product with tag `tag`.
    unsafe fn layer(
        &mut self,
        tag: &ExpertTag,
        nodes: &[*mut ggml_tensor],
        rest: &[*mut ggml_tensor],
    ) -> Result<(), Failed> {
        let experts = &*tag.experts;
        let mut guard = experts.memories();
        let memories = guard.as_mut().and_then(|memories| memories.for_device(self.wrapper.inner()));
        let Some((tier, mut beside)) = memories else {
            experts.fail(format!("no session has set up the expert cache of {}", self.wrapper.name()));
            return Err(GGML_STATUS_FAILED);
        };
        if self.experts.is_none() {
            self.experts = Some(Arc::clone(&tag.experts));
        }
        // SAFETY: by the caller.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { self.layer_on(tag, tier, &mut beside, nodes, rest) }));
        if !matches!(result, Ok(Ok(()))) {
            // Nothing may go on reading what is about to be given back.
            self.compute.synchronize();
            tier.abandon();
            give_back(beside.host, tier);
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
        beside: &mut Beside,
        nodes: &[*mut ggml_tensor],
        rest: &[*mut ggml_tensor],
    ) -> Result<(), Failed> {
        let experts = &*tag.experts;
        let Beside { host, routers, seen, others } = beside;
        // SAFETY: a product's sources are live.
        let (ids, n_expert) = unsafe { (&*(*nodes[0]).src[2], (*(*nodes[0]).src[0]).ne[2] as usize) };
        let mut kinds: Vec<SliceKind> = Vec::with_capacity(SliceKind::COUNT);
        // SAFETY: nodes of a live graph.
        for product in nodes.iter().filter_map(|&node| unsafe { self.product(node) }) {
            seen.mark(tag.layer, product.kind);
            if !kinds.contains(&product.kind) {
                kinds.push(product.kind);
            }
        }
        // The last layer of a batch that wants no logits.
        if ids.ne[0] == 0 || ids.ne[1] == 0 {
            return Ok(());
        }
        let exact = host.precisions.is_exact();
        // SAFETY: nodes of a live graph.
        let weights = unsafe { nodes.iter().chain(rest).find_map(|&node| weights_tensor(node)) };
        let weights = weights.filter(|_| !exact || routers.walk.is_some());
        let single = ids.ne[1] == 1;
        // SAFETY: nodes of a live graph.
        let input = if single && routers.want_input(host) { unsafe { router_input_tensor(nodes[0]) } } else { None };
        // SAFETY: by the caller: all are allocated on the device.
        unsafe { self.read_back(ids, weights, input) };
        tier.enter(&self.compute, Some(tag.layer));
        let (pins, staged) = tier.settled_so_far();
        take_back(host, pins, staged);
        if single {
            tier.chose(tag.layer, host.counters().wait_seconds);
        }

        let mut host_ids = *ids;
        host_ids.data = self.ids.as_mut_ptr().cast();
        let (n_used, key) = (ids.ne[0] as usize, std::ptr::from_ref(ids) as usize);
        let split = Split { layer: tag.layer, n_expert, n_used, kinds: &kinds, key };
        // SAFETY: read back just now, with the device's strides.
        if let Err(id) = self.chosen.set(&split, unsafe { read_ids(&host_ids) }) {
            experts.fail(format!("layer {}: the router chose expert {id} of {n_expert}", tag.layer));
            return Err(GGML_STATUS_FAILED);
        }
        let mut scores = None;
        if !self.chosen.is_again() {
            if let Some(walk) = &mut routers.walk {
                // SAFETY: read back just now; by the caller.
                unsafe { self.follow(experts, walk, ids, weights)? };
            }
            // SAFETY: read back just now.
            unsafe { self.ask(experts, host, weights)? };
            if single {
                let input = (!self.input.is_empty()).then_some(&self.input[..]);
                // SAFETY: sources of a live node are live, and were computed before.
                scores = unsafe { routers.scores(host, tag.layer, (*nodes[0]).src[2], input, n_expert) };
            }
            if let Some(scores) = &scores {
                tier.scores(tag.layer, scores);
            }
        }
        let elsewhere = Elsewhere { has: &|version| tier.has(version, &kinds), reads: &|slice| others.read(slice) };
        let step = self.chosen.begin(host, scores.as_deref(), &elsewhere);
        if let Some(weights) = weights.filter(|_| self.chosen.leaves_out(&step)) {
            // SAFETY: the weights are on the device until the ubatch is done.
            unsafe { self.leave_out(&step, host, weights) };
        }
        // SAFETY: by the caller.
        let result = unsafe { self.products(experts, tier, beside, &step, &kinds, nodes) };
        // Uploads may still be reading these.
        tier.hold(beside.host.finish(step));
        tier.leave(&self.compute);
        result
    }

    /// # Safety
    /// As [`Offload::layer`].
    unsafe fn products(
        &mut self,
        experts: &Experts,
        tier: &mut Tier,
        beside: &mut Beside,
        step: &LayerStep,
        kinds: &[SliceKind],
        nodes: &[*mut ggml_tensor],
    ) -> Result<(), Failed> {
        let Beside { host, routers, others, .. } = beside;
        let missing = pin_present(tier, step, kinds, &self.chosen);
        let kinds_of: Vec<Option<SliceKind>> =
            // SAFETY: nodes of a live graph.
            nodes.iter().map(|&node| unsafe { self.product(node) }.map(|tag| tag.kind)).collect();
        // SAFETY: by the caller.
        let mut help = unsafe { self.divide(host, tier, step, &missing, Region { nodes, kinds: &kinds_of }) };
        let is_helped = |used: &Used| help.as_ref().is_some_and(|help| help.experts.contains(used));
        let copied: Vec<Used> = missing.into_iter().filter(|used| !is_helped(used)).collect();
        let used: Vec<Used> = step.used.iter().copied().filter(|used| !is_helped(used)).collect();
        for &used in &copied {
            tier.acquire(step.version(used), host.layout().kinds(step.layer));
        }
        // SAFETY: nodes of a live graph.
        let products: Vec<*mut ggml_tensor> =
            unsafe { nodes.iter().copied().filter(|&node| self.product(node).is_some()).collect() };
        let (present, coming) = by_place(tier, step, kinds, &used, &copied);
        // Rows of experts that are left out are zero.
        let skipped: Vec<Pair> =
            step.skipped.iter().flat_map(|&index| self.chosen.routing.pairs_of(index).iter().copied()).collect();
        let foreseen = Foreseen { products: &products, present: &present, coming: &coming, skipped: &skipped };
        // SAFETY: by the caller.
        unsafe { self.launch.prepare(&self.compute, tier, &self.chosen.routing, &foreseen)? };
        let mut uploads = Uploads::new(step, kinds, &copied);
        // SAFETY: the host slots of the step are pinned until the uploads have run: `Tier::hold`.
        unsafe { uploads.pump(host, tier) };
        tier.measure_link();
        let part = Part { step, used, coming };
        // SAFETY: nodes of a live graph.
        for stage in unsafe { self.stages(nodes) } {
            // SAFETY: by the caller.
            unsafe {
                for &(node, _) in &stage.products {
                    self.launch.zero(&self.compute, tier, &self.chosen.routing, node, &skipped)?;
                }
                self.stage(experts, (host, others), tier, &part, &stage, &mut uploads, &mut help)?;
                for &node in &stage.plain {
                    self.launch.plain(&self.compute, tier, node)?;
                }
            }
        }
        self.launch.submit(&self.compute, tier)?;
        if self.chosen.is_single() && !self.chosen.is_again() {
            self.look_ahead(tier, (host, others), routers, step);
        }
        // SAFETY: by the caller.
        unsafe { self.finish_help(host, tier, step, &mut help, &mut uploads)? };
        Ok(())
    }

    fn should_abort(&self) -> bool {
        let (callback, data) = self.abort;
        // SAFETY: llama.cpp keeps callback and data valid as long as the context.
        callback.is_some_and(|callback| unsafe { callback(data) })
    }
}

/// The stream has been waited for: the host gets back what uploads were reading.
fn give_back(host: &mut Host, tier: &mut Tier) {
    let (pins, staged) = tier.settled();
    take_back(host, pins, staged);
}

fn take_back(host: &mut Host, pins: Vec<SlotId>, staged: Vec<SliceId>) {
    host.unpin(pins);
    staged.into_iter().for_each(|slice| host.release(slice));
}
