//! One graph on a device: what is not ours is passed on, the products of experts are computed from device slots.
//!
//! A layer's *region* is its expert products with the nodes between them. The host waits once per region, for the
//! router's choice; everything else is submitted and ordered by events. Experts that are on the device are multiplied
//! while the others are being copied; each of these follows as its upload is submitted.

mod help;
mod place;
mod router;

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

use super::Wrapper;
use super::failure;
use super::graph::Graph;
use super::helper::{Helper, Region};
use super::launch::{Foreseen, Launch, Product};
use super::stream::Stream;
use super::tier::{Tier, Weights};
use super::uploads::Uploads;
use crate::cache::SlotId;
use crate::engine::buffer::tag_of;
use crate::engine::compute::{read_ids, router_input_tensor, weights_tensor};
use crate::engine::experts::{ExpertTag, Experts, RouterWeights};
use crate::engine::residency::{Need, Residency, Step, Used};
use crate::expert::{Precision, SliceId, SliceKind};
use crate::load::balance::Miss;
use crate::route::Demand;
use crate::routing::{Pair, Routing};

use self::help::Help;
use self::place::{Wanted, by_place, pin_present, take_located};

/// One context's backend on one device.
pub(super) struct Offload {
    wrapper: &'static Wrapper,
    compute: Stream,
    launch: Launch,
    abort: (llama::ggml_abort_callback, *mut c_void),
    routing: Routing,
    /// The router's choice and weights as they lie on the device.
    ids: Vec<u8>,
    weight_bytes: Vec<u8>,
    /// What the router saw of a single token, `[n_embd]`; empty where nobody wants to know.
    input: Vec<f32>,
    /// The weights, `[n_tokens][n_used]`; empty in exact mode.
    weights: Vec<f32>,
    /// The same of a single token in exact mode, as far as somebody wanted to know.
    known: Vec<f32>,
    /// By expert index.
    demands: Vec<Demand>,
    decided: Decided,
    helper: Option<Helper>,
    n_threads: c_int,
    /// Of the context's model, once a layer has been computed.
    experts: Option<Arc<Experts>>,
    /// Products that have weights of their layer's slots for now, and what these replace.
    borrowed: Vec<(*mut ggml_tensor, *mut ggml_tensor)>,
}

/// The layer whose demands stand, and what of it has been multiplied.
#[derive(Default)]
struct Decided {
    key: (u16, usize),
    kinds: Vec<SliceKind>,
    /// Its choices, by expert index.
    choices: Vec<Option<Precision>>,
}

/// A step that did not succeed: ggml's status for it.
pub(super) type Failed = ggml_status;

/// What the device multiplies of a step.
struct Part<'a> {
    step: &'a Step,
    used: Vec<Used>,
    /// Those that come one by one, with their rows.
    coming: Vec<(Used, u32)>,
}

/// Products that depend on none of each other, and the nodes after them.
struct Stage {
    products: Vec<(*mut ggml_tensor, SliceKind)>,
    plain: Vec<*mut ggml_tensor>,
}

