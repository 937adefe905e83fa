//! hobbit against plain llama.cpp in memory that does not hold the model, exact and in dynamic precision.
//!
//! All evaluate the same real text, a prompt in one batch and then single tokens, alternately, each in a process of
//! its own ([`child`]) under the same memory control group ([`cgroup`]), from a cold page cache. Decoding is
//! teacher-forced: greedy loops of a model with random weights would use the same few experts again and again. Before
//! each run of hobbit the disk is measured under the same limit, for the roofline.
//!
//! ```text
//! cargo bench --bench memory_limited                       # both shapes, as root; about 10 minutes and 6 GiB of disk
//! cargo bench --bench memory_limited -- --order ABCDEEDCBA --pack mixtral.hobbit.gguf --preset mixtral-bench
//! cargo bench --bench memory_limited -- --order BCFGGFCB   # ablation: skipping off, upgrades off; 2 GiB more
//! cargo bench --bench memory_limited -- --order HIJKBLLBKJIH --decode-tokens 96   # overlap, prefetch, policy, warm start
//! cargo bench --bench memory_limited -- --preset mixtral-bench --limit 3GiB
//! cargo bench --bench memory_limited -- --resident         # no limit: what hobbit costs when all experts fit
//! cargo bench --bench memory_limited -- --tune             # which setting of llama.cpp is its best here
//! ```
//!
//! The table goes to stdout, raw numbers to `benches/results/<machine>/`. A bench reports: a missed target is printed,
//! the exit code stays 0. What `C` needs (the model with its experts in `--low-type`) is made beside the generated model:
//! minutes, once with `--keep-model`.

mod child;
mod contestant;
mod report;
mod roofline;
mod runs;
#[path = "../shared/mod.rs"]
mod shared;
mod stock;
mod subject;
mod total;
mod verdict;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};

use child::Task;
use contestant::Contestant;
use hobbit::LowShare;
use hobbit::gguf::GgmlType;
use subject::{ModelFile, Subject};

/// hobbit against plain llama.cpp under a memory limit
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    /// Model to use instead of a generated one; with --preset, that preset's limit and targets apply to it
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Only this shape
    #[arg(long, value_name = "NAME", value_parser = gguf_tools::synth::PRESETS)]
    preset: Option<String>,
    /// Memory of each process [default: the preset's]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    limit: Option<u64>,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=16384))]
    prompt_tokens: u32,
    /// Tokens hobbit decodes [default: 32, or 64 with --resident]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8192))]
    decode_tokens: Option<u32>,
    /// Tokens llama.cpp decodes, which takes seconds for each [default: 8, or as many as hobbit with --resident]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8192))]
    stock_decode_tokens: Option<u32>,
    /// Repetitions of --order
    #[arg(long, value_name = "R", default_value_t = 1)]
    rounds: u32,
    /// A llama.cpp, B hobbit exact, C dynamic with a low file, D dynamic on a pack, E exact on a pack, F as C without
    /// skipping, G as C with T1 0.5; of B: H with LRU and nothing read ahead, I the same without overlap, J with LRU and
    /// prefetch, K with prefetch, L with a warm start; of C: M with LRU and nothing read ahead, N with LRU and
    /// prefetch, O with prefetch
    #[arg(long, value_name = "ORDER", default_value = "ABBA", value_parser = parse_order)]
    order: Order,
    /// The model with experts of fewer bits, for C and its kind [default: made in --dir]
    #[arg(long, value_name = "FILE")]
    low_model: Option<PathBuf>,
    /// Type of the experts in a low file that is made
    #[arg(long, value_name = "TYPE", default_value = "q2_k", value_parser = parse_type)]
    low_type: GgmlType,
    /// The part of the expert cache that low versions get
    #[arg(long, value_name = "N%|auto", default_value = "auto", value_parser = parse_low_share)]
    low_share: String,
    /// Pack of the model, for D and E
    #[arg(long, value_name = "FILE")]
    pack: Option<PathBuf>,
    /// Threads [default: cores]
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(i32).range(1..=512))]
    threads: Option<i32>,
    /// Threads of llama.cpp [default: twice --threads, which wait for pages; with --resident, --threads]
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(i32).range(1..=512))]
    stock_threads: Option<i32>,
    /// No limit, everything resident: hobbit's overhead
    #[arg(long, conflicts_with_all = ["limit", "tune"])]
    resident: bool,
    /// Compare settings of llama.cpp instead
    #[arg(long)]
    tune: bool,
    /// Where raw numbers go [default: benches/results/<machine>/memory_limited-<preset>.json]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Do not delete the models this run generates
    #[arg(long)]
    keep_model: bool,
    /// Where models are generated, or found again as <preset>.gguf
    #[arg(long, value_name = "DIR", default_value = env!("CARGO_TARGET_TMPDIR"), hide_default_value = true)]
    dir: PathBuf,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
    #[command(subcommand)]
    hidden: Option<Hidden>,
}

#[derive(Debug, Subcommand)]
enum Hidden {
    /// One run; the task is JSON, so is the answer on stdout
    #[command(hide = true)]
    Child { task: String },
}

/// Who runs in one round.
#[derive(Clone, Debug)]
struct Order(Vec<Contestant>);

