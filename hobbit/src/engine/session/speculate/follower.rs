//! A draft in a file of its own that reads the target's hidden states: layers for multi-token prediction, EAGLE3,
//! DFlash and DSpark. It is a second context of the target's, which forgets, copies and moves the same tokens.

use std::fs::File;
use std::sync::Arc;

use ggml_sys::llama::{self, llama_context_params};
use ggml_sys::shim::hobbit_vocabularies_agree;

use super::draft::model_options;
use crate::engine::error::OpenError;
use crate::engine::ggml::context::Context;
use crate::engine::ggml::log;
use crate::engine::ggml::memory_use::MemoryUse;
use crate::engine::ggml::params::{NEVER_INTERRUPTED, context_params};
use crate::engine::ggml::raw::RawModel;
use crate::engine::gpu::devices;
use crate::engine::model::needs::bounds;
use crate::engine::session::Session;
use crate::engine::source::cookie_stream::CookieStream;
use crate::engine::source::validate;
use hobbit_core::files::FileExt;
use hobbit_core::gguf::Gguf;
use hobbit_core::options::{DraftOptions, DraftSource, SessionOptions};
use hobbit_core::store::Original;

/// Architectures whose graphs show the hidden states between layers (`t_layer_inp` in llama.cpp).
#[rustfmt::skip]
const SHOWN: [&str; 16] = [
    "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "lfm2", "lfm2moe", "llama", "mimo2", "minimax-01", "minimax-m2",
    "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next",
];

/// Those of them that show the last layer's to DFlash, and to EAGLE3 (`t_h_nextn`).
const LAST_SHOWN: [&str; 3] = ["deepseek4", "mimo2", "nemotron_h_moe"];
#[rustfmt::skip]
const LAST_TO_EAGLE3: [&str; 9] = [
    "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next",
];

/// Fewest tokens of a ubatch of EAGLE3's and DFlash's: llama.cpp gives each the logits of the whole vocabulary.
const UBATCH_MIN: u32 = 64;

/// Bytes of the draft beside a target with these session options.
///
/// # Errors
/// llama.cpp refuses the file.
pub(super) fn bytes(draft: &DraftOptions, gguf: &Gguf, target: &SessionOptions) -> Result<u64, OpenError> {
    let widest = target.n_ubatch.max(target.n_ubatch_max);
    let n_batch = target.n_batch.max(widest);
    let target = SessionOptions { n_batch, n_ubatch: widest, ..target.clone() };
    let weights = gguf.tensors.iter().fold(0, |sum: u64, tensor| sum.saturating_add(tensor.extent.len));
    let sum = |parts: [u64; 4]| parts.into_iter().fold(0, u64::saturating_add);
    if !gguf.is_mtp_head() {
        // llama.cpp makes no context of it alone.
        let n_ubatch = UBATCH_MIN.max(target.n_outputs_max);
        let (_, most) = bounds(gguf, &SessionOptions { n_ubatch, n_outputs_max: n_ubatch, ..target });
        let number = |key: &str| gguf.metadata.get_u64(&format!("{}.{key}", gguf.architecture())).unwrap_or(0);
        let n_vocab = gguf.metadata.get_arr_len("tokenizer.ggml.tokens").unwrap_or(0);
        let logits = n_vocab.saturating_mul(2 * u64::from(n_ubatch) * 4);
        // Those of the target, gathered, and the draft's own: before and after they are checked.
        let width = number("embedding_length").max(number("target_hidden_size"));
        let n_states = 2 * (target_layers(gguf).len() as u64) + 5;
        let states = u64::from(n_batch).saturating_mul(n_states).saturating_mul(width).saturating_mul(4);
        return Ok(sum([weights, most.kv, most.compute.saturating_add(logits), states]));
    }
    let model = load(draft, gguf, true)?;
    let params = Context::params_of_head(context_params(&target, &raw const NEVER_INTERRUPTED));
    // SAFETY: the model is live, and the parameters point to nothing but a static flag.
    let context = unsafe { Context::new(&model, params) }.map_err(|message| refused(draft, &message))?;
    let MemoryUse { kv, compute, .. } = MemoryUse::of_estimate(&context)?;
    // SAFETY: the model is live.
    let n_embd = unsafe { llama::llama_model_n_embd_out(model.as_ptr()) }.max(0) as u64;
    Ok(sum([weights, kv, compute, MemoryUse::of_hidden_states(n_batch.into(), n_embd)]))
}

