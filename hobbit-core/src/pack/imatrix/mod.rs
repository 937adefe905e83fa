//! Importance matrices: how much each column of a weight counts, as measured by llama.cpp's `llama-imatrix`.
//!
//! For every matrix, a file has the mean square of each of its inputs; expert tensors have one per expert:
//! `<tensor>.in_sum2` `[n_per_row, n_expert]` and `<tensor>.counts` `[1, n_expert]`, f32, in GGUF. Only the index is
//! kept in memory: files of the largest models have a gigabyte of values.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::bytes::read_exact_at;
use crate::gguf::{GgmlType, Gguf, GgufError, TensorInfo};

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

/// An importance matrix file. Reads may come from any thread.
#[derive(Debug)]
pub struct Imatrix {
    path: PathBuf,
    file: File,
    entries: HashMap<String, Entry>,
    /// Chunks of text that the values were computed from, if recorded.
    pub chunks: Option<u64>,
}

/// Location of one tensor's values.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Entry {
    /// First byte of the sums of squares.
    offset: u64,
    /// Number of sums, `n_per_row * n_expert`.
    n_values: u64,
    /// First byte of the counts of rows, f32, which turn sums into means.
    counts: u64,
    /// Number of counts: one per expert, or one for all.
    n_counts: u64,
}

/// Why an importance matrix cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImatrixError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {error}", path.display())]
    Io { path: PathBuf, action: &'static str, error: io::Error },
    /// A damaged GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The binary format of llama-imatrix before GGUF, or not an importance matrix.
    #[error(
        "{path}: this is not a GGUF file; convert an importance matrix of the old format: llama-imatrix --in-file {path} -o imatrix.gguf",
        path = path.display()
    )]
    NotGguf { path: PathBuf },
    /// Another kind of GGUF file, or a damaged one.
    #[error("{}: {what}: found {found}, expected {expected}; is this a file of llama-imatrix? if so, compute or fetch it again", path.display())]
    Malformed { path: PathBuf, what: String, found: String, expected: String },
    /// Values for a tensor of another shape.
    #[error("{}: tensor '{tensor}': {found} values, expected {expected}; this importance matrix was computed from another model", path.display())]
    Shape { path: PathBuf, tensor: String, found: String, expected: String },
    /// A value that cannot be a mean of squares.
    #[error("{}: tensor '{tensor}', expert {expert}: {what} is {value}, expected a finite number from 0; compute the importance matrix again", path.display())]
    Value { path: PathBuf, tensor: String, expert: u16, what: String, value: f32 },
}

impl Imatrix {
    /// Opens an importance matrix and reads its index.
    ///
    /// # Errors
    /// [`ImatrixError::Io`], [`ImatrixError::NotGguf`], [`ImatrixError::Gguf`] or [`ImatrixError::Malformed`].
    pub fn open(path: &Path) -> Result<Self, ImatrixError> {
        let io = |action| move |error| ImatrixError::Io { path: path.to_owned(), action, error };
        // Check before opening: opening a pipe would block until it has a writer.
        if !std::fs::metadata(path).map_err(io("open"))?.is_file() {
            return Err(malformed(path, "file".into(), "a directory or device".into(), "a regular file"));
        }
        let mut file = File::open(path).map_err(io("open"))?;
        let mut magic = Vec::new();
        (&mut file).take(4).read_to_end(&mut magic).map_err(io("read"))?;
        if magic != *b"GGUF" {
            return Err(ImatrixError::NotGguf { path: path.to_owned() });
        }
        let (entries, chunks) = index(path)?;
        Ok(Self { path: path.to_owned(), file, entries, chunks })
    }

