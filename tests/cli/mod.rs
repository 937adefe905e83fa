//! `hobbit-cli`: the binary in a fresh directory, with a clean environment.

mod adapters;
#[cfg(feature = "hub")]
mod downloads;
mod presets;
mod prompt_cache;
mod prompts;
mod reasoning;
mod reports;
pub mod rig;
mod routing;
#[cfg(feature = "hub")]
#[allow(dead_code, reason = "the hub's own tests use all of it")]
#[path = "../../src/hub/tests/server.rs"]
mod server;
mod signals;
mod talk;
mod terminal;
mod tuned;
mod usage;

use crate::fixture::adapters as files;
