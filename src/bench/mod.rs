//! The command line of `hobbit-bench`.
//!
//! [`args`] holds what was typed, [`values`] reads llama-bench's lists and ranges, [`case`] makes every combination of them. `run`
//! lets `start` run each in a process of its own (`child`, on what `tokens` hands out), and [`answer`] makes a [`record`] of what
//! these tell, which [`mod@print`] prints in llama-bench's formats. `peers` does the same for other programs, beside which
//! `generate` continues a text with our own engines, or `command` with hobbit-cli; `watch` looks at them from outside.
//! [`inputs`] are looked at before anything runs, [`threads`] says how many llama.cpp gets. [`report`] reads records back.

// The pure part has no user without the engine.
#![cfg_attr(not(feature = "engine"), allow(dead_code))]

mod answer;
pub mod args;
mod case;
mod inputs;
mod print;
mod record;
mod report;
mod threads;
mod values;

#[cfg(feature = "engine")]
mod child;
#[cfg(feature = "engine")]
mod command;
#[cfg(feature = "engine")]
mod generate;
#[cfg(feature = "engine")]
mod peers;
#[cfg(feature = "engine")]
mod run;
#[cfg(feature = "engine")]
mod start;
#[cfg(feature = "engine")]
mod tokens;
#[cfg(feature = "engine")]
mod watch;

#[cfg(feature = "engine")]
pub use run::main;
