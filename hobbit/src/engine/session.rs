//! A session: one llama.cpp context, its experts' residency, and what was measured.

mod generation;

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ggml_sys::{llama, shim};

use super::contention;
use super::context::context_params;
use super::device;
use super::error::Error;
use super::hook::{RouterHook, RouterObserver};
use super::log;
use super::memory;
use super::model::{Model, text_of, with_message};
use super::offload::failure;
use super::residency::{Counters, Description};
use super::sampling::Sampler;
use crate::options::{SessionOptions, Token};
use crate::plan::MemoryPlan;
use crate::stats::{
    CachingReport, DeviceCounters, DeviceReport, PhaseStats, PrecisionReport, Stats, Timings, WarmStart, peak_rss_bytes,
};

pub use generation::Generation;

/// One entry of a batch for [`Session::evaluate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchToken {
    /// The token.
    pub token: Token,
    /// Its position in its sequence.
    pub position: i32,
    /// Its sequence, `0..n_seq_max`.
    pub sequence: i32,
    /// Whether [`Session::logits`] will be asked for this entry.
    pub logits: bool,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The model chose an end-of-generation token (which is not yielded).
    Eog(Token),
    /// `n_predict` tokens were generated.
    Length,
    /// The context is full.
    ContextFull,
    /// [`Interrupt::set`] was called.
    Interrupted,
}

/// Stops a running evaluation from another thread or a signal handler.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// The running evaluation, and every later one, ends with [`Error::Interrupted`].
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Evaluation may go on.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether [`Interrupt::set`] was called last.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// See the [module](self).
pub struct Session {
    // Dropped before the hook, which it calls, and the model, which it reads.
    context: Context,
    hook: Option<Box<RouterHook>>,
    model: Model,
    options: SessionOptions,
    description: Description,
    interrupt: Interrupt,
    /// A backend of ours is told before each graph.
    tells: bool,
    /// The most that a batch is evaluated on.
    n_threads: i32,
    n_past: usize,
    n_prompt: usize,
    /// Sampled and yielded, but not evaluated yet.
    pending: Option<Token>,
    /// The last logits are those after the last token of the context.
    is_current: bool,
    stats: Stats,
    /// What devices had done for earlier sessions.
    devices_before: Vec<DeviceCounters>,
    sample_ms: f64,
    sample_count: u64,
    checked: bool,
}

struct Context(NonNull<llama::llama_context>);

// SAFETY: a context may move between threads as long as one uses it at a time, which `&mut Session` ensures.
unsafe impl Send for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by us, freed once.
        unsafe { llama::llama_free(self.0.as_ptr()) };
    }
}

impl Session {
    pub(super) fn new(
        model: &Model,
        options: &SessionOptions,
        observer: Option<RouterObserver>,
    ) -> Result<Session, Error> {
        let interrupt = Interrupt::default();
        let mut params = context_params(options, Arc::as_ptr(&interrupt.0));
        let mut hook = RouterHook::new(observer, model.wants_router_weights());
        if let Some(hook) = &mut hook {
            hook.install(&mut params);
        }
        log::clear_errors();
        let n_backends = device::n_backends_made();
        let init = || {
            with_message(|message, capacity| {
                // SAFETY: the model is live; params point at the interrupt flag, which the session keeps.
                unsafe { shim::hobbit_context_init(model.as_ptr(), params, message, capacity) }
            })
        };
        let mut context = init();
        // An earlier session's experts may have taken what this one needs.
        while context.is_err() && model.make_room_on_devices() {
            log::clear_errors();
            context = init();
        }
        let context = context.map_err(|message| {
            let reason = if message.is_empty() { log::take_errors() } else { message };
            let n_ctx = if options.n_ctx == 0 { model.info().n_ctx_train } else { options.n_ctx };
            Error::Context { n_ctx, reason }
        })?;
        let context = Context(context);
        let earlier = model.shared.experts.residency().as_ref().map(|residency| residency.device_counters());
        let devices_before = earlier.unwrap_or_default();
        let description = memory::set_up(model, options, context.0)?;
        let mut session = Session {
            context,
            hook,
            model: model.clone(),
            options: options.clone(),
            description,
            interrupt,
            tells: device::n_backends_made() > n_backends,
            n_threads: params.n_threads.max(params.n_threads_batch),
            n_past: 0,
            n_prompt: 0,
            pending: None,
            is_current: false,
            stats: Stats::default(),
            devices_before,
            sample_ms: 0.0,
            sample_count: 0,
            checked: false,
        };
        if options.warmup && !model.info().is_moe() {
            session.warm_up()?;
        }
        Ok(session)
    }

