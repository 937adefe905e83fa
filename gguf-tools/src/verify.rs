//! `gguf-tools verify`: checks that a file is complete and that its numbers are finite.
//!
//! Opening checks structure and extents; then every block of every tensor is read and its floating-point fields (values
//! of F32, F16, BF16; scales of quantised types) must be finite. Every byte of an expert pack must have its checksum.

mod floats;

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, anyhow, bail};
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::{self, Pack, PackKind};
use hobbit_core::units::Bytes;
use serde::Serialize;

use crate::shared::{Bar, threads};
use floats::Floats;

/// A worker's buffer in bytes; a read is the largest whole number of blocks that fits.
const CHUNK: u64 = 4 << 20;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model; of a split model, any shard
    file: PathBuf,
    /// Print JSON instead of lines
    #[arg(long)]
    json: bool,
    /// Number of threads; default: one per core
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    ok: bool,
    files: Vec<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pack: Option<PackKind>,
    tensors: usize,
    /// Records of a pack.
    #[serde(skip_serializing_if = "Option::is_none")]
    versions: Option<usize>,
    bytes: u64,
    /// Layers with experts of a plain model.
    #[serde(skip_serializing_if = "Option::is_none")]
    expert_layers: Option<usize>,
    notes: Vec<String>,
    faults: Vec<Fault>,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Fault {
    Tensor(NotFinite),
    Pack(pack::Fault),
}

/// A tensor with numbers that are not finite.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct NotFinite {
    tensor: String,
    #[serde(rename = "type")]
    dtype: &'static str,
    /// Blocks (elements, where a block is one element) that are infinite or NaN.
    non_finite: u64,
    /// The first such block, counted from the start of the tensor.
    first_block: u64,
    file: PathBuf,
    offset: u64,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    let gguf = Gguf::open(&args.file).map_err(anyhow::Error::from);
    let report = gguf.and_then(|gguf| match Pack::is_pack(&gguf) {
        true => Report::of_pack(&Pack::open(&args.file)?),
        false => Report::of_plain(&gguf, threads(args.threads)),
    });
    let report = match report {
        Ok(report) => report,
        Err(error) => {
            if args.json {
                let error = Some(format!("{error:#}"));
                Report { error, expert_layers: Some(0), ..Report::default() }.print(true)?;
            }
            return Err(error);
        }
    };
    report.print(args.json)?;
    report.outcome()
}

impl Report {
    fn of_plain(gguf: &Gguf, threads: usize) -> anyhow::Result<Self> {
        let expert_layers = Some(gguf.experts()?.layers.len());
        let is_refused = gguf.files.len() == 1 && !gguf.is_contiguous;
        let note = "tensors do not follow each other; llama.cpp itself refuses this file";
        let faults: Vec<_> = scan(gguf, threads)?.into_iter().map(Fault::Tensor).collect();
        Ok(Self {
            ok: faults.is_empty(),
            files: gguf.files.iter().map(|f| f.path.clone()).collect(),
            tensors: gguf.tensors.len(),
            bytes: gguf.tensor_bytes(),
            expert_layers,
            notes: is_refused.then(|| note.to_owned()).into_iter().collect(),
            faults,
            ..Self::default()
        })
    }

    fn of_pack(pack: &Pack) -> anyhow::Result<Self> {
        let mut bar = Bar::new()?;
        let verified = pack::verify(pack, &mut |done, total| bar.show("verifying", done, total))?;
        drop(bar);
        let Some(pack::Verified { tensors, versions, bytes, faults }) = verified else {
            bail!("{}: stopped before everything was read", pack.path.display());
        };
        Ok(Self {
            ok: faults.is_empty(),
            files: vec![pack.path.clone()],
            pack: Some(pack.kind),
            tensors,
            versions: Some(versions),
            bytes,
            faults: faults.into_iter().map(Fault::Pack).collect(),
            ..Self::default()
        })
    }

    fn file(&self) -> std::path::Display<'_> {
        self.files[0].display()
    }

    fn print(&self, json: bool) -> anyhow::Result<()> {
        let text = if json { serde_json::to_string_pretty(self)? + "\n" } else { self.lines() };
        Ok(io::stdout().write_all(text.as_bytes())?)
    }

    fn lines(&self) -> String {
        let mut text: String = self.notes.iter().map(|note| format!("note: {note}\n")).collect();
        for fault in &self.faults {
            text += &match fault {
                Fault::Pack(fault) => format!("{}: {fault}\n", self.file()),
                Fault::Tensor(NotFinite { tensor, dtype, non_finite, first_block, file, offset }) => format!(
                    "{}: tensor '{tensor}' ({dtype}): {non_finite} blocks not finite, first: block {first_block} at \
                     byte {offset}\n",
                    file.display()
                ),
            };
        }
        let (tensors, size, layers) = (self.tensors, Bytes(self.bytes), self.expert_layers.unwrap_or(0));
        match (self.ok, self.pack) {
            (false, _) => {}
            (true, Some(kind)) => {
                let versions = self.versions.unwrap_or(0);
                text += &format!("ok: {} pack, {tensors} tensors, {versions} records, {size}\n", kind.name());
            }
            (true, None) => {
                let n_files = self.files.len();
                text += &format!("ok: {n_files} file(s), {tensors} tensors, {size}, {layers} layers with experts\n");
            }
        }
        text
    }

    /// The error of a damaged file.
    fn outcome(&self) -> anyhow::Result<()> {
        let (n, all, file) = (self.faults.len(), self.tensors + self.versions.unwrap_or(0), self.file());
        match (self.ok, self.pack) {
            (true, _) => Ok(()),
            (false, Some(_)) => Err(anyhow!(
                "{file}: {n} faults in {all} tensors and records; pack the model again, or fetch the pack again"
            )),
            (false, None) => Err(anyhow!(
                "{file}: {n} of {all} tensors hold numbers that are not finite; fetch or quantise the model again"
            )),
        }
    }
}

