//! What the benches have in common.

pub mod requantise;
