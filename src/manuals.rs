//! Man pages and shell completions of every program: `--man` and `--completions SHELL`.

use std::ffi::OsString;
use std::io::{self, Write};

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use clap::{Args, Command};
use clap_complete::Shell;

/// llama.cpp's flag for the bash completion script.
const LLAMA_CPPS: &str = "--completion-bash";

#[derive(Args, Debug)]
pub struct PagesArgs {
    /// Print a script that completes this program's flags in bash, zsh, fish, elvish or powershell
    #[arg(long, value_name = "SHELL", exclusive = true, help_heading = "Help",
          value_parser = PossibleValuesParser::new(SHELLS),
          hide_possible_values = true)]
    completions: Option<String>,
    /// Print the manual page, e.g. for 'man -l'
    #[arg(long, exclusive = true, help_heading = "Help")]
    man: bool,
}

const SHELLS: [&str; 5] = ["bash", "zsh", "fish", "elvish", "powershell"];

/// Prints the page that `words` (without the program's name) ask for, if they ask for one; returns the exit status.
///
/// # Errors
/// A full disk, a closed pipe.
pub fn answer(command: impl FnOnce() -> Command, words: &[OsString]) -> Option<Result<u8>> {
    let words: Vec<&str> = words.iter().map(|word| word.to_str()).collect::<Option<_>>()?;
    let page = match words[..] {
        ["--man"] => manual(command()),
        [LLAMA_CPPS] => Ok(script(command(), Shell::Bash)),
        ["--completions", shell] => script_for(command, shell)?,
        [word] => script_for(command, word.strip_prefix("--completions=")?)?,
        _ => return None,
    };
    Some(page.and_then(|page| print(&page)))
}

/// `None` for an unknown shell: clap reports it.
fn script_for(command: impl FnOnce() -> Command, shell: &str) -> Option<Result<Vec<u8>>> {
    let shell = clap::ValueEnum::from_str(shell, false).ok()?;
    Some(Ok(script(command(), shell)))
}

fn print(page: &[u8]) -> Result<u8> {
    let mut out = io::stdout().lock();
    out.write_all(page).and_then(|()| out.flush())?;
    Ok(0)
}

/// A manual page, followed by those of the subcommands.
fn manual(mut command: Command) -> Result<Vec<u8>> {
    command.build();
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page).context("cannot write the manual")?;
    let name = command.get_name().to_owned();
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        // clap needs static names.
        let full: &str = Box::leak(format!("{name} {}", sub.get_name()).into_boxed_str());
        let named = sub.clone().name(full);
        let title = format!("{name}-{}", sub.get_name());
        clap_mangen::Man::new(named).title(title).render(&mut page).context("cannot write the manual")?;
    }
    Ok(page)
}

fn script(mut command: Command, shell: Shell) -> Vec<u8> {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    script
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;

    #[test]
    fn pages_and_scripts() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
            let script = String::from_utf8(script(args::command(), shell)).unwrap();
            assert!(script.contains("mem-budget"), "{shell}");
        }
        let page = String::from_utf8(manual(args::command()).unwrap()).unwrap();
        assert!(page.contains(".TH hobbit-cli 1") && page.contains("mem\\-budget") && page.contains("Examples:"));
        let two = Command::new("a").about("first").subcommand(Command::new("b").about("second"));
        let page = String::from_utf8(manual(two).unwrap()).unwrap();
        assert!(page.contains(".TH a-b 1") && page.contains("second"), "{page}");
        for other in ["-p --man", "--man -m x", "--completions", "--completions csh", ""] {
            let words: Vec<OsString> = other.split_whitespace().map(OsString::from).collect();
            assert!(answer(args::command, &words).is_none(), "{other}");
        }
    }
}
