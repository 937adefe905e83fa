//! Model files: headers, tensor extents, split models, which bytes are experts, and the virtual file.
//!
//! [`Gguf::open`] reads and checks the header(s) of a model; [`Gguf::experts`] finds the experts;
//! [`Gguf::virtual_file`] is the model as the one GGUF file that llama.cpp is given to read. [`HeaderBuilder`] writes.
//!
//! Only little-endian GGUF versions 2 and 3 are read. No length or offset in a file is trusted: see [`header`].

pub mod adapter;
pub mod catalog;
pub mod dtype;
pub mod experts;
pub mod header;
mod layers;
pub mod metadata;
pub mod recode;
mod split;
pub mod value;
pub mod virtual_file;
mod window;
pub mod writer;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

pub use catalog::{Catalog, ExpertClass, LayerCatalog, LowMismatch, SliceShape, SliceSource, Stored, VersionSource};
pub use dtype::GgmlType;
pub use experts::{ExpertMap, ExpertTensor, LayerExperts};
pub use header::Header;
pub use metadata::Metadata;
pub use recode::{Recode, RecodeError};
pub use split::shards_by_name;
pub use value::{Value, ValueType};
pub use virtual_file::{Piece, Segment, VirtualGguf};
pub use writer::{HeaderBuilder, WriteError};

use crate::expert::Extent;
use crate::files::FileState;
use crate::files::outputs::is_device;
use split::ShardName;

/// One of the files a model consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    pub path: PathBuf,
    /// Length in bytes when the header was read.
    pub len: u64,
    /// State when the header was read, which tells whether the file has changed since.
    pub state: FileState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    pub dtype: GgmlType,
    /// Shape, fastest first; 1 to 4 entries.
    pub dims: Vec<u64>,
    /// Where its bytes lie. Checked to be inside the file.
    pub extent: Extent,
}

/// A model: one GGUF file, or all shards of a split one.
#[derive(Debug)]
pub struct Gguf {
    /// Source files; a split model's shards in order.
    pub files: Vec<SourceFile>,
    /// All tensors in file order. Names are unique.
    pub tensors: Vec<TensorInfo>,
    /// Alignment of tensor data in bytes.
    pub alignment: u64,
    /// Header of the first file, as stored, without the padding before the data.
    pub header_bytes: Vec<u8>,
    /// GGUF version, 2 or 3.
    pub version: u32,
    /// One file whose tensors follow each other as llama.cpp demands, so that it can be read as it is stored.
    pub is_contiguous: bool,
    /// Key-value pairs; of a split model, the first shard's.
    pub metadata: Metadata,
    /// Indices into `tensors`, by name.
    by_name: Vec<u32>,
    /// Set in a pack, where tensors lie outside of their header's offsets.
    views: Option<Box<Views>>,
}

/// Views of a pack, which header and extents do not give.
#[derive(Debug)]
struct Views {
    /// The file that the header describes.
    stored: VirtualGguf,
    /// The file in the form that llama.cpp accepts.
    shown: VirtualGguf,
}

