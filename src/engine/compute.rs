//! The expert backend: computes the expert products of one split.
//!
//! Where every needed slice is resident, the split runs as it came, on slot numbers instead of expert ids. Otherwise
//! product by product: first the experts that are there, then each as it lands. All rows of one expert stay together
//! (ggml's tiled kernels choose by their number), so every grouping gives the bits of the whole.

use std::ffi::{c_int, c_void};
use std::slice;
use std::sync::Arc;

use ggml_sys::llama::{
    self, GGML_STATUS_ABORTED, GGML_STATUS_FAILED, GGML_STATUS_SUCCESS, ggml_backend_buffer_type_t, ggml_status,
    ggml_tensor,
};

use super::buffer::tag_of;
use super::experts::{ExpertTag, Experts};
use super::inner::Inner;
use super::residency::{LayerView, Place, Residency, Step};
use super::routing::{Pair, Routing};
use crate::expert::{ExpertId, SliceId, SliceKind, Version};

/// Gathered rows that one product works on, in bytes (more only where one expert alone has more).
pub(super) const GATHER_BYTES_MAX: usize = 16 << 20;

/// One context's expert backend.
pub(super) struct ExpertBackend {
    buft: ggml_backend_buffer_type_t,
    inner: Inner,
    abort: (llama::ggml_abort_callback, *mut c_void),
    routing: Routing,
    /// Layer rows by expert index, `-1` where the expert has none.
    rows: Vec<i32>,
    slot_ids: Vec<i32>,
    /// As `slot_ids`, for the rows of one group.
    group_ids: Vec<i32>,
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
            routing: Routing::default(),
            rows: Vec::new(),
            slot_ids: Vec::new(),
            group_ids: Vec::new(),
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
            match (*node).op {
                llama::GGML_OP_NONE
                | llama::GGML_OP_VIEW
                | llama::GGML_OP_RESHAPE
                | llama::GGML_OP_PERMUTE
                | llama::GGML_OP_TRANSPOSE => Ok(()),
                _ => {
                    check(self.inner.reserve())?;
                    self.inner.add(node);
                    Ok(())
                }
            }
        }
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
        let dense = self.routing.n_tokens > 1 && self.routing.needed.len() * 10 >= n_expert * 9;
        let step = residency.begin(tag.layer, &self.routing.needed, &kinds, dense);
        self.rows.clear();
        self.rows.resize(n_expert, -1);
        for &(index, row) in &step.cached {
            self.rows[usize::from(index)] = row as i32;
        }
        // SAFETY: by the caller.
        let result = unsafe { self.products(experts, residency, &step, &kinds, nodes) };
        residency.end(step);
        result
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
        let ready = |residency: &Residency, kind: SliceKind| {
            step.overflow.is_empty()
                && step.cached.iter().all(|&(index, row)| {
                    let slice = SliceId { version: Version::high(ExpertId { layer, index }), kind };
                    matches!(residency.locate(slice, Some(row)), Place::Cached(_))
                })
        };
        let all_ready = kinds.iter().all(|&kind| ready(residency, kind));
        self.slot_ids.clear();
        if step.overflow.is_empty() {
            self.slot_ids.extend(self.routing.ids.iter().map(|&id| self.rows[usize::from(id)]));
        }
        for &node in nodes {
            // SAFETY: by the caller.
            unsafe {
                match self.product(node) {
                    None => self.plain(node)?,
                    Some(tag) if all_ready || ready(residency, tag.kind) => {
                        self.whole(node, residency.view(layer, tag.kind))?;
                    }
                    Some(tag) => {
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
    unsafe fn whole(&mut self, node: *mut ggml_tensor, view: LayerView) -> Result<(), Failed> {
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
        let layer = step.layer;
        let view = residency.view(layer, kind);
        let slice_of = |index: u16| SliceId { version: Version::high(ExpertId { layer, index }), kind };
        let mut pending = self.routing.needed.clone();
        while !pending.is_empty() {
            residency.poll();
            if let Some(error) = residency.take_failure() {
                experts.fail(error.to_string());
                return Err(GGML_STATUS_FAILED);
            }
            if self.should_abort() {
                return Err(GGML_STATUS_ABORTED);
            }
            let row = |rows: &[i32], index: u16| u32::try_from(rows[usize::from(index)]).ok();
            let mut cached = Vec::new();
            let mut staged = Vec::new();
            pending.retain(|&index| match residency.locate(slice_of(index), row(&self.rows, index)) {
                Place::Cached(_) => {
                    cached.push(index);
                    false
                }
                Place::Staged(data) => {
                    staged.push((index, data));
                    false
                }
                Place::Pending => true,
            });
            if cached.is_empty() && staged.is_empty() {
                let first = slice_of(pending[0]);
                if !residency.wait() && !residency.insist(first) {
                    experts.fail(format!("{first}: nothing will ever load it"));
                    return Err(GGML_STATUS_FAILED);
                }
                continue;
            }
            // SAFETY: the located slices are complete and stay: cached ones are pinned, staged ones are released
            // only after their product.
            unsafe {
                // SAFETY: the product's source is live.
                let row_bytes = ((*(*node).src[1]).ne[0] + (*node).ne[0]) as usize * size_of::<f32>();
                let mut group = Vec::new();
                let mut group_pairs = 0;
                for (i, &index) in cached.iter().enumerate() {
                    group.push(index);
                    group_pairs += self.routing.pairs_of(index).len();
                    let next = cached.get(i + 1).map_or(usize::MAX, |&next| self.routing.pairs_of(next).len());
                    if (group_pairs.saturating_add(next)).saturating_mul(row_bytes) > GATHER_BYTES_MAX {
                        self.group(node, &group, view)?;
                        group.clear();
                        group_pairs = 0;
                    }
                }
                for (index, data) in staged {
                    self.rows[usize::from(index)] = 0;
                    self.group(node, &[index], LayerView { base: data, stride: view.stride, n_slots: 1 })?;
                    self.rows[usize::from(index)] = -1;
                    residency.release(slice_of(index));
                }
            }
        }
        Ok(())
    }

    /// Multiplies all rows routed to `group`, whose slices are the rows `self.rows` of `view`: gather, product,
    /// scatter. A single row needs neither copy.
    ///
    /// # Safety
    /// As [`ExpertBackend::by_expert`]; the slices are complete until this returns.
    unsafe fn group(&mut self, node: *mut ggml_tensor, group: &[u16], view: LayerView) -> Result<(), Failed> {
        let pairs = || group.iter().flat_map(|&e| self.routing.pairs_of(e).iter().map(move |&pair| (e, pair)));
        self.group_ids.clear();
        self.group_ids.extend(pairs().map(|(e, _)| self.rows[usize::from(e)]));
        let n = self.group_ids.len();
        // SAFETY: by the caller: node and sources are live, allocated, rows of floats contiguous.
        unsafe {
            let (input, mut product) = (*(*node).src[1], *node);
            assert!(input.type_ == llama::GGML_TYPE_F32 && input.nb[0] == size_of::<f32>(), "ggml multiplies floats");
            let (n_in, n_out) = (input.ne[0] as usize, product.ne[0] as usize);
            let input_row = |pair: Pair| {
                let rank = i64::from(pair.rank) % input.ne[1];
                let offset = pair.token as usize * input.nb[2] + rank as usize * input.nb[1];
                input.data.cast::<u8>().add(offset).cast::<f32>()
            };
            let output_row = |pair: Pair| {
                let offset = pair.token as usize * (*node).nb[2] + pair.rank as usize * (*node).nb[1];
                (*node).data.cast::<u8>().add(offset).cast::<f32>()
            };
            let (from, to) = if n == 1 {
                let (_, pair) = pairs().next().expect("n is 1");
                (input_row(pair), output_row(pair))
            } else {
                if self.gathered.len() < n * n_in {
                    self.gathered.resize(n * n_in, 0.0);
                }
                if self.products.len() < n * n_out {
                    self.products.resize(n * n_out, 0.0);
                }
                let from = self.gathered.as_mut_ptr();
                for (i, (_, pair)) in pairs().enumerate() {
                    from.add(i * n_in).copy_from_nonoverlapping(input_row(pair), n_in);
                }
                (from, self.products.as_mut_ptr())
            };
            let rows = |len: i64| [len, 1, n as i64, 1];
            let source = plain_tensor(llama::GGML_TYPE_F32, rows(input.ne[0]), from.cast(), &product);
            let ids =
                plain_tensor(llama::GGML_TYPE_I32, [1, n as i64, 1, 1], self.group_ids.as_mut_ptr().cast(), &product);
            let shape = plain_tensor(llama::GGML_TYPE_F32, rows(product.ne[0]), to.cast(), &product);
            let weights = view_tensor(&*product.src[0], view, &product);
            (product.ne, product.nb, product.data) = (shape.ne, shape.nb, shape.data);
            product.src[0] = self.inner.tensor(weights);
            product.src[1] = self.inner.tensor(source);
            product.src[2] = self.inner.tensor(ids);
            let product = self.inner.tensor(product);
            self.inner.add(product);
            check(self.inner.run())?;
            if n > 1 {
                for (i, (_, pair)) in pairs().enumerate() {
                    output_row(pair).copy_from_nonoverlapping(to.add(i * n_out), n_out);
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

/// The router's ids, `[n_tokens][n_used]`: a strided view of the argsort, so strides are honoured.
///
/// # Safety
/// `ids` is a 32-bit integer tensor in host memory and outlives the iterator.
unsafe fn read_ids(ids: &ggml_tensor) -> impl Iterator<Item = i32> + use<> {
    let (data, nb, ne) = (ids.data.cast::<u8>(), ids.nb, ids.ne);
    (0..ne[1] as usize).flat_map(move |token| {
        (0..ne[0] as usize).map(move |rank| {
            // SAFETY: by the caller, and inside the tensor's extent.
            unsafe { data.add(token * nb[1] + rank * nb[0]).cast::<i32>().read_unaligned() }
        })
    })
}

/// A contiguous tensor over `data` that lies in host memory like `neighbour`.
fn plain_tensor(type_: llama::ggml_type, ne: [i64; 4], data: *mut c_void, neighbour: &ggml_tensor) -> ggml_tensor {
    let mut tensor = blank(type_, ne, data, neighbour);
    tensor.nb[0] = size_of::<f32>();
    for d in 1..4 {
        tensor.nb[d] = tensor.nb[d - 1] * ne[d - 1] as usize;
    }
    tensor
}

/// The slots of `view` as the weights of a product, in place of the expert tensor `weights`.
fn view_tensor(weights: &ggml_tensor, view: LayerView, neighbour: &ggml_tensor) -> ggml_tensor {
    let ne = [weights.ne[0], weights.ne[1], i64::from(view.n_slots), 1];
    let mut tensor = blank(weights.type_, ne, view.base.cast(), neighbour);
    tensor.nb = [weights.nb[0], weights.nb[1], view.stride, view.stride * view.n_slots as usize];
    tensor
}

fn blank(type_: llama::ggml_type, ne: [i64; 4], data: *mut c_void, neighbour: &ggml_tensor) -> ggml_tensor {
    // SAFETY: all-zero is a valid `ggml_tensor`: null pointers, empty name, op NONE.
    let mut tensor: ggml_tensor = unsafe { std::mem::zeroed() };
    tensor.type_ = type_;
    tensor.buffer = neighbour.buffer;
    tensor.ne = ne;
    tensor.data = data;
    tensor
}
