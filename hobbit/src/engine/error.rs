//! Errors of the engine, one enum for each operation. Messages name the file, tensor or setting; programs add the
//! remedy in their own flags.

use std::path::{Path, PathBuf};

use hobbit_core::files::OutputError;
use hobbit_core::gguf::adapter::AdapterError;
use hobbit_core::gguf::{GgufError, LowMismatch, RecodeError};
use hobbit_core::pack::{PackError, TypeChoiceError};
use hobbit_core::plan::{PlanError, SetupError};
use hobbit_core::profile::{LossBoundError, ProfileError, VirtualPlanError};
use hobbit_core::route::ThresholdError;
use hobbit_core::store::StoreError;

/// Errors of opening a model, and of starting a session on it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The messages are the documentation.
pub enum OpenError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Low(#[from] LowError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("{}: the path-table predictor needs a table of this model", path.display())]
    NoPathTable { path: PathBuf },
    #[error(transparent)]
    PathTable(#[from] ProfileError),
    #[error(transparent)]
    Thresholds(#[from] ThresholdError),
    #[error(transparent)]
    VirtualPlan(#[from] VirtualPlanError),
    #[error(transparent)]
    LossBound(Box<LossBoundError>),
    #[error("{}: cannot {action} this file: {source}", path.display())]
    Io { path: PathBuf, action: &'static str, source: std::io::Error },
    #[error("{}: llama.cpp cannot load this model: {reason}", path.display())]
    Load { path: PathBuf, reason: String },
    #[error("{}: llama.cpp cannot load this model with another value of {}: {reason}", path.display(), keys.join(", "))]
    Overridden { path: PathBuf, keys: Vec<String>, reason: String },
    #[error("cannot create a context of {n_ctx} tokens: {reason}")]
    Context { n_ctx: u32, reason: String },
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    #[error("cannot apply the control vectors: {0}")]
    ControlVector(String),
    #[error(transparent)]
    PackWrite(#[from] hobbit_core::pack::WriteError),
    #[error("cannot allocate {bytes} bytes for the expert cache: {source}")]
    OutOfMemory { bytes: u64, source: std::io::Error },
    #[error("{device} refuses {bytes} bytes of memory for experts, of the {free} that it says are free")]
    DeviceMemory { device: String, bytes: u64, free: u64 },
    #[error("trace: {0}")]
    Trace(#[from] hobbit_core::trace::TraceError),
    #[error("cannot reserve {bytes} bytes of address space; raise the limit (ulimit -v unlimited)")]
    AddressSpace { bytes: u64 },
    #[error("tokens cannot be sent to experts in memory: {0}")]
    Routing(String),
    #[error("speculative decoding: {0}")]
    Speculation(String),
    #[error("loading was cancelled")]
    Cancelled,
    #[error("{0}")]
    Unsupported(String),
    #[error(transparent)]
    WarmUp(#[from] EvalError),
}

impl From<SetupError> for OpenError {
    fn from(error: SetupError) -> Self {
        match error {
            SetupError::Plan(error) => Self::Plan(error),
            SetupError::VirtualPlan(error) => Self::VirtualPlan(error),
            SetupError::LossBound(error) => Self::LossBound(error),
            SetupError::NoRoomForVirtual => Self::Routing(error.to_string()),
        }
    }
}

/// Reasons why a model has no low-precision versions, or a file cannot serve as such.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The messages are the documentation.
pub enum LowError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("{}: {what} as in {}{note}", low.display(), model.display())]
    OtherModel { low: Box<Path>, model: Box<Path>, what: String, note: &'static str },
    #[error("{}: tensor '{tensor}': {source}", path.display())]
    Values { path: PathBuf, tensor: String, source: RecodeError },
    #[error("{}: this model has no experts, so there is nothing to have in low precision", path.display())]
    NoExperts { path: PathBuf },
    #[error("{}: this file cannot serve as low precision: {mismatch}", path.display())]
    Mismatch { path: PathBuf, mismatch: LowMismatch },
    #[error(
        "{}: these low-precision experts were made from another model than {}: {what} (it was called {source_name})",
        low.display(), model.display()
    )]
    OfAnotherModel { low: PathBuf, model: PathBuf, source_name: String, what: &'static str },
    #[error("low-precision types: {0}")]
    Types(TypeChoiceError),
    #[error("{}: this is a pack; low-precision versions are made of a plain GGUF", path.display())]
    OfPack { path: PathBuf },
}

/// Errors of evaluating tokens and of generating text. The session goes on, unless a variant states otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The messages are the documentation.
pub enum EvalError {
    #[error("decoding failed: {0}")]
    Decode(String),
    #[error("decoding failed: {0}; the context is lost, feed it again")]
    ContextLost(String),
    #[error(
        "a batch of {n_tokens} tokens, of at most {n_batch}; evaluate it in parts, or open the session with a larger \
         n_batch"
    )]
    BatchTooLarge { n_tokens: usize, n_batch: usize },
    #[error(
        "there is nothing to go on from: the context is new, or was reset, cut or lost since the last evaluation; feed \
         at least one token first"
    )]
    NothingEvaluated,
    #[error("the context of {n_ctx} tokens is full")]
    ContextFull { n_ctx: u32, shift_helps: bool },
    #[error("interrupted")]
    Interrupted,
    #[error(
        "the model computed logits that are not finite numbers; likely causes, in this order: too large a scale of a \
         LoRA adapter, a control vector, damaged weights, a changed file of a saved slot or --prompt-cache"
    )]
    NotFinite,
    #[error("the saved state {0}: it was changed after it was saved")]
    State(String),
    #[error("{0}")]
    Seam(String),
    #[error(transparent)]
    Sampler(#[from] SamplerError),
}

