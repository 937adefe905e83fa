//! A session: one llama.cpp context, the residency of its experts, and its measurements.

pub(crate) mod media;
pub(crate) mod speculate;

mod checkpoints;
mod decode;
mod generate;
mod phases;
mod restore;
mod sequences;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ggml_sys::llama;

use crate::engine::cpu::backend;
use crate::engine::error::OpenError;
use crate::engine::ggml::context::Context;
use crate::engine::ggml::log;
use crate::engine::ggml::params::context_params;
pub use crate::engine::ggml::raw::BatchToken;
use crate::engine::memory::tiers::Description;
use crate::engine::model::Model;
use crate::engine::model::set_up;
use crate::engine::seam::calling::{self, Purpose};
use crate::engine::seam::hook::{Observed, RouterObserver};
use crate::engine::session::speculate::Speculator;
use crate::engine::text::sampling::Sampler;
use hobbit_core::options::{Pooling, SessionOptions, Token};
use hobbit_core::plan::{CONTEXT_TOKENS_MIN, PlanError, RunMode};
use hobbit_core::residency::{Latency, Lookahead, VirtualExperts};
use hobbit_core::route::Phase;
use hobbit_core::stats::{DeviceCounters, KernelReport, Stats, Timings, peak_rss_bytes};

use decode::{Decoder, Wide};
pub use generate::Generation;
use phases::Phases;
pub use restore::TakenOut;
pub use sequences::{NoShift, Sequences};

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
    /// Makes the running evaluation, and every later one, end with
    /// [`EvalError::Interrupted`](crate::EvalError::Interrupted).
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Allows evaluation again.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether the last call was [`Interrupt::set`].
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// One context: one or several sequences of tokens, and measurements of their evaluation.
pub struct Session {
    // Dropped before the context, which it may read.
    pub(crate) speculator: Option<Box<Speculator>>,
    // Dropped before the decoder, whose hook and interrupt its context calls.
    pub(crate) sequences: Sequences,
    // Dropped before the model, which it reads.
    decoder: Decoder,
    model: Model,
    description: Description,
    /// Counters of the devices at the session's start.
    devices_before: Vec<DeviceCounters>,
    sample_ms: f64,
    sample_count: u64,
}

impl Model {
    /// Plans memory and prepares to evaluate tokens.
    ///
    /// # Errors
    /// A budget that is too small ([`OpenError::Plan`]), refused memory, or settings that llama.cpp rejects.
    pub fn session(&self, options: &SessionOptions) -> Result<Session, OpenError> {
        Session::new(self, options, None)
    }

    /// As [`Model::session`]; `observer` receives every router's choice. Evaluation gets slightly slower, results stay
    /// the same.
    ///
    /// # Errors
    /// As [`Model::session`].
    pub fn session_observed(&self, options: &SessionOptions, observer: RouterObserver) -> Result<Session, OpenError> {
        Session::new(self, options, Some(observer))
    }
}

/// The context length for a session that asks for `n_ctx`; 0: what the model was trained with.
fn n_ctx_of(model: &Model, n_ctx: u32) -> u32 {
    if n_ctx == 0 { model.info().n_ctx_train } else { n_ctx }
}

/// The widths to try for a session's ubatches, the widest first; the usual one is the last.
fn widths(model: &Model, options: &SessionOptions) -> Vec<u32> {
    let (shared, usual) = (&model.shared, options.n_ubatch.min(options.n_batch));
    let is_fixed = shared.placed.run_mode.is_passthrough()
        || !model.info().is_moe()
        || !cfg!(target_os = "linux")
        || shared.options.precision.deterministic
        || shared.options.trace.is_some()
        // The plan has the buffers of the first session.
        || shared.experts.memories().is_some()
        || shared.followed.routes.is_some();
    let widest = options.n_ubatch_max.min(n_ctx_of(model, options.n_ctx));
    let halves = std::iter::successors(Some(widest), |width| Some(width / 2));
    let wide = halves.take_while(|width| !is_fixed && *width > usual).map(|width| width / 64 * 64);
    wide.chain([usual]).collect()
}

