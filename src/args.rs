//! What was typed: every flag as given, unread and unresolved. Names, defaults and environment follow llama.cpp.

mod adapters;
mod caching;
mod device;
mod precision;
pub mod preset;
mod prompt;
mod reasoning;
mod routing;
mod sampling;
#[cfg(feature = "server")]
pub mod server;
pub mod source;

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Args, CommandFactory, FromArgMatches, Parser};

pub use adapters::AdapterArgs;
pub use caching::CachingArgs;
pub use device::DeviceArgs;
pub use precision::PrecisionArgs;
pub use preset::PresetArgs;
pub use prompt::PromptArgs;
pub use reasoning::ReasoningArgs;
pub use routing::RoutingArgs;
pub use sampling::SamplingArgs;
pub use source::SourceArgs;

use preset::PresetWords;

use super::argv::{self, Grammar, Note};
use super::pages::PagesArgs;
use super::switch::{self, Switch, Tri};
use super::unsupported;
use hobbit::options::{FlashAttn, KvOverride, KvType, RopeScaling};
use hobbit::plan::{Budget, ExpertCache};
use hobbit::store::IoMode;

const EXAMPLES: &str = "\
Examples:
  hobbit-cli
      The bundled demo model continues a sentence.
  hobbit-cli -m mixtral.gguf -p 'The three laws of robotics are' -n 128 --temp 0
      Continue a text, always with the most probable token.
  hobbit-cli -hf ggml-org/gpt-oss-20b-GGUF --mem-budget 8G
      A model of the Hub, fetched once.
  hobbit-cli -m qwen3-moe.gguf --mem-budget 8G
      Converse (Ctrl-C stops an answer, /exit ends) in 8 GiB, whatever the size of the file.
  hobbit-cli -m mixtral.Q8_0.gguf --low mixtral.Q2_K.gguf
      Decode faster: a missing expert that matters little comes from the second file, a smaller quant of the model.
  hobbit-cli -m mixtral.Q8_0.gguf --low q2_k,down=q3_k
      The same without one: it is made once, in a file beside the model.
  hobbit-cli -m mixtral.Q8_0.gguf --preset hobbit --t1 0.5
      As the HOBBIT paper has it, but for T1. edgemoe, fate, smoe and swapmoe are others.
  hobbit-cli -m qwen3-moe.gguf --mem-budget 8G --target-latency 80
      Send tokens to experts in memory as far as it takes to be done in 80 ms each. Results are approximate.
  hobbit-cli -m qwen3-moe.gguf -dev CUDA0 --device-cache 6G --host-cache 16G
      Ordinary weights and 6 GiB of experts on a GPU, 16 GiB of experts behind them in memory, the rest in the file.
  hobbit-cli -m qwen3-moe.gguf -st -sys 'Answer in one word.' -p 'Capital of France?'
      Ask once.
  hobbit-cli -m model.gguf -no-cnv -f prompt.txt --expert-cache 50% --io direct --stats-json stats.json
      Hold half of the experts in memory, bypass the page cache and write what was measured.

Input: without -p and -f, what is piped in is the text to continue; in a conversation its lines are the messages. With -p or
-f FILE the standard input is not read; -f - reads the text there.
Signals: the first Ctrl-C stops an answer; SIGTERM and SIGHUP end in order, all files written. At the next token, SIGUSR1 halves the expert caches and SIGUSR2 gives them back what was planned at the start.
Environment: every flag that shows [env: NAME] may be given there; the command line wins.
Exit status: 0 success, 1 failure, 2 wrong usage, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.";