/// Opens the draft as a second context of `target`'s, for at most `n_max` drafts.
///
/// # Errors
/// A file that cannot be read, or is not made for the target.
pub(super) fn add(
    source: DraftSource,
    draft: &DraftOptions,
    n_max: u32,
    target: &mut Session,
) -> Result<(), OpenError> {
    let gguf = Gguf::open(&draft.path)?;
    let checked = match source {
        DraftSource::DraftMtp => check_head(&gguf, target),
        _ => check_reader(source, &gguf, target),
    };
    checked.map_err(|why| refused(draft, &why))?;
    validate::check_header(&gguf, &model_options(draft))?;
    validate::check_tables_of_experts(&gguf, &gguf.experts()?)?;
    check_words(&gguf, target.model().n_vocab()).map_err(|why| refused(draft, &why))?;
    if draft.n_ctx > 0 {
        return Err(refused(draft, "its context is the model's: leave out -cd"));
    }
    let model = load(draft, &gguf, false)?;
    // SAFETY: both models are live.
    let (widths, agree) = unsafe {
        let raw = target.model.shared.raw.as_ptr();
        let widths = [raw, model.as_ptr()].map(|model| llama::llama_model_n_embd_out(model));
        (widths, hobbit_vocabularies_agree(raw, model.as_ptr()))
    };
    if source == DraftSource::DraftMtp && widths[0] != widths[1] {
        let why = format!("its hidden states have {} numbers, and the model's {}", widths[1], widths[0]);
        return Err(refused(draft, &why));
    }
    if !agree {
        return Err(refused(draft, "its vocabulary is not the model's"));
    }
    let Session { sequences, decoder, .. } = target;
    let context = &mut sequences.context;
    let params = context_params(&sequences.options, Arc::as_ptr(&decoder.interrupt.0));
    let params = match source {
        DraftSource::DraftMtp => context.params_of_mtp(params),
        _ => params_of_reader(context, params, n_max),
    };
    log::clear_errors();
    // SAFETY: the interrupt lives as long as the session, and the context reads no other but this one.
    let added = decoder.purpose.during(|| unsafe { context.add_follower(model, params) });
    added.map_err(|message| refused(draft, if message.is_empty() { log::take_errors() } else { message }.trim()))
}

/// Parameters of a draft that reads hidden states of several layers.
fn params_of_reader(context: &Context, params: llama_context_params, n_max: u32) -> llama_context_params {
    // DFlash computes the drafts of all sequences at once.
    let n_drafts = params.n_seq_max.saturating_mul(n_max.saturating_add(1));
    let n_batch = (context.n_batch() as u32).max(n_drafts);
    llama_context_params {
        ctx_other: context.as_ptr(),
        n_ctx: context.n_ctx(),
        n_batch,
        n_ubatch: UBATCH_MIN.max(n_drafts).min(n_batch),
        n_rs_seq: 0,
        n_outputs_max: 0,
        cb_eval: None,
        ..params
    }
}

/// Checks layers for multi-token prediction against the target, as far as headers tell.
fn check_head(gguf: &Gguf, target: &Session) -> Result<(), String> {
    let (theirs, own) = (gguf.architecture(), &target.model.info().architecture);
    if gguf.mtp_layers().is_none() {
        return Err("it has no layers for multi-token prediction that llama.cpp can run".into());
    }
    if !gguf.is_mtp_head() {
        let why = "it has a whole model, not only the layers for multi-token prediction: give it with -m, without -md";
        return Err(why.into());
    }
    if theirs != own {
        return Err(format!("its layers are for {theirs}, and the model is {own}"));
    }
    if gguf.tensor("token_embd.weight").is_none() {
        return Err("it lacks embeddings of its own (token_embd.weight), which llama.cpp needs".into());
    }
    Ok(())
}

/// The layers of the target that a draft reads.
fn target_layers(gguf: &Gguf) -> Vec<u64> {
    gguf.metadata.get_u64_arr(&format!("{}.target_layers", gguf.architecture())).unwrap_or_default()
}

