//! `gguf-tools synth`.

use std::path::PathBuf;

use anyhow::bail;
use clap::builder::PossibleValuesParser;
use hobbit_common::output::{say, tell};
use hobbit_core::files::{self, Kind, Output};
use hobbit_core::units::Bytes;
use hobbit_synth::{Format, Projector, Qwen4Exp, Spec, architectures, presets, shard_names, write_with};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

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
    /// Write a projector of images or sound instead, for models of the width --embd
    #[arg(long, value_name = "KIND", conflicts_with_all = ["arch", "preset", "split"])]
    mmproj: Option<Projector>,
    /// Layers
    #[arg(long, value_name = "N")]
    layers: Option<u32>,
    /// Width of the residual stream
    #[arg(long, value_name = "N")]
    embd: Option<u32>,
    /// Width of an expert's hidden layer
    #[arg(long, value_name = "N")]
    ff: Option<u32>,
    /// Experts per layer
    #[arg(long, value_name = "N")]
    experts: Option<u32>,
    /// Experts per token
    #[arg(long, value_name = "N")]
    topk: Option<u32>,
    /// Standard deviation of a router's scores: a greater one gives a token's first experts more weight [default: 2, or
    /// the preset's]
    #[arg(long, value_name = "X")]
    router_spread: Option<f32>,
    /// Layers of multi-token prediction after the others
    #[arg(long, value_name = "N")]
    mtp: Option<u32>,
    /// Attention heads
    #[arg(long, value_name = "N")]
    heads: Option<u32>,
    /// Width of the experts' input where they see a projection of it, 0 for none [default: about half of --embd]
    #[arg(long, value_name = "N")]
    latent: Option<u32>,
    /// Tokens in the vocabulary
    #[arg(long, value_name = "N")]
    vocab: Option<u32>,
    /// Width of the embeddings per layer (gemma4) [default: 0, none]
    #[arg(long, value_name = "N")]
    per_layer_embd: Option<u32>,
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

pub fn run(args: Args) -> anyhow::Result<()> {
    let spec = spec(&args)?;
    let names = shard_names(&args.out, spec.shards)?;
    let outputs: Vec<_> = names.iter().map(|path| Output { flag: "the output", path, kind: Kind::Model }).collect();
    files::check(&outputs, &[])?;
    if let Some(there) = names.iter().find(|name| name.is_file() && !args.force) {
        bail!("{}: this file exists already; give another name, or --force to replace it", there.display());
    }
    if let Some(projector) = args.mmproj {
        projector.write(&args.out, spec.embd, spec.seed)?;
        return Ok(say(args.out.display())?);
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
    for (field, value) in [
        (&mut spec.layers, args.layers),
        (&mut spec.embd, args.embd),
        (&mut spec.ff, args.ff),
        (&mut spec.experts, args.experts),
        (&mut spec.topk, args.topk),
        (&mut spec.mtp, args.mtp),
        (&mut spec.heads, args.heads),
        (&mut spec.vocab, args.vocab),
        (&mut spec.per_layer_embd, args.per_layer_embd),
        (&mut spec.ctx, args.ctx),
    ] {
        *field = value.unwrap_or(*field);
    }
    // A preset's heads and ranks belong to its own widths, its groups to its number of experts, its n-grams to its
    // vocabulary.
    if args.heads.is_some() || args.embd.is_some() {
        spec.head_dim = None;
    }
    if args.heads.is_some() {
        spec.kv_heads = None;
    }
    if args.embd.is_some() {
        (spec.lora_q, spec.lora_kv) = (None, None);
    }
    if args.experts.is_some() {
        spec.groups = None;
    }
    if args.heads.is_some() || args.embd.is_some() {
        spec.qwen4exp = Qwen4Exp::default();
    }
    if args.vocab.is_some() {
        spec.qwen4exp.ngram_rows = None;
    }
    spec.latent = args.latent.or(spec.latent);
    spec.router_spread = args.router_spread.unwrap_or(spec.router_spread);
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
