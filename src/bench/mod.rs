//! `hobbit-bench`: measures hobbit as llama.cpp's llama-bench measures llama.cpp.
//!
//! [`args`] reads the command line, [`case`] makes every combination of its lists and ranges and checks files before
//! anything runs. `run` has `start` run each case in a process of its own (`child`), which may have a memory limit and
//! feeds tokens to an `engine`. [`answer`] makes a [`record`] of the runs, and [`mod@print`] prints it in llama-bench's
//! formats.

// The pure part has no user without the engine.
#![cfg_attr(not(feature = "engine"), allow(dead_code))]

mod answer;
pub(crate) mod args;
mod case;
pub mod host;
mod print;
mod record;

#[cfg(all(feature = "engine", target_os = "linux"))]
mod cgroup;
#[cfg(all(feature = "engine", not(target_os = "linux")))]
#[path = "no_cgroup.rs"]
mod cgroup;
#[cfg(feature = "engine")]
mod child;
#[cfg(feature = "engine")]
pub mod engine;
#[cfg(feature = "engine")]
mod run;
#[cfg(feature = "engine")]
mod start;

pub use case::{Case, Test};
#[cfg(feature = "engine")]
pub use run::main;
