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
#[cfg(unix)]
mod logs;
pub mod rig;
#[cfg(unix)]
mod router;
mod slot_files;
#[cfg(unix)]
mod slots;
mod speculation;
mod status;
#[cfg(unix)]
mod templates;
