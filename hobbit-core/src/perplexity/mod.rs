//! How good a model predicts a text, in the numbers of llama.cpp's `llama-perplexity`.
//!
//! [`logits`] scores one token; [`estimate`] makes a perplexity with its uncertainty of many. [`chunking`] says which
//! tokens are evaluated together. A [`base`] file keeps a model's log-probabilities, and [`divergence`] compares
//! another model with them. Nothing here knows an engine: logits come as slices, `[n_vocab]`.
//!
//! Sums are taken in the types that llama.cpp takes them in (`tools/perplexity/perplexity.cpp`), so that both tools
//! print the same digits.

pub mod base;
pub mod chunking;
pub mod divergence;
pub mod estimate;
pub mod logits;
