//! `gguf-tools profile`: thresholds for dynamic precision, a prompt's share in low precision, how sensitive each expert is to fewer bits, and which experts
//! follow which.

mod lower;
mod mixes;
pub mod norms;
mod paths;
mod prompts;
mod sensitivity;
mod table;
pub mod text;
mod thresholds;

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use hobbit::files::{self, Input, Kind, Output};
use hobbit::gguf::{GgmlType, Gguf, Recode, shards_by_name};
use hobbit::options::{LowSource, PrecisionMode, RoutingOptions};
use hobbit::pack::Pack;
use hobbit::pack::imatrix::Imatrix;
use hobbit::plan::{Budget, ExpertCache};
use hobbit::profile::{FORMAT, ModelId, Profile, TextId, VERSION};
use hobbit::route::{Shares, Thresholds};
use hobbit::units::parse_percent;
use hobbit::{CachingOptions, Model, ModelOptions, PrecisionOptions};
use hobbit_programs::output::tell;

use crate::threads;
use lower::Source;
use text::{Runner, Text};

/// Arguments of `profile`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("loss").multiple(true)))]
#[command(after_help = "Without --shares and --max-loss, no thresholds are fitted. \
    Each width needs one temporary copy of the experts, and as many runs over the text as there are layers; \
    a path table comes of the one run that is made in any case.

Examples:
  gguf-tools profile model.gguf --text some.txt --max-loss 1% --low q2_k -o model.profile.json
  gguf-tools profile model.gguf --text some.txt --max-loss 1% --no-widths --expert-cache 25%,50% -o model.profile.json
  gguf-tools profile model.hobbit.gguf --text some.txt --max-loss 1% --no-widths -o model.hobbit.profile.json
  gguf-tools profile model.gguf --text some.txt --no-widths --max-prefill-loss 0.5% --low q2_k
  gguf-tools profile model.gguf --text some.txt --widths q2_k --tolerance 2% -o model.profile.json
  gguf-tools profile model.gguf --text some.txt --tokens 20000 --no-widths --path-table model.paths
  gguf-tools profile model.gguf --from-trace chats.trace --path-table model.paths")]
pub struct Args {
    /// Model; of a split model, any shard
    file: PathBuf,
    /// Text to measure on; the more like what the model is used for, the better
    #[arg(long, value_name = "FILE", required_unless_present = "from_trace")]
    text: Option<PathBuf>,
    /// Tokens of the text to use
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Tokens of each independent piece of the text
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..=32768))]
    context: u32,
    /// Fit T1 and T2 to this mix of high, low and skipped uses, in percent: 67/30/3
    #[arg(long, value_name = "H/L/S", value_parser = shares, conflicts_with = "max_loss")]
    shares: Option<Shares>,
    /// Find the least traffic that raises perplexity by at most this, 1%: by T1 and T2 where there are low versions, and by any mix
    /// of those with tokens that go to experts in memory or do without one. Some 35 runs over half of the text, token by token;
    /// 'hobbit-cli --max-loss' takes the result from MODEL.profile.json beside the model
    #[arg(long, value_name = "N%", value_parser = percent, group = "loss")]
    max_loss: Option<f64>,
    /// Find the largest share of a prompt's experts in low precision (--prefill-low, beside --t1 1) that raises perplexity by at
    /// most this, pieces of the text read in one batch each: 1%
    #[arg(long, value_name = "N%", value_parser = percent, group = "loss")]
    max_prefill_loss: Option<f64>,
    /// Low-precision experts for --max-loss and --max-prefill-loss: a GGUF of the model in a smaller quant, or a type [default:
    /// the smallest of --widths]
    #[arg(long, value_name = "FILE|TYPE", requires = "loss")]
    low: Option<String>,
    /// Expert cache for --max-loss and --max-prefill-loss: a size, or a percentage of all experts. Of several, as in 25%,50%, mixes for
    /// --max-loss are sought with each ('hobbit-cli --max-loss' takes those of the largest that is no larger than its own), and all
    /// else with the first
    #[arg(long, value_name = "SIZE|N%,...", default_value = "25%", value_delimiter = ',')]
    expert_cache: Vec<String>,
    /// Memory for everything
    #[arg(long, value_name = "SIZE|auto", default_value = "auto")]
    mem_budget: Budget,
    /// Types to measure each expert's sensitivity to
    #[arg(long, value_name = "TYPES", value_delimiter = ',', default_value = "q2_k,q3_k,q4_k", value_parser = dtype)]
    widths: Vec<GgmlType>,
    /// Leave sensitivities out: one run over the text, for thresholds and the path table
    #[arg(long, conflicts_with_all = ["widths", "check"])]
    no_widths: bool,
    #[command(flatten)]
    paths: paths::Args,
    /// Importance matrix made by llama-imatrix
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Measure so many experts alone and say how well the predictions agree
    #[arg(long, value_name = "N|all", value_parser = check_count)]
    check: Option<usize>,
    /// Lower the most robust experts to each width together, run the mixed model, and adjust their number until perplexity rises by
    /// at most this: for gguf-tools pack --tolerated
    #[arg(long, value_name = "N%", value_parser = percent, conflicts_with = "no_widths")]
    tolerance: Option<f64>,
    /// Number of threads [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Where temporary copies of the experts go [default: the system's]
    #[arg(long, value_name = "DIR")]
    temp_dir: Option<PathBuf>,
    /// Write the profile to a file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print the profile as JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Low-precision versions that the model is opened with.
