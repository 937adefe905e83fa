//! The command line of `hobbit-perplexity`.
//!
//! [`args`] has the flags and the settings made of them. A [`Measurement`] is prepared with the model, states the
//! context that it needs, and runs in it (`measure`); [`hobbit_core::perplexity`] scores its rows of logits.
//! [`mod@format`] has the lines of `llama-perplexity`, on the streams that it prints them to.

pub mod args;
mod format;

#[cfg(feature = "engine")]
mod measure;
#[cfg(feature = "engine")]
mod run;

#[cfg(feature = "engine")]
pub use run::main;
#[cfg(feature = "engine")]
use run::{Desk, Measurement};
