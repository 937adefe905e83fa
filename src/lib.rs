//! What hobbit's programs are made of, from words to exit status: hobbit-cli, hobbit-perplexity, hobbit-bench, hobbit-sim and
//! hobbit-rpc. `gguf-tools` and the benches share it; the library for others is [`hobbit`].
//!
//! **From flags to settings.** [`argv`] turns llama.cpp's spelling into clap's ([`unsupported`] knows the flags of llama.cpp's that
//! are not here, [`switch`] how flags are switched), [`args`] holds what was typed, [`resolve`] makes settings of it: files read, schemas converted, escapes
//! processed, options of a model and a session made; [`reasoning`] how a model thinks. [`demo`] finds the bundled model, [`hub`] and
//! `download` fetch others.
//!
//! **hobbit-cli.** `run` opens the model and hands over to `completion` (of a `prompt`, which `prompt_cache` keeps in a file as
//! [`saved`] has it) or `conversation` (with its [`commands`]);
//! both let `stream` print a generation (`reading` takes answers apart) on the `console` (and `terminal`), through [`utf8`] and [`stop`], with `progress` while a prompt is read.
//! `ctrl_c` stops it, signals of `memory` resize its caches. [`report`] puts measurements into words.
//!
//! **The others.** [`perplexity`], [`sim`], `rpc` and [`mod@bench`].
//!
//! **What all of them do alike.** [`signals`] asks them to end, [`exit`] says how they ended, [`output`] writes lines and files and
//! has the rule about a reader that goes away, [`advice`] adds the flags that help to errors of the library, [`pages`] completes flags and has manuals; `log` and `devices` tell people what is going on.
//!
//! Without the feature `engine` only the pure part exists, for its tests and for what needs no model.

// The pure part has no user without the engine.
#![cfg_attr(not(feature = "engine"), allow(dead_code))]
// They panic where the reader went away; see `output`.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod advice;
mod args;
mod argv;
pub mod bench;
mod commands;
mod demo;
mod escape;
pub mod exit;
pub mod hub;
mod loss_bound;
pub mod output;
pub mod pages;
mod perplexity;
mod reasoning;
mod report;
mod resolve;
mod saved;
pub mod signals;
mod sim;
mod stop;
mod switch;
mod unsupported;
mod utf8;

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
mod download;
#[cfg(feature = "engine")]
mod log;
#[cfg(feature = "engine")]
mod memory;
#[cfg(feature = "engine")]
mod progress;
#[cfg(feature = "engine")]
mod prompt;
#[cfg(feature = "engine")]
mod prompt_cache;
#[cfg(feature = "engine")]
mod reading;
#[cfg(feature = "rpc")]
mod rpc;
#[cfg(feature = "engine")]
mod run;
#[cfg(feature = "server")]
mod server;
#[cfg(feature = "engine")]
mod stream;
#[cfg(feature = "engine")]
mod terminal;

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
#[cfg(feature = "server")]
#[doc(hidden)]
pub use server::page;
pub use sim::main as sim_main;
