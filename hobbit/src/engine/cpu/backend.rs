//! The expert backend: computes the expert products of one split.
//!
//! If every needed slice is resident, the split runs unchanged, with slot numbers instead of expert ids. Otherwise the
//! experts in memory run first, then each other one as it lands: for few tokens from the first product to the last
//! ([`chain`]), for more product by product. All rows of one expert stay together (ggml's tiled kernels choose by their
//! number), so every grouping gives the bits of the whole.

mod chain;
mod groups;
mod kernels;

use std::ffi::{c_int, c_void};

use ggml_sys::llama::{self, ggml_backend_buffer_t, ggml_backend_buffer_type_t, ggml_tensor};

use crate::engine::ggml::graph::{Inner, is_view, n_uses, tensor_at};
use crate::engine::memory::host_reads::{Host, HostReads, ShareView};
use crate::engine::memory::recorder::Recorder;
use crate::engine::memory::tiers::{OtherTiers, TiersView};
use crate::engine::seam::buffer::{table_of, tag_of};
use crate::engine::seam::calling::{self, Purpose, phase};
use crate::engine::seam::experts::ExpertTag;
use crate::engine::seam::layer_router::{self, Abort, Failed, LayerRouter};
use crate::engine::seam::registration::Computes;
use hobbit_core::expert::{SliceId, SliceKind, Version};
use hobbit_core::gguf::ExpertMap;
use hobbit_core::options::{KernelChoice, SessionOptions};
use hobbit_core::residency::{Compute, DeviceResidency, LayerStep, Place, Selection, Split, Used, run_layer};
use hobbit_core::route::{DECODE_TOKENS_MAX, Pair, Routing};

pub(crate) use self::chain::Chain;
use self::kernels::Kernels;
pub(crate) use self::kernels::{ROWS_MIN, may_be_plain, trials};

/// Maximum bytes of gathered rows for one product.
const GATHER_BYTES_MAX: usize = 16 << 20;

/// So many rows of one expert are multiplied at once even if they take more: fewer would be slower.
const ROWS_AT_ONCE_MIN: usize = 512;

/// One context's expert backend.
pub(crate) struct ExpertBackend {
    buft: ggml_backend_buffer_type_t,
    inner: Inner,
    abort: Abort,
    /// The running layer's selection.
    selection: Selection,
    /// Reused: the routing of a product in llama.cpp's memory.
    routing: Routing,
    /// Rows of the view by expert index, `-1` where the expert has none.
    rows: Vec<i32>,
    slot_ids: Vec<i32>,
    /// As `slot_ids`, for the rows of the groups of one run.
    group_ids: Vec<i32>,
    /// The pairs of these rows.
    group_pairs: Vec<Pair>,
    gathered: Vec<f32>,
    products: Vec<f32>,
    kernels: Kernels,
}

impl ExpertBackend {
    /// `None` when ggml refuses the inner backend.
    pub(crate) fn new(buft: ggml_backend_buffer_type_t, choice: KernelChoice) -> Option<Self> {
        Some(Self {
            buft,
            inner: Inner::new()?,
            abort: Abort(None, std::ptr::null_mut()),
            selection: Selection::default(),
            routing: Routing::default(),
            rows: Vec::new(),
            slot_ids: Vec::new(),
            group_ids: Vec::new(),
            group_pairs: Vec::new(),
            gathered: Vec::new(),
            products: Vec::new(),
            kernels: Kernels::new(choice),
        })
    }

