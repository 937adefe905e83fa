//! Drafts of the next tokens, from llama.cpp's drafters (`common_speculative`). A session evaluates them in one step
//! with the token before, and takes those that its sampler chooses by itself: the text is the same as without.

mod draft;
mod follower;

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::Instant;

use ggml_sys::llama::{llama_batch, llama_context};
use ggml_sys::shim::{self, hobbit_draft_request, hobbit_speculative};

use crate::engine::error::{EvalError, OpenError};
use crate::engine::ggml::context::Context;
use crate::engine::ggml::raw::{Owned, checked, with_message};
use crate::engine::seam::experts::Experts;
use crate::engine::session::{Interrupt, Session};
use draft::Draft;
pub use draft::draft_bytes;
use hobbit_core::options::{DraftSource, SpeculationOptions, Token};
use hobbit_core::route::Phase;
use hobbit_core::speculation::{Gate, GateOptions, GateReport, Step};
use hobbit_core::stats::PhaseStats;

/// Why a session does not speculate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages are the documentation.
pub enum NoSpeculation {
    #[error("the model's recurrent state cannot go back to the token before a draft")]
    Recurrent,
}

/// A sequence that may have drafts after its pending token.
#[derive(Clone, Copy, Debug)]
pub struct DraftRequest {
    /// The sequence.
    pub sequence: i32,
    /// Most drafts that are wanted.
    pub n_max: usize,
    /// Fewer drafts are none.
    pub n_min: usize,
}

/// A request, and what drafters need to know of its sequence.
struct Wanted<'a> {
    sequence: i32,
    /// The text so far, behind the last image or sound.
    tokens: &'a [Token],
    /// The token after it, which is evaluated next.
    last: Token,
    /// Position of that token.
    position: i32,
    /// Most drafts that there is room for.
    n_max: usize,
    /// Fewer drafts are none.
    n_min: usize,
}

/// The drafters of one session, and their measurements.
pub(crate) struct Speculator {
    // Dropped before the draft's context.
    drafters: Drafters,
    draft: Option<Draft>,
    /// Whether a drafter reads the hidden states of each batch.
    pub(crate) follows: bool,
    interrupt: Interrupt,
    sequences: Vec<Known>,
    gate: Gate,
    /// Fewer drafts are none.
    n_min: usize,
    /// The step that is under way, and the place in it of each sequence.
    step: Step,
    places: Vec<i32>,
    /// Sequence and position of each token of the batch with drafts, and whether it is an accepted draft.
    batch: Vec<(i32, i32, bool)>,
}

#[derive(Clone, Debug, Default)]
struct Known {
    /// The text that the drafters know.
    text: Vec<Token>,
    /// Drafts that are evaluated in this step, after the token at a position.
    drafted: Option<(usize, usize)>,
}

impl Speculator {
    /// Drafters for a session, whose context outlives them.
    pub(crate) fn new(target: &Session, options: &SpeculationOptions) -> Result<Self, OpenError> {
        let n_sequences = target.sequences.all.len();
        let mut draft = None;
        if options.sources.contains(&DraftSource::DraftSimple) {
            let Some(own) = &options.draft else {
                return Err(OpenError::Speculation("draft-simple needs a draft model".to_owned()));
            };
            draft = Some(Draft::open(own, target)?);
        }
        let follows = options.sources.iter().any(|source| source.follows());
        let (mut context, mut tells) = (ptr::null_mut(), target.decoder.announces);
        if let Some(draft) = &draft {
            (context, tells) = (draft.session.context().as_ptr(), draft.session.decoder.announces);
        }
        if follows {
            context = target.context().follower().map(Context::as_ptr).ok_or_else(|| {
                OpenError::Speculation("draft-mtp: the model was opened without these layers".to_owned())
            })?;
        }
        Ok(Self {
            drafters: Drafters::new(target.context().as_ptr(), (context, tells), options, n_sequences as u32)?,
            draft,
            follows,
            interrupt: target.interrupt_handle(),
            sequences: vec![Known::default(); n_sequences],
            gate: Gate::new(GateOptions { n_max: options.n_max, fixed: options.fixed, always_n_max: follows }),
            n_min: options.n_min as usize,
            step: Step::default(),
            places: Vec::new(),
            batch: Vec::new(),
        })
    }

