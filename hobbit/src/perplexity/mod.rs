//! How good a model predicts a text, in the numbers of llama.cpp's `llama-perplexity`.
//!
//! [`softmax`] scores one token; [`estimate`] makes a perplexity with its uncertainty of many. [`windows`] says which
//! tokens are evaluated together. [`quantised`] is how log-probabilities are kept in a base file ([`base`]), against
//! which [`divergence`] compares another model. [`tasks`] are the multiple-choice benchmarks. Nothing here knows an
//! engine: logits come as slices, `[n_vocab]`.
//!
//! Sums are taken in the types that llama.cpp takes them in (`tools/perplexity/perplexity.cpp`), so that both tools
//! print the same digits.

pub mod base;
pub mod divergence;
pub mod estimate;
pub mod quantised;
pub mod random;
pub mod softmax;
pub mod tasks;
pub mod windows;