/// Makes a context, and the memory of the model's experts beside the first one.
fn prepare(
    model: &Model,
    options: &SessionOptions,
    params: llama::llama_context_params,
    purpose: &Purpose,
    usual: u32,
) -> Result<(Context, Description), OpenError> {
    let (n_batch, n_ubatch) = (options.n_batch.max(1), options.n_ubatch.min(options.n_batch.max(1)));
    let params = llama::llama_context_params { n_ctx: options.n_ctx, n_batch, n_ubatch, ..params };
    let shared = &model.shared;
    if shared.experts.memories().is_none() {
        shared.placed.needs.check_session(model.gguf(), shared.experts.map(), &shared.options, options)?;
    }
    log::clear_errors();
    // SAFETY: the model is live; params point at the interrupt flag and the hook, which the session keeps.
    let init = || {
        purpose.during(|| unsafe {
            if shared.options.mtp { Context::with_mtp(&shared.raw, params) } else { Context::new(&shared.raw, params) }
        })
    };
    let mut context = init();
    // An earlier session's experts may hold the memory that this one needs.
    while context.is_err() && model.shared.make_room_on_devices() {
        log::clear_errors();
        context = init();
    }
    let context = context.map_err(|message| {
        let reason = if message.is_empty() { log::take_errors() } else { message };
        OpenError::Context { n_ctx: n_ctx_of(model, options.n_ctx), reason }
    })?;
    if n_ubatch > usual {
        set_up::check_width(model, options, &context)?;
    }
    shared.adapters.begin(&context)?;
    let description = set_up::set_up(model, options, &context)?;
    Ok((context, description))
}

impl Session {
    fn new(model: &Model, options: &SessionOptions, observer: Option<RouterObserver>) -> Result<Session, OpenError> {
        let interrupt = Interrupt::default();
        let mut params = context_params(options, Arc::as_ptr(&interrupt.0));
        params.op_offload = model.shared.options.device.op_offload;
        let hook = Observed::hook(observer, model.shared.shown());
        if let Some(hook) = &hook {
            hook.install(&mut params);
        }
        let n_backends = calling::n_backends_made();
        let (kernels, run_mode) = (model.shared.options.kernels_taken(), model.shared.placed.run_mode);
        let gives_back = matches!(run_mode, RunMode::Passthrough { gives_back: true, .. });
        let purpose = Purpose {
            kernels,
            takes_batches: run_mode.is_passthrough(),
            gives_back,
            pinned_by: model.shared.pins_results(),
            phase: Phase::Prompt,
        };
        let earlier = model.shared.experts.memories().as_ref().map(|memories| memories.device_counters());
        let devices_before = earlier.unwrap_or_default();
        let n_ctx = if options.n_ctx == 0 { model.shared.placed.n_ctx } else { options.n_ctx };
        let widths = widths(model, &SessionOptions { n_ctx, ..options.clone() });
        let usual = options.n_ubatch.min(options.n_batch);
        let prepare = |n_ctx: u32, n_ubatch: u32| {
            let options = SessionOptions { n_ctx, n_ubatch, n_batch: options.n_batch.max(n_ubatch), ..options.clone() };
            prepare(model, &options, params, &purpose, usual)
                .map(|(context, description)| (options, context, description))
        };
        let is_fitted = options.n_ctx == 0 && n_ctx_of(model, n_ctx) > CONTEXT_TOKENS_MIN;
        // Wide buffers that do not fit must not make a session fail, nor a default context length a budget.
        let wide = widths.iter().filter(|width| **width > usual).find_map(|width| prepare(n_ctx, *width).ok());
        let (options, context, description) = match wide.map_or_else(|| prepare(n_ctx, usual), Ok) {
            Err(OpenError::Plan(PlanError::TooSmall { .. })) if is_fitted => prepare(CONTEXT_TOKENS_MIN, usual)?,
            prepared => prepared.map_err(|error| match error {
                OpenError::Plan(error) => OpenError::Plan(model.shared.or_whole(error)),
                error => error,
            })?,
        };
        let mut session = Session {
            speculator: None,
            decoder: Decoder {
                hook,
                phases: Phases::new(model, &options),
                interrupt,
                announces: calling::n_backends_made() > n_backends,
                purpose,
                n_threads: params.n_threads.max(params.n_threads_batch),
                stats: Stats::default(),
                checked: false,
                wide: (options.n_ubatch > usual)
                    .then(|| Wide::new(usual, params.n_threads_batch, model, &options, &description)),
            },
            sequences: Sequences::new(model, options, context, description.checkpoint_bytes),
            model: model.clone(),
            description,
            devices_before,
            sample_ms: 0.0,
            sample_count: 0,
        };
        let has_head = || ["cls.weight", "cls.output.weight"].iter().any(|name| model.gguf().tensor(name).is_some());
        let options = &session.sequences.options;
        if options.embeddings && session.context().pooling() == Some(Pooling::Rank) && !has_head() {
            // llama.cpp would return the first number of a hidden state.
            let reason = "the model has no head that ranks (tensor cls.weight or cls.output.weight): take another \
                          pooling, or a reranking model";
            return Err(OpenError::Unsupported(reason.into()));
        }
        if options.warmup && !model.info().is_moe() {
            session.decoder.warm_up(&mut session.sequences)?;
        }
        Ok(session)
    }

