//! Tools for model files. Exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted.

#![warn(clippy::print_stdout, clippy::print_stderr)] // They panic if the reader is gone.

mod cache;
mod doctor;
mod inspect;
mod pack;
mod plan;
mod profile;
mod second_reader;
mod shared;
mod synth;
mod verify;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use hobbit_common::manuals::{self, PagesArgs};
use hobbit_common::output::{is_closed_pipe, tell};
use hobbit_common::{exit, signals};
use hobbit_core::files::OutputError;

/// Inspect, verify, pack and synthesise GGUF model files.
#[derive(Debug, Parser)]
#[command(name = "gguf-tools", version)]
struct Cli {
    #[command(flatten)]
    pages: PagesArgs,
    #[command(subcommand)]
    tool: Tool,
}

#[derive(Debug, clap::Subcommand)]
enum Tool {
    /// Show architecture, experts and sizes; of an expert pack, its layout
    Inspect(inspect::Args),
    /// Describe this machine, this build and a model on one page: speeds, exactness, and the command to use
    Doctor(doctor::Args),
    /// Check structure, extents, and that all numbers are finite; of an expert pack, all checksums
    Verify(verify::Args),
    /// Make an expert pack: each expert one aligned record, at high and low precision
    Pack(Box<pack::Args>),
    /// Make a plain model of an expert pack
    Unpack(pack::UnpackArgs),
    /// Measure on a text: thresholds for dynamic precision, each expert's sensitivity to fewer bits
    Profile(Box<profile::Args>),
    /// Divide memory among the layers' virtual experts by the loss of absent experts on a text, and measure the plan
    Plan(Box<plan::Args>),
    /// Download a model of the Hub, after a forecast of its speed here
    Pull(cache::PullArgs),
    /// List downloaded models of the Hub
    List(cache::ListArgs),
    /// Remove a downloaded model
    Rm(cache::RmArgs),
    /// Write a model of a given shape with random weights
    Synth(Box<synth::Args>),
}

fn main() -> ExitCode {
    hobbit_common::output::prepare_console();
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    if let Some(answered) = manuals::answer(Cli::command, &words) {
        return exit::code(answered);
    }
    let outcome = match Cli::parse().tool {
        Tool::Inspect(args) => inspect::run(args),
        Tool::Doctor(args) => doctor::run(&args),
        Tool::Verify(args) => verify::run(args),
        Tool::Pack(args) => pack::run(*args),
        Tool::Unpack(args) => pack::unpack(args),
        Tool::Profile(args) => profile::run(*args),
        Tool::Plan(args) => plan::run(*args),
        Tool::Pull(args) => cache::pull(&args),
        Tool::List(args) => cache::list(&args),
        Tool::Rm(args) => cache::rm(&args),
        Tool::Synth(args) => synth::run(*args),
    };
    match outcome {
        // The error of an interrupted tool describes its state; the exit status is the signal's.
        Err(error) if signals::came() && !error.is::<OutputError>() && !is_closed_pipe(&error) => {
            tell(format_args!("error: {}", exit::in_words(&error)));
            ExitCode::from(signals::status())
        }
        outcome => exit::code(outcome.map(|()| 0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
