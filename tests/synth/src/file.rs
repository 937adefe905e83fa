//! Writes a model's files: shards, a check of disk space, all or nothing.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use hobbit_core::files;
use hobbit_core::gguf::writer::Layout;
use hobbit_core::gguf::{HeaderBuilder, Value};

use super::format::Format;
use super::model::{self, Tensor};
use super::random::Random;
use super::spec::{Sizes, Spec};

/// Alignment of tensor data in bytes; GGUF's own default.
const ALIGNMENT: u64 = 32;
/// Bytes generated at a time.
const BUFFER_BYTES: usize = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The files, shards in order. llama.cpp opens the first.
    pub files: Vec<PathBuf>,
    pub bytes: u64,
}

/// Writes the model to `path`, or with more than one shard to `<stem>-00001-of-0000N.gguf` and so on beside it.
/// Existing files are replaced once everything is written; an error leaves no files behind.
pub fn write(path: &Path, spec: &Spec) -> anyhow::Result<Written> {
    write_with(path, spec, |_, _| ())
}

/// As [`write()`]; `progress` receives the bytes of weights written, and their total.
pub fn write_with(path: &Path, spec: &Spec, mut progress: impl FnMut(u64, u64)) -> anyhow::Result<Written> {
    let sizes = spec.sizes()?;
    let tensors = model::tensors(spec, &sizes)?;
    if spec.shards as usize > tensors.len() {
        bail!("--split {}: expected at most one shard per tensor, {}", spec.shards, tensors.len());
    }
    let total: u64 = tensors.iter().map(|tensor| tensor.bytes).sum();
    let shards = divide(&tensors, spec.shards as usize, total);
    let names = shard_names(path, spec.shards)?;
    let mut layouts = Vec::new();
    for (number, (shard, name)) in shards.iter().zip(&names).enumerate() {
        let layout = layout(spec, &sizes, number, shard, tensors.len());
        layouts.push(layout.with_context(|| name.display().to_string())?);
    }

    let needed = layouts.iter().map(|layout| layout.len).sum();
    // A link stays a link.
    let places: Vec<PathBuf> = names.iter().map(|name| files::destination(name)).collect();
    let dir = files::directory_of(&places[0]);
    let available = fs4::available_space(dir).with_context(|| dir.display().to_string())?;
    ensure!(available >= needed, "{}: {available} bytes free, expected at least {needed}", dir.display());
    let mut done = 0;
    let mut written_files = Vec::new();
    for ((layout, shard), place) in layouts.iter().zip(&shards).zip(&places) {
        let path = || place.display().to_string();
        let mut file = files::new_beside(place).with_context(path)?;
        let mut tensors = shard.iter();
        let written = layout.write(file.as_file_mut(), |_, out| {
            let tensor = tensors.next().expect("the layout has this shard's tensors");
            fill(tensor, spec.seed, out, |bytes| {
                done += bytes;
                progress(done, total);
            })
        });
        written.with_context(path)?;
        written_files.push(file);
    }
    for (file, place) in written_files.into_iter().zip(&places) {
        file.persist(place).map_err(|fault| fault.error).with_context(|| place.display().to_string())?;
    }
    Ok(Written { files: names, bytes: needed })
}

/// A tensor of a small file, and the mean and standard deviation of its numbers.
pub(super) struct Small {
    pub name: String,
    pub dims: Vec<u64>,
    pub format: Format,
    pub spread: (f32, f32),
}

/// Writes a file of such tensors, each filled by its name and `seed`.
pub(super) fn write_small(
    path: &Path,
    keys: Vec<(String, Value)>,
    tensors: Vec<Small>,
    seed: u64,
) -> anyhow::Result<()> {
    let mut header = HeaderBuilder::new(32)?;
    for (key, value) in keys {
        header.key(&key, value)?;
    }
    for tensor in &tensors {
        header.tensor(&tensor.name, tensor.format.ggml_type(), &tensor.dims)?;
    }
    let path = &files::destination(path);
    let mut file = files::new_beside(path).with_context(|| path.display().to_string())?;
    let mut next = tensors.iter();
    header.finish().write(file.as_file_mut(), |_, out| {
        let Small { name, dims, format, spread } = next.next().expect("the header has these tensors");
        let mut bytes = vec![0; format.bytes_of(dims.iter().product()).expect("it is small") as usize];
        format.fill(&mut bytes, &mut Random::new(seed, name), spread.0, spread.1);
        out.write_all(&bytes)
    })?;
    file.persist(path).map_err(|fault| fault.error).with_context(|| path.display().to_string())?;
    Ok(())
}