    /// As [`tag_of`].
    ///
    /// # Safety
    /// `node` is live.
    unsafe fn product<'a>(&self, node: *mut ggml_tensor) -> Option<&'a ExpertTag> {
        // SAFETY: by the caller; sources of a live node are live.
        unsafe { tag_of(node, self.buft) }
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
            self.inner.reserve()?;
            self.inner.add(node);
        }
        Ok(())
    }

    /// Computes one layer's segment.
    ///
    /// # Safety
    /// As [`ExpertBackend::graph_compute`]; `nodes[0]` is an expert product with tag `tag`.
    unsafe fn layer(
        &mut self,
        tag: &ExpertTag,
        graph: *mut llama::ggml_cgraph,
        nodes: &[*mut ggml_tensor],
    ) -> Result<(), Failed> {
        // SAFETY: a product's sources are live.
        let (ids, n_expert) = unsafe { ((*nodes[0]).src[2], (*(*nodes[0]).src[0]).ne[2] as usize) };
        let mut guard = tag.experts.memories();
        let memories = guard.as_mut().ok_or_else(|| layer_router::failed("no session has set up the expert cache"))?;
        let TiersView { host, routers, unseen, others: devices } = memories.for_cpu();
        // SAFETY: nodes of a live graph.
        let kinds = layer_router::kinds_of(nodes.iter().filter_map(|&node| unsafe { self.product(node) }), unseen);
        // SAFETY: live.
        let [n_used, n_tokens] = unsafe { [(*ids).ne[0] as usize, (*ids).ne[1] as usize] };
        // SAFETY: a node of a live graph.
        unsafe { note_compute_buffer((*nodes[0]).buffer) };
        // The last layer of a batch without logits.
        if n_used == 0 || n_tokens == 0 {
            return Ok(());
        }
        let (key, phase) = (ids as usize, phase());
        let split = Split { layer: tag.layer, n_expert, n_used, kinds: &kinds, key, phase };
        let mut selection = std::mem::take(&mut self.selection);
        // SAFETY: nodes of a live graph, which outlives this call; the router's part was computed by earlier splits
        // into host memory.
        let router = unsafe {
            let wants_input = phase.is_decode() && routers.want_input(host.asks_routers()) || host.may_reroute(phase);
            LayerRouter::of_split(routers, split, nodes, wants_input)
        };
        let mut layer = CpuLayer { backend: self, router, devices, graph, nodes };
        let result = run_layer(&mut layer, host, &mut selection);
        self.selection = selection;
        result
    }

    /// # Safety
    /// As [`ExpertBackend::layer`].
    unsafe fn products(
        &mut self,
        work: &mut Work,
        kinds: &[SliceKind],
        graph: *mut llama::ggml_cgraph,
        nodes: &[*mut ggml_tensor],
    ) -> Result<(), Failed> {
        let (step, routing) = (work.step, &work.selection.routing);
        let layer = step.layer;
        // With one view for all experts, the product can run unchanged.
        let share = step.used.first().map(|used| used.share);
        let one_view = share
            .filter(|&share| step.skipped.is_empty() && step.used.iter().all(|u| u.row.is_some() && u.share == share));
        let ready = |host: &Host, kind: SliceKind| {
            step.used
                .iter()
                .all(|&used| host.memory.locate(SliceId { version: step.version(used), kind }, used) == Place::Cached)
        };
        let all_ready = one_view.is_some() && kinds.iter().all(|&kind| ready(work.host, kind));
        self.slot_ids.clear();
        if one_view.is_some() {
            let rows = step.used.iter().filter_map(|used| Some((used.index, used.row? as i32)));
            routing.remap(rows, work.selection.n_expert, &mut self.rows, &mut self.slot_ids);
        }
        // Also for the few tokens of a prompt that reach the last layer: it changes the order of products, not their
        // bits.
        let mut chain = None;
        if !all_ready && routing.n_tokens <= DECODE_TOKENS_MAX {
            let shape = [routing.n_used, routing.n_tokens];
            // SAFETY: by the caller.
            chain = unsafe {
                let kind_of = |node| self.product(node).map(|tag| tag.kind);
                Chain::of(nodes, shape, kind_of, |node| n_uses(graph, node))
            };
            if chain.is_none() && kinds.len() > 1 {
                work.host.count_in_order();
            }
        }
        if let Some(chain) = &chain {
            // SAFETY: by the caller; the chain is the segment's.
            unsafe { self.chain(work, chain)? };
        }
        for &node in &nodes[chain.map_or(0, |chain| chain.n_nodes)..] {
            // SAFETY: by the caller.
            unsafe {
                match (self.product(node), one_view) {
                    (None, _) => self.plain(node)?,
                    (Some(tag), Some(share))
                        if (all_ready || ready(work.host, tag.kind))
                            && !self.is_plain_faster(
                                &*node,
                                routing,
                                work.host.reads().view(layer, share, tag.kind),
                            ) =>
                    {
                        self.whole(node, routing, work.host.reads().view(layer, share, tag.kind))?;
                    }
                    (Some(tag), _) => {
                        self.inner.run()?;
                        self.by_expert(work, tag.kind, node)?;
                    }
                }
            }
        }
        self.inner.run()
    }

    /// Whether experts have enough rows on average for one product per expert to be faster.
    ///
    /// # Safety
    /// `node` is a live product of ours.
    unsafe fn is_plain_faster(&mut self, node: &ggml_tensor, routing: &Routing, view: ShareView<'_>) -> bool {
        // A trial must not run nodes that were added before.
        routing.ids.len() >= kernels::ROWS_MIN * routing.needed.len()
            && self.inner.run().is_ok()
            // SAFETY: by the caller.
            && routing.ids.len() / routing.needed.len()
                >= unsafe { self.plain_from(node, view) }
    }

    /// Minimum number of rows of one expert for the plain kernels, with weights as in `view`; as
    /// [`Kernels::plain_from`].
    ///
    /// # Safety
    /// As there.
    unsafe fn plain_from(&mut self, node: &ggml_tensor, view: ShareView<'_>) -> usize {
        let type_ = view.type_id as llama::ggml_type;
        // SAFETY: by the caller.
        unsafe { self.kernels.plain_from(&mut self.inner, node, type_, view.interleaving) }
    }

    /// Appends a product whose slices are all in the layer's view.
    ///
    /// # Safety
    /// As [`Inner::add`]; every row in `slot_ids` of the view is ready.
    unsafe fn whole(&mut self, node: *mut ggml_tensor, routing: &Routing, view: ShareView<'_>) -> Result<(), Failed> {
        self.inner.reserve()?;
        // SAFETY: by the caller. The copied node writes where the original would have.
        unsafe {
            let mut product = *node;
            let shape = [routing.n_used as i64, routing.n_tokens as i64, 1, 1];
            let ids = plain_tensor(llama::GGML_TYPE_I32, shape, self.slot_ids.as_mut_ptr().cast(), &product);
            product.src[0] = self.inner.tensor(view_tensor(&*product.src[0], view, &product));
            product.src[2] = self.inner.tensor(ids);
            let product = self.inner.tensor(product);
            self.inner.add(product);
        }
        Ok(())
    }
}

