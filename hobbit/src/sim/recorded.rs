//! What was recorded of a layer, as those ask for it who replay it.

use crate::predict::PredictorKind;
use crate::trace::{Header, LayerRecord};

/// The distinct experts of a layer in the order in which the engine asks for them: as recorded; else the router's order for a
/// single token, falling popularity for a batch.
pub(super) fn need_order(record: &LayerRecord, order: &mut Vec<u16>) {
    order.clear();
    if !record.needed.is_empty() || record.n_tokens == 1 {
        match record.needed.is_empty() {
            true => order.extend_from_slice(&record.chosen),
            false => order.extend(record.needed.iter().map(|needed| needed.expert)),
        }
        // Nobody promises that a file names each once.
        let mut n = 0;
        for i in 0..order.len() {
            if !order[..n].contains(&order[i]) {
                order[n] = order[i];
                n += 1;
            }
        }
        order.truncate(n);
        return;
    }
    order.extend_from_slice(&record.chosen);
    order.sort_unstable();
    order.dedup();
    let uses = uses(record);
    order.sort_by_key(|index| std::cmp::Reverse(uses[usize::from(*index)]));
}

/// How often a batch uses each expert, by index.
fn uses(record: &LayerRecord) -> Vec<u32> {
    let mut uses = vec![0; record.chosen.iter().max().map_or(0, |most| usize::from(*most) + 1)];
    record.chosen.iter().for_each(|&index| uses[usize::from(index)] += 1);
    uses
}

/// The router weight of each expert, summed over the batch's tokens in their order, by index.
pub(super) fn summed_weights(record: &LayerRecord) -> Vec<f32> {
    let mut weights = vec![0.0f32; record.chosen.iter().max().map_or(0, |most| usize::from(*most) + 1)];
    for (&index, &weight) in record.chosen.iter().zip(&record.weights) {
        weights[usize::from(index)] += weight;
    }
    weights
}

/// What the router chose for a single token, best first; weights sum to 1.
pub(super) fn chosen(record: &LayerRecord) -> Vec<(u16, f32)> {
    let mut chosen: Vec<(u16, f32)> = record.token(0).collect();
    let total: f32 = chosen.iter().map(|(_, weight)| weight.abs()).sum();
    if total > 0.0 {
        chosen.iter_mut().for_each(|(_, weight)| *weight = weight.abs() / total);
    }
    chosen.sort_by(|a, b| b.1.total_cmp(&a.1));
    chosen
}

/// What the router at a distance of layers said of a layer's input, `[n_expert]`, as far as it was recorded, and 0 for other
/// experts; `None` where nothing was.
pub(super) fn scores_at(record: &LayerRecord, distance: u8, header: &Header) -> Option<Vec<f32>> {
    let of_distance = || record.predictions.iter().filter(|prediction| prediction.distance == distance);
    if !has_router_scores(header) || of_distance().next().is_none() {
        return None;
    }
    let layers = &header.model.layers;
    let at = layers.iter().position(|own| own.layer == record.layer)?;
    let mut scores = vec![0.0; usize::from(layers.get(at + usize::from(distance))?.n_expert)];
    for prediction in of_distance() {
        if let Some(place) = scores.get_mut(usize::from(prediction.expert)) {
            *place = prediction.score;
        }
    }
    Some(scores)
}

/// Whether predictions of a recording are scores of later routers: its predictor worked on them.
pub(super) fn has_router_scores(header: &Header) -> bool {
    let gates = [PredictorKind::StackedGate, PredictorKind::CrossLayer];
    header.settings.predictor.parse().is_ok_and(|kind: PredictorKind| gates.contains(&kind))
}
