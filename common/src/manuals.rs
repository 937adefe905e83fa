//! Man pages and shell completions of every program: `--man` and `--completions SHELL`.

use std::ffi::OsString;
use std::io::{self, Write};

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use clap::{Arg, Args, Command, ValueHint};
use clap_complete::Shell;

/// llama.cpp's flag for the bash completion script.
const LLAMA_CPPS: &str = "--completion-bash";

#[derive(Args, Debug)]
pub struct PagesArgs {
    /// Print a script that completes this program's flags in bash, zsh, fish, elvish or powershell
    #[arg(long, value_name = "SHELL", exclusive = true, help_heading = "Help", hide_possible_values = true)]
    completions: Option<Shell>,
    /// Print the manual page, e.g. for 'man -l'
    #[arg(long, exclusive = true, help_heading = "Help")]
    man: bool,
}

/// Prints the page that `words` (without the program's name) ask for, if they ask for one; returns the exit status.
///
/// # Errors
/// A full disk, a closed pipe.
pub fn answer(command: impl FnOnce() -> Command, words: &[OsString]) -> Option<Result<u8>> {
    let words: Vec<&str> = words.iter().map(|word| word.to_str()).collect::<Option<_>>()?;
    // clap reports an unknown shell.
    let shell = |name: &str| clap::ValueEnum::from_str(name, false).ok();
    let page = match words[..] {
        ["--man"] => manual(command()),
        [LLAMA_CPPS] => Ok(script(command(), Shell::Bash)),
        ["--completions", name] => Ok(script(command(), shell(name)?)),
        [word] => Ok(script(command(), shell(word.strip_prefix("--completions=")?)?)),
        _ => return None,
    };
    Some(page.and_then(|page| print(&page)))
}

fn print(page: &[u8]) -> Result<u8> {
    let mut out = io::stdout().lock();
    out.write_all(page).and_then(|()| out.flush())?;
    Ok(0)
}

/// A manual page, followed by those of the subcommands.
///
/// # Errors
/// The page cannot be rendered.
pub fn manual(mut command: Command) -> Result<Vec<u8>> {
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

/// The completion script of a shell.
pub fn script(command: Command, shell: Shell) -> Vec<u8> {
    let name = command.get_name().to_owned();
    let mut command = command.mut_args(completed);
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    script
}

/// The flag with the values that a shell may offer: those in its value's name (`on|off`), files for paths, else none.
fn completed(arg: Arg) -> Arg {
    let name = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string).unwrap_or_default();
    // clap needs static names.
    let name: &str = Box::leak(name.into_boxed_str());
    let words: Vec<&str> = name.split('|').collect();
    let is_word = |word: &&str| word.bytes().all(|byte| byte.is_ascii_lowercase() || b"-1234567890".contains(&byte));
    if !arg.get_action().takes_values() || !arg.get_possible_values().is_empty() {
        return arg;
    }
    match arg.get_value_hint() {
        _ if words.len() > 1 && words.iter().all(is_word) => arg.value_parser(PossibleValuesParser::new(words)),
        ValueHint::Unknown if !name.contains("FILE") && !name.contains("FNAME") => arg.value_hint(ValueHint::Other),
        _ => arg,
    }
}