    /// Begins a step: drafts for each request, as many as are worth their cost.
    fn draft(&mut self, requests: &[Wanted]) -> Result<Vec<Vec<Token>>, EvalError> {
        self.places.extend(requests.iter().map(|request| request.sequence));
        self.step.drafts.resize(requests.len(), (0, 0));
        let mut drafts: Vec<Vec<Token>> = vec![Vec::new(); requests.len()];
        let behind = |draft: &Draft| {
            let drafting = requests.iter().filter(|request| request.n_max > 0);
            drafting.map(|request| draft.n_behind(request.sequence, request.tokens)).sum()
        };
        let n_max = self.gate.n_drafts(requests.len(), self.draft.as_ref().map_or(0, behind)) as usize;
        let started = Instant::now();
        let mut asked = Vec::new();
        for (request, drafts) in requests.iter().zip(&mut drafts) {
            // A trial of fewer drafts than count would bring none.
            let n_min = request.n_min.max(self.n_min);
            let n_max = if n_max > 0 { n_max.max(n_min).min(request.n_max) } else { 0 };
            let Some(own) = self.sequences.get_mut(request.sequence as usize).filter(|_| n_max > 0) else { continue };
            if !request.tokens.starts_with(&own.text) {
                self.drafters.begin(request.sequence, request.tokens)?;
                own.text.clear();
            }
            own.text.extend_from_slice(&request.tokens[own.text.len()..]);
            let mut position = request.position;
            if let Some(draft) = &mut self.draft {
                if !draft.make_room(request, n_max, requests)? {
                    continue;
                }
                let n_behind = draft.n_behind(request.sequence, request.tokens);
                let began = Instant::now();
                let n_known = draft.read(request.sequence, request.tokens, self.gate.n_reads_max(), &self.interrupt)?;
                if n_behind > 0 {
                    let (n_read, seconds) = self.step.caught_up;
                    let n_read = n_read + n_behind - (request.tokens.len() - n_known);
                    self.step.caught_up = (n_read, seconds + began.elapsed().as_secs_f64());
                }
                if n_known < request.tokens.len() {
                    continue;
                }
                position = request.tokens.len() as i32;
            }
            drafts.resize(n_max, 0);
            asked.push(hobbit_draft_request {
                sequence: request.sequence,
                position,
                n_max: n_max as i32,
                last: request.last,
                tokens: request.tokens.as_ptr(),
                n_tokens: request.tokens.len(),
                drafts: drafts.as_mut_ptr(),
                n_drafts: 0,
            });
        }
        if !asked.is_empty() {
            // SAFETY: each request points to tokens of the caller and to room for its drafts, which is not moved.
            let mut ask = || unsafe { self.drafters.draft(&mut asked) };
            let answered = match &self.draft {
                Some(draft) => draft.session.decoder.computing(ask),
                None => ask(),
            };
            if let Err(error) = answered {
                // The content of its context is unknown now.
                self.draft.iter_mut().for_each(Draft::forget_all);
                return Err(error);
            }
        }
        self.keep(requests, &mut drafts, asked.iter().map(|answer| answer.n_drafts))?;
        self.step.draft_seconds = started.elapsed().as_secs_f64() - self.step.caught_up.1;
        Ok(drafts)
    }

    /// Notes the drafts of each request, and drops them where they are fewer than count. `answers`: how many each one
    /// got that has room for some.
    fn keep(
        &mut self,
        requests: &[Wanted],
        drafts: &mut [Vec<Token>],
        mut answers: impl Iterator<Item = usize>,
    ) -> Result<(), EvalError> {
        for (at, (request, drafts)) in requests.iter().zip(drafts).enumerate() {
            if drafts.is_empty() {
                continue;
            }
            drafts.truncate(answers.next().unwrap_or(0));
            if (1..request.n_min).contains(&drafts.len()) {
                self.drafters.accept(request.sequence, 0)?;
                drafts.clear();
            }
            if let Some(draft) = &mut self.draft {
                draft.drafted(request, drafts);
            }
            if !drafts.is_empty() {
                let own = &mut self.sequences[request.sequence as usize];
                own.drafted = Some((request.position as usize, drafts.len()));
                self.step.drafts[at].0 = drafts.len() as u32;
            }
        }
        Ok(())
    }