#[derive(Clone, Copy, Debug)]
pub enum LowVersions<'a> {
    /// Of a smaller quant.
    File(&'a Path),
    /// A pack's own.
    Own,
}

/// What all measurements share.
#[derive(Clone)]
pub struct Run {
    pub file: PathBuf,
    pub budget: Budget,
    pub expert_cache: ExpertCache,
    pub expert_cache_word: String,
    pub context: usize,
    pub threads: Option<i32>,
    /// How many experts are measured alone.
    pub check: Option<usize>,
    /// By how much perplexity may rise by lowering experts together.
    pub tolerance: Option<f64>,
}

impl Run {
    /// The model with these low-precision experts; every use asks for high precision, no token goes elsewhere, and nothing depends on
    /// how fast reads are.
    fn open(
        &self,
        low: Option<LowVersions>,
        expert_cache: ExpertCache,
        prefill_low: Option<f32>,
    ) -> anyhow::Result<Runner> {
        let thresholds = low.map(|_| 1.0);
        let precision = PrecisionOptions {
            mode: Some(if low.is_some() { PrecisionMode::Dynamic } else { PrecisionMode::Exact }),
            t1: thresholds,
            t2: thresholds,
            prefill_low,
            upgrade: false,
            deterministic: true,
            ..Default::default()
        };
        let low = match low {
            Some(LowVersions::File(path)) => Some(LowSource::File(path.to_owned())),
            Some(LowVersions::Own) | None => None,
        };
        // Opened with some freedom, so that more may be tried.
        let routing = RoutingOptions { cache_bias: f32::EPSILON, ..RoutingOptions::default() };
        let options = ModelOptions { budget: self.budget, expert_cache, low, precision, routing, ..Default::default() };
        let model = Model::open(&self.file, &options, |_| true)?;
        let runner = Runner::new(model, self.context, self.threads, None)?;
        runner.model.set_routing(&RoutingOptions::default());
        Ok(runner)
    }

    /// The same with the cache that was asked for.
    ///
    /// # Errors
    /// A model that cannot be run, a cache in which everything fits.
    fn open_for_misses(&self, low: LowVersions, prefill_low: Option<f32>) -> anyhow::Result<Runner> {
        let runner = self.open(Some(low), self.expert_cache, prefill_low)?;
        ensure!(
            runner.session.precision().is_dynamic(),
            "--expert-cache {}: every expert fits, nothing is missed and no precision changes anything; give a smaller one",
            self.expert_cache_word
        );
        Ok(runner)
    }
}

