//! The router of a layer, and other parts of a split that are the same on the CPU and on devices.

use std::ffi::{CStr, c_void};
use std::slice;
use std::sync::Arc;

use ggml_sys::llama::{self, GGML_STATUS_ABORTED, GGML_STATUS_FAILED, ggml_status, ggml_tensor};

use crate::engine::memory::gates;
use crate::engine::memory::host_reads::Host;
use crate::engine::memory::recorder::as_recorded;
use crate::engine::memory::tiers::{Routers, Unseen};
use crate::engine::seam::calling;
use crate::engine::seam::experts::{ExpertTag, RouterValues};
use hobbit_core::expert::SliceKind;
use hobbit_core::predict::{Gating, RouterScores};
use hobbit_core::residency::{Later, ScoresByLayer, Selection, Split, WeightsFor};
use hobbit_core::route::{Routing, Weighing};

/// ggml's status of a step that failed.
pub(crate) type Failed = ggml_status;

/// llama.cpp's callback that aborts a batch. llama.cpp keeps callback and data valid as long as the context.
pub(crate) struct Abort(pub(crate) llama::ggml_abort_callback, pub(crate) *mut c_void);

/// The nodes of a graph.
///
/// # Safety
/// The graph is live and outlives the returned slice.
pub(crate) unsafe fn nodes_of<'a>(graph: *mut llama::ggml_cgraph) -> &'a [*mut ggml_tensor] {
    // SAFETY: by the caller.
    match unsafe { llama::ggml_graph_n_nodes(graph) as usize } {
        0 => &[],
        n => unsafe { slice::from_raw_parts(llama::ggml_graph_nodes(graph), n) },
    }
}

/// Number of leading nodes that belong together: those before the first product of another layer, or by other ids.
/// `product`: the expert product that a node is.
///
/// # Safety
/// Nodes of a live graph.
pub(crate) unsafe fn leading<'a>(
    nodes: &[*mut ggml_tensor],
    product: impl Fn(*mut ggml_tensor) -> Option<&'a ExpertTag>,
) -> usize {
    // SAFETY: by the caller; sources of live nodes are live.
    let key = |&node: &*mut ggml_tensor| unsafe {
        product(node).map(|tag| (Arc::as_ptr(&tag.experts), tag.layer, (*node).src[2]))
    };
    let first = key(&nodes[0]);
    let is_other = |node: &_| key(node).is_some_and(|key| Some(key) != first);
    nodes.iter().position(is_other).unwrap_or(nodes.len())
}

/// The input of a layer's router, `[width, n_tokens]`, in host memory: as the router hook shows it, or in the graph
/// ([`gates::input_of`]). A line tells once that it is not known.
///
/// # Safety
/// As [`gates::input_of`].
pub(crate) unsafe fn router_input(
    routers: &mut Routers,
    layer: u16,
    product: *mut ggml_tensor,
    ids: *mut ggml_tensor,
) -> Option<RouterValues> {
    // SAFETY: by the caller; an allocated tensor's buffer is live.
    unsafe {
        let in_graph = || {
            let input = &*gates::input_of(product, ids)?;
            let is_here = !input.buffer.is_null() && llama::ggml_backend_buffer_is_host(input.buffer);
            is_here.then(|| RouterValues::of(input, 0))
        };
        let found = shown_input(layer, ids).or_else(in_graph);
        if found.is_none() {
            routers.misses_input(layer, ids);
        }
        found
    }
}

/// The input of a layer's router, if the router hook has shown it.
///
/// # Safety
/// A live node.
pub(crate) unsafe fn shown_input(layer: u16, ids: *mut ggml_tensor) -> Option<RouterValues> {
    // SAFETY: by the caller.
    calling::router_input(layer).filter(|input| input.n_tokens == unsafe { (*ids).ne[1] } as usize)
}

