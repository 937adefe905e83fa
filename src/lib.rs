//! Shared code of hobbit's programs, from arguments to exit status: hobbit-cli, hobbit-perplexity, hobbit-bench,
//! hobbit-sim and hobbit-rpc. `hobbit-server` and the benches use it too; the library for others is [`hobbit`].
//!
//! **From flags to settings.** [`argv`] turns llama.cpp's spelling into clap's ([`unsupported`] lists llama.cpp's
//! flags that hobbit lacks). [`args`] holds the parsed flags, and [`resolve`] makes
//! settings of them: it reads files, converts schemas, processes escapes, and builds the options of a model and a
//! session. [`reasoning`] decides how a model thinks. [`demo`] finds the bundled model; [`mod@download`] fetches
//! others.
//!
//! **hobbit-cli.** `run` opens the model and hands over to `completion` (whose prompt `prompt_cache` keeps in a file in
//! the format of [`saved`]) or `conversation` (with its [`commands`]). Both let `stream` parse and print a generation
//! on the `console`, through [`mod@text`]; `progress` shows how far a prompt is. `ctrl_c` stops a generation, and
//! `memory` resizes caches on signals, `media` reads images and sound. `report` puts measurements into words; `doctor`
//! describes the machine.
//!
//! **The others.** [`perplexity`], [`sim`], `rpc` and [`mod@bench`].
//!
//! **Common to all programs.** [`hobbit_common`], which gguf-tools uses too; `log` and `devices` report the state.
//!
//! Without the feature `engine` only the pure part is built, for its tests and for tools that need no model.

// Without the engine the pure part is unused.
#![cfg_attr(not(feature = "engine"), allow(dead_code, unused_imports))]
// They panic if the reader has closed the pipe; see `output`.
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod args;
pub mod argv;
pub mod bench;
mod commands;
mod demo;
mod perplexity;
pub mod reasoning;
pub mod resolve;
pub mod saved;
mod sim;
pub mod surroundings;
pub mod text;
mod unsupported;

#[cfg(feature = "engine")]
mod completion;
#[cfg(feature = "engine")]
mod console;
#[cfg(feature = "engine")]
mod conversation;
#[cfg(feature = "engine")]
pub mod ctrl_c;
#[cfg(feature = "engine")]
pub mod devices;
#[cfg(feature = "engine")]
mod doctor;
#[cfg(feature = "engine")]
pub mod download;
#[cfg(feature = "engine")]
pub mod log;
#[cfg(feature = "engine")]
pub mod media;
#[cfg(feature = "engine")]
pub mod memory;
#[cfg(feature = "engine")]
mod progress;
#[cfg(feature = "engine")]
pub mod prompt_cache;
#[cfg(feature = "engine")]
mod report;
#[cfg(feature = "rpc")]
mod rpc;
#[cfg(feature = "engine")]
pub mod run;
#[cfg(feature = "engine")]
mod stream;

#[cfg(feature = "engine")]
pub use bench::main as bench_main;
#[cfg(feature = "engine")]
pub use perplexity::main as perplexity_main;
#[cfg(feature = "rpc")]
pub use rpc::main as rpc_main;
#[cfg(feature = "engine")]
pub use run::main;
pub use sim::main as sim_main;

use hobbit_common::{advice, exit, hub, manuals, output, signals};

/// Version and commit.
pub const VERSION: &str = env!("HOBBIT_VERSION");