    /// The division of memory, and how experts are kept and read.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Sizes of the context, and embeddings of the last batch.
    pub fn context(&self) -> &Context {
        &self.sequences.context
    }

    /// Tokens in the context, including a pending sampled token.
    pub fn n_past(&self) -> usize {
        let first = &self.sequences.all[0];
        first.text().len() + usize::from(first.pending.is_some())
    }

    /// The sequences of the context; [`Session::feed`] and [`Session::generate`] use the first one, 0.
    pub fn sequences(&self) -> &Sequences {
        &self.sequences
    }

    /// As [`Session::sequences`], to change them.
    pub fn sequences_mut(&mut self) -> &mut Sequences {
        &mut self.sequences
    }

    /// A handle that stops a running evaluation.
    pub fn interrupt_handle(&self) -> Interrupt {
        self.decoder.interrupt.clone()
    }

    /// Announces a pause, such as user input: free slots are filled meanwhile
    /// ([`CachingOptions::fill`](crate::CachingOptions::fill)). Returns at once.
    pub fn idle(&self) {
        if let Some(memories) = self.model.shared.experts.memories().as_mut() {
            memories.host.idle();
        }
    }

    /// Clears the context: the next token is the first of a new sequence.
    pub fn reset(&mut self) {
        self.sequences.clear();
        if let Some(memories) = self.model.shared.experts.memories().as_mut() {
            memories.begin_sequence(true);
        }
    }

    /// Generates after the context's content, at most `n_predict` tokens (`None`: until the model ends).
    /// [`Session::feed`] must have evaluated at least one token since the session was opened, reset or truncated:
    /// otherwise the first token is [`EvalError::NothingEvaluated`](crate::EvalError::NothingEvaluated).
    pub fn generate<'a>(&'a mut self, sampler: &'a mut Sampler, n_predict: Option<usize>) -> Generation<'a> {
        Generation { session: self, sampler, left: n_predict, stop: None, failed: false }
    }

    /// Sets the scale of each LoRA adapter ([`Model::adapters`]) from the next evaluation on; adapters without a scale
    /// get 0. Tokens in the context are not evaluated again.
    pub fn set_adapters(&mut self, scales: &[f32]) {
        self.model.shared.adapters.apply(&self.sequences.context, scales);
    }

    /// Logits, `[n_vocab]`, of an entry of the last batch that asked for them.
    pub fn logits(&self, index: usize) -> Option<&[f32]> {
        self.sequences.context.logits(i32::try_from(index).ok()?, self.model.n_vocab())
    }

    /// Counters so far.
    pub fn stats(&self) -> Stats {
        let memories = self.model.shared.experts.memories();
        let layers = memories.as_ref().map_or_else(Vec::new, |own| own.host.layer_stats());
        let mut devices = memories.as_ref().map_or_else(Vec::new, |own| own.device_counters());
        for (now, before) in devices.iter_mut().zip(&self.devices_before) {
            *now = *now - *before;
        }
        let prefetch = memories.as_ref().and_then(|own| own.host.lookahead.as_ref().map(Lookahead::report));
        let virtual_experts =
            memories.as_ref().and_then(|own| own.host.virtual_experts.as_ref().map(VirtualExperts::report));
        let latency = memories.as_ref().and_then(|own| own.host.latency.as_ref().map(Latency::report));
        let copies = memories.as_ref().map_or_else(Vec::new, |own| own.host.reads().copies());
        let kernels = KernelReport { choice: self.decoder.purpose.kernels, trials: backend::trials() };
        Stats {
            layers,
            devices,
            prefetch,
            virtual_experts,
            latency,
            speculation: self.speculator.as_ref().map(|own| own.report()),
            kernels,
            prompt_width: self.decoder.wide.as_ref().map(Wide::report),
            copies,
            peak_rss_bytes: peak_rss_bytes(),
            ..self.decoder.stats.clone()
        }
    }