/// The input of each token; empty if it is not known.
///
/// # Safety
/// The values have been computed in host memory and outlive their use; a token's are contiguous floats.
pub(crate) unsafe fn rows_of<'a>(input: Option<RouterValues>) -> Vec<&'a [f32]> {
    let Some(input) = input else { return Vec::new() };
    // SAFETY: by the caller.
    let row = |token: usize| unsafe { slice::from_raw_parts(input.at::<f32>(token, 0), input.n_used) };
    (0..input.n_tokens).map(row).collect()
}

/// The router's weights if `node` multiplies an expert's input or output by them.
///
/// # Safety
/// `node` is live.
pub(crate) unsafe fn weights_tensor(node: *mut ggml_tensor) -> Option<*mut ggml_tensor> {
    // SAFETY: by the caller; sources of a live node are live.
    unsafe {
        let weighted = |node: *mut ggml_tensor| {
            let name = CStr::from_ptr((*node).name.as_ptr()).to_bytes();
            let shape = (*node).op == llama::GGML_OP_MUL && name.starts_with(b"ffn_moe_weighted-");
            (shape && (*(*node).src[1]).type_ == llama::GGML_TYPE_F32).then(|| (*node).src[1])
        };
        let input = (*node).src[1];
        weighted(node).or_else(|| match (*node).op {
            llama::GGML_OP_MUL_MAT_ID if !input.is_null() => weighted(input),
            _ => None,
        })
    }
}

/// The kinds that products of one layer multiply by, each once. Removes them from `unseen`.
pub(crate) fn kinds_of<'a>(products: impl Iterator<Item = &'a ExpertTag>, unseen: &mut Unseen) -> Vec<SliceKind> {
    let mut kinds: Vec<SliceKind> = Vec::with_capacity(SliceKind::COUNT);
    for product in products {
        unseen.remove(&(product.layer, product.kind));
        if !kinds.contains(&product.kind) {
            kinds.push(product.kind);
        }
    }
    kinds
}

/// A layer's router as the graph of a split shows it. Its ids and weights are in host memory, by themselves or as
/// copies.
pub(crate) struct LayerRouter<'a> {
    routers: &'a mut Routers,
    split: Split<'a>,
    /// The layer's first product.
    product: *mut ggml_tensor,
    ids: RouterValues,
    weights: Option<RouterValues>,
    /// The router's input by token; empty if it is not known, or not needed.
    inputs: Vec<&'a [f32]>,
    /// The router's logits, `[n_tokens][n_expert]`, with its bias, if they need not be computed again.
    logits: Option<&'a [f32]>,
    /// The place that was searched for the weights, for messages.
    scope: &'static str,
}

impl<'a> LayerRouter<'a> {
    /// The router of a split in host memory. Its weights are beside the products `nodes`, or were seen by the hook.
    /// `wants_input`: the router's input is needed.
    ///
    /// # Safety
    /// As [`LayerRouter::new`]; `nodes[0]` is the layer's first product.
    pub(crate) unsafe fn of_split(
        routers: &'a mut Routers,
        split: Split<'a>,
        nodes: &[*mut ggml_tensor],
        wants_input: bool,
    ) -> Self {
        // SAFETY: by the caller; sources of a live node are live.
        unsafe {
            let ids = (*nodes[0]).src[2];
            let beside = |&node: &*mut ggml_tensor| weights_tensor(node).map(|weights| RouterValues::of(&*weights, 1));
            let weights = nodes.iter().find_map(beside).or_else(|| calling::router_weights(split.layer));
            let input = if wants_input { router_input(routers, split.layer, nodes[0], ids) } else { None };
            Self::new(routers, split, nodes[0], [Some(RouterValues::of(&*ids, 0)), weights], rows_of(input), "")
        }
    }

    /// # Safety
    /// While this lives, the product, the nodes of `ids` and `weights` and their values are live, and computed already.
    pub(crate) unsafe fn new(
        routers: &'a mut Routers,
        split: Split<'a>,
        product: *mut ggml_tensor,
        [ids, weights]: [Option<RouterValues>; 2],
        inputs: Vec<&'a [f32]>,
        scope: &'static str,
    ) -> Self {
        let ids = ids.expect("a product has ids");
        Self { routers, split, product, ids, weights, inputs, logits: None, scope }
    }