/// A layer on the CPU.
struct CpuLayer<'a> {
    backend: &'a mut ExpertBackend,
    router: LayerRouter<'a>,
    devices: OtherTiers<'a>,
    graph: *mut llama::ggml_cgraph,
    nodes: &'a [*mut ggml_tensor],
}

impl DeviceResidency for CpuLayer<'_> {
    fn has_on_any(&self, version: Version) -> bool {
        self.devices.have(version)
    }

    fn is_uploading(&self, slice: SliceId) -> bool {
        self.devices.read(slice)
    }
}

impl<'a> Compute<HostReads, Recorder> for CpuLayer<'a> {
    type Error = Failed;
    type Router = LayerRouter<'a>;

    fn router(&mut self) -> &mut LayerRouter<'a> {
        &mut self.router
    }

    fn expect(&mut self, host: &Host, selection: &mut Selection) {
        self.router.popularity(host, selection);
    }

    fn products(&mut self, host: &mut Host, selection: &Selection, step: &LayerStep) -> Result<(), Failed> {
        let kinds = self.router.kinds();
        host.memory.wait_for_all(step, kinds);
        let mut work = Work { host, devices: &mut self.devices, selection, step };
        // SAFETY: `ExpertBackend::layer` made this of a live graph's nodes.
        unsafe { self.backend.products(&mut work, kinds, self.graph, self.nodes) }
    }
}

/// A step in progress, for the functions that multiply.
struct Work<'a, 'b> {
    host: &'a mut Host,
    devices: &'a mut OtherTiers<'b>,
    selection: &'a Selection,
    step: &'a LayerStep,
}

impl Work<'_, '_> {
    /// Waits until something lands; if nothing is on its way, has `slice` read.
    fn wait_for(&mut self, slice: SliceId, used: Used) -> Result<(), Failed> {
        if self.host.memory.wait() || self.devices.force_staging(self.host, slice, used) {
            return Ok(());
        }
        Err(layer_router::failed(format!("{slice}: nothing will ever load it")))
    }
}

impl Computes for ExpertBackend {
    /// llama.cpp calls this last before it computes a graph, for every context.
    fn set_n_threads(&mut self, n_threads: c_int) {
        self.inner.set_n_threads(n_threads);
        self.kernels.set_n_threads(n_threads);
        // SAFETY: no arguments; the state is this thread's.
        unsafe { ggml_sys::shim::hobbit_computing() };
    }

    fn set_abort_callback(&mut self, callback: llama::ggml_abort_callback, data: *mut c_void) {
        self.abort = Abort(callback, data);
        self.inner.set_abort_callback(callback, data);
    }

