//! hobbit-server, asked over HTTP.

mod adapters;
mod chat;
mod completions;
mod connections;
mod context;
mod embeddings;
mod grammars;
mod guard;
mod limits;
mod messages;
mod responses;
pub mod rig;
mod slots;
mod templates;
mod texts;
mod thoughts;

use crate::fixture::adapters as files;
