//! `gguf-tools verify`: checks that a file is complete and that its numbers are finite.
//!
//! Structure and extents are checked by opening; then every block of every tensor is read and its floating-point
//! fields (values of F32, F16, BF16; scales of quantised types) must be finite. Expert packs have checksums instead.

mod floats;
mod pack;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write as _};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, anyhow};
use hobbit_core::gguf::{Gguf, TensorInfo};
use hobbit_core::pack::Pack;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use floats::Floats;

/// A worker's buffer in bytes; a read is the largest whole number of blocks that fits.
const CHUNK: u64 = 4 << 20;

/// Arguments of `verify`.
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
    tensors: usize,
    bytes: u64,
    expert_layers: usize,
    notes: Vec<String>,
    faults: Vec<Fault>,
    error: Option<String>,
}

/// A tensor with numbers that are not finite.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Fault {
    tensor: String,
    #[serde(rename = "type")]
    dtype: &'static str,
    /// Blocks (elements, where a block is one element) that are infinite or NaN.
    non_finite: u64,
    /// The first of them, counted from the start of the tensor.
    first_block: u64,
    /// Where it lies.
    file: PathBuf,
    offset: u64,
}

/// Prints findings.
///
/// # Errors
/// The model is damaged (after printing the faults) or cannot be read, or standard output is closed.
pub fn run(args: Args) -> anyhow::Result<()> {
    let (text, outcome) = match findings(&args) {
        Ok(found) => found,
        Err(e) if args.json => (json(&Report { error: Some(format!("{e:#}")), ..Report::default() })?, Err(e)),
        Err(e) => return Err(e),
    };
    io::stdout().write_all(text.as_bytes())?;
    outcome
}

/// The findings to print, and whether the file is sound.
fn findings(args: &Args) -> anyhow::Result<(String, anyhow::Result<()>)> {
    let gguf = Gguf::open(&args.file)?;
    if Pack::is_pack(&gguf) {
        let report = pack::Report::of(&Pack::open(&args.file)?)?;
        return Ok((if args.json { json(&report)? } else { report.lines() }, report.outcome()));
    }
    let report = verify(args, &gguf)?;
    let (n, all, file) = (report.faults.len(), report.tensors, args.file.display());
    let outcome = match report.ok {
        true => Ok(()),
        false => Err(anyhow!(
            "{file}: {n} of {all} tensors hold numbers that are not finite; fetch or quantise the model again"
        )),
    };
    Ok((if args.json { json(&report)? } else { lines(&report) }, outcome))
}

fn json(report: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(report)? + "\n")
}

fn lines(report: &Report) -> String {
    let note = |n: &String| format!("note: {n}\n");
    let fault = |f: &Fault| {
        let Fault { tensor, dtype, non_finite, first_block, file, offset } = f;
        let file = file.display();
        format!(
            "{file}: tensor '{tensor}' ({dtype}): {non_finite} blocks not finite, first: block {first_block} at byte {offset}\n"
        )
    };
    let mut text: String = report.notes.iter().map(note).chain(report.faults.iter().map(fault)).collect();
    if report.ok {
        let (files, size) = (report.files.len(), hobbit_core::units::Bytes(report.bytes));
        let (tensors, layers) = (report.tensors, report.expert_layers);
        text += &format!("ok: {files} file(s), {tensors} tensors, {size}, {layers} layers with experts\n");
    }
    text
}

