//! The tools as a library: tests make their models with [`synth`].

#![warn(clippy::print_stdout, clippy::print_stderr)] // They panic if the reader is gone.

pub mod synth;
