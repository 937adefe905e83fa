//! `hobbit-cli`: the binary in a fresh directory, with a clean environment.

mod adapters;
mod caching;
mod conversations;
#[cfg(feature = "hub")]
pub mod downloads;
mod prompts;
mod reports;
#[cfg(feature = "hub")]
#[allow(dead_code, reason = "the hub's own tests use all of it")]
#[path = "../../src/hub/tests/server.rs"]
pub mod server;
mod signals;
mod usage;
