//! The end of a program: its exit status, and one line with the reason.

use std::io;
use std::process::ExitCode;

use anyhow::Result;

use super::advice::advice;
use super::output::{is_closed_pipe, tell};
use super::signals::{self, Interrupted};
use hobbit_core::files::OutputError;

/// Exit status if a requested action failed.
pub const FAILED: u8 = 1;
/// Exit status after wrong usage.
pub const USAGE: u8 = 2;

/// The end of a program that has answered already, with its exit status: a page is printed, or a mistake named.
#[derive(Debug, thiserror::Error)]
#[error("exit status {0}")]
pub struct Answered(pub u8);

/// The exit code for an outcome.
pub fn code(outcome: Result<u8>) -> ExitCode {
    outcome.map_or_else(|error| failure(&error), ExitCode::from)
}

/// Prints an error with its causes on one line; returns the exit code. A closed pipe is no error.
pub fn failure(error: &anyhow::Error) -> ExitCode {
    if is_closed_pipe(error) {
        return ExitCode::SUCCESS;
    }
    if let Some(Answered(status)) = error.downcast_ref() {
        return ExitCode::from(*status);
    }
    let (is_interruption, is_usage) = of_engine(error);
    if error.is::<Interrupted>() || is_interruption {
        return ExitCode::from(signals::status());
    }
    tell(format_args!("error: {}", in_words(error)));
    let is_usage = is_usage || error.downcast_ref().is_some_and(OutputError::is_usage);
    ExitCode::from(if is_usage { USAGE } else { FAILED })
}

/// Prints clap's answer to a command line: an error, or help and version with status 0.
///
/// # Errors
/// A full disk; not a closed pipe.
pub fn usage(error: &clap::Error) -> Result<u8> {
    match error.print() {
        Err(closed) if closed.kind() != io::ErrorKind::BrokenPipe => Err(closed.into()),
        _ => Ok(u8::try_from(error.exit_code()).unwrap_or(USAGE)),
    }
}

/// An error and its causes on one line, with the remedy. Each cause appears once, because many messages quote theirs.
pub fn in_words(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(|cause| cause.to_string()) {
        if !text.contains(&cause) {
            let colon = if text.is_empty() { "" } else { ": " };
            text.push_str(colon);
            text.push_str(&cause);
        }
    }
    if let Some(advice) = advice(error) {
        text = format!("{text}; {advice}");
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether an engine error is an interruption, and whether it is wrong usage: flags that need another one.
#[cfg_attr(not(feature = "engine"), expect(unused_variables))]
fn of_engine(error: &anyhow::Error) -> (bool, bool) {
    #[cfg(feature = "engine")]
    if let Some(error) = error.downcast_ref() {
        use hobbit::OpenError::{Cancelled, Output};
        return (matches!(error, Cancelled), matches!(error, Output(error) if error.is_usage()));
    }
    #[cfg(feature = "engine")]
    if let Some(hobbit::EvalError::Interrupted) = error.downcast_ref() {
        return (true, false);
    }
    (false, false)
}

#[cfg(test)]
mod tests {
    use super::in_words;

    #[test]
    fn each_cause_is_said_once() {
        let error = anyhow::anyhow!("no space").context("cannot write: no space").context("saving");
        assert_eq!(in_words(&error), "saving: cannot write: no space");
    }
}