    /// Which tokens of a batch, given by sequence and position, are drafts.
    pub(crate) fn expected(&mut self, batch: impl Iterator<Item = (i32, i32)>) -> Vec<bool> {
        self.batch = batch.map(|(sequence, position)| (sequence, position, false)).collect();
        let is_draft = |&(sequence, position, _): &(i32, i32, bool)| {
            let drafted = usize::try_from(sequence).ok().and_then(|at| self.sequences.get(at)?.drafted);
            drafted.is_some_and(|(last, n)| (last + 1..=last + n).contains(&(position as usize)))
        };
        self.batch.iter().map(is_draft).collect()
    }

    /// Tells the policy which tokens of the batch are accepted drafts, once all sequences of the step are judged.
    fn judge(&mut self, experts: &Experts) {
        let is_whole = self.sequences.iter().all(|own| own.drafted.is_none());
        if is_whole && !self.batch.is_empty() {
            let batch = std::mem::take(&mut self.batch);
            let judged: Vec<bool> = batch.into_iter().map(|(.., is_accepted)| is_accepted).collect();
            if let Some(memories) = experts.memories().as_mut() {
                memories.judge_drafts(&judged);
            }
        }
    }

    /// The target has evaluated a batch, whose arrays are valid for the call.
    pub(crate) fn follow(&mut self, batch: &llama_batch) -> Result<(), EvalError> {
        self.drafters.process(batch)
    }

    /// A batch was evaluated, at this cost; only drafts needed `draft_misses` missing experts.
    pub(crate) fn evaluated(&mut self, phase: Phase, cost: &PhaseStats, draft_misses: u64) {
        if !phase.is_decode() {
            return self.gate.interrupt();
        }
        self.step.seconds += cost.seconds;
        self.step.wait_seconds += cost.io_wait_seconds;
        let (of_drafts, others) = self.step.n_missing;
        self.step.n_missing = (of_drafts + draft_misses, others + cost.misses - draft_misses);
    }

    /// The text took all drafts of a sequence but the last `n_rejected`. False if it had no drafts.
    fn settled(&mut self, sequence: i32, n_rejected: usize) -> Result<bool, EvalError> {
        let own = self.sequences.get_mut(sequence as usize);
        let Some((position, n_drafted)) = own.and_then(|own| own.drafted.take()) else { return Ok(false) };
        let n_accepted = n_drafted.saturating_sub(n_rejected);
        if let Some(at) = self.places.iter().position(|place| *place == sequence) {
            self.step.drafts[at].1 = n_accepted as u32;
        }
        for (own, at, is_accepted) in &mut self.batch {
            let is_judged = *own == sequence && (position + 1..=position + n_accepted).contains(&(*at as usize));
            *is_accepted |= is_judged;
        }
        self.drafters.accept(sequence, n_accepted)?;
        Ok(true)
    }

    /// The step under way is not evaluated with its drafts.
    fn drop_drafts(&mut self) -> Result<(), EvalError> {
        for (sequence, own) in (0..).zip(&mut self.sequences) {
            if own.drafted.take().is_some() {
                self.drafters.accept(sequence, 0)?;
            }
        }
        self.step = Step::default();
        self.places.clear();
        self.batch.clear();
        Ok(())
    }

    /// Ends the step before.
    fn end_step(&mut self) {
        self.gate.stepped(&std::mem::take(&mut self.step));
        self.places.clear();
        self.sequences.iter_mut().for_each(|own| own.drafted = None);
    }

    /// Measurements so far, with the step under way.
    pub(crate) fn report(&self) -> GateReport {
        let mut gate = self.gate.clone();
        gate.stepped(&self.step);
        gate.report()
    }
}

