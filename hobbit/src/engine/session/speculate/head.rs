//! Layers for multi-token prediction in a file of their own: a second context of the target's, which reads its hidden
//! states.

use std::sync::Arc;

use ggml_sys::llama;
use ggml_sys::shim::hobbit_vocabularies_agree;

use crate::engine::error::OpenError;
use crate::engine::ggml::context::Context;
use crate::engine::ggml::log;
use crate::engine::ggml::memory_use::MemoryUse;
use crate::engine::ggml::params::{NEVER_INTERRUPTED, context_params};
use crate::engine::ggml::raw::RawModel;
use crate::engine::gpu::devices;
use crate::engine::session::Session;
use hobbit_core::gguf::Gguf;
use hobbit_core::options::{DraftOptions, SessionOptions};

use super::draft::model_options;

/// Bytes of the layers beside a target with these session options.
///
/// # Errors
/// llama.cpp refuses the file.
pub(super) fn bytes(draft: &DraftOptions, gguf: &Gguf, target: &SessionOptions) -> Result<u64, OpenError> {
    let widest = target.n_ubatch.max(target.n_ubatch_max);
    let target = SessionOptions { n_batch: target.n_batch.max(widest), n_ubatch: widest, ..target.clone() };
    let model = load(draft, true)?;
    let params = Context::params_of_head(context_params(&target, &raw const NEVER_INTERRUPTED));
    // SAFETY: the model is live, and the parameters point to nothing but a static flag.
    let context = unsafe { Context::new(&model, params) }.map_err(|message| refused(draft, &message))?;
    let MemoryUse { kv, compute, .. } = MemoryUse::of_estimate(&context)?;
    // SAFETY: the model is live.
    let n_embd = unsafe { llama::llama_model_n_embd_out(model.as_ptr()) }.max(0) as u64;
    let weights = gguf.tensors.iter().fold(0, |sum: u64, tensor| sum.saturating_add(tensor.extent.len));
    let states = MemoryUse::of_hidden_states(u64::from(target.n_batch), n_embd);
    Ok([weights, kv, compute, states].into_iter().fold(0, u64::saturating_add))
}

/// Opens the layers, as a second context of `target`'s.
///
/// # Errors
/// A file that cannot be read, has a whole model, or is not the target's.
pub(super) fn add(draft: &DraftOptions, target: &mut Session) -> Result<(), OpenError> {
    let refused = |why: &str| refused(draft, why);
    let gguf = Gguf::open(&draft.path)?;
    let (theirs, own) = (gguf.architecture(), &target.model.info().architecture);
    if gguf.mtp_layers().is_none() {
        return Err(refused("it has no layers for multi-token prediction that llama.cpp can run"));
    }
    if !gguf.is_mtp_head() {
        let why = "it has a whole model, not only the layers for multi-token prediction: give it with -m, without -md";
        return Err(refused(why));
    }
    if theirs != own {
        return Err(refused(&format!("its layers are for {theirs}, and the model is {own}")));
    }
    if gguf.tensor("token_embd.weight").is_none() {
        return Err(refused("it lacks embeddings of its own (token_embd.weight), which llama.cpp needs"));
    }
    if draft.n_ctx > 0 {
        return Err(refused("its context is the model's: leave out -cd"));
    }
    let model = load(draft, false)?;
    // SAFETY: both models are live.
    let (widths, agree) = unsafe {
        let raw = target.model.shared.raw.as_ptr();
        let width = |model| llama::llama_model_n_embd_out(model);
        ((width(model.as_ptr()), width(raw)), hobbit_vocabularies_agree(raw, model.as_ptr()))
    };
    if widths.0 != widths.1 {
        return Err(refused(&format!("its hidden states have {} numbers, and the model's {}", widths.0, widths.1)));
    }
    if !agree {
        return Err(refused("its vocabulary is not the model's"));
    }
    let Session { sequences, decoder, .. } = target;
    let params = context_params(&sequences.options, Arc::as_ptr(&decoder.interrupt.0));
    log::clear_errors();
    // SAFETY: the interrupt lives as long as the session.
    let added = decoder.purpose.during(|| unsafe { sequences.context.add_head(model, params) });
    added.map_err(|message| refused(if message.is_empty() { log::take_errors() } else { message }.trim()))
}

fn refused(draft: &DraftOptions, why: &str) -> OpenError {
    OpenError::Speculation(format!("{}: {why}", draft.path.display()))
}

/// The model, or only its sizes.
fn load(draft: &DraftOptions, only_sizes: bool) -> Result<RawModel, OpenError> {
    let options = model_options(draft);
    // SAFETY: returns a struct of plain values.
    let mut params = unsafe { llama::llama_model_default_params() };
    let mut chosen = if options.n_gpu_layers == 0 { Vec::new() } else { devices::choose(&options.device)? };
    chosen.push(std::ptr::null_mut());
    params.devices = chosen.as_mut_ptr();
    params.n_gpu_layers = options.n_gpu_layers;
    params.load_mtp = true;
    // Repacking would take memory once more, for products that are narrow.
    params.use_extra_bufts = false;
    if only_sizes {
        params.no_alloc = true;
        params.load_mode = llama::LLAMA_LOAD_MODE_NONE;
        params.lazy_mode = llama::LLAMA_LAZY_MODE_OFF;
    }
    log::clear_errors();
    // SAFETY: everything that the parameters point to outlives the call.
    let model = unsafe { RawModel::load_path(&draft.path, params) };
    model.map_err(|message| refused(draft, if message.is_empty() { log::take_errors() } else { message }.trim()))
}
