//! Decodes batches with llama.cpp: counts their cost, and undoes a failed batch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use ggml_sys::llama;

use super::{BatchToken, Session, phases};
use crate::engine::error::EvalError;
use crate::engine::ggml::log;
use crate::engine::ggml::raw::with_batch;
use crate::engine::memory::contention;
use crate::engine::seam::calling::{self, Purpose};
use hobbit_core::residency::Counters;
use hobbit_core::route::{DECODE_TOKENS_MAX, Phase};
use hobbit_core::stats::{PhaseStats, Stats};

impl Session {
    /// Evaluates one batch as it is, of at most `n_batch` entries. For callers that place tokens themselves
    /// (several sequences, logits of a whole prompt); not to be mixed with [`Session::feed`] on sequence 0.
    ///
    /// # Errors
    /// More entries than `n_batch` ([`EvalError::BatchTooLarge`]), and as [`Session::feed`].
    pub fn evaluate(&mut self, batch: &[BatchToken]) -> Result<(), EvalError> {
        if batch.is_empty() {
            return Ok(());
        }
        let n_batch = self.n_batch();
        if batch.len() > n_batch {
            return Err(EvalError::BatchTooLarge { n_tokens: batch.len(), n_batch });
        }
        let n_outputs = batch.iter().filter(|entry| entry.logits).count();
        let n_outputs_max = self.n_outputs_max();
        if n_outputs > n_outputs_max {
            return Err(EvalError::Decode(format!(
                "logits of {n_outputs} entries are requested, and the session has room for {n_outputs_max}: open it \
                 with a larger n_outputs_max"
            )));
        }
        let mut firsts: BTreeMap<i32, i32> = BTreeMap::new();
        for entry in batch {
            let first = firsts.entry(entry.sequence).or_insert(entry.position);
            *first = entry.position.min(*first);
        }
        let firsts: Vec<(i32, i32)> = firsts.into_iter().collect();
        with_batch(batch, |raw| self.decode(raw, &firsts))
    }

    /// One empty evaluation, so that the first prompt does not pay for first touches. MoE models skip it: llama.cpp's
    /// warm-up would use every expert of every layer.
    pub(super) fn warm_up(&mut self) -> Result<(), EvalError> {
        // SAFETY: the context is live.
        unsafe {
            let bos = llama::llama_vocab_bos(self.model.vocab());
            let mut token = [if bos >= 0 { bos } else { 0 }];
            llama::llama_set_warmup(self.context.as_ptr(), true);
            let result = self.decode(llama::llama_batch_get_one(token.as_mut_ptr(), 1), &[(0, 0)]);
            llama::llama_set_warmup(self.context.as_ptr(), false);
            self.context.clear();
            llama::llama_synchronize(self.context.as_ptr());
            llama::llama_perf_context_reset(self.context.as_ptr());
            (self.stats, self.is_current) = (Stats::default(), false);
            result
        }
    }

    /// Evaluates a batch and counts its cost. `firsts` are the sequences it adds to, each with its first new position:
    /// a failed batch's tokens from there on are removed, so that the caller may try again.
    pub(crate) fn decode(&mut self, batch: llama::llama_batch, firsts: &[(i32, i32)]) -> Result<(), EvalError> {
        if self.interrupt.is_set() {
            return Err(EvalError::Interrupted);
        }
        let experts = Arc::clone(&self.model.shared.experts);
        calling::take_failure();
        calling::take_compute_buffer();
        // SAFETY: the batch's arrays outlive the call.
        let phase = unsafe { phase_of(&batch) };
        let n_tokens = batch.n_tokens.unsigned_abs();
        if let Some(memories) = experts.memories().as_mut() {
            self.phases.begin(n_tokens, memories);
            memories.begin_batch(phase, n_tokens);
            if let Some(speculator) = self.speculator.as_mut().filter(|_| phase.is_decode()) {
                // SAFETY: as above.
                memories.expect_drafts(&speculator.expected(unsafe { places_of(&batch) }));
            }
        }
        if !batch.token.is_null() {
            // SAFETY: the batch's arrays are as long as its number of entries.
            experts.tables().expect(unsafe { std::slice::from_raw_parts(batch.token, n_tokens as usize) });
        }
        let (before, busy_before) = self.counters();
        (self.is_current, self.row) = (false, -1);
        let started = Instant::now();
        let running = contention::running(self.n_threads);
        let purpose = Purpose { phase, ..self.purpose };
        // SAFETY: the context is live and the batch's arrays outlive the call.
        let (code, thrown) = purpose.during(|| unsafe { self.context.decode(batch, self.announces) });
        drop(running);
        let seconds = started.elapsed().as_secs_f64();
        if let Some(memories) = experts.memories().as_mut().filter(|_| code == 0) {
            memories.end_batch(phase, n_tokens, seconds);
            self.phases.end(n_tokens, calling::take_compute_buffer(), memories);
        }
        if self.purpose.gives_back && n_tokens as usize > DECODE_TOKENS_MAX {
            phases::give_back(calling::take_compute_buffer());
        }
        if let Some(hook) = &self.hook {
            hook.lock().flush();
        }
        calling::forget_router();
        // After a write to a file, the latest reads may come from another model.
        let mut originals = self.model.shared.originals.iter();
        let written_to = originals.find_map(|original| original.check_unwritten().err());
        let failure = calling::take_failure().or(written_to.map(|error| error.to_string()));
        if code != 0 || failure.is_some() {
            return Err(self.undo(code, failure, thrown, firsts));
        }
        self.follow(&batch, purpose);
        let with_follower = started.elapsed().as_secs_f64();
        let (after, busy_after) = self.counters();
        let cost = cost_of(&before, &after, u64::from(n_tokens), (seconds, busy_after - busy_before));
        if let Some(speculator) = &mut self.speculator {
            let cost = PhaseStats { seconds: with_follower, ..cost };
            speculator.evaluated(phase, &cost, after.draft_misses - before.draft_misses);
        }
        let stats = if phase.is_decode() { &mut self.stats.decode } else { &mut self.stats.prompt };
        *stats = *stats + cost;
        if let Some(memories) = experts.memories().as_ref().filter(|_| !self.checked) {
            let unseen = memories.unseen_tensors();
            if !unseen.is_empty() {
                return Err(EvalError::Seam(format!(
                    "the products of {} expert tensors ({} first) did not reach hobbit: this architecture is not \
                     supported",
                    unseen.len(),
                    unseen[0]
                )));
            }
        }
        self.checked = true;
        self.is_current = true;
        Ok(())
    }