impl Gguf {
    /// Reads the headers of the model at `path`; of a split model, `path` is any shard.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        Self::open_as(path, Extents::InsideFile)
    }

    /// As [`Gguf::open`], of files whose headers are whole and whose data end early, such as the first megabytes of a
    /// download. Such a model can be inspected, not run: [`TensorInfo::extent`] may lie beyond the end of its file, and
    /// [`Gguf::missing_bytes`] counts the bytes beyond it.
    pub fn open_partial(path: &Path) -> Result<Self, GgufError> {
        Self::open_as(path, Extents::Anywhere)
    }

    fn open_as(path: &Path, extents: Extents) -> Result<Self, GgufError> {
        let (file, header) = open_header(path, extents)?;
        let metadata = Metadata::decode(&header, path)?;
        let count = metadata.get_u64("split.count").unwrap_or(1);
        if count <= 1 {
            return Self::assemble(vec![(file, header)], metadata);
        }
        drop((file, header));
        Self::open_shards(path, count, extents)
    }

    fn open_shards(path: &Path, count: u64, extents: Extents) -> Result<Self, GgufError> {
        let mismatch = |path: &Path, what, found: String, expected: String| {
            let remedy = "the shards come from different splits or were renamed, fetch them again";
            Err(GgufError::Malformed { path: path.to_owned(), what: String::from(what), found, expected, remedy })
        };
        let Some(name) = ShardName::parse(path).filter(|n| u64::from(n.count) == count) else {
            let found = path.file_name().unwrap_or_default().display().to_string();
            return mismatch(path, "file name of a shard", found, format!("<model>-<number>-of-{count:05}.gguf"));
        };
        let mut shards = Vec::new();
        let mut metadata = None;
        let mut n_tensors = 0;
        for number in 1..=name.count {
            let shard = name.path(number, path);
            if !shard.exists() {
                let (count, shard) = (name.count, shard.display());
                let reason = format!(
                    "shard {number} of {count} is missing, looked for {shard}; fetch it into the same directory, under \
                     that name"
                );
                return Err(GgufError::refused(path, reason));
            }
            let (file, mut header) = open_header(&shard, extents)?;
            let own = Metadata::decode(&header, &shard)?;
            for (key, expected) in [("split.no", u64::from(number) - 1), ("split.count", count)] {
                let found = own.get_u64(key);
                if found != Some(expected) {
                    let found = found.map_or("none".to_owned(), |n| n.to_string());
                    return mismatch(&shard, key, found, expected.to_string());
                }
            }
            n_tensors += header.tensors.len() as u64;
            if n_tensors > header::TENSORS_MAX {
                let what = "number of tensors in all shards up to this one";
                return Err(GgufError::too_large(&shard, what, n_tensors, header::TENSORS_MAX));
            }
            if metadata.is_some() {
                header.bytes = Vec::new();
                header.kv = Vec::new();
            }
            metadata.get_or_insert(own);
            shards.push((file, header));
        }
        let metadata = metadata.expect("a shard name's count is at least 1");
        let declared = metadata.get_u64("split.tensors.count").unwrap_or(n_tensors);
        if declared != n_tensors {
            return mismatch(path, "tensors in all shards", n_tensors.to_string(), declared.to_string());
        }
        Self::assemble(shards, metadata)
    }

    fn assemble(shards: Vec<(SourceFile, Header)>, metadata: Metadata) -> Result<Self, GgufError> {
        let is_contiguous = shards.len() == 1 && shards[0].1.is_contiguous();
        let (version, alignment) = (shards[0].1.version, shards[0].1.alignment);
        let (mut files, mut tensors, mut header_bytes) = (Vec::new(), Vec::<TensorInfo>::new(), None);
        for (index, (file, header)) in shards.into_iter().enumerate() {
            files.push(file);
            header_bytes.get_or_insert(header.bytes);
            tensors.extend(header.tensors.into_iter().map(|mut tensor| {
                tensor.extent.file = index as u32;
                tensor
            }));
        }
        let mut by_name: Vec<u32> = (0..tensors.len() as u32).collect();
        by_name.sort_by_key(|i| tensors[*i as usize].name.as_str());
        if let Some(twice) = by_name.windows(2).find(|w| tensors[w[0] as usize].name == tensors[w[1] as usize].name) {
            let (first, second) = (&tensors[twice[0] as usize], &tensors[twice[1] as usize]);
            let [first_file, file] = [first, second].map(|tensor| &files[tensor.extent.file as usize].path);
            return Err(occurs_twice(file, &second.name, first_file));
        }
        // The virtual file's length must be a file offset too, padding included.
        let padded =
            tensors.iter().try_fold(1u64 << 40, |sum, t| sum.checked_add(t.extent.len)?.checked_add(alignment));
        if padded.is_none_or(|sum| i64::try_from(sum).is_err()) {
            let (what, found) = ("length of all tensors, in bytes,", padded.unwrap_or(u64::MAX));
            return Err(GgufError::too_large(&files[0].path, what, found, i64::MAX as u64));
        }
        let header_bytes = header_bytes.unwrap_or_default();
        Ok(Self { files, tensors, alignment, header_bytes, version, is_contiguous, metadata, by_name, views: None })
    }

    /// A model whose tensors lie elsewhere than its header says, all in `file`: `place` gives each its first byte,
    /// `stored` is the file that the header describes.
    pub(crate) fn relocated(
        file: SourceFile,
        mut header: Header,
        metadata: Metadata,
        stored: VirtualGguf,
        mut place: impl FnMut(&TensorInfo) -> u64,
    ) -> Result<Self, GgufError> {
        let contiguous = header.is_contiguous();
        for tensor in &mut header.tensors {
            tensor.extent.offset = place(tensor);
        }
        let mut gguf = Self::assemble(vec![(file, header)], metadata)?;
        let shown = if contiguous { stored.clone() } else { gguf.merged().without_experts() };
        gguf.views = Some(Box::new(Views { stored, shown }));
        Ok(gguf)
    }

    /// Copies the keys that `keep` wants, values as stored. `general.alignment` is passed over, it is `header`'s own.
    ///
    /// # Errors
    /// [`WriteError::Name`] if `header` has one of the keys already.
    pub fn copy_keys(&self, header: &mut HeaderBuilder, keep: impl Fn(&str) -> bool) -> Result<(), WriteError> {
        let mut kept = self.metadata.entries.iter().filter(|entry| keep(&entry.key));
        kept.try_for_each(|entry| header.raw_pair(&entry.key, &self.header_bytes[entry.pair.clone()]))
    }

    /// Reads a header held in memory: `bytes` are the start of a file of `file_len` bytes, `name` is for messages.
    /// For fuzzing and for headers that do not come from a file system.
    ///
    /// # Errors
    /// As [`Gguf::open`]; [`GgufError::Truncated`] also if `bytes` ends inside the header.
    pub fn parse_header(bytes: &[u8], file_len: u64, name: &Path) -> Result<(Header, Metadata), GgufError> {
        let header = Header::read(bytes, file_len, name)?;
        let metadata = Metadata::decode(&header, name)?;
        Ok((header, metadata))
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let found = self.by_name.binary_search_by_key(&name, |i| self.tensors[*i as usize].name.as_str());
        found.ok().map(|i| &self.tensors[self.by_name[i] as usize])
    }

    /// `general.architecture`, or `"unknown"`.
    pub fn architecture(&self) -> &str {
        self.metadata.get_str("general.architecture").unwrap_or("unknown")
    }

    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|f| f.len).sum()
    }

    /// Bytes that the files lack up to the end of their last tensors; 0 unless this was [`Gguf::open_partial`].
    pub fn missing_bytes(&self) -> u64 {
        let mut ends: Vec<u64> = self.files.iter().map(|file| file.len).collect();
        for tensor in &self.tensors {
            let end = &mut ends[tensor.extent.file as usize];
            *end = (*end).max(tensor.extent.end());
        }
        ends.iter().zip(&self.files).map(|(end, file)| end - file.len).fold(0, u64::saturating_add)
    }

    /// Embedding tables of which graphs read single rows: those per layer, and the tokens' if it is not the output
    /// matrix as well.
    pub fn row_tables(&self) -> impl Iterator<Item = &TensorInfo> {
        let is_tied = self.tensor("output.weight").is_none();
        let tokens = (!is_tied).then_some("token_embd.weight");
        tokens.into_iter().chain(["per_layer_token_embd.weight"]).filter_map(|name| self.tensor(name))
    }

    /// Bytes of all tensors, without headers and padding.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.extent.len).sum()
    }
}

