//! The expert backend: computes the expert products of one split.
//!
//! Where every needed slice is resident, the split runs as it came, on slot numbers instead of expert ids. Otherwise
//! product by product: first the experts that are there, then each as it lands. All rows of one expert stay together
//! (ggml's tiled kernels choose by their number), so every grouping gives the bits of the whole.

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
use super::inner::Inner;
use super::residency::{Need, Place, Residency, ShareView, Step, Used};
use crate::expert::{Precision, SliceId, SliceKind};
use crate::route::Demand;
use crate::routing::{Pair, Routing};

use self::tensors::{input_row, output_row, plain_tensor, read_weights, router_input, view_tensor};
pub(super) use self::tensors::{is_view, read_ids, router_input_tensor, weights_tensor};

/// Gathered rows that one product works on, in bytes (more only where one expert alone has more).
pub(super) const GATHER_BYTES_MAX: usize = 16 << 20;

/// One context's expert backend.
pub(super) struct ExpertBackend {
    buft: ggml_backend_buffer_type_t,
    inner: Inner,
    abort: (llama::ggml_abort_callback, *mut c_void),
    routing: Routing,
    /// The router's weights, `[n_tokens][n_used]`; empty in exact mode.
    weights: Vec<f32>,
    /// The same of a single token in exact mode, as far as somebody wanted to know.
    known: Vec<f32>,
    /// By expert index.
    demands: Vec<Demand>,
    decided: Decided,
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

/// The layer whose demands stand, and what of it has been multiplied: a layer may come in several splits.
struct Decided {
    /// Layer, and where the graph keeps the router's choice.
    key: (u16, *const ggml_tensor),
    kinds: Vec<SliceKind>,
    /// Its choices, by expert index.
    choices: Vec<Option<Precision>>,
}

impl Default for Decided {
    fn default() -> Self {
        Self { key: (0, std::ptr::null()), kinds: Vec::new(), choices: Vec::new() }
    }
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
            routing: Routing::default(),
            weights: Vec::new(),
            known: Vec::new(),
            demands: Vec::new(),
            decided: Decided::default(),
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
        let mut guard = experts.residency();
        let Some(residency) = guard.as_mut() else {
            experts.fail("no session has set up the expert cache");
            return Err(GGML_STATUS_FAILED);
        };
        // SAFETY: nodes of a live graph.
        let products = nodes.iter().filter_map(|&node| unsafe { self.product(node) });
        let mut kinds: Vec<SliceKind> = Vec::with_capacity(SliceKind::COUNT);
        for product in products {
            residency.mark_seen(tag.layer, product.kind);
            if !kinds.contains(&product.kind) {
                kinds.push(product.kind);
            }
        }
        // The last layer of a batch that wants no logits.
        if ids.ne[0] == 0 || ids.ne[1] == 0 {
            return Ok(());
        }
        // SAFETY: the ids were computed by an earlier split into host memory.
        let router_choice = unsafe { read_ids(ids) };
        if let Err(id) = self.routing.set(router_choice, ids.ne[0] as usize, n_expert) {
            experts.fail(format!("layer {}: the router chose expert {id} of {n_expert}", tag.layer));
            return Err(GGML_STATUS_FAILED);
        }
        let key = (tag.layer, std::ptr::from_ref(ids));
        let again = self.decided.key == key && kinds.iter().all(|kind| !self.decided.kinds.contains(kind));
        let mut weights = None;
        if again {
            self.decided.kinds.extend_from_slice(&kinds);
        } else {
            self.decided = Decided { key, kinds: kinds.clone(), choices: Vec::new() };
            // SAFETY: by the caller.
            weights = unsafe { self.decide(experts, residency, tag.layer, n_expert, nodes)? };
        }
        let single = self.routing.n_tokens == 1;
        self.known.clear();
        let exact = self.weights.is_empty();
        if !again {
            // SAFETY: by the caller.
            let scores =
                if single { unsafe { self.tell_scores(residency, tag.layer, nodes[0], n_expert) } } else { None };
            let weights = if exact { &self.known } else { &self.weights };
            residency.record(tag.layer, &self.routing, weights, scores.as_deref());
        }
        let share = |expert| self.routing.share(expert, if exact { &self.known } else { &self.weights });
        let mut step = residency.begin(&Need {
            layer: tag.layer,
            experts: &self.routing.needed,
            uses: &|expert| self.routing.pairs_of(expert).len() as u64,
            weights: &share,
            demands: &self.demands,
            kinds: &kinds,
            dense: !single && self.routing.needed.len() * 10 >= n_expert * 9,
            chosen: again.then_some(&self.decided.choices),
            elsewhere: &|_| false,
        });
        self.decided.choices = std::mem::take(&mut step.choices);
        if single && !again {
            let chosen: Vec<(u16, f32)> = self.routing.needed.iter().map(|&index| (index, share(index))).collect();
            // SAFETY: by the caller.
            residency.foresee(&step, &chosen, unsafe { router_input(nodes[0]) }, &|_| false);
        }
        if let Some(weights) = weights.filter(|_| !step.skipped.is_empty()) {
            // SAFETY: as above; only this split's last product reads the weights from here on.
            unsafe { self.leave_out(&step.skipped, residency, weights) };
        }
        residency.wait_for_all(&step, &kinds);
        // SAFETY: by the caller.
        let result = unsafe { self.products(experts, residency, &step, &kinds, nodes) };
        residency.end(step, single && self.decided.kinds.len() >= residency.n_kinds(tag.layer));
        result
    }

