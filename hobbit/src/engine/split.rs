//! Steps that every split of a layer goes through, wherever its products are computed.

use std::ffi::c_void;
use std::slice;

use ggml_sys::llama::{self, GGML_STATUS_ABORTED, GGML_STATUS_FAILED, ggml_status, ggml_tensor};

use super::experts::{ExpertTag, Experts, RouterValues};
use super::hierarchy::{Routers, Unseen};
use super::host_reads::Host;
use hobbit_core::expert::SliceKind;
use hobbit_core::predict::{Gating, RouterScores};
use hobbit_core::residency::{Chosen, Elsewhere, RouterSays, Split};
use hobbit_core::route::{TokenScores, Weighing};
use hobbit_core::trace::Walk;

/// ggml's status of a step that failed.
pub(super) type Failed = ggml_status;

/// llama.cpp's callback that aborts a batch. llama.cpp keeps callback and data valid as long as the context.
pub(super) struct Abort(pub(super) llama::ggml_abort_callback, pub(super) *mut c_void);

/// The nodes of a graph.
///
/// # Safety
/// The graph is live and outlives the returned slice.
pub(super) unsafe fn nodes_of<'a>(graph: *mut llama::ggml_cgraph) -> &'a [*mut ggml_tensor] {
    // SAFETY: by the caller.
    match unsafe { llama::ggml_graph_n_nodes(graph) as usize } {
        0 => &[],
        n => unsafe { slice::from_raw_parts(llama::ggml_graph_nodes(graph), n) },
    }
}

/// The kinds that products of one layer multiply by, each once. Removes them from `unseen`.
pub(super) fn kinds_of<'a>(products: impl Iterator<Item = &'a ExpertTag>, unseen: &mut Unseen) -> Vec<SliceKind> {
    let mut kinds: Vec<SliceKind> = Vec::with_capacity(SliceKind::COUNT);
    for product in products {
        unseen.remove(&(product.layer, product.kind));
        if !kinds.contains(&product.kind) {
            kinds.push(product.kind);
        }
    }
    kinds
}

/// As [`Chosen::set`]; reports an id that is no expert.
pub(super) fn choose(
    chosen: &mut Chosen,
    experts: &Experts,
    split: &Split,
    ids: impl Iterator<Item = i32>,
) -> Result<(), Failed> {
    chosen.set(split, ids).map_err(|id| {
        experts.fail(format!("layer {}: the router chose expert {id} of {}", split.layer, split.n_expert));
        GGML_STATUS_FAILED
    })
}

/// Asks for a precision for each expert of the layer; returns the router's weights unless the mode is exact. `scope`:
/// the place that was searched for them, for the message.
///
/// # Safety
/// The weights can be read.
pub(super) unsafe fn ask(
    chosen: &mut Chosen,
    experts: &Experts,
    host: &mut Host,
    weights: impl FnOnce() -> Option<RouterValues>,
    scope: &str,
) -> Result<Option<RouterValues>, Failed> {
    if !host.precisions.asks_weights(chosen.phase()) {
        chosen.ask(&mut host.precisions, []);
        return Ok(None);
    }
    let (layer, routing) = (chosen.layer(), &chosen.routing);
    let Some(weights) = weights().filter(|w| (w.n_used, w.n_tokens) == (routing.n_used, routing.n_tokens)) else {
        experts.fail(format!(
            "layer {layer}: this architecture's router weights were not found{scope}, which dynamic precision needs; \
             use --precision exact, and no --drop"
        ));
        return Err(GGML_STATUS_FAILED);
    };
    // SAFETY: by the caller.
    chosen.ask(&mut host.precisions, unsafe { weights.read() });
    Ok(Some(weights))
}

/// Sends the layer's tokens along recorded routes: overwrites the router's `ids` and `weights`.
///
/// # Errors
/// The weights were not found; this is reported.
///
/// # Safety
/// Ids and weights can be read and written.
pub(super) unsafe fn follow(
    chosen: &mut Chosen,
    experts: &Experts,
    walk: &mut Walk,
    ids: RouterValues,
    weights: Option<RouterValues>,
) -> Result<(), Failed> {
    let (layer, size) = (chosen.layer(), (ids.n_used, ids.n_tokens));
    let Some(weights) = weights.filter(|weights| (weights.n_used, weights.n_tokens) == size) else {
        experts.fail(format!(
            "layer {layer}: this architecture's router weights were not found; recorded routes cannot be followed"
        ));
        return Err(GGML_STATUS_FAILED);
    };
    for (token, (experts, shares)) in walk.enter(layer, ids.n_tokens).into_iter().enumerate() {
        for (rank, (expert, weight)) in experts.into_iter().zip(shares).enumerate() {
            // SAFETY: by the caller: a route has as many ranks as the model's tokens, which was checked when it was
            // read.
            unsafe {
                ids.at::<i32>(token, rank).write_unaligned(expert.into());
                weights.at::<f32>(token, rank).write_unaligned(weight);
            }
        }
    }
    // SAFETY: by the caller.
    let followed = chosen.routing.set(unsafe { ids.read() }, ids.n_used, chosen.n_expert);
    followed.map_err(|_| GGML_STATUS_FAILED)
}

