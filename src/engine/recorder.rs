//! Writes a trace of what the engine does: see [`crate::trace`].

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::log;
use super::routing::Routing;
use crate::expert::Precision;
use crate::route::Demand;
use crate::trace::{Header, LayerRecord, Needed, Phase, ReadClass, TraceError, TraceWriter, rounded};

/// Unselected experts that are kept of each token.
const N_UNSELECTED: usize = 16;

/// A trace in progress. A file that cannot be written ends it with a word; the run goes on.
pub(super) struct Recorder {
    path: PathBuf,
    /// `None` once writing has failed.
    writer: Option<TraceWriter<File>>,
    record: LayerRecord,
    /// The layer whose record is being filled.
    is_open: bool,
    began: Instant,
    waited: f64,
}

impl Recorder {
    /// Begins a trace, in place of a file that is there.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn create(path: &Path, header: &Header) -> Result<Self, TraceError> {
        let of_file = |error| TraceError::Io { path: path.to_owned(), action: "create", error };
        let writer = TraceWriter::new(File::create(path).map_err(of_file)?, header)?;
        Ok(Self {
            path: path.to_owned(),
            writer: Some(writer),
            record: LayerRecord::default(),
            is_open: false,
            began: Instant::now(),
            waited: 0.0,
        })
    }

    /// A layer runs: what its router chose for each token, `weights` `[n_tokens][n_used]` where they are known, and of a
    /// single token the router's `scores` `[n_expert]`. `waited`: seconds that the engine has waited so far.
    pub(super) fn begin_layer(
        &mut self,
        layer: u16,
        routing: &Routing,
        weights: &[f32],
        scores: Option<&[f32]>,
        waited: f64,
    ) {
        let n_used = routing.n_used;
        self.record.clear(layer, n_used as u16);
        let mut shares = Vec::with_capacity(n_used);
        for token in 0..routing.n_tokens {
            let row = token * n_used..(token + 1) * n_used;
            shares.clear();
            shares.extend(row.clone().map(|at| routing.share_of_pair(at, weights)));
            self.record.push_token(&routing.ids[row], &shares, scores, N_UNSELECTED);
        }
        (self.is_open, self.began, self.waited) = (true, Instant::now(), waited);
    }

    /// A needed expert, in the order in which they are asked for. `bytes`: what a miss reads.
    pub(super) fn needed(&mut self, expert: u16, demand: Demand, used: Option<Precision>, hit: bool, bytes: u64) {
        if self.is_open {
            let class = (!hit && used.is_some()).then_some(ReadClass::OnDemand);
            let bytes = if class.is_some() { bytes } else { 0 };
            self.record.needed.push(Needed { expert, demand, used, hit, class, bytes });
        }
    }

    /// The layer, or its first part, has been computed.
    pub(super) fn end_layer(&mut self, waited: f64) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let wait = (waited - self.waited).max(0.0);
        self.record.wait_seconds = wait as f32;
        self.record.compute_seconds = (self.began.elapsed().as_secs_f64() - wait).max(0.0) as f32;
        let Self { writer, record, .. } = self;
        let written = writer.as_mut().map_or(Ok(()), |writer| writer.layer(record));
        self.check(written);
    }

    /// A batch has been evaluated.
    pub(super) fn end_batch(&mut self, n_tokens: u32, seconds: f64) {
        let phase = if n_tokens == 1 { Phase::Decode } else { Phase::Prefill };
        let written = self.writer.as_mut().map_or(Ok(()), |writer| writer.batch(phase, n_tokens, seconds as f32));
        self.check(written);
    }

    /// A new sequence begins.
    pub(super) fn begin_sequence(&mut self) {
        let written = self.writer.as_mut().map_or(Ok(()), TraceWriter::sequence);
        self.check(written);
    }

    fn check(&mut self, written: Result<(), TraceError>) {
        if let Err(error) = written {
            self.writer = None;
            log::notice(format_args!("--trace {}: {error}; the trace ends here", self.path.display()));
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take() {
            let written = writer.finish().map(drop);
            self.check(written);
        }
    }
}

/// As a trace will have it: what policies see must be what a replay shows them.
pub(super) fn as_recorded(scores: &mut [f32]) {
    scores.iter_mut().for_each(|score| *score = rounded(*score));
}
