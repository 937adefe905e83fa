//! Shared code of hobbit's programs and gguf-tools.
//!
//! [`signals`] asks programs to end, [`exit`] reports how they ended, [`output`] writes lines and files and has the
//! rule about closed pipes, [`advice`] adds helpful flags to the library's errors, [`manuals`] provides man pages and
//! completions. [`hub`] and [`download`] fetch models; [`demo`] finds the bundled one.
//!
//! Without the feature `engine` only the pure part is built.

#![warn(clippy::print_stdout, clippy::print_stderr)] // They panic if the reader has closed the pipe; see `output`.

pub mod advice;
pub mod demo;
#[cfg(feature = "engine")]
pub mod download;
pub mod exit;
pub mod hub;
pub mod manuals;
pub mod output;
pub mod signals;
