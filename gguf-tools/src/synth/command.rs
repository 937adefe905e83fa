//! `gguf-tools synth`.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::builder::PossibleValuesParser;
use hobbit_core::files::{self, Kind, Output};
use hobbit_core::units::Bytes;
use hobbit_programs::output::{say, tell};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::file::shard_names;
use super::{ExpertGroups, Format, Gating, Spec, architectures, presets, write_with};

/// Write a model with random weights, of any size
///
/// The file loads and runs in llama.cpp with sane numbers; its text is noise. Without further flags it is a few MB.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("Types: {}", Format::all().map(Format::name).collect::<Vec<_>>().join(", ")))]
pub struct Args {
    /// File to write; with --split, shards are named after it
    out: PathBuf,
    /// Replace a file that is there already
    #[arg(long)]
    force: bool,
    /// Architecture [default: llama, or the preset's]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(architectures()))]
    arch: Option<String>,
    /// Start from the shape of a known model
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(presets()))]
    preset: Option<String>,
    /// Layers
    #[arg(long, value_name = "N")]
    layers: Option<u32>,
    /// Width of the residual stream
    #[arg(long, value_name = "N")]
    embd: Option<u32>,
    /// Width of an expert's hidden layer
    #[arg(long, value_name = "N")]
    ff: Option<u32>,
    /// Width of a dense layer's hidden layer [default: ff * topk]
    #[arg(long, value_name = "N")]
    ff_dense: Option<u32>,
    /// Experts per layer
    #[arg(long, value_name = "N")]
    experts: Option<u32>,
    /// Experts per token
    #[arg(long, value_name = "N")]
    topk: Option<u32>,
    /// Shared experts [default: as usual for the architecture]
    #[arg(long, value_name = "N")]
    shared: Option<u32>,
    /// Leading layers without experts [default: as usual for the architecture]
    #[arg(long, value_name = "N")]
    dense_lead: Option<u32>,
    /// Only every N-th layer has experts (llama4)
    #[arg(long, value_name = "N")]
    moe_step: Option<u32>,
    /// Router's gate [default: as usual for the architecture]
    #[arg(long, value_enum)]
    gating: Option<Gating>,
    /// N groups of experts, of which the router first chooses K
    #[arg(long, value_name = "N/K", value_parser = parse_groups)]
    groups: Option<ExpertGroups>,
    /// Standard deviation of a router's scores: the greater, the more a token's first experts weigh [default: 2, or the
    /// preset's]
    #[arg(long, value_name = "X")]
    router_spread: Option<f32>,
    /// Gate and up of the experts in one tensor
    #[arg(long)]
    fused: bool,
    /// A scale per expert beside each expert tensor
    #[arg(long)]
    expert_scales: bool,
    /// Attention heads
    #[arg(long, value_name = "N")]
    heads: Option<u32>,
    /// Key and value heads [default: half of the heads]
    #[arg(long, value_name = "N")]
    kv_heads: Option<u32>,
    /// Width of a head [default: embd / heads]
    #[arg(long, value_name = "N")]
    head_dim: Option<u32>,
    /// Rank of compressed queries [default: about half of embd]
    #[arg(long, value_name = "N")]
    lora_q: Option<u32>,
    /// Rank of compressed keys and values [default: about half of embd]
    #[arg(long, value_name = "N")]
    lora_kv: Option<u32>,
    /// Tokens in the vocabulary
    #[arg(long, value_name = "N")]
    vocab: Option<u32>,
    /// Context length in tokens that the model claims
    #[arg(long, value_name = "N")]
    ctx: Option<u32>,
    /// Type of the experts' gate and up; of several, the layers take turns
    #[arg(long = "type", value_name = "TYPE,...", value_delimiter = ',')]
    types: Vec<Format>,
    /// Type of the experts' down [default: as --type]; of several, the layers take turns
    #[arg(long = "down-type", value_name = "TYPE,...", value_delimiter = ',')]
    down_types: Vec<Format>,
    /// Type of all other matrices [default: the first --type]
    #[arg(long, value_name = "TYPE")]
    dense_type: Option<Format>,
    /// The same seed gives the same bytes
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Divide the model into N files
    #[arg(long, value_name = "N", default_value_t = 1)]
    split: u32,
}

