//! `gguf-tools profile`: measures thresholds, mixes, each expert's sensitivity to fewer bits, and path tables.

mod bounds;
mod low;
mod mixes;
pub mod norms;
mod sensitivity;
mod table;
pub mod text;

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use hobbit::engine::Description;
use hobbit::options::{LowSource, PrecisionMode, RoutingOptions};
use hobbit::{CachingOptions, Model, ModelOptions, PrecisionOptions};
use hobbit_common::output::tell;
use hobbit_core::files::Kind;
use hobbit_core::gguf::GgmlType;
use hobbit_core::pack::imatrix::Imatrix;
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::predict::PathBatches;
use hobbit_core::profile::{
    ChosenThresholds, FORMAT, MeasuredMix, Mixes, ModelId, Profile, Uses, VERSION, in_percent, write_path_table,
};
use hobbit_core::route::{Shares, fit};

use crate::shared::{Opened, RunArgs, check_files, dtype, emit, percent, quiet_llama_cpp};
use low::{LowVersions, Source};
use text::{Runner, Text};

#[derive(Debug, clap::Args)]
#[command(after_help = "Without --shares and --max-loss, no thresholds are tuned. \
    Each width needs one temporary copy of the experts, and as many runs over the text as there are layers and experts \
    lowered alone; a path table comes of the one run that is made in any case.

Examples:
  gguf-tools profile model.gguf --text some.txt --max-loss 1% --low q2_k -o model.profile.json
  gguf-tools profile model.gguf --text some.txt --max-loss 1% --no-widths --expert-cache 25%,50% -o model.profile.json
  gguf-tools profile model.hobbit.gguf --text some.txt --max-loss 1% --no-widths -o model.hobbit.profile.json
  gguf-tools profile model.gguf --text some.txt --tokens 20000 --no-widths --path-table model.paths")]
pub struct Args {
    /// Model; of a split model, any shard
    file: PathBuf,
    /// Text to measure on, as similar as possible to the model's use
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens of the text to use
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Tune T1 and T2 to this mix of high, low and skipped uses, in percent: 67/30/3
    #[arg(long, value_name = "H/L/S", conflicts_with = "max_loss")]
    shares: Option<Shares>,
    /// Measure mixes that raise perplexity by at most this, 1%: of T1 and T2 (with low versions), --cache-bias,
    /// --substitute and --drop. At most 37 runs over half of the text, token by token; 'hobbit-cli --max-loss' takes
    /// the mix with the fewest reads from MODEL.profile.json beside the model
    #[arg(long, value_name = "N%", value_parser = percent)]
    max_loss: Option<f64>,
    /// Low-precision experts for --max-loss: a GGUF of the model in a smaller quant, or a type [default: the smallest
    /// of --widths]
    #[arg(long, value_name = "FILE|TYPE", requires = "max_loss")]
    low: Option<String>,
    /// Expert cache for --max-loss: a size, or a percentage of all experts. Of a list such as 25%,50% each is searched
    /// ('hobbit-cli --max-loss' takes the mixes of the largest that is no larger than its own)
    #[arg(long, value_name = "SIZE|N%,...", default_value = "25%", value_delimiter = ',')]
    expert_cache: Vec<String>,
    #[command(flatten)]
    run: RunArgs,
    /// Types to measure each expert's sensitivity to
    #[arg(long, value_name = "TYPES", value_delimiter = ',', default_value = "q2_k,q3_k,q4_k", value_parser = dtype)]
    widths: Vec<GgmlType>,
    /// Experts that are lowered alone to measure their sensitivity, those predicted to lose most: a share of all. Each
    /// takes a run over the text for each width; 100% is EdgeMoE's profile, 0% predicts all
    #[arg(long, value_name = "N%", default_value = "10%", value_parser = percent, conflicts_with = "no_widths")]
    alone: f64,
    /// Measure the model of pack --bounds --max-loss N%: the number of lowered experts is adjusted until perplexity
    /// rises by at most N% (EdgeMoE). At most 10 runs over the text
    #[arg(long, value_name = "N%", value_parser = percent, conflicts_with = "no_widths")]
    bounds: Option<f64>,
    /// Leave sensitivities out: one run over the text, for thresholds and the path table
    #[arg(long, conflicts_with = "widths")]
    no_widths: bool,
    /// Write a path table for --predictor path-table: counts of the experts that follow those of the two layers before.
    /// More --tokens make a better table
    #[arg(long, value_name = "FILE")]
    path_table: Option<PathBuf>,
    /// Importance matrix made by llama-imatrix
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Where temporary copies of the experts go [default: the system's]
    #[arg(long, value_name = "DIR")]
    temp_dir: Option<PathBuf>,
}

#[derive(Clone)]
pub struct Run {
    pub file: PathBuf,
    pub budget: Budget,
    pub expert_cache: ExpertCache,
    pub expert_cache_word: String,
    pub context: usize,
    pub threads: Option<i32>,
}

impl Run {
    /// A run with the expert cache that `word` names.
    fn of(args: &Args, context: usize, word: &str) -> anyhow::Result<Self> {
        Ok(Self {
            file: args.file.clone(),
            budget: args.run.mem_budget,
            expert_cache: word.parse().context("--expert-cache")?,
            expert_cache_word: word.to_owned(),
            context,
            threads: args.run.threads.asked(),
        })
    }

