//! Decodes batches with llama.cpp: counts their cost, and undoes a failed batch.

use std::collections::BTreeMap;
use std::time::Instant;

use ggml_sys::llama;

use super::phases::{self, Phases};
use super::speculate::Speculator;
use super::{BatchToken, Interrupt, Sequences, Session};
use crate::engine::error::EvalError;
use crate::engine::ggml::log;
use crate::engine::ggml::raw::with_batch;
use crate::engine::memory::contention;
use crate::engine::memory::tiers::{Description, Link, Tiers};
use crate::engine::model::Model;
use crate::engine::seam::calling::{self, Purpose};
use crate::engine::seam::experts::Experts;
use crate::engine::seam::hook::{EvalHook, Observed};
use hobbit_core::expert::Precision;
use hobbit_core::options::SessionOptions;
use hobbit_core::plan::{PromptCosts, WidthInput, WidthReport};
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
        let n_batch = self.context().n_batch();
        if batch.len() > n_batch {
            return Err(EvalError::BatchTooLarge { n_tokens: batch.len(), n_batch });
        }
        let n_outputs = batch.iter().filter(|entry| entry.logits).count();
        let n_outputs_max = self.sequences.n_outputs_max();
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
        let Self { decoder, sequences, speculator, .. } = self;
        with_batch(batch, |raw| decoder.decode(sequences, speculator.as_deref_mut(), raw, &firsts))?;
        self.sequences.add(batch);
        Ok(())
    }

    /// Announces a new text: policies that count by sequence start over. They do not for a text that begins beside
    /// others (`is_alone`: false), whose experts they would forget.
    pub fn begin_text(&mut self, is_alone: bool) {
        if let Some(memories) = self.model.shared.experts.memories().as_mut() {
            memories.begin_sequence(is_alone);
        }
    }

    /// Counters of prompts and decoding so far: the first two fields of [`Session::stats`], at no cost.
    pub fn phases(&self) -> (PhaseStats, PhaseStats) {
        (self.decoder.stats.prompt, self.decoder.stats.decode)
    }

    /// Maximum number of tokens, each of its own sequence, that may be decoded at once under the rules for generated
    /// tokens. Those differ from the rules for prompts where results are approximate.
    pub fn decodes_at_once(&self) -> usize {
        let shared = &self.model.shared;
        let is_exact = shared.source.precisions.is_exact() && shared.options.routing.is_off();
        if is_exact { usize::MAX } else { DECODE_TOKENS_MAX }
    }
}

/// Evaluates the batches of a session, and counts their cost.
pub(super) struct Decoder {
    pub(super) hook: Option<EvalHook<Observed>>,
    /// Before the model: it notes that the context is gone.
    pub(super) phases: Phases,
    pub(super) interrupt: Interrupt,
    /// Whether a backend of ours is notified before each graph.
    pub(super) announces: bool,
    pub(super) purpose: Purpose,
    /// Largest number of threads for a batch.
    pub(super) n_threads: i32,
    /// Costs of both phases so far.
    pub(super) stats: Stats,
    /// Whether a batch has shown that hobbit receives the products of all expert tensors.
    pub(super) checked: bool,
    /// Where prompts may be evaluated in ubatches wider than usual.
    pub(super) wide: Option<Wide>,
}

/// Sizes and measurements by which the width of a prompt's ubatches is chosen.
pub(super) struct Wide {
    /// With the tokens of the prompt still to be set.
    input: WidthInput,
    /// What was measured.
    measured: Option<PromptCosts>,
    /// Width of the last ubatch of a prompt.
    last: Option<usize>,
}

/// Bytes of reads that tell how fast a disk is.
const RATE_BYTES: u64 = 16 << 20;

impl Wide {
    /// `options` are the context's, with buffers for its widest ubatch.
    pub(super) fn new(
        usual: u32,
        n_threads: i32,
        model: &Model,
        options: &SessionOptions,
        description: &Description,
    ) -> Self {
        let (plan, n_ubatch) = (&description.plan, u64::from(options.n_ubatch.max(1)));
        let high = plan.pools.iter().filter(|pool| pool.precision == Precision::High);
        // Slots that do not follow the phase lose nothing to a wide ubatch.
        let token_bytes = if plan.decode.is_some() { plan.fixed.compute / n_ubatch } else { 0 };
        let slots = plan.decode.as_ref().map_or(plan.expert_cache, |decode| decode.expert_cache);
        let on_host = slots.saturating_sub(u64::from(usual) * token_bytes).max(plan.expert_cache);
        let copying = || description.devices.iter().filter(|device| !device.unified && device.experts > 0);
        let on_devices = copying().map(|device| device.cache_bytes).sum();
        let expert_bytes = high.map(|pool| pool.expert_stride * u64::from(pool.n_versions)).sum();
        let copies = copying().next().is_some();
        let cache_bytes = if copies { on_devices } else { on_host };
        let info = model.info();
        let unused = 1.0 - f64::from(info.n_expert_used) / f64::from(info.n_expert.max(1));
        let used = 1.0 - info.expert_bytes as f64 * unused / info.tensor_bytes.max(1) as f64;
        let threads = description.devices.is_empty().then_some(n_threads.max(1).unsigned_abs());
        let missing = u64::saturating_sub(expert_bytes, cache_bytes);
        let costs = PromptCosts::usual(info.n_params as f64 * used, missing, threads);
        // Free slots are being filled by now. A guess ten times too fast would cost a pass over the experts.
        let mut memories = model.shared.experts.memories();
        let rate = memories.as_mut().filter(|_| threads.is_some()).and_then(|own| own.filling_rate(RATE_BYTES));
        drop(memories);
        let input = WidthInput {
            n_prompt: 0,
            usual: usual as usize,
            widest: options.n_ubatch as usize,
            expert_bytes,
            cache_bytes,
            token_bytes,
            n_layers: model.shared.experts.map().layers.len(),
            costs: PromptCosts { bytes_per_second: rate.unwrap_or(costs.bytes_per_second), ..costs },
        };
        Self { input, measured: None, last: None }
    }

