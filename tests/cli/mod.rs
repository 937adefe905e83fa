//! `hobbit-cli`: the binary in a fresh directory, with a clean environment.

mod adapters;
mod caching;
mod conversations;
#[cfg(feature = "hub")]
mod downloads;
mod prompts;
mod reports;
#[cfg(unix)]
mod signals;
mod templates;
#[cfg(unix)]
mod terminal;
mod usage;