    unsafe fn graph_compute(&mut self, graph: *mut llama::ggml_cgraph) -> Result<(), Failed> {
        // SAFETY: by the caller.
        let mut rest = unsafe { layer_router::nodes_of(graph) };
        // Nodes left by a failed split must not run with this one.
        self.inner.discard();
        while !rest.is_empty() {
            // SAFETY: nodes of a live graph; by the caller.
            unsafe {
                if let Some(tag) = table_of(rest[0], self.buft) {
                    // A graph may have branches that are not taken.
                    if (*rest[0]).flags & llama::GGML_TENSOR_FLAG_COMPUTE as i32 != 0 {
                        tag.experts.tables().get_rows(&*rest[0], tag.table).map_err(layer_router::failed)?;
                    }
                    rest = &rest[1..];
                    continue;
                }
                let until = rest.iter().position(|&node| table_of(node, self.buft).is_some()).unwrap_or(rest.len());
                // A layer's products with the nodes between and after them, or all nodes before the first product.
                let (segment, _) = rest.split_at(layer_router::leading(&rest[..until], |node| self.product(node)));
                let later = &rest[segment.len()..];
                match self.product(segment[0]) {
                    Some(tag) => self.layer(tag, graph, segment)?,
                    None => self.of_llama_cpp(segment)?,
                }
                rest = later;
            }
        }
        Ok(())
    }
}

/// Notes llama.cpp's compute buffer if it is ordinary memory of the CPU.
///
/// # Safety
/// `buffer` is null or live.
unsafe fn note_compute_buffer(buffer: ggml_backend_buffer_t) {
    // SAFETY: by the caller.
    unsafe {
        let is_compute = !buffer.is_null()
            && llama::ggml_backend_buffer_get_usage(buffer) == llama::GGML_BACKEND_BUFFER_USAGE_COMPUTE
            && llama::ggml_backend_buffer_get_type(buffer) == llama::ggml_backend_cpu_buffer_type();
        if is_compute {
            let start = llama::ggml_backend_buffer_get_base(buffer).expose_provenance();
            calling::set_compute_buffer(start..start + llama::ggml_backend_buffer_get_size(buffer));
        }
    }
}

/// The row of a pair in a product's input, `[n_in, n_used or 1, n_tokens]`, or result, `[n_out, n_used, n_tokens]`.
///
/// # Safety
/// `tensor` is allocated and has the pair's token and rank.
unsafe fn row_of(tensor: &ggml_tensor, pair: Pair) -> *mut f32 {
    let rank = (pair.rank % tensor.ne[1] as u32) as usize;
    let offset = pair.token as usize * tensor.nb[2] + rank * tensor.nb[1];
    // SAFETY: by the caller.
    unsafe { tensor.data.cast::<u8>().add(offset).cast() }
}

/// A contiguous tensor over `data` that lies in host memory like `neighbour`.
fn plain_tensor(type_: llama::ggml_type, ne: [i64; 4], data: *mut c_void, neighbour: &ggml_tensor) -> ggml_tensor {
    tensor_at(type_, ne, data.cast(), neighbour.buffer, None)
}

/// The slots of `view` as the weights of a product, in place of the expert tensor `weights`.
fn view_tensor(weights: &ggml_tensor, view: ShareView<'_>, neighbour: &ggml_tensor) -> ggml_tensor {
    let ne = [weights.ne[0], weights.ne[1], i64::from(view.n_slots), 1];
    let mut tensor = plain_tensor(view.type_id as llama::ggml_type, ne, view.base.cast(), neighbour);
    let (block, row) = view.row;
    tensor.nb = [block, row, view.stride, view.stride * view.n_slots as usize];
    if let Some(interleaving) = view.interleaving {
        interleaving.mark(&mut tensor);
    }
    tensor
}

/// Bytes that products need besides the experts: gathered rows, their results, and ggml's quantised copies of the rows.
pub(crate) fn products_bytes(map: &ExpertMap, n_used: u64, options: &SessionOptions) -> u64 {
    let tensors = || map.layers.iter().flat_map(|layer| &layer.tensors);
    let n_in = tensors().map(|tensor| tensor.ne0).max().unwrap_or(0);
    let row = tensors().map(|tensor| (tensor.ne0 + tensor.ne1) * 4).max().unwrap_or(0);
    let n_tokens = u64::from(options.n_ubatch.min(options.n_batch));
    let n_rows = n_tokens.saturating_mul(n_used);
    let at_once = groups::rows_at_once(usize::try_from(row).unwrap_or(usize::MAX)) as u64;
    let gathered = n_rows.min(at_once).saturating_mul(row);
    gathered.saturating_add(n_rows.saturating_mul(n_in) / 4 * 5)
}
