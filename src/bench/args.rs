//! Command line of `hobbit-bench`. Names and grammar follow llama.cpp's `llama-bench`; flags about expert storage are
//! hobbit-cli's, and take lists as well.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, Args, Command, CommandFactory, FromArgMatches, Parser};

use super::case::integers;
use crate::args::table::{self, List};
use crate::args::{self, ExpertArgs, SourceArgs, SpeculationArgs};
use crate::argv::Note;
use crate::manuals::PagesArgs;

const EXAMPLES: &str = "\
Examples:
  hobbit-bench -m mixtral.gguf
      As llama-bench: a prompt of 512 random tokens, then 128 single ones.
  hobbit-bench -m mixtral.gguf --prompt-file book.txt --limit 2.5GiB --baseline -p 0 -n 0 -pg 16,32 -pg 128,128 -o json
      Real text, in a memory control group, hobbit and plain llama.cpp alternately (as root).
  hobbit-bench -m mixtral.gguf --prompt-file book.txt -p 0 -n 64 --expert-cache 10%,25%,50%,100% --policy lru,learned
      hobbit-cli's flags about experts take lists: all combinations are run.

  hobbit-bench -m mixtral.gguf --prompt-file book.txt -p 0 -n 64 --expert-cache 25% --preset none,hobbit,fate
      hobbit's own settings and those of two papers.

  hobbit-bench -m mixtral.gguf --prompt-file code.txt -p 0 -n 0 -pg 512,128 --spec-type none,ngram-cache
      Texts that the model goes on with by itself, without drafts and with.

Several values of a flag: with commas between them, or the flag again; numbers as first-last, first-last+step or
first-last*mult too.
Exit status: 0 success, 1 failure (of any test), 2 wrong usage, 130 interrupted.";

/// Measure hobbit as llama-bench measures llama.cpp.
#[derive(Debug, Parser)]
#[command(
    name = "hobbit-bench",
    version = env!("HOBBIT_VERSION"),
    override_usage = "hobbit-bench [OPTIONS]",
    max_term_width = 110,
    after_help = EXAMPLES
)]
pub struct BenchArgs {
    #[command(flatten)]
    pub test: TestArgs,
    #[command(flatten)]
    pub comparison: ComparisonArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Tests (llama-bench's)")]
pub struct TestArgs {
    /// Model; without it the bundled demo model
    #[arg(short, long, value_name = "FNAME", value_delimiter = ',', group = "named_model")]
    pub model: Vec<PathBuf>,
    #[command(flatten)]
    pub source: SourceArgs,
    /// Tokens of the prompt; 0 for no such test [default: 512]
    #[arg(short = 'p', long, value_name = "N")]
    pub n_prompt: Vec<String>,
    /// Tokens evaluated one by one; 0 for no such test [default: 128]
    #[arg(short = 'n', long, value_name = "N")]
    pub n_gen: Vec<String>,
    /// A prompt of PP tokens and then TG single ones, in one test
    #[arg(long, value_name = "PP,TG")]
    pub pg: Vec<String>,
    /// Tokens in the context before a test begins [default: 0]
    #[arg(short = 'd', long, value_name = "N")]
    pub n_depth: Vec<String>,
    /// Prompt tokens submitted at once [default: 2048]
    #[arg(short, long, value_name = "N")]
    pub batch_size: Vec<String>,
    /// Prompt tokens computed at once; auto: as hobbit's other programs choose, llama.cpp has 512 [default: 512]
    #[arg(long, value_name = "N|auto", value_delimiter = ',')]
    pub ubatch_size: Vec<String>,
    /// Element type of the K cache [default: f16]
    #[arg(long, value_name = "TYPE", value_delimiter = ',')]
    pub cache_type_k: Vec<String>,
    /// Element type of the V cache [default: f16]
    #[arg(long, value_name = "TYPE", value_delimiter = ',')]
    pub cache_type_v: Vec<String>,
    /// Threads [default: cores]
    #[arg(short, long, value_name = "N")]
    pub threads: Vec<String>,
    /// Fused attention: on, off or auto [default: auto]
    #[arg(long, value_name = "WORD", value_delimiter = ',')]
    pub flash_attn: Vec<String>,
    /// Keep the KV cache on the host: 0 or 1 [default: 0]
    #[arg(long, value_name = "0|1", value_delimiter = ',')]
    pub no_kv_offload: Vec<String>,
    /// Repetitions of each test in one run
    #[arg(short, long, value_name = "N", default_value = "5",
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub repetitions: u32,
    /// Seconds to wait before each test
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub delay: u64,
    /// Measure from the first token on
    #[arg(long)]
    pub no_warmup: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Comparison (hobbit's own)")]
pub struct ComparisonArgs {
    /// Text whose tokens are evaluated; each repetition continues where the last one ended. Without it tokens are
    /// random, and routed unlike those of any text
    #[arg(long, value_name = "FNAME")]
    pub prompt_file: Option<PathBuf>,
    /// Memory of the process that runs a test, page cache included: a control group of its own, and a cold page cache
    /// (as root)
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = args::bytes)]
    pub limit: Vec<u64>,
    /// Run plain llama.cpp as well, alternately, and compare logits
    #[arg(long)]
    pub baseline: bool,
    /// Run plain llama.cpp alone
    #[arg(long, conflicts_with = "baseline")]
    pub baseline_only: bool,
    /// Order of runs with --baseline: A is hobbit, B llama.cpp, each run in a process of its own
    #[arg(long, value_name = "ORDER", default_value = "ABBA", value_parser = order)]
    pub order: Order,
    /// Threads of llama.cpp [default: as --threads]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..=512))]
    pub baseline_threads: Option<i32>,
    /// How llama.cpp loads the model: mmap, none, mlock, mmap+mlock or dio
    #[arg(long, value_name = "MODE", default_value = "mmap",
          value_parser = ["mmap", "none", "mlock", "mmap+mlock", "dio", "auto"])]
    pub load_mode: String,
    /// Weights that hobbit and llama.cpp repack for the CPU: 0 (none), 1 (all) or ordinary (all but experts). It changes
    /// the last bits of logits
    #[arg(long, value_name = "0|1|ordinary", default_value = "0", value_parser = ["0", "1", "ordinary"])]
    pub repack: String,
    /// Do not measure the disk, which the roofline needs
    #[arg(long)]
    pub no_roofline: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Format on stdout: csv, json, jsonl or md
    #[arg(short, long, value_name = "FORMAT", default_value = "md")]
    pub output: Format,
    /// Format on stderr: the same, or none
    #[arg(long, value_name = "FORMAT")]
    pub output_err: Option<Format>,
    /// Name of the study, kept in every record
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub label: String,
    /// Name of the case in its study
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub variant: String,
    /// Tell what runs
    #[arg(long)]
    pub progress: bool,
    /// Show what the engines log, and more columns
    #[arg(short, long)]
    pub verbose: bool,
    #[command(flatten)]
    pages: PagesArgs,
}

