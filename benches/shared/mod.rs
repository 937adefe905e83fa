//! What the benches have in common.

pub mod host;
pub mod requantise;
