//! One layer of a batch: what was recorded of it, shown to the residency.

use super::{Replay, WHOLE};
use crate::expert::SliceId;
use crate::options::PrecisionMode;
use crate::residency::{Chosen, Elsewhere, LayerStep, Place, Precisions, Reads, Split, TokenChoice, Used};
use crate::route::Demand;
use crate::sim::config::{Compute, Config};
use crate::sim::recording::{Batch, Recording, chosen, need_order, scores_at, summed_weights};
use crate::trace::LayerRecord;

/// Shows what a layer's router chose, and what the batch asks for.
pub(in crate::sim) fn read_record(
    chosen: &mut Chosen,
    precisions: &mut Precisions,
    recording: &Recording,
    config: &Config,
    record: &LayerRecord,
) {
    let n_expert = recording.header.layer(record.layer).map_or(0, |layer| usize::from(layer.n_expert));
    // Records are whole layers: the next one is never a later split of the same.
    let split = Split { layer: record.layer, n_expert, n_used: record.n_used.into(), kinds: &[WHOLE], key: 0 };
    let ids = record.chosen.iter().map(|&index| i32::from(index));
    chosen.set(&split, ids).expect("a trace's reader refuses other experts");
    let mut order = Vec::new();
    need_order(record, &mut order);
    chosen.recorded(&order, &summed_weights(record));
    let is_exact = config.mode == PrecisionMode::Exact;
    if is_exact || !config.asks_as_recorded(recording) || record.needed.is_empty() {
        let weights = if is_exact { &[][..] } else { &record.weights };
        chosen.ask(precisions, weights.iter().copied());
        return;
    }
    // Weights in half precision might fall on the other side of a threshold.
    let mut demands = vec![Demand::Skip; n_expert];
    record.needed.iter().for_each(|needed| demands[usize::from(needed.expert)] = needed.demand);
    chosen.asked(&demands);
}

impl Replay<'_> {
    pub(super) fn layer(&mut self, batch: &Batch, record: &LayerRecord) {
        let layer_seconds = match self.config.compute {
            Compute::Recorded => batch.other_seconds_per_layer(),
            Compute::Given { layer_seconds, .. } => layer_seconds,
        };
        self.pass(layer_seconds);
        self.residency.catch_up();
        self.show_scores(record);
        let Self { chosen, residency, recording, config, .. } = self;
        read_record(chosen, &mut residency.precisions, recording, config, record);
        let step = chosen.begin(residency, None, &Elsewhere::NOTHING);
        self.foresee(record, layer_seconds, &step);
        self.multiply(record, &step);
        self.chosen.end(&mut self.residency, step);
    }

    /// Router scores for the policy, token by token, where they were recorded.
    fn show_scores(&mut self, record: &LayerRecord) {
        if record.scores.is_empty() {
            return;
        }
        let n_expert = self.recording.header.layer(record.layer).map_or(0, |layer| usize::from(layer.n_expert));
        for token in 0..record.n_tokens as usize {
            if record.scores_of(token, n_expert, &mut self.scores) {
                self.residency.tell_scores(record.layer, &self.scores);
            }
        }
    }

    /// Shows a single token to whoever looks ahead.
    fn foresee(&mut self, record: &LayerRecord, layer_seconds: f64, step: &LayerStep) {
        if record.n_tokens != 1 || !self.residency.looks_ahead() {
            return;
        }
        let experts = self.expert_seconds(record, usize::from(record.n_used)) * f64::from(record.n_used);
        let header = &self.recording.header;
        let token = TokenChoice {
            chosen: &chosen(record),
            layer_seconds: Some(layer_seconds + experts),
            scores: &mut |distance, _| scores_at(record, distance, header),
        };
        self.residency.foresee(step, token, &|_| false);
    }

    /// Seconds of one of `n_multiplied` experts' products.
    fn expert_seconds(&self, record: &LayerRecord, n_multiplied: usize) -> f64 {
        match self.config.compute {
            Compute::Given { expert_seconds, .. } => expert_seconds,
            Compute::Recorded => {
                let recorded = record.needed.iter().filter(|needed| needed.used.is_some()).count();
                let n = if recorded > 0 { recorded } else { n_multiplied };
                f64::from(record.compute_seconds) / n.max(1) as f64
            }
        }
    }

    /// Products of what is there run first, then each as it lands.
    fn multiply(&mut self, record: &LayerRecord, step: &LayerStep) {
        let seconds = self.expert_seconds(record, step.used.len());
        let mut stalled = 0.0;
        let mut left: Vec<(Used, SliceId)> =
            step.used.iter().map(|&used| (used, SliceId { version: step.version(used), kind: WHOLE })).collect();
        while !left.is_empty() {
            self.residency.poll();
            let is_there = |(used, slice): &(Used, SliceId)| self.residency.locate(*slice, *used) != Place::Pending;
            if let Some(at) = left.iter().position(is_there) {
                let (used, slice) = left.remove(at);
                self.pass(seconds);
                if used.row.is_none() {
                    self.residency.release(slice);
                }
                continue;
            }
            let before = self.residency.reads().seconds();
            if !self.residency.wait() {
                debug_assert!(false, "every version in use is there or on its way");
                break;
            }
            stalled += self.residency.reads().seconds() - before;
        }
        self.residency.observer_mut().stalled(record.layer, stalled);
    }
}
