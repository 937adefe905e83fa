//! The expert backend: computes the expert products of one split.
//!
//! Where every needed slice is resident, the split runs as it came, on slot numbers instead of expert ids. Otherwise
//! product by product: first the experts that are there, then each as it lands. All rows of one expert stay together
//! (ggml's tiled kernels choose by their number), so every grouping gives the bits of the whole.

mod groups;
mod tensors;

use std::ffi::{CStr, c_int, c_void};
use std::slice;
use std::sync::Arc;

use ggml_sys::llama::{
    self, GGML_STATUS_ABORTED, GGML_STATUS_FAILED, GGML_STATUS_SUCCESS, ggml_backend_buffer_type_t, ggml_status,
    ggml_tensor,
};

use super::buffer::tag_of;
use super::experts::{ExpertTag, Experts, RouterWeights};
use super::hierarchy::{Beside, Tiers};
use super::host_reads::Host;
use super::host_reads::ShareView;
use super::inner::Inner;
use crate::expert::{SliceId, SliceKind};
use crate::residency::{Chosen, Elsewhere, LayerStep, Place, Split, Used};
use crate::route::Pair;
use crate::trace::Walk;

use self::tensors::{input_row, output_row, plain_tensor, router_input, view_tensor};
pub(super) use self::tensors::{is_view, read_ids, read_weights, router_input_tensor, weights_tensor, write_route};

/// Gathered rows that one product works on, in bytes (more only where one expert alone has more).
pub(super) const GATHER_BYTES_MAX: usize = 16 << 20;

/// One context's expert backend.
pub(super) struct ExpertBackend {
    buft: ggml_backend_buffer_type_t,
    inner: Inner,
    abort: (llama::ggml_abort_callback, *mut c_void),
    /// What the running layer's router chose.
    chosen: Chosen,
    /// Rows of the view by expert index, `-1` where the expert has none.
    rows: Vec<i32>,
    slot_ids: Vec<i32>,
    /// As `slot_ids`, for the rows of the groups of one run.
    group_ids: Vec<i32>,
    /// Whose rows they are.
    group_pairs: Vec<Pair>,
    gathered: Vec<f32>,
    products: Vec<f32>,
}

/// A step that did not succeed: ggml's status for it.
type Failed = ggml_status;

impl ExpertBackend {
    /// `None` when ggml refuses the inner backend.
    pub(super) fn new(buft: ggml_backend_buffer_type_t) -> Option<Self> {
        Some(Self {
            buft,
            inner: Inner::new()?,
            abort: (None, std::ptr::null_mut()),
            chosen: Chosen::default(),
            rows: Vec::new(),
            slot_ids: Vec::new(),
            group_ids: Vec::new(),
            group_pairs: Vec::new(),
            gathered: Vec::new(),
            products: Vec::new(),
        })
    }

    pub(super) fn set_n_threads(&mut self, n_threads: c_int) {
        self.inner.set_n_threads(n_threads);
    }

    pub(super) fn set_abort_callback(&mut self, callback: llama::ggml_abort_callback, data: *mut c_void) {
        self.abort = (callback, data);
        self.inner.set_abort_callback(callback, data);
    }

    /// Computes a split.
    ///
    /// # Safety
    /// The graph's nodes and their sources are live and allocated in host memory, expert tensors excepted.
    pub(super) unsafe fn graph_compute(&mut self, graph: *mut llama::ggml_cgraph) -> ggml_status {
        // SAFETY: by the caller.
        let nodes = unsafe {
            let n_nodes = llama::ggml_graph_n_nodes(graph) as usize;
            if n_nodes == 0 {
                return GGML_STATUS_SUCCESS;
            }
            slice::from_raw_parts(llama::ggml_graph_nodes(graph), n_nodes)
        };
        // What a failed split left behind must not run with this one.
        self.inner.discard();
        let mut at = 0;
        while at < nodes.len() {
            // SAFETY: nodes of a live graph.
            let (segment, tag) = unsafe { self.segment(&nodes[at..]) };
            // SAFETY: by the caller.
            let result = unsafe {
                match tag {
                    Some(tag) => self.layer(tag, segment),
                    None => segment.iter().try_for_each(|&node| self.plain(node)).and_then(|()| self.run()),
                }
            };
            if let Err(status) = result {
                return status;
            }
            at += segment.len();
        }
        GGML_STATUS_SUCCESS
    }

