//! The model that drafts: a session of its own, which llama.cpp runs by itself.

use ggml_sys::shim::hobbit_vocabularies_agree;

use super::{Wanted, follower};
use crate::engine::error::{EvalError, OpenError};
use crate::engine::ggml;
use crate::engine::ggml::raw::BatchToken;
use crate::engine::model::Model;
use crate::engine::model::needs;
use crate::engine::session::{Interrupt, Sequences, Session};
use crate::engine::source::validate;
use hobbit_core::gguf::Gguf;
use hobbit_core::options::{
    Budget, DeviceChoice, DeviceOptions, DraftOptions, DraftSource, ModelOptions, Repack, SessionOptions, Token,
};

/// Context of a draft if neither it nor the target names one.
const N_CTX: u32 = 8192;

/// Tokens of the text that are read as part of drafting; with more, the draft catches up.
const STEP_TOKENS: usize = 16;

/// Bytes that a draft model takes beside a target with these session options: to be added to
/// [`ModelOptions::reserved_bytes`] of the target.
///
/// # Errors
/// A file that cannot be read, or that llama.cpp refuses.
pub fn draft_bytes(draft: &DraftOptions, target: &SessionOptions) -> Result<u64, OpenError> {
    ggml::ready();
    let (gguf, options) = (Gguf::open(&draft.path)?, model_options(draft));
    if DraftSource::of(&gguf).follows() {
        return follower::bytes(draft, &gguf, target);
    }
    validate::check_layers(&gguf)?;
    needs::bytes_beside(&gguf, &options, &session_options(draft, target))
}

/// Repacking would take memory once more, for products that are narrow.
pub(super) fn model_options(draft: &DraftOptions) -> ModelOptions {
    // -1 is 'auto', -2 'all'.
    let on_cpu = draft.devices.is_none() && matches!(draft.n_gpu_layers, -1 | 0);
    ModelOptions {
        // The target's plan has made room.
        budget: Budget::Bytes(u64::MAX >> 1),
        overcommit: true,
        repack: Repack::Off,
        n_gpu_layers: if on_cpu { 0 } else { draft.n_gpu_layers },
        device: DeviceOptions {
            devices: if on_cpu { DeviceChoice::None } else { draft.devices.clone().unwrap_or_default() },
            ..DeviceOptions::default()
        },
        ..ModelOptions::default()
    }
}

fn session_options(draft: &DraftOptions, target: &SessionOptions) -> SessionOptions {
    let n_ctx = [draft.n_ctx, target.n_ctx, N_CTX].into_iter().find(|n| *n > 0).unwrap_or(N_CTX);
    SessionOptions {
        n_ctx,
        n_outputs_max: target.n_seq_max,
        n_seq_max: target.n_seq_max,
        kv_unified: target.kv_unified,
        threads: target.threads,
        threads_batch: target.threads_batch,
        flash_attn: target.flash_attn,
        ..SessionOptions::default()
    }
}

/// Tokens that two texts begin with.
fn common(a: &[Token], b: &[Token]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

pub(super) struct Draft {
    pub(super) session: Session,
}

impl Draft {
    /// Opens the draft of `target`.
    ///
    /// # Errors
    /// A model that cannot be opened or used as a draft.
    pub(super) fn open(draft: &DraftOptions, target: &Session) -> Result<Self, OpenError> {
        let refused = |why: &str| OpenError::Speculation(format!("{}: {why}", draft.path.display()));
        let options = session_options(draft, &target.sequences.options);
        let model = Model::open(&draft.path, &ModelOptions { expects: options.clone(), ..model_options(draft) })?;
        if model.is_recurrent() {
            return Err(refused("the draft model's recurrent state cannot go back to what the text took"));
        }
        // SAFETY: both models are live.
        if !unsafe { hobbit_vocabularies_agree(target.model().shared.raw.as_ptr(), model.shared.raw.as_ptr()) } {
            return Err(refused("the draft model's vocabulary is not the target's"));
        }
        if model.info().is_moe() && !model.run_mode().is_passthrough() {
            return Err(refused("a draft model whose experts hobbit would have to manage"));
        }
        Ok(Self { session: model.session(&options)? })
    }

    /// Tokens in the context of a sequence.
    fn known(&self, sequence: i32) -> &[Token] {
        &self.session.sequences.all[sequence as usize].tokens
    }

    /// Whether a request's text and `n_max` drafts fit beside those of the other `requests`. If not, sequences without
    /// a request give way.
    pub(super) fn make_room(&mut self, request: &Wanted, n_max: usize, requests: &[Wanted]) -> Result<bool, EvalError> {
        let own = &mut self.session.sequences;
        let (n_ctx, n_more) = (own.context.n_ctx_seq() as usize, 1 + n_max);
        let held = |own: &Sequences| -> Vec<i32> {
            let others = (0..own.all.len()).filter(|at| own.options.kv_unified && *at != request.sequence as usize);
            others.filter(|at| !own.all[*at].tokens.is_empty()).map(|at| at as i32).collect()
        };
        let fits = |own: &Sequences| {
            let others: usize = held(own).iter().map(|at| own.all[*at as usize].tokens.len() + n_more).sum();
            others + request.tokens.len() + n_more <= n_ctx
        };
        if fits(own) {
            return Ok(true);
        }
        for at in held(own) {
            if requests.iter().all(|request| request.sequence != at) {
                own.empty(at)?;
            }
        }
        Ok(fits(own))
    }

    /// Empties the context.
    pub(super) fn forget_all(&mut self) {
        self.session.reset();
    }

    /// Tokens of `text` that are not in a sequence, if they are more than a step of drafting reads by itself.
    pub(super) fn n_behind(&self, sequence: i32, text: &[Token]) -> usize {
        let n_behind = text.len() - common(self.known(sequence), text);
        if n_behind > STEP_TOKENS { n_behind } else { 0 }
    }

    /// Makes `text` the content of a sequence, as far as `n_max` tokens more bring it. Returns its number of tokens.
    pub(super) fn read(
        &mut self,
        sequence: i32,
        text: &[Token],
        n_max: usize,
        interrupt: &Interrupt,
    ) -> Result<usize, EvalError> {
        let mut common = common(self.known(sequence), text);
        if common < self.known(sequence).len() && !self.session.sequences.cut(sequence, common) {
            self.session.sequences.empty(sequence)?;
            common = 0;
        }
        let end = common.saturating_add(n_max).min(text.len());
        for new in text[common..end].chunks(self.session.context().n_batch()) {
            if interrupt.is_set() {
                return Err(EvalError::Interrupted);
            }
            let batch: Vec<BatchToken> = (self.known(sequence).len() as i32..)
                .zip(new)
                .map(|(position, &token)| BatchToken { token, position, sequence, logits: false })
                .collect();
            self.session.evaluate(&batch)?;
        }
        Ok(end)
    }

    /// Follows the drafting of `drafts`: notes what of them is in the context.
    pub(super) fn drafted(&mut self, request: &Wanted, drafts: &[Token]) {
        let own = &mut self.session.sequences;
        let n_evaluated = own.context.n_tokens(request.sequence);
        let known = &mut own.all[request.sequence as usize].tokens;
        known.push(request.last);
        known.extend_from_slice(drafts);
        let n_known = known.len();
        known.truncate(n_evaluated);
        if n_evaluated > n_known && !own.cut(request.sequence, n_known) {
            let _ = own.empty(request.sequence);
        }
    }
}