    /// How the memory budget is divided.
    pub fn plan(&self) -> &MemoryPlan {
        &self.description.plan
    }

    /// Which I/O engine reads the experts, and why.
    pub fn io_choice(&self) -> &str {
        &self.description.io_choice
    }

    /// Who evicts, by which profile, and how slots are divided among layers.
    pub fn caching(&self) -> &CachingReport {
        &self.description.caching
    }

    /// In which precision experts are used, and from which files.
    pub fn precision(&self) -> &PrecisionReport {
        &self.description.precision
    }

    /// The devices that hold layers, in their order; empty where everything is on the CPU.
    pub fn devices(&self) -> &[DeviceReport] {
        &self.description.devices
    }

    /// What the first session of the model found of an earlier run; `None` if there was nothing, or nothing was asked for.
    pub fn warm_start(&self) -> Option<WarmStart> {
        self.description.warm_start
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Context length in tokens.
    pub fn n_ctx(&self) -> u32 {
        // SAFETY: the context is live.
        unsafe { llama::llama_n_ctx(self.context.0.as_ptr()) }
    }

    /// Tokens in the context, a sampled token that waits for its evaluation included.
    pub fn n_past(&self) -> usize {
        self.n_past + usize::from(self.pending.is_some())
    }

    /// A handle that stops a running evaluation.
    pub fn interrupt_handle(&self) -> Interrupt {
        self.interrupt.clone()
    }

    /// Nothing will be evaluated for a while, because somebody types, say: free slots are filled meanwhile
    /// ([`CachingOptions::fill`](crate::CachingOptions::fill)). Returns at once.
    pub fn idle(&self) {
        if let Some(residency) = self.model.shared.experts.residency().as_mut() {
            residency.idle();
        }
    }

    /// Forgets the context: the next token is the first of a new sequence.
    pub fn reset(&mut self) {
        // SAFETY: the context is live.
        unsafe { llama::llama_memory_clear(self.memory(), true) };
        self.n_past = 0;
        self.n_prompt = 0;
        self.pending = None;
        self.is_current = false;
        if let Some(residency) = self.model.shared.experts.residency().as_mut() {
            residency.begin_sequence();
        }
    }

    /// Forgets everything from token `n_keep` on.
    ///
    /// # Errors
    /// Fewer than `n_keep` tokens in the context, or a model that cannot forget a part (a recurrent one): the context
    /// is then unchanged.
    pub fn truncate(&mut self, n_keep: usize) -> Result<(), Error> {
        if n_keep > self.n_past() {
            return Err(Error::Decode(format!("the context holds {} tokens, not {n_keep}", self.n_past())));
        }
        if n_keep == self.n_past() {
            return Ok(());
        }
        // SAFETY: the context is live.
        if n_keep < self.n_past && !unsafe { llama::llama_memory_seq_rm(self.memory(), 0, n_keep as i32, -1) } {
            return Err(Error::Decode("this model cannot forget a part of its context".into()));
        }
        // Without the pending token alone, the logits are those from which it was sampled.
        self.is_current &= n_keep == self.n_past;
        self.pending = None;
        self.n_past = n_keep;
        self.n_prompt = self.n_prompt.min(n_keep);
        Ok(())
    }

    /// Evaluates `tokens` after what is in the context, in batches of `n_batch`. Logits of the last are kept for
    /// [`Session::generate`].
    ///
    /// # Errors
    /// A full context ([`Error::ContextFull`]), an interrupt, a failed read. The context is then as before, unless it
    /// was shifted or the model cannot forget a part of it (a recurrent one: it is then empty).
    pub fn feed(&mut self, tokens: &[Token]) -> Result<(), Error> {
        self.feed_by(tokens, Session::feed_pieces)
    }

    /// As [`Session::feed`], with the same bits: after each ubatch `progress` is told how many of the tokens are evaluated.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn feed_with(&mut self, tokens: &[Token], mut progress: impl FnMut(usize)) -> Result<(), Error> {
        self.feed_by(tokens, |session, all| session.feed_ubatches(all, all.len() - tokens.len(), &mut progress))
    }

