//! hobbit-server over HTTP.

mod access;
mod adapters;
mod answers;
mod chat;
mod connections;
mod embeddings;
#[path = "../fixture/adapters.rs"]
#[allow(dead_code)]
mod files;
mod limits;
mod rig;
mod slots;
mod templates;
