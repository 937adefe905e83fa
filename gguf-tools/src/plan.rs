//! `gguf-tools plan`: how many virtual experts each layer keeps (SwapMoE), within a budget.

mod measure;
mod table;

use std::collections::HashSet;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use hobbit::expert::{ExpertId, Precision};
use hobbit::files::{self, Input, Kind, Output};
use hobbit::gguf::{Catalog, ExpertMap, Gguf, shards_by_name};
use hobbit::options::{RoutingOptions, VirtualExperts};
use hobbit::pack::Pack;
use hobbit::plan::{Budget, ExpertCache};
use hobbit::profile::planner::{self, GeneticOptions, LayerCurve, Regressor};
use hobbit::profile::{
    ModelId, PLAN_FORMAT, PLAN_VERSION, PlanOutcome, PlannedLayer, TextId, Uses, VirtualPlan, spearman,
};
use hobbit::units::Bytes;
use hobbit::{CachingOptions, Model, ModelOptions};
use hobbit_programs::output::tell;

use crate::profile::norms;
use crate::profile::text::{self, Runner, Text};
use crate::threads as threads_of;
use measure::{Exact, tokens_alone};

/// Arguments of `plan`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Each layer alone is restricted to its most wanted experts, at --points numbers of them: as many \
    runs over the text as there are layers, times --points. --planner genetic measures --configurations of all layers \
    together besides.

Examples:
  gguf-tools plan model.gguf --text some.txt --budget 8GiB -o plan.json
  gguf-tools plan model.gguf --text some.txt --budget 40% --planner genetic -o plan.json
  hobbit-cli -m model.gguf --virtual-experts plan.json"
)]
pub struct Args {
    /// Model or expert pack; of a split model, any shard
    file: PathBuf,
    /// Text to measure on; the more like what the model is used for, the better
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Memory for the experts' slots: a size, or a percentage of all experts
    #[arg(long, value_name = "SIZE|N%")]
    budget: String,
    /// Who divides it
    #[arg(long, value_name = "hull|genetic", default_value = "hull")]
    planner: Planner,
    /// Numbers of experts at which each layer is measured
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    points: u16,
    /// Configurations of all layers that --planner genetic measures, to learn from
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(20..=100_000))]
    configurations: u32,
    /// Tokens of the text to use
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Tokens of each independent piece of the text
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..=32768))]
    context: u32,
    /// Memory for everything
    #[arg(long, value_name = "SIZE|auto", default_value = "auto")]
    mem_budget: Budget,
    /// Number of threads [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Write the plan to a file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print the plan as JSON instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Planner {
    /// By each layer's measured curve, made convex, where the next slot saves most
    Hull,
    /// SwapMoE's search by chance, with a small network that learns from measured configurations
    Genetic,
}

/// Says what configurations lose, each the number of experts by layer: mean KL divergences, nats.
type Measure<'a> = dyn FnMut(&[Vec<u16>]) -> anyhow::Result<Vec<f64>> + 'a;

/// What a plan was made from, for people.
struct Report<'a> {
    plan: &'a VirtualPlan,
    curves: &'a [LayerCurve],
    /// What equal slots for all layers are expected to lose.
    even_kl: f64,
    /// Rank correlation of what the network expects with what was measured, of configurations it had not seen.
    learned: Option<f64>,
}

