//! Flags as typed, before files are read and settings resolved. Names, defaults and environment follow llama.cpp.
//! Each flag is declared once; programs flatten the groups that they share.

mod caching;
mod context;
mod device;
pub mod model;
#[cfg(test)]
mod pages;
mod precision;
pub mod preset;
mod program;
mod prompt;
mod routing;
mod sampling;
#[cfg(feature = "engine")]
pub mod server;
mod speculation;
pub mod table;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, CommandFactory, Parser};

pub use caching::{CacheState, CachingArgs};
pub use context::{ContextArgs, RopeArgs, UbatchSize};
pub use device::DeviceArgs;
pub use model::{AttachedArgs, MediaArgs, ModelArgs, SourceArgs};
pub use precision::PrecisionArgs;
pub use preset::PresetArgs;
#[cfg(any(feature = "engine", test))]
pub use program::grammar;
pub use program::{as_program, matched, normalised, parse_as, read, with_spellings, with_switches};
#[cfg(feature = "engine")]
pub use prompt::TemplateArgs;
pub use prompt::{ChatArgs, PromptArgs, ReasoningArgs, TextArgs};
pub use routing::{RoutingArgs, bounded};
pub use sampling::SamplingArgs;
pub use speculation::SpeculationArgs;

use super::argv::{Note, Switch, Tri};
use super::manuals::PagesArgs;
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::store::IoMode;
use hobbit_core::units::{parse_bytes, parse_percent};

const EXAMPLES: &str = "\
Examples:
  hobbit-cli
      The bundled demo model continues a sentence.
  hobbit-cli -m mixtral.gguf -p \"The three laws of robotics are\" -n 128 --temp 0
      Continue a text, always with the most probable token.
  hobbit-cli -hf ggml-org/gpt-oss-20b-GGUF --mem-budget 8G
      A model of the Hub, fetched once.
  hobbit-cli -m mixtral.Q8_0.gguf --low q2_k,down=q3_k
      Decode faster: missing experts of little weight come from a smaller quant, made once beside the model.
  hobbit-cli -m qwen3-moe.gguf --mem-budget 8G --target-latency 80
      Prefer experts in memory, aiming at 80 ms a token. Results are approximate.
  hobbit-cli -m qwen3-moe.gguf -dev CUDA0 --device-cache 6G --host-cache 16G
      Ordinary weights and 6 GiB of experts on a GPU, 16 GiB of experts behind them in memory, the rest in the file.
  hobbit-cli -m qwen3-moe.gguf -st -sys \"Answer in one word.\" -p \"Capital of France?\"
      Ask once.
  hobbit-cli --doctor -m qwen3-moe.gguf
      A page about this machine and this model, for a bug report.

Input: without -p and -f, what is piped in is the text to continue; in a conversation its lines are the messages. With
-p or -f FILE the standard input is not read; -f - reads the text there.
Environment: every flag that shows [env: NAME] may be given there; the command line wins.";

#[cfg(not(windows))]
const SIGNALS: &str = "\
Signals: the first Ctrl-C stops an answer; SIGTERM and SIGHUP end in order, all files written. At the next token,
SIGUSR1 halves the expert caches and SIGUSR2 restores their planned size.
Exit status: 0 success, 1 failure, 2 wrong usage, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.";
#[cfg(windows)]
const SIGNALS: &str = "\
The first Ctrl-C stops an answer; Ctrl-Break, and closing the window, end in order, all files written. The expert caches
keep their size while the program runs.
Exit status: 0 success, 1 failure, 2 wrong usage, 130 after Ctrl-C, 143 after Ctrl-Break, 129 after closing.";