/// Measures and writes the profile.
///
/// # Errors
/// A model without experts or that cannot be run, a text that is too short, widths that are not smaller.
pub fn run(args: Args) -> anyhow::Result<()> {
    // Messages of llama.cpp below errors are not for users of this tool.
    hobbit::set_log(|level, text| {
        if level == hobbit::LogLevel::Error {
            let _ = write!(io::stderr(), "{text}");
        }
    });
    check_outputs(&args)?;
    if let (Some(trace), Some(path)) = (&args.paths.from_trace, &args.paths.path_table) {
        return paths::write(path, &paths::of_trace(&args.file, trace)?);
    }
    let file = args.text.as_deref().context("--text FILE is missing; give a text to measure on")?;
    let profile = profile(&args, file)?;
    let json = profile.to_json();
    if let Some(path) = &args.output {
        let written = files::create(path, Kind::Json).and_then(|mut file| file.write_all(json.as_bytes()));
        written.with_context(|| format!("{}: cannot write", path.display()))?;
    }
    let shown = if args.json { json } else { table::Table(&profile).to_string() };
    io::stdout().write_all(shown.as_bytes())?;
    Ok(())
}

/// That nothing is written over what is read, or over files of other kinds.
fn check_outputs(args: &Args) -> anyhow::Result<()> {
    let outputs = [("--output", &args.output, Kind::Json), ("--path-table", &args.paths.path_table, Kind::PathTable)];
    let outputs: Vec<_> =
        outputs.iter().filter_map(|&(flag, path, kind)| Some(Output { flag, path: path.as_deref()?, kind })).collect();
    let shards = shards_by_name(&args.file);
    let low = args.low.as_ref().map(PathBuf::from);
    let flags = [
        ("--text", &args.text),
        ("--from-trace", &args.paths.from_trace),
        ("--imatrix", &args.imatrix),
        ("--low", &low),
    ];
    let flags = flags.map(|(flag, path)| (flag, path.as_ref()));
    let inputs = shards.iter().map(|path| ("the model", Some(path))).chain(flags);
    let inputs: Vec<_> = inputs.filter_map(|(flag, path)| Some(Input { flag, path: path? })).collect();
    Ok(files::check(&outputs, &inputs)?)
}