    fn feed_by(
        &mut self,
        tokens: &[Token],
        feed: impl FnOnce(&mut Session, &[Token]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let waiting = self.pending.take();
        let before = self.n_past;
        let all: Vec<Token> = waiting.into_iter().chain(tokens.iter().copied()).collect();
        let result = feed(self, &all);
        if result.is_err() && self.n_past > before {
            // SAFETY: the context is live.
            if unsafe { llama::llama_memory_seq_rm(self.memory(), 0, before as i32, -1) } {
                (self.n_past, self.is_current) = (before, false);
            }
        }
        if result.is_err() && self.n_past == before {
            self.pending = waiting;
        } else {
            self.n_prompt = self.n_past;
        }
        result
    }

    fn feed_pieces(&mut self, tokens: &[Token]) -> Result<(), Error> {
        for piece in tokens.chunks(self.n_batch()) {
            self.make_room(piece.len())?;
            let mut piece = piece.to_vec();
            // SAFETY: the batch borrows `piece`, which outlives its evaluation.
            let batch = unsafe { llama::llama_batch_get_one(piece.as_mut_ptr(), piece.len() as i32) };
            self.decode(batch, &[(0, self.n_past as i32)])?;
            self.n_past += piece.len();
        }
        Ok(())
    }

    /// As [`Session::feed_pieces`], a ubatch at a time; `n_before` of the tokens are no news to `progress`.
    fn feed_ubatches(
        &mut self,
        tokens: &[Token],
        n_before: usize,
        progress: &mut dyn FnMut(usize),
    ) -> Result<(), Error> {
        let n_ubatch = self.n_ubatch();
        let mut done = 0;
        for piece in tokens.chunks(self.n_batch()) {
            self.make_room(piece.len())?;
            let mut rest = piece;
            while !rest.is_empty() {
                // llama.cpp cuts a batch like this; but a last single token would pass for a generated one.
                let n = if rest.len() <= n_ubatch + 1 { rest.len() } else { n_ubatch };
                let (ubatch, left) = rest.split_at(n);
                let has_logits = left.is_empty();
                self.feed_ubatch(ubatch, has_logits)?;
                (rest, done) = (left, done + n);
                progress(done.saturating_sub(n_before));
            }
        }
        Ok(())
    }

    /// Evaluates tokens for which there is room, with logits of the last if `has_logits`.
    fn feed_ubatch(&mut self, tokens: &[Token], has_logits: bool) -> Result<(), Error> {
        let mut tokens = tokens.to_vec();
        let mut logits = vec![0; tokens.len()];
        if let Some(last) = logits.last_mut() {
            *last = i8::from(has_logits);
        }
        // SAFETY: the batch borrows both vectors, which outlive its evaluation.
        let mut batch = unsafe { llama::llama_batch_get_one(tokens.as_mut_ptr(), tokens.len() as i32) };
        batch.logits = logits.as_mut_ptr();
        self.decode(batch, &[(0, self.n_past as i32)])?;
        self.n_past += tokens.len();
        Ok(())
    }

    /// Generates after what is in the context, at most `n_predict` tokens (`None`: until the model ends).
    /// [`Session::feed`] must have evaluated at least one token since the session was opened, reset or truncated:
    /// otherwise the first token is [`Error::NothingEvaluated`].
    pub fn generate<'a>(&'a mut self, sampler: &'a mut Sampler, n_predict: Option<usize>) -> Generation<'a> {
        Generation::new(self, sampler, n_predict)
    }

    /// Evaluates one batch as it is, of at most `n_batch` entries. For callers that place tokens themselves
    /// (several sequences, logits of a whole prompt); not to be mixed with [`Session::feed`] on sequence 0.
    ///
    /// # Errors
    /// More entries than `n_batch` ([`Error::BatchTooLarge`]), and as [`Session::feed`].
    pub fn evaluate(&mut self, batch: &[BatchToken]) -> Result<(), Error> {
        if batch.is_empty() {
            return Ok(());
        }
        let n_batch = self.n_batch();
        if batch.len() > n_batch {
            return Err(Error::BatchTooLarge { n_tokens: batch.len(), n_batch });
        }
        let n_outputs = batch.iter().filter(|entry| entry.logits).count();
        let n_outputs_max = self.options.n_outputs_max.max(self.options.n_seq_max) as usize;
        if self.options.n_outputs_max > 0 && n_outputs > n_outputs_max {
            return Err(Error::Decode(format!(
                "logits of {n_outputs} entries are asked for, of a session that keeps room for {n_outputs_max}: open it \
                 with a larger n_outputs_max"
            )));
        }
        let mut firsts: BTreeMap<i32, i32> = BTreeMap::new();
        for entry in batch {
            let first = firsts.entry(entry.sequence).or_insert(entry.position);
            *first = entry.position.min(*first);
        }
        let firsts: Vec<(i32, i32)> = firsts.into_iter().collect();
        let mut tokens: Vec<Token> = batch.iter().map(|entry| entry.token).collect();
        let mut positions: Vec<i32> = batch.iter().map(|entry| entry.position).collect();
        let mut counts: Vec<i32> = vec![1; batch.len()];
        let mut sequences: Vec<i32> = batch.iter().map(|entry| entry.sequence).collect();
        let mut sequence_lists: Vec<*mut i32> = sequences.iter_mut().map(|sequence| &raw mut *sequence).collect();
        let mut logits: Vec<i8> = batch.iter().map(|entry| i8::from(entry.logits)).collect();
        let raw = llama::llama_batch {
            n_tokens: batch.len() as i32,
            token: tokens.as_mut_ptr(),
            embd: std::ptr::null_mut(),
            pos: positions.as_mut_ptr(),
            n_seq_id: counts.as_mut_ptr(),
            seq_id: sequence_lists.as_mut_ptr(),
            logits: logits.as_mut_ptr(),
        };
        self.decode(raw, &firsts)
    }

    /// Makes sequence `to` begin with all that sequence `from` holds, in place of what it held: texts that begin alike share
    /// the evaluation of their beginning. Both are below `n_seq_max`. For callers of [`Session::evaluate`].
    ///
    /// # Errors
    /// A sequence that the session does not have.
    pub fn copy_sequence(&mut self, from: i32, to: i32) -> Result<(), Error> {
        let n_seq_max = self.options.n_seq_max.max(1);
        for sequence in [from, to] {
            if u32::try_from(sequence).map_or(true, |sequence| sequence >= n_seq_max) {
                return Err(Error::Decode(format!("sequence {sequence} of a session with {n_seq_max}")));
            }
        }
        // SAFETY: the context is live and has both sequences.
        unsafe { llama::llama_memory_seq_cp(self.memory(), from, to, -1, -1) };
        Ok(())
    }

    /// Logits, `[n_vocab]`, of an entry of the last batch that asked for them.
    pub fn logits(&self, index: usize) -> Option<&[f32]> {
        let index = i32::try_from(index).ok()?;
        // SAFETY: the context is live; a non-null answer points at one row of its output buffer, valid until the
        // next evaluation, which needs `&mut self`.
        unsafe {
            let row = llama::llama_get_logits_ith(self.context.0.as_ptr(), index);
            (!row.is_null()).then(|| std::slice::from_raw_parts(row, self.model.n_vocab()))
        }
    }

    /// Names of expert tensors whose products have not reached hobbit yet; empty after the first evaluation.
    pub fn unseen_experts(&self) -> Vec<String> {
        self.model.shared.experts.residency().as_ref().map_or_else(Vec::new, |residency| residency.unseen())
    }

    /// What was counted so far.
    pub fn stats(&self) -> Stats {
        let residency = self.model.shared.experts.residency();
        let layers = residency.as_ref().map_or_else(Vec::new, |r| r.layer_stats());
        let mut devices = residency.as_ref().map_or_else(Vec::new, |r| r.device_counters());
        for (now, before) in devices.iter_mut().zip(&self.devices_before) {
            *now = now.since(before);
        }
        let prefetch = residency.as_ref().and_then(|r| r.prefetch_report());
        Stats { layers, devices, prefetch, peak_rss_bytes: peak_rss_bytes(), ..self.stats.clone() }
    }

    /// Times so far, in llama.cpp's categories.
    pub fn timings(&self) -> Timings {
        // SAFETY: the context is live.
        let perf = unsafe { llama::llama_perf_context(self.context.0.as_ptr()) };
        Timings {
            load_ms: self.model.shared.load_time.as_secs_f64() * 1e3,
            prompt_ms: perf.t_p_eval_ms,
            prompt_tokens: perf.n_p_eval.max(0) as u64,
            eval_ms: perf.t_eval_ms,
            eval_runs: perf.n_eval.max(0) as u64,
            sample_ms: self.sample_ms,
            sample_count: self.sample_count,
            total_ms: self.model.shared.opened_at.elapsed().as_secs_f64() * 1e3,
            graphs_reused: perf.n_reused.max(0) as u64,
        }
    }

    /// Context length of one sequence in tokens.
    fn n_ctx_seq(&self) -> u32 {
        // SAFETY: the context is live.
        unsafe { llama::llama_n_ctx_seq(self.context.0.as_ptr()) }
    }

    fn n_batch(&self) -> usize {
        // SAFETY: the context is live.
        unsafe { llama::llama_n_batch(self.context.0.as_ptr()) as usize }
    }

    fn n_ubatch(&self) -> usize {
        // SAFETY: the context is live.
        unsafe { llama::llama_n_ubatch(self.context.0.as_ptr()).max(1) as usize }
    }

    fn memory(&self) -> llama::llama_memory_t {
        // SAFETY: the context is live.
        unsafe { llama::llama_get_memory(self.context.0.as_ptr()) }
    }

    /// One empty evaluation, so that the first prompt does not pay for first touches. MoE models skip it: llama.cpp's
    /// warm-up would use every expert of every layer.
    fn warm_up(&mut self) -> Result<(), Error> {
        // SAFETY: the context is live.
        unsafe {
            let bos = llama::llama_vocab_bos(self.model.vocab());
            let mut token = [if bos >= 0 { bos } else { 0 }];
            llama::llama_set_warmup(self.context.0.as_ptr(), true);
            let result = self.decode(llama::llama_batch_get_one(token.as_mut_ptr(), 1), &[(0, 0)]);
            llama::llama_set_warmup(self.context.0.as_ptr(), false);
            llama::llama_memory_clear(self.memory(), true);
            llama::llama_synchronize(self.context.0.as_ptr());
            llama::llama_perf_context_reset(self.context.0.as_ptr());
            (self.stats, self.is_current) = (Stats::default(), false);
            result
        }
    }

    /// Makes room for `n` more tokens, by a context shift where that is wanted and possible.
    fn make_room(&mut self, n: usize) -> Result<(), Error> {
        let n_ctx = self.n_ctx_seq() as usize;
        if self.n_past + n <= n_ctx {
            return Ok(());
        }
        let full = Error::ContextFull { n_ctx: n_ctx as u32 };
        // SAFETY: the context is live.
        let can_shift = unsafe { llama::llama_memory_can_shift(self.memory()) };
        if !self.options.context_shift || !can_shift || n > n_ctx {
            return Err(full);
        }
        while self.n_past + n > n_ctx {
            let wanted = usize::try_from(self.options.n_keep).unwrap_or(self.n_prompt);
            let n_keep = (wanted + usize::from(self.model.adds_bos())).min(n_ctx.saturating_sub(4)).min(self.n_past);
            let n_discard = (self.n_past - n_keep) / 2;
            if n_discard == 0 {
                return Err(full);
            }
            let (keep, past) = (n_keep as i32, self.n_past as i32);
            let discard = n_discard as i32;
            // SAFETY: the context is live.
            unsafe {
                if !llama::llama_memory_seq_rm(self.memory(), 0, keep, keep + discard) {
                    return Err(full);
                }
                llama::llama_memory_seq_add(self.memory(), 0, keep + discard, past, -discard);
            }
            self.n_past -= n_discard;
        }
        Ok(())
    }

    /// Evaluates a batch and books what it cost. `firsts` are the sequences it adds to, each with its first new
    /// position: what a failed batch placed from there on is dropped, so that the caller may try again.
    fn decode(&mut self, batch: llama::llama_batch, firsts: &[(i32, i32)]) -> Result<(), Error> {
        if self.interrupt.is_set() {
            return Err(Error::Interrupted);
        }
        let experts = Arc::clone(&self.model.shared.experts);
        experts.take_failure();
        failure::take();
        if let Some(residency) = experts.residency().as_mut() {
            residency.begin_batch(batch.n_tokens.unsigned_abs());
        }
        let (before, busy_before) = self.counters();
        self.is_current = false;
        let started = Instant::now();
        let mut message = [0u8; 1024];
        let running = contention::running(self.n_threads);
        // SAFETY: the context is live and the batch's arrays outlive the call.
        let code = unsafe {
            let (text, capacity) = (message.as_mut_ptr().cast(), message.len());
            let code = shim::hobbit_decode(self.context.0.as_ptr(), batch, self.tells, text, capacity);
            llama::llama_synchronize(self.context.0.as_ptr());
            code
        };
        drop(running);
        let seconds = started.elapsed().as_secs_f64();
        if let Some(residency) = experts.residency().as_mut().filter(|_| code == 0) {
            residency.end_batch(batch.n_tokens.unsigned_abs(), seconds);
        }
        if let Some(hook) = &mut self.hook {
            hook.flush();
        }
        experts.forget_router_weights();
        // What the experts' side says is nearer to the cause than that the device's part failed.
        let of_device = failure::take();
        let written_to = self.model.shared.written_to();
        let failure = experts.take_failure().or(of_device).or(written_to);
        if code != 0 || failure.is_some() {
            if let Some(residency) = experts.residency().as_mut().filter(|_| failure.is_some()) {
                residency.settle();
            }
            // -1: llama.cpp refused the batch and placed nothing.
            // SAFETY: the context is live.
            let undone = code == -1
                || firsts.iter().all(|&(sequence, first)| unsafe {
                    llama::llama_memory_seq_rm(self.memory(), sequence, first, -1)
                });
            if !undone {
                // A recurrent state cannot be taken back by a part; half a batch must not stay in it.
                // SAFETY: the context is live.
                unsafe { llama::llama_memory_clear(self.memory(), true) };
                (self.n_past, self.n_prompt, self.pending) = (0, 0, None);
                let reason = failure.unwrap_or_else(|| format!("llama_decode: {code}"));
                return Err(Error::Decode(format!("{reason}; the context is lost, feed it again")));
            }
            return Err(match (failure, code) {
                (Some(reason), _) => Error::Decode(reason),
                (None, 2) => Error::Interrupted,
                (None, 1) => Error::ContextFull { n_ctx: self.n_ctx_seq() },
                (None, _) => {
                    let logged = log::take_errors();
                    let thrown = text_of(&message);
                    Error::Decode(if thrown.is_empty() { format!("llama_decode: {code} {logged}") } else { thrown })
                }
            });
        }
        let (after, busy_after) = self.counters();
        let phase = if batch.n_tokens == 1 { &mut self.stats.decode } else { &mut self.stats.prompt };
        *phase = *phase
            + PhaseStats {
                tokens: batch.n_tokens as u64,
                seconds,
                hits: after.hits - before.hits,
                misses: after.misses - before.misses,
                slices_loaded: after.slices_loaded - before.slices_loaded,
                bytes_read: after.bytes_read - before.bytes_read,
                io_busy_seconds: busy_after - busy_before,
                io_wait_seconds: after.wait_seconds - before.wait_seconds,
                used: after.used.since(before.used),
                missed: after.missed.since(before.missed),
                upgrades: after.upgrades - before.upgrades,
            };
        if let Some(residency) = experts.residency().as_mut().filter(|_| !self.checked) {
            let unseen = residency.unseen();
            if !unseen.is_empty() {
                return Err(Error::Seam(format!(
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

    fn counters(&self) -> (Counters, f64) {
        let residency = self.model.shared.experts.residency();
        residency.as_ref().map_or((Counters::default(), 0.0), |r| (r.counters(), r.busy_seconds()))
    }
}

#[cfg(test)]
mod tests;