/// Run Mixture-of-Experts GGUF models that do not fit in memory.
#[derive(Debug, Parser)]
#[command(
    name = "hobbit-cli",
    version = env!("HOBBIT_VERSION"),
    override_usage = "hobbit-cli [OPTIONS]",
    args_override_self = true,
    disable_help_flag = true,
    disable_version_flag = true,
    max_term_width = 110,
    after_help = EXAMPLES
)]
pub struct LowArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub experts: ExpertArgs,
    #[command(flatten)]
    pub prompt: PromptArgs,
    #[command(flatten)]
    pub chat: ChatArgs,
    #[command(flatten)]
    pub reasoning: ReasoningArgs,
    #[command(flatten)]
    pub context: ContextArgs,
    #[command(flatten)]
    pub rope: RopeArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Model to run; of a split model, any part. Without it the bundled demo model runs
    #[arg(short, long, value_name = "FNAME", env = "LLAMA_ARG_MODEL")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub source: SourceArgs,
    /// Look for invalid values in the weights while loading
    #[arg(long, value_name = Switch::NAME, default_value = "off")]
    pub check_tensors: Switch,
    /// Rearrange weights for the CPU: where the whole model fits and llama.cpp runs it by itself, and where half of the experts
    /// have slots and are of MXFP4, Q4_0 or IQ4_NL (auto), always (on), or never; it changes the last bits of some types' results
    #[arg(long, value_name = Tri::NAME, default_value = "auto", env = "LLAMA_ARG_REPACK")]
    pub repack: Tri,
    /// Replace metadata of the file, e.g. llama.expert_used_count=int:2; comma-separated or repeated
    #[arg(long, value_name = "KEY=TYPE:VALUE", value_delimiter = ',')]
    pub override_kv: Vec<KvOverride>,
    #[command(flatten)]
    pub adapters: AdapterArgs,
}

/// Where experts are kept and how they are computed: flags of every program that runs a model.
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
    /// Memory for weights, KV cache, compute buffers and experts together: 'auto', or a size such as 8G or 7500M. A model
    /// that fits as a whole is run by llama.cpp itself, unless a flag says how its experts are to be kept
    #[arg(long, value_name = "SIZE|auto", default_value = "auto", env = "HOBBIT_ARG_MEM_BUDGET")]
    pub mem_budget: Budget,
    /// The part that holds experts: 'auto' (what the budget leaves), a size, or a share of all experts such as 50%
    #[arg(long, value_name = "SIZE|N%|auto", default_value = "auto", env = "HOBBIT_ARG_EXPERT_CACHE")]
    pub expert_cache: ExpertCache,
    /// Take a budget that exceeds what the system says is available; by default it is refused where it would be used
    #[arg(long, value_name = Switch::NAME, default_value = "off", env = "HOBBIT_ARG_OVERCOMMIT")]
    pub overcommit: Switch,
    /// Read experts around the page cache (direct), through it (buffered), or as fits the machine
    #[arg(long, value_name = "auto|direct|buffered", default_value = "auto", env = "HOBBIT_ARG_IO")]
    pub io: IoMode,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Conversation")]