fn profile(args: &Args, text_file: &Path) -> anyhow::Result<Profile> {
    let caches = args.expert_cache.iter().map(|word| Ok((word.parse().context("--expert-cache")?, word.clone())));
    let caches: Vec<(ExpertCache, String)> = caches.collect::<anyhow::Result<_>>()?;
    let (expert_cache, expert_cache_word) = caches.first().cloned().context("--expert-cache: give a size, or 25%")?;
    let gguf = Gguf::open(&args.file)?;
    let pack = if Pack::is_pack(&gguf) { Some(Pack::open(&args.file)?) } else { None };
    if let Some(pack) = &pack {
        pack.require_full()?;
        ensure!(
            args.no_widths,
            "{}: this is an expert pack, whose experts are not lowered any more; give --no-widths, or the plain model that it \
             was made of: packs of it take the profile",
            args.file.display()
        );
    }
    let (gguf, map) = match &pack {
        Some(pack) => (&pack.plain, pack.experts.clone()),
        None => (&gguf, gguf.experts()?),
    };
    ensure!(!map.is_empty(), "{}: no experts: a dense model has nothing to profile", args.file.display());
    let imatrix = args.imatrix.as_deref().map(Imatrix::open).transpose()?;
    let source = Source { gguf, map: &map, imatrix: imatrix.as_ref(), threads: threads(args.threads) };
    let widths = if args.no_widths { Vec::new() } else { widths(args, &source)? };

    let model = Model::open(&args.file, &options(args.mem_budget), |_| true)?;
    let n_train = model.info().n_ctx_train as usize;
    let context = (args.context as usize).min(n_train.max(2 * text::WARM_UP));
    let text = Text::read(text_file, &model, args.tokens as usize, context)?;
    let run = Run {
        file: args.file.clone(),
        budget: args.mem_budget,
        expert_cache,
        expert_cache_word,
        context,
        threads: args.threads.map(i32::from),
        check: args.check,
        tolerance: args.tolerance,
    };
    let mut batches = args.paths.path_table.as_ref().map(|_| paths::batches(model.predict_shape()));
    let (perplexity, uses) = text::observe(model, &text, context, run.threads, batches.as_mut())?;
    if let (Some(path), Some(mut batches)) = (&args.paths.path_table, batches) {
        paths::write(path, &batches.build())?;
    }

    let directory = match &args.temp_dir {
        Some(directory) => tempfile::tempdir_in(directory),
        None => tempfile::tempdir(),
    };
    let directory = directory.context("cannot make a temporary directory; give --temp-dir another one")?;
    let mut profile = Profile {
        format: FORMAT.to_owned(),
        version: VERSION,
        model: ModelId::of(gguf, &map),
        text: TextId {
            file: text_file.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            tokens: text.n_tokens(),
            context: context as u32,
            perplexity,
        },
        thresholds: None,
        mixes: Vec::new(),
        prefill: None,
        widths: Vec::new(),
        norms: match &pack {
            Some(pack) => norms::carried(pack)?,
            None => norms::of(gguf, &map, threads(args.threads))?,
        },
    };
    profile.thresholds = args.shares.map(|target| thresholds::for_shares(&uses, target)).transpose()?;
    let has_own = pack.as_ref().is_some_and(|pack| pack.catalog.has_low());
    let has_no_low = args.low.is_none() && widths.is_empty() && args.max_prefill_loss.is_none() && !has_own;
    let mixes = |low: Option<&mixes::Low>, run: &Run, max_loss: f64| mixes::find(run, &text, text_file, low, max_loss);
    let with_caches = || {
        let with = |(expert_cache, expert_cache_word): &(ExpertCache, String)| Run {
            expert_cache: *expert_cache,
            expert_cache_word: expert_cache_word.clone(),
            ..run.clone()
        };
        caches.iter().map(with)
    };
    if let Some(max_loss) = args.max_loss.filter(|_| has_no_low) {
        for run in with_caches() {
            profile.mixes.extend(mixes(None, &run, max_loss)?);
        }
    } else if args.max_loss.is_some() || args.max_prefill_loss.is_some() {
        let (low, name) = match &args.low {
            None if has_own => (None, "the pack".to_owned()),
            _ => {
                let (path, name) = low(args, &source, pack.is_some(), widths.last().copied(), directory.path())?;
                (Some(path), name)
            }
        };
        let versions = low.as_deref().map_or(LowVersions::Own, LowVersions::File);
        if let Some(max_loss) = args.max_loss {
            for run in with_caches() {
                let fitted = thresholds::for_loss(&run, &text, &uses, versions, name.clone(), max_loss)?;
                let thresholds = Thresholds { t1: fitted.t1, t2: fitted.t2 };
                profile.mixes.extend(mixes(Some(&mixes::Low { versions, thresholds }), &run, max_loss)?);
                profile.thresholds.get_or_insert(fitted);
            }
        }
        if let Some(max_loss) = args.max_prefill_loss {
            profile.prefill = Some(prompts::for_loss(&run, &text, versions, name, max_loss)?);
        }
        if let Some(low) = low.filter(|low| low.starts_with(directory.path())) {
            std::fs::remove_file(low)?;
        }
    }
    for &dtype in &widths {
        let lowered = source.lower(dtype, directory.path())?;
        profile.widths.push(sensitivity::width(&run, &map, &text, &uses, dtype, &lowered)?);
        std::fs::remove_file(&lowered.path).with_context(|| format!("{}: cannot remove", lowered.path.display()))?;
    }
    Ok(profile)
}