/// A run of whole blocks.
struct Chunk {
    tensor: usize,
    first_block: u64,
    len: u64,
}

fn chunks(gguf: &Gguf) -> Vec<Chunk> {
    let mut all = Vec::new();
    for (tensor, info) in gguf.tensors.iter().enumerate() {
        let size = info.dtype.type_size();
        let per_chunk = CHUNK / size;
        let n_blocks = info.extent.len / size;
        let mut first_block = 0;
        while first_block < n_blocks {
            let n = per_chunk.min(n_blocks - first_block);
            all.push(Chunk { tensor, first_block, len: n * size });
            first_block += n;
        }
    }
    all.sort_by_key(|c| (gguf.tensors[c.tensor].extent.file, gguf.tensors[c.tensor].extent.offset, c.first_block));
    all
}

fn scan(gguf: &Gguf, threads: usize) -> anyhow::Result<Vec<NotFinite>> {
    let files: Vec<File> = (gguf.files.iter())
        .map(|file| File::open(&file.path).with_context(|| format!("{}: cannot open", file.path.display())))
        .collect::<Result<_, _>>()?;
    let chunks = chunks(gguf);
    let (next, faults) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let bar = Bar::of_bytes("verifying", gguf.tensor_bytes())?;
    let worker = || -> anyhow::Result<()> {
        let mut buffer = Vec::new();
        while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let info = &gguf.tensors[chunk.tensor];
            let (dtype, size) = (info.dtype, info.dtype.type_size());
            let floats = Floats::of(dtype).with_context(|| format!("type {dtype} cannot be checked yet"))?;
            let (file, offset) = (info.extent.file as usize, info.extent.offset + chunk.first_block * size);
            buffer.resize(chunk.len as usize, 0);
            files[file].read_exact_at(&mut buffer, offset).with_context(|| {
                format!("{}: cannot read tensor '{}' at byte {offset}", gguf.files[file].path.display(), info.name)
            })?;
            if let (n, Some(first)) = floats.scan(&buffer, size as usize) {
                let mut faults = faults.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                faults.push((chunk.tensor, chunk.first_block + first, n));
            }
            bar.step(chunk.len)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let join = |worker: std::thread::ScopedJoinHandle<'_, _>| worker.join().expect("no worker panics");
        workers.into_iter().try_for_each(join)
    })?;
    drop(bar);
    Ok(by_tensor(gguf, faults.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)))
}

/// One fault per tensor from (tensor, first block, count) per chunk.
fn by_tensor(gguf: &Gguf, mut found: Vec<(usize, u64, u64)>) -> Vec<NotFinite> {
    found.sort_unstable();
    let fault = |run: &[(usize, u64, u64)]| {
        let (tensor, first_block, _) = run[0];
        let info = &gguf.tensors[tensor];
        NotFinite {
            tensor: info.name.clone(),
            dtype: info.dtype.name(),
            non_finite: run.iter().map(|(.., n)| n).sum(),
            first_block,
            file: gguf.files[info.extent.file as usize].path.clone(),
            offset: info.extent.offset + first_block * info.dtype.type_size(),
        }
    };
    found.chunk_by(|a, b| a.0 == b.0).map(fault).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hobbit_core::gguf::{GgmlType, HeaderBuilder};

    /// A model of an F32 tensor and a Q8_0 tensor of several chunks; `edit` may damage their data.
    fn verified(edit: impl Fn(&str, &mut [u8])) -> Report {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("toy.gguf");
        let mut header = HeaderBuilder::new(32).unwrap();
        header.tensor("norm", GgmlType::F32, &[5]).unwrap();
        header.tensor("big", GgmlType::Q8_0, &[32, (2 * CHUNK + 1000) / 34]).unwrap();
        let mut file = File::create(&path).unwrap();
        let layout = header.finish();
        layout
            .write(&mut file, |t, out| {
                let mut data = vec![0x11; t.extent.len as usize];
                edit(&t.name, &mut data);
                out.write_all(&data)
            })
            .unwrap();
        drop(file);
        let gguf = Gguf::open(&path).unwrap();
        Report::of_plain(&gguf, 3).unwrap()
    }

    #[test]
    fn scales_that_are_not_finite_are_counted_and_placed() {
        let sound = verified(|_, _| {});
        assert!(sound.ok && sound.notes.is_empty(), "{sound:?}");
        assert!(sound.lines().starts_with("ok: 1 file(s), 2 tensors"));
        let report = verified(|name, data| {
            let blocks: &[usize] = if name == "big" { &[7, 100, 200_000] } else { &[] };
            blocks.iter().for_each(|block| data[34 * block + 1] = 0x7e);
        });
        let [Fault::Tensor(fault)] = report.faults.as_slice() else { panic!("{report:?}") };
        assert_eq!((fault.tensor.as_str(), fault.dtype, fault.non_finite, fault.first_block), ("big", "q8_0", 3, 7));
        assert!(!report.ok && report.lines().contains("block 7 at byte"), "{}", report.lines());
    }
}
