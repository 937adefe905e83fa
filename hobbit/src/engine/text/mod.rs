//! Conversations and samplers.

pub(crate) mod chat;
pub(crate) mod sampling;
