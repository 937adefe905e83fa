//! The same model with other experts: a plain GGUF of which only the expert tensors are of another type.
//!
//! llama-quantize changes everything else as well; a bench that compares precisions of experts must not.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result};
use hobbit::engine::Ggml;
use hobbit::gguf::Recode;
use hobbit::gguf::{ExpertTensor, GgmlType, Gguf, HeaderBuilder, TensorInfo};
use tempfile::NamedTempFile;

/// Alignment of tensor data in bytes; GGUF's default.
const ALIGNMENT: u64 = 32;
/// Bytes copied at a time.
const COPY_BYTES: u64 = 8 << 20;

/// Writes the model of `source` to `out` with its experts as `to`; everything else is copied. `threads` experts are
/// recoded at a time and held in memory. `out` appears only when it is complete.
pub fn requantise_experts(source: &Path, to: GgmlType, out: &Path, threads: usize) -> Result<()> {
    let model = Gguf::open(source)?;
    let experts = model.experts()?;
    let experts: Vec<&ExpertTensor> = experts.layers.iter().flat_map(|layer| &layer.tensors).collect();
    let expert = |name: &str| experts.iter().find(|tensor| tensor.name == name).copied();

    let mut header = HeaderBuilder::new(ALIGNMENT)?;
    model.copy_keys(&mut header, |key| !key.starts_with("split."))?;
    for tensor in &model.tensors {
        let dtype = if expert(&tensor.name).is_some() { to } else { tensor.dtype };
        header.tensor(&tensor.name, dtype, &tensor.dims)?;
    }
    let files: Vec<File> = model
        .files
        .iter()
        .map(|file| File::open(&file.path).with_context(|| file.path.display().to_string()))
        .collect::<Result<_>>()?;

    let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut partial = NamedTempFile::new_in(dir).with_context(|| dir.display().to_string())?;
    let mut tensors = model.tensors.iter();
    header
        .finish()
        .write(&mut BufWriter::new(partial.as_file_mut()), |_, into| {
            let tensor = tensors.next().expect("the header has this model's tensors, in order");
            match expert(&tensor.name) {
                Some(experts) => recode(experts, &files[experts.file as usize], to, threads.max(1), into),
                None => copy(tensor, &files[tensor.extent.file as usize], into),
            }
        })
        .with_context(|| format!("{} with experts in {to}", source.display()))?;
    partial.persist(out).with_context(|| out.display().to_string())?;
    Ok(())
}

fn copy(tensor: &TensorInfo, file: &File, out: &mut dyn Write) -> io::Result<()> {
    let mut buffer = vec![0; tensor.extent.len.min(COPY_BYTES) as usize];
    let mut done = 0;
    while done < tensor.extent.len {
        let part = &mut buffer[..(tensor.extent.len - done).min(COPY_BYTES) as usize];
        file.read_exact_at(part, tensor.extent.offset + done)?;
        out.write_all(part)?;
        done += part.len() as u64;
    }
    Ok(())
}

fn recode(tensor: &ExpertTensor, file: &File, to: GgmlType, threads: usize, out: &mut dyn Write) -> io::Result<()> {
    let one = |index: u16| -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; tensor.slice_bytes as usize];
        file.read_exact_at(&mut bytes, tensor.extent(index).offset)?;
        let mut recoded = Vec::new();
        let outcome = Ggml.recode(tensor.dtype, to, tensor.ne0, &bytes, None, &mut recoded);
        outcome.map_err(|error| io::Error::other(format!("tensor '{}', expert {index}: {error}", tensor.name)))?;
        Ok(recoded)
    };
    let indices: Vec<u16> = (0..tensor.n_expert as u16).collect();
    for group in indices.chunks(threads) {
        let recoded: Vec<io::Result<Vec<u8>>> = thread::scope(|scope| {
            let running: Vec<_> = group
                .iter()
                .map(|&index| {
                    scope.spawn({
                        let one = &one;
                        move || one(index)
                    })
                })
                .collect();
            running
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked"))))
                .collect()
        });
        for bytes in recoded {
            out.write_all(&bytes?)?;
        }
    }
    Ok(())
}