fn options(budget: Budget) -> ModelOptions {
    // What is measured must not depend on how fast reads are, nor on a pack's low versions.
    let caching = CachingOptions { fill: false, ..CachingOptions::default() };
    let precision = PrecisionOptions { mode: Some(PrecisionMode::Exact), ..PrecisionOptions::default() };
    ModelOptions { budget, caching, precision, stand_aside: false, ..ModelOptions::default() }
}

/// The widths that make anything smaller, widest first.
fn widths(args: &Args, source: &Source<'_>) -> anyhow::Result<Vec<GgmlType>> {
    let ggml = hobbit::engine::Ggml;
    let mut widths = Vec::new();
    for &dtype in &args.widths {
        ggml.supports(dtype).context("--widths")?;
        ensure!(
            args.imatrix.is_some() || !ggml.needs_importance(dtype),
            "--widths {dtype}: this type needs an importance matrix; give --imatrix, or choose a type like q2_k"
        );
        match source.lowers(dtype) {
            true => widths.push(dtype),
            false => tell(format_args!("note: --widths {dtype}: not smaller than the model's experts, left out")),
        }
    }
    ensure!(
        !widths.is_empty(),
        "--widths: none is smaller than the model's experts; give smaller ones, or --no-widths"
    );
    let bits = |dtype: &GgmlType| (dtype.type_size() * 256 / dtype.block_size(), dtype.id());
    widths.sort_by_key(|dtype| std::cmp::Reverse(bits(dtype)));
    widths.dedup();
    Ok(widths)
}

/// Where `--max-loss` and `--max-prefill-loss` take low-precision experts from, and its name: a file that was given, or one made in `directory`.
fn low(
    args: &Args,
    source: &Source<'_>,
    is_pack: bool,
    smallest: Option<GgmlType>,
    directory: &Path,
) -> anyhow::Result<(PathBuf, String)> {
    let dtype = match &args.low {
        Some(word) if !Path::new(word).exists() => match GgmlType::from_name(word) {
            Some(dtype) => dtype,
            None => {
                bail!("--low {word}: neither a file nor a type; give a GGUF of the model in a smaller quant, or q2_k")
            }
        },
        Some(word) => {
            let name = Path::new(word).file_name().unwrap_or_default().to_string_lossy().into_owned();
            return Ok((word.into(), name));
        }
        None => smallest.context("--no-widths leaves nothing to take low-precision experts of; give --low FILE, or a type such as --low q2_k")?,
    };
    ensure!(
        !is_pack,
        "--low {dtype}: low versions are not made of a pack; give a GGUF of the model in a smaller quant, or make a pack with --low"
    );
    hobbit::engine::Ggml.supports(dtype).context("--low")?;
    ensure!(source.lowers(dtype), "--low {dtype}: not smaller than the model's experts; give a smaller type");
    Ok((source.lower(dtype, directory)?.path, dtype.name().to_owned()))
}

fn check_count(word: &str) -> anyhow::Result<usize> {
    match word {
        "all" => Ok(usize::MAX),
        _ => word.parse().ok().filter(|n| *n > 0).context("expected a number from 1 on, or all"),
    }
}

fn dtype(word: &str) -> anyhow::Result<GgmlType> {
    GgmlType::from_name(word).context("expected types of ggml such as q2_k,q3_k,q4_k")
}

/// `2.5%`, `2.5`: a share.
fn percent(text: &str) -> anyhow::Result<f64> {
    Ok(parse_percent(text, 1e6).context("expected a percentage from 0% on, for example 1%")? / 100.0)
}

/// `67/30/3` in percent.
fn shares(text: &str) -> anyhow::Result<Shares> {
    let numbers: Option<Vec<f64>> = text.split('/').map(|part| part.trim().parse().ok()).collect();
    let expected = "expected three percentages that add up to 100, high/low/skip: 67/30/3";
    let Some(&[high, low, skip]) = numbers.as_deref() else { bail!(expected) };
    Shares::new(high / 100.0, low / 100.0, skip / 100.0).context(expected)
}
