//! Writes a trace of the engine's work: see [`hobbit_core::trace`].

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::engine::ggml::log;
use hobbit_core::cache::SavedCache;
use hobbit_core::expert::Version;
use hobbit_core::files;
use hobbit_core::load::{LoadClass, LoadStats};
use hobbit_core::predict::{Predicted, top_k};
use hobbit_core::residency::{NeededExpert, Observer};
use hobbit_core::route::{Routing, rounded};
use hobbit_core::trace::{
    Header, LayerRecord, Needed, Phase, Prediction, ReadClass, ResidentsRecord, TraceError, TraceWriter,
};

/// Unselected experts recorded per token.
const N_UNSELECTED: usize = 16;

/// Scores of a later layer recorded beyond a quarter of them (Fate's widening).
const N_BEYOND_A_QUARTER: usize = 16;

/// Batches between two records of measurements: limits how old the last one is when the process is killed.
const BATCHES_PER_MEASUREMENT: u32 = 64;

/// A trace in progress; by default nothing is recorded. A write error ends the trace with a notice; the run goes on.
///
/// A batch's records are in the file when the batch has ended, so that a killed process (or a second Ctrl-C) loses only
/// the running one.
#[derive(Default)]
pub(crate) struct Recorder {
    path: PathBuf,
    /// `None` also after a write error.
    writer: Option<TraceWriter<File>>,
    record: LayerRecord,
    /// Bytes read for versions that have not been used since, and the reason for the read.
    brought: BTreeMap<Version, (ReadClass, u64)>,
    n_batches: u32,
    /// Reused: order of scores.
    best: Vec<u16>,
    /// Start of the layer whose record is being filled, and the seconds of waiting until then.
    open: Option<(Instant, f64)>,
}

impl Recorder {
    /// Begins a trace; replaces an existing file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn create(path: &Path, header: &Header) -> Result<Self, TraceError> {
        let of_file = |action, error| TraceError::Io { path: path.to_owned(), action, error };
        let file = files::create(path, files::Kind::Trace).map_err(|error| of_file("create", error))?;
        let writer = TraceWriter::new(file, header).map_err(|error| match error {
            TraceError::Io { action, error, .. } => of_file(action, error),
            other => other,
        })?;
        Ok(Self { path: path.to_owned(), writer: Some(writer), ..Self::default() })
    }

    /// Records the residents that a warm start gave the cache.
    pub(crate) fn residents(&mut self, saved: SavedCache) {
        let record = ResidentsRecord { versions: saved.residents, statistics: saved.statistics };
        self.write(|writer| writer.residents(&record));
    }

    /// A batch of `n_tokens` tokens was evaluated in `seconds`; `measured`: statistics of all reads so far.
    pub(crate) fn end_batch(&mut self, phase: Phase, n_tokens: u32, seconds: f64, measured: &LoadStats) {
        self.write(|writer| writer.batch(phase, n_tokens, seconds as f32));
        self.n_batches += 1;
        if self.n_batches.is_multiple_of(BATCHES_PER_MEASUREMENT) {
            self.measured(measured);
        }
        self.write(TraceWriter::flush);
    }

    /// The run ends; `measured`: statistics of all its reads.
    pub(crate) fn end(&mut self, measured: &LoadStats) {
        if self.n_batches > 0 {
            self.measured(measured);
        }
        self.write(TraceWriter::flush);
    }

    /// A new sequence begins.
    pub(crate) fn begin_sequence(&mut self) {
        self.write(TraceWriter::sequence);
    }

    fn measured(&mut self, stats: &LoadStats) {
        let seconds = stats.busy.as_secs_f64();
        if seconds <= 0.0 {
            return;
        }
        // Reads overlap, so this rate already includes the latency of each read.
        let host = [
            ("link_bytes_per_second", stats.bytes as f64 / seconds),
            ("read_latency_seconds", 0.0),
            ("reads", stats.reads as f64),
            ("read_bytes", stats.bytes as f64),
            ("read_seconds", seconds),
        ];
        let host = host.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        self.write(|writer| writer.measured(&host));
    }

    fn write(&mut self, write: impl FnOnce(&mut TraceWriter<File>) -> Result<(), TraceError>) {
        let written = self.writer.as_mut().map_or(Ok(()), write);
        self.check(written);
    }

    fn check(&mut self, written: Result<(), TraceError>) {
        let Err(error) = written else { return };
        if let Some(writer) = self.writer.take() {
            // Removes a partial record. A pipe cannot be cut, but readers stop at its last complete record.
            let _ = writer.get_ref().set_len(writer.whole_bytes());
        }
        let path = self.path.display();
        log::notice(format_args!("trace {path}: {error}; the trace ends here, the run goes on"));
    }
}

