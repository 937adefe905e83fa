//! What every split of a layer goes through, wherever its products are computed.

use std::ffi::c_void;
use std::slice;

use ggml_sys::llama::{self, GGML_STATUS_ABORTED, GGML_STATUS_FAILED, ggml_status, ggml_tensor};

use super::experts::{ExpertTag, Experts, RouterValues};
use super::hierarchy::Unseen;
use super::host_reads::Host;
use crate::expert::SliceKind;
use crate::residency::{Chosen, Split};
use crate::trace::Walk;

/// A step that did not succeed: ggml's status for it.
pub(super) type Failed = ggml_status;

/// How llama.cpp says that a batch is not to go on. It keeps callback and data valid as long as the context.
pub(super) struct Abort(pub(super) llama::ggml_abort_callback, pub(super) *mut c_void);

/// The nodes of a graph.
///
/// # Safety
/// The graph is live, and longer than what is returned.
pub(super) unsafe fn nodes_of<'a>(graph: *mut llama::ggml_cgraph) -> &'a [*mut ggml_tensor] {
    // SAFETY: by the caller.
    match unsafe { llama::ggml_graph_n_nodes(graph) as usize } {
        0 => &[],
        n => unsafe { slice::from_raw_parts(llama::ggml_graph_nodes(graph), n) },
    }
}

/// The matrices that products of one layer multiply by, each once. They have come to us: no longer are they `unseen`.
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

/// As [`Chosen::set`]; an id that is no expert is told.
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
/// where they were looked for, in words.
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
    if host.precisions.is_exact() {
        chosen.ask(&mut host.precisions, []);
        return Ok(None);
    }
    let (layer, routing) = (chosen.layer(), &chosen.routing);
    let Some(weights) = weights().filter(|w| (w.n_used, w.n_tokens) == (routing.n_used, routing.n_tokens)) else {
        experts.fail(format!(
            "layer {layer}: this architecture's router weights were not found{scope}, which dynamic precision needs; \
             use --precision exact"
        ));
        return Err(GGML_STATUS_FAILED);
    };
    // SAFETY: by the caller.
    chosen.ask(&mut host.precisions, unsafe { weights.read() });
    Ok(Some(weights))
}

/// Sends the layer's tokens along recorded routes: `ids` and `weights` are written over the router's.
///
/// # Errors
/// The weights were not found, which is told.
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
            // SAFETY: by the caller: a route has as many ranks as the model's tokens, which was checked when it was read.
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

/// Takes in what has landed.
///
/// # Errors
/// A read has failed, which is told, or llama.cpp wants no more of the batch.
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
