//! Recall of predictions, whatever was in memory.

use super::config::PredictedBy;
use super::recording::{Batch, Event, Recording, chosen, scores_at};
use crate::predict::{
    self, FutureToken, Gates, Oracle, PathPredictor, PathTable, PathTableBuilder, PredictShape, Predictor,
    PredictorKind, Recall,
};
use crate::trace::{Header, LayerRecord, foretell};

/// Recall of a predictor over the single tokens of a recording, for distances up to `distance_max`. Predictors that
/// need later routers' scores use the recorded ones; Fate's, which looks one layer ahead, is evaluated at all
/// distances.
pub fn recall(recording: &Recording, predictor: PredictedBy, distance_max: u8) -> Recall {
    let shape = predict_shape(&recording.header);
    let mut predictor: Box<dyn Predictor> = match predictor {
        PredictedBy::Predictor(PredictorKind::CrossLayer) => {
            Box::new(Gates::cross_layer(shape, distance_max, Gates::PERCENTILE))
        }
        PredictedBy::Predictor(kind) => predict::build(kind, shape, None, 0),
        PredictedBy::Oracle => oracle(recording, shape, None, |batch| batch.n_tokens == 1),
        PredictedBy::Partly(percent) => oracle(recording, shape, Some(percent), |batch| batch.n_tokens == 1),
    };
    judge(recording, predictor.as_mut(), distance_max)
}

/// Recall of EdgeMoE's table. Make the table from other recordings ([`path_table`]).
pub fn path_recall(recording: &Recording, table: PathTable, distance_max: u8) -> Recall {
    judge(recording, &mut PathPredictor::new(predict_shape(&recording.header), table, 0), distance_max)
}

/// A path table of the single tokens of recordings of one model.
pub fn path_table(recordings: &[Recording]) -> PathTable {
    let Some(first) = recordings.first() else { return PathTable::default() };
    let mut builder = PathTableBuilder::new(predict_shape(&first.header));
    for batch in recordings.iter().flat_map(Recording::batches).filter(|batch| batch.n_tokens == 1) {
        builder.begin_token();
        for record in &batch.layers {
            builder.observe(record.layer, record.chosen.iter().copied());
        }
    }
    builder.build()
}

fn judge(recording: &Recording, predictor: &mut dyn Predictor, distance_max: u8) -> Recall {
    let header = &recording.header;
    let (mut recall, mut predicted) = (Recall::default(), Vec::new());
    let layers = &header.model.layers;
    for event in &recording.events {
        let batch = match event {
            Event::Sequence => {
                predictor.begin_sequence();
                recall.forget_expected();
                continue;
            }
            Event::Batch(batch) if batch.n_tokens == 1 => batch,
            Event::Batch(_) => continue,
        };
        predictor.begin_token();
        recall.forget_expected();
        for record in &batch.layers {
            recall.observe(record.layer, &token(record, 0));
            show(predictor, record, &chosen(record, 0), header);
            let at = layers.iter().position(|layer| layer.layer == record.layer);
            for distance in 1..=distance_max {
                let Some(target) = at.and_then(|at| layers.get(at + usize::from(distance))) else { continue };
                predicted.clear();
                predictor.predict(record.layer, distance, &mut predicted);
                recall.expect(target.layer, distance, &predicted);
            }
        }
    }
    recall
}

/// Gives a predictor the choice of a single token's layer, and the recorded scores of later layers.
fn show(predictor: &mut dyn Predictor, record: &LayerRecord, chosen: &[(u16, f32)], header: &Header) {
    predictor.observe(record.layer, chosen);
    if !predictor.needs_scores() {
        return;
    }
    let mut distances: Vec<u8> = record.predictions.iter().map(|prediction| prediction.distance).collect();
    distances.sort_unstable();
    distances.dedup();
    for distance in distances {
        if let Some(scores) = scores_at(record, 0, distance, header) {
            predictor.scores(record.layer, distance, &scores);
        }
    }
}

pub(super) fn predict_shape(header: &Header) -> PredictShape {
    PredictShape { layers: header.model.layers.iter().map(|l| (l.layer, l.n_expert, l.n_used)).collect() }
}

/// A predictor that knows all or part of the uses of some batches' decoded tokens, and nothing of prompts.
pub(super) fn oracle(
    recording: &Recording,
    shape: PredictShape,
    percent: Option<u8>,
    is_shown: impl Fn(&Batch) -> bool,
) -> Box<dyn Predictor> {
    let (mut future, mut n_before) = (Vec::new(), 0);
    for batch in recording.batches() {
        let of_layer = |record: &LayerRecord, at: usize| {
            let used = token(record, at);
            let n_expert = recording.header.layer(record.layer).map_or(0, |layer| usize::from(layer.n_expert));
            let known = |percent: u8| partly(&used, n_expert, percent, n_before + at as u64, record.layer);
            (record.layer, percent.map_or_else(|| used.clone(), known))
        };
        if is_shown(batch) {
            let has = |record: &&LayerRecord, at: usize| at < record.n_tokens as usize;
            let of_token = |at: usize| -> FutureToken {
                batch.layers.iter().filter(|record| has(record, at)).map(|record| of_layer(record, at)).collect()
            };
            let n_tokens = if batch.phase.is_decode() { batch.n_tokens as usize } else { 0 };
            future.push((0..n_tokens).map(of_token).collect::<Vec<FutureToken>>());
        }
        n_before += u64::from(batch.n_tokens);
    }
    Box::new(Oracle::new(shape, future))
}

/// Prediction that finds `percent` of a token's experts, by falling weight.
fn partly(used: &[(u16, f32)], n_expert: usize, percent: u8, token: u64, layer: u16) -> Vec<(u16, f32)> {
    let scores = foretell(used, n_expert, f64::from(percent) / 100.0, token, layer);
    let mut named: Vec<(u16, f32)> = (0..).zip(scores).filter(|(_, score)| *score > 0.0).collect();
    named.sort_by(|a, b| b.1.total_cmp(&a.1));
    named
}

/// A token's experts, by falling weight.
fn token(record: &LayerRecord, at: usize) -> Vec<(u16, f32)> {
    let mut chosen: Vec<(u16, f32)> = record.token(at).collect();
    chosen.sort_by(|a, b| b.1.total_cmp(&a.1));
    chosen
}
