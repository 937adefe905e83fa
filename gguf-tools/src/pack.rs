//! `gguf-tools pack`: a plain model becomes an expert pack; `gguf-tools unpack`: the reverse.

mod widths;

use std::path::{Path, PathBuf};

use anyhow::Context;
use hobbit::engine::Ggml;
use hobbit_common::output::{say, tell};
use hobbit_core::files::Kind;
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::imatrix::Imatrix;
use hobbit_core::pack::{self, Pack, PackKind, PackSpec, Progress, Stage, TypeChoice};
use hobbit_core::units::Bytes;

use crate::shared::{Bar, ThreadsArgs, check_files};

#[derive(Debug, clap::Args)]
#[command(after_help = "Types are ggml's: q2_k, q3_k, q4_k, q8_0, f16 and so on.\n\n\
    Examples:\n  \
    gguf-tools pack mixtral.Q8_0.gguf -o mixtral.hobbit.gguf --low q2_k,down=q3_k\n  \
    gguf-tools pack mixtral.Q8_0.gguf -o mixtral.hobbit.gguf --bit-planes\n  \
    gguf-tools pack mixtral.BF16.gguf -o mixtral.hobbit.gguf --high q8_0 --bit-planes")]
pub struct Args {
    /// Model; of a split model, any shard
    file: PathBuf,
    /// Pack to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Types of the low-precision versions: q2_k, or q2_k,down=q3_k (slices: gate, up, gate_up, down)
    #[arg(long, value_name = "TYPES")]
    low: Option<TypeChoice>,
    /// Both precisions in as many bytes as the model has: q8_0 experts in two planes of 4 bits. The first plane alone
    /// is the low-precision version (q4_1). In place of --low
    #[arg(long, alias = "nested")]
    bit_planes: bool,
    /// Types of the high-precision versions [default: the model's own]
    #[arg(long, value_name = "TYPES")]
    high: Option<TypeChoice>,
    /// Importance matrix made by llama-imatrix, in its GGUF format
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    #[command(flatten)]
    threads: ThreadsArgs,
    /// Only low-precision versions, to be used beside the model: hobbit-cli --low FILE
    #[arg(long, requires = "low", conflicts_with = "high")]
    only_low: bool,
    /// Highest unimportance that is loaded in high precision [default: the profile's]
    #[arg(long, value_name = "X", requires = "t2", value_parser = threshold)]
    t1: Option<f32>,
    /// Highest unimportance that is loaded at all [default: the profile's]
    #[arg(long, value_name = "X", requires = "t1", value_parser = threshold)]
    t2: Option<f32>,
    #[command(flatten)]
    widths: widths::Args,
    /// Replace the pack if it exists
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    let partial = pack::partial_path(&args.output);
    let inputs = [("--imatrix", args.imatrix.as_ref()), ("--profile", args.widths.profile.as_ref())];
    let outputs = [(("-o", Some(&args.output)), Kind::Model), (("-o", Some(&partial)), Kind::PartialModel)];
    check_files(&args.file, &inputs, &outputs)?;
    let source = Gguf::open(&args.file)?;
    let imatrix = args.imatrix.as_deref().map(Imatrix::open).transpose()?;
    let mut spec = spec(&args, imatrix.as_ref())?;
    let chosen = args.widths.choose(&source, args.low.as_ref())?;
    spec.widths = chosen.widths;
    (spec.norms, spec.mixes) = (chosen.norms, chosen.mixes);
    spec.thresholds = spec.thresholds.or(chosen.thresholds);
    let mut bar = Bar::new()?;
    let mut progress = |Progress { stage, done, total, .. }: Progress| {
        bar.show(if stage == Stage::Writing { "packing" } else { "hashing" }, done, total)
    };
    let written = pack::write(&source, &args.output, &spec, &Ggml, &mut progress);
    drop(bar);
    let written = written?;
    for pack::Fallback { tensor, ne0, wanted, taken } in &written.fallbacks {
        tell(format_args!("note: {tensor}: rows of {ne0} are no whole blocks of {wanted}, took {taken}"));
    }
    let info = Pack::open(&written.path)?.info;
    let types = [("high", info.high), ("low", info.low)];
    let types: Vec<_> = types.iter().filter_map(|(what, types)| Some(format!("{what} {}", types.as_ref()?))).collect();
    say(written.path.display())?;
    tell(format_args!("{}, {} records, {}", Bytes(written.bytes), written.versions, types.join(", ")));
    Ok(())
}

fn spec<'a>(args: &Args, imatrix: Option<&'a Imatrix>) -> anyhow::Result<PackSpec<'a>> {
    let thresholds = args.t1.zip(args.t2);
    if let Some((t1, t2)) = thresholds {
        anyhow::ensure!(t1 <= t2, "--t1 {t1} --t2 {t2}: expected T1 to be at most T2");
    }
    Ok(PackSpec {
        low: args.low.clone(),
        high: args.high.clone(),
        bit_planes: args.bit_planes,
        thresholds,
        importance: imatrix,
        threads: args.threads.count(),
        force: args.force,
        ..PackSpec::new(if args.only_low { PackKind::Low } else { PackKind::Full })
    })
}

fn threshold(text: &str) -> anyhow::Result<f32> {
    let value: f32 = text.parse().context("expected a number from 0 to 1")?;
    anyhow::ensure!((0.0..=1.0).contains(&value), "expected a number from 0 to 1");
    Ok(value)
}

#[derive(Debug, clap::Args)]
pub struct UnpackArgs {
    /// Pack
    file: PathBuf,
    /// Model to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace a file that is there already
    #[arg(long)]
    force: bool,
}

/// Writes the plain model of a pack.
pub fn unpack(args: UnpackArgs) -> anyhow::Result<()> {
    let outputs = [(("-o", Some(&args.output)), Kind::Model)];
    check_files(Path::new(""), &[("the pack", Some(&args.file))], &outputs)?;
    let pack = Pack::open(&args.file)?;
    let mut bar = Bar::new()?;
    let written = pack::unpack(&pack, &args.output, args.force, &mut |done, total| bar.show("unpacking", done, total));
    drop(bar);
    let bytes = Bytes(written?);
    say(args.output.display())?;
    let name = &pack.info.source_name;
    if pack.info.plain_sha256 == Some(pack.info.source_sha256) {
        tell(format_args!("{bytes}, bit for bit {name}"));
    } else {
        tell(format_args!("{bytes}, {name} with experts of {}", pack.info.high.as_deref().unwrap_or("other types")));
    }
    Ok(())
}
