//! hobbit-server, asked over HTTP.

mod adapters;
mod chat;
mod completions;
mod embeddings;
#[path = "../fixture/adapters.rs"]
#[allow(dead_code)]
mod files;
mod grammars;
mod guard;
mod messages;
mod predictions;
mod responses;
mod rig;
mod thoughts;