    /// Tells the policy what the router thinks of all experts, and takes the weights of the chosen ones from that where
    /// they are not known better.
    ///
    /// # Safety
    /// As [`ExpertBackend::layer`]; `product` is its first product, of one token.
    unsafe fn tell_scores(
        &mut self,
        residency: &mut Residency,
        layer: u16,
        product: *mut ggml_tensor,
        n_expert: usize,
    ) -> Option<Vec<f32>> {
        // SAFETY: by the caller: sources of a live node are live and computed, floats of a row contiguous.
        let scores = unsafe { residency.scores(layer, (*product).src[2], router_input(product)?, n_expert) };
        let known = scores.iter().flat_map(|scores| self.routing.ids.iter().map(|&id| scores[usize::from(id)]));
        self.known.extend(known);
        scores
    }

    /// Asks for a precision for each expert of the layer (`self.demands`); returns the router's weights unless the mode
    /// is exact.
    ///
    /// # Safety
    /// As [`ExpertBackend::layer`].
    unsafe fn decide(
        &mut self,
        experts: &Experts,
        residency: &mut Residency,
        layer: u16,
        n_expert: usize,
        nodes: &[*mut ggml_tensor],
    ) -> Result<Option<RouterWeights>, Failed> {
        let exact = residency.precisions.is_exact();
        // SAFETY: nodes of a live graph.
        let beside = || unsafe { nodes.iter().find_map(|&node| self.router_weights(node)) };
        let weights = if exact { None } else { beside().or_else(|| experts.router_weights(layer)) };
        let weights = weights.filter(|w| (w.n_used, w.n_tokens) == (self.routing.n_used, self.routing.n_tokens));
        self.weights.clear();
        match weights {
            // SAFETY: computed by an earlier split of this ubatch into host memory.
            Some(weights) => self.weights.extend(unsafe { read_weights(weights) }),
            None if !exact => {
                experts.fail(format!(
                    "layer {layer}: this architecture's router weights were not found, which dynamic precision needs; \
                     use --precision exact"
                ));
                return Err(GGML_STATUS_FAILED);
            }
            None => {}
        }
        residency.precisions.demands(&self.routing, &self.weights, n_expert, &mut self.demands);
        Ok(weights)
    }

    /// The router's weights if `node` multiplies an expert's input or output by them.
    ///
    /// # Safety
    /// `node` is live.
    unsafe fn router_weights(&self, node: *mut ggml_tensor) -> Option<RouterWeights> {
        // SAFETY: by the caller; sources of a live node are live.
        unsafe { weights_tensor(node).map(|weights| RouterWeights::of(&*weights, 1)) }
    }

    /// Takes skipped experts out of the router's weights, token by token.
    ///
    /// # Safety
    /// The ubatch of `weights` is being computed, and nobody else uses them meanwhile.
    unsafe fn leave_out(&mut self, skipped: &[u16], residency: &Residency, weights: RouterWeights) {
        let without = |weights: &mut [f32], left_out: &[bool]| residency.precisions.without_skipped(weights, left_out);
        self.routing.leave_out(skipped, &mut self.weights, without, |token, rank, weight| {
            // SAFETY: by the caller.
            unsafe { weights.at(token, rank).write_unaligned(weight) };
        });
    }

