//! Command line of `hobbit-perplexity`. Names, defaults and environment follow llama.cpp's `llama-perplexity`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser};

use crate::args::{self, ClosingArgs, ContextArgs, ExpertArgs, LogArgs, ModelArgs, RopeArgs};
use crate::argv::Note;
use crate::switch::Switch;

const EXAMPLES: &str = "\
Examples:
  hobbit-perplexity
      The bundled demo model on the bundled text.
  hobbit-perplexity -m mixtral.gguf -f wiki.test.raw --mem-budget 8G
      Perplexity in chunks of 512 tokens, of each of which the second half is scored.
  hobbit-perplexity -m mixtral.gguf -f wiki.test.raw --kl-divergence-base mixtral.base --chunks 20
  hobbit-perplexity -m mixtral-q2.gguf --kl-divergence-base mixtral.base --kl-divergence
      Keep the log-probabilities of one run, then compare another with them. llama-perplexity reads and writes the same files.
  hobbit-perplexity -m mixtral.gguf -f wiki.test.raw --expert-cache 25% -ub 1 --json result.json
      Token by token, as in a generation, with a quarter of the experts in memory; all numbers as JSON.
  hobbit-perplexity -m mixtral.gguf -f wiki.test.raw --low q2_k --mem-budget 8G -ub 1
      What dynamic precision costs: missing experts of little weight come in low precision.

Environment: every flag that shows [env: NAME] may be given there; the command line wins.
Exit status: 0 success, 1 failure, 2 wrong usage, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.";

/// Measure how well a Mixture-of-Experts GGUF model that need not fit in memory predicts a text.
#[derive(Debug, Parser)]
#[command(name = "hobbit-perplexity", override_usage = "hobbit-perplexity [OPTIONS]", after_help = EXAMPLES)]
pub struct LowArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub experts: ExpertArgs,
    #[command(flatten)]
    pub text: TextArgs,
    #[command(flatten)]
    pub measure: MeasureArgs,
    #[command(flatten)]
    pub context: ContextArgs,
    #[command(flatten)]
    pub rope: RopeArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Text")]
pub struct TextArgs {
    /// Text to predict
    #[arg(short, long, value_name = "PROMPT", overrides_with_all = ["file", "binary_file"])]
    pub prompt: Option<String>,
    /// File with the text; one newline at its end is dropped
    #[arg(short, long, value_name = "FNAME", overrides_with_all = ["prompt", "binary_file"])]
    pub file: Option<PathBuf>,
    /// The same, taken as it is
    #[arg(long, value_name = "FNAME", overrides_with_all = ["prompt", "file"])]
    pub binary_file: Option<PathBuf>,
    /// Process \n, \r, \t, \', \", \\ and \xHH in the text
    #[arg(short, long, value_name = Switch::NAME, default_value = "off")]
    pub escape: Switch,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Measurement")]
pub struct MeasureArgs {
    /// Chunks to evaluate at most; -1 for all
    #[arg(long, value_name = "N", default_value = "-1", value_parser = clap::value_parser!(i32).range(-1..))]
    pub chunks: i32,
    /// Evaluate a window of -c tokens at every N-th token and score its last N; 0 for disjoint chunks
    #[arg(long, value_name = "N", default_value = "0", conflicts_with = "kl_divergence")]
    pub ppl_stride: u32,
    /// What is printed for each chunk: its number and the perplexity so far (0), or a line with tokens, perplexity,
    /// mean negative log-likelihood and its error (1)
    #[arg(long, value_name = "0|1", default_value = "0", value_parser = clap::value_parser!(u8).range(..=1))]
    pub ppl_output_type: u8,
    /// Compare with the log-probabilities in --kl-divergence-base; a text given with -f must be theirs
    #[arg(long, value_name = Switch::NAME, default_value = "off")]
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
        .mut_arg("context_shift", |arg| arg.hide(true))
        .mut_arg("keep", |arg| arg.hide(true))
        .mut_arg("quiet", |arg| arg.help("Nothing on stderr but errors"))
        .mut_arg("perf", |arg| arg.help("Timing and cache lines at the end"))
        .mut_arg("log_file", |arg| arg.help("Write the log to this file too"));
    args::as_program(command)
}

/// Reads a command line without its first word.
pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<(LowArgs, Vec<Note>), clap::Error> {
    args::parse_as(command(), words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> Result<LowArgs, String> {
        parse(words.iter().map(OsString::from)).map(|(low, _)| low).map_err(|error| error.to_string())
    }

    #[test]
    fn the_command_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn llama_perplexitys_spellings() {
        let low = parsed(&["-f", "t", "--save-all-logits", "x", "-b", "1", "-ub", "1", "-ngl", "99"]).unwrap();
        assert_eq!(low.measure.kl_divergence_base, Some("x".into()));
        assert_eq!((low.context.batch_size, low.context.ubatch_size.0), (1, Some(1)));
        assert_eq!((low.context.ctx_size, low.measure.chunks, low.text.escape), (512, -1, Switch(false)));
        assert!(parsed(&["--kl-divergence", "--kl_divergence_base", "b"]).unwrap().measure.kl_divergence.0);
    }

    #[test]
    fn one_measurement_at_a_time() {
        assert!(parsed(&["--ppl-stride", "8", "--kl-divergence"]).unwrap_err().contains("cannot be used with"));
        for words in [["-c", "2"], ["--ppl-output-type", "2"], ["--chunks", "-2"]] {
            assert!(parsed(&words).unwrap_err().contains("invalid value"), "{words:?}");
        }
    }
}
