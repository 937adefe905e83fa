//! What the tools can do, as a library: tests make their models with [`synth`].

pub mod synth;