    /// Adds the logits of [`gates::intact_logits`].
    pub(crate) fn with_logits(self, logits: Option<&'a [f32]>) -> Self {
        Self { logits, ..self }
    }

    /// The kinds of the split, in the order of its products.
    pub(crate) fn kinds(&self) -> &'a [SliceKind] {
        self.split.kinds
    }

    /// As [`Routers::popularity`].
    pub(crate) fn popularity(&mut self, host: &Host, selection: &mut Selection) {
        if !self.routers.ask_ahead(host.asks_routers()) {
            return;
        }
        let Split { layer, n_expert, .. } = self.split;
        // SAFETY: by `new`; sources of a live node are live.
        unsafe {
            let rows = rows_of(router_input(self.routers, layer, self.product, self.ids.tensor()));
            self.routers.popularity(host, layer, self.ids.tensor(), &rows, n_expert, &mut selection.expected);
        }
    }

    /// Whether the layer's router is known, and how weights are made. The router is learned, which copies its weights,
    /// only when this is first asked.
    fn understand(&mut self) -> (bool, Weighing) {
        let Split { layer, n_expert, .. } = self.split;
        let (gates, ids) = (&mut self.routers.gates, self.ids.tensor());
        let weights = self.weights.map(|weights| weights.tensor());
        // SAFETY: by `new`.
        let normalises = weights.and_then(|weights| unsafe { gates::normalises(weights, ids) });
        // SAFETY: by `new`.
        let is_known = gates.knows(layer) || unsafe { gates::learn(gates, layer, ids, n_expert) };
        let weighing = match (normalises, gates.gating(layer)) {
            (Some(true), _) => Weighing::Normalised,
            (_, Some(Gating::Softmax)) => Weighing::OfAll,
            _ => Weighing::Each,
        };
        (is_known && normalises.is_some(), weighing)
    }

    /// The router's weights, if they have the shape of its choice.
    fn weights_like(&self, routing: &Routing) -> Option<RouterValues> {
        self.weights.filter(|own| (own.n_used, own.n_tokens) == (routing.n_used, routing.n_tokens))
    }
}