    /// The leading nodes that belong together: up to the first expert product, or one layer's products (by the same
    /// ids) with the nodes between and after them.
    ///
    /// # Safety
    /// Nodes of a live graph.
    unsafe fn segment<'a>(&self, nodes: &'a [*mut ggml_tensor]) -> (&'a [*mut ggml_tensor], Option<&'a ExpertTag>) {
        // SAFETY: by the caller.
        let key = |&node: &*mut ggml_tensor| unsafe {
            self.product(node).map(|tag| (Arc::as_ptr(&tag.experts), tag.layer, (*node).src[2]))
        };
        let first = key(&nodes[0]);
        let len = nodes[1..]
            .iter()
            .position(|node| key(node).is_some_and(|key| Some(key) != first))
            .map_or(nodes.len(), |position| position + 1);
        // SAFETY: by the caller.
        (&nodes[..len], unsafe { self.product(nodes[0]) })
    }

    /// The tag of the expert tensor that a node multiplies by, if it is an expert product.
    ///
    /// # Safety
    /// `node` is live.
    unsafe fn product<'a>(&self, node: *mut ggml_tensor) -> Option<&'a ExpertTag> {
        // SAFETY: by the caller; sources of a live node are live.
        unsafe { if (*node).op == llama::GGML_OP_MUL_MAT_ID { tag_of((*node).src[0], self.buft) } else { None } }
    }

    /// Appends a node that is no expert product.
    ///
    /// # Safety
    /// As [`Inner::add`].
    unsafe fn plain(&mut self, node: *mut ggml_tensor) -> Result<(), Failed> {
        // SAFETY: by the caller.
        unsafe {
            if is_view((*node).op) {
                return Ok(());
            }
            check(self.inner.reserve())?;
            self.inner.add(node);
        }
        Ok(())
    }

    fn run(&mut self) -> Result<(), Failed> {
        check(self.inner.run())
    }

    /// Computes one layer's segment.
    ///
    /// # Safety
    /// As [`ExpertBackend::graph_compute`]; `nodes[0]` is an expert product with tag `tag`.
    unsafe fn layer(&mut self, tag: &ExpertTag, nodes: &[*mut ggml_tensor]) -> Result<(), Failed> {
        let experts = &*tag.experts;
        // SAFETY: a product's sources are live.
        let (ids, n_expert) = unsafe { (&*(*nodes[0]).src[2], (*(*nodes[0]).src[0]).ne[2] as usize) };
        let mut guard = experts.memories();
        let Some(memories) = guard.as_mut() else {
            experts.fail("no session has set up the expert cache");
            return Err(GGML_STATUS_FAILED);
        };
        let Beside { host, routers, seen, others: mut devices } = memories.for_cpu();
        // SAFETY: nodes of a live graph.
        let products = nodes.iter().filter_map(|&node| unsafe { self.product(node) });
        let mut kinds: Vec<SliceKind> = Vec::with_capacity(SliceKind::COUNT);
        for product in products {
            seen.mark(tag.layer, product.kind);
            if !kinds.contains(&product.kind) {
                kinds.push(product.kind);
            }
        }
        // The last layer of a batch that wants no logits.
        if ids.ne[0] == 0 || ids.ne[1] == 0 {
            return Ok(());
        }
        let (n_used, key) = (ids.ne[0] as usize, std::ptr::from_ref(ids) as usize);
        let split = Split { layer: tag.layer, n_expert, n_used, kinds: &kinds, key };
        // SAFETY: the ids were computed by an earlier split into host memory.
        if let Err(id) = self.chosen.set(&split, unsafe { read_ids(ids) }) {
            experts.fail(format!("layer {}: the router chose expert {id} of {n_expert}", tag.layer));
            return Err(GGML_STATUS_FAILED);
        }
        if let Some(walk) = routers.walk.as_mut().filter(|_| !self.chosen.is_again()) {
            // SAFETY: by the caller.
            unsafe { self.follow(experts, walk, ids, nodes)? };
        }
        // SAFETY: by the caller.
        let weights = if self.chosen.is_again() { None } else { unsafe { self.ask(experts, host, nodes)? } };
        // SAFETY: by the caller: sources of a live node are live and computed.
        let input = if self.chosen.is_single() { unsafe { router_input(nodes[0]) } } else { None };
        let scores = match self.chosen.is_single() && !self.chosen.is_again() {
            // SAFETY: as above.
            true => unsafe { routers.scores(host, tag.layer, (*nodes[0]).src[2], input, n_expert) },
            false => None,
        };
        let elsewhere = Elsewhere { reads: &|slice| devices.read(slice), ..Elsewhere::NOTHING };
        let step = self.chosen.begin(host, scores.as_deref(), &elsewhere);
        let mut later = |layer: u16| routers.of_later(layer, input);
        self.chosen.foresee(host, &step, &mut later, &|version| devices.have(version));
        if let Some(weights) = weights.filter(|_| self.chosen.leaves_out(&step)) {
            self.chosen.leave_out(&step, &host.precisions, |token, rank, weight| {
                // SAFETY: the ubatch of these weights is being computed; only this split's last product reads them from
                // here on.
                unsafe { weights.at(token, rank).write_unaligned(weight) };
            });
        }
        host.wait_for_all(&step, &kinds);
        // SAFETY: by the caller.
        let result = unsafe { self.products(experts, host, &mut devices, &step, &kinds, nodes) };
        self.chosen.end(host, step);
        result
    }

    /// Asks for a precision for each expert of the layer; returns the router's weights unless the mode is exact.
    ///
    /// # Safety
    /// As [`ExpertBackend::layer`].
    unsafe fn ask(
        &mut self,
        experts: &Experts,
        host: &mut Host,
        nodes: &[*mut ggml_tensor],
    ) -> Result<Option<RouterWeights>, Failed> {
        let layer = self.chosen.layer();
        if host.precisions.is_exact() {
            self.chosen.ask(&mut host.precisions, []);
            return Ok(None);
        }
        // SAFETY: nodes of a live graph.
        let Some(weights) = (unsafe { self.weights_of_layer(experts, nodes) }) else {
            experts.fail(format!(
                "layer {layer}: this architecture's router weights were not found, which dynamic precision needs; \
                 use --precision exact"
            ));
            return Err(GGML_STATUS_FAILED);
        };
        // SAFETY: computed by an earlier split of this ubatch into host memory.
        self.chosen.ask(&mut host.precisions, unsafe { read_weights(weights) });
        Ok(Some(weights))
    }

    /// Sends the layer's tokens along recorded routes: ids and weights are written over the router's.
    ///
    /// # Safety
    /// As [`ExpertBackend::layer`].
    unsafe fn follow(
        &mut self,
        experts: &Experts,
        walk: &mut Walk,
        ids: &ggml_tensor,
        nodes: &[*mut ggml_tensor],
    ) -> Result<(), Failed> {
        let layer = self.chosen.layer();
        // SAFETY: nodes of a live graph.
        let Some(weights) = (unsafe { self.weights_of_layer(experts, nodes) }) else {
            experts.fail(format!(
                "layer {layer}: this architecture's router weights were not found; recorded routes cannot be followed"
            ));
            return Err(GGML_STATUS_FAILED);
        };
        // SAFETY: ids and weights were computed by earlier splits into host memory, and have these tokens and ranks.
        unsafe { write_route(&walk.enter(layer, ids.ne[1] as usize), ids, weights) };
        // SAFETY: as above.
        let set = self.chosen.routing.set(unsafe { read_ids(ids) }, ids.ne[0] as usize, self.chosen.n_expert());
        set.expect("routes are checked to be the model's when they are read");
        Ok(())
    }

    /// The running layer's router weights.
    ///
    /// # Safety
    /// As [`ExpertBackend::layer`].
    unsafe fn weights_of_layer(&self, experts: &Experts, nodes: &[*mut ggml_tensor]) -> Option<RouterWeights> {
        // SAFETY: nodes of a live graph.
        let beside = nodes.iter().find_map(|&node| unsafe { self.router_weights(node) });
        let routing = &self.chosen.routing;
        let weights = beside.or_else(|| experts.router_weights(self.chosen.layer()));
        weights.filter(|w| (w.n_used, w.n_tokens) == (routing.n_used, routing.n_tokens))
    }

    /// The router's weights if `node` multiplies an expert's input or output by them.
    ///
    /// # Safety
    /// `node` is live.
    unsafe fn router_weights(&self, node: *mut ggml_tensor) -> Option<RouterWeights> {
        // SAFETY: by the caller; sources of a live node are live.
        unsafe { weights_tensor(node).map(|weights| RouterWeights::of(&*weights, 1)) }
    }

    /// # Safety
    /// As [`ExpertBackend::layer`].
    unsafe fn products(
        &mut self,
        experts: &Experts,
        host: &mut Host,
        devices: &mut Tiers,
        step: &LayerStep,
        kinds: &[SliceKind],
        nodes: &[*mut ggml_tensor],
    ) -> Result<(), Failed> {
        let layer = step.layer;
        // One view for all of them: the product can run as it came.
        let share = step.used.first().map(|used| used.share);
        let one_view = share
            .filter(|&share| step.skipped.is_empty() && step.used.iter().all(|u| u.row.is_some() && u.share == share));
        let ready = |host: &Host, kind: SliceKind| {
            step.used
                .iter()
                .all(|&used| host.locate(SliceId { version: step.version(used), kind }, used) == Place::Cached)
        };
        let all_ready = one_view.is_some() && kinds.iter().all(|&kind| ready(host, kind));
        self.slot_ids.clear();
        if one_view.is_some() {
            let rows = step.used.iter().filter_map(|used| Some((used.index, used.row? as i32)));
            self.chosen.routing.remap(rows, self.chosen.n_expert(), &mut self.rows, &mut self.slot_ids);
        }
        for &node in nodes {
            // SAFETY: by the caller.
            unsafe {
                match (self.product(node), one_view) {
                    (None, _) => self.plain(node)?,
                    (Some(tag), Some(share)) if all_ready || ready(host, tag.kind) => {
                        self.whole(node, host.view(layer, share, tag.kind))?;
                    }
                    (Some(tag), _) => {
                        self.run()?;
                        self.by_expert(experts, host, devices, step, tag.kind, node)?;
                    }
                }
            }
        }
        self.run()
    }

    /// Appends a product of which every slice is in the layer's view.
    ///
    /// # Safety
    /// As [`Inner::add`]; every row in `slot_ids` of the view is ready.
    unsafe fn whole(&mut self, node: *mut ggml_tensor, view: ShareView) -> Result<(), Failed> {
        check(self.inner.reserve())?;
        // SAFETY: by the caller. The copied node writes where the original would have.
        unsafe {
            let mut product = *node;
            let shape = [self.chosen.routing.n_used as i64, self.chosen.routing.n_tokens as i64, 1, 1];
            let ids = plain_tensor(llama::GGML_TYPE_I32, shape, self.slot_ids.as_mut_ptr().cast(), &product);
            product.src[0] = self.inner.tensor(view_tensor(&*product.src[0], view, &product));
            product.src[2] = self.inner.tensor(ids);
            let product = self.inner.tensor(product);
            self.inner.add(product);
        }
        Ok(())
    }

    fn should_abort(&self) -> bool {
        let (callback, data) = self.abort;
        // SAFETY: llama.cpp keeps callback and data valid as long as the context.
        callback.is_some_and(|callback| unsafe { callback(data) })
    }
}

fn check(status: ggml_status) -> Result<(), Failed> {
    if status == GGML_STATUS_SUCCESS { Ok(()) } else { Err(status) }
}
