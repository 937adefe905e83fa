//! Errors of the engine, one enum for each operation. Messages name the file, tensor or setting; programs add the
//! remedy in their own flags.

use std::path::PathBuf;

use super::devices::DeviceKind;
use super::low::LowError;
use hobbit_core::files::OutputError;
use hobbit_core::gguf::GgufError;
use hobbit_core::gguf::adapter::AdapterError;
use hobbit_core::pack::PackError;
use hobbit_core::plan::PlanError;
use hobbit_core::profile::{LossBoundError, ProfileError, VirtualPlanError};
use hobbit_core::route::ThresholdError;
use hobbit_core::store::StoreError;

/// Errors of opening a model, and of starting a session on it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The model file is damaged, incomplete or of an unknown kind.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Expert bytes could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The memory budget cannot hold the model.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A requested device is unavailable.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Low-precision versions that cannot be used.
    #[error(transparent)]
    Low(#[from] LowError),
    /// An output file is one that the run reads, or is not a regular file.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The path-table predictor without a path table.
    #[error("{}: the path-table predictor needs a table, and this file has none", path.display())]
    NoPathTable {
        /// The model or pack.
        path: PathBuf,
    },
    /// The path table cannot be read, or belongs to another model.
    #[error(transparent)]
    PathTable(#[from] ProfileError),
    /// Invalid thresholds.
    #[error(transparent)]
    Thresholds(#[from] ThresholdError),
    /// A plan of virtual experts that is damaged, too large, or belongs to another model.
    #[error(transparent)]
    VirtualPlan(#[from] VirtualPlanError),
    /// No mix satisfies the loss bound.
    #[error(transparent)]
    LossBound(Box<LossBoundError>),
    /// An operating system call on a file failed.
    #[error("{}: cannot {action} this file: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The failed operation.
        action: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// llama.cpp refused the model.
    #[error("{}: llama.cpp cannot load this model: {reason}", path.display())]
    Load {
        /// The model file.
        path: PathBuf,
        /// llama.cpp's message.
        reason: String,
    },
    /// llama.cpp could not make a context.
    #[error("cannot create a context of {n_ctx} tokens: {reason}")]
    Context {
        /// Requested context length in tokens.
        n_ctx: u32,
        /// llama.cpp's message.
        reason: String,
    },
    /// A pack that is damaged, or of the wrong kind.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// A LoRA adapter or control vector that cannot be used.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// llama.cpp refused the sum of the control vectors.
    #[error("cannot apply the control vectors: {0}")]
    ControlVector(String),
    /// Low-precision versions could not be written.
    #[error(transparent)]
    PackWrite(#[from] hobbit_core::pack::WriteError),
    /// The expert cache's memory was refused.
    #[error("cannot allocate {bytes} bytes for the expert cache: {source}")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
        /// The cause.
        source: std::io::Error,
    },
    /// A device refuses even the memory for staging experts.
    #[error("{device} refuses {bytes} bytes of memory for experts, of the {free} that it says are free")]
    DeviceMemory {
        /// The device.
        device: String,
        /// Bytes requested at once.
        bytes: u64,
        /// Free bytes, as the device reports them.
        free: u64,
    },
    /// The trace cannot be written.
    #[error("trace: {0}")]
    Trace(#[from] hobbit_core::trace::TraceError),
    /// Address space (not memory) was refused.
    #[error("cannot reserve {bytes} bytes of address space; raise the limit (ulimit -v unlimited)")]
    AddressSpace {
        /// Bytes requested.
        bytes: u64,
    },
    /// This model or run does not support rerouting tokens to other experts.
    #[error("tokens cannot be sent to experts in memory: {0}")]
    Routing(String),
    /// Drafters that cannot be used.
    #[error("speculative decoding: {0}")]
    Speculation(String),
    /// Loading was cancelled by the progress callback.
    #[error("loading was cancelled")]
    Cancelled,
    /// A device without a second stream, or llama.cpp without a report of its memory.
    #[error("{0}")]
    Unsupported(String),
    /// The first evaluation, which warms up a dense model, failed.
    #[error(transparent)]
    WarmUp(#[from] EvalError),
}

impl From<LossBoundError> for OpenError {
    fn from(error: LossBoundError) -> Self {
        Self::LossBound(Box::new(error))
    }
}

/// Errors of evaluating tokens and of generating text. The session goes on, unless a variant states otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvalError {
    /// llama.cpp or the expert backend failed while computing a batch.
    #[error("decoding failed: {0}")]
    Decode(String),
    /// A failed evaluation that could not be undone: the context is empty.
    #[error("decoding failed: {0}; the context is lost, feed it again")]
    ContextLost(String),
    /// A batch of more tokens than the session was opened for.
    #[error(
        "a batch of {n_tokens} tokens, of at most {n_batch}; evaluate it in parts, or open the session with a larger \
         n_batch"
    )]
    BatchTooLarge {
        /// Tokens in the batch.
        n_tokens: usize,
        /// The maximum for a batch.
        n_batch: usize,
    },
    /// Generation before any token was evaluated.
    #[error(
        "there is nothing to go on from: the context is new, or was reset, cut or lost since the last evaluation; feed \
         at least one token first"
    )]
    NothingEvaluated,
    /// The context is full and context shift is off or impossible.
    #[error("the context of {n_ctx} tokens is full")]
    ContextFull {
        /// Context length in tokens.
        n_ctx: u32,
        /// Whether a context shift would make room: it is possible, and off.
        shift_helps: bool,
    },
    /// Generation was interrupted.
    #[error("interrupted")]
    Interrupted,
    /// Logits that are NaN or infinite.
    #[error(
        "the model computed logits that are not finite numbers; likely causes, in this order: too large a scale of a \
         LoRA adapter, a control vector, damaged weights"
    )]
    NotFinite,
    /// Expert products did not reach hobbit's backend: the architecture is not supported.
    #[error("{0}")]
    Seam(String),
    /// No token can be chosen.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
}

