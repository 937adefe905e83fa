//! `hobbit-bench`: measures hobbit as llama.cpp's llama-bench measures llama.cpp.
//!
//! [`args`] reads the command line with [`values`], llama-bench's lists and ranges; [`case`] makes every combination, and
//! [`inputs`] checks files before anything runs. `run` has `start` run each case in a process of its own (`child`), which may have a
//! memory limit (`limits`) and evaluates `tokens` with an `engine`. [`answer`] makes a [`record`] of the runs, and [`mod@print`]
//! prints it in llama-bench's formats. [`threads`] chooses how many threads llama.cpp gets.

// The pure part has no user without the engine.
#![cfg_attr(not(feature = "engine"), allow(dead_code))]

mod answer;
pub(crate) mod args;
mod case;
pub mod host;
mod inputs;
mod limits;
mod print;
mod record;
mod threads;
mod values;

#[cfg(feature = "engine")]
mod child;
#[cfg(feature = "engine")]
mod disk;
#[cfg(feature = "engine")]
pub mod engine;
#[cfg(feature = "engine")]
mod process;
#[cfg(feature = "engine")]
mod run;
#[cfg(feature = "engine")]
mod start;
#[cfg(feature = "engine")]
mod tokens;

#[cfg(feature = "engine")]
pub use run::main;
