//! hobbit's decisions and files, without llama.cpp.
//!
//! The crate `hobbit` runs models; it and hobbit's programs use the modules below, which may change with any version.
//! A module imports only modules in the rows above its own.
//!
//! | modules | task |
//! |---|---|
//! | `expert` `planes` `units` `named` | ids of experts and slices; 8-bit weights in two planes; sizes; named choices |
//! | `random` `cursor` `trial` | random numbers; numbers in files; settings compared by the time of tokens |
//! | `windows` | calls of the Windows API |
//! | `files` | what programs may do to the user's files |
//! | `store` | reads: direct, buffered, faulty |
//! | `gguf` | the bytes of every tensor in its files |
//! | `grammar` | tokens that a grammar allows next |
//! | `cache` `route` `predict` | residents and eviction; precision; prediction |
//! | `pack` | a model with every expert as one record, in two precisions |
//! | `profile` | losses that a model tolerates |
//! | `load` | the queue of reads, its classes, and the worth of a prefetch |
//! | `plan` | from a memory budget to slots, or to passthrough |
//! | `options` | a caller's options |
//! | `stats` | a session's measurements |
//! | `checkpoints` | states of a sequence to go back to: where they are taken, which are kept |
//! | `speculation` | how many tokens to draft |
//! | `residency` | one layer's step, from the router's choice to slots and reads |
//! | `trace` | recordings |
//! | `sim` | the same step over a virtual link and clock |
//! | `forecast` | the speed of a model here, from its header |
//! | `perplexity` | judging predictions: base files, estimates |
//!
//! Decisions (`cache`, `route`, `predict`, `load::prefetch`, `load::balance`, `plan`, `residency`, `store::mode`) are
//! pure: no ggml, no I/O, no clock.

pub mod cache;
pub mod checkpoints;
mod cursor;
pub mod expert;
pub mod files;
pub mod forecast;
pub mod gguf;
pub mod grammar;
pub mod load;
pub mod named;
pub mod options;
pub mod pack;
pub mod perplexity;
pub mod plan;
pub mod planes;
pub mod predict;
pub mod profile;
pub mod random;
pub mod residency;
pub mod route;
pub mod sim;
pub mod speculation;
pub mod stats;
pub mod store;
pub mod trace;
mod trial;
pub mod units;
#[cfg(windows)]
pub mod windows;

#[doc(inline)]
pub use options::{
    Budget, CachingOptions, DeviceOptions, ExpertCache, IoMode, ModelOptions, PrecisionOptions, SamplingOptions,
    SessionOptions, Token,
};
#[doc(inline)]
pub use stats::{PhaseStats, Stats};