    /// # Safety
    /// As [`ExpertBackend::layer`].
    unsafe fn products(
        &mut self,
        experts: &Experts,
        residency: &mut Residency,
        step: &Step,
        kinds: &[SliceKind],
        nodes: &[*mut ggml_tensor],
    ) -> Result<(), Failed> {
        let layer = step.layer;
        // One view for all of them: the product can run as it came.
        let share = step.used.first().map(|used| used.share);
        let one_view = share
            .filter(|&share| step.skipped.is_empty() && step.used.iter().all(|u| u.row.is_some() && u.share == share));
        let ready = |residency: &Residency, kind: SliceKind| {
            step.used.iter().all(|&used| {
                matches!(residency.locate(SliceId { version: step.version(used), kind }, used), Place::Cached)
            })
        };
        let all_ready = one_view.is_some() && kinds.iter().all(|&kind| ready(residency, kind));
        self.slot_ids.clear();
        if one_view.is_some() {
            let rows = step.used.iter().filter_map(|used| Some((used.index, used.row? as i32)));
            self.routing.remap(rows, self.demands.len(), &mut self.rows, &mut self.slot_ids);
        }
        for &node in nodes {
            // SAFETY: by the caller.
            unsafe {
                match (self.product(node), one_view) {
                    (None, _) => self.plain(node)?,
                    (Some(tag), Some(share)) if all_ready || ready(residency, tag.kind) => {
                        self.whole(node, residency.view(layer, share, tag.kind))?;
                    }
                    (Some(tag), _) => {
                        self.run()?;
                        self.by_expert(experts, residency, step, tag.kind, node)?;
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
            let shape = [self.routing.n_used as i64, self.routing.n_tokens as i64, 1, 1];
            let ids = plain_tensor(llama::GGML_TYPE_I32, shape, self.slot_ids.as_mut_ptr().cast(), &product);
            product.src[0] = self.inner.tensor(view_tensor(&*product.src[0], view, &product));
            product.src[2] = self.inner.tensor(ids);
            let product = self.inner.tensor(product);
            self.inner.add(product);
        }
        Ok(())
    }

    /// Computes a product expert by expert, each as soon as its slice is there.
    ///
    /// # Safety
    /// As [`ExpertBackend::layer`]; `node` is a product of kind `kind` and its other source is computed.
    unsafe fn by_expert(
        &mut self,
        experts: &Experts,
        residency: &mut Residency,
        step: &Step,
        kind: SliceKind,
        node: *mut ggml_tensor,
    ) -> Result<(), Failed> {
        // SAFETY: the product and its source are live and allocated.
        let row_bytes = unsafe {
            for &index in &step.skipped {
                for &pair in self.routing.pairs_of(index) {
                    output_row(&*node, pair).write_bytes(0, (*node).ne[0] as usize);
                }
            }
            ((*(*node).src[1]).ne[0] + (*node).ne[0]) as usize * size_of::<f32>()
        };
        let slice_of = |used: Used| SliceId { version: step.version(used), kind };
        let mut pending = step.used.clone();
        while !pending.is_empty() {
            residency.poll();
            if let Some(error) = residency.take_failure() {
                experts.fail(error.to_string());
                return Err(GGML_STATUS_FAILED);
            }
            if self.should_abort() {
                return Err(GGML_STATUS_ABORTED);
            }
            let mut here: Vec<(Used, Option<*mut u8>)> = Vec::new();
            pending.retain(|&used| match residency.locate(slice_of(used), used) {
                Place::Cached => {
                    here.push((used, None));
                    false
                }
                Place::Staged(data) => {
                    here.push((used, Some(data)));
                    false
                }
                Place::Pending => true,
            });
            if here.is_empty() {
                let first = slice_of(pending[0]);
                if !residency.wait() && !residency.insist(first, pending[0]) {
                    experts.fail(format!("{first}: nothing will ever load it"));
                    return Err(GGML_STATUS_FAILED);
                }
                continue;
            }
            // Those of one view together, staged ones each by itself.
            here.sort_by_key(|(used, data)| (data.is_some(), used.share));
            let mut rest = here.as_slice();
            while !rest.is_empty() {
                let n = self.fitting(rest, row_bytes);
                let (now, later) = rest.split_at(n);
                // SAFETY: the located slices are complete and stay: cached ones are pinned, staged ones are released
                // only after their product.
                unsafe { self.groups(node, now, |used| residency.view(step.layer, used.share, kind))? };
                for (used, _) in now.iter().filter(|(_, data)| data.is_some()) {
                    residency.release(slice_of(*used));
                }
                rest = later;
            }
        }
        Ok(())
    }

    /// How many of these experts may be gathered at once: at least one. Of a batch, staged ones go one by one: the
    /// staging slot of each takes the next read as soon as its product is done.
    fn fitting(&self, experts: &[(Used, Option<*mut u8>)], row_bytes: usize) -> usize {
        if self.routing.n_tokens > 1 && experts[0].1.is_some() {
            return 1;
        }
        let mut bytes = 0usize;
        let beyond = experts.iter().position(|(used, _)| {
            bytes = bytes.saturating_add(self.routing.pairs_of(used.index).len().saturating_mul(row_bytes));
            bytes > GATHER_BYTES_MAX
        });
        beyond.map_or(experts.len(), |n| n.max(1))
    }

    /// Multiplies all rows routed to these experts in one run: per view gather, product, scatter. A single row needs
    /// neither copy.
    ///
    /// # Safety
    /// As [`ExpertBackend::by_expert`]; the slices are complete until this returns.
    unsafe fn groups(
        &mut self,
        node: *mut ggml_tensor,
        experts: &[(Used, Option<*mut u8>)],
        view_of: impl Fn(Used) -> ShareView,
    ) -> Result<(), Failed> {
        // SAFETY: by the caller: node and sources are live, allocated, rows of floats contiguous.
        let (input, output) = unsafe { (*(*node).src[1], *node) };
        assert!(input.type_ == llama::GGML_TYPE_F32 && input.nb[0] == size_of::<f32>(), "ggml multiplies floats");
        let (n_in, n_out) = (input.ne[0] as usize, output.ne[0] as usize);
        self.group_ids.clear();
        self.group_pairs.clear();
        let mut bounds = Vec::new();
        for group in experts.chunk_by(|a, b| a.1.is_none() && b.1.is_none() && a.0.share == b.0.share) {
            let start = self.group_ids.len();
            for (used, data) in group {
                let pairs = self.routing.pairs_of(used.index);
                let row = if data.is_some() { 0 } else { used.row.map_or(0, |row| row as i32) };
                self.group_pairs.extend_from_slice(pairs);
                self.group_ids.resize(self.group_pairs.len(), row);
            }
            let view = match group[0] {
                (used, Some(data)) => ShareView { base: data, n_slots: 1, ..view_of(used) },
                (used, None) => view_of(used),
            };
            bounds.push((start..self.group_ids.len(), view));
        }
        let n_rows = self.group_ids.len();
        if self.gathered.len() < n_rows * n_in {
            self.gathered.resize(n_rows * n_in, 0.0);
        }
        if self.products.len() < n_rows * n_out {
            self.products.resize(n_rows * n_out, 0.0);
        }
        for (rows, view) in &bounds {
            check(self.inner.reserve())?;
            // SAFETY: as above; gathered rows, results and ids stay where they are until the run below.
            unsafe {
                let n = rows.len();
                let (from, to) = match n {
                    1 => {
                        let pair = self.group_pairs[rows.start];
                        (input_row(&input, pair), output_row(&output, pair))
                    }
                    _ => {
                        let from = self.gathered.as_mut_ptr().add(rows.start * n_in);
                        for (i, &pair) in self.group_pairs[rows.clone()].iter().enumerate() {
                            from.add(i * n_in).copy_from_nonoverlapping(input_row(&input, pair), n_in);
                        }
                        (from, self.products.as_mut_ptr().add(rows.start * n_out))
                    }
                };
                let ids = self.group_ids.as_mut_ptr().add(rows.start);
                let shape = |len: i64| [len, 1, n as i64, 1];
                let mut product = output;
                let source = plain_tensor(llama::GGML_TYPE_F32, shape(input.ne[0]), from.cast(), &product);
                let ids = plain_tensor(llama::GGML_TYPE_I32, [1, n as i64, 1, 1], ids.cast(), &product);
                let result = plain_tensor(llama::GGML_TYPE_F32, shape(output.ne[0]), to.cast(), &product);
                let weights = view_tensor(&*product.src[0], *view, &product);
                (product.ne, product.nb, product.data) = (result.ne, result.nb, result.data);
                product.src[0] = self.inner.tensor(weights);
                product.src[1] = self.inner.tensor(source);
                product.src[2] = self.inner.tensor(ids);
                let product = self.inner.tensor(product);
                self.inner.add(product);
            }
        }
        self.run()?;
        for (rows, _) in bounds.iter().filter(|(rows, _)| rows.len() > 1) {
            for position in rows.clone() {
                // SAFETY: as above; the run is over.
                unsafe {
                    let from = self.products.as_ptr().add(position * n_out);
                    output_row(&output, self.group_pairs[position]).copy_from_nonoverlapping(from, n_out);
                }
            }
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
