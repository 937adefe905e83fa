//! hobbit-server over HTTP.

mod adapters;
mod answers;
mod chat;
mod checkpoints;
mod clients;
mod completions;
mod connections;
mod embeddings;
mod limits;
mod logs;
pub mod rig;
mod router;
mod slot_files;
mod slots;
mod speculation;
mod status;
mod templates;
