//! hobbit runs Mixture-of-Experts GGUF models that do not fit in memory, on unmodified llama.cpp.
//!
//! A token of such a model uses a few experts of each layer. hobbit keeps as many experts in memory as the budget
//! allows, reads the others from the file when a token needs them, and computes their products; llama.cpp computes
//! everything else. Results equal llama.cpp's bit for bit, unless the options allow approximations, such as smaller
//! versions of missing experts. If the model fits, llama.cpp runs it by itself.
//!
//! ```
//! # #[cfg(feature = "engine")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use hobbit::{Model, ModelOptions, Sampler, SamplingOptions, SessionOptions};
//!
//! // Any MoE GGUF; here the bundled one, with a quarter of its experts in memory.
//! let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo.gguf");
//! let options = ModelOptions { expert_cache: "25%".parse()?, ..ModelOptions::default() };
//! let model = Model::open(path.as_ref(), &options)?;
//! let mut session = model.session(&SessionOptions { threads: Some(1), ..SessionOptions::default() })?;
//!
//! session.feed(&model.tokenize("In the beginning God created the", true, false)?)?;
//! let mut sampler = Sampler::new(&model, &SamplingOptions::greedy())?;
//! let mut text = Vec::new();
//! for token in session.generate(&mut sampler, Some(16)) {
//!     text.extend(model.piece(token?, false));
//! }
//! println!("{}", String::from_utf8_lossy(&text));
//! let decode = session.stats().decode;
//! println!("{} hits, {} misses, {} bytes read", decode.hits, decode.misses, decode.bytes_read);
//! # assert!(!text.is_empty() && decode.misses > 0);
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "engine"))]
//! # fn main() {}
//! ```
//!
//! # Where to begin
//!
//! 1. [`ModelOptions`] sets how much memory a model may take ([`Budget`]), how much of it is for experts
//!    ([`ExpertCache`]), and how experts are cached and read. The defaults use the available memory. [`options`]
//!    describes all fields and the words they are parsed from.
//! 2. `Model::open` returns a `Model`, which its sessions share: tokenisation, chat templates, and the model's
//!    description.
//! 3. `Model::session` returns a `Session`, one context: `feed` it a prompt, then `generate` with a `Sampler`. An
//!    `Interrupt` stops either from another thread.
//! 4. `Session::stats` returns hits, misses, bytes read and other measurements ([`Stats`]).
//!
//! Each operation has an enum of its errors: `OpenError`, `EvalError`, `SamplerError`, `ChatError`. Messages state
//! facts and name the file, the tensor or the setting; programs add the remedy in their own flags. llama.cpp's log is
//! discarded until `set_log` receives it.
//!
//! # Features
//!
//! `engine` (default) builds llama.cpp, which needs cmake, a C++ compiler and a few minutes. `rpc` (default) uses
//! devices of other machines. `cuda`, `metal` and `vulkan` compile llama.cpp for this machine's devices;
//! `dynamic-backends` loads ggml's backends at run time. Without `engine`, only the re-exports of `hobbit-core` remain.
//!
//! # The two crates
//!
//! `hobbit-core` contains the decisions and the file formats: model files, caches, predictors, plans, traces and the
//! simulator. It needs no C++ and builds in seconds. This crate adds llama.cpp: models, sessions, devices, and the seam
//! between llama.cpp's graphs and hobbit's experts. hobbit's own programs use both.
//!
//! docs/DESIGN.md follows a token through both.

#![warn(missing_docs)]

#[cfg(feature = "engine")]
pub mod engine;

#[doc(inline)]
pub use hobbit_core::{options, stats};

#[cfg(feature = "engine")]
#[doc(inline)]
pub use engine::{
    BatchToken, ChatError, DeviceError, DeviceInfo, DeviceKind, EvalError, Generation, Interrupt, LogLevel, Model,
    ModelInfo, OpenError, Sampler, SamplerError, Session, StopReason, devices, set_log,
};
#[doc(inline)]
pub use hobbit_core::checkpoints::{Checkpoint, Cut};
#[doc(inline)]
pub use hobbit_core::options::{
    Budget, CachingOptions, DeviceOptions, ExpertCache, IoMode, ModelOptions, PrecisionOptions, SamplingOptions,
    SessionOptions, Token,
};
#[doc(inline)]
pub use hobbit_core::stats::{PhaseStats, Stats};
