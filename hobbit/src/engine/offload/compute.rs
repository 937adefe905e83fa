//! One graph on a device: other nodes are passed on, expert products are computed from device slots.
//!
//! A layer's *region* is its expert products with the nodes between them. The host waits once per region, for the
//! router's choice; everything else is submitted and ordered by events. Experts that are on the device are multiplied
//! while the others are being copied; each of these follows as its upload is submitted.

mod borrow;
mod help;
mod router;
mod stages;

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Instant;

use ggml_sys::llama::{
    self, GGML_STATUS_ABORTED, GGML_STATUS_ALLOC_FAILED, GGML_STATUS_FAILED, GGML_STATUS_SUCCESS, ggml_tensor,
};
use ggml_sys::shim;

use super::failure;
use super::helper::{Helper, Node};
use super::launch::{Launch, Product};
use super::wrapper::Wrapper;
use crate::engine::buffer::tag_of;
use crate::engine::compute::{is_dense_rows, router_input_tensor, weights_tensor};
use crate::engine::experts::{ExpertTag, Experts, RouterValues};
use crate::engine::ggml::Stream;
use crate::engine::hierarchy::Beside;
use crate::engine::host_reads::Host;
use crate::engine::purpose::phase;
use crate::engine::registration::Computes;
use crate::engine::split::{self, Abort, Failed};
use crate::engine::tier::{Tier, Uploads, Weights};
use hobbit_core::expert::{SliceId, SliceKind};
use hobbit_core::load::balance::Miss;
use hobbit_core::residency::{Chosen, Elsewhere, LayerStep, Split, Used};
use hobbit_core::route::Pair;

use self::help::Help;
use self::router::host_weights;
use self::stages::{by_place, pin_present, stages};

/// One context's backend on one device.
pub(super) struct Offload {
    wrapper: &'static Wrapper,
    launch: Launch,
    abort: Abort,
    /// The running layer's routing.
    chosen: Chosen,
    /// The router's choice and weights, laid out as on the device.
    ids: Vec<u8>,
    weight_bytes: Vec<u8>,
    /// The router's input for each token, `[n_tokens][n_embd]`; empty if it is not needed.
    input: Vec<f32>,
    helper: Option<Helper>,
    n_threads: c_int,
    /// The experts of the context's model, once a layer has been computed.
    experts: Option<Arc<Experts>>,
    /// Products that currently use weights in their layer's slots, and the weights these replace.
    borrowed: Vec<(*mut ggml_tensor, *mut ggml_tensor)>,
}