pub struct ChatArgs {
    /// Converse instead of continuing a text (default: if the model has a chat template)
    #[arg(long, value_name = Switch::NAME)]
    pub conversation: Option<Switch>,
    /// System prompt of the conversation
    #[arg(long, value_name = "PROMPT", overrides_with = "system_prompt_file")]
    pub system_prompt: Option<String>,
    /// File with the system prompt; one newline at its end is dropped
    #[arg(long, value_name = "FNAME", overrides_with = "system_prompt")]
    pub system_prompt_file: Option<PathBuf>,
    /// End after one answer
    #[arg(long, value_name = Switch::NAME, default_value = "off")]
    pub single_turn: Switch,
    /// Continue a text with the user: input is asked for at reverse prompts and at the end of a text
    #[arg(short, long, value_name = Switch::NAME, default_value = "off")]
    pub interactive: Switch,
    /// Like -i, but ask for input at once
    #[arg(long, value_name = Switch::NAME, default_value = "off")]
    pub interactive_first: Switch,
    /// Input ends with a line that ends in '\' instead of the other way round
    #[arg(long, value_name = Switch::NAME, default_value = "off")]
    pub multiline_input: Switch,
    /// Text before each input of the user; disables the chat template
    #[arg(long, value_name = "STRING")]
    pub in_prefix: Option<String>,
    /// Text after each input of the user; disables the chat template
    #[arg(long, value_name = "STRING")]
    pub in_suffix: Option<String>,
    /// BOS token before each input of the user; disables the chat template
    #[arg(long, value_name = Switch::NAME, default_value = "off")]
    pub in_prefix_bos: Switch,
    /// Chat template: the name of a built-in one or the template itself (default: the model's)
    #[arg(long, value_name = "JINJA_TEMPLATE", env = "LLAMA_ARG_CHAT_TEMPLATE")]
    pub chat_template: Option<String>,
    /// File with the chat template
    #[arg(long, value_name = "FNAME", env = "LLAMA_ARG_CHAT_TEMPLATE_FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// Run the chat template; without it llama.cpp recognises well-known ones and writes their format
    #[arg(long, value_name = Switch::NAME, default_value = "on", env = "LLAMA_ARG_JINJA")]
    pub jinja: Switch,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Context and speed")]
pub struct ContextArgs {
    /// Context length in tokens; 0 takes the model's, or where the model does not fit with that, as much as an eighth of the
    /// memory holds (4096 at least)
    #[arg(short, long, value_name = "N", default_value = "0", env = "LLAMA_ARG_CTX_SIZE")]
    pub ctx_size: u32,
    /// Prompt tokens submitted at once
    #[arg(short, long, value_name = "N", default_value = "2048", env = "LLAMA_ARG_BATCH",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub batch_size: u32,
    /// Prompt tokens computed at once; auto: for a long prompt more than 512 where that reads experts less often, whose last bits
    /// are another width's (hobbit-cli)
    #[arg(long, value_name = "N|auto", default_value = "512", env = "LLAMA_ARG_UBATCH")]
    pub ubatch_size: UbatchSize,
    /// Threads for generation; -1 lets hobbit choose
    #[arg(short, long, value_name = "N", default_value = "-1", env = "LLAMA_ARG_THREADS",
          value_parser = threads)]
    pub threads: i32,
    /// Threads for prompts (default: as --threads)
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads_batch: Option<i32>,
    /// Fused attention
    #[arg(long, value_name = Tri::NAME, default_value = "auto", env = "LLAMA_ARG_FLASH_ATTN")]
    pub flash_attn: FlashAttn,
    /// Element type of the K cache: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1
    #[arg(long, value_name = "TYPE", default_value = "f16", env = "LLAMA_ARG_CACHE_TYPE_K")]
    pub cache_type_k: KvType,
    /// Element type of the V cache
    #[arg(long, value_name = "TYPE", default_value = "f16", env = "LLAMA_ARG_CACHE_TYPE_V")]
    pub cache_type_v: KvType,
    /// Keep the KV cache on the device
    #[arg(long, value_name = Switch::NAME, default_value = "on", env = "LLAMA_ARG_KV_OFFLOAD")]
    pub kv_offload: Switch,
    /// Run one empty step first
    #[arg(long, value_name = Switch::NAME, default_value = "on")]
    pub warmup: Switch,
    /// When the context is full, drop its older half and go on
    #[arg(long, value_name = Switch::NAME, default_value = "off", env = "LLAMA_ARG_CONTEXT_SHIFT")]
    pub context_shift: Switch,
    /// Tokens of the prompt that a context shift keeps; -1 keeps all
    #[arg(long, value_name = "N", default_value = "0", value_parser = clap::value_parser!(i32).range(-1..))]
    pub keep: i32,
    /// Keep the whole context for sliding-window layers
    #[arg(long, value_name = Switch::NAME, default_value = "off", env = "LLAMA_ARG_SWA_FULL")]
    pub swa_full: Switch,
}

/// Prompt tokens that are computed at once: `None` where the plan chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UbatchSize(pub Option<u32>);

