//! The command lines of `hobbit-cli`, in [`perplexity`] of `hobbit-perplexity`, in [`sim`] of `hobbit-sim` and in `rpc` of
//! `hobbit-rpc`, from words to exit status.
//!
//! [`argv`] turns llama.cpp's spelling into clap's ([`foreign`] knows the flags that are not here), [`args`] holds what
//! was typed, [`resolve`] makes settings of it: files read, schemas converted, escapes processed. `run` opens the model
//! and hands over to `complete` or `converse`; both let `stream` print a generation, through [`utf8`] and [`stop`].
//! [`report`] puts the measurements into words; `pipe` says what becomes of a reader that goes away. Without the feature `engine` only the pure part exists, for its tests.

// The pure part has no user without the engine.
#![cfg_attr(not(feature = "engine"), allow(dead_code))]
// They panic where the reader went away; see `pipe`.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod argv;
mod bench;
mod demo;
mod escape;
mod foreign;
mod lines;
pub mod measure;
mod perplexity;
mod pipe;
mod report;
mod resolve;
mod sim;
mod stop;
mod svg;
mod utf8;
mod whole;

#[cfg(feature = "engine")]
mod complete;
#[cfg(feature = "engine")]
mod console;
#[cfg(feature = "engine")]
mod converse;
#[cfg(feature = "engine")]
mod ctrl_c;
#[cfg(feature = "engine")]
mod devices;
#[cfg(feature = "engine")]
mod input;
#[cfg(feature = "engine")]
mod log;
#[cfg(feature = "engine")]
mod memory_signals;
#[cfg(feature = "engine")]
mod progress;
#[cfg(feature = "rpc")]
mod rpc;
#[cfg(feature = "engine")]
mod run;
#[cfg(feature = "engine")]
mod signals;
#[cfg(feature = "engine")]
mod stream;

#[cfg(feature = "engine")]
pub use bench::main as bench_main;
#[cfg(feature = "engine")]
pub use perplexity::main as perplexity_main;
pub use pipe::{is_closed_pipe, say, tell};
#[cfg(feature = "rpc")]
pub use rpc::main as rpc_main;
#[cfg(feature = "engine")]
pub use run::main;
pub use sim::main as sim_main;
