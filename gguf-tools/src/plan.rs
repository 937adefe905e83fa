//! `gguf-tools plan`: divides a budget among the layers' virtual experts (SwapMoE).

use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use hobbit::options::{RoutingOptions, VirtualExperts};
use hobbit::{CachingOptions, Model, ModelOptions};
use hobbit_core::expert::{ExpertId, Precision};
use hobbit_core::files::Kind;
use hobbit_core::gguf::Catalog;
use hobbit_core::plan::ExpertCache;
use hobbit_core::profile::planner::{self, LayerCurve};
use hobbit_core::profile::{Loss, ModelId, PLAN_FORMAT, PLAN_VERSION, PlanOutcome, PlannedLayer, Uses, VirtualPlan};
use hobbit_core::units::{Bytes, Percent};

use crate::profile::norms;
use crate::profile::text::{self, Runner, Text};
use crate::shared::{Opened, RunArgs, check_files, emit, quiet_llama_cpp};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Each layer alone is restricted to its most wanted experts, at --points numbers of them: as many \
    runs over the text as there are layers, times --points.

Examples:
  gguf-tools plan model.gguf --text some.txt --budget 8GiB -o plan.json
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
    /// Numbers of experts at which each layer is measured
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    points: u16,
    /// Tokens of the text to use
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    #[command(flatten)]
    run: RunArgs,
}

/// A plan and its measurements, as text.
struct Report<'a> {
    plan: &'a VirtualPlan,
    curves: &'a [LayerCurve],
    /// Expected loss of equal slots for all layers.
    even_kl: f64,
}

/// Measures each layer, divides the budget, measures the plan and writes it.
pub fn run(args: Args) -> anyhow::Result<()> {
    quiet_llama_cpp();
    let run = &args.run;
    let outputs = [(("--output", run.output.as_ref()), Kind::Json)];
    check_files(&args.file, &[("--text", Some(&args.text))], &outputs)?;
    let budget: ExpertCache = args.budget.parse().context("--budget")?;
    let opened = Opened::of(&args.file)?;
    let (gguf, map, catalog) = (&opened.gguf, &opened.map, &opened.catalog);
    let model = Model::open(&args.file, &options(&args, RoutingOptions::default()))?;
    let n_used = u16::try_from(model.info().n_expert_used).unwrap_or(u16::MAX);
    let context = text::context(run.context, &model);
    let text = Text::read(&args.text, &model, args.tokens as usize, context)?;
    let threads = run.threads.asked();
    let (perplexity, uses) = text::observe(model, &text, context, threads, None)?;

    let all = catalog.layers.iter().map(|layer| slot_bytes(catalog, layer.layer) * u64::from(layer.n_expert)).sum();
    let budget = budget.of(all).context("--budget auto: give a size, or a percentage of all experts")?;
    let mut runner = Runner::new(Model::open(&args.file, &options(&args, masking()))?, context, threads, None)?;
    let curves = curves(&args, catalog, n_used, |sets| masked(&mut runner, &text, &uses, sets, "layers"))?;
    let too_small = || format!("--budget {}: too small; give a larger one", args.budget);
    let experts = planner::hull(&curves, budget).with_context(too_small)?;
    let whole: Vec<(u16, u16)> = curves.iter().zip(&experts).map(|(curve, n)| (curve.layer, *n)).collect();
    let measured = masked(&mut runner, &text, &uses, &[whole], "the plan")?;
    let measured = measured.first().context("the plan was measured")?;

    let layers = curves.iter().zip(&experts);
    let layer =
        |(curve, &experts): (&LayerCurve, &u16)| PlannedLayer { layer: curve.layer, experts, of: curve.n_expert };
    let slot_bytes = planner::bytes(&curves, &experts);
    let outcome = |kl, perplexity_increase| Some(PlanOutcome { kl, slot_bytes, perplexity_increase });
    let plan = VirtualPlan {
        format: PLAN_FORMAT.to_owned(),
        version: PLAN_VERSION,
        model: Some(ModelId::of(gguf, map)),
        text: Some(text.id(&args.text, context, perplexity)),
        planner: Some("hull".to_owned()),
        layers: layers.map(layer).collect(),
        norms: norms::of(&opened, &args.file, run.threads.count())?,
        predicted: outcome(planner::loss(&curves, &experts), None),
        measured: outcome(measured.kl(), Some(measured.log_increase().exp_m1())),
    };
    let json = plan.to_json();
    let even_kl = planner::loss(&curves, &even(&curves, budget));
    let report = Report { plan: &plan, curves: &curves, even_kl };
    emit(run.output.as_deref(), run.json.json, json, report)
}