impl FromStr for UbatchSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self(None));
        }
        let number = text.parse().ok().filter(|n| *n > 0);
        number.map(|n| Self(Some(n))).ok_or_else(|| "expected a number above 0, or auto".to_owned())
    }
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Position encoding (default: the model's)")]
pub struct RopeArgs {
    /// Scaling method: none, linear, yarn
    #[arg(long, value_name = "METHOD", env = "LLAMA_ARG_ROPE_SCALING_TYPE")]
    pub rope_scaling: Option<RopeScaling>,
    /// Factor by which the context grows
    #[arg(long, value_name = "N", env = "LLAMA_ARG_ROPE_SCALE", value_parser = positive)]
    pub rope_scale: Option<f32>,
    /// Base frequency
    #[arg(long, value_name = "N", default_value = "0", env = "LLAMA_ARG_ROPE_FREQ_BASE", value_parser = finite)]
    pub rope_freq_base: f32,
    /// Frequency scale, 1 / --rope-scale
    #[arg(long, value_name = "N", env = "LLAMA_ARG_ROPE_FREQ_SCALE", value_parser = finite)]
    pub rope_freq_scale: Option<f32>,
    /// YaRN: context of the training
    #[arg(long, value_name = "N", default_value = "0", env = "LLAMA_ARG_YARN_ORIG_CTX")]
    pub yarn_orig_ctx: u32,
    /// YaRN: extrapolation mix
    #[arg(long, value_name = "N", default_value = "-1", env = "LLAMA_ARG_YARN_EXT_FACTOR", value_parser = finite)]
    pub yarn_ext_factor: f32,
    /// YaRN: magnitude scale
    #[arg(long, value_name = "N", default_value = "-1", env = "LLAMA_ARG_YARN_ATTN_FACTOR", value_parser = finite)]
    pub yarn_attn_factor: f32,
    /// YaRN: high correction dimension
    #[arg(long, value_name = "N", default_value = "-1", env = "LLAMA_ARG_YARN_BETA_SLOW", value_parser = finite)]
    pub yarn_beta_slow: f32,
    /// YaRN: low correction dimension
    #[arg(long, value_name = "N", default_value = "-1", env = "LLAMA_ARG_YARN_BETA_FAST", value_parser = finite)]
    pub yarn_beta_fast: f32,
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
    #[arg(long, value_name = Tri::NAME, default_value = "auto")]
    pub color: Tri,
    /// Print special tokens
    #[arg(long, value_name = Switch::NAME, default_value = "off")]
    pub special: Switch,
    /// Plain input and output, for pipes and limited consoles
    #[arg(long, value_name = Switch::NAME, default_value = "off")]
    pub simple_io: Switch,
    #[command(flatten)]
    pub log: LogArgs,
}

/// Whether a program says what it did.
#[derive(Args, Debug)]
pub struct ClosingArgs {
    /// Nothing on stderr but errors (and that the demo model runs, where no model was given)
    #[arg(long, value_name = Switch::NAME, default_value = "off", env = "HOBBIT_ARG_QUIET")]
    pub quiet: Switch,
    /// Closing lines with speeds and cache hits; with -v also llama.cpp's
    #[arg(long, value_name = Switch::NAME, default_value = "on", env = "LLAMA_ARG_PERF")]
    pub perf: Switch,
}

/// What a program says of itself.
#[derive(Args, Debug)]
pub struct LogArgs {
    /// Log everything
    #[arg(short, long, value_name = Switch::NAME, default_value = "off")]
    pub verbose: Switch,
    /// Log errors (1), warnings (2), information (3), more (4), everything (5)
    #[arg(long, value_name = "N", default_value = "3", env = "LLAMA_ARG_LOG_VERBOSITY")]
    pub verbosity: u8,
    /// Write the log to this file too, also with --quiet
    #[arg(long, value_name = "FNAME", env = "LLAMA_ARG_LOG_FILE")]
    pub log_file: Option<PathBuf>,
    #[command(flatten)]
    pages: PagesArgs,
    /// Print this help
    #[arg(short, long, action = clap::ArgAction::Help)]
    help: Option<bool>,
    /// Print the version
    #[arg(long, action = clap::ArgAction::Version)]
    version: Option<bool>,
}

/// The command as clap sees it: derived, with what the derive cannot say added.
pub fn command() -> clap::Command {
    with_spellings(LowArgs::command())
}

/// Adds to a derived command what the derive cannot say: how switches are given, and llama.cpp's other spellings.
pub fn with_spellings(command: clap::Command) -> clap::Command {
    command.mut_args(|arg| {
        let is_named = |name| arg.get_value_names().is_some_and(|names| names == [name]);
        let (is_switch, is_tri) = (is_named(Switch::NAME), is_named(Tri::NAME));
        let is_on = arg.get_default_values() == ["on"];
        let mut also = arg.get_long().map(argv::other_spellings).unwrap_or_default();
        if let Some(long) = arg.get_long().filter(|_| is_switch && is_on) {
            also.push(format!("--no-{long}"));
        }
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let help = if also.is_empty() { help } else { format!("{help} [also: {}]", also.join(", ")) };
        let arg = arg.help(help).hide_env_values(true).hide_default_value(is_switch && !is_on);
        match is_switch || is_tri {
            true => arg.num_args(0..=1).require_equals(true).default_missing_value("on"),
            false => arg,
        }
    })
}

/// Reads a command line without its first word (the program's name).
///
/// # Errors
/// A clap error, ready to print, for wrong usage; also for `--help` and `--version`.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<(LowArgs, Vec<Note>), clap::Error> {
    parse_as(command(), args)
}