/// Errors of reading images and sound.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// A projector that is damaged, or belongs to another model.
    #[error("{}: this projector cannot be used: {}", path.display(), reason.trim())]
    Projector {
        /// The file.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// Bytes that are no image or sound that can be read.
    #[error("cannot read this image or sound: {0}")]
    Unreadable(String),
    /// A prompt whose markers and media differ in number.
    #[error("the prompt has {found} places for images and sound, and {expected} are given")]
    Markers {
        /// Markers in the prompt.
        found: usize,
        /// Images and sounds.
        expected: usize,
    },
    /// Text of the prompt.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
}

/// Errors of making a sampler, and of choosing tokens with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// Invalid sampling settings, or logits without a valid candidate.
    #[error("cannot sample: {0}")]
    Settings(String),
    /// A grammar or JSON schema that llama.cpp refuses, or that allows no token.
    #[error("cannot use this grammar: {0}")]
    Grammar(String),
    /// Tags or triggers that the vocabulary cannot encode.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
}

/// Text that the model's vocabulary cannot encode.
#[derive(Debug, thiserror::Error)]
#[error("cannot tokenize: {0}")]
pub struct TokenizeError(pub(super) String);

/// Errors of rendering a conversation, and of parsing its answers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The chat template failed or is missing.
    #[error("cannot apply the chat template: {0}")]
    Template(String),
    /// Messages, tools or settings of a conversation that cannot be understood.
    #[error("cannot read the conversation: {0}")]
    Input(String),
    /// The model's answer does not have the form that its chat template defines.
    #[error("cannot read the model's answer: {0}")]
    Reply(String),
}

/// A requested device that is unavailable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// C and Rust disagree about the structs they share.
    #[error("{0}")]
    Abi(String),
    /// A name that no device has.
    #[error("there is no device named '{name}' ({})", known_names(known))]
    Unknown {
        /// As given.
        name: String,
        /// Devices that models can be offloaded to.
        known: Vec<String>,
    },
    /// A device that computes in host memory.
    #[error(
        "'{name}' is {}, and models are not offloaded to it ({})",
        kind.in_words(), known_names(known)
    )]
    NotOffloadable {
        /// Its name.
        name: String,
        /// Its kind.
        kind: DeviceKind,
        /// Devices that models can be offloaded to.
        known: Vec<String>,
    },
    /// A device that is named twice.
    #[error("the device '{name}' is named twice")]
    Twice {
        /// Its name.
        name: String,
    },
    /// Experts cannot be computed in place in host memory.
    #[error("'{name}' ({backend}) cannot compute in the host's memory")]
    NotUnified {
        /// Its name.
        name: String,
        /// ggml's name of its backend.
        backend: String,
    },
    /// The main device's index is out of range.
    #[error("the main device is number {main}, but there are {n_devices} devices; numbers begin at 0")]
    MainOutOfRange {
        /// As given.
        main: u32,
        /// Devices that were chosen.
        n_devices: usize,
    },
    /// An override that names an unknown buffer type.
    #[error("there is no buffer type named '{found}'; there are {}", known.join(", "))]
    NoBufferType {
        /// As given.
        found: String,
        /// Names that can be given.
        known: Vec<String>,
    },
    /// A build without support for RPC servers.
    #[error("this build of hobbit has no RPC; rebuild it with the feature rpc")]
    NoRpc,
    /// A malformed endpoint.
    #[error("'{endpoint}' is no RPC endpoint: {why}; give HOST:PORT, for example 127.0.0.1:50052")]
    Endpoint {
        /// As given.
        endpoint: String,
        /// The reason.
        why: &'static str,
    },
    /// No server listens there.
    #[error("cannot connect to the RPC server {endpoint}: {source}")]
    Unreachable {
        /// The endpoint.
        endpoint: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A server without devices.
    #[error("the RPC server {endpoint} offers no devices")]
    NoRemoteDevices {
        /// The endpoint.
        endpoint: String,
    },
}

fn known_names(known: &[String]) -> String {
    match known {
        [] => "there is none beside the CPU".to_owned(),
        [one] => format!("there is only {one}"),
        many => format!("there are {}", many.join(", ")),
    }
}