/// Measures, divides, runs and writes the plan.
///
/// # Errors
/// A model without experts or that cannot be run, a text that is too short, a budget that is too small.
pub fn run(args: Args) -> anyhow::Result<()> {
    // Messages of llama.cpp below errors are not for users of this tool.
    hobbit::set_log(|level, text| {
        if level == hobbit::LogLevel::Error {
            let _ = write!(io::stderr(), "{text}");
        }
    });
    check_output(&args)?;
    let budget: ExpertCache = args.budget.parse().context("--budget")?;
    let Opened { gguf, map, catalog, is_pack } = Opened::of(&args.file)?;
    let model = Model::open(&args.file, &options(&args, RoutingOptions::default()), |_| true)?;
    let n_used = u16::try_from(model.info().n_expert_used).unwrap_or(u16::MAX);
    let context = (args.context as usize).min((model.info().n_ctx_train as usize).max(2 * text::WARM_UP));
    let text = Text::read(&args.text, &model, args.tokens as usize, context)?;
    let threads = args.threads.map(i32::from);
    let (perplexity, uses) = text::observe(model, &text, context, threads, None)?;

    let all = catalog.layers.iter().map(|layer| slot_bytes(&catalog, layer.layer) * u64::from(layer.n_expert)).sum();
    let budget = budget.of(all).context("--budget auto: give a size, or a percentage of all experts")?;
    let mut runner =
        Runner::new(Model::open(&args.file, &options(&args, masking()), |_| true)?, context, threads, None)?;
    let curves = curves(&args, &catalog, n_used, |sets| masked(&mut runner, &text, &uses, sets, "layers"))?;
    let too_small = || format!("--budget {}: too small; give a larger one", args.budget);
    let mut experts = planner::hull(&curves, budget).with_context(too_small)?;
    let mut predicted = planner::loss(&curves, &experts);
    let mut learned = None;
    if args.planner == Planner::Genetic {
        let mut measured = |sets: &[Vec<u16>]| {
            let sets: Vec<Vec<(u16, u16)>> = sets.iter().map(|own| by_layer(&curves, own)).collect();
            masked(&mut runner, &text, &uses, &sets, "configurations")
        };
        let found = genetic(&args, &curves, budget, &mut measured)?;
        (experts, predicted, learned) = (found.0, found.1, found.2);
    }
    let (token_seconds, exact) = Exact::measure(&mut runner, &text)?;
    drop(runner);

    let layers = curves.iter().zip(&experts);
    let layer =
        |(curve, &experts): (&LayerCurve, &u16)| PlannedLayer { layer: curve.layer, experts, of: curve.n_expert };
    let slot_bytes = planner::bytes(&curves, &experts);
    let mut plan = VirtualPlan {
        format: PLAN_FORMAT.to_owned(),
        version: PLAN_VERSION,
        model: Some(ModelId::of(&gguf, &map)),
        text: Some(TextId {
            file: args.text.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            tokens: text.n_tokens(),
            context: context as u32,
            perplexity,
        }),
        planner: Some(if args.planner == Planner::Hull { "hull" } else { "genetic" }.to_owned()),
        layers: layers.map(layer).collect(),
        // A pack's experts lie elsewhere than in the model that it was made of.
        norms: if is_pack { Vec::new() } else { norms::of(&gguf, &map, threads_of(args.threads))? },
        predicted: Some(PlanOutcome { kl: predicted, slot_bytes, token_seconds, perplexity_increase: None }),
        measured: None,
    };
    plan.measured = Some(run_plan(&args, &plan, &text, context, &exact)?);
    let json = plan.to_json();
    if let Some(path) = &args.output {
        let written = files::create(path, Kind::Json).and_then(|mut file| file.write_all(json.as_bytes()));
        written.with_context(|| format!("{}: cannot write", path.display()))?;
    }
    let even_kl = planner::loss(&curves, &even(&curves, budget));
    let report = Report { plan: &plan, curves: &curves, even_kl, learned };
    let shown = if args.json { json } else { report.to_string() };
    io::stdout().write_all(shown.as_bytes())?;
    Ok(())
}

fn check_output(args: &Args) -> anyhow::Result<()> {
    let output = args.output.as_deref().map(|path| Output { flag: "--output", path, kind: Kind::Json });
    let shards = shards_by_name(&args.file);
    let inputs = shards.iter().map(|path| Input { flag: "the model", path });
    let inputs: Vec<_> = inputs.chain([Input { flag: "--text", path: &args.text }]).collect();
    Ok(files::check(output.as_slice(), &inputs)?)
}

/// What the files say.
struct Opened {
    /// As of a plain model.
    gguf: Gguf,
    map: ExpertMap,
    /// High versions, and where they lie.
    catalog: Catalog,
    is_pack: bool,
}

