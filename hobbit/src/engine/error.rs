//! All errors between a model file and a token.

use std::path::PathBuf;

use super::device_error::DeviceError;
use super::low::LowError;
use hobbit_core::files::OutputError;
use hobbit_core::gguf::adapter::AdapterError;
use hobbit_core::gguf::{GgufError, LowMismatch};
use hobbit_core::pack::{PackError, TypeChoiceError};
use hobbit_core::plan::PlanError;
use hobbit_core::profile::{LossBoundError, ProfileError, VirtualPlanError};
use hobbit_core::route::ThresholdError;
use hobbit_core::store::StoreError;
use hobbit_core::tuned::TunedError;

/// Errors of the engine. Messages name the file, tensor or setting; programs add the remedy in their own flags.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
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
    /// Low-precision versions for a model that has no experts.
    #[error("{}: this model has no experts, so there is nothing to have in low precision", path.display())]
    NoExperts {
        /// The model file.
        path: PathBuf,
    },
    /// The low-precision file is not the same model.
    #[error(transparent)]
    Low(#[from] LowError),
    /// The low-precision file's experts have other shapes.
    #[error("{}: this file cannot serve as low precision: {mismatch}", path.display())]
    LowMismatch {
        /// The low-precision file.
        path: PathBuf,
        /// The mismatch.
        mismatch: LowMismatch,
    },
    /// Low-precision experts of a pack that was made from another model.
    #[error(
        "{}: these low-precision experts were made from another model than {}: {what} (it was called {source_name})",
        low.display(), model.display()
    )]
    LowOfAnother {
        /// The pack.
        low: PathBuf,
        /// The model.
        model: PathBuf,
        /// Name of the model that the pack was made from, at that time.
        source_name: String,
        /// The difference.
        what: &'static str,
    },
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
    /// A profile that is damaged, or belongs to another model.
    #[error(transparent)]
    Tuned(#[from] TunedError),
    /// A plan of virtual experts that is damaged, too large, or belongs to another model.
    #[error(transparent)]
    VirtualPlan(#[from] VirtualPlanError),
    /// No mix satisfies the loss bound.
    #[error(transparent)]
    LossBound(Box<LossBoundError>),
    /// Slots are divided by penalty, but the cost of each layer's misses is unknown.
    #[error("slots by penalty need the cost of each layer's misses, and {found}")]
    NoPenalties {
        /// The reason: no tuned policy, or one without these costs.
        found: String,
    },
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
    /// Unknown types for low-precision versions.
    #[error("low-precision types: {0}")]
    LowTypes(TypeChoiceError),
    /// Low-precision versions requested for a pack; they are made from plain models.
    #[error("{}: this is a pack; low-precision versions are made of a plain GGUF", path.display())]
    LowOfPack {
        /// The pack.
        path: PathBuf,
    },
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
    },
    /// Generation was interrupted.
    #[error("interrupted")]
    Interrupted,
    /// Text that the model's vocabulary cannot encode.
    #[error("cannot tokenize: {0}")]
    Tokenize(String),
    /// The chat template failed or is missing.
    #[error("cannot apply the chat template: {0}")]
    ChatTemplate(String),
    /// Messages, tools or settings of a conversation that cannot be understood.
    #[error("cannot read the conversation: {0}")]
    ChatInput(String),
    /// The model's answer does not have the form that its chat template defines.
    #[error("cannot read the model's answer: {0}")]
    ChatReply(String),
    /// A grammar or JSON schema that llama.cpp refuses.
    #[error("cannot use this grammar: {0}")]
    Grammar(String),
    /// Invalid sampling settings, or logits without a valid candidate.
    #[error("cannot sample: {0}")]
    Sampling(String),
    /// Logits that are NaN or infinite.
    #[error(
        "the model computed logits that are not finite numbers; likely causes, in this order: too large a scale of a \
         LoRA adapter, a control vector, damaged weights"
    )]
    NotFinite,
    /// This model or run does not support rerouting tokens to other experts.
    #[error("tokens cannot be sent to experts in memory: {0}")]
    Routing(String),
    /// Loading was cancelled by the progress callback.
    #[error("loading was cancelled")]
    Cancelled,
    /// The expert products did not reach hobbit's backend.
    #[error("{0}")]
    Seam(String),
}

impl From<LossBoundError> for Error {
    fn from(error: LossBoundError) -> Self {
        Self::LossBound(Box::new(error))
    }
}