/// Run Mixture-of-Experts GGUF models that do not fit in memory.
#[derive(Debug, Parser)]
#[command(name = "hobbit-cli", override_usage = "hobbit-cli [OPTIONS]")]
#[command(after_help = format!("{EXAMPLES}\n{SIGNALS}"))]
pub struct LowArgs {
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub prompt: PromptArgs,
    #[command(flatten)]
    pub media: MediaArgs,
    #[command(flatten)]
    pub attached: AttachedArgs,
    #[command(flatten)]
    pub chat: ChatArgs,
    #[command(flatten)]
    pub reasoning: ReasoningArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    /// Print a page for bug reports and exit: this machine's speeds, whether results are llama.cpp's, and for the model
    /// of -m what fits where, its expected speed and the command to use. --mem-budget and -c count; --stats-json writes
    /// JSON
    #[arg(long, help_heading = "Help")]
    pub doctor: bool,
}

/// A model, its memory and its context: flags of every program that a user runs a model with.
#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub experts: ExpertArgs,
    #[command(flatten)]
    pub context: ContextArgs,
    #[command(flatten)]
    pub rope: RopeArgs,
}

/// Memory and computation of experts: these, and those of speculative decoding, are also what hobbit-bench varies.
#[derive(Args, Debug)]
pub struct ExpertArgs {
    #[command(flatten)]
    pub preset: PresetArgs,
    #[command(flatten)]
    pub memory: MemoryArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub precision: PrecisionArgs,
    #[command(flatten)]
    pub routing: RoutingArgs,
    #[command(flatten)]
    pub caching: CachingArgs,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Memory and I/O (hobbit's own)")]
pub struct MemoryArgs {
    /// Memory for weights, KV cache, compute buffers and experts together: 'auto', or a size such as 7500M or 8G (8G,
    /// 8GB and 8GiB are 8 * 1024^3 bytes). A model that fits as a whole is run by llama.cpp itself, unless a flag
    /// determines how its experts are kept
    #[arg(long, value_name = "SIZE|auto", default_value = "auto", env = "HOBBIT_ARG_MEM_BUDGET")]
    pub mem_budget: Budget,
    /// The part that holds experts: 'auto' (what the budget leaves), a size, or a share of all experts such as 50%
    #[arg(long, value_name = "SIZE|N%|auto", default_value = "auto", env = "HOBBIT_ARG_EXPERT_CACHE")]
    pub expert_cache: ExpertCache,
    /// Accept a budget above the available memory; by default it is refused
    #[arg(long, env = "HOBBIT_ARG_OVERCOMMIT")]
    pub overcommit: Switch,
    /// Read experts around the page cache (direct), through it (buffered), or whichever suits the machine (auto)
    #[arg(long, value_name = "auto|direct|buffered", default_value = "auto", env = "HOBBIT_ARG_IO")]
    pub io: IoMode,
    /// Copy of the model's file on another disk, or a directory with files of the same names: each read goes to the
    /// disk that will answer first. It may end earlier than the model's file; may be repeated
    #[arg(long, value_name = "PATH", env = "HOBBIT_ARG_MIRROR")]
    pub mirror: Vec<PathBuf>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Write what was measured as JSON; '-' is stdout
    #[arg(long, value_name = "FILE", env = "HOBBIT_ARG_STATS_JSON")]
    pub stats_json: Option<PathBuf>,
    #[command(flatten)]
    pub closing: ClosingArgs,
    /// Colour prompt and input
    #[arg(long)]
    pub color: Tri,
    /// Print special tokens
    #[arg(long)]
    pub special: Switch,
    /// Plain input and output, for pipes and limited consoles
    #[arg(long)]
    pub simple_io: Switch,
    #[command(flatten)]
    pub log: LogArgs,
}

impl OutputArgs {
    pub fn verbosity(&self) -> Verbosity {
        verbosity(&self.closing, &self.log)
    }
}

/// The report at the end of a run.
#[derive(Args, Debug)]
#[command(next_help_heading = "Output")]
pub struct ClosingArgs {
    /// Nothing on stderr but errors (and that the demo model runs, where no model was given)
    #[arg(long, env = "HOBBIT_ARG_QUIET")]
    pub quiet: Switch,
    /// Closing lines with speeds and cache hits; with -v also llama.cpp's
    #[arg(long, default_value = "on", env = "LLAMA_ARG_PERF")]
    pub perf: Switch,
}

/// The log, and the flags about the program itself.
#[derive(Args, Debug)]
#[command(next_help_heading = "Output")]
pub struct LogArgs {
    /// Log everything
    #[arg(short, long)]
    pub verbose: Switch,
    /// Log errors (1), warnings (2), information (3), more (4), everything (5)
    #[arg(long, value_name = "N", default_value = "3", env = "LLAMA_ARG_LOG_VERBOSITY")]
    pub verbosity: u8,
    /// Write the log to this file too, also with --quiet
    #[arg(long, value_name = "FNAME", env = "LLAMA_ARG_LOG_FILE")]
    pub log_file: Option<PathBuf>,
    #[command(flatten)]
    about: AboutArgs,
}

/// Flags that a program answers by itself.
#[derive(Args, Debug)]
pub struct AboutArgs {
    #[command(flatten)]
    pages: PagesArgs,
    /// Print all flags; -h prints those that most people need
    #[arg(short, long, action = clap::ArgAction::Help)]
    help: Option<bool>,
    /// Print the version
    #[arg(long, action = clap::ArgAction::Version)]
    version: Option<bool>,
}

/// The clap command: the derived one, with additions that the derive cannot express.
pub fn command() -> clap::Command {
    as_program(LowArgs::command())
}

/// Reads a command line without its first word (the program's name).
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<(LowArgs, Vec<Note>), clap::Error> {
    parse_as(command(), args)
}

/// Levels up to which lines show: 1 errors, 2 warnings, 3 information, 4 more, 5 everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verbosity {
    /// On stderr.
    pub shown: u8,
    /// In the log file, if there is one.
    pub logged: u8,
}

/// Verbosity of the log: `--verbose` overrides a number. `--quiet` applies to stderr only, and overrides both there.
pub fn verbosity(closing: &ClosingArgs, log: &LogArgs) -> Verbosity {
    let logged = if log.verbose.0 { 5 } else { log.verbosity };
    Verbosity { shown: if closing.quiet.0 { 1 } else { logged }, logged }
}

fn gpu_layers(text: &str) -> Result<i32, String> {
    match text {
        "auto" => Ok(-1),
        "all" => Ok(-2),
        _ => text.parse().map_err(|_| "expected a number, 'auto' or 'all'".to_owned()),
    }
}

/// A parser of numbers in `range`; `expected` words a refusal.
pub fn number<T: FromStr + PartialOrd>(range: RangeInclusive<T>, expected: &str) -> impl Fn(&str) -> Result<T, String> {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| format!("expected {expected}"))
    }
}

fn finite(text: &str) -> Result<f32, String> {
    number(f32::MIN..=f32::MAX, "a finite number")(text)
}

fn probability(text: &str) -> Result<f32, String> {
    number(0.0..=1.0, "a number from 0 to 1")(text)
}

/// How strongly routing prefers experts in memory.
pub fn strength(text: &str) -> Result<f32, String> {
    number(0.0..=100.0, "a number from 0, such as 0.2")(text)
}

/// A share of a whole.
pub fn percent(text: &str) -> Result<f64, String> {
    parse_percent(text, 100.0).ok_or_else(|| "expected a number from 0% to 100%".to_owned())
}

/// A size in bytes above 0.
pub fn bytes(text: &str) -> Result<u64, String> {
    parse_bytes(text).filter(|size| *size > 0).ok_or_else(|| "expected a size above 0, such as 2.5GiB".to_owned())
}

fn positive(text: &str) -> Result<f32, String> {
    match finite(text) {
        Ok(value) if value > 0.0 && value.recip().is_finite() => Ok(value),
        _ => Err("expected a finite number above 0".to_owned()),
    }
}
