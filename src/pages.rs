//! Shell completions and manual pages of every program: `--completions SHELL` and `--man`.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io::{self, Write};

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, Args, Command};
use clap_complete::Shell;

use super::argv;

/// Prefix of the name of a flag with one dash and several letters, which clap does not support.
const ONE_DASH: &str = "one-dash-";
/// llama.cpp's flag for the bash completion script.
const LLAMA_CPPS: &str = "--completion-bash";

#[derive(Args, Debug)]
pub struct PagesArgs {
    /// Print a script that completes this program's flags in bash, zsh, fish, elvish or powershell
    #[arg(long, value_name = "SHELL", exclusive = true, help_heading = "Help", value_parser = PossibleValuesParser::new(SHELLS),
          hide_possible_values = true)]
    completions: Option<String>,
    /// Print the manual page, e.g. for 'man -l'
    #[arg(long, exclusive = true, help_heading = "Help")]
    man: bool,
}

const SHELLS: [&str; 5] = ["bash", "zsh", "fish", "elvish", "powershell"];

/// The spelling of a program's flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// clap's only.
    Clap,
    /// llama.cpp's as well ([`argv`]).
    LlamaCpp,
}

/// Prints the page that `words` (without the program's name) ask for, if they ask for one; returns the exit status.
///
/// # Errors
/// A full disk, a closed pipe.
pub fn answer(command: impl FnOnce() -> Command, spelling: Spelling, words: &[OsString]) -> Option<Result<u8>> {
    let words: Vec<&str> = words.iter().map(|word| word.to_str()).collect::<Option<_>>()?;
    let page = match words[..] {
        ["--man"] => manual(command()),
        [LLAMA_CPPS] => script(command(), spelling, Shell::Bash),
        ["--completions", shell] => of(command, spelling, shell)?,
        [word] => of(command, spelling, word.strip_prefix("--completions=")?)?,
        _ => return None,
    };
    Some(page.and_then(|page| print(&page)))
}

/// `None` for an unknown shell: clap reports it.
fn of(command: impl FnOnce() -> Command, spelling: Spelling, shell: &str) -> Option<Result<Vec<u8>>> {
    let shell = clap::ValueEnum::from_str(shell, false).ok()?;
    Some(script(command(), spelling, shell))
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
        let named = sub.clone().name(leak(format!("{name} {}", sub.get_name())));
        let title = format!("{name}-{}", sub.get_name());
        clap_mangen::Man::new(named).title(title).render(&mut page).context("cannot write the manual")?;
    }
    Ok(page)
}

/// clap needs static names; a few leaked ones do no harm.
fn leak(name: String) -> &'static str {
    Box::leak(name.into_boxed_str())
}

fn script(command: Command, spelling: Spelling, shell: Shell) -> Result<Vec<u8>> {
    let name = command.get_name().to_owned();
    let mut command = match spelling {
        Spelling::Clap => command,
        Spelling::LlamaCpp => with_spellings(command),
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    let script = String::from_utf8(script).context("the script is no text")?;
    let script = script.replace(&format!("-l {ONE_DASH}"), "-o "); // fish's word for such flags
    Ok(script.replace(&format!("--{ONE_DASH}"), "-").into_bytes())
}

/// The command with a flag for each other spelling of its flags.
fn with_spellings(mut command: Command) -> Command {
    let mut names: HashSet<String> = command.get_arguments().filter_map(Arg::get_long).map(str::to_owned).collect();
    let mut others = Vec::new();
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
        let Some(long) = arg.get_long() else { continue };
        for (spelling, takes_value) in argv::spellings(arg) {
            let name = match spelling.strip_prefix("--") {
                Some(name) if name == long => continue,
                Some(name) => name.to_owned(),
                None => format!("{ONE_DASH}{}", spelling.trim_start_matches('-')),
            };
            let other = match takes_value {
                true => arg.clone().id(leak(spelling)).short(None::<char>).long(leak(name)),
                false => Arg::new(leak(spelling))
                    .long(leak(name))
                    .action(ArgAction::SetTrue)
                    .help(arg.get_help().cloned().unwrap_or_default()),
            };
            if names.insert(other.get_long().unwrap_or_default().to_owned()) {
                others.push(other.env(None::<&str>));
            }
        }
    }
    for other in others {
        command = command.arg(other);
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;

    fn text(command: Command, spelling: Spelling, shell: Shell) -> String {
        String::from_utf8(script(command, spelling, shell).unwrap()).unwrap()
    }

    #[test]
    fn scripts_know_llama_cpps_spellings() {
        for (shell, parts) in [
            (Shell::Bash, &[" -ngl ", " --gpu-layers ", " --no-warmup ", "\n                -hf)", " -no-cnv "][..]),
            (Shell::Zsh, &["-ngl=[", "--no-warmup[", "-hf=["]),
            (Shell::Fish, &["-o ngl ", "-l no-warmup ", "-o hf "]),
            (Shell::Elvish, &["cand -ngl ", "cand --no-warmup "]),
            (Shell::PowerShell, &["'-ngl'", "'--no-warmup'"]),
        ] {
            let script = text(args::command(), Spelling::LlamaCpp, shell);
            for part in parts {
                assert!(script.contains(part), "{shell}: {part}");
            }
            assert!(!script.contains(ONE_DASH), "{shell}");
        }
        assert!(!text(args::command(), Spelling::Clap, Shell::Bash).contains(" -ngl "));
    }

    #[test]
    fn pages_are_for_man() {
        let page = String::from_utf8(manual(args::command()).unwrap()).unwrap();
        assert!(page.contains(".TH hobbit-cli 1") && page.contains("mem\\-budget") && page.contains("Examples:"));
        let two = Command::new("a").about("first").subcommand(Command::new("b").about("second"));
        let page = String::from_utf8(manual(two).unwrap()).unwrap();
        assert!(page.contains(".TH a-b 1") && page.contains("second"), "{page}");
    }

    #[test]
    fn only_what_stands_alone_is_answered() {
        let asks = |words: &[&str]| {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            answer(args::command, Spelling::LlamaCpp, &words).is_some()
        };
        for other in [&["-p", "--man"][..], &["--man", "-m", "x"], &["--completions"], &["--completions", "csh"], &[]] {
            assert!(!asks(other), "{other:?}");
        }
    }
}
