//! `gguf-tools widen`: gives a small trained model experts of any size.
//!
//! An expert's hidden layer gets more units with zero weights. Its function stays the same, so the routers choose as
//! trained, but its bytes and multiplications are those of a larger expert. For measurements: models with random
//! weights do not route like trained ones.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use hobbit_core::expert::SliceKind;
use hobbit_core::files::{self, Kind};
use hobbit_core::gguf::{Gguf, HeaderBuilder, TensorInfo};
use hobbit_core::units::Bytes;
use hobbit_programs::output::{say, tell};

use crate::shared::{Bar, check_files};

/// Arguments of `widen`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: gguf-tools widen models/demo.gguf --ff 8192 -o demo-wide.gguf")]
pub struct Args {
    /// Model
    file: PathBuf,
    /// Units of an expert's hidden layer: no fewer than it has, a multiple of the blocks of its type
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    ff: u64,
    /// Model to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace a file that is there already
    #[arg(long)]
    force: bool,
}

/// Contiguous rows of a stored tensor, and the zeros that follow them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    stored: u64,
    zeros: u64,
}

/// A tensor of the new model.
struct Wide<'a> {
    info: &'a TensorInfo,
    dims: Vec<u64>,
    run: Run,
}

/// Writes the model.
///
/// # Errors
/// The model cannot be read, has no experts or none that can be widened, or the file cannot be written.
pub fn run(args: Args) -> anyhow::Result<()> {
    check_files(&args.file, &[], &[(("-o", Some(&args.output)), Kind::Model)])?;
    ensure!(args.force || !args.output.exists(), "{} exists; give --force to replace it", args.output.display());
    let gguf = Gguf::open(&args.file)?;
    let wide = plan(&gguf, args.ff).with_context(|| format!("{} cannot be widened", args.file.display()))?;
    let mut header = HeaderBuilder::new(gguf.alignment)?;
    let key = width_key(&gguf);
    gguf.copy_keys(&mut header, |own| own != key && !own.starts_with("split."))?;
    header.key(&key, u32::try_from(args.ff).context("--ff")?)?;
    for tensor in &wide {
        header.tensor(&tensor.info.name, tensor.info.dtype, &tensor.dims)?;
    }
    let layout = header.finish();
    let dir = files::directory_of(&args.output);
    let available = fs4::available_space(dir).with_context(|| dir.display().to_string())?;
    let (needed, room) = (Bytes(layout.len), Bytes(available));
    ensure!(layout.len <= available, "{} has {room} free, the model needs {needed}", dir.display());

    let mut sources = Vec::new();
    for file in &gguf.files {
        sources.push(File::open(&file.path).with_context(|| file.path.display().to_string())?);
    }
    let mut bar = Bar::new()?;
    let mut out = files::new_beside(&args.output)?;
    let (mut tensors, mut done) = (wide.iter(), 0);
    layout.write(out.as_file_mut(), |_, out| {
        let tensor = tensors.next().expect("the layout has these tensors");
        let extent = tensor.info.extent;
        let source = &mut sources[extent.file as usize];
        source.seek(SeekFrom::Start(extent.offset))?;
        copy(&mut Read::by_ref(source).take(extent.len), tensor.run, out, &mut |bytes| {
            done += bytes;
            let is_interrupted = bar.show("widening", done, layout.len).is_break();
            if is_interrupted { Err(io::Error::other("interrupted")) } else { Ok(()) }
        })
    })?;
    drop(bar);
    out.persist(&args.output).map_err(|fault| fault.error).with_context(|| args.output.display().to_string())?;
    say(args.output.display())?;
    tell(format_args!("{needed}, experts with {} hidden units", args.ff));
    Ok(())
}

/// The key for the width of experts.
fn width_key(gguf: &Gguf) -> String {
    let own = format!("{}.expert_feed_forward_length", gguf.architecture());
    if gguf.metadata.get_u64(&own).is_some() { own } else { format!("{}.feed_forward_length", gguf.architecture()) }
}

