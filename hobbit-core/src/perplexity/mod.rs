//! How well a model predicts a text, in the numbers of llama.cpp's `llama-perplexity`.
//!
//! [`logits`] scores one token; [`estimate`] makes a perplexity of many, with its uncertainty. [`chunking`] decides
//! which tokens are evaluated together. A [`base`] file keeps a model's log-probabilities, and [`divergence`] compares
//! another model with them. Logits come as slices, `[n_vocab]`: any engine can make them.
//!
//! Sums are taken in the types that llama.cpp takes them in (`tools/perplexity/perplexity.cpp`), so that both tools
//! print the same digits.

pub mod base;
pub mod chunking;
pub mod divergence;
pub mod estimate;
pub mod logits;
