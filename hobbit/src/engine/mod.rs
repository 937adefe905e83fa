//! llama.cpp's models, sessions and devices: everything of this crate, beyond the selection in its root.
//!
//! * Conversations: [`ChatTemplates`] renders a [`ChatInputs`] to a [`ChatPrompt`], whose [`ChatParser`] reads the
//!   answer,
//!   or a [`ChatStream`] while it grows. [`isolate_chat_templates`] bounds hostile templates.
//! * Images and sound: a [`Projector`] reads them, [`Session::evaluate_media`] evaluates them.
//! * Low-precision versions: [`quantise_low`], [`check_low`], [`low_cache_path`]; ggml's quantisers, [`Ggml`].
//! * Observation: [`RouterObserver`], [`ExpertPlace`].
//! * This machine: [`cpu_bytes_per_second`], [`system_info`], [`MemorySignal`], [`trim_heap`].
//! * Comparison with plain llama.cpp: [`Stock`].
//!
//! llama.cpp builds graphs, tokenises and samples; hobbit owns the experts. The folders, each importing only those
//! before it: `ggml` wraps llama.cpp, `source` shows it a file without expert bytes, `memory` has the slots of the host
//! and of devices, `seam` gives expert tensors an address but no memory, `cpu` and `gpu` multiply, `model` divides the
//! budget, `text` renders and samples, `session` evaluates tokens.

mod cpu;
mod error;
mod ggml;
mod gpu;
mod memory;
mod model;
mod seam;
mod session;
mod source;
mod text;

pub use error::{ChatError, DeviceError, EvalError, LowError, MediaError, OpenError, SamplerError, TokenizeError};
pub use ggml::context::Context;
pub use ggml::cpu_speed::cpu_bytes_per_second;
pub use ggml::log::{LogLevel, set_log};
pub use ggml::memory_use::trim_heap;
pub use ggml::quantise::Ggml;
pub use gpu::devices::{DeviceInfo, DeviceKind, devices};
pub use gpu::link::{LinkSpeed, backends, link_speed};
#[cfg(feature = "rpc")]
pub use gpu::rpc::{RpcError, RpcEvent, RpcServer};
pub use memory::tiers::Description;
pub use model::set_up::{MemorySignal, take_memory_signal, watch_memory_signals};
pub use model::stock::{Stock, StockOptions};
pub use model::{Borrower, ExpertPlace, LayerPlaces, Model, ModelInfo, SpecialTokens};
pub use seam::hook::{RouterChoice, RouterObserver};
pub use session::media::{Chunk, Chunks, Encoder, Media, MediaPrompt, Projector, ProjectorNeeds};
pub use session::speculate::{DraftRequest, NoSpeculation, draft_bytes};
pub use session::{BatchToken, Generation, Interrupt, NoShift, Sequences, Session, StopReason, TakenOut};
pub use source::adapters::AdapterInfo;
pub use source::low::{check_low, low_cache_path};
pub use source::model_source::quantise_low;
pub use source::validate::check_weights;
pub use text::chat::{
    ChatDelta, ChatInputs, ChatParser, ChatPrompt, ChatReply, ChatStream, ChatTemplates, Continuation, LazyGrammar,
    ThinkingTags, ToolCall, ToolCallDelta, ToolChoice, isolate_chat_templates, when_templates_are_slow,
};
pub use text::sampling::{Probabilities, Sampler};

/// The CPU features and options llama.cpp was built with, in the words of `llama_print_system_info`.
pub fn system_info() -> String {
    // SAFETY: returns a pointer to static text.
    unsafe { std::ffi::CStr::from_ptr(ggml_sys::llama::llama_print_system_info()) }.to_string_lossy().into_owned()
}

/// The linked llama.cpp: its build number, and ggml's version and commit as its sources say them.
pub fn llama_cpp_version() -> String {
    let text = ggml::text;
    // SAFETY: both take no arguments and return static text.
    let (version, commit) = unsafe { (text(ggml_sys::llama::ggml_version()), text(ggml_sys::llama::ggml_commit())) };
    format!("b{}, ggml {version}, commit {commit}", ggml_sys::LLAMA_BUILD_NUMBER)
}
