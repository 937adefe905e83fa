//! HTTP: connections, bodies, errors, streams, and what every request passes.

pub mod body;
pub mod connections;
pub mod error;
pub mod guard;
pub mod memory;
pub mod stream;
pub mod workers;
