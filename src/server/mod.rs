//! `hobbit-server`.

pub mod page;

use std::process::ExitCode;

/// Runs `hobbit-server` with the arguments of this process.
pub fn main() -> ExitCode {
    ExitCode::FAILURE
}