/// How records are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    None,
    Csv,
    Json,
    Jsonl,
    Md,
}

/// An engine in a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Who {
    #[default]
    Hobbit,
    Stock,
}

/// Runs in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order(pub Vec<Who>);

/// The parsed command line.
#[derive(Debug)]
pub struct Typed {
    pub bench: BenchArgs,
    /// hobbit-cli's flags: each inner list holds the alternatives of one flag, as words.
    pub engine: Vec<Vec<String>>,
    pub list_devices: bool,
    pub notes: Vec<Note>,
}

/// hobbit-cli's flags of one case.
#[derive(Args, Debug)]
pub struct EngineArgs {
    #[command(flatten)]
    pub experts: ExpertArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
}

/// Its flags for expert storage, computation and speculative decoding, followed by those for devices.
fn expert_flags() -> Vec<Arg> {
    let mut flags: Vec<Arg> = expert_command().get_arguments().cloned().collect();
    flags.sort_by_key(|arg| arg.get_help_heading() == Some("Devices"));
    flags.retain(|arg| arg.get_id() != "trace"); // runs are measured, not recorded
    flags
}

fn expert_command() -> Command {
    args::with_switches(EngineArgs::augment_args(Command::new("hobbit-bench").disable_help_flag(true)))
}

/// The clap command.
pub fn command() -> Command {
    let mut command = BenchArgs::command().args_override_self(false);
    for arg in expert_flags() {
        let mut arg = arg.env(None::<&str>);
        if arg.get_action().takes_values() {
            let usual = arg.get_default_values().first().map(|value| value.to_string_lossy().into_owned());
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            let help = usual.map_or(help.clone(), |usual| format!("{help} [default: {usual}]"));
            arg = arg.default_value(None).action(ArgAction::Append).help(help).value_delimiter(None);
            arg = arg.value_parser(clap::builder::StringValueParser::new());
        }
        command = command.arg(arg);
    }
    args::with_spellings(command)
}

/// Parses a command line without its first word.
pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Typed, clap::Error> {
    let mut command = command();
    let line = args::normalised(&mut command, words)?;
    let matches = args::matched(&mut command, line.words.into_iter())?;
    let bench = BenchArgs::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    let mut engine = Vec::new();
    for arg in expert_flags() {
        let (id, Some(long)) = (arg.get_id().as_str(), arg.get_long()) else { continue };
        if long == "list-devices" || matches.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        if !arg.get_action().takes_values() {
            engine.push(vec![format!("--{long}")]);
            continue;
        }
        let given = matches.get_many::<String>(id).into_iter().flatten();
        let list = table::list(long);
        let mut alternatives = Vec::new();
        for text in given {
            let values = alternatives_of(list, text)
                .map_err(|why| command.error(ErrorKind::InvalidValue, format!("--{long}: {why}")))?;
            alternatives.extend(values.into_iter().map(|value| format!("--{long}={value}")));
        }
        if list == List::All {
            engine.extend(alternatives.into_iter().map(|word| vec![word]));
        } else {
            engine.push(alternatives);
        }
    }
    let typed = Typed { bench, engine, list_devices: matches.get_flag("list_devices"), notes: line.notes };
    // Check every value before anything runs.
    for word in typed.engine.iter().flatten() {
        engine_args(std::slice::from_ref(word)).map_err(|error| error.format(&mut command))?;
    }
    Ok(typed)
}

