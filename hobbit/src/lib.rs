//! hobbit runs Mixture-of-Experts GGUF models that do not fit in memory, on unmodified llama.cpp.
//!
//! Of such a model a token uses a few experts of each layer. llama.cpp computes everything else as it always does; hobbit
//! keeps as many experts in memory as the budget allows, reads the others from the file when a token needs them, and
//! multiplies. Results are llama.cpp's, bit for bit, unless smaller versions of missing experts are allowed to stand in.
//! A model that fits is left to llama.cpp.
//!
//! ```
//! # #[cfg(feature = "engine")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use hobbit::{Model, ModelOptions, Sampler, SamplingOptions, SessionOptions};
//!
//! // Any MoE GGUF; here the bundled one, with a quarter of its experts in memory.
//! let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo.gguf");
//! let options = ModelOptions { expert_cache: "25%".parse()?, ..ModelOptions::default() };
//! let model = Model::open(path.as_ref(), &options, |_progress| true)?;
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
//! 1. [`ModelOptions`] says how much memory a model may take ([`Budget`]), how much of it is for experts
//!    ([`ExpertCache`]), and how they are kept and read. The defaults take what is available. What its fields mean, and
//!    the words that they are parsed from, is in [`options`].
//! 2. `Model::open` gives a `Model`: tokens to text and back, chat templates, what is known about it. It is shared by its
//!    sessions.
//! 3. `Model::session` gives a `Session`, one context: `feed` it a prompt, then `generate` with a `Sampler`. An `Interrupt`
//!    ends either from another thread.
//! 4. `Session::stats` tells what was found in memory and what was read ([`Stats`]).
//!
//! Errors are one type, `Error`, whose messages name the file, the tensor or the option, and the remedy. llama.cpp's log
//! is silent until `set_log` takes it.
//!
//! # Features
//!
//! `engine` (default) builds llama.cpp: cmake, a C++ compiler and a few minutes. `rpc` (default) reaches devices of other
//! machines; `cuda`, `metal` and `vulkan` compile llama.cpp for this machine's, and `dynamic-backends` loads ggml's
//! backends at run time. Without `engine` only what is pure remains.
//!
//! # The two crates
//!
//! `hobbit-core` holds the decisions and the files: model files, caches, predictors, plans, traces and the simulator. It
//! has no C++ behind it and builds in seconds. This crate adds llama.cpp: model, session, the seam, devices. hobbit's own
//! programs use both.
//!
//! Decisions (`cache`, `route`, `predict`, `load::prefetch`, `load::balance`, `plan`, `residency`, `store::mode`) are pure: no ggml, no
//! I/O, no clock. `engine` alone has C++ behind it: all else builds in seconds without it.
//!
//! # The way of a token
//!
//! ```text
//! model.gguf -> gguf -> store -> load -> cache (slots) <- policy
//!                                          |
//! llama.cpp graph -> router -> engine::compute -> products on the inner ggml backend
//! ```
//!
//! 1. `gguf` reads the header: which bytes of which file are whose. `expert` names them.
//! 2. `engine::stream` shows llama.cpp the model without its experts; everything else it loads as usual.
//! 3. `plan` divides the memory budget; `cache` gets slots for as many experts as remain.
//! 4. llama.cpp evaluates a batch. At each MoE layer ggml's scheduler calls `engine::compute` with the router's ids.
//! 5. `route` regroups them by expert, and says in which precision each expert is worth using.
//! 6. `residency` asks `cache` who is resident, and `load` to bring the others: `store` reads them.
//! 7. What is there is multiplied at once, the rest as it lands; then llama.cpp goes on.
//!
//! On a device, `engine::offload` takes the place of `engine::compute`: a second cache of slots there, filled from the
//! host's. Beside the way of a token, `predict` guesses what later layers will use, and `load::prefetch` decides what of it
//! is worth reading ahead. A `trace` of a run keeps who was routed where; `sim` replays it under other decisions.

#![warn(missing_docs)]

#[cfg(feature = "engine")]
#[doc(hidden)]
pub mod engine;

#[doc(inline)]
pub use hobbit_core::{options, stats};

#[cfg(feature = "engine")]
#[doc(inline)]
pub use engine::{
    BatchToken, ChatMessage, ChatOptions, DeviceInfo, DeviceKind, Error, Generation, Interrupt, LogLevel, Model,
    ModelInfo, Sampler, Session, StopReason, devices, set_log,
};
#[doc(inline)]
pub use hobbit_core::options::{
    Budget, CachingOptions, DeviceOptions, ExpertCache, IoMode, ModelOptions, PrecisionOptions, SamplingOptions,
    SessionOptions, Token,
};
#[doc(inline)]
pub use hobbit_core::stats::{PhaseStats, Stats};