impl Observer for Recorder {
    fn is_watching(&self) -> bool {
        self.writer.is_some()
    }

    fn begin_layer(&mut self, layer: u16, routing: &Routing, weights: &[f32], scores: &[f32], waited: f64) {
        if self.writer.is_none() {
            return;
        }
        let n_used = routing.n_used;
        self.record.clear(layer, n_used as u16);
        let mut fractions = Vec::with_capacity(n_used);
        let n_expert = scores.len() / routing.n_tokens.max(1);
        for token in 0..routing.n_tokens {
            let row = token * n_used..(token + 1) * n_used;
            fractions.clear();
            fractions.extend(row.clone().map(|at| routing.fraction_of_pair(at, weights)));
            let scores = (n_expert > 0).then(|| &scores[token * n_expert..(token + 1) * n_expert]);
            self.record.push_token(&routing.ids[row], &fractions, scores, N_UNSELECTED);
        }
        self.open = Some((Instant::now(), waited));
    }

    fn rerouted(&mut self, ids: &[u16]) {
        if self.open.is_some() {
            self.record.executed.extend_from_slice(ids);
        }
    }

    fn end_layer(&mut self, waited: f64) {
        let Some((began, waited_before)) = self.open.take() else { return };
        let wait = (waited - waited_before).max(0.0);
        self.record.wait_seconds = wait as f32;
        self.record.compute_seconds = (began.elapsed().as_secs_f64() - wait).max(0.0) as f32;
        let Self { writer, record, .. } = self;
        let written = writer.as_mut().map_or(Ok(()), |writer| writer.layer(record));
        self.check(written);
    }

    fn needed(&mut self, needed: &NeededExpert) {
        if self.open.is_none() {
            return;
        }
        let &NeededExpert { expert, demand, version, hit, is_there, bytes } = needed;
        // A version evicted unused was read in vain, and is read again.
        let before = version.and_then(|version| self.brought.remove(&version)).filter(|_| is_there);
        let (class, bytes) = match before {
            Some((class, bytes)) => (Some(class), bytes),
            None if !hit && version.is_some() => (Some(ReadClass::OnDemand), bytes),
            None => (None, 0),
        };
        let used = version.map(|version| version.precision);
        self.record.needed.push(Needed { expert: expert.index, demand, used, hit, class, bytes });
    }

    fn loading(&mut self, version: Version, class: LoadClass, bytes: u64, whole: u64) {
        if self.writer.is_none() {
            return;
        }
        let class = if class == LoadClass::Upgrade { ReadClass::Upgrade } else { ReadClass::Prefetch };
        let brought = self.brought.entry(version).or_insert((class, 0));
        // A sum above the whole size means that the earlier bytes were evicted unused.
        let before = if brought.0 == class && brought.1 + bytes <= whole { brought.1 } else { 0 };
        *brought = (class, before + bytes);
        self.write(|writer| writer.load(version, class, bytes));
    }

    fn withdrawn(&mut self, version: Version, bytes: u64) {
        self.brought.remove(&version);
        self.write(|writer| writer.withdrawn(version, bytes));
    }

    fn router_scores(&mut self, token: usize, distance: u8, scores: &[f32], n_used: usize) {
        if self.open.is_some() {
            let n = (scores.len() / 4).max(n_used) + N_BEYOND_A_QUARTER;
            top_k(scores, n.min(scores.len()), &mut self.best);
            let token = token as u16;
            let prediction = |&expert: &u16| Prediction { token, distance, expert, score: scores[usize::from(expert)] };
            self.record.predictions.extend(self.best.iter().map(prediction));
        }
    }

    fn predicted(&mut self, predicted: &[Predicted]) {
        if self.open.is_some() {
            let prediction = |&Predicted { expert, score, distance, token }: &Predicted| Prediction {
                token,
                distance,
                expert: expert.index,
                score,
            };
            self.record.predictions.extend(predicted.iter().map(prediction));
        }
    }
}

/// Rounds scores as a trace does: policies must see the same values in a replay.
pub(crate) fn as_recorded(scores: &mut [f32]) {
    scores.iter_mut().for_each(|score| *score = rounded(*score));
}
