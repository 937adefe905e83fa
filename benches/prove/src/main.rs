//! The laboratory: what proves hobbit's claims, apart from what is installed. hobbit-bench measures; this program compares it
//! with others ([`peers`]) and makes tables, plots and verdicts of records ([`report`]). `benches/prove.sh` runs all studies.

#![warn(clippy::print_stdout, clippy::print_stderr)] // They panic where the reader went away.

mod peers;
mod report;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use hobbit_programs::exit;
use hobbit_programs::measure::host::Host;
use hobbit_programs::output::say;

/// Prove what hobbit claims: other programs beside it, and pages and tables of records.
#[derive(Debug, Parser)]
#[command(name = "hobbit-prove", version = env!("CARGO_PKG_VERSION"), max_term_width = 110)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Continue the same text with hobbit, llama.cpp and other programs in the same memory
    Peers(Box<peers::PeersArgs>),
    /// Tables and plots of raw results
    Report(report::ReportArgs),
    /// Name this machine, as the directory of its results is named
    Machine {
        /// A model, or a directory on its disk
        path: PathBuf,
    },
    /// One continuation, in a process of its own
    #[command(hide = true)]
    Generate { wish: String },
}

fn main() -> ExitCode {
    exit::code(run(std::env::args_os()))
}

fn run(words: impl Iterator<Item = OsString>) -> Result<u8> {
    let args = match Args::try_parse_from(words) {
        Ok(args) => args,
        Err(error) => return exit::usage(&error),
    };
    match args.command {
        Command::Peers(args) => return peers::run(&args),
        Command::Report(args) => report::run(&args, &mut io::stdout().lock())?,
        Command::Machine { path } => say(Host::describe(&path).machine)?,
        Command::Generate { wish } => {
            say(serde_json::to_string(&peers::generate::run(&serde_json::from_str(&wish)?)?)?)?;
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        super::Args::command().debug_assert();
    }
}