impl Offload {
    /// `None` when ggml refuses a graph.
    pub(super) fn new(wrapper: &'static Wrapper, compute: Stream) -> Option<Self> {
        Some(Self {
            wrapper,
            launch: Launch::new(Graph::new()?, wrapper.inner()),
            compute,
            abort: (None, std::ptr::null_mut()),
            routing: Routing::default(),
            ids: Vec::new(),
            weight_bytes: Vec::new(),
            input: Vec::new(),
            weights: Vec::new(),
            known: Vec::new(),
            demands: Vec::new(),
            decided: Decided::default(),
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

    /// Gives products of layers that are on the device as a whole the weights there, until
    /// [`Offload::return_complete`]: they are nodes like any other then.
    ///
    /// # Safety
    /// Nodes of a live graph.
    unsafe fn borrow_complete(&mut self, nodes: &[*mut ggml_tensor]) {
        // SAFETY: by the caller.
        let mut products = nodes.iter().filter_map(|&node| unsafe { Some((node, self.product(node)?)) }).peekable();
        let Some((_, first)) = products.peek() else { return };
        let experts = Arc::clone(&first.experts);
        let mut guard = experts.residency();
        let Some(residency) = guard.as_mut() else { return };
        residency.catch_up();
        let mut borrowed = Vec::new();
        for (node, tag) in products {
            let tier = residency.tier(self.wrapper.inner());
            if let Some(weights) = tier.and_then(|tier| tier.complete(tag.layer, tag.kind)) {
                residency.mark_seen(tag.layer, tag.kind);
                // SAFETY: by the caller.
                unsafe {
                    borrowed.push((node, (*node).src[0]));
                    (*node).src[0] = weights;
                }
            }
        }
        if let Some(tier) = residency.tier(self.wrapper.inner()).filter(|_| !borrowed.is_empty()) {
            tier.lend(&self.compute);
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
        let mut guard = self.experts.as_ref().map(|experts| experts.residency());
        let residency = guard.as_mut().and_then(|guard| guard.as_mut());
        if let Some(tier) = residency.and_then(|residency| residency.tier(self.wrapper.inner())) {
            tier.returned(&self.compute);
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

    /// Frees device memory of slots, between two regions. Whether there was some to free.
    ///
    /// # Safety
    /// The graph that is being computed is live.
    unsafe fn relieve(&mut self) -> bool {
        // SAFETY: by the caller.
        unsafe { self.return_complete() };
        let Some(experts) = &self.experts else { return false };
        let mut guard = experts.residency();
        let Some(residency) = guard.as_mut() else { return false };
        let Some((place, mut tier)) = residency.take_tier(self.wrapper.inner()) else { return false };
        self.compute.synchronize();
        tier.enter(&self.compute, None);
        give_back(residency, &mut tier);
        let freed = tier.shrink(&self.compute, 0);
        tier.leave(&self.compute);
        residency.put_tier(place, tier);
        freed > 0
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
        let mut guard = experts.residency();
        let taken = guard.as_mut().and_then(|residency| residency.take_tier(self.wrapper.inner()));
        let (Some(residency), Some((place, mut tier))) = (guard.as_mut(), taken) else {
            experts.fail(format!("no session has set up the expert cache of {}", self.wrapper.name()));
            return Err(GGML_STATUS_FAILED);
        };
        if self.experts.is_none() {
            self.experts = Some(Arc::clone(&tag.experts));
        }
        // SAFETY: by the caller.
        let result =
            catch_unwind(AssertUnwindSafe(|| unsafe { self.layer_on(tag, residency, &mut tier, nodes, rest) }));
        if !matches!(result, Ok(Ok(()))) {
            // Nothing may go on reading what is about to be given back.
            self.compute.synchronize();
            tier.abandon();
            give_back(residency, &mut tier);
        }
        tier.busy = None;
        residency.put_tier(place, tier);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// # Safety
    /// As [`Offload::layer`].
    unsafe fn layer_on(
        &mut self,
        tag: &ExpertTag,
        residency: &mut Residency,
        tier: &mut Tier,
        nodes: &[*mut ggml_tensor],
        rest: &[*mut ggml_tensor],
    ) -> Result<(), Failed> {
        let experts = &*tag.experts;
        // SAFETY: a product's sources are live.
        let (ids, n_expert) = unsafe { (&*(*nodes[0]).src[2], (*(*nodes[0]).src[0]).ne[2] as usize) };
        let mut kinds: Vec<SliceKind> = Vec::with_capacity(SliceKind::COUNT);
        // SAFETY: nodes of a live graph.
        for product in nodes.iter().filter_map(|&node| unsafe { self.product(node) }) {
            residency.mark_seen(tag.layer, product.kind);
            if !kinds.contains(&product.kind) {
                kinds.push(product.kind);
            }
        }
        // The last layer of a batch that wants no logits.
        if ids.ne[0] == 0 || ids.ne[1] == 0 {
            return Ok(());
        }
        let exact = residency.precisions.is_exact();
        // SAFETY: nodes of a live graph.
        let weights = unsafe { nodes.iter().chain(rest).find_map(|&node| weights_tensor(node)) }.filter(|_| !exact);
        let single = ids.ne[1] == 1;
        // SAFETY: nodes of a live graph.
        let input = if single && residency.wants_input() { unsafe { router_input_tensor(nodes[0]) } } else { None };
        // SAFETY: by the caller: all are allocated on the device.
        unsafe { self.read_back(ids, weights, input) };
        tier.enter(&self.compute, Some(tag.layer));
        let (pins, staged) = tier.settled_so_far();
        take_back(residency, pins, staged);
        if single {
            tier.chose(tag.layer, residency.counters().wait_seconds);
        }

        let mut host_ids = *ids;
        host_ids.data = self.ids.as_mut_ptr().cast();
        // SAFETY: read back just now, with the device's strides.
        let choice = unsafe { read_ids(&host_ids) };
        if let Err(id) = self.routing.set(choice, ids.ne[0] as usize, n_expert) {
            experts.fail(format!("layer {}: the router chose expert {id} of {n_expert}", tag.layer));
            return Err(GGML_STATUS_FAILED);
        }
        let key = (tag.layer, std::ptr::from_ref(ids) as usize);
        let again = self.decided.key == key && kinds.iter().all(|kind| !self.decided.kinds.contains(kind));
        if again {
            self.decided.kinds.extend_from_slice(&kinds);
        } else {
            self.decided = Decided { key, kinds: kinds.clone(), choices: Vec::new() };
            // SAFETY: read back just now.
            unsafe { self.decide(experts, residency, tag.layer, n_expert, weights)? };
        }
        self.known.clear();
        let exact = self.weights.is_empty();
        if !again {
            // SAFETY: sources of a live node are live, and were computed before.
            let scores = unsafe { self.tell_scores(residency, tier, tag.layer, (*nodes[0]).src[2], n_expert) };
            residency.record(tag.layer, &self.routing, self.router_weights(), scores.as_deref());
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
            elsewhere: &|version| tier.has(version, &kinds),
        });
        self.decided.choices = std::mem::take(&mut step.choices);
        if let Some(weights) = weights.filter(|_| !step.skipped.is_empty() && !again) {
            // SAFETY: the weights are on the device until the ubatch is done.
            unsafe { self.leave_out(&step.skipped, residency, weights) };
        }
        // SAFETY: by the caller.
        let result = unsafe { self.products(experts, residency, tier, &step, &kinds, nodes, again) };
        // Uploads may still be reading these.
        tier.hold(residency.finish(step));
        tier.leave(&self.compute);
        result
    }

    /// # Safety
    /// As [`Offload::layer`].
    #[allow(clippy::too_many_arguments)]
    unsafe fn products(
        &mut self,
        experts: &Experts,
        residency: &mut Residency,
        tier: &mut Tier,
        step: &Step,
        kinds: &[SliceKind],
        nodes: &[*mut ggml_tensor],
        again: bool,
    ) -> Result<(), Failed> {
        let missing = pin_present(tier, step, kinds, again, |expert| self.routing.share(expert, self.router_weights()));
        let kinds_of: Vec<Option<SliceKind>> =
            // SAFETY: nodes of a live graph.
            nodes.iter().map(|&node| unsafe { self.product(node) }.map(|tag| tag.kind)).collect();
        // SAFETY: by the caller.
        let mut help = unsafe { self.divide(residency, tier, step, &missing, Region { nodes, kinds: &kinds_of }) };
        let is_helped = |used: &Used| help.as_ref().is_some_and(|help| help.experts.contains(used));
        let copied: Vec<Used> = missing.into_iter().filter(|used| !is_helped(used)).collect();
        let used: Vec<Used> = step.used.iter().copied().filter(|used| !is_helped(used)).collect();
        for &used in &copied {
            tier.acquire(step.version(used), residency.kinds(step.layer));
        }
        // SAFETY: nodes of a live graph.
        let products: Vec<*mut ggml_tensor> =
            unsafe { nodes.iter().copied().filter(|&node| self.product(node).is_some()).collect() };
        let (present, coming) = by_place(tier, step, kinds, &used, &copied);
        // Rows of experts that are left out are zero.
        let skipped: Vec<Pair> =
            step.skipped.iter().flat_map(|&index| self.routing.pairs_of(index).iter().copied()).collect();
        let foreseen = Foreseen { products: &products, present: &present, coming: &coming, skipped: &skipped };
        // SAFETY: by the caller.
        unsafe { self.launch.prepare(&self.compute, tier, &self.routing, &foreseen)? };
        let mut uploads = Uploads::new(step, kinds, &copied);
        // SAFETY: the host slots of the step are pinned until the uploads have run: `Tier::hold`.
        unsafe { uploads.pump(residency, tier) };
        tier.measure_link();
        let part = Part { step, used, coming };
        // SAFETY: nodes of a live graph.
        for stage in unsafe { self.stages(nodes) } {
            // SAFETY: by the caller.
            unsafe {
                for &(node, _) in &stage.products {
                    self.launch.zero(&self.compute, tier, &self.routing, node, &skipped)?;
                }
                self.stage(experts, residency, tier, &part, &stage, &mut uploads, &mut help)?;
                for &node in &stage.plain {
                    self.launch.plain(&self.compute, tier, node)?;
                }
            }
        }
        self.launch.submit(&self.compute, tier)?;
        if self.routing.n_tokens == 1 && !again {
            self.look_ahead(residency, tier, step);
        }
        // SAFETY: by the caller.
        unsafe { self.finish_help(residency, tier, step, &mut help, &mut uploads)? };
        Ok(())
    }

    /// Divides a region into stages.
    ///
    /// # Safety
    /// Nodes of a live graph.
    unsafe fn stages(&self, nodes: &[*mut ggml_tensor]) -> Vec<Stage> {
        let mut stages: Vec<Stage> = Vec::new();
        for &node in nodes {
            // SAFETY: by the caller.
            let product = unsafe { self.product(node) };
            match (product, stages.last_mut()) {
                (Some(tag), Some(stage)) => {
                    // SAFETY: sources of a live node are live.
                    let inputs = unsafe {
                        let input = (*node).src[1];
                        [input, (*input).view_src]
                    };
                    let mut earlier = stage.products.iter().map(|(node, _)| *node).chain(stage.plain.iter().copied());
                    match earlier.any(|earlier| inputs.contains(&earlier)) {
                        false => stage.products.push((node, tag.kind)),
                        true => stages.push(Stage { products: vec![(node, tag.kind)], plain: Vec::new() }),
                    }
                }
                (Some(tag), None) => stages.push(Stage { products: vec![(node, tag.kind)], plain: Vec::new() }),
                (None, Some(stage)) => stage.plain.push(node),
                (None, None) => unreachable!("a region starts with a product"),
            }
        }
        stages
    }

    /// Computes the products of a stage, those of present experts first.
    ///
    /// # Safety
    /// As [`Offload::layer`]; what the products depend on has been submitted.
    #[allow(clippy::too_many_arguments)]
    unsafe fn stage(
        &mut self,
        experts: &Experts,
        residency: &mut Residency,
        tier: &mut Tier,
        part: &Part,
        stage: &Stage,
        uploads: &mut Uploads,
        help: &mut Option<Help>,
    ) -> Result<(), Failed> {
        let step = part.step;
        let mut pending: Vec<Wanted> = Vec::new();
        for &(node, kind) in &stage.products {
            pending.extend(part.used.iter().map(|&used| {
                let slice = SliceId { version: step.version(used), kind };
                Wanted { node, used, slice }
            }));
        }
        loop {
            let here = take_located(&mut pending, residency, tier);
            // As their indices were uploaded.
            let is_coming = |index: u16| !tier.is_unified() && part.coming.iter().any(|(used, _)| used.index == index);
            let (arriving, here): (Vec<Product>, Vec<Product>) =
                here.into_iter().partition(|product| is_coming(product.used.index));
            let progress = !here.is_empty() || !arriving.is_empty();
            if !here.is_empty() {
                // SAFETY: by the caller.
                unsafe { self.launch.products(&self.compute, &self.routing, tier, &here)? };
            }
            for product in arriving {
                if tier.is_arriving(product.slice) {
                    // What has been built waits for nothing that is still coming.
                    self.launch.submit(&self.compute, tier)?;
                }
                tier.wait_for(&self.compute, product.slice);
                // SAFETY: by the caller.
                unsafe { self.launch.products(&self.compute, &self.routing, tier, &[product])? };
            }
            if pending.is_empty() {
                return Ok(());
            }
            // What waits for the host does not keep the device from what is there.
            self.launch.submit(&self.compute, tier)?;
            residency.poll();
            if let Some(error) = residency.take_failure() {
                experts.fail(error.to_string());
                return Err(GGML_STATUS_FAILED);
            }
            if self.should_abort() {
                return Err(GGML_STATUS_ABORTED);
            }
            // SAFETY: as above.
            if unsafe { uploads.pump(residency, tier) } || progress {
                continue;
            }
            // What has landed just now is no longer on its way.
            if pending.iter().any(|wanted| wanted.locate(residency, tier).is_some()) {
                continue;
            }
            // SAFETY: by the caller.
            if let Some(help) = help
                && unsafe { self.help_once(residency, step, help)? }
            {
                continue;
            }
            let product = pending[0];
            if residency.wait() {
                continue;
            }
            let released = tier.wait_for_host_staging();
            if !released.is_empty() {
                released.into_iter().for_each(|slice| residency.release(slice));
                continue;
            }
            if !residency.insist(product.slice, product.used) {
                experts.fail(format!("{}: nothing will ever load it", product.slice));
                return Err(GGML_STATUS_FAILED);
            }
        }
    }

    fn should_abort(&self) -> bool {
        let (callback, data) = self.abort;
        // SAFETY: llama.cpp keeps callback and data valid as long as the context.
        callback.is_some_and(|callback| unsafe { callback(data) })
    }
}

/// The stream has been waited for: the host gets back what uploads were reading.
fn give_back(residency: &mut Residency, tier: &mut Tier) {
    let (pins, staged) = tier.settled();
    take_back(residency, pins, staged);
}

fn take_back(residency: &mut Residency, pins: Vec<SlotId>, staged: Vec<SliceId>) {
    residency.unpin(pins);
    staged.into_iter().for_each(|slice| residency.release(slice));
}