    /// The widths so far.
    pub(super) fn report(&self) -> WidthReport {
        let WidthInput { usual, widest, .. } = self.input;
        WidthReport { usual, widest, last: self.last, costs: self.measured }
    }

    /// Tokens of the next ubatch of a prompt of which `n_prompt` are left.
    pub(super) fn width(&self, n_prompt: usize) -> usize {
        WidthInput { n_prompt, ..self.input }.choose()
    }

    /// As [`WidthInput::staging`].
    fn staging(&self, n_tokens: u32) -> u64 {
        self.input.staging(n_tokens as usize)
    }
}

impl Decoder {
    /// One empty evaluation, so that the first prompt does not pay for first touches. MoE models skip it: llama.cpp's
    /// warm-up would use every expert of every layer.
    pub(super) fn warm_up(&mut self, sequences: &mut Sequences) -> Result<(), EvalError> {
        // SAFETY: the context is live.
        unsafe {
            let (context, bos) =
                (sequences.context.as_ptr(), llama::llama_vocab_bos(sequences.model.shared.raw.vocab()));
            let mut token = [if bos >= 0 { bos } else { 0 }];
            llama::llama_set_warmup(context, true);
            let batch = llama::llama_batch_get_one(token.as_mut_ptr(), 1);
            let result = self.decode(sequences, None, batch, &[(0, 0)]);
            llama::llama_set_warmup(context, false);
            sequences.context.clear();
            llama::llama_synchronize(context);
            llama::llama_perf_context_reset(context);
            self.stats = Stats::default();
            result
        }
    }

    /// Evaluates a batch and counts its cost. `firsts` are the sequences it adds to, each with its first new position:
    /// a failed batch's tokens from there on are removed, so that the caller may try again.
    pub(super) fn decode(
        &mut self,
        sequences: &mut Sequences,
        mut speculator: Option<&mut Speculator>,
        batch: llama::llama_batch,
        firsts: &[(i32, i32)],
    ) -> Result<(), EvalError> {
        if self.interrupt.is_set() {
            return Err(EvalError::Interrupted);
        }
        let experts = &sequences.model.shared.experts;
        calling::take_failure();
        calling::take_compute_buffer();
        // SAFETY: the batch's arrays outlive the call.
        let phase = unsafe { phase_of(&batch) };
        let n_tokens = batch.n_tokens.unsigned_abs();
        if let Some(memories) = experts.memories().as_mut() {
            self.phases.begin(n_tokens, self.wide.as_ref().map_or(0, |wide| wide.staging(n_tokens)), memories);
            memories.begin_batch(phase, n_tokens);
            if let Some(speculator) = speculator.as_mut().filter(|_| phase.is_decode()) {
                // SAFETY: as above.
                memories.expect_drafts(&speculator.expected(unsafe { places_of(&batch) }));
            }
        }
        if !batch.token.is_null() {
            // SAFETY: the batch's arrays are as long as its number of entries.
            experts.tables().expect(unsafe { std::slice::from_raw_parts(batch.token, n_tokens as usize) });
        }
        let (before, busy_before) = counters(experts);
        let is_measured = self.wide.is_some() && !phase.is_decode();
        let link_before = experts.memories().as_ref().filter(|_| is_measured).and_then(Tiers::link);
        sequences.all.iter_mut().for_each(|own| own.entry = None);
        let started = Instant::now();
        let running = contention::running(self.n_threads, phase.is_decode());
        let purpose = Purpose { phase, ..self.purpose };
        // SAFETY: the context is live and the batch's arrays outlive the call.
        let (code, thrown) = purpose.during(|| unsafe { sequences.context.decode(batch, self.announces) });
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
        let mut originals = sequences.model.shared.source.originals.iter();
        let written_to = originals.find_map(|original| original.check_unwritten().err());
        let failure = calling::take_failure().or(written_to.map(|error| error.to_string()));
        if code != 0 || failure.is_some() {
            return Err(undo(sequences, code, failure, thrown, firsts));
        }
        if let Some(speculator) = speculator.as_mut().filter(|own| own.follows && !batch.token.is_null()) {
            self.follow(speculator, &batch, purpose);
        }
        let with_follower = started.elapsed().as_secs_f64();
        let (after, busy_after) = counters(experts);
        let cost = cost_of(&before, &after, u64::from(n_tokens), (seconds, busy_after - busy_before));
        if let Some(speculator) = speculator {
            let cost = PhaseStats { seconds: with_follower, ..cost };
            speculator.evaluated(phase, &cost, after.draft_misses - before.draft_misses);
        }
        if let Some(wide) = self.wide.as_mut().filter(|_| !phase.is_decode()) {
            let link = experts.memories().as_ref().and_then(Tiers::link);
            let cost = link_before.zip(link).map_or(cost, |(before, after)| over_link(&cost, &before, &after));
            wide.measured = PromptCosts::after(wide.measured, &cost);
            wide.input.costs = wide.measured.unwrap_or(wide.input.costs);
            wide.last = Some(n_tokens as usize);
        }
        let stats = if phase.is_decode() { &mut self.stats.decode } else { &mut self.stats.prompt };
        *stats = *stats + cost;
        let unseen = if self.checked { Vec::new() } else { sequences.model.unseen_experts() };
        if let Some(first) = unseen.first() {
            return Err(EvalError::Seam(format!(
                "the products of {} expert tensors ({first} first) did not reach hobbit: this architecture is not \
                 supported",
                unseen.len()
            )));
        }
        self.checked = true;
        Ok(())
    }