    /// Importance of the columns of one expert's matrix (`n_per_row` values): the mean square of its inputs, or ones
    /// for an expert without tokens. `None` if the file has no entry for the tensor. `tensor` is the weight's name in
    /// the model, of shape `[n_per_row, rows, n_expert]`; `n_expert` is 1 for ordinary matrices.
    ///
    /// # Errors
    /// [`ImatrixError::Shape`], [`ImatrixError::Value`] or [`ImatrixError::Io`].
    ///
    /// # Panics
    /// If `expert` is not below `n_expert`.
    pub fn importance(
        &self,
        tensor: &str,
        n_per_row: u64,
        n_expert: u32,
        expert: u16,
    ) -> Result<Option<Vec<f32>>, ImatrixError> {
        assert!(u32::from(expert) < n_expert, "expert {expert} of {n_expert} in {tensor}");
        let Some(entry) = self.entries.get(tensor) else { return Ok(None) };
        let (expert_at, n_expert) = (u64::from(expert), u64::from(n_expert));
        let n_counts = entry.n_counts;
        if n_per_row.checked_mul(n_expert) != Some(entry.n_values) || ![1, n_expert].contains(&n_counts) {
            return Err(ImatrixError::Shape {
                path: self.path.clone(),
                tensor: tensor.to_owned(),
                found: format!("{} (counts: {n_counts})", entry.n_values),
                expected: format!("{n_per_row} for each of {n_expert} experts"),
            });
        }
        let fault = |what: String, value| ImatrixError::Value {
            path: self.path.clone(),
            tensor: tensor.to_owned(),
            expert,
            what,
            value,
        };
        let count_at = if n_counts == 1 { 0 } else { expert_at };
        let count = self.read(entry.counts + 4 * count_at, 1)?[0];
        if !(count.is_finite() && count >= 0.0) {
            return Err(fault("count".to_owned(), count));
        }
        let divisor = count.round();
        if divisor == 0.0 {
            return Ok(Some(vec![1.0; n_per_row as usize]));
        }
        let mut values = self.read(entry.offset + 4 * n_per_row * expert_at, n_per_row as usize)?;
        for (column, value) in values.iter_mut().enumerate() {
            if !(value.is_finite() && *value >= 0.0) {
                return Err(fault(format!("column {column}"), *value));
            }
            *value /= divisor;
        }
        Ok(Some(values))
    }

    /// `n` f32 at `offset`; the index has checked that they lie in the file.
    fn read(&self, offset: u64, n: usize) -> Result<Vec<f32>, ImatrixError> {
        let mut bytes = vec![0; n * 4];
        read_exact_at(&self.file, &mut bytes, offset).map_err(|error| ImatrixError::Io {
            path: self.path.clone(),
            action: "read values",
            error,
        })?;
        Ok(bytes.as_chunks().0.iter().map(|le| f32::from_le_bytes(*le)).collect())
    }
}

/// Entries by tensor name, and the number of chunks.
type Index = (HashMap<String, Entry>, Option<u64>);

fn index(path: &Path) -> Result<Index, ImatrixError> {
    let gguf = Gguf::open(path)?;
    if let Some(kind) = gguf.metadata.get_str("general.type").filter(|kind| *kind != "imatrix") {
        return Err(malformed(path, "general.type".into(), format!("'{kind}'"), "'imatrix'"));
    }
    let mut entries = HashMap::new();
    for sums in &gguf.tensors {
        let Some(tensor) = sums.name.strip_suffix(SUMS) else { continue };
        let Some(counts) = gguf.tensor(&format!("{tensor}{COUNTS}")) else {
            return Err(malformed(path, format!("tensor '{tensor}{COUNTS}'"), "none".into(), "one beside the sums"));
        };
        for part in [sums, counts] {
            // llama-imatrix writes no split files; offsets in them would refer to another file.
            if part.dtype != GgmlType::F32 || part.extent.file != 0 || part.extent.len == 0 {
                let found = format!("{} bytes of type {}", part.extent.len, part.dtype);
                return Err(malformed(path, format!("tensor '{}'", part.name), found, "f32 values in this file"));
            }
        }
        let n = |part: &TensorInfo| part.extent.len / 4;
        let entry =
            Entry { offset: sums.extent.offset, n_values: n(sums), counts: counts.extent.offset, n_counts: n(counts) };
        entries.insert(tensor.to_owned(), entry);
    }
    if entries.is_empty() {
        let what = format!("tensors named '<weight>{SUMS}'");
        return Err(malformed(path, what, "none".into(), "at least one"));
    }
    Ok((entries, gguf.metadata.get_u64("imatrix.chunk_count")))
}

fn malformed(path: &Path, what: String, found: String, expected: &str) -> ImatrixError {
    ImatrixError::Malformed { path: path.to_owned(), what, found, expected: expected.to_owned() }
}