fn parse_order(text: &str) -> Result<Order, String> {
    let who = || Contestant::ALL.map(|one| format!("{} ({})", one.letter(), one.name())).join(", ");
    let contestant = |letter| {
        Contestant::from_letter(letter).ok_or_else(|| format!("'{letter}': expected letters of {}, as in ABBA", who()))
    };
    if text.is_empty() {
        return Err(format!("expected letters of {}, as in ABBA", who()));
    }
    text.chars().map(contestant).collect::<Result<_, _>>().map(Order)
}

fn parse_type(text: &str) -> Result<GgmlType, String> {
    GgmlType::from_name(text).ok_or_else(|| format!("'{text}': expected a ggml type such as q2_k"))
}

/// Checked here, used where the model is opened.
fn parse_low_share(text: &str) -> Result<String, String> {
    text.parse::<LowShare>().map(|_| text.to_owned()).map_err(|error| error.to_string())
}

fn parse_bytes(text: &str) -> Result<u64, String> {
    parse_size::Config::new().with_binary().parse_size(text).map_err(|error| format!("{error}, expected e.g. 1.8GiB"))
}

fn main() -> Result<()> {
    if std::env::args_os().len() == 1 {
        println!("memory_limited: nothing to do for cargo test; run it with cargo bench");
        return Ok(());
    }
    let args = Args::parse();
    if let Some(Hidden::Child { task }) = &args.hidden {
        let task: Task = serde_json::from_str(task)?;
        println!("{}", serde_json::to_string(&child::run(&task)?)?);
        return Ok(());
    }
    // SAFETY: no preconditions.
    if !args.resident && unsafe { libc::geteuid() } != 0 {
        println!(
            "memory_limited needs root: it runs llama.cpp and hobbit in memory control groups of its own. Run it as \
             root, or with --resident, which sets no limit."
        );
        return Ok(());
    }
    for subject in subjects(&args)? {
        let model = subject.model(&args.dir)?;
        let low = low_model(&args, &subject, &model)?;
        let pack = pack(&args, &subject, &model)?;
        let files = contestant::Files {
            model: model.path().to_owned(),
            low: low.as_ref().map(|low| low.path().to_owned()),
            pack: pack.as_ref().map(|pack| pack.path().to_owned()),
        };
        let settings = settings(&args, &subject, files)?;
        let finished = if args.tune { runs::tune(&settings)? } else { runs::alternate(&settings)? };
        report::finish(&settings, &finished)?;
        if !args.keep_model {
            low.map_or(Ok(()), |low| low.delete_if_generated())?;
            pack.map_or(Ok(()), |pack| pack.delete_if_generated())?;
            model.delete_if_generated()?;
        }
    }
    Ok(())
}

/// What C and its kind need, where they take part.
fn low_model(args: &Args, subject: &Subject, model: &ModelFile) -> Result<Option<ModelFile>> {
    if args.tune || !args.order.0.iter().any(|one| one.needs_low()) {
        return Ok(None);
    }
    subject.low_model(model, args.low_model.as_deref(), args.low_type, &args.dir).map(Some)
}

/// What D and E need, where they take part.
fn pack(args: &Args, subject: &Subject, model: &ModelFile) -> Result<Option<ModelFile>> {
    if args.tune || !args.order.0.iter().any(|one| one.needs_pack()) {
        return Ok(None);
    }
    subject.pack(model, args.pack.as_deref(), args.low_type, &args.dir).map(Some)
}

fn subjects(args: &Args) -> Result<Vec<Subject>> {
    let order = &args.order.0;
    if (args.pack.is_some() || args.low_model.is_some()) && args.preset.is_none() && args.model.is_none() {
        bail!("--pack and --low-model belong to one model: give --preset or --model with them");
    }
    if args.resident && !order.iter().all(|one| one.is_exact()) {
        bail!(
            "--resident: expected only A, B, E and H to L in --order, with everything resident the others are exact too"
        );
    }
    if args.json.is_some() && args.preset.is_none() && args.model.is_none() {
        bail!("--json names one file: give --preset or --model with it");
    }
    Ok(match (&args.preset, &args.model) {
        (None, None) => Subject::PROMISED.into_iter().map(|name| Subject::preset(name, None)).collect(),
        (Some(preset), file) => vec![Subject::preset(preset, file.clone())],
        (None, Some(file)) => vec![Subject::file(file)?],
    })
}

fn settings(args: &Args, subject: &Subject, files: contestant::Files) -> Result<runs::Settings> {
    let limit = match (args.resident, args.limit.or(subject.limit)) {
        (true, _) => None,
        (false, Some(limit)) => Some(limit),
        (false, None) => bail!("--limit: expected a size (1.8GiB), this model is no preset that has one"),
    };
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as i32);
    let threads = args.threads.unwrap_or(cores);
    let decode_tokens = args.decode_tokens.unwrap_or(if args.resident { 64 } else { 32 });
    Ok(runs::Settings {
        name: subject.name.clone(),
        targets: subject.targets,
        files,
        limit,
        prompt_tokens: args.prompt_tokens as usize,
        decode_tokens: decode_tokens as usize,
        stock_decode_tokens: args.stock_decode_tokens.unwrap_or(if args.resident { decode_tokens } else { 8 }) as usize,
        order: args.order.0.repeat(args.rounds as usize),
        low_share: args.low_share.clone(),
        threads,
        // Measured with --tune: page faults of more threads are in flight together, up to a point.
        stock_threads: args.stock_threads.unwrap_or(if args.resident { threads } else { 2 * threads }),
        json: args.json.clone(),
    })
}