    /// Times so far, in llama.cpp's categories.
    pub fn timings(&self) -> Timings {
        // SAFETY: the context is live.
        let perf = unsafe { llama::llama_perf_context(self.sequences.context.as_ptr()) };
        Timings {
            load_ms: self.model.shared.opened.took.as_secs_f64() * 1e3,
            prompt_ms: perf.t_p_eval_ms,
            prompt_tokens: perf.n_p_eval.max(0) as u64,
            eval_ms: perf.t_eval_ms,
            eval_runs: perf.n_eval.max(0) as u64,
            sample_ms: self.sample_ms,
            sample_count: self.sample_count,
            total_ms: self.model.shared.opened.at.elapsed().as_secs_f64() * 1e3,
            graphs_reused: perf.n_reused.max(0) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::error::EvalError;
    use hobbit_core::options::ModelOptions;

    fn demo() -> Model {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo.gguf");
        Model::open(&path, &ModelOptions::default()).unwrap()
    }

    /// Failed llama.cpp assertions during batch preparation become errors of that batch.
    #[test]
    fn an_assertion_before_anything_is_computed_is_an_error() {
        let model = demo();
        let options = SessionOptions { n_ctx: 64, n_batch: 8, threads: Some(1), ..SessionOptions::default() };
        let mut session = model.session(&options).unwrap();
        let n_batch = session.context().n_batch();
        let mut tokens: Vec<Token> = vec![1; n_batch + 1];
        // Bypasses the check of `evaluate` to reach the assertion itself.
        // SAFETY: the batch borrows `tokens`, which outlive its evaluation.
        let batch = unsafe { llama::llama_batch_get_one(tokens.as_mut_ptr(), tokens.len() as i32) };
        let error = session.decoder.decode(&mut session.sequences, None, batch, &[(0, 0)]).unwrap_err();
        assert!(
            matches!(&error, EvalError::Decode(reason) if reason.contains("n_tokens_all <= cparams.n_batch")),
            "{error}"
        );
        session.feed(&tokens[..n_batch]).unwrap();
    }

    #[test]
    fn a_copy_replaces_the_sequence() {
        let model = demo();
        let base = SessionOptions { n_ctx: 64, n_seq_max: 2, threads: Some(1), ..SessionOptions::default() };
        for kv_unified in [true, false] {
            let mut session = model.session(&SessionOptions { kv_unified, ..base.clone() }).unwrap();
            let text = |tokens: &[Token], sequence| -> Vec<BatchToken> {
                let entry = |(at, token): (usize, &Token)| BatchToken {
                    token: *token,
                    position: at as i32,
                    sequence,
                    logits: true,
                };
                tokens.iter().enumerate().map(entry).collect()
            };
            session.evaluate(&text(&[5, 6, 7], 0)).unwrap();
            session.evaluate(&text(&[80, 90, 100], 1)).unwrap();
            session.sequences.copy(0, 1).unwrap();
            let next = |sequence| [BatchToken { token: 8, position: 3, sequence, logits: true }];
            session.evaluate(&next(0)).unwrap();
            let expected = session.logits(0).unwrap().to_vec();
            session.evaluate(&next(1)).unwrap();
            assert_eq!(session.logits(0).unwrap(), expected, "unified: {kv_unified}");
        }
    }

    #[test]
    fn ranking_needs_a_head() {
        let model = demo();
        let options = SessionOptions { n_ctx: 64, embeddings: true, ..SessionOptions::default() };
        let open = |pooling| model.session(&SessionOptions { pooling: Some(pooling), ..options.clone() });
        let error = open(Pooling::Rank).err().expect("it is refused").to_string();
        assert!(error.contains("cls.output.weight") && error.contains("another pooling"), "{error}");
        open(Pooling::Mean).unwrap();
    }
}