/// The arguments of one case, and notes about them.
pub fn engine_args(words: &[String]) -> Result<(EngineArgs, Vec<Note>), clap::Error> {
    args::parse_as(args::with_spellings(expert_command()), words.iter().map(OsString::from))
}

/// The values that one word stands for.
fn alternatives_of(list: List, text: &str) -> Result<Vec<String>, String> {
    let parts = || text.split(',').map(str::to_owned);
    Ok(match list {
        List::Whole => vec![text.to_owned()],
        List::Numbers if text.starts_with(|letter: char| letter.is_ascii_digit() || letter == '-') => {
            integers(text, true)?.into_iter().map(|value| value.to_string()).collect()
        }
        List::Slashes => parts().map(|part| part.replace('/', ",")).collect(),
        List::Semicolons => parts().map(|part| part.replace(';', ",")).collect(),
        List::Numbers | List::Words | List::All => parts().collect(),
    })
}

fn order(text: &str) -> Result<Order, String> {
    let who = |letter: char| match letter.to_ascii_uppercase() {
        'A' => Ok(Who::Hobbit),
        'B' => Ok(Who::Stock),
        _ => Err(format!("'{letter}': expected letters A (hobbit) and B (llama.cpp), as in ABBA")),
    };
    let order = text.chars().map(who).collect::<Result<Vec<_>, _>>()?;
    if order.is_empty() {
        Err("expected letters A (hobbit) and B (llama.cpp), as in ABBA".to_owned())
    } else {
        Ok(Order(order))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(line: &str) -> Result<Typed, String> {
        parse(line.split_whitespace().map(OsString::from)).map_err(|error| error.to_string())
    }

    #[test]
    fn llama_benchs_spellings() {
        command().debug_assert();
        let typed = typed(
            "-m a.gguf,b.gguf -p 512 -n 128,256 -pg 16,32 -pg 1,2 -d 0-4096+1024 -r 3 -b 64 -ub 32 -t 2,4 -ngl 0,99 \
             -fa 0,1 -ctk q8_0 -ctv f16 -ncmoe 0-2 -ot a=CPU;b=CPU -o json -oe md --delay 1 --progress --no-warmup \
             -nkvo 0,1 -lm none -mg 0 -sm layer -ts 3/1 --policy lru,learned --expert-cache 25% --expert-cache 1GiB \
             --low q2_k,down=q3_k",
        )
        .unwrap();
        let (test, output) = (&typed.bench.test, &typed.bench.output);
        assert_eq!(
            (test.model.len(), &test.pg[..], &test.n_gen[..]),
            (2, &["16,32".into(), "1,2".into()][..], &["128,256".into()][..])
        );
        assert_eq!((test.repetitions, test.delay, test.no_warmup, output.progress), (3, 1, true, true));
        assert_eq!((output.output, output.output_err), (Format::Json, Some(Format::Md)));
        assert_eq!(typed.bench.comparison.load_mode, "none");
        for list in [
            &["--n-gpu-layers=0", "--n-gpu-layers=99"][..],
            &["--n-cpu-moe=0", "--n-cpu-moe=1", "--n-cpu-moe=2"],
            &["--override-tensor=a=CPU,b=CPU"],
            &["--tensor-split=3/1"],
            &["--expert-cache=25%", "--expert-cache=1GiB"],
            &["--low=q2_k,down=q3_k"],
            &["--policy=lru", "--policy=learned"],
        ] {
            assert!(typed.engine.iter().any(|found| found == list), "{list:?} in {:?}", typed.engine);
        }
        let (args, notes) = engine_args(&["--preset=hobbit".into(), "--policy=lru".into()]).unwrap();
        let args = args.experts;
        let predictor = args.caching.predictor.map(|kind| kind.name());
        assert_eq!((args.caching.policy.name(), predictor), ("lru", Some("stacked-gate")));
        assert!(notes[0].to_string().starts_with("preset hobbit: --expert-slots even "));
    }

    #[test]
    fn mistakes_are_found_before_anything_runs() {
        for (line, part) in [
            ("--policy lru,best", "best"),
            ("-ngl 1-x", "expected a number"),
            ("--order ABC", "expected letters A"),
            ("--limit much", "such as 2.5GiB"),
            ("--baseline --baseline-only", "cannot be used with"),
            ("-o xml", "possible values"),
            ("-r 0", "0 is not in"),
            ("--baseline-threads 513", "513 is not in 1..=512"),
            ("--np 1", "unexpected argument"),
        ] {
            let error = typed(line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