fn verify(args: &Args, gguf: &Gguf) -> anyhow::Result<Report> {
    let experts = gguf.experts()?;
    let mut report = Report {
        files: gguf.files.iter().map(|f| f.path.clone()).collect(),
        tensors: gguf.tensors.len(),
        bytes: gguf.tensor_bytes(),
        expert_layers: experts.layers.len(),
        ..Report::default()
    };
    if gguf.files.len() == 1 && !gguf.is_contiguous {
        report.notes.push("tensors do not follow each other; llama.cpp itself refuses this file".to_owned());
    }
    report.faults = scan(gguf, crate::threads(args.threads))?;
    report.ok = report.faults.is_empty();
    Ok(report)
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

fn scan(gguf: &Gguf, threads: usize) -> anyhow::Result<Vec<Fault>> {
    let chunks = chunks(gguf);
    let (next, faults) = (AtomicUsize::new(0), Mutex::new(Vec::<(usize, u64, u64)>::new()));
    // Hidden by indicatif where standard error is not a terminal.
    let bar = ProgressBar::with_draw_target(Some(gguf.tensor_bytes()), ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}")?);
    let worker = || -> anyhow::Result<()> {
        let mut files = Files::default();
        let mut buffer = Vec::new();
        while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let info = &gguf.tensors[chunk.tensor];
            let floats =
                Floats::of(info.dtype).with_context(|| format!("type {} cannot be checked yet", info.dtype))?;
            files.read(gguf, info, chunk, &mut buffer)?;
            if let (n, Some(first)) = floats.scan(&buffer, info.dtype.type_size() as usize) {
                let mut faults = faults.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                faults.push((chunk.tensor, chunk.first_block + first, n));
            }
            bar.inc(chunk.len);
        }
        Ok(())
    };
    let results: Vec<_> = thread::scope(|s| {
        let workers: Vec<_> = (0..threads).map(|_| s.spawn(worker)).collect();
        workers.into_iter().map(|w| w.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
    });
    bar.finish_and_clear();
    results.into_iter().collect::<anyhow::Result<()>>()?;
    Ok(by_tensor(gguf, faults.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)))
}

/// One fault per tensor from (tensor, first block, count) per chunk.
fn by_tensor(gguf: &Gguf, mut found: Vec<(usize, u64, u64)>) -> Vec<Fault> {
    found.sort_unstable();
    let fault = |run: &[(usize, u64, u64)]| {
        let (tensor, first_block, _) = run[0];
        let info = &gguf.tensors[tensor];
        Fault {
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

/// A worker's own handles, so that each has its own position.
#[derive(Default)]
struct Files {
    current: Option<(u32, File)>,
}

impl Files {
    fn read(&mut self, gguf: &Gguf, info: &TensorInfo, chunk: &Chunk, buffer: &mut Vec<u8>) -> anyhow::Result<()> {
        let index = info.extent.file;
        let path = &gguf.files[index as usize].path;
        let file = match self.current.take() {
            Some((open, file)) if open == index => file,
            _ => File::open(path).with_context(|| format!("{}: cannot open", path.display()))?,
        };
        let (_, file) = self.current.insert((index, file));
        let offset = info.extent.offset + chunk.first_block * info.dtype.type_size();
        buffer.resize(chunk.len as usize, 0);
        file.seek(SeekFrom::Start(offset))
            .and_then(|_| file.read_exact(buffer))
            .with_context(|| format!("{}: cannot read tensor '{}' at byte {offset}", path.display(), info.name))
    }
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
        verify(&Args { file: path, json: false, threads: Some(3) }, &gguf).unwrap()
    }

    #[test]
    fn a_sound_file_is_ok() {
        let report = verified(|_, _| {});
        assert!(report.ok && report.notes.is_empty(), "{report:?}");
        assert!(lines(&report).starts_with("ok: 1 file(s), 2 tensors"));
    }

    #[test]
    fn non_finite_scales_are_counted_and_placed() {
        let report = verified(|name, data| {
            if name == "big" {
                for block in [7, 100, 200_000] {
                    data[34 * block + 1] = 0x7e;
                }
            }
        });
        let [fault] = report.faults.as_slice() else { panic!("{report:?}") };
        assert_eq!((fault.tensor.as_str(), fault.dtype, fault.non_finite, fault.first_block), ("big", "q8_0", 3, 7));
        assert!(!report.ok && lines(&report).contains("block 7 at byte"), "{}", lines(&report));
    }
}