    /// Shows an evaluated batch to the drafter that reads its hidden states. The text does not depend on it: after a
    /// failure it starts over.
    fn follow(&self, speculator: &mut Speculator, batch: &llama::llama_batch, purpose: Purpose) {
        let running = contention::running(self.n_threads, false);
        if let Err(error) = purpose.during(|| speculator.follow(batch))
            && !self.interrupt.is_set()
        {
            log::notice(format_args!("the drafter: {error}"));
        }
        drop(running);
        calling::take_failure();
    }

    /// Calls `compute`, which evaluates generated tokens on the context.
    pub(super) fn computing<R>(&self, compute: impl FnOnce() -> R) -> R {
        let running = contention::running(self.n_threads, false);
        let result = Purpose { phase: Phase::Decode, ..self.purpose }.during(compute);
        drop(running);
        result
    }
}

/// Removes a failed batch's tokens; if that fails, the whole context. Returns the error for the caller.
fn undo(
    sequences: &mut Sequences,
    code: i32,
    failure: Option<String>,
    thrown: String,
    firsts: &[(i32, i32)],
) -> EvalError {
    if let Some(memories) = sequences.model.shared.experts.memories().as_mut().filter(|_| failure.is_some()) {
        memories.host.memory.settle();
    }
    // -1: llama.cpp refused the batch and placed nothing.
    let undone = code == -1 || firsts.iter().all(|&(sequence, first)| sequences.cut(sequence, first.max(0) as usize));
    if !undone {
        // A partial batch that cannot be undone must not stay.
        sequences.clear();
        return match failure {
            None if code == 2 => EvalError::Interrupted,
            failure => EvalError::ContextLost(failure.unwrap_or_else(|| format!("llama_decode: {code}"))),
        };
    }
    match (failure, code) {
        (Some(reason), _) => EvalError::Decode(reason),
        (None, 2) => EvalError::Interrupted,
        (None, 1) => sequences.context_full(),
        (None, _) => {
            let logged = log::take_errors();
            EvalError::Decode(if thrown.is_empty() { format!("llama_decode: {code} {logged}") } else { thrown })
        }
    }
}

/// Counters of the host, and seconds of its reads.
fn counters(experts: &Experts) -> (Counters, f64) {
    let memories = experts.memories();
    let counters = memories.as_ref().map(|own| (own.host.counters(), own.host.reads().busy_seconds()));
    counters.unwrap_or_default()
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

/// As `cost`, with copies to devices in place of reads, by the devices' clock. A link that was not measured is taken to
/// be what the batch waited for.
fn over_link(cost: &PhaseStats, before: &Link, after: &Link) -> PhaseStats {
    let (bytes, seconds) = (after.bytes - before.bytes, (after.clock_seconds - before.clock_seconds).max(0.0));
    let copying = after.seconds_per_byte.map_or(seconds, |each| each * bytes as f64).max(cost.io_busy_seconds);
    let waited = copying.min(seconds);
    PhaseStats { seconds, bytes_read: bytes, io_busy_seconds: copying, io_wait_seconds: waited, ..*cost }
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
