//! The command line of `hobbit-perplexity` and the settings made of it. Names, defaults and environment follow
//! llama.cpp's `llama-perplexity`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{Args, CommandFactory, Parser};

use crate::args::{self, ClosingArgs, LogArgs, RunArgs, TextArgs};
use crate::argv::Switch;
use crate::demo;
use crate::resolve::{self, Bytes, Run, as_typed, given_files, given_text};
use crate::surroundings::{Surroundings, read};
use hobbit_core::files::{Kind, OutputError};

const EXAMPLES: &str = "\
Examples:
  hobbit-perplexity
      The bundled demo model on the bundled text.
  hobbit-perplexity -m mixtral.gguf -f wiki.test.raw --mem-budget 8G
      Perplexity in chunks of 512 tokens, of each of which the second half is scored.
  hobbit-perplexity -m mixtral.gguf -f wiki.test.raw --kl-divergence-base mixtral.base --chunks 20
  hobbit-perplexity -m mixtral-q2.gguf --kl-divergence-base mixtral.base --kl-divergence
      Keep the log-probabilities of one run, then compare another with them. llama-perplexity has the same
      files.
  hobbit-perplexity -m mixtral.gguf -f wiki.test.raw --expert-cache 25% -ub 1 --json result.json
      Token by token, as in a generation, with a quarter of the experts in memory; all numbers as JSON.

Environment: every flag that shows [env: NAME] may be given there; the command line wins.
Exit status: 0 success, 1 failure, 2 wrong usage, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.";

/// Measure how well a Mixture-of-Experts GGUF model that need not fit in memory predicts a text.
#[derive(Debug, Parser)]
#[command(name = "hobbit-perplexity", override_usage = "hobbit-perplexity [OPTIONS]", after_help = EXAMPLES)]
pub struct LowArgs {
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub text: TextArgs,
    #[command(flatten)]
    pub measure: MeasureArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Measurement")]
pub struct MeasureArgs {
    /// Chunks to evaluate at most; -1 for all
    #[arg(long, value_name = "N", default_value = "-1", value_parser = clap::value_parser!(i32).range(-1..))]
    pub chunks: i32,
    /// Output for each chunk: its number and the perplexity so far (0), or a line with tokens, perplexity,
    /// mean negative log-likelihood and its error (1)
    #[arg(long, value_name = "0|1", default_value = "0", value_parser = clap::value_parser!(u8).range(..=1))]
    pub ppl_output_type: u8,
    /// Compare with the log-probabilities in --kl-divergence-base; a text given with -f must be theirs
    #[arg(long)]
    pub kl_divergence: Switch,
    /// Write the log-probabilities of all scored tokens here, or with --kl-divergence read them
    #[arg(long, value_name = "FNAME")]
    pub kl_divergence_base: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Write all results and what was measured as JSON; '-' is stdout
    #[arg(long, value_name = "FILE", env = "HOBBIT_ARG_JSON")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub closing: ClosingArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

/// The clap command.
pub fn command() -> clap::Command {
    let ctx_size = |arg: clap::Arg| {
        // Fewer than 3 tokens leave none to score.
        let arg = arg.default_value("512").value_parser(clap::value_parser!(u32).range(3..=1 << 24));
        arg.help("Tokens of a chunk")
    };
    let command = LowArgs::command()
        .mut_arg("ctx_size", ctx_size)
        // Chunks fill the context exactly.
        .mut_arg("prompt", |arg| arg.help("Text to predict"))
        .mut_arg("file", |arg| arg.help("File with the text; one newline at its end is dropped"))
        .mut_arg("binary_file", |arg| arg.help("File with the text; its bytes are used unchanged"))
        .mut_arg("escape", |arg| {
            arg.default_value("off").help("Process \\n, \\r, \\t, \\', \\\", \\\\ and \\xHH in the text")
        })
        .mut_arg("context_shift", |arg| arg.hide(true))
        .mut_arg("keep", |arg| arg.hide(true))
        .mut_arg("quiet", |arg| arg.help("Nothing on stderr but errors"))
        .mut_arg("perf", |arg| arg.help("Timing and cache lines at the end"))
        .mut_arg("log_file", |arg| arg.help("Write the log to this file too"));
    args::as_program(command)
}

/// The kind of measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Perplexity over disjoint chunks; their log-probabilities are kept in a base file.
    Perplexity(Option<PathBuf>),
    /// Divergence from a base file.
    Divergence(PathBuf),
}

/// Settings of a run, complete and checked.
#[derive(Debug)]
pub struct HiArgs {
    /// The session's `n_ctx` is the length of a chunk.
    pub run: Run,
    pub measure: Measure,
    /// The text and its source; `None` only for a comparison.
    pub text: Option<(PathBuf, Bytes)>,
    /// `None` for all.
    pub n_chunk_max: Option<usize>,
    /// A line for each chunk.
    pub in_lines: bool,
    pub output: OutputArgs,
    /// Files read for these settings, with their flags.
    pub read: Vec<(&'static str, PathBuf)>,
}

impl HiArgs {
    /// Checks that no output overwrites an input or a file of another kind.
    pub fn check_outputs(&self) -> Result<(), OutputError> {
        const BASE: &str = "--kl-divergence-base";
        let mut read = self.read.clone();
        let base = match &self.measure {
            Measure::Perplexity(base) => base.clone(),
            Measure::Divergence(base) => {
                read.push((BASE, base.clone()));
                None
            }
        };
        let written = [
            ("--log-file", &self.output.log.log_file, Kind::Log),
            ("--json", &self.output.json, Kind::Json),
            (BASE, &base, Kind::Base),
        ];
        resolve::check_outputs(&self.run.model_options, &self.run.model, &written, &read)
    }

