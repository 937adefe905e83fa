//! The same model with other experts: a plain GGUF of which only the expert tensors are of another type.
//!
//! llama-quantize changes everything else as well; a bench that compares precisions of experts must not.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result};
use hobbit::engine::Ggml;
use hobbit::gguf::Recode;
use hobbit::gguf::{ExpertTensor, GgmlType, Gguf, HeaderBuilder, TensorInfo};
use hobbit::pack::fitting;

/// Alignment of tensor data in bytes; GGUF's default.
const ALIGNMENT: u64 = 32;

/// Writes the model of `source` to `out` with its experts as `to`, or what llama-quantize takes where rows are no whole
/// blocks of it; everything else is copied. `threads` experts are recoded at a time and held in memory.
pub fn requantise_experts(source: &Path, to: GgmlType, out: &Path, threads: usize) -> Result<()> {
    let model = Gguf::open(source)?;
    let experts = model.experts()?;
    let experts: Vec<&ExpertTensor> = experts.layers.iter().flat_map(|layer| &layer.tensors).collect();
    let expert = |name: &str| experts.iter().find(|tensor| tensor.name == name).copied();

    let mut header = HeaderBuilder::new(ALIGNMENT)?;
    model.copy_keys(&mut header, |key| !key.starts_with("split."))?;
    for tensor in &model.tensors {
        let dtype = if expert(&tensor.name).is_some() { fitting(to, tensor.dims[0]) } else { tensor.dtype };
        header.tensor(&tensor.name, dtype, &tensor.dims)?;
    }
    let files: Vec<File> = model
        .files
        .iter()
        .map(|file| File::open(&file.path).with_context(|| file.path.display().to_string()))
        .collect::<Result<_>>()?;

    let mut written = BufWriter::new(File::create(out).with_context(|| out.display().to_string())?);
    let mut tensors = model.tensors.iter();
    header
        .finish()
        .write(&mut written, |_, into| {
            let tensor = tensors.next().expect("the header has this model's tensors, in order");
            match expert(&tensor.name) {
                Some(experts) => {
                    let to = fitting(to, experts.ne0);
                    recode(experts, &files[experts.file as usize], to, threads.max(1), into)
                }
                None => copy(tensor, &files[tensor.extent.file as usize], into),
            }
        })
        .with_context(|| format!("{} with experts in {to}", source.display()))?;
    written.flush().with_context(|| out.display().to_string())
}

fn copy(tensor: &TensorInfo, mut file: &File, out: &mut dyn Write) -> io::Result<()> {
    file.seek(SeekFrom::Start(tensor.extent.offset))?;
    let n = io::copy(&mut file.take(tensor.extent.len), out)?;
    if n == tensor.extent.len { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

fn recode(tensor: &ExpertTensor, file: &File, to: GgmlType, threads: usize, out: &mut dyn Write) -> io::Result<()> {
    let one = &|index: u16| -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; tensor.slice_bytes as usize];
        file.read_exact_at(&mut bytes, tensor.extent(index).offset)?;
        let mut recoded = Vec::new();
        let outcome = Ggml.recode(tensor.dtype, to, tensor.ne0, &bytes, None, &mut recoded);
        outcome.map_err(|error| io::Error::other(format!("tensor '{}', expert {index}: {error}", tensor.name)))?;
        Ok(recoded)
    };
    for group in (0..tensor.n_expert as u16).collect::<Vec<_>>().chunks(threads) {
        let recoded: io::Result<Vec<_>> = thread::scope(|scope| {
            let running: Vec<_> = group.iter().map(|&index| scope.spawn(move || one(index))).collect();
            running.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
        });
        recoded?.iter().try_for_each(|bytes| out.write_all(bytes))?;
    }
    Ok(())
}
