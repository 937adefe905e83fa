//! hobbit-server, asked over HTTP.

mod chat;
mod completions;
mod embeddings;
mod grammars;
mod guard;
mod messages;
mod predictions;
mod responses;
mod rig;
mod thoughts;
