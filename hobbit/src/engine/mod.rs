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
//! llama.cpp builds graphs, tokenises and samples; hobbit owns the experts. The files, in the order in which a model
//! uses them: `stream` shows llama.cpp a file without expert bytes, `buffer` gives expert tensors an address but no
//! memory, `device` makes ggml's scheduler send expert products here, `memory` divides the budget and sets up the
//! `tiers` (slots of the host and of devices), `compute` multiplies, `session` evaluates tokens.

mod adapters;
mod buffer;
mod calling;
mod chat;
mod compute;
mod contention;
mod cpu_speed;
mod device;
mod devices;
mod error;
mod experts;
mod gates;
mod ggml;
mod graph;
mod hook;
mod host_reads;
mod limits;
mod log;
mod low;
mod media;
mod memory;
mod memory_use;
mod model;
mod needs;
mod offload;
mod params;
mod pinned;
mod placement;
mod pools;
mod pre_tokenizer;
mod quantise;
mod raw;
mod recorder;
mod registration;
mod repack;
#[cfg(feature = "rpc")]
mod rpc;
mod run_mode;
mod sampling;
mod session;
mod source;
mod speculate;
mod split;
mod state_file;
mod stock;
mod stream;
mod tables;
mod tier;
mod tiers;
mod validate;
mod vocabulary;

pub use adapters::AdapterInfo;
pub use chat::{
    ChatDelta, ChatInputs, ChatMessage, ChatParser, ChatPrompt, ChatReply, ChatStream, ChatTemplates, Continuation,
    LazyGrammar, ThinkingTags, ToolCall, ToolCallDelta, ToolChoice, isolate_chat_templates, when_templates_are_slow,
};
pub use cpu_speed::cpu_bytes_per_second;
pub use devices::{DeviceInfo, DeviceKind, devices};
pub use error::{ChatError, DeviceError, EvalError, MediaError, OpenError, SamplerError, TokenizeError};
pub use hook::{RouterChoice, RouterObserver};
pub use log::{LogLevel, set_log};
pub use low::{LowError, check_low, low_cache_path};
pub use media::{Chunk, Chunks, Encoder, Media, MediaPrompt, Projector, ProjectorNeeds};
pub use memory::{MemorySignal, take_memory_signal, watch_memory_signals};
pub use memory_use::trim_heap;
pub use model::{Borrower, ExpertPlace, LayerPlaces, Model, ModelInfo, SpecialTokens};
pub use quantise::Ggml;
#[cfg(feature = "rpc")]
pub use rpc::{RpcError, RpcEvent, RpcServer};
pub use sampling::{Probabilities, Sampler};
pub use session::{BatchToken, GeneratedText, Generation, Interrupt, NoShift, Session, StopReason};
pub use source::quantise_low;
pub use speculate::{DraftRequest, NoSpeculation, draft_bytes};
pub use stock::{Stock, StockOptions};
pub use validate::check_weights;

/// The CPU features and options llama.cpp was built with, in the words of `llama_print_system_info`.
pub fn system_info() -> String {
    // SAFETY: returns a pointer to static text.
    unsafe { std::ffi::CStr::from_ptr(ggml_sys::llama::llama_print_system_info()) }.to_string_lossy().into_owned()
}
