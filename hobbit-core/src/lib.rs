//! hobbit's decisions and files, without llama.cpp.
//!
//! The crate `hobbit` runs models; it and hobbit's programs use the modules below, which may change with any version.
//! A module knows only those in the rows above its own.
//!
//! | rooms | what |
//! |---|---|
//! | `expert` `planes` `units` `named` | the smallest nouns; 8-bit weights in two planes; sizes, percents, durations; choices by name |
//! | `files` | what programs may do to the user's files |
//! | `store` | where bytes come from: direct, buffered, memory, faulty |
//! | `calibrate` | what this machine can do, measured once |
//! | `gguf` | which bytes of which file are whose |
//! | `grammar` | which tokens go on with a text that must follow rules |
//! | `cache` `route` `predict` | who stays, who is wanted in which precision, what comes |
//! | `pack` | a model with every expert as one record, in two precisions |
//! | `profile` | what a model tolerates |
//! | `tuned` | how a model's experts are best cached, as traces say |
//! | `load` | the queue of reads, order of classes, what is worth reading ahead, CPU or copy |
//! | `plan` | memory budget to slots, or to standing aside |
//! | `options` | what a caller may choose |
//! | `stats` | what a session measured |
//! | `residency` | one layer's step, from the router's choice to slots and reads |
//! | `trace` | recordings |
//! | `sim` | the same decisions again, over a virtual link and clock |
//! | `forecast` | how fast a model will run here, before it is |
//! | `perplexity` | judging predictions: base files, estimates |
//!
//! Decisions (`cache`, `route`, `predict`, `load::prefetch`, `load::balance`, `plan`, `residency`, `store::mode`) are
//! pure: no ggml, no I/O, no clock.

pub mod cache;
pub mod calibrate;
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
pub mod residency;
pub mod route;
pub mod sim;
pub mod stats;
pub mod store;
pub mod trace;
pub mod tuned;
pub mod units;

#[doc(inline)]
pub use options::{
    Budget, CachingOptions, DeviceOptions, ExpertCache, IoMode, ModelOptions, PrecisionOptions, SamplingOptions,
    SessionOptions, Token,
};
#[doc(inline)]
pub use stats::{PhaseStats, Stats};