    /// Removes a failed batch's tokens; if that fails, the whole context. Returns the error for the caller.
    fn undo(&mut self, code: i32, failure: Option<String>, thrown: String, firsts: &[(i32, i32)]) -> EvalError {
        if let Some(memories) = self.model.shared.experts.memories().as_mut().filter(|_| failure.is_some()) {
            memories.host.memory.settle();
        }
        // -1: llama.cpp refused the batch and placed nothing.
        let undone = code == -1 || firsts.iter().all(|&(sequence, first)| self.cut(sequence, first.max(0) as usize));
        if !undone {
            // A partial batch that cannot be undone must not stay.
            self.context.clear();
            self.checkpoints.iter_mut().for_each(|own| own.truncate(0));
            (self.n_past, self.n_prompt, self.pending) = (0, 0, None);
            self.text.clear();
            return match failure {
                None if code == 2 => EvalError::Interrupted,
                failure => EvalError::ContextLost(failure.unwrap_or_else(|| format!("llama_decode: {code}"))),
            };
        }
        match (failure, code) {
            (Some(reason), _) => EvalError::Decode(reason),
            (None, 2) => EvalError::Interrupted,
            (None, 1) => self.context_full(),
            (None, _) => {
                let logged = log::take_errors();
                EvalError::Decode(if thrown.is_empty() { format!("llama_decode: {code} {logged}") } else { thrown })
            }
        }
    }

    /// Shows an evaluated batch to the drafter that reads its hidden states. The text does not depend on it: after a
    /// failure it starts over.
    fn follow(&mut self, batch: &llama::llama_batch, purpose: Purpose) {
        let Some(speculator) = self.speculator.as_mut().filter(|own| own.is_mtp && !batch.token.is_null()) else {
            return;
        };
        let running = contention::running(self.n_threads);
        if let Err(error) = purpose.during(|| speculator.follow(batch))
            && !self.interrupt.is_set()
        {
            log::notice(format_args!("draft-mtp: {error}"));
        }
        drop(running);
        calling::take_failure();
    }

    /// Drafts that the text did not take are not generated tokens.
    pub(crate) fn count_rejected(&mut self, n: usize) {
        self.stats.decode.tokens = self.stats.decode.tokens.saturating_sub(n as u64);
    }

    fn counters(&self) -> (Counters, f64) {
        let memories = self.model.shared.experts.memories();
        let counters = memories.as_ref().map(|own| (own.host.counters(), own.host.reads().busy_seconds()));
        counters.unwrap_or_default()
    }
}

/// Cost of a batch between two counts. `seconds` in all, and of reading.
fn cost_of(before: &Counters, after: &Counters, tokens: u64, (seconds, busy): (f64, f64)) -> PhaseStats {
    PhaseStats {
        tokens,
        seconds,
        hits: after.hits - before.hits,
        misses: after.misses - before.misses,
        slices_loaded: after.slices_loaded - before.slices_loaded,
        bytes_read: after.bytes_read - before.bytes_read,
        io_busy_seconds: busy,
        io_wait_seconds: after.wait_seconds - before.wait_seconds,
        used: after.used - before.used,
        missed: after.missed - before.missed,
        rerouted: after.rerouted - before.rerouted,
        upgrades: after.upgrades - before.upgrades,
        in_order: after.in_order - before.in_order,
    }
}

/// Sequence and position of each token of a batch; none if llama.cpp chooses the positions.
///
/// # Safety
/// The batch's arrays are as long as its number of entries, and outlive the result.
unsafe fn places_of(batch: &llama::llama_batch) -> impl Iterator<Item = (i32, i32)> {
    let n_tokens = if batch.pos.is_null() { 0 } else { batch.n_tokens.unsigned_abs() as usize };
    let (positions, sequences) = (batch.pos, batch.seq_id);
    (0..n_tokens).map(move |at| {
        // SAFETY: by the caller; each entry of a batch with sequences has at least one.
        unsafe { (if sequences.is_null() { 0 } else { **sequences.add(at) }, *positions.add(at)) }
    })
}

/// The phase of a batch. Its ubatches have the same phase.
///
/// # Safety
/// The batch's arrays are as long as its number of entries.
unsafe fn phase_of(batch: &llama::llama_batch) -> Phase {
    let n_tokens = batch.n_tokens.unsigned_abs() as usize;
    // SAFETY: by the caller.
    let wanted = || unsafe { std::slice::from_raw_parts(batch.logits, n_tokens) };
    Phase::of(n_tokens, !batch.logits.is_null() && wanted().iter().all(|wanted| *wanted != 0))
}
