//! Shared by the tools: progress, models and packs, outputs, arguments.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, ensure};
use hobbit_common::signals::{self, Signal};
use hobbit_core::files::{self, Input, Kind, Output};
use hobbit_core::gguf::{Catalog, ExpertMap, GgmlType, Gguf, shards_by_name};
use hobbit_core::pack::Pack;
use hobbit_core::plan::Budget;
use hobbit_core::units::{KIB, parse_bytes, parse_percent};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

/// A progress bar on standard error; hidden by indicatif if that is not a terminal. The first signal asks the work to
/// stop, the second ends the process.
pub struct Bar(ProgressBar);

impl Bar {
    pub fn new() -> anyhow::Result<Self> {
        Self::with_template("{prefix:<9} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}")
    }

    pub fn of_units(stage: impl Into<String>, total: u64) -> anyhow::Result<Self> {
        let bar = Self::with_template("{prefix:<24} {wide_bar} {pos}/{len} {eta}")?;
        bar.0.set_length(total);
        bar.0.set_prefix(stage.into());
        Ok(bar)
    }

    fn with_template(template: &str) -> anyhow::Result<Self> {
        watch()?;
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        bar.set_style(ProgressStyle::with_template(template)?);
        Ok(Self(bar))
    }

    /// Shows `done` of `total` bytes; breaks after a signal.
    pub fn show(&mut self, stage: &str, done: u64, total: u64) -> ControlFlow<()> {
        if self.0.prefix() != stage {
            self.0.reset();
            self.0.set_prefix(stage.to_owned());
        }
        self.0.set_length(total);
        self.0.set_position(done);
        if signals::came() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Names what is done next.
    pub fn stage(&self, stage: &str) {
        self.0.set_prefix(stage.to_owned());
    }

    /// Counts `n` more units. Fails after a signal, so that temporary files are removed.
    pub fn step(&self, n: u64) -> anyhow::Result<()> {
        self.0.inc(n);
        Ok(signals::check()?)
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn watch() -> anyhow::Result<()> {
    static WATCHING: OnceLock<Result<(), String>> = OnceLock::new();
    let mut was_asked = false;
    let handler = move |signal: Signal| {
        if std::mem::replace(&mut was_asked, true) {
            std::process::exit(i32::from(signal.status()));
        }
    };
    let watching = WATCHING.get_or_init(|| signals::watch(handler).map_err(|error| format!("{error:#}")));
    watching.clone().map_err(anyhow::Error::msg)
}

/// A file that a flag names; `None` if the flag is absent.
pub type Named<'a> = (&'a str, Option<&'a PathBuf>);

/// Checks that no output is an input (a file of `model` or of a flag), or a file of another kind.
pub fn check_files(model: &Path, inputs: &[Named<'_>], outputs: &[(Named<'_>, Kind)]) -> anyhow::Result<()> {
    let shards = shards_by_name(model);
    let inputs = shards.iter().map(|path| ("the model", Some(path))).chain(inputs.iter().copied());
    let inputs: Vec<_> = inputs.filter_map(|(flag, path)| Some(Input { flag, path: path? })).collect();
    let outputs: Vec<_> =
        outputs.iter().filter_map(|&((flag, path), kind)| Some(Output { flag, path: path?, kind })).collect();
    Ok(files::check(&outputs, &inputs)?)
}

/// Writes `json` to the file of `--output`, and `json` or the table to stdout.
pub fn emit(output: Option<&Path>, as_json: bool, json: String, table: impl Display) -> anyhow::Result<()> {
    if let Some(path) = output {
        let written = files::create(path, Kind::Json).and_then(|mut file| file.write_all(json.as_bytes()));
        written.with_context(|| format!("{}: cannot write", path.display()))?;
    }
    let shown = if as_json { json } else { table.to_string() };
    Ok(io::stdout().write_all(shown.as_bytes())?)
}

/// Hides llama.cpp's messages below errors.
pub fn quiet_llama_cpp() {
    hobbit::set_log(|level, text| {
        if level == hobbit::LogLevel::Error {
            let _ = write!(io::stderr(), "{text}");
        }
    });
}

/// A plain model, or a full pack.
pub struct Opened {
    /// The plain model.
    pub gguf: Gguf,
    pub map: ExpertMap,
    pub catalog: Catalog,
    /// Norms that a pack carries, as it stores them; `None` for a plain model.
    pub pack_norms: Option<Option<String>>,
}

impl Opened {
    pub fn of(path: &Path) -> anyhow::Result<Self> {
        let gguf = Gguf::open(path)?;
        let opened = if Pack::is_pack(&gguf) {
            let pack = Pack::open(path)?;
            pack.require_full()?;
            Self { gguf: pack.plain, map: pack.experts, catalog: pack.catalog, pack_norms: Some(pack.info.norms) }
        } else {
            let map = gguf.experts()?;
            let catalog = Catalog::plain(&map);
            Self { gguf, map, catalog, pack_norms: None }
        };
        ensure!(!opened.map.is_empty(), "{}: a dense model has no experts, nothing to measure", path.display());
        Ok(opened)
    }

    pub fn is_pack(&self) -> bool {
        self.pack_norms.is_some()
    }
}

/// Flags of runs over a text.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// Tokens of each independent piece of the text
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..=32768))]
    pub context: u32,
    /// Memory for everything
    #[arg(long, value_name = "SIZE|auto", default_value = "auto")]
    pub mem_budget: Budget,
    #[command(flatten)]
    pub threads: ThreadsArgs,
    /// Write the result to a file
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// The flag for a number of threads.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct ThreadsArgs {
    /// Number of threads [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

impl ThreadsArgs {
    /// The number asked for; `None` leaves it to the session.
    pub fn asked(self) -> Option<i32> {
        self.threads.map(i32::from)
    }

    /// The number asked for, or one per core.
    pub fn count(self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.map_or_else(cores, usize::from)
    }
}

/// The flag for results as JSON.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct JsonArgs {
    /// Print JSON (sizes in bytes, dates in seconds since 1970)
    #[arg(long)]
    pub json: bool,
}

impl JsonArgs {
    /// Prints a report, as JSON or for people.
    pub fn print(self, report: &(impl Serialize + Display)) -> anyhow::Result<()> {
        let text = if self.json { serde_json::to_string_pretty(report)? + "\n" } else { report.to_string() };
        Ok(io::stdout().write_all(text.as_bytes())?)
    }
}

/// A file's name, without its directories.
pub fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// `2.5%` or `2.5`, as a share.
pub fn percent(text: &str) -> Result<f64, String> {
    let percent = parse_percent(text, 1e6).ok_or("expected a percentage from 0% on, for example 1%")?;
    Ok(percent / 100.0)
}

/// `q2_k`.
pub fn dtype(text: &str) -> Result<GgmlType, String> {
    GgmlType::from_name(text).ok_or_else(|| "expected a type of ggml such as q2_k".to_owned())
}

/// `6GiB`. No model takes less than a KiB: `6` lacks its unit.
pub fn size(text: &str) -> Result<u64, String> {
    match parse_bytes(text) {
        Some(bytes @ 1..KIB) => Err(format!("a number alone counts bytes: give {bytes}GiB for gibibytes")),
        Some(bytes @ KIB..) => Ok(bytes),
        _ => Err("expected a size such as 32GiB or 1800M".to_owned()),
    }
}