/// Bytes of a layer's slots, which hold its largest expert.
fn slot_bytes(catalog: &Catalog, layer: u16) -> u64 {
    let Some(layer) = catalog.layer(layer) else { return 0 };
    let sources = (0..layer.n_expert).filter_map(|index| layer.source(index, Precision::High));
    sources.map(|source| catalog.classes[usize::from(source.class)].stride).max().unwrap_or(0)
}

fn options(args: &Args, routing: RoutingOptions) -> ModelOptions {
    // Measurements must not depend on the speed of reads.
    let caching = CachingOptions { fill: false, ..CachingOptions::default() };
    ModelOptions { budget: args.run.mem_budget, caching, passthrough: false, routing, ..ModelOptions::default() }
}

/// Tokens of batches, too, use only resident experts, which the masks define.
fn masking() -> RoutingOptions {
    RoutingOptions { virtual_experts: VirtualExperts::Auto, prompts: true, ..RoutingOptions::default() }
}

/// Loss of each set, which restricts layers to their most wanted experts: layers and numbers of experts.
fn masked(
    runner: &mut Runner,
    text: &Text,
    uses: &Uses,
    sets: &[Vec<(u16, u16)>],
    stage: &str,
) -> anyhow::Result<Vec<Loss>> {
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
        "{} of this model's choices are not explained by what its routers say, so their tokens cannot be sent to \
         other experts: --virtual-experts has no use for it",
        rerouted.refused
    );
    losses
}

/// Measures each layer alone at a few numbers of experts.
fn curves(
    args: &Args,
    catalog: &Catalog,
    n_used: u16,
    measure: impl FnOnce(&[Vec<(u16, u16)>]) -> anyhow::Result<Vec<Loss>>,
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
    points.zip(measured).for_each(|((_, kl), measured)| *kl = measured.kl());
    Ok(curves)
}

/// Gives each layer an equal number of experts, within a budget.
fn even(curves: &[LayerCurve], budget: u64) -> Vec<u16> {
    let of = |n: u16| -> Vec<u16> { curves.iter().map(|curve| n.clamp(curve.least, curve.n_expert)).collect() };
    let most = curves.iter().map(|curve| curve.n_expert).max().unwrap_or(0);
    let fits = |n: &u16| planner::bytes(curves, &of(*n)) <= budget;
    of((0..=most).rev().find(fits).unwrap_or(0))
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { plan, curves, even_kl } = self;
        writeln!(f, "layer  experts of all    KL alone: measured at these numbers of experts")?;
        for (own, curve) in plan.layers.iter().zip(*curves) {
            let points: Vec<String> = curve.points.iter().map(|(n, kl)| format!("{n}: {kl:.2e}")).collect();
            let expected = curve.kl(own.experts);
            writeln!(f, "{:>5}  {:>7} {:>6}    {expected:.2e}; {}", own.layer, own.experts, own.of, points.join(", "))?;
        }
        writeln!(f, "\n{:<10} {:>10} {:>12} {:>12}", "", "KL", "perplexity", "slots")?;
        for (name, outcome) in [("predicted", &plan.predicted), ("measured", &plan.measured)] {
            let Some(PlanOutcome { kl, slot_bytes, perplexity_increase }) = outcome else { continue };
            let perplexity = perplexity_increase.map_or_else(String::new, |by| format!("{:+.2}", Percent(by)));
            writeln!(f, "{name:<10} {kl:>10.2e} {perplexity:>12} {:>12}", Bytes(*slot_bytes).to_string())?;
        }
        writeln!(
            f,
            "equal slots in all layers: KL {even_kl:.2e} predicted\n\
             predicted: sum of the layers alone; measured: all layers keep their most wanted experts of the whole text"
        )
    }
}
