//! HTTP: bodies, errors, streams, and what every request passes.

pub mod body;
pub mod error;
pub mod guard;
pub mod stream;