impl Session {
    /// Drafts tokens from now on: [`Session::generate`] does so by itself, callers of [`Session::advance`] with
    /// [`Session::draft`]. The session needs room for the logits of a token and its drafts
    /// ([`SessionOptions::n_outputs_max`](hobbit_core::options::SessionOptions::n_outputs_max)).
    ///
    /// # Errors
    /// A session that cannot ([`Session::no_speculation`]), drafters that llama.cpp refuses, a lookup cache that cannot
    /// be read; a draft model that cannot be opened, has another vocabulary or does not fit.
    pub fn speculate(&mut self, options: &SpeculationOptions) -> Result<(), OpenError> {
        if let Some(reason) = self.no_speculation() {
            return Err(OpenError::Speculation(reason.to_string()));
        }
        let of_models = |source: &&DraftSource| source.follows() || **source == DraftSource::DraftSimple;
        let mut models = options.sources.iter().filter(of_models);
        let model = models.next();
        if let Some((one, other)) = model.zip(models.next()) {
            return Err(OpenError::Speculation(format!("{one} and {other} exclude each other")));
        }
        let following = model.filter(|source| source.follows());
        match following.zip(options.draft.as_ref()) {
            Some((source, draft)) => {
                self.speculator = None;
                follower::add(*source, draft, options.n_max, self)?;
            }
            None => {
                if let Some(source) = following.filter(|source| **source != DraftSource::DraftMtp) {
                    return Err(OpenError::Speculation(format!("{source} needs a draft made for this model (-md)")));
                }
            }
        }
        self.speculator = Some(Box::new(Speculator::new(self, options)?));
        Ok(())
    }

    /// Why the session cannot speculate; `None` if it can.
    pub fn no_speculation(&self) -> Option<NoSpeculation> {
        (self.model.is_recurrent() && self.context().rollback() == 0).then_some(NoSpeculation::Recurrent)
    }

    /// Drafts tokens after the pending one of each request, for [`Session::advance`]. To be called before every step of
    /// generation with the sequences that it continues. Nothing is drafted without [`Session::speculate`], and no more
    /// than the context has room for.
    ///
    /// # Errors
    /// A drafter fails; there are no drafts then.
    pub fn draft(&mut self, requests: &[DraftRequest]) -> Result<(), EvalError> {
        let Some(mut speculator) = self.speculator.take() else { return Ok(()) };
        speculator.end_step();
        // Drafts of a step that was given up.
        speculator.judge(&self.model.shared.experts);
        let wanted = |request: &DraftRequest| {
            let &DraftRequest { sequence, n_max, n_min } = request;
            let own = self.sequences.get(sequence)?;
            let position = own.text().len();
            let n_max = n_max.min(self.sequences.room_for_drafts(position));
            Some(Wanted { sequence, tokens: own.words(), last: own.pending?, position: position as i32, n_max, n_min })
        };
        let requests: Vec<Wanted> = requests.iter().filter_map(wanted).collect();
        let mut draft = || speculator.draft(&requests);
        let drafts = if self.context().follower().is_some() { self.decoder.computing(draft) } else { draft() };
        let sequences: Vec<i32> = requests.iter().map(|wanted| wanted.sequence).collect();
        self.speculator = Some(speculator);
        if drafts.is_err() {
            let _ = self.drop_drafts();
        }
        for (sequence, drafts) in sequences.into_iter().zip(drafts?) {
            self.sequences.all[sequence as usize].drafts = drafts;
        }
        Ok(())
    }

    /// Ends a sequence's step of generation: its drafts that the text did not take are forgotten.
    ///
    /// # Errors
    /// A drafter fails; a context that cannot forget them.
    pub fn settle(&mut self, sequence: i32) -> Result<(), EvalError> {
        let Some(speculator) = &mut self.speculator else { return Ok(()) };
        let (n_tokens, n_rejected) = (self.sequences.tokens(sequence).len(), self.sequences.n_ahead(sequence));
        if !speculator.settled(sequence, n_rejected)? {
            return Ok(());
        }
        // They are not generated tokens.
        let n_decoded = &mut self.decoder.stats.decode.tokens;
        *n_decoded = n_decoded.saturating_sub(n_rejected as u64);
        speculator.judge(&self.model.shared.experts);
        if n_rejected > 0 && !self.sequences.cut_drafts(sequence, n_tokens) {
            return Err(EvalError::Decode(format!("the context cannot go back to token {n_tokens}")));
        }
        Ok(())
    }