    /// Opens the model with these low-precision experts. Every use asks for high precision, nothing is rerouted, and
    /// results do not depend on the speed of reads.
    fn open(&self, low: Option<&LowVersions>, expert_cache: ExpertCache) -> anyhow::Result<Runner> {
        let thresholds = low.map(|_| 1.0);
        let precision = PrecisionOptions {
            mode: Some(if low.is_some() { PrecisionMode::Dynamic } else { PrecisionMode::Exact }),
            t1: thresholds,
            t2: thresholds,
            upgrade: false,
            deterministic: true,
            ..Default::default()
        };
        let low = match low {
            Some(LowVersions::File(path)) => Some(LowSource::File(path.clone())),
            Some(LowVersions::Own) | None => None,
        };
        // Routing can be changed later only in a model that was opened with a routing flag.
        let routing = RoutingOptions { cache_bias: f32::EPSILON, ..RoutingOptions::default() };
        let options = ModelOptions { budget: self.budget, expert_cache, low, precision, routing, ..Default::default() };
        let model = Model::open(&self.file, &options)?;
        let runner = Runner::new(model, self.context, self.threads, None)?;
        runner.model.set_routing(&RoutingOptions::default());
        Ok(runner)
    }

    /// Opens the model with the requested cache size, to count misses.
    fn open_for_misses(&self, low: Option<&LowVersions>) -> anyhow::Result<Runner> {
        let runner = self.open(low, self.expert_cache)?;
        let Description { plan, precision, .. } = runner.session.description();
        ensure!(
            !plan.is_fully_resident() && plan.n_experts > 0 && (low.is_none() || precision.is_dynamic()),
            "--expert-cache {}: every expert fits, nothing is missed and nothing can be saved; give a smaller one",
            self.expert_cache_word
        );
        Ok(runner)
    }
}

pub fn run(args: Args) -> anyhow::Result<()> {
    quiet_llama_cpp();
    let low = args.low.as_ref().map(PathBuf::from);
    let inputs = [("--text", Some(&args.text)), ("--imatrix", args.imatrix.as_ref()), ("--low", low.as_ref())];
    let table = (("--path-table", args.path_table.as_ref()), Kind::PathTable);
    check_files(&args.file, &inputs, &[(("--output", args.run.output.as_ref()), Kind::Json), table])?;
    let profile = profile(&args)?;
    emit(args.run.output.as_deref(), args.run.json.json, profile.to_json(), table::Table(&profile))
}

/// Writes the table of expert sets that followed each other.
fn make_path_table(path: &Path, mut batches: PathBatches) -> anyhow::Result<()> {
    let table = batches.build();
    write_path_table(path, &table)?;
    let (n_pairs, n_layers, n_tokens) = (table.n_pairs(), table.n_layers(), table.n_tokens());
    let path = path.display();
    tell(format_args!("{path}: {n_pairs} pairs of expert sets in {n_layers} layers, of {n_tokens} tokens"));
    Ok(())
}

fn profile(args: &Args) -> anyhow::Result<Profile> {
    let opened = Opened::of(&args.file)?;
    let (gguf, map) = (&opened.gguf, &opened.map);
    ensure!(
        args.no_widths || !opened.is_pack(),
        "{}: this is an expert pack, whose experts are not lowered any more; give --no-widths, or the plain model \
         that it was made of: packs of it take the profile",
        args.file.display()
    );
    let imatrix = args.imatrix.as_deref().map(Imatrix::open).transpose()?;
    let directory = match &args.temp_dir {
        Some(directory) => tempfile::tempdir_in(directory),
        None => tempfile::tempdir(),
    };
    let directory = directory.context("cannot make a temporary directory; give --temp-dir another one")?;
    let source = Source {
        gguf,
        map,
        is_pack: opened.is_pack(),
        imatrix: imatrix.as_ref(),
        threads: args.run.threads.count(),
        directory: directory.path(),
    };
    let widths = if args.no_widths { Vec::new() } else { source.widths(&args.widths)? };

    let model = Model::open(&args.file, &options(args.run.mem_budget))?;
    let context = text::context(args.run.context, &model);
    let text = Text::read(&args.text, &model, args.tokens as usize, context)?;
    let runs: Vec<Run> = args.expert_cache.iter().map(|word| Run::of(args, context, word)).collect::<Result<_, _>>()?;
    let first = runs.first().context("--expert-cache: give a size, or 25%")?;
    let mut batches = args.path_table.as_ref().map(|_| PathBatches::new(model.predict_shape()));
    let (perplexity, uses) = text::observe(model, &text, context, first.threads, batches.as_mut())?;
    if let (Some(path), Some(batches)) = (&args.path_table, batches) {
        make_path_table(path, batches)?;
    }

    let mut profile = Profile {
        format: FORMAT.to_owned(),
        version: VERSION,
        model: ModelId::of(gguf, map),
        text: text.id(&args.text, context, perplexity),
        thresholds: args.shares.map(|target| for_shares(&uses, target)).transpose()?,
        mixes: Vec::new(),
        widths: Vec::new(),
        bounded: Vec::new(),
        norms: norms::of(&opened, &args.file, source.threads)?,
    };
    if let Some(max_loss) = args.max_loss {
        let has_own = opened.is_pack() && opened.catalog.has_low();
        let smallest = widths.last().copied();
        let low = match &args.low {
            None if has_own => Some(LowVersions::Own),
            None if smallest.is_none() => None,
            given => Some(source.low(given.as_deref(), smallest)?),
        };
        let thresholds = mixes::thresholds(&uses)?;
        for run in &runs {
            let with = low.as_ref().map(|versions| (versions, &thresholds[..]));
            let Some(found) = mixes::find(run, &text, &args.text, with, max_loss)? else { continue };
            profile.thresholds = profile.thresholds.or_else(|| of_mixes(&uses, &found, max_loss));
            profile.mixes.push(found);
        }
    }
    for &dtype in &widths {
        let measured = sensitivity::width(first, &source, &text, (&uses, &profile.norms), dtype, args.alone)?;
        profile.widths.push(measured);
    }
    if let Some(max_loss) = args.bounds {
        profile.bounded = vec![bounds::find(first, &source, &text, &profile, max_loss)?];
    }
    Ok(profile)
}

/// T1 and T2 for a target mix of high, low and skipped uses.
fn for_shares(uses: &Uses, target: Shares) -> anyhow::Result<ChosenThresholds> {
    let tuned = fit(uses.n_first, uses.samples.clone(), target)?;
    let [high, low, skip] = [target.high, target.low, target.skip].map(in_percent);
    Ok(ChosenThresholds {
        t1: tuned.thresholds.t1,
        t2: tuned.thresholds.t2,
        goal: format!("shares {high}/{low}/{skip}"),
        shares: tuned.shares,
    })
}

/// T1 and T2 of the mix that uses low versions only, if it stays within the loss: packs take these.
fn of_mixes(uses: &Uses, mixes: &Mixes, max_loss: f64) -> Option<ChosenThresholds> {
    let fits = |measured: &&MeasuredMix| measured.mix.is_low_alone() && measured.loss <= max_loss;
    let mix = mixes.mixes.iter().find(fits)?.mix;
    Some(ChosenThresholds {
        t1: mix.t1,
        t2: mix.t2,
        goal: format!("max loss {}%", in_percent(max_loss)),
        shares: Shares::reached(mix.thresholds(), uses.n_first, &uses.samples),
    })
}

fn options(budget: Budget) -> ModelOptions {
    // Measurements must not depend on the speed of reads or on a pack's low versions.
    let caching = CachingOptions { fill: false, ..CachingOptions::default() };
    let precision = PrecisionOptions { mode: Some(PrecisionMode::Exact), ..PrecisionOptions::default() };
    ModelOptions { budget, caching, precision, passthrough: false, ..ModelOptions::default() }
}
