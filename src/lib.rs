//! Shared code of hobbit's programs, from arguments to exit status: hobbit-cli, hobbit-perplexity, hobbit-bench,
//! hobbit-sim and hobbit-rpc. `gguf-tools` and the benches use it too; the library for others is [`hobbit`].
//!
//! **From flags to settings.** [`argv`] turns llama.cpp's spelling into clap's ([`unsupported`] lists llama.cpp's
//! flags that hobbit lacks). [`args`] holds the parsed flags, and [`resolve`] makes
//! settings of them: it reads files, converts schemas, processes escapes, and builds the options of a model and a
//! session. [`reasoning`] decides how a model thinks. [`demo`] finds the bundled model; [`hub`] and `download` fetch
//! others.
//!
//! **hobbit-cli.** `run` opens the model and hands over to `completion` (whose prompt `prompt_cache` keeps in a file in
//! the format of [`saved`]) or `conversation` (with its [`commands`]). Both let `stream` parse and print a generation
//! on the `console`, through [`mod@text`]; `progress` shows how far a prompt is. `ctrl_c` stops a generation, and
//! `memory` resizes caches on signals, `media` reads images and sound. `report` puts measurements into words.
//!
//! **The others.** [`perplexity`], [`sim`], `rpc` and [`mod@bench`].
//!
//! **Common to all programs.** [`signals`] asks them to end, [`exit`] reports how they ended, [`output`] writes lines
//! and files and has the rule about closed pipes, [`advice`] adds helpful flags to the library's errors, [`manuals`]
//! provides man pages and completions; `log` and `devices` report the state.
//!
//! Without the feature `engine` only the pure part is built, for its tests and for tools that need no model.

// Without the engine the pure part is unused.
#![cfg_attr(not(feature = "engine"), allow(dead_code))]
// They panic if the reader has closed the pipe; see `output`.
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod advice;
mod args;
mod argv;
pub mod bench;
mod commands;
mod demo;
pub mod exit;
pub mod hub;
pub mod manuals;
pub mod output;
mod perplexity;
mod reasoning;
mod resolve;
mod saved;
pub mod signals;
mod sim;
mod surroundings;
mod text;
mod unsupported;

#[cfg(feature = "engine")]
mod completion;
#[cfg(feature = "engine")]
mod console;
#[cfg(feature = "engine")]
mod conversation;
#[cfg(feature = "engine")]
mod ctrl_c;
#[cfg(feature = "engine")]
mod devices;
#[cfg(feature = "engine")]
pub mod download;
#[cfg(feature = "engine")]
mod log;
#[cfg(feature = "engine")]
mod media;
#[cfg(feature = "engine")]
mod memory;
#[cfg(feature = "engine")]
mod progress;
#[cfg(feature = "engine")]
mod prompt_cache;
#[cfg(feature = "engine")]
mod report;
#[cfg(feature = "rpc")]
mod rpc;
#[cfg(feature = "engine")]
mod run;
#[cfg(feature = "server")]
mod server;
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
#[cfg(all(feature = "server", fuzzing))]
pub use server::fuzzed;
#[cfg(feature = "server")]
pub use server::main as server_main;
pub use sim::main as sim_main;
