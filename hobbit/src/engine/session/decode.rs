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
use hobbit_core::options::Pooling;
use hobbit_core::residency::Counters;
use hobbit_core::route::{DECODE_TOKENS_MAX, Phase};
use hobbit_core::stats::{PhaseStats, Stats};

impl Session {
    /// Evaluates one batch as it is, of at most `n_batch` entries. For callers that place tokens themselves
    /// (several sequences, logits of a whole prompt).
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
        with_batch(batch, |raw| self.decode(raw, &firsts))?;
        self.sequences.add(batch);
        Ok(())
    }

    /// One empty evaluation, so that the first prompt does not pay for first touches. MoE models skip it: llama.cpp's
    /// warm-up would use every expert of every layer.
    pub(super) fn warm_up(&mut self) -> Result<(), EvalError> {
        // SAFETY: the context is live.
        unsafe {
            let bos = llama::llama_vocab_bos(self.model.shared.raw.vocab());
            let mut token = [if bos >= 0 { bos } else { 0 }];
            llama::llama_set_warmup(self.sequences.context.as_ptr(), true);
            let result = self.decode(llama::llama_batch_get_one(token.as_mut_ptr(), 1), &[(0, 0)]);
            llama::llama_set_warmup(self.sequences.context.as_ptr(), false);
            self.sequences.context.clear();
            llama::llama_synchronize(self.sequences.context.as_ptr());
            llama::llama_perf_context_reset(self.sequences.context.as_ptr());
            self.stats = Stats::default();
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
        self.sequences.all.iter_mut().for_each(|own| own.entry = None);
        let started = Instant::now();
        let running = contention::running(self.n_threads, phase);
        let purpose = Purpose { phase, ..self.purpose };
        // SAFETY: the context is live and the batch's arrays outlive the call.
        let (code, thrown) = purpose.during(|| unsafe { self.sequences.context.decode(batch, self.announces) });
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
        let mut originals = self.model.shared.source.originals.iter();
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
        Ok(())
    }

    /// Removes a failed batch's tokens; if that fails, the whole context. Returns the error for the caller.
    fn undo(&mut self, code: i32, failure: Option<String>, thrown: String, firsts: &[(i32, i32)]) -> EvalError {
        if let Some(memories) = self.model.shared.experts.memories().as_mut().filter(|_| failure.is_some()) {
            memories.host.memory.settle();
        }
        // -1: llama.cpp refused the batch and placed nothing.
        let undone =
            code == -1 || firsts.iter().all(|&(sequence, first)| self.sequences.cut(sequence, first.max(0) as usize));
        if !undone {
            // A partial batch that cannot be undone must not stay.
            self.sequences.clear();
            return match failure {
                None if code == 2 => EvalError::Interrupted,
                failure => EvalError::ContextLost(failure.unwrap_or_else(|| format!("llama_decode: {code}"))),
            };
        }
        match (failure, code) {
            (Some(reason), _) => EvalError::Decode(reason),
            (None, 2) => EvalError::Interrupted,
            (None, 1) => self.sequences.context_full(),
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
        let running = contention::running(self.n_threads, Phase::Prompt);
        if let Err(error) = purpose.during(|| speculator.follow(batch))
            && !self.interrupt.is_set()
        {
            log::notice(format_args!("draft-mtp: {error}"));
        }
        drop(running);
        calling::take_failure();
    }

    /// Announces a new text: policies that count by sequence start over. They do not for a text that begins beside
    /// others (`is_alone`: false), whose experts they would forget.
    pub fn begin_text(&mut self, is_alone: bool) {
        if let Some(memories) = self.model.shared.experts.memories().as_mut() {
            memories.begin_sequence(is_alone);
        }
    }

    /// The embedding, `[n_embd]`, of entry `index` of the last batch, for sessions without pooling.
    pub fn embedding_of(&self, index: usize) -> Option<&[f32]> {
        let index = i32::try_from(index).ok()?;
        // SAFETY: the context is live; a non-null answer is one row of its output.
        unsafe {
            self.embedding(llama::llama_get_embeddings_ith(self.sequences.context.as_ptr(), index), self.model.n_embd())
        }
    }

    /// The embedding, `[n_embd]`, of a sequence of the last batch, for sessions that pool. For those that rank
    /// ([`Pooling::Rank`]), the scores of the model's classes.
    pub fn embedding_of_sequence(&self, sequence: i32) -> Option<&[f32]> {
        // SAFETY: the model is live; the context is, and a non-null answer is one row of its output, of as many
        // numbers.
        unsafe {
            let n = match self.pooling() {
                Some(Pooling::Rank) => llama::llama_model_n_cls_out(self.model.shared.raw.as_ptr()) as usize,
                _ => self.model.n_embd(),
            };
            self.embedding(llama::llama_get_embeddings_seq(self.sequences.context.as_ptr(), sequence), n)
        }
    }

    /// # Safety
    /// Null, or a row of `n` numbers of the context's output.
    unsafe fn embedding(&self, row: *const f32, n: usize) -> Option<&[f32]> {
        // SAFETY: by the caller; the row lives until the next evaluation, which needs `&mut`.
        (!row.is_null()).then(|| unsafe { std::slice::from_raw_parts(row, n) })
    }

    /// The pooling of a sequence's embeddings: the requested one, or the model's. `None`: no pooling.
    pub fn pooling(&self) -> Option<Pooling> {
        // SAFETY: the context is live.
        let kind = unsafe { llama::llama_pooling_type(self.sequences.context.as_ptr()) };
        Some(match kind {
            llama::LLAMA_POOLING_TYPE_MEAN => Pooling::Mean,
            llama::LLAMA_POOLING_TYPE_CLS => Pooling::Cls,
            llama::LLAMA_POOLING_TYPE_LAST => Pooling::Last,
            llama::LLAMA_POOLING_TYPE_RANK => Pooling::Rank,
            _ => return None,
        })
    }

    /// Counters of prompts and decoding so far: the first two fields of [`Session::stats`], at no cost.
    pub fn phases(&self) -> (PhaseStats, PhaseStats) {
        (self.stats.prompt, self.stats.decode)
    }

    /// Maximum number of tokens, each of its own sequence, that may be decoded at once under the rules for generated
    /// tokens. Those differ from the rules for prompts where results are approximate.
    pub fn decodes_at_once(&self) -> usize {
        let shared = &self.model.shared;
        let is_exact = shared.source.precisions.is_exact() && shared.options.routing.is_off();
        if is_exact { usize::MAX } else { hobbit_core::route::DECODE_TOKENS_MAX }
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