/// The beginning of a model's file: everything but its weights.
pub fn header(spec: &Spec) -> anyhow::Result<Vec<u8>> {
    let sizes = spec.sizes()?;
    let tensors = model::tensors(spec, &sizes)?;
    Ok(layout(&Spec { shards: 1, ..spec.clone() }, &sizes, 0, &tensors, tensors.len())?.header)
}

fn layout(
    spec: &Spec,
    sizes: &Sizes,
    number: usize,
    shard: &[Tensor],
    tensors: usize,
) -> Result<Layout, hobbit_core::gguf::WriteError> {
    let mut header = HeaderBuilder::new(ALIGNMENT)?;
    if number == 0 {
        for (key, value) in model::keys(spec, sizes) {
            header.key(&key, value)?;
        }
    }
    if spec.shards > 1 {
        // Types as llama-gguf-split writes them.
        header.key("split.no", number as u16)?;
        header.key("split.count", spec.shards as u16)?;
        header.key("split.tensors.count", tensors as i32)?;
    }
    for tensor in shard {
        header.tensor(&tensor.name, tensor.format.ggml_type(), &tensor.dims)?;
    }
    Ok(header.finish())
}

/// Divides the tensors into `count` runs of about equal bytes, none of them empty.
fn divide(tensors: &[Tensor], count: usize, total: u64) -> Vec<&[Tensor]> {
    let mut shards = Vec::new();
    let (mut rest, mut passed) = (tensors, 0);
    for number in 1..count {
        let goal = (u128::from(total) * number as u128 / count as u128) as u64;
        let most = rest.len() - (count - number);
        let mut take = 1;
        passed += rest[0].bytes;
        while take < most && passed + rest[take].bytes <= goal {
            passed += rest[take].bytes;
            take += 1;
        }
        let (shard, after) = rest.split_at(take);
        shards.push(shard);
        rest = after;
    }
    shards.push(rest);
    shards
}

/// The files of a model at `path`.
pub fn shard_names(path: &Path, count: u32) -> anyhow::Result<Vec<PathBuf>> {
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    let stem = stem.with_context(|| format!("{}: expected a path that ends in a file name", path.display()))?;
    if count == 1 {
        return Ok(vec![path.to_owned()]);
    }
    Ok((1..=count).map(|number| path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf"))).collect())
}

fn fill(tensor: &Tensor, seed: u64, out: &mut dyn Write, mut wrote: impl FnMut(u64)) -> io::Result<()> {
    let row = if tensor.experts > 0 { tensor.dims[0] as usize } else { 1 };
    let block = tensor.format.block_bytes() * row;
    let mut order: Vec<i32> = (0..tensor.experts as i32).collect();
    let mut buffer = vec![0; (BUFFER_BYTES / block * block).min(tensor.bytes as usize)];
    let mut random = Random::new(seed, &tensor.name);
    let mut left = tensor.bytes;
    while left > 0 {
        let part = &mut buffer[..left.min(BUFFER_BYTES as u64 / block as u64 * block as u64) as usize];
        match tensor.experts {
            0 => tensor.format.fill(part, &mut random, tensor.mean, tensor.deviation),
            _ => part.chunks_exact_mut(block).for_each(|row| route(row, &mut random, &mut order)),
        }
        out.write_all(part)?;
        left -= part.len() as u64;
        wrote(part.len() as u64);
    }
    Ok(())
}

/// Fills a row with different experts: the first of `order`, which is shuffled on from row to row.
fn route(row: &mut [u8], random: &mut Random, order: &mut [i32]) {
    for (at, entry) in row.chunks_exact_mut(4).enumerate() {
        let other = at + (random.next_u64() % (order.len() - at) as u64) as usize;
        order.swap(at, other);
        entry.copy_from_slice(&order[at].to_le_bytes());
    }
}