/// The new shape and data of every tensor.
fn plan(gguf: &Gguf, ff: u64) -> anyhow::Result<Vec<Wide<'_>>> {
    let experts = gguf.experts()?;
    ensure!(!experts.is_empty(), "it has no experts");
    let of_experts = |name: &str| name.contains("_exps.");
    let shared = shared_ff(gguf, ff);
    let mut wide = Vec::with_capacity(gguf.tensors.len());
    for info in &gguf.tensors {
        let of_shared = [(SliceKind::Gate, "gate"), (SliceKind::Up, "up"), (SliceKind::Down, "down")]
            .into_iter()
            .find(|(_, part)| info.name.ends_with(&format!("ffn_{part}_shexp.weight")));
        if let (Some((kind, _)), Some(ff)) = (of_shared, shared) {
            wide.push(widened(info, kind, ff)?);
            continue;
        }
        let kind =
            SliceKind::ALL.into_iter().find(|kind| info.name.ends_with(&format!("{}.weight", kind.tensor_stem())));
        let Some(kind) = kind.filter(|_| of_experts(&info.name)) else {
            if of_experts(&info.name) || !width_key(gguf).contains("expert_") && is_dense_ffn(&info.name) {
                bail!("tensor '{}' depends on the width of experts too", info.name);
            }
            wide.push(Wide { info, dims: info.dims.clone(), run: Run { stored: info.extent.len, zeros: 0 } });
            continue;
        };
        wide.push(widened(info, kind, ff)?);
    }
    Ok(wide)
}

/// The new width of shared experts; `None` if it has its own key, or if there are none.
fn shared_ff(gguf: &Gguf, ff: u64) -> Option<u64> {
    let of = |key: &str| gguf.metadata.get_u64(&format!("{}.{key}", gguf.architecture()));
    match of("expert_shared_feed_forward_length") {
        Some(_) => None,
        None => ff.checked_mul(of("expert_shared_count")?.max(1)),
    }
}

/// Whether a tensor is a dense layer's, which has the same key for its width.
fn is_dense_ffn(name: &str) -> bool {
    ["ffn_gate.", "ffn_up.", "ffn_down."].iter().any(|part| name.contains(part))
}

fn widened(info: &TensorInfo, kind: SliceKind, ff: u64) -> anyhow::Result<Wide<'_>> {
    let block = info.dtype.block_size();
    ensure!(ff.is_multiple_of(block), "--ff {ff}: '{}' has blocks of {block}; give a multiple", info.name);
    let mut dims = info.dims.clone();
    let &[ne0, ne1, ..] = &dims[..] else { bail!("'{}' has {} dimensions, expected 3", info.name, dims.len()) };
    let too_wide = || format!("--ff {ff}: '{}' would be too large", info.name);
    let row = |ne0| info.dtype.row_bytes(ne0).with_context(too_wide);
    let (own, run) = match kind {
        SliceKind::Down => {
            dims[0] = ff;
            (ne0, row(ne0).and_then(|stored| Ok(Run { stored, zeros: row(ff.max(ne0))? - stored }))?)
        }
        // Gate and up lie behind each other in each expert.
        SliceKind::GateUp => {
            dims[1] = 2 * ff;
            (ne1 / 2, Run { stored: row(ne0)? * (ne1 / 2), zeros: row(ne0)? * ff.saturating_sub(ne1 / 2) })
        }
        SliceKind::Gate | SliceKind::Up => {
            dims[1] = ff;
            (ne1, Run { stored: row(ne0)? * ne1, zeros: row(ne0)? * ff.saturating_sub(ne1) })
        }
    };
    ensure!(ff >= own, "--ff {ff}: experts have {own} hidden units already; give no fewer");
    info.dtype.tensor_bytes(&dims).with_context(too_wide)?;
    Ok(Wide { info, dims, run })
}

/// Copies `source` with zeros after every run: in all of ggml's types, zero bytes decode to zero.
fn copy(
    source: &mut io::Take<impl Read>,
    run: Run,
    out: &mut dyn Write,
    wrote: &mut dyn FnMut(u64) -> io::Result<()>,
) -> io::Result<()> {
    if run.zeros == 0 {
        return wrote(io::copy(source, out)?);
    }
    let mut part = vec![0; run.stored as usize];
    for _ in 0..source.limit() / run.stored {
        source.read_exact(&mut part)?;
        out.write_all(&part)?;
        io::copy(&mut io::repeat(0).take(run.zeros), out)?;
        wrote(run.stored + run.zeros)?;
    }
    Ok(())
}