impl hobbit_core::residency::Router for LayerRouter<'_> {
    type Error = Failed;

    /// # Errors
    /// An id that is no expert, or a route without the router's weights; this is reported.
    fn select(&mut self, selection: &mut Selection) -> Result<Option<Vec<f32>>, Failed> {
        let Split { layer, n_expert, .. } = self.split;
        // SAFETY: by `new`.
        selection
            .set(&self.split, unsafe { self.ids.read() })
            .map_err(|id| failed(format!("layer {layer}: the router chose expert {id} of {n_expert}")))?;
        if self.routers.walk.is_none() || selection.is_later_split() {
            return Ok(None);
        }
        let routing = &mut selection.routing;
        let Some(weights) = self.weights_like(routing) else {
            return Err(failed(format!(
                "layer {layer}: this architecture's router weights were not found, and recorded routes need them"
            )));
        };
        // SAFETY: by `new`.
        let mut weights: Vec<f32> = unsafe { weights.read() }.collect();
        let mut ids = routing.ids.clone();
        let (n_used, n_tokens) = (routing.n_used, routing.n_tokens);
        let routes = self.routers.walk.as_mut().map(|walk| walk.enter(layer, n_tokens)).unwrap_or_default();
        // A route has as many ranks as the model's tokens, which was checked when it was read.
        for (token, (experts, fractions)) in routes.into_iter().enumerate() {
            for (at, (expert, weight)) in (token * n_used..).zip(experts.into_iter().zip(fractions)) {
                (ids[at], weights[at]) = (expert, weight);
            }
        }
        let followed = routing.set(ids.into_iter().map(i32::from), n_used, n_expert);
        followed.map(|()| Some(weights)).map_err(|_| GGML_STATUS_FAILED)
    }

    fn write(&mut self, new_ids: Option<&[u16]>, new_weights: &[f32]) {
        let n_used = self.ids.n_used.max(1);
        let places = (0..new_weights.len()).map(|position| (position / n_used, position % n_used));
        for (position, (token, rank)) in places.enumerate() {
            // SAFETY: by `new`: as many values as were read.
            unsafe {
                if let Some(ids) = new_ids {
                    self.ids.at::<i32>(token, rank).write_unaligned(ids[position].into());
                }
                if let Some(weights) = &self.weights {
                    weights.at::<f32>(token, rank).write_unaligned(new_weights[position]);
                }
            }
        }
    }

    /// [`Routers::scores`] of a batch that decodes. A device's logits may differ from those computed here in the last
    /// bits.
    fn scores(&mut self, selection: &Selection, asks_ahead: bool) -> Vec<f32> {
        if !selection.is_new_decode() {
            return Vec::new();
        }
        let Split { layer, n_expert, .. } = self.split;
        let (gates, ids) = (&mut self.routers.gates, self.ids.tensor());
        match self.logits {
            // SAFETY: by `new`.
            Some(logits) if gates.knows(layer) || unsafe { gates::learn(gates, layer, ids, n_expert) } => {
                let mut scores = gates.scores_of_logits(layer, logits);
                as_recorded(&mut scores);
                scores
            }
            // SAFETY: by `new`.
            _ => unsafe { self.routers.scores(asks_ahead, layer, ids, &self.inputs, n_expert) },
        }
    }

    fn weights(&mut self, selection: &Selection, purpose: WeightsFor) -> Result<Vec<f32>, Failed> {
        let (found, use_) = match purpose {
            WeightsFor::Rerouting => (self.weights, "sending tokens to other experts"),
            WeightsFor::Demands => (self.weights_like(&selection.routing), "dynamic precision"),
        };
        match found {
            // SAFETY: by `new`.
            Some(weights) => Ok(unsafe { weights.read() }.collect()),
            None => Err(failed(format!(
                "layer {}: this architecture's router weights were not found{}, and {use_} needs them",
                self.split.layer, self.scope
            ))),
        }
    }

    fn inputs(&self) -> Vec<&[f32]> {
        self.inputs.clone()
    }

    fn weighing(&mut self, _: &Selection) -> Weighing {
        self.understand().1
    }

    fn unmasked_scores(&mut self, selection: &Selection) -> Option<Vec<RouterScores>> {
        let (layer, n_tokens) = (self.split.layer, selection.routing.n_tokens);
        // SAFETY: by `new`.
        if unsafe { gates::is_by_token(self.ids.tensor()) } {
            return None;
        }
        if !self.understand().0 || self.inputs.len() != n_tokens {
            return Some(Vec::new());
        }
        let mut scores = vec![RouterScores::default(); n_tokens];
        let mut judged = self.inputs.iter().zip(&mut scores);
        let is_judged = judged.all(|(input, scores)| self.routers.gates.judge(input, layer, scores));
        Some(if is_judged { scores } else { Vec::new() })
    }

    fn later_scores(&mut self, later: &[Later]) -> Vec<ScoresByLayer> {
        let layers: Vec<u16> = later.iter().map(|(_, layer)| *layer).collect();
        self.routers.of_later(&layers, &self.inputs)
    }
}

/// Records why the batch fails, for the session. Returns ggml's status.
pub(crate) fn failed(reason: impl Into<String>) -> Failed {
    calling::fail(reason);
    GGML_STATUS_FAILED
}

/// Handles reads that have completed.
///
/// # Errors
/// A read has failed, which is reported, or llama.cpp aborts the batch.
pub(crate) fn poll(host: &mut Host, Abort(callback, data): &Abort) -> Result<(), Failed> {
    host.memory.poll();
    if let Some(error) = host.memory.take_failure() {
        return Err(failed(error.to_string()));
    }
    // SAFETY: callback and data are valid.
    match callback.is_some_and(|callback| unsafe { callback(*data) }) {
        true => Err(GGML_STATUS_ABORTED),
        false => Ok(()),
    }
}