impl Opened {
    fn of(path: &Path) -> anyhow::Result<Self> {
        let gguf = Gguf::open(path)?;
        let is_pack = Pack::is_pack(&gguf);
        let (gguf, map, mut catalog) = match is_pack {
            true => {
                let pack = Pack::open(path)?;
                pack.require_full()?;
                (pack.plain, pack.experts, pack.catalog)
            }
            false => {
                let map = gguf.experts()?;
                let catalog = Catalog::plain(&map);
                (gguf, map, catalog)
            }
        };
        ensure!(!map.is_empty(), "{}: no experts: a dense model has nothing to plan", path.display());
        catalog.drop_low();
        Ok(Self { gguf, map, catalog, is_pack })
    }
}

/// Bytes of a layer's slots: of its largest expert.
fn slot_bytes(catalog: &Catalog, layer: u16) -> u64 {
    let Some(layer) = catalog.layer(layer) else { return 0 };
    let sources = (0..layer.n_expert).filter_map(|index| layer.source(index, Precision::High));
    sources.map(|source| catalog.classes[usize::from(source.class)].stride).max().unwrap_or(0)
}

fn options(args: &Args, routing: RoutingOptions) -> ModelOptions {
    // What is measured must not depend on how fast reads are.
    let caching = CachingOptions { fill: false, ..CachingOptions::default() };
    ModelOptions { budget: args.mem_budget, caching, stand_aside: false, routing, ..ModelOptions::default() }
}

/// Tokens of batches, too, use only what is present, which the masks say.
fn masking() -> RoutingOptions {
    RoutingOptions { virtual_experts: VirtualExperts::Auto, prompts: true, ..RoutingOptions::default() }
}

/// Mean KL divergence of having only so many experts of some layers: of each set, layers and numbers.
fn masked(
    runner: &mut Runner,
    text: &Text,
    uses: &Uses,
    sets: &[Vec<(u16, u16)>],
    stage: &str,
) -> anyhow::Result<Vec<f64>> {
    let n_expert: Vec<(u16, u16)> = runner.model.layers_with_experts();
    let absent = |&(layer, n_present): &(u16, u16)| {
        let n_expert = n_expert.iter().find(|(own, _)| *own == layer).map_or(0, |(_, n)| *n);
        let order = uses.most_wanted(layer, n_expert);
        order.into_iter().skip(n_present.into()).map(move |index| ExpertId { layer, index })
    };
    let sets: Vec<Vec<ExpertId>> = sets.iter().map(|set| set.iter().flat_map(absent).collect()).collect();
    let before = runner.session.stats().total().rerouted;
    let losses = runner.losses_of(text, &sets, stage, |model, set| {
        model.mask_experts(Some(set.iter().copied().collect::<HashSet<_>>()));
    });
    runner.model.mask_experts(Some(HashSet::new()));
    let rerouted = runner.session.stats().total().rerouted - before;
    ensure!(
        rerouted.refused == 0,
        "{} of this model's choices are not explained by what its routers say, so their tokens cannot be sent to other experts: \
         --virtual-experts has no use for it",
        rerouted.refused
    );
    Ok(losses?.iter().map(hobbit::profile::Loss::kl).collect())
}

/// What each layer loses alone, at a few numbers of experts.
fn curves(
    args: &Args,
    catalog: &Catalog,
    n_used: u16,
    measure: impl FnOnce(&[Vec<(u16, u16)>]) -> anyhow::Result<Vec<f64>>,
) -> anyhow::Result<Vec<LayerCurve>> {
    let mut curves: Vec<LayerCurve> = Vec::new();
    let mut sets = Vec::new();
    for layer in &catalog.layers {
        let (least, n_expert) = (n_used.min(layer.n_expert), layer.n_expert);
        // More often where few are present: there the curve is steepest.
        let part = |i: u16| (f64::from(i) / f64::from(args.points)).powf(1.5);
        let number = |i| least + (f64::from(n_expert - least) * part(i)) as u16;
        let mut numbers: Vec<u16> = (0..args.points).map(number).filter(|n| *n < n_expert).collect();
        numbers.dedup();
        sets.extend(numbers.iter().map(|n| vec![(layer.layer, *n)]));
        let points = numbers.into_iter().map(|n| (n, 0.0)).collect();
        let slot_bytes = slot_bytes(catalog, layer.layer);
        curves.push(LayerCurve { layer: layer.layer, n_expert, least, slot_bytes, points });
    }
    let measured = measure(&sets)?;
    let points = curves.iter_mut().flat_map(|curve| &mut curve.points);
    points.zip(measured).for_each(|((_, kl), measured)| *kl = measured);
    Ok(curves)
}

