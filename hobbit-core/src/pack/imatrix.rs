//! Importance matrices: how much each column of a weight counts, as measured by llama.cpp's `llama-imatrix`.
//!
//! For every matrix, a file has the mean square of each of its inputs; expert tensors have one per expert:
//! `<tensor>.in_sum2` `[n_per_row, n_expert]` and `<tensor>.counts` `[1, n_expert]`, f32, in GGUF. Only the index is
//! kept in memory: files of the largest models have a gigabyte of values.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::files::FileExt;
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

#[derive(Debug, thiserror::Error)]
pub enum ImatrixError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(
        "{path}: this is not a GGUF file; convert an importance matrix of the old format: llama-imatrix --in-file \
            {path} -o imatrix.gguf",
        path = path.display()
    )]
    NotGguf { path: PathBuf },
    #[error("{}: {what}: found {found}, expected {expected}; is this a file of llama-imatrix? if so, compute or fetch \
        it again", path.display())]
    Malformed { path: PathBuf, what: String, found: String, expected: String },
    #[error("{}: tensor '{tensor}': {found} values, expected {expected}; this importance matrix was computed from \
        another model", path.display())]
    Shape { path: PathBuf, tensor: String, found: String, expected: String },
}

impl Imatrix {
    /// Opens an importance matrix and reads its index.
    pub fn open(path: &Path) -> Result<Self, ImatrixError> {
        let io = |action: &'static str| move |error| io_error(path, action, error);
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
        let fault = |what: String, value: f32| {
            let what = format!("tensor '{tensor}', expert {expert}: {what}");
            malformed(&self.path, what, value.to_string(), "a finite number from 0")
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
        self.file.read_exact_at(&mut bytes, offset).map_err(|error| io_error(&self.path, "read values", error))?;
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

fn io_error(path: &Path, action: &str, error: io::Error) -> ImatrixError {
    GgufError::Io { path: path.to_owned(), action: action.to_owned(), error }.into()
}

fn malformed(path: &Path, what: String, found: String, expected: &str) -> ImatrixError {
    ImatrixError::Malformed { path: path.to_owned(), what, found, expected: expected.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::HeaderBuilder;

    const DOWN: &str = "blk.0.ffn_down_exps.weight";

    /// A GGUF importance matrix: sums and counts of tensors, each a name, a shape and values.
    fn gguf(kind: &str, tensors: &[(&str, [u64; 2], &[f32])]) -> Vec<u8> {
        let mut header = HeaderBuilder::new(32).unwrap();
        header.key("general.type", kind).unwrap().key("imatrix.chunk_count", 7u32).unwrap();
        for (name, dims, _) in tensors {
            header.tensor(name, GgmlType::F32, dims).unwrap();
        }
        let (mut file, mut data) = (Vec::new(), tensors.iter());
        let mut next = || data.next().unwrap().2.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        header.finish().write(&mut file, |_, out| out.write_all(&next())).unwrap();
        file
    }

    fn open(bytes: &[u8]) -> Result<Imatrix, ImatrixError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        // The open file outlives its name.
        Imatrix::open(file.path())
    }

    fn down(dims: [u64; 2], sums: &[f32], counts: &[f32]) -> Imatrix {
        let (sum_name, count_name) = (format!("{DOWN}{SUMS}"), format!("{DOWN}{COUNTS}"));
        let n_counts = counts.len() as u64;
        open(&gguf("imatrix", &[(&sum_name, dims, sums), (&count_name, [1, n_counts], counts)])).unwrap()
    }

    #[test]
    fn sums_are_divided_by_the_expert_s_own_count() {
        let imatrix = down([2, 3], &[2.0, 4.0, 5.0, 6.0, 9.0, 12.0], &[2.0, 0.0, 3.0]);
        assert_eq!((imatrix.entries.len(), imatrix.chunks), (1, Some(7)));
        // No token reached the second expert.
        for (expert, expected) in [(0, [1.0, 2.0]), (1, [1.0, 1.0]), (2, [3.0, 4.0])] {
            assert_eq!(imatrix.importance(DOWN, 2, 3, expert).unwrap(), Some(expected.to_vec()));
        }
        assert_eq!(imatrix.importance("blk.1.attn_q.weight", 2, 1, 0).unwrap(), None);
        let one_count = down([4, 1], &[2.0, 4.0, 6.0, 8.0], &[2.0]);
        assert_eq!(one_count.importance(DOWN, 2, 2, 1).unwrap(), Some(vec![3.0, 4.0]));
    }

    #[test]
    fn shapes_and_values_of_no_use_are_refused() {
        let two = down([2, 2], &[1.0; 4], &[1.0; 2]);
        for (n_per_row, n_expert) in [(4, 1), (1, 4), (2, 3), (u64::MAX, 2)] {
            let refused = two.importance(DOWN, n_per_row, n_expert, 0).unwrap_err();
            assert!(matches!(&refused, ImatrixError::Shape { tensor, .. } if tensor == DOWN), "{refused}");
        }
        let refused = down([2, 2], &[1.0; 4], &[1.0; 3]).importance(DOWN, 2, 2, 0).unwrap_err();
        assert!(refused.to_string().contains("4 (counts: 3) values, expected 2 for each of 2 experts"), "{refused}");
        for wrong in [f32::NAN, f32::INFINITY, -1.0] {
            for (value, count, part) in
                [(wrong, 1.0, "expert 1: column 1: found"), (1.0, wrong, "expert 1: count: found")]
            {
                let imatrix = down([2, 2], &[1.0, 1.0, 1.0, value], &[1.0, count]);
                assert!(imatrix.importance(DOWN, 2, 2, 0).is_ok());
                let error = imatrix.importance(DOWN, 2, 2, 1).unwrap_err().to_string();
                assert!(error.contains(part), "{error}");
            }
        }
    }

    #[test]
    fn files_of_another_kind_and_truncated_ones_are_refused() {
        let sums = ("a.in_sum2", [8, 1], [1.0; 8].as_slice());
        let counts = ("a.counts", [1, 1], [1.0].as_slice());
        let whole = gguf("imatrix", &[sums, counts]);
        assert!(open(&whole).is_ok());
        // One entry named "output", as llama-imatrix wrote it before GGUF.
        let old = [&1i32.to_le_bytes()[..], &6i32.to_le_bytes(), b"output"].concat();
        for (bytes, part) in [
            (gguf("model", &[sums, counts]), "general.type: found 'model', expected 'imatrix'"),
            (gguf("imatrix", &[sums]), "'a.counts': found none"),
            (gguf("imatrix", &[counts]), "'<weight>.in_sum2': found none"),
            (gguf("imatrix", &[]), "found none"),
            (old, "convert an importance matrix of the old format: llama-imatrix --in-file "),
            (b"a text file".to_vec(), "-o imatrix.gguf"),
        ] {
            let message = open(&bytes).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
        assert!(Imatrix::open(&std::env::temp_dir()).unwrap_err().to_string().contains("expected a regular file"));
        // Padding of the last tensor is not needed.
        for len in 0..whole.len() - 28 {
            match open(&whole[..len]).unwrap_err() {
                ImatrixError::NotGguf { .. } => assert!(len < 4, "{len} bytes"),
                error => assert!(len >= 4 && matches!(error, ImatrixError::Gguf(_)), "{len} bytes: {error}"),
            }
        }
    }
}
