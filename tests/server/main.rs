//! hobbit-server, asked over HTTP.

mod adapters;
mod chat;
mod completions;
mod connections;
mod context;
mod embeddings;
#[path = "../fixture/adapters.rs"]
#[allow(dead_code)]
mod files;
mod grammars;
mod guard;
mod limits;
mod messages;
mod responses;
mod rig;
mod slots;
mod templates;
mod texts;
mod thoughts;