/// Reports that a layer's router weights were not found; `scope`: the place that was searched.
///
/// # Errors
/// Always.
pub(super) fn no_weights<T>(experts: &Experts, layer: u16, scope: &str) -> Result<T, Failed> {
    experts.fail(format!(
        "layer {layer}: this architecture's router weights were not found{scope}; tokens cannot be sent to other experts: \
         leave out --cache-bias, --substitute and --virtual-experts"
    ));
    Err(GGML_STATUS_FAILED)
}

/// The parts of a layer's router that rerouting needs.
pub(super) struct Router<'a> {
    /// The layer's first product.
    pub(super) product: *mut ggml_tensor,
    /// The node of the choice.
    pub(super) ids: *mut ggml_tensor,
    /// The node of the weights.
    pub(super) weights: *mut ggml_tensor,
    /// The values of both, in host memory.
    pub(super) values: [RouterValues; 2],
    /// The router's input, `[n_tokens][width]`; `None` if it is not known.
    pub(super) input: Option<&'a [f32]>,
}

/// Reroutes the layer's tokens to resident experts, as far as the user allows. Overwrites the router's `ids` and
/// `weights`, because biases and scales of experts read them too. Returns whether anything was written.
///
/// # Safety
/// The nodes are live and computed; their values can be read and written.
pub(super) unsafe fn reroute(
    chosen: &mut Chosen,
    host: &mut Host,
    routers: &mut Routers,
    elsewhere: &Elsewhere,
    router: &Router,
) -> bool {
    let (layer, n_expert, n_tokens) = (chosen.layer(), chosen.n_expert, chosen.routing.n_tokens);
    let [ids, values] = router.values;
    // SAFETY: by the caller.
    let read = || -> Vec<f32> { unsafe { values.read() }.collect() };
    let heard = host.has_virtual_experts().then(read);
    if let Some(heard) = &heard {
        chosen.heard(heard, router.input);
    }
    // Usually every expert is resident and no scores are needed. The router is learned, which copies its weights, only
    // when it is first needed.
    let gates = &mut routers.gates;
    let mut understood = None;
    let mut understand = || {
        *understood.get_or_insert_with(|| {
            // SAFETY: by the caller.
            let normalises = unsafe { super::gates::normalises(router.weights, router.ids) };
            // SAFETY: by the caller.
            let is_known = gates.knows(layer) || unsafe { super::gates::learn(gates, layer, router.ids, n_expert) };
            let weighing = match (normalises, gates.gating(layer)) {
                (Some(true), _) => Weighing::Normalised,
                (_, Some(Gating::Softmax)) => Weighing::OfAll,
                _ => Weighing::Each,
            };
            (is_known && normalises.is_some(), weighing)
        })
    };
    if !chosen.wants_scores(host, elsewhere, || understand().1) {
        return false;
    }
    let (is_understood, weighing) = understand();
    let before = heard.unwrap_or_else(read);
    let mut judged = vec![RouterScores::default(); n_tokens];
    // SAFETY: by the caller.
    let sees = is_understood && unsafe { super::gates::sees_input_of(router.product, router.ids) };
    let input = router.input.filter(|input| sees && !input.is_empty());
    let width = input.map_or(1, |input| input.len() / n_tokens);
    let rows = input.unwrap_or_default().chunks_exact(width.max(1));
    let judged_rows = rows.zip(&mut judged).map(|(x, scores)| routers.gates.judge(x, layer, scores));
    let is_judged = judged_rows.filter(|is_judged| *is_judged).count() == n_tokens;
    let scores: Vec<TokenScores> = match is_judged {
        true => judged.iter().map(|RouterScores { selection, weights }| TokenScores { selection, weights }).collect(),
        false => Vec::new(),
    };
    let mut after = Vec::new();
    let says = RouterSays { weights: &before, scores: &scores, weighing };
    if !chosen.reroute(host, elsewhere, &says, &mut after) {
        return false;
    }
    let n_used = chosen.routing.n_used;
    for (position, (id, weight)) in chosen.routing.ids.iter().zip(after).enumerate() {
        let (token, rank) = (position / n_used, position % n_used);
        // SAFETY: by the caller: as many values as were read.
        unsafe {
            ids.at::<i32>(token, rank).write_unaligned((*id).into());
            values.at::<f32>(token, rank).write_unaligned(weight);
        }
    }
    true
}

/// Handles reads that have completed.
///
/// # Errors
/// A read has failed, which is reported, or llama.cpp aborts the batch.
pub(super) fn poll(host: &mut Host, experts: &Experts, Abort(callback, data): &Abort) -> Result<(), Failed> {
    host.poll();
    if let Some(error) = host.take_failure() {
        experts.fail(error.to_string());
        return Err(GGML_STATUS_FAILED);
    }
    // SAFETY: callback and data are valid.
    match callback.is_some_and(|callback| unsafe { callback(*data) }) {
        true => Err(GGML_STATUS_ABORTED),
        false => Ok(()),
    }
}