/// Runs the command.
///
/// # Errors
/// Those of [`super::write`].
pub fn run(args: Args) -> anyhow::Result<()> {
    let spec = spec(&args)?;
    let names = shard_names(&args.out, spec.shards)?;
    let outputs: Vec<_> = names.iter().map(|path| Output { flag: "the output", path, kind: Kind::Model }).collect();
    files::check(&outputs, &[])?;
    if let Some(there) = names.iter().find(|name| name.is_file() && !args.force) {
        bail!("{}: this file exists already; give another name, or --force to replace it", there.display());
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}")?);
    let written = write_with(&args.out, &spec, |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let written = written?;
    for file in &written.files {
        say(file.display())?;
    }
    let bytes = Bytes(written.bytes);
    tell(format_args!("{}, {} layers, {} experts, {bytes}", spec.arch, spec.layers, spec.experts));
    Ok(())
}

fn spec(args: &Args) -> anyhow::Result<Spec> {
    let mut spec = match (&args.preset, &args.arch) {
        (Some(preset), None) => Spec::preset(preset)?,
        (Some(_), Some(_)) => bail!("--preset and --arch: expected only one of them, a preset has its architecture"),
        (None, arch) => Spec::tiny(arch.as_deref().unwrap_or("llama")),
    };
    let set = |field: &mut u32, value: Option<u32>| *field = value.unwrap_or(*field);
    set(&mut spec.layers, args.layers);
    set(&mut spec.embd, args.embd);
    set(&mut spec.ff, args.ff);
    set(&mut spec.experts, args.experts);
    set(&mut spec.topk, args.topk);
    set(&mut spec.moe_step, args.moe_step);
    set(&mut spec.heads, args.heads);
    set(&mut spec.vocab, args.vocab);
    set(&mut spec.ctx, args.ctx);
    spec.ff_dense = args.ff_dense.or(spec.ff_dense);
    spec.shared = args.shared.or(spec.shared);
    spec.dense_lead = args.dense_lead.or(spec.dense_lead);
    spec.kv_heads = args.kv_heads.or(if args.heads.is_some() { None } else { spec.kv_heads });
    // A preset's head belongs to its own widths.
    let is_another = args.heads.is_some() || args.embd.is_some();
    spec.head_dim = args.head_dim.or(if is_another { None } else { spec.head_dim });
    spec.lora_q = args.lora_q.or(if args.embd.is_some() { None } else { spec.lora_q });
    spec.lora_kv = args.lora_kv.or(if args.embd.is_some() { None } else { spec.lora_kv });
    spec.gating = args.gating.or(spec.gating);
    spec.groups = args.groups.or(if args.experts.is_some() { None } else { spec.groups });
    spec.router_spread = args.router_spread.unwrap_or(spec.router_spread);
    spec.fused = args.fused;
    spec.expert_scales = args.expert_scales;
    // Replacing a preset's type also replaces the type of its down matrices.
    if !args.types.is_empty() {
        spec.types = args.types.clone();
        spec.down_types.clear();
    }
    if !args.down_types.is_empty() {
        spec.down_types = args.down_types.clone();
    }
    spec.dense_type = args.dense_type.or(spec.dense_type);
    spec.seed = args.seed;
    spec.shards = args.split;
    Ok(spec)
}

fn parse_groups(text: &str) -> anyhow::Result<ExpertGroups> {
    let (count, used) = text.split_once('/').context("expected N/K, for example 4/2")?;
    Ok(ExpertGroups { count: count.parse()?, used: used.parse()? })
}
