//! The command line of `hobbit-perplexity`.
//!
//! [`args`] holds what was typed, [`resolve`] makes settings of it. A [`Measurement`] is prepared with the model, says
//! what context it needs and runs in it: `text` and `divergence` on chunks of a text, `benchmarks` on tasks. `evaluate` turns tokens into rows of logits; what is made of these is [`hobbit::perplexity`]'s.
//! [`mod@format`] has the lines of `llama-perplexity`, on the streams that it prints them to.

pub mod args;
mod format;
mod resolve;

#[cfg(feature = "engine")]
mod benchmarks;
#[cfg(feature = "engine")]
mod divergence;
#[cfg(feature = "engine")]
mod evaluate;
#[cfg(feature = "engine")]
mod run;
#[cfg(feature = "engine")]
mod text;

#[cfg(feature = "engine")]
pub use run::main;
#[cfg(feature = "engine")]
use run::{Desk, Measurement, Shape};