/// The device's part of a step.
struct Part<'a> {
    step: &'a LayerStep,
    used: Vec<Used>,
    /// Experts that are multiplied one by one, with their rows.
    coming: Vec<(Used, u32)>,
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
        // SAFETY: by the caller.
        let computed = unsafe {
            let nodes = split::nodes_of(graph);
            self.borrow_complete(nodes);
            let computed = catch_unwind(AssertUnwindSafe(|| self.compute_parts(graph, nodes)));
            self.return_complete();
            computed.unwrap_or_else(|panic| resume_unwind(panic))
        };
        computed.inspect_err(|&status| {
            if status != GGML_STATUS_ABORTED {
                failure::note(&self.wrapper.name, status);
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
        &self.launch.stream
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
            // SAFETY: nodes of a live graph.
            let first = nodes[at..].iter().position(|&node| unsafe { self.product(node) }.is_some());
            let first = first.map_or(nodes.len(), |first| at + first);
            if first > at {
                let (from, to, cut) = (at as c_int, first as c_int, self.wrapper.is_remote);
                // SAFETY: by the caller; nodes of a live graph.
                match unsafe { shim::hobbit_compute_nodes(self.stream().raw(), graph, from, to, cut) } {
                    GGML_STATUS_SUCCESS => relieved = false,
                    GGML_STATUS_ALLOC_FAILED if !relieved && unsafe { self.relieve() } => {
                        // Some of these nodes are expert products again.
                        relieved = true;
                        continue;
                    }
                    status => return Err(status),
                }
            }
            if first == nodes.len() {
                break;
            }
            // SAFETY: nodes of a live graph; by the caller.
            unsafe {
                let n = self.region(&nodes[first..]);
                let tag = self.product(nodes[first]).expect("a region starts with a product");
                self.layer(tag, &nodes[first..first + n], &nodes[first + n..])?;
                at = first + n;
            }
        }
        Ok(())
    }

    /// Number of leading nodes in one layer's region, which ends with its last product.
    ///
    /// # Safety
    /// Nodes of a live graph, the first of which is an expert product.
    unsafe fn region(&self, nodes: &[*mut ggml_tensor]) -> usize {
        // SAFETY: by the caller.
        let key = |&node: &*mut ggml_tensor| unsafe {
            self.product(node).map(|tag| (Arc::as_ptr(&tag.experts), tag.layer, (*node).src[2]))
        };
        let first = key(&nodes[0]);
        let is_other = |node: &*mut ggml_tensor| key(node).is_some_and(|key| Some(key) != first);
        let end = nodes.iter().position(is_other).unwrap_or(nodes.len());
        nodes[..end].iter().rposition(|node| key(node).is_some()).map_or(1, |last| last + 1)
    }

    /// As [`tag_of`].
    ///
    /// # Safety
    /// `node` is live.
    unsafe fn product<'a>(&self, node: *mut ggml_tensor) -> Option<&'a ExpertTag> {
        // SAFETY: by the caller; sources of a live node are live.
        unsafe { tag_of(node, self.wrapper.buffer_type) }
    }

    /// Computes one layer's region. `rest`: the nodes after it.
    ///
    /// # Safety
    /// As [`Computes::graph_compute`]; `nodes[0]` is an expert product with tag `tag`.
    unsafe fn layer(
        &mut self,
        tag: &ExpertTag,
        nodes: &[*mut ggml_tensor],
        rest: &[*mut ggml_tensor],
    ) -> Result<(), Failed> {
        let experts = &*tag.experts;
        let mut guard = experts.memories();
        let memories = guard.as_mut().and_then(|memories| memories.for_device(self.wrapper.inner));
        let Some((tier, mut beside)) = memories else {
            experts.fail(format!("no session has set up the expert cache of {}", self.wrapper.name));
            return Err(GGML_STATUS_FAILED);
        };
        if self.experts.is_none() {
            self.experts = Some(Arc::clone(&tag.experts));
        }
        // SAFETY: by the caller.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { self.layer_on(tag, tier, &mut beside, nodes, rest) }));
        if !matches!(result, Ok(Ok(()))) {
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
        beside: &mut Beside,
        nodes: &[*mut ggml_tensor],
        rest: &[*mut ggml_tensor],
    ) -> Result<(), Failed> {
        let experts = &*tag.experts;
        let Beside { host, routers, unseen, others } = beside;
        // SAFETY: a product's sources are live.
        let (ids, n_expert) = unsafe { (&*(*nodes[0]).src[2], (*(*nodes[0]).src[0]).ne[2] as usize) };
        // SAFETY: nodes of a live graph.
        let kinds = split::kinds_of(nodes.iter().filter_map(|&node| unsafe { self.product(node) }), unseen);
        // The last layer of a batch without logits.
        if ids.ne[0] == 0 || ids.ne[1] == 0 {
            return Ok(());
        }
        let exact = host.precisions.is_exact();
        // SAFETY: nodes of a live graph.
        let weights = unsafe { nodes.iter().chain(rest).find_map(|&node| weights_tensor(node)) };
        let phase = phase();
        // The first of a layer's splits decides for all of them.
        let reroutes = !host.rerouting.is_off() && (phase.is_decode() || host.reroutes_prompts);
        let asks = host.precisions.asks_weights(phase) || reroutes;
        let weights = weights.filter(|_| !exact || asks || routers.walk.is_some());
        // SAFETY: nodes of a live graph.
        let input = match phase.is_decode() && routers.want_input(host) || reroutes {
            true => unsafe { router_input_tensor(nodes[0]) }.filter(|input| is_dense_rows(input)),
            false => None,
        };
        // SAFETY: by the caller: all are allocated on the device.
        unsafe { self.read_back(ids, weights, input) };
        tier.enter(&self.launch.stream, Some(tag.layer));
        tier.settled_so_far(host);
        if phase.is_decode() {
            tier.chose(tag.layer, host.counters().wait_seconds);
        }

        let mut host_ids = *ids;
        host_ids.data = self.ids.as_mut_ptr().cast();
        let (n_used, key) = (ids.ne[0] as usize, std::ptr::from_ref(ids) as usize);
        let split = Split { layer: tag.layer, n_expert, n_used, kinds: &kinds, key, phase };
        // SAFETY: read back just now, with the device's strides.
        split::choose(&mut self.chosen, experts, &split, unsafe { RouterValues::of(&host_ids, 0).read() })?;
        let mut scores = Vec::new();
        if !self.chosen.is_again() {
            tier.cache.begin_layer(tag.layer, self.chosen.routing.n_tokens as u32);
            let bytes = &mut self.weight_bytes;
            if let Some(walk) = &mut routers.walk {
                // SAFETY: read back just now; the tensors have as many bytes, which are kept until the stream is waited
                // for.
                unsafe {
                    let on_host = weights.map(|tensor| host_weights(tensor, bytes));
                    split::follow(&mut self.chosen, experts, walk, RouterValues::of(&host_ids, 0), on_host)?;
                    self.launch.set(std::ptr::from_ref(ids).cast_mut(), self.ids.clone(), 0);
                    weights.iter().for_each(|&tensor| self.launch.set(tensor, bytes.clone(), 0));
                }
            }
            if self.chosen.may_reroute(host) {
                let elsewhere =
                    Elsewhere { has: &|version| tier.has(version, &kinds), reads: &|slice| others.read(slice) };
                let of_router = [nodes[0], std::ptr::from_ref(ids).cast_mut()];
                // SAFETY: read back just now; the tensors have as many bytes.
                unsafe { self.reroute(experts, host, routers, &elsewhere, of_router, weights)? };
            }
            let bytes = &mut self.weight_bytes;
            // SAFETY: read back just now.
            let on_host = || weights.map(|tensor| unsafe { host_weights(tensor, bytes) });
            // SAFETY: inside what was read back.
            unsafe { split::ask(&mut self.chosen, experts, host, on_host, " on the device")? };
            if phase.is_decode() {
                // SAFETY: sources of a live node are live, and were computed before.
                scores = unsafe { routers.scores(host, tag.layer, (*nodes[0]).src[2], &self.inputs(), n_expert) };
            }
            scores.chunks_exact(n_expert).for_each(|scores| tier.cache.scores(tag.layer, scores));
        }
        let elsewhere = Elsewhere { has: &|version| tier.has(version, &kinds), reads: &|slice| others.read(slice) };
        let step = self.chosen.begin(host, &scores, &elsewhere);
        if let Some(weights) = weights.filter(|_| self.chosen.leaves_out(&step)) {
            // SAFETY: the weights are on the device until the ubatch is done.
            unsafe { self.leave_out(&step, host, weights) };
        }
        // SAFETY: by the caller.
        let result = unsafe { self.products(experts, tier, beside, &step, &kinds, nodes) };
        // Uploads may still read these slots.
        tier.hold(beside.host.finish(step));
        tier.leave(&self.launch.stream);
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
        let host = &mut *beside.host;
        let missing = pin_present(tier, step, kinds, &self.chosen);
        let with_kind = |&node: &*mut ggml_tensor| {
            // SAFETY: nodes of a live graph.
            (node, unsafe { self.product(node) }.map(|tag| tag.kind))
        };
        let region: Vec<Node> = nodes.iter().map(with_kind).collect();
        // SAFETY: by the caller.
        let mut help = unsafe { self.divide(host, tier, step, &missing, &region) };
        let is_helped = |used: &Used| help.as_ref().is_some_and(|help| help.experts.contains(used));
        let copied: Vec<Used> = missing.into_iter().filter(|used| !is_helped(used)).collect();
        let used: Vec<Used> = step.used.iter().copied().filter(|used| !is_helped(used)).collect();
        for &used in &copied {
            tier.acquire(step.version(used), host.layout().kinds(step.layer));
        }
        let products: Vec<*mut ggml_tensor> =
            region.iter().filter(|(_, kind)| kind.is_some()).map(|(node, _)| *node).collect();
        let (present, coming) = by_place(tier, step, kinds, &used, &copied);
        // Skipped experts have rows of zeros.
        let skipped: Vec<Pair> =
            step.skipped.iter().flat_map(|&index| self.chosen.routing.pairs_of(index).iter().copied()).collect();
        // SAFETY: by the caller.
        unsafe { self.launch.prepare(tier, &self.chosen.routing, &products, &present, &coming, &skipped)? };
        let mut uploads = Uploads::new(step, kinds, &copied);
        // SAFETY: the host slots of the step are pinned until the uploads have run: `Tier::hold`.
        unsafe { uploads.pump(host, tier) };
        tier.measure_link();
        let part = Part { step, used, coming };
        // SAFETY: nodes of a live graph.
        for stage in unsafe { stages(&region) } {
            // SAFETY: by the caller.
            unsafe {
                for &(node, _) in &stage.products {
                    self.launch.zero(tier, &self.chosen.routing, node, &skipped)?;
                }
                self.stage(experts, beside, tier, &part, &stage, &mut uploads, &mut help)?;
                for &node in &stage.plain {
                    self.launch.plain(tier, node)?;
                }
            }
        }
        self.launch.submit(tier)?;
        if self.chosen.decodes_anew() {
            self.look_ahead(tier, beside, step);
        }
        // SAFETY: by the caller.
        unsafe { self.finish_help(beside.host, tier, step, help, &mut uploads) }
    }
}
