//! The chain of samplers, as `common_sampler_init` builds it.

use std::ffi::{CString, c_char};

use ggml_sys::llama::{self, llama_logit_bias, llama_sampler};
use ggml_sys::shim;

use super::raw::Raw;
use crate::engine::error::Error;
use crate::engine::model::Model;
use hobbit_core::options::{SamplerKind, SamplingOptions, Token};

/// Candidates from which Mirostat 1 estimates its exponent, as in llama.cpp.
const MIROSTAT_CANDIDATES: i32 = 100;

/// `LLAMA_TOKEN_NULL`: the vocabulary has no such token.
const NO_TOKEN: Token = -1;

/// `common_sampler_init` without the grammar and the reasoning budget.
pub(super) fn new_chain(model: &Model, options: &SamplingOptions) -> Result<Raw, Error> {
    // SAFETY: returns a chain that owns what is added to it.
    let chain = unsafe { llama::llama_sampler_chain_init(llama::llama_sampler_chain_params { no_perf: false }) };
    let chain = Raw::new(chain, "chain")?;
    let add = |link: *mut llama_sampler, name: &str| {
        let link = Raw::new(link, name)?;
        // SAFETY: both are live; the chain takes the link over.
        unsafe { llama::llama_sampler_chain_add(chain.as_ptr(), link.as_ptr()) };
        std::mem::forget(link);
        Ok::<(), Error>(())
    };

    let bias = logit_bias(model, options);
    let n_vocab = i32::try_from(model.n_vocab()).expect("llama.cpp counts tokens in an i32");
    if !bias.is_empty() {
        let n_bias = i32::try_from(bias.len()).map_err(|_| Error::Sampling("too many logit biases".into()))?;
        // SAFETY: the sampler copies the biases.
        add(unsafe { shim::hobbit_sampler_init_logit_bias(n_vocab, n_bias, bias.as_ptr()) }, "logit_bias")?;
    }
    let seed = options.seed;
    let mirostat = options.mirostat;
    if mirostat.version != 0 {
        // SAFETY: constructors that take plain values.
        let (temp, draw) = unsafe {
            let draw = match mirostat.version {
                1 => llama::llama_sampler_init_mirostat(n_vocab, seed, mirostat.tau, mirostat.eta, MIROSTAT_CANDIDATES),
                _ => llama::llama_sampler_init_mirostat_v2(seed, mirostat.tau, mirostat.eta),
            };
            (llama::llama_sampler_init_temp(options.temp), draw)
        };
        add(temp, "temperature")?;
        add(draw, "mirostat")?;
        return Ok(chain);
    }
    for &kind in &options.samplers {
        // Adaptive-p draws, so it is last in any case.
        if kind != SamplerKind::AdaptiveP {
            add(new_link(model, options, kind)?, kind.name())?;
        }
    }
    if options.samplers.contains(&SamplerKind::AdaptiveP) {
        add(new_link(model, options, SamplerKind::AdaptiveP)?, SamplerKind::AdaptiveP.name())?;
    } else {
        // SAFETY: a constructor that takes a plain value.
        add(unsafe { llama::llama_sampler_init_dist(seed) }, "dist")?;
    }
    Ok(chain)
}

fn new_link(model: &Model, options: &SamplingOptions, kind: SamplerKind) -> Result<*mut llama_sampler, Error> {
    let o = options;
    let min_keep = o.min_keep as usize;
    // SAFETY: constructors that take plain values, the live vocabulary of the model, and (DRY) strings they copy.
    Ok(unsafe {
        match kind {
            SamplerKind::Penalties => shim::hobbit_sampler_init_penalties(
                llama::llama_vocab_n_tokens(model.vocab()),
                o.repeat_last_n,
                o.repeat_penalty,
                o.frequency_penalty,
                o.presence_penalty,
            ),
            SamplerKind::Dry => {
                let breakers = o.dry.sequence_breakers.iter().map(|text| CString::new(text.as_str()));
                let breakers: Vec<CString> = breakers
                    .collect::<Result<_, _>>()
                    .map_err(|_| Error::Sampling("a DRY sequence breaker contains a NUL byte".into()))?;
                let mut pointers: Vec<*const c_char> = breakers.iter().map(|text| text.as_ptr()).collect();
                shim::hobbit_sampler_init_dry(
                    model.vocab(),
                    o.dry.multiplier,
                    o.dry.base,
                    o.dry.allowed_length,
                    o.dry.penalty_last_n,
                    pointers.as_mut_ptr(),
                    pointers.len(),
                )
            }
            SamplerKind::TopNSigma => llama::llama_sampler_init_top_n_sigma(o.top_n_sigma),
            SamplerKind::TopK => llama::llama_sampler_init_top_k(o.top_k),
            SamplerKind::TypicalP => llama::llama_sampler_init_typical(o.typical_p, min_keep),
            SamplerKind::TopP => llama::llama_sampler_init_top_p(o.top_p, min_keep),
            SamplerKind::MinP => llama::llama_sampler_init_min_p(o.min_p, min_keep),
            SamplerKind::Xtc => llama::llama_sampler_init_xtc(o.xtc.probability, o.xtc.threshold, min_keep, o.seed),
            SamplerKind::Temperature => {
                llama::llama_sampler_init_temp_ext(o.temp, o.dynatemp_range, o.dynatemp_exponent)
            }
            SamplerKind::Infill => llama::llama_sampler_init_infill(model.vocab()),
            SamplerKind::AdaptiveP => llama::llama_sampler_init_adaptive_p(o.adaptive_target, o.adaptive_decay, o.seed),
        }
    })
}

/// The caller's biases, then minus infinity for end-of-generation tokens (`ignore_eos`, where there is an EOS token)
/// and for the tokens that the model file suppresses.
fn logit_bias(model: &Model, options: &SamplingOptions) -> Vec<llama_logit_bias> {
    let mut list: Vec<_> = options.logit_bias.iter().map(|&(token, bias)| llama_logit_bias { token, bias }).collect();
    let exclude = |token: Token| llama_logit_bias { token, bias: f32::NEG_INFINITY };
    // SAFETY: the vocabulary lives as long as the model and owns its list of suppressed tokens.
    unsafe {
        let vocab = model.vocab();
        if options.ignore_eos && llama::llama_vocab_eos(vocab) != NO_TOKEN {
            list.extend((0..llama::llama_vocab_n_tokens(vocab)).filter(|&token| model.is_eog(token)).map(exclude));
        }
        let mut n = 0;
        let suppressed = llama::llama_vocab_get_suppress_tokens(vocab, &raw mut n);
        if !suppressed.is_null() && n > 0 {
            list.extend(std::slice::from_raw_parts(suppressed, n as usize).iter().copied().map(exclude));
        }
    }
    list
}