/// Errors of reading images and sound.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The messages are the documentation.
pub enum MediaError {
    #[error("{}: this projector cannot be used: {}", path.display(), reason.trim())]
    Projector { path: PathBuf, reason: String },
    #[error("cannot read this image or sound: {0}")]
    Unreadable(String),
    #[error("the prompt has {found} places for images and sound, and {expected} are given")]
    Markers { found: usize, expected: usize },
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
}

/// Errors of making a sampler, and of choosing tokens with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The messages are the documentation.
pub enum SamplerError {
    #[error("cannot sample: {0}")]
    Settings(String),
    #[error("cannot use this grammar: {0}")]
    Grammar(String),
    #[error("cannot use this schema now: {0}")]
    Busy(String),
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
}

/// Text that the model's vocabulary cannot encode.
#[derive(Debug, thiserror::Error)]
#[error("cannot tokenize: {0}")]
pub struct TokenizeError(pub(crate) String);

/// Errors of rendering a conversation, and of parsing its answers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The messages are the documentation.
pub enum ChatError {
    #[error("cannot apply the chat template: {0}")]
    Template(String),
    #[error("cannot apply the chat template now: {0}")]
    Busy(String),
    #[error("cannot read the conversation: {0}")]
    Input(String),
    #[error("cannot read the model's answer: {0}")]
    Reply(String),
}

/// A requested device that is unavailable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The messages are the documentation.
pub enum DeviceError {
    #[error("{0}")]
    Abi(String),
    #[error("there is no device named '{name}' ({})", known_names(known))]
    Unknown { name: String, known: Vec<String> },
    #[error("'{name}' is {kind}, and models are not offloaded to it ({})", known_names(known))]
    NotOffloadable { name: String, kind: &'static str, known: Vec<String> },
    #[error("the device '{name}' is named twice")]
    Twice { name: String },
    #[error("'{name}' ({backend}) cannot compute in the host's memory")]
    NotUnified { name: String, backend: String },
    #[error("the main device is number {main}, but there are {n_devices} devices; numbers begin at 0")]
    MainOutOfRange { main: u32, n_devices: usize },
    #[error("there is no buffer type named '{found}'; there are {}", known.join(", "))]
    NoBufferType { found: String, known: Vec<String> },
    #[error("this build of hobbit has no RPC; rebuild it with the feature rpc")]
    NoRpc,
    #[error("'{endpoint}' is no RPC endpoint: {why}; give HOST:PORT, for example 127.0.0.1:50052")]
    Endpoint { endpoint: String, why: &'static str },
    #[error("cannot connect to the RPC server {endpoint}: {source}")]
    Unreachable { endpoint: String, source: std::io::Error },
    #[error("the RPC server {endpoint} offers no devices")]
    NoRemoteDevices { endpoint: String },
}

fn known_names(known: &[String]) -> String {
    match known {
        [] => "there is none beside the CPU".to_owned(),
        [one] => format!("there is only {one}"),
        many => format!("there are {}", many.join(", ")),
    }
}
