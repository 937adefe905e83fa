//! hobbit's flags in a line of their own, as a user types them after `hobbit-cli`: for tools that compare settings
//! (`benches/quality`). What a line says is what that program would do.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Result, ensure};
use clap::{Args, Command};

use crate::argv::Grammar;
use crate::{args, argv, resolve};
use hobbit::options::{ModelOptions, SessionOptions};

pub use crate::args::ExpertArgs;

/// Reads words as flags of `A`, which may hold [`ExpertArgs`] and others. The environment, where users keep their own
/// defaults, has no say: a line means the same everywhere.
///
/// # Errors
/// One line: the first word that is no flag or no value, or the contradiction.
pub fn parse<A: Args>(words: impl IntoIterator<Item = String>) -> Result<A> {
    let command = A::augment_args(Command::new("hobbit").disable_help_flag(true).disable_version_flag(true));
    let command = args::with_spellings(command).mut_args(|arg| arg.env(None::<&str>));
    let line = argv::normalise(words.into_iter().map(OsString::from), &Grammar::of(&command))?;
    if let Some(note) = line.notes.first() {
        anyhow::bail!("{note}");
    }
    args::parse_alone(command, line.words).map_err(|error| anyhow::Error::msg(in_a_line(&error.to_string())))
}

/// What experts' flags mean for the model in this file, and for a session as `expects` says.
///
/// # Errors
/// Flags that lack another one; with `--low auto`, a model that cannot be read.
pub fn model_options(experts: ExpertArgs, model: &Path, expects: SessionOptions) -> Result<ModelOptions> {
    resolve::experts(experts, model, expects)
}

/// The words of a line, quoted as for a shell.
///
/// # Errors
/// A quotation mark without its other one.
pub fn words(line: &str) -> Result<Vec<String>> {
    let words = shlex::split(line);
    ensure!(words.is_some(), "a quotation mark is not closed");
    Ok(words.unwrap_or_default())
}

/// What clap says of a mistake, without the usage of a program that nobody called.
fn in_a_line(error: &str) -> String {
    let said = error.split("\n\nUsage:").next().unwrap_or(error).trim_start_matches("error: ");
    let said = said.split("\n\nFor more information").next().unwrap_or(said);
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit::cache::policy::PolicyKind;
    use hobbit::options::{LowShare, LowSource, PrecisionMode};

    /// With a flag of its own.
    #[derive(clap::Args)]
    struct Line {
        #[arg(long)]
        own: bool,
        #[command(flatten)]
        experts: ExpertArgs,
    }

    fn line(text: &str) -> Result<(bool, ModelOptions)> {
        let line: Line = parse(words(text)?)?;
        Ok((line.own, model_options(line.experts, Path::new("none.gguf"), SessionOptions::default())?))
    }

    #[test]
    fn a_line_is_what_users_type() {
        let (own, options) = line("--own --low q2_k --t1 0.5 --low_share=15% --policy lru -ngl 0").unwrap();
        assert!(own);
        let low = LowSource::Quantise { types: "q2_k".into(), directory: None };
        assert_eq!((options.low, options.low_share), (Some(low), LowShare::Percent(15.0)));
        assert_eq!((options.precision.t1, options.precision.t2), (Some(0.5), None));
        assert_eq!((options.caching.policy, options.n_gpu_layers), (PolicyKind::Lru, 0));
        let preset = line("--preset hobbit --low q2_k --policy lru").unwrap().1;
        assert_eq!((preset.precision.t1, preset.caching.policy), (Some(0.6), PolicyKind::Lru), "typed flags win");
        let (own, options) = line("").unwrap();
        assert_eq!((own, options.precision.mode), (false, None));
        assert_eq!(line("--precision 'dynamic'").unwrap().1.precision.mode, Some(PrecisionMode::Dynamic));
    }

    #[test]
    fn mistakes_are_named_in_a_line() {
        for (text, parts) in [
            ("--lwo q2_k", &["--lwo"][..]),
            ("--low q9_9", &["q9_9", "--low"]),
            ("--t1 0.9 --t2 0.5", &["--t1 0.9", "above"]),
            ("--low", &["--low", "value"]),
            ("stray", &["stray"]),
            ("-q", &["-q"]),
            ("--low 'q2_k", &["quotation mark"]),
            ("--mlock", &["--mlock"]),
        ] {
            let error = line(text).map(|(_, options)| options).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
            assert!(!error.contains('\n') && !error.contains("Usage"), "{text}: {error}");
        }
    }
}
