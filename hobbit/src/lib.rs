//! hobbit runs Mixture-of-Experts GGUF models that do not fit in memory, on unmodified llama.cpp.
//!
//! # The way of a token
//!
//! ```text
//! model.gguf -> gguf -> store -> load -> cache (slots) <- policy
//!                                          |
//! llama.cpp graph -> router -> engine::compute -> products on the inner ggml backend
//! ```
//!
//! 1. [`gguf`] reads the header: which bytes of which file are whose. [`expert`] names them.
//! 2. `engine::stream` shows llama.cpp the model without its experts; everything else it loads as usual.
//! 3. [`plan`] divides the memory budget; [`cache`] gets slots for as many experts as remain.
//! 4. llama.cpp evaluates a batch. At each MoE layer ggml's scheduler calls `engine::compute` with the router's ids.
//! 5. [`routing`] regroups them by expert; [`route`] says in which precision each expert is worth using.
//! 6. `engine::residency` asks [`cache`] who is resident, and [`load`] to bring the others: [`store`] reads them.
//! 7. What is there is multiplied at once, the rest as it lands; then llama.cpp goes on.
//!
//! On a device, `engine::offload` takes the place of `engine::compute`: a second cache of slots there, filled from the
//! host's.
//!
//! Beside the way of a token, [`predict`] guesses what later layers will use, and [`load::prefetch`] decides what of it is
//! worth reading ahead. A [`trace`] of a run keeps who was routed where; [`sim`] replays it under other decisions.
//!
//! [`pack`] beside them is a file format: a model with every expert as one record, in two precisions. To the others it
//! is one more [`gguf::Gguf`] with a [`gguf::Catalog`]. [`files`] is the rule that every writer asks: nothing is written over what a
//! run reads.
//!
//! A module knows only those before it in this list. Decisions (`cache::policy`, `plan`, `route`, `routing`,
//! `predict`, `load::prefetch`, `store::mode`) are pure: no ggml, no I/O, no clock. Without the feature `engine` everything pure builds in seconds and needs no C++.
//!
//! # Example
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

#![warn(missing_docs)]

pub mod cache;
pub mod calibrate;
#[cfg(feature = "engine")]
mod engine;
pub mod expert;
pub mod files;
pub mod gguf;
pub mod imatrix;
pub mod load;
pub mod options;
pub mod pack;
pub mod perplexity;
pub mod plan;
pub mod predict;
pub mod profile;
pub mod route;
pub mod routing;
pub mod sim;
pub mod stats;
pub mod store;
pub mod trace;

#[cfg(feature = "engine")]
pub use engine::*;
pub use options::*;
pub use stats::{
    CacheSlots, CachingReport, DeviceCounters, DeviceReport, LayerStats, PhaseStats, PrecisionCounts, PrecisionReport,
    PrecisionShares, ProfileReport, Stats, Timings, WarmStart,
};
