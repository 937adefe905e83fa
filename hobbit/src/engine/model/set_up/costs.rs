//! Memory of a model, a context and hobbit itself besides experts; and the ubatch size for a prompt, which depends on
//! it.

use std::sync::atomic::{AtomicI32, Ordering};

use crate::engine::cpu::backend;
use crate::engine::error::OpenError;
use crate::engine::ggml::context::Context;
use crate::engine::ggml::memory_use::{MemoryUse, trim_heap};
use crate::engine::model::Model;
use crate::engine::model::needs::{PROCESS_BYTES, bounds};
use crate::engine::model::run_mode::room;
use hobbit_core::options::SessionOptions;
use hobbit_core::plan::{FixedCosts, MemoryLimits};
use hobbit_core::stats::rss_bytes;

/// Bytes that the process holds besides `weights` and `kv`, measured after loading a model.
pub(super) fn runtime_bytes(weights: u64, kv: u64) -> u64 {
    trim_heap();
    rss_bytes().saturating_sub(weights + kv).max(PROCESS_BYTES)
}

pub(super) fn fixed_costs(model: &Model, options: &SessionOptions, context: &Context) -> Result<FixedCosts, OpenError> {
    let MemoryUse { weights, kv, compute, mtp, .. } = MemoryUse::of(context)?;
    let needs = &model.shared.placed.needs;
    // A dense model is mapped: its resident pages count as weights.
    let process = needs.process_bytes(runtime_bytes(weights, kv));
    let runtime = process + needs.beside(model.shared.experts.map(), options, &model.shared.options) + mtp;
    Ok(FixedCosts { weights, kv, compute, runtime, prediction: needs.prediction })
}

/// Checkpoints may use 1/16 of memory.
const CHECKPOINT_PARTS: u64 = 16;

/// Bytes for the checkpoints of all sequences: as many as the options allow, in at most a sixteenth of the memory.
pub(super) fn checkpoint_bytes(model: &Model, options: &SessionOptions) -> u64 {
    if !model.takes_checkpoints(options) {
        return 0;
    }
    let memory = room(&model.shared.options, &MemoryLimits::read()).unwrap_or(0);
    let n = u64::from(options.checkpoints) * u64::from(options.n_seq_max.max(1));
    state_bytes(model, options).map_or(u64::MAX, |bytes| bytes.saturating_mul(n)).min(memory / CHECKPOINT_PARTS)
}

/// An upper estimate of a checkpoint by the header; `None` for a recurrent state of unknown size.
fn state_bytes(model: &Model, options: &SessionOptions) -> Option<u64> {
    let gguf = model.gguf();
    let number = |key: &str| gguf.metadata.get_u64(&format!("{}.{key}", gguf.architecture())).unwrap_or(0);
    let product = |numbers: &[u64]| numbers.iter().fold(1, |all: u64, number| all.saturating_mul(*number));
    let (_, most) = bounds(gguf, &SessionOptions { n_ctx: 256, n_seq_max: 1, ..options.clone() });
    let window = product(&[most.kv / 256, model.window()]);
    if !model.is_recurrent() {
        return Some(window);
    }
    // As llama.cpp's `n_embd_r` and `n_embd_s`, of all layers; elements have 4 bytes.
    let (n_embd, n_head) = (number("embedding_length"), number("attention.head_count").max(1));
    let (inner, state, kda) = (number("ssm.inner_size"), number("ssm.state_size"), number("kda.head_dim"));
    let convolved = number("ssm.conv_kernel").max(4) - 1;
    let sum = |numbers: &[u64]| numbers.iter().fold(0, |all: u64, number| all.saturating_add(*number));
    let groups = product(&[2, number("ssm.group_count"), state]);
    let row = [
        sum(&[product(&[inner, state]), product(&[convolved, sum(&[inner, groups])])]),
        sum(&[product(&[kda, kda, n_head]), product(&[3, convolved, n_head, kda])]),
        product(&[n_embd, number("shortconv.l_cache")]),
        product(&[n_embd, number("wkv.head_size").saturating_mul(2)]),
    ];
    let row = row.into_iter().max().filter(|row| *row > 0)?;
    Some(product(&[row, number("block_count"), 4]).saturating_add(window))
}

/// Bytes of the scratch for products ([`backend::products_bytes`]), for a loaded model.
pub(super) fn scratch_bytes(model: &Model, options: &SessionOptions) -> u64 {
    backend::products_bytes(model.shared.experts.map(), model.info().n_expert_used.into(), options)
}

// Requests by signal, from the user or another program.

/// The request. Windows has no such signals: there `--memory` is followed until the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemorySignal {
    /// SIGUSR1: use half the memory.
    Halve,
    /// SIGUSR2: use the planned memory again.
    Restore,
}

/// The pending signal's number; 0: none.
static LAST: AtomicI32 = AtomicI32::new(0);

/// Nothing: Windows has no such signals.
#[cfg(not(unix))]
pub fn watch_memory_signals() {}

/// Records SIGUSR1 and SIGUSR2 for [`take_memory_signal`] from now on, instead of ending the process.
#[cfg(unix)]
pub fn watch_memory_signals() {
    extern "C" fn note(signal: libc::c_int) {
        LAST.store(signal, Ordering::Relaxed);
    }
    for signal in [libc::SIGUSR1, libc::SIGUSR2] {
        // SAFETY: the handler only stores to an atomic, which is allowed at any point of a program.
        unsafe { libc::signal(signal, note as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    }
}

/// The last signal since the previous call.
pub fn take_memory_signal() -> Option<MemorySignal> {
    match LAST.swap(0, Ordering::Relaxed) {
        #[cfg(unix)]
        libc::SIGUSR1 => Some(MemorySignal::Halve),
        #[cfg(unix)]
        libc::SIGUSR2 => Some(MemorySignal::Restore),
        _ => None,
    }
}
