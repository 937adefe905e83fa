//! Random models of any size: GGUF files that llama.cpp loads and runs, with weights from a generator.
//!
//! The numbers are sane (activations keep their spread from layer to layer, logits are finite, tokens differ in
//! their experts), the text is not. For benchmarks and tests where only shapes matter. Memory use is constant;
//! quantised blocks are made directly, so that a file is written as fast as the disk takes it.
//!
//! ```no_run
//! use hobbit_synth::{Format, Spec, write};
//! let spec = Spec { down_types: vec![Format::Q6_K], ..Spec::tiny("qwen3moe") };
//! write("tiny.gguf".as_ref(), &spec)?;
//! # Ok::<(), anyhow::Error>(())
//! ```
//!
//! `spec` (what is wanted) → `model` (keys and tensors, from the descriptions in `arch_table`) → `file` (shards,
//! written atomically) ← `format` (random blocks).

mod arch;
mod arch_hybrid;
mod arch_sparse;
mod arch_table;
mod drafter;
mod file;
mod format;
mod model;
mod presets;
mod projector;
mod qwen4exp;
mod random;
mod spec;
#[cfg(test)]
mod tests;
pub mod vocab;

pub use drafter::Drafter;
pub use file::{Written, header, shard_names, write, write_with};
pub use format::Format;
pub use presets::presets;
pub use projector::Projector;
pub use qwen4exp::Qwen4Exp;
pub use spec::{ExpertGroups, Gating, Spec, architectures, recent_architectures};
