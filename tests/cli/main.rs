//! `hobbit-cli`: the binary in a fresh directory, with a clean environment.

mod adapters;
#[cfg(feature = "hub")]
mod downloads;
#[path = "../fixture/adapters.rs"]
mod files;
mod presets;
mod prompt_cache;
mod prompts;
mod reasoning;
mod reports;
#[allow(dead_code, reason = "shared by the tests of all programs")]
mod rig;
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