/// As [`parse`], for a program with a command of its own ([`with_spellings`]).
pub fn parse_as<A: FromArgMatches>(
    mut command: clap::Command,
    args: impl IntoIterator<Item = OsString>,
) -> Result<(A, Vec<Note>), clap::Error> {
    let grammar = Grammar::of(&command);
    let line = argv::normalise(args, &grammar).map_err(|error| command.error(ErrorKind::UnknownArgument, error))?;
    let negated = switch::negated_by_environment(&command, |name| std::env::var_os(name).is_some());
    let name = OsString::from(command.get_name());
    let preset = PresetWords::of(&line.words, &command, |name| std::env::var_os(name));
    let words = [name].into_iter().chain(negated).chain(preset.words.iter().cloned()).chain(line.words);
    let mut matches = command.try_get_matches_from_mut(words)?;
    check_precision(&matches, &preset, &mut command)?;
    source::settle(&mut matches).map_err(|error| command.error(ErrorKind::ArgumentConflict, error))?;
    let has_model = source::is_named(&matches);
    let mut notes = line.notes;
    notes.extend(preset.note());
    for (name, why, names_model) in unsupported::variables(|name| std::env::var_os(name), |flag| grammar.knows(flag)) {
        // Without it another model would run.
        if names_model && !has_model {
            let message = format!("the environment variable {name} names a model: {why}, or unset it");
            return Err(command.error(ErrorKind::ArgumentConflict, message));
        }
        notes.push(Note::NoEffect { flag: format!("the environment variable {name}"), why });
    }
    Ok((A::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))?, notes))
}

/// Refuses contradictions among the flags of dynamic precision as clap refuses wrong usage.
fn check_precision(
    matches: &clap::ArgMatches,
    preset: &PresetWords,
    command: &mut clap::Command,
) -> Result<(), clap::Error> {
    let is_typed = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    let args = PrecisionArgs::from_arg_matches(matches).map_err(|error| error.format(command))?;
    let routing = RoutingArgs::from_arg_matches(matches).map_err(|error| error.format(command))?;
    args.check(is_typed).and_then(|()| routing.check(&args)).map_err(|error| {
        let error = match preset.share_in(&error) {
            Some(share) => format!("{error} ({share})"),
            None => error,
        };
        command.error(ErrorKind::ArgumentConflict, error)
    })
}

/// At most as many as ggml runs (`GGML_MAX_N_THREADS`).
fn threads(text: &str) -> Result<i32, String> {
    match text.parse() {
        Ok(n) if n <= 512 => Ok(n),
        _ => Err("expected a number up to 512, or -1".to_owned()),
    }
}

fn gpu_layers(text: &str) -> Result<i32, String> {
    match text {
        "auto" => Ok(-1),
        "all" => Ok(-2),
        _ => text.parse().map_err(|_| "expected a number, 'auto' or 'all'".to_owned()),
    }
}

fn finite(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if value.is_finite() => Ok(value),
        _ => Err("expected a finite number".to_owned()),
    }
}

fn positive(text: &str) -> Result<f32, String> {
    match finite(text) {
        Ok(value) if value > 0.0 && value.recip().is_finite() => Ok(value),
        _ => Err("expected a finite number above 0".to_owned()),
    }
}
