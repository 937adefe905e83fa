//! `--doctor`: the page of `gguf-tools doctor`, a program that lies beside this one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::args::{self, LowArgs, command, normalised};
use super::exit::FAILED;
use super::log::{Level, Log};
use super::output::write_json;
use hobbit_core::files::{self, Kind, Output};
use hobbit_core::plan::Budget;

/// Flags that the page takes, and those that fetch a model.
const TAKEN: [&str; 11] = [
    "--doctor",
    "--model",
    "--mem-budget",
    "--ctx-size",
    "--stats-json",
    "--hf-repo",
    "--hf-file",
    "--hf-token",
    "--model-url",
    "--offline",
    "--quiet",
];

/// Prints the page about this machine, and about the model if one is named; returns the exit status. `--stats-json`
/// writes it as JSON instead. `line` is the command line without the program's name.
pub fn run(args: &LowArgs, line: Vec<OsString>) -> Result<u8> {
    let log = Log::new(args::verbosity(&args.output.closing, &args.output.log), None)?;
    for flag in ignored(line) {
        log.line(Level::Warning, format!("note: {flag} has no effect: the page does not take it into account"));
    }
    let json = args.output.stats_json.as_deref();
    let outputs = json.map(|path| Output { flag: "--stats-json", path, kind: Kind::Json });
    files::check(outputs.as_slice(), &[])?;
    let own = std::env::current_exe().context("finding this program's file")?;
    let mut command = Command::new(beside(&own, Path::is_file)?);
    let mut words = words(args);
    words.insert(1, format!("--asked-by={}", hobbit::engine::backends().join(",")).into());
    command.args(words);
    let Some(path) = json else {
        return Ok(status(command.status().context("running gguf-tools")?.code()));
    };
    let output = command.stderr(Stdio::inherit()).output().context("running gguf-tools")?;
    if output.status.success() {
        write_json(path, &serde_json::from_slice::<Value>(&output.stdout)?, "page")?;
    }
    Ok(status(output.status.code()))
}

/// Flags of a command line that do not change the page, each once.
fn ignored(line: Vec<OsString>) -> Vec<String> {
    let Ok(line) = normalised(&mut command(), line) else { return Vec::new() };
    let mut flags: Vec<String> = Vec::new();
    for word in &line.words {
        let flag = word.to_str().and_then(|word| word.split('=').next()).unwrap_or_default();
        if flag.starts_with("--") && !TAKEN.contains(&flag) && flags.iter().all(|known| known != flag) {
            flags.push(flag.to_owned());
        }
    }
    flags
}

/// An exit status; a program that a signal ended has none.
fn status(code: Option<i32>) -> u8 {
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(FAILED)
}

/// gguf-tools beside the program in the file `own`.
fn beside(own: &Path, exists: impl Fn(&Path) -> bool) -> Result<PathBuf> {
    let program = own.with_file_name(format!("gguf-tools{}", std::env::consts::EXE_SUFFIX));
    if !exists(&program) {
        bail!(
            "--doctor runs gguf-tools, which is not beside hobbit-cli; build it with the same features \
             (cargo build --release -p gguf-tools) or install it (contrib/install.sh)"
        );
    }
    Ok(program)
}

/// The arguments of gguf-tools.
fn words(args: &LowArgs) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["doctor".into()];
    if let Budget::Bytes(bytes) = args.run.experts.memory.mem_budget {
        words.extend(["--ram".into(), bytes.to_string().into()]);
    }
    if args.run.context.ctx_size > 0 {
        words.extend(["--ctx".into(), args.run.context.ctx_size.to_string().into()]);
    }
    if args.output.stats_json.is_some() {
        words.push("--json".into());
    }
    if let Some(model) = &args.run.model.model {
        words.extend(["--".into(), model.into()]);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::parse;

    #[test]
    fn the_page_is_asked_for_with_what_was_given() {
        let words = |line: &str| {
            let words = words(&parse(line.split(' ').map(OsString::from)).unwrap().0);
            words.iter().map(|word| word.to_str().unwrap().to_owned()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(words("--doctor"), "doctor");
        assert_eq!(
            words("--doctor -m a.gguf --mem-budget 1KiB -c 512 --stats-json -"),
            "doctor --ram 1024 --ctx 512 --json -- a.gguf"
        );
    }

    #[test]
    fn flags_that_the_page_does_not_take_are_named() {
        let ignored = |line: &str| ignored(line.split(' ').map(OsString::from).collect()).join(" ");
        assert_eq!(ignored("--doctor -m a.gguf --mem-budget 1KiB -c 512 --stats-json -"), "");
        assert_eq!(
            ignored("--doctor -hf a/b -dev none --host-cache 8G -t 2 -t 3"),
            "--device --expert-cache --threads"
        );
    }

    #[test]
    fn an_absent_program_is_named() {
        let own = Path::new("/opt/hobbit-cli");
        assert!(beside(own, |path| path.starts_with("/opt")).unwrap().to_str().unwrap().starts_with("/opt/gguf-tools"));
        assert!(beside(own, |_| false).unwrap_err().to_string().contains("contrib/install.sh"));
        assert_eq!((status(Some(2)), status(None)), (2, FAILED));
    }
}
