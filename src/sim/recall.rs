//! How much of what layers need was predicted, whatever was in memory.

use super::config::Foresight;
use super::recording::{Event, Recording};
use super::step::show;
use crate::predict::{self, FutureToken, Oracle, PredictShape, Predictor, Recall};
use crate::trace::{Header, LayerRecord};

/// Recall of a predictor over the single tokens of a recording, for distances up to `distance_max`.
pub fn recall(recording: &Recording, foresight: Foresight, distance_max: u8) -> Recall {
    let header = &recording.header;
    let mut predictor: Box<dyn Predictor> = match foresight {
        Foresight::Predictor(kind) => predict::build(kind, predict_shape(header), None),
        Foresight::Oracle => Box::new(Oracle::new(predict_shape(header), future(recording).into_iter())),
    };
    let (mut recall, mut predicted, mut scores) = (Recall::default(), Vec::new(), Vec::new());
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
            recall.observe(record.layer, &token(record));
            show(predictor.as_mut(), record, header, &mut scores);
            let at = layers.iter().position(|own| own.layer == record.layer);
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

pub(super) fn predict_shape(header: &Header) -> PredictShape {
    PredictShape { layers: header.model.layers.iter().map(|l| (l.layer, l.n_expert, l.n_used)).collect() }
}

/// What the single tokens of a recording will use.
pub(super) fn future(recording: &Recording) -> Vec<FutureToken> {
    let single = recording.batches().filter(|batch| batch.n_tokens == 1);
    single.map(|batch| batch.layers.iter().map(|record| (record.layer, token(record))).collect()).collect()
}

/// A single token's experts, by falling weight.
fn token(record: &LayerRecord) -> Vec<(u16, f32)> {
    let mut chosen: Vec<(u16, f32)> = record.token(0).collect();
    chosen.sort_by(|a, b| b.1.total_cmp(&a.1));
    chosen
}