fn by_layer(curves: &[LayerCurve], experts: &[u16]) -> Vec<(u16, u16)> {
    curves.iter().zip(experts).map(|(curve, n)| (curve.layer, *n)).collect()
}

/// The plan, what it is expected to lose, and how well that is known.
fn genetic(
    args: &Args,
    curves: &[LayerCurve],
    budget: u64,
    measure: &mut Measure,
) -> anyhow::Result<(Vec<u16>, f64, Option<f64>)> {
    // Around the budget, so that what is learned holds there.
    let nearby = |seed: u32| budget / 100 * u64::from(80 + seed % 41);
    let any = |seed| planner::random_configuration(curves, nearby(seed).max(least(curves)), seed);
    let configurations: Vec<Vec<u16>> = (0..args.configurations).map(any).collect::<Result<_, _>>()?;
    let losses = measure(&configurations)?;
    let samples: Vec<(Vec<u16>, f64)> = configurations.into_iter().zip(losses).collect();
    let (known, others) = samples.split_at(samples.len() / 5 * 4);
    let learned = Regressor::learn(known).and_then(|regressor| {
        let (expected, found): (Vec<f64>, Vec<f64>) =
            others.iter().map(|(own, loss)| (*loss, regressor.loss(own))).unzip();
        spearman(&expected, &found)
    });
    let regressor = Regressor::learn(&samples).context("nothing was measured")?;
    let experts = planner::genetic(curves, budget, &GeneticOptions::default(), |own| regressor.loss(own))?;
    let predicted = regressor.loss(&experts);
    Ok((experts, predicted, learned))
}

/// Bytes of the smallest configuration.
fn least(curves: &[LayerCurve]) -> u64 {
    let least: Vec<u16> = curves.iter().map(|curve| curve.least).collect();
    planner::bytes(curves, &least)
}

/// Equally many experts in each layer, within a budget.
fn even(curves: &[LayerCurve], budget: u64) -> Vec<u16> {
    let of = |n: u16| -> Vec<u16> { curves.iter().map(|curve| n.clamp(curve.least, curve.n_expert)).collect() };
    let most = curves.iter().map(|curve| curve.n_expert).max().unwrap_or(0);
    let fits = |n: &u16| planner::bytes(curves, &of(*n)) <= budget;
    of((0..=most).rev().find(fits).unwrap_or(0))
}

/// Decodes the text by the plan.
fn run_plan(
    args: &Args,
    plan: &VirtualPlan,
    text: &Text,
    context: usize,
    exact: &Exact,
) -> anyhow::Result<PlanOutcome> {
    let file = tempfile::Builder::new().suffix(".json").tempfile().context("cannot make a temporary file")?;
    std::fs::write(file.path(), plan.to_json()).with_context(|| format!("{}: cannot write", file.path().display()))?;
    let virtual_experts = VirtualExperts::Plan(file.path().to_owned());
    let routing = RoutingOptions { virtual_experts, ..RoutingOptions::default() };
    let model = Model::open(&args.file, &options(args, routing), |_| true)?;
    let mut runner = Runner::new(model, context, args.threads.map(i32::from), None)?;
    let (loss, token_seconds) = tokens_alone(&mut runner, text, exact)?;
    let slot_bytes = runner.session.plan().expert_cache;
    if runner.session.plan().is_fully_resident() {
        tell(format_args!("note: {} hold every expert: the plan takes nothing away", Bytes(slot_bytes)));
    }
    Ok(PlanOutcome {
        kl: loss.kl(),
        slot_bytes,
        token_seconds,
        perplexity_increase: Some(loss.log_increase().exp_m1()),
    })
}