/// Checks an EAGLE3, DFlash or DSpark draft against the target, as far as headers tell: llama.cpp would assert.
fn check_reader(source: DraftSource, gguf: &Gguf, target: &Session) -> Result<(), String> {
    let (model, shared) = (target.model(), &target.model.shared);
    let arch = if source == DraftSource::DraftEagle3 { "eagle3" } else { "dflash" };
    if gguf.architecture() != arch {
        return Err(format!("{source} needs a draft of architecture {arch}, and it is {}", gguf.architecture()));
    }
    if (source == DraftSource::DraftDspark) != gguf.tensor("markov_w1.weight").is_some() {
        return Err(format!("it is no draft for {source}: give {}", DraftSource::of(gguf)));
    }
    let own = model.info().architecture.as_str();
    if !SHOWN.contains(&own) {
        return Err(format!("llama.cpp does not show the hidden states of {own}"));
    }
    let (layers, n_layer) = (target_layers(gguf), u64::from(model.info().n_layer));
    let is_shown = |layer: &u64| {
        let last = if arch == "eagle3" { LAST_TO_EAGLE3.contains(&own) } else { LAST_SHOWN.contains(&own) };
        *layer < n_layer || *layer == n_layer && last
    };
    if layers.is_empty() || arch == "eagle3" && layers.len() != 3 || !layers.iter().all(is_shown) {
        return Err(format!("it reads layers {layers:?} of a model, and this one of {n_layer} shows other ones"));
    }
    let width = |gguf: &Gguf, key: &str| gguf.metadata.get_u64(&format!("{}.{key}", gguf.architecture()));
    let read = width(gguf, if arch == "eagle3" { "target_hidden_size" } else { "embedding_length" });
    let shown = width(model.gguf(), "embedding_length");
    if read != shown {
        let [read, shown] = [read, shown].map(Option::unwrap_or_default);
        return Err(format!("it reads hidden states of {read} numbers, and the model's have {shown}"));
    }
    if arch == "dflash" && gguf.metadata.get_u64("tokenizer.ggml.mask_token_id").is_none() {
        return Err("it names no token for what it is to fill in (tokenizer.ggml.mask_token_id)".into());
    }
    let lacks = |name: &str| gguf.tensor(name).is_none();
    if !shared.placed.devices.is_empty() && (lacks("token_embd.weight") || lacks("output.weight")) {
        return Err("it would use the model's embeddings, which llama.cpp has on a device: take a draft with its own \
                    (token_embd.weight, output.weight)"
            .into());
    }
    Ok(())
}

/// Checks a draft's table of the target's tokens: kernels would end the process at a number that is none.
fn check_words(gguf: &Gguf, n_vocab: usize) -> Result<(), String> {
    let Some(table) = gguf.tensor("d2t") else { return Ok(()) };
    if table.dtype.name() != "i64" || table.extent.len > 8 * n_vocab as u64 {
        return Err(format!("its table of tokens (d2t) is none of i64 with at most {n_vocab} entries"));
    }
    let mut bytes = vec![0; table.extent.len as usize];
    let file = File::open(&gguf.files[table.extent.file as usize].path);
    let read = file.and_then(|file| file.read_exact_at(&mut bytes, table.extent.offset));
    read.map_err(|error| format!("its table of tokens (d2t): {error}"))?;
    let mut tokens = bytes.as_chunks().0.iter().map(|le| i64::from_le_bytes(*le));
    match tokens.find(|token| !(0..n_vocab as i64).contains(token)) {
        Some(token) => Err(format!("its table of tokens (d2t) has {token}, expected 0 to {}", n_vocab - 1)),
        None => Ok(()),
    }
}

fn refused(draft: &DraftOptions, why: &str) -> OpenError {
    OpenError::Speculation(format!("{}: {why}", draft.path.display()))
}

/// The model, or only its sizes.
fn load(draft: &DraftOptions, gguf: &Gguf, only_sizes: bool) -> Result<RawModel, OpenError> {
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
    // SAFETY: everything that the parameters point to, and the stream, outlive the call.
    let model = unsafe {
        match gguf.mtp_head_mended() {
            Some(mended) => {
                params.load_mode = llama::LLAMA_LOAD_MODE_NONE;
                params.lazy_mode = llama::LLAMA_LAZY_MODE_OFF;
                let originals = gguf.files.iter().map(|file| Original::open(&file.path, file.state));
                let mut stream = CookieStream::open(mended, &originals.collect::<Result<Vec<_>, _>>()?)?;
                RawModel::load_stream(stream.as_file(), params)
            }
            None => RawModel::load_path(&draft.path, params),
        }
    };
    model.map_err(|message| refused(draft, if message.is_empty() { log::take_errors() } else { message }.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit_core::gguf::{GgmlType, HeaderBuilder};

    #[test]
    fn a_table_of_other_tokens_is_refused() {
        let check = |dtype: &str, tokens: &[i64]| {
            let mut header = HeaderBuilder::new(32).unwrap();
            header.key("general.architecture", "eagle3").unwrap();
            header.tensor("d2t", GgmlType::from_name(dtype).unwrap(), &[tokens.len() as u64]).unwrap();
            let mut file = tempfile::NamedTempFile::new().unwrap();
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            header.finish().write(file.as_file_mut(), |_, out| out.write_all(&bytes)).unwrap();
            check_words(&Gguf::open(file.path()).unwrap(), 4)
        };
        assert_eq!(check("i64", &[0, 3]), Ok(()));
        for token in [4, -1, i64::MIN] {
            assert!(check("i64", &[0, token]).unwrap_err().contains(&format!("has {token}, expected 0 to 3")));
        }
        assert!(check("i64", &[0; 5]).unwrap_err().contains("at most 4 entries"));
        assert!(check("f64", &[0, 3]).unwrap_err().contains("none of i64"));
    }
}
