//! `hobbit-cli` as its users meet it: the real binary, in a fresh directory, with a clean environment.

mod adapters;
#[cfg(feature = "hub")]
mod downloads;
mod presets;
mod prompt_cache;
mod prompts;
mod reports;
mod rig;
mod routing;
#[cfg(feature = "hub")]
#[allow(dead_code, reason = "the hub's own tests use all of it")]
#[path = "../../src/hub/tests/server.rs"]
mod server;
mod signals;
mod talk;
mod terminal;
mod thoughts;
mod tuned;
mod usage;

use crate::fixture::adapters as files;