/// Where tensors may lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extents {
    InsideFile,
    /// Beyond its end as well.
    Anywhere,
}

fn occurs_twice(path: &Path, tensor: &str, first: &Path) -> GgufError {
    let (first, remedy) = (first.display(), "names must be unique, fetch or convert the model again");
    GgufError::refused(path, format!("tensor '{tensor}' occurs twice, first in {first}; {remedy}"))
}

/// The refusal of a directory, with the file to name instead.
fn directory(path: &Path) -> String {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort_unstable();
    let first = |extension: &str| files.iter().find(|path| path.extension().is_some_and(|found| found == extension));
    if let Some(file) = first("gguf") {
        format!("is a directory, expected a .gguf file; name the file inside it, such as {}", file.display())
    } else if first("safetensors").is_some() {
        "is a directory of safetensors, expected a .gguf file; fetch the model as GGUF, or convert it with llama.cpp's \
         convert_hf_to_gguf.py"
            .to_owned()
    } else {
        "is a directory without a .gguf file; check the path".to_owned()
    }
}

fn open_header(path: &Path, extents: Extents) -> Result<(SourceFile, Header), GgufError> {
    let io = |action: &str| {
        let action = action.to_owned();
        move |error| GgufError::Io { path: path.to_owned(), action, error }
    };
    let irregular = || {
        let reason = "is not a regular file; experts are read at random offsets, copy the model to a disk first";
        Err(GgufError::refused(path, reason))
    };
    if is_device(path) {
        return irregular();
    }
    // Before opening: opening a pipe would wait for a writer.
    let kind = std::fs::metadata(path).map_err(io("open"))?;
    if kind.is_dir() {
        return Err(GgufError::refused(path, directory(path)));
    }
    if !kind.is_file() {
        return irregular();
    }
    let file = File::open(path).map_err(io("open"))?;
    let state = FileState::of(&file).map_err(io("read the length"))?;
    let len = match extents {
        Extents::InsideFile => state.len,
        // Whatever ends where the file does is then the header.
        Extents::Anywhere if state.len > 0 => i64::MAX as u64,
        Extents::Anywhere => 0,
    };
    let header = Header::read(file, len, path).map_err(|error| match error {
        GgufError::Truncated { path, what, end, len, .. } if extents == Extents::Anywhere => {
            let reason = format!(
                "the {len} bytes that are there end inside the header: {what} needs bytes up to {end}; fetch more of \
                 it, headers with a tokenizer have up to 40 MiB"
            );
            GgufError::Refused { path, reason }
        }
        error => error,
    })?;
    Ok((SourceFile { path: path.to_owned(), len: state.len, state }, header))
}

/// Why a model file was refused.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("{}: cannot {action}: {error}", path.display())]
    Io { path: PathBuf, action: String, error: io::Error },
    #[error("{}: {reason}", path.display())]
    Refused { path: PathBuf, reason: String },
    #[error("{}: truncated: {what} needs bytes {start}..{end}, but the file has {len}; fetch or copy the file again",
        path.display())]
    Truncated { path: PathBuf, what: String, start: u64, end: u64, len: u64 },
    #[error("{}: {what} is {found}, at most {limit} expected; the header is damaged, fetch the file again",
        path.display())]
    TooLarge { path: PathBuf, what: String, found: u64, limit: u64 },
    #[error("{}: {what}: found {found}, expected {expected}; {remedy}", path.display())]
    Malformed { path: PathBuf, what: String, found: String, expected: String, remedy: &'static str },
}

impl GgufError {
    pub(super) fn refused(path: &Path, reason: impl Into<String>) -> Self {
        Self::Refused { path: path.to_owned(), reason: reason.into() }
    }

    pub(super) fn too_large(path: &Path, what: impl Into<String>, found: u64, limit: u64) -> Self {
        Self::TooLarge { path: path.to_owned(), what: what.into(), found, limit }
    }
}

#[cfg(test)]
mod tests;