    pub fn new(low: LowArgs, around: &dyn Surroundings) -> Result<Self> {
        let measure = measure(&low.measure)?;
        let mut inputs = given_files([("-f", &low.text.file), ("-bf", &low.text.binary_file)]);
        let mut given = given_text(&low.text, around)?;
        let lacks_text = given.is_none() && !matches!(measure, Measure::Divergence(_));
        if lacks_text && low.run.model.model.is_some() {
            bail!("no text: give a file with -f (or -bf), or a text with -p");
        }
        let mut run = Run::new(&low.run, around, |session| session.context_shift = false)?;
        // Measure hobbit's expert handling, even if the model fits.
        run.model_options.passthrough = false;
        // Whole batches are scored, and no context goes back.
        (run.session_options.n_outputs_max, run.session_options.checkpoints) = (0, 0);
        if lacks_text {
            let name = run.model.with_file_name(demo::TEXT);
            inputs.push(("-f", name.clone()));
            given = Some((name.clone(), as_typed(read(&name, around)?, false)));
        }
        Ok(Self {
            run,
            measure,
            text: given,
            n_chunk_max: usize::try_from(low.measure.chunks).ok(),
            in_lines: low.measure.ppl_output_type == 1,
            output: low.output,
            read: inputs,
        })
    }
}

fn measure(args: &MeasureArgs) -> Result<Measure> {
    if args.chunks == 0 {
        bail!("--chunks 0 leaves nothing to evaluate; give at least 1, or -1 for all");
    }
    Ok(if args.kl_divergence.0 {
        match args.kl_divergence_base.clone() {
            Some(base) => Measure::Divergence(base),
            None => bail!(
                "you must provide a name of a file containing the log probabilities of the base model: \
                 --kl-divergence-base FNAME"
            ),
        }
    } else {
        Measure::Perplexity(args.kl_divergence_base.clone())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;
    use std::io;
    use std::path::Path;

    struct Fake;

    impl Surroundings for Fake {
        fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
            match path.to_str() {
                Some("text") => Ok(b"a\\n\n\n".to_vec()),
                Some("models/demo-heldout-prose.txt") => Ok(b"prose\n".to_vec()),
                _ => Err(io::ErrorKind::NotFound.into()),
            }
        }
        fn demo_model(&self) -> Result<PathBuf, String> {
            Ok("models/demo.gguf".into())
        }
        fn grammar_of_schema(&self, _: &str) -> Result<String> {
            bail!("no grammars here")
        }
        fn shows_colour(&self) -> bool {
            false
        }
    }

    fn resolved(line: &str) -> Result<HiArgs> {
        let words = line.split_whitespace().map(OsString::from);
        let (low, _) = args::parse_as(command(), words).map_err(|error| anyhow::anyhow!(error.to_string()))?;
        HiArgs::new(low, &Fake)
    }

    #[test]
    fn texts_and_measures() {
        for (line, text, measure) in [
            ("", "prose", Measure::Perplexity(None)),
            ("-f text --save-all-logits x", "a\\n\n", Measure::Perplexity(Some("x".into()))),
            ("-bf text", "a\\n\n\n", Measure::Perplexity(None)),
            ("-f text -e", "a\n\n", Measure::Perplexity(None)),
            ("-p x --kl-divergence --kl_divergence_base b", "x", Measure::Divergence("b".into())),
        ] {
            let hi = resolved(line).unwrap();
            assert_eq!((hi.text.unwrap().1.0, hi.measure), (text.as_bytes().to_vec(), measure), "{line}");
        }
        let hi = resolved("-b 1 -ub 1 -ngl 99 --slots even").unwrap();
        let session = &hi.run.session_options;
        assert_eq!((session.n_ctx, session.n_batch, session.n_ubatch, hi.n_chunk_max), (512, 1, 1, None));
        assert_eq!(hi.run.model_options.n_gpu_layers, 99);
        assert_eq!(resolved("--kl-divergence --kl-divergence-base b").unwrap().text, None);
    }

    #[test]
    fn mistakes() {
        command().debug_assert();
        for (line, part) in [
            ("-m a.gguf", "no text: give a file with -f"),
            ("-f none", "none: cannot read this file"),
            ("--kl-divergence", "--kl-divergence-base FNAME"),
            ("--chunks 0", "--chunks 0"),
            ("--ppl-stride 8", "chunks do not overlap"),
            ("-c 2", "invalid value"),
            ("--ppl-output-type 2", "invalid value"),
            ("--chunks -2", "invalid value"),
        ] {
            let error = resolved(line).unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
