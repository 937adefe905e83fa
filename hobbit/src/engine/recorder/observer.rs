//! The trace of a run that is to be recorded, as a residency's observer.

use super::Recorder;
use crate::cache::SavedCache;
use crate::expert::Version;
use crate::load::{LoadClass, LoadStats};
use crate::predict::Predicted;
use crate::residency::{NeededExpert, Observer};
use crate::route::Routing;
use crate::trace::ReadClass;

/// Records, or does not.
pub(in super::super) struct Trace(pub(in super::super) Option<Recorder>);

impl Trace {
    /// The cache begins with these: a warm start.
    pub(in super::super) fn residents(&mut self, saved: SavedCache) {
        if let Some(recorder) = &mut self.0 {
            recorder.residents(saved);
        }
    }

    /// A new sequence begins.
    pub(in super::super) fn begin_sequence(&mut self) {
        if let Some(recorder) = &mut self.0 {
            recorder.begin_sequence();
        }
    }

    /// A batch of so many tokens was evaluated, in so many seconds; `measured`: of all reads so far.
    pub(in super::super) fn end_batch(&mut self, n_tokens: u32, seconds: f64, measured: &LoadStats) {
        if let Some(recorder) = &mut self.0 {
            recorder.end_batch(n_tokens, seconds, measured);
        }
    }

    /// The run ends; `measured`: of all its reads.
    pub(in super::super) fn end(&mut self, measured: &LoadStats) {
        if let Some(recorder) = self.0.take() {
            recorder.end(measured);
        }
    }
}

impl Observer for Trace {
    fn is_watching(&self) -> bool {
        self.0.is_some()
    }

    fn begin_layer(&mut self, layer: u16, routing: &Routing, weights: &[f32], scores: Option<&[f32]>, waited: f64) {
        if let Some(recorder) = &mut self.0 {
            recorder.begin_layer(layer, routing, weights, scores, waited);
        }
    }

    fn end_layer(&mut self, waited: f64) {
        if let Some(recorder) = &mut self.0 {
            recorder.end_layer(waited);
        }
    }

    fn needed(&mut self, needed: &NeededExpert) {
        if let Some(recorder) = &mut self.0 {
            recorder.needed(needed);
        }
    }

    fn loading(&mut self, version: Version, class: LoadClass, bytes: u64, whole: u64) {
        if let Some(recorder) = &mut self.0 {
            let class = if class == LoadClass::Upgrade { ReadClass::Upgrade } else { ReadClass::Prefetch };
            recorder.load(version, class, bytes, whole);
        }
    }

    fn withdrawn(&mut self, version: Version, bytes: u64) {
        if let Some(recorder) = &mut self.0 {
            recorder.withdrawn(version, bytes);
        }
    }

    fn foretold(&mut self, distance: u8, scores: &[f32], n_used: usize) {
        if let Some(recorder) = &mut self.0 {
            recorder.foretold(distance, scores, n_used);
        }
    }

    fn predicted(&mut self, predicted: &[Predicted]) {
        if let Some(recorder) = &mut self.0 {
            recorder.predicted(predicted);
        }
    }
}
