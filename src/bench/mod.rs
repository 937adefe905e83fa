//! The command line of `hobbit-bench`, whose parts the laboratory (`benches/prove`) uses too.
//!
//! [`args`] holds what was typed, [`values`] reads llama-bench's lists and ranges, [`case`] makes every combination of them. `run`
//! lets `start` run each in a process of its own (`child`, which has an `engine` evaluate what `tokens` hands out), and [`answer`] makes a [`record`] of what
//! these tell, which [`mod@print`] prints in llama-bench's formats. [`inputs`] are looked at before anything runs, [`threads`] says
//! how many llama.cpp gets.

// The pure part has no user without the engine.
#![cfg_attr(not(feature = "engine"), allow(dead_code))]

pub mod answer;
pub mod args;
pub mod case;
pub mod inputs;
pub mod print;
pub mod record;
pub mod threads;
mod values;

#[cfg(feature = "engine")]
pub mod child;
#[cfg(feature = "engine")]
pub mod engine;
#[cfg(feature = "engine")]
mod run;
#[cfg(feature = "engine")]
pub mod start;
#[cfg(feature = "engine")]
mod tokens;

#[cfg(feature = "engine")]
pub use run::main;