    /// Takes back the drafts of this step: their evaluation failed, or they are not evaluated.
    ///
    /// # Errors
    /// A drafter fails.
    pub fn drop_drafts(&mut self) -> Result<(), EvalError> {
        self.sequences.all.iter_mut().for_each(|own| own.drafts.clear());
        self.speculator.as_mut().map_or(Ok(()), |own| own.drop_drafts())
    }
}

/// llama.cpp's drafters.
struct Drafters(Owned<hobbit_speculative>);

// SAFETY: they hold no state of a thread, and are used through `&mut` only.
unsafe impl Send for Drafters {}

impl Drafters {
    /// The context `target` and the draft outlive them.
    fn new(
        target: *mut llama_context,
        (draft, tells): (*mut llama_context, bool),
        options: &SpeculationOptions,
        n_sequences: u32,
    ) -> Result<Self, OpenError> {
        let text =
            |text: &str| CString::new(text).map_err(|_| OpenError::Speculation(format!("{text:?} has a NUL byte")));
        let path = |path: &Option<PathBuf>| text(&path.as_deref().unwrap_or(Path::new("")).to_string_lossy());
        let names: Vec<&str> = options.sources.iter().map(|source| source.name()).collect();
        let (types, fixed, dynamic) =
            (text(&names.join(","))?, path(&options.lookup_static)?, path(&options.lookup_dynamic)?);
        let (n_max, n_min) = (options.n_max as i32, options.n_min as i32);
        // SAFETY: the texts are NUL-terminated, the message buffer is valid for its capacity, and the caller keeps the
        // contexts alive.
        let make = |message: *mut c_char, capacity| unsafe {
            shim::hobbit_speculative_init(
                target,
                draft,
                types.as_ptr(),
                n_max,
                n_min,
                options.p_min,
                fixed.as_ptr(),
                dynamic.as_ptr(),
                n_sequences,
                tells,
                message,
                capacity,
            )
        };
        with_message(make).map(|raw| Self(Owned(raw))).map_err(OpenError::Speculation)
    }

    fn begin(&mut self, sequence: i32, text: &[Token]) -> Result<(), EvalError> {
        // SAFETY: the drafters are live, the text and the message buffer valid for their lengths; so below.
        let begin = |message, capacity| unsafe {
            shim::hobbit_speculative_begin(self.0.as_ptr(), sequence, text.as_ptr(), text.len(), message, capacity)
        };
        checked("the drafter cannot read the text", |done| *done, begin).map(drop)
    }

    /// # Safety
    /// The requests point to their tokens and to room for their drafts.
    unsafe fn draft(&mut self, requests: &mut [hobbit_draft_request]) -> Result<(), EvalError> {
        // SAFETY: as above, and by the caller.
        let draft = |message, capacity| unsafe {
            shim::hobbit_speculative_draft(self.0.as_ptr(), requests.as_mut_ptr(), requests.len(), message, capacity)
        };
        checked("no drafts", |done| *done, draft).map(drop)
    }

    fn process(&mut self, batch: &llama_batch) -> Result<(), EvalError> {
        // SAFETY: as above; callers pass a batch with positions.
        let process =
            |message, capacity| unsafe { shim::hobbit_speculative_process(self.0.as_ptr(), batch, message, capacity) };
        checked("the drafter cannot follow", |done| *done, process).map(drop)
    }

    fn accept(&mut self, sequence: i32, n_accepted: usize) -> Result<(), EvalError> {
        // SAFETY: as above.
        let accept = |message, capacity| unsafe {
            shim::hobbit_speculative_accept(self.0.as_ptr(), sequence, n_accepted as u16, message, capacity)
        };
        checked("the drafter does not take what was accepted", |done| *done, accept).map(drop)
    }
}
