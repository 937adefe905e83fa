//! The files: shards, room on the disk, and all or nothing.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use hobbit::gguf::HeaderBuilder;
use hobbit::gguf::writer::Layout;
use tempfile::NamedTempFile;

use super::SynthError;
use super::model::{self, Tensor};
use super::random::Random;
use super::spec::Spec;

/// Alignment of tensor data in bytes; GGUF's own default.
const ALIGNMENT: u64 = 32;
/// Bytes made at a time.
const BUFFER_BYTES: usize = 1 << 20;

/// What [`write()`] has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The files, shards in order. llama.cpp is given the first.
    pub files: Vec<PathBuf>,
    /// Bytes in all files.
    pub bytes: u64,
}

/// Writes the model to `path`, or with more than one shard to `<stem>-00001-of-0000N.gguf` and so on beside it.
/// Existing files are replaced when all is written; on an error nothing is left behind.
///
/// # Errors
/// [`SynthError`]: a specification that does not fit together, no room, or a write that fails.
pub fn write(path: &Path, spec: &Spec) -> Result<Written, SynthError> {
    write_with(path, spec, |_, _| ())
}

/// As [`write()`]; `progress` is told the bytes of weights written and to be written.
///
/// # Errors
/// As [`write()`].
pub fn write_with(path: &Path, spec: &Spec, mut progress: impl FnMut(u64, u64)) -> Result<Written, SynthError> {
    let sizes = spec.sizes()?;
    let tensors = model::tensors(spec, &sizes)?;
    if spec.shards as usize > tensors.len() {
        let expected = format!("at most one shard per tensor, {}", tensors.len());
        return Err(SynthError::Flag { flag: "--split", found: spec.shards.to_string(), expected });
    }
    let total: u64 = tensors.iter().map(|tensor| tensor.bytes).sum();
    let shards = divide(&tensors, spec.shards as usize, total);
    let names = shard_names(path, spec.shards)?;
    let mut layouts = Vec::new();
    for (number, shard) in shards.iter().enumerate() {
        let layout = layout(spec, &sizes, number, shard, tensors.len());
        layouts.push(layout.map_err(|fault| fault.at(&names[number]))?);
    }

    let needed = layouts.iter().map(|layout| layout.len).sum();
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    check_space(dir, needed)?;
    let mut done = 0;
    let mut files = Vec::new();
    for ((layout, shard), name) in layouts.iter().zip(&shards).zip(&names) {
        let io_fault = |source| SynthError::Io { path: name.clone(), source };
        let mut file = create_temporary(dir).map_err(io_fault)?;
        let mut tensors = shard.iter();
        let written = layout.write(file.as_file_mut(), |_, out| {
            let tensor = tensors.next().expect("the layout has this shard's tensors");
            fill(tensor, spec.seed, out, |bytes| {
                done += bytes;
                progress(done, total);
            })
        });
        written.map_err(|source| SynthError::Write { path: name.clone(), source })?;
        files.push(file);
    }
    for (file, name) in files.into_iter().zip(&names) {
        file.persist(name).map_err(|fault| SynthError::Io { path: name.clone(), source: fault.error })?;
    }
    Ok(Written { files: names, bytes: needed })
}

/// A header fault whose file is not known yet.
enum Fault {
    Synth(SynthError),
    Header(hobbit::gguf::WriteError),
}

impl From<SynthError> for Fault {
    fn from(fault: SynthError) -> Self {
        Fault::Synth(fault)
    }
}

impl From<hobbit::gguf::WriteError> for Fault {
    fn from(fault: hobbit::gguf::WriteError) -> Self {
        Fault::Header(fault)
    }
}

impl Fault {
    fn at(self, path: &Path) -> SynthError {
        match self {
            Fault::Synth(fault) => fault,
            Fault::Header(source) => SynthError::Write { path: path.to_owned(), source },
        }
    }
}

fn layout(
    spec: &Spec,
    sizes: &super::spec::Sizes,
    number: usize,
    shard: &[Tensor],
    tensors: usize,
) -> Result<Layout, Fault> {
    let mut header = HeaderBuilder::new(ALIGNMENT)?;
    if number == 0 {
        for (key, value) in model::keys(spec, sizes)? {
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
pub(super) fn shard_names(path: &Path, count: u32) -> Result<Vec<PathBuf>, SynthError> {
    let fault = || SynthError::Name { path: path.to_owned() };
    let stem = path.file_stem().and_then(|stem| stem.to_str()).ok_or_else(fault)?;
    if count == 1 {
        return Ok(vec![path.to_owned()]);
    }
    Ok((1..=count).map(|number| path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf"))).collect())
}

fn check_space(dir: &Path, needed: u64) -> Result<(), SynthError> {
    let available = fs4::available_space(dir).map_err(|source| SynthError::Io { path: dir.to_owned(), source })?;
    if available < needed {
        return Err(SynthError::DiskSpace { dir: dir.to_owned(), needed, available });
    }
    Ok(())
}

/// A file beside the wanted one, removed unless it is persisted.
fn create_temporary(dir: &Path) -> io::Result<NamedTempFile<File>> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".synth-").suffix(".partial");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As for any other new file: the umask decides.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(dir)
}

fn fill(tensor: &Tensor, seed: u64, out: &mut dyn Write, mut wrote: impl FnMut(u64)) -> io::Result<()> {
    let block = tensor.format.block_bytes();
    let mut buffer = vec![0; (BUFFER_BYTES / block * block).min(tensor.bytes as usize)];
    let mut random = Random::new(seed, &tensor.name);
    let mut left = tensor.bytes;
    while left > 0 {
        let part = &mut buffer[..left.min(BUFFER_BYTES as u64 / block as u64 * block as u64) as usize];
        tensor.format.fill(part, &mut random, tensor.mean, tensor.deviation);
        out.write_all(part)?;
        left -= part.len() as u64;
        wrote(part.len() as u64);
    }
    Ok(())
}
