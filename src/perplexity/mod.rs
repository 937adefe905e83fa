//! The command line of `hobbit-perplexity`.
//!
//! [`args`] holds the parsed flags, [`resolve`] makes settings of them. A [`Measurement`] is prepared with the model,
//! states the context that it needs, and runs in it (`measure`). `evaluate` turns tokens into rows of logits, which
//! [`hobbit_core::perplexity`] scores. [`mod@format`] has the lines of `llama-perplexity`, on the streams that it
//! prints them to.

pub mod args;
mod format;
mod resolve;

#[cfg(feature = "engine")]
mod evaluate;
#[cfg(feature = "engine")]
mod measure;
#[cfg(feature = "engine")]
mod run;

#[cfg(feature = "engine")]
pub use run::main;
#[cfg(feature = "engine")]
use run::{Desk, Measurement};
