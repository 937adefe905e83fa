//! Tensors that stay in their files although they are no experts: those of layers that do not run, and embedding
//! tables. Of a table only the rows of each batch's tokens are read.
//!
//! llama.cpp places such a table in the expert buffer type, which has addresses and no memory, and ggml's scheduler
//! sends every `GET_ROWS` on it to the expert backend. Other operations on it fail the batch with the table's name.
//!
//! Rows are read through the page cache, also where experts bypass it: recent rows stay there as long as the system has
//! room, and the kernel reads a batch's rows at once, from before its graph is built.

use std::fmt::Write;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::slice;

use ggml_sys::llama::{self, ggml_tensor};

use crate::engine::ggml::quantise::Aligned;
use hobbit_core::expert::Extent;
use hobbit_core::files::FileExt;
use hobbit_core::gguf::{GgmlType, Gguf, TensorInfo};
use hobbit_core::options::ModelOptions;
use hobbit_core::store::{Original, StoreError, advise_needed, advise_random};
use hobbit_core::units::Bytes;

/// The longest row that is read by itself, in bytes.
const ROW_BYTES_MAX: u64 = 1 << 20;

/// A table of equal rows.
struct Table {
    name: String,
    extent: Extent,
    n_rows: u64,
    row_bytes: u64,
    /// The table has a row for each token.
    is_by_token: bool,
}

/// A model's tables that stay in the files, and what no graph uses.
#[derive(Default)]
pub(crate) struct Tables {
    all: Vec<Table>,
    /// Names of tensors of layers that do not run.
    idle: Vec<String>,
    idle_bytes: u64,
    /// Layers for multi-token prediction, if they are loaded: all of their experts are in memory.
    mtp: Range<u64>,
    /// The model's files, if there are tables.
    files: Vec<(File, PathBuf)>,
}

impl Tables {
    /// The tables of a model that is loaded at the seam. In memory stay the tied ones, all if a LoRA adapter may change
    /// them, and all if an override of the user places embeddings.
    pub(crate) fn of(gguf: &Gguf, options: &ModelOptions) -> Self {
        let is_placed = options.device.override_tensors.iter().any(|own| own.pattern.contains("token_embd"));
        let n_tokens = gguf.tensor("token_embd.weight").and_then(|tensor| tensor.dims.get(1).copied());
        let all = if is_placed || !options.adapters.lora.is_empty() {
            Vec::new()
        } else {
            gguf.row_tables().filter_map(|info| Table::of(info, n_tokens)).collect()
        };
        let mtp = gguf.mtp_layers().filter(|_| options.mtp).unwrap_or(0..0);
        let idle = || gguf.tensors_from(if mtp.is_empty() { n_layers_run(gguf, options) } else { u64::MAX });
        let idle_bytes = idle().map(|info| info.extent.len).fold(0, u64::saturating_add);
        Self { all, idle: idle().map(|info| info.name.clone()).collect(), idle_bytes, mtp, files: Vec::new() }
    }

    /// Opens the model's files.
    ///
    /// # Errors
    /// A file that was written to.
    pub(crate) fn open(&mut self, files: &[Original]) -> Result<(), StoreError> {
        if !self.all.is_empty() {
            let open = |file: &Original| Ok((file.again()?, file.path.clone()));
            self.files = files.iter().map(open).collect::<Result<_, StoreError>>()?;
            self.files.iter().for_each(|(file, _)| advise_random(file));
        }
        Ok(())
    }

    /// Whether a tensor stays in the file.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.all.iter().any(|table| table.name == name) || self.idle.iter().any(|idle| idle == name)
    }

    /// Layers whose experts are in memory; empty if there are none.
    pub(crate) fn resident_layers(&self) -> Range<u64> {
        self.mtp.clone()
    }

    /// Index of the table called `name`.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.all.iter().position(|table| table.name == name)
    }

    /// Regular expressions for the names: few, because llama.cpp tries each at every tensor of the model.
    pub(crate) fn patterns(&self) -> Vec<String> {
        let mut layers: Vec<&str> = self.idle.iter().filter_map(|name| name.split('.').nth(1)).collect();
        layers.sort_unstable();
        layers.dedup();
        let of_layers = (!layers.is_empty()).then(|| format!(r"^blk\.({})\.", layers.join("|")));
        let of_table = |table: &Table| format!("^{}$", table.name.replace('.', r"\."));
        self.all.iter().map(of_table).chain(of_layers).collect()
    }

    /// Bytes that stay in the files.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.all.iter().map(|table| table.extent.len).fold(self.idle_bytes, u64::saturating_add)
    }

    /// Bytes of the tables of layers that run.
    pub(crate) fn row_bytes(&self) -> u64 {
        self.file_bytes() - self.idle_bytes
    }

    /// A remark on what stays in the files; empty if nothing does.
    pub(crate) fn describe(&self) -> String {
        let embeddings = self.row_bytes();
        let mut text = String::new();
        if embeddings > 0 {
            let _ = write!(text, "; {} of embeddings stay in the file and are read by row", Bytes(embeddings));
        }
        if self.idle_bytes > 0 {
            let _ = write!(text, "; {} for multi-token prediction are not loaded", Bytes(self.idle_bytes));
        }
        text
    }

    /// Has the kernel read the rows of a batch's tokens, which its graph will need.
    pub(crate) fn expect(&self, tokens: &[i32]) {
        for table in self.all.iter().filter(|table| table.is_by_token) {
            tokens.iter().filter_map(|token| table.row(*token)).for_each(|row| self.advise(row));
        }
    }

    fn advise(&self, row: Extent) {
        advise_needed(&self.files[row.file as usize].0, row.offset, row.len);
    }

    /// Computes a `GET_ROWS` on a table: the same floats as ggml's, by the same functions.
    ///
    /// # Safety
    /// `node` is live and `table` its source's number; its ids are computed and its result allocated, in host memory.
    pub(crate) unsafe fn get_rows(&self, node: &ggml_tensor, table: usize) -> Result<(), String> {
        // SAFETY: sources of a live node are live.
        let (weights, ids) = unsafe { (&*node.src[0], &*node.src[1]) };
        let (ne0, own) = (weights.ne[0] as usize, &self.all[table]);
        // SAFETY: by the caller; ids may be a strided view.
        let id = |at: usize| unsafe { ids.data.cast::<u8>().add(at * ids.nb[0]).cast::<i32>().read_unaligned() };
        let n = ids.ne[0] as usize;
        if let Some(wrong) = (0..n).map(id).find(|id| own.row(*id).is_none()) {
            return Err(format!("{} has no row {wrong}: it has {}", own.name, own.n_rows));
        }
        let rows = (0..n).filter_map(|at| own.row(id(at)));
        if !own.is_by_token {
            rows.clone().for_each(|row| self.advise(row));
        }
        // SAFETY: an entry of a static table, of a type that `Table::of` accepted.
        let to_float = unsafe { (*llama::ggml_get_type_traits(weights.type_)).to_float };
        let mut row_bytes = Aligned::default();
        let bytes = row_bytes.bytes(own.row_bytes as usize);
        for (at, row) in rows.enumerate() {
            self.read(row, bytes).map_err(|error| error.to_string())?;
            // SAFETY: by the caller; the result has a row of `ne0` floats for each id.
            let out =
                unsafe { slice::from_raw_parts_mut(node.data.cast::<u8>().add(at * node.nb[1]).cast::<f32>(), ne0) };
            match to_float.filter(|_| weights.type_ != llama::GGML_TYPE_F32) {
                // SAFETY: `bytes` are a whole row, aligned for every type of block.
                Some(to_float) => unsafe { to_float(bytes.as_ptr().cast(), out.as_mut_ptr(), ne0 as i64) },
                None => out.iter_mut().zip(bytes.as_chunks().0).for_each(|(out, le)| *out = f32::from_le_bytes(*le)),
            }
        }
        Ok(())
    }

    fn read(&self, Extent { file, offset, len }: Extent, bytes: &mut [u8]) -> Result<(), StoreError> {
        let (file, path) = &self.files[file as usize];
        file.read_exact_at(bytes, offset).map_err(|source| {
            let path = path.clone();
            match (source.kind(), file.metadata()) {
                (io::ErrorKind::UnexpectedEof, Ok(now)) => {
                    StoreError::Shrank { path, offset, len, file_len: now.len() }
                }
                _ => StoreError::Read { path, offset, len, source },
            }
        })
    }
}

/// Number of a model's layers that run; `u64::MAX` if the header does not tell, or the caller replaces what it tells.
pub(crate) fn n_layers_run(gguf: &Gguf, options: &ModelOptions) -> u64 {
    let keys = ["block_count", "nextn_predict_layers"].map(|key| format!("{}.{key}", gguf.architecture()));
    let is_replaced = options.kv_overrides.iter().any(|chosen| keys.contains(&chosen.key));
    if is_replaced { u64::MAX } else { gguf.n_layers_run() }
}

impl Table {
    /// `None` for a tensor of which rows cannot be read.
    fn of(info: &TensorInfo, n_tokens: Option<u64>) -> Option<Self> {
        let &[ne0, n_rows] = info.dims.as_slice() else { return None };
        // SAFETY: an entry of a static table; the reader of headers knows only types of current llama.cpp.
        let is_decoded =
            unsafe { (*llama::ggml_get_type_traits(info.dtype.id() as llama::ggml_type)).to_float.is_some() };
        let row_bytes = info.dtype.row_bytes(ne0).filter(|bytes| (1..=ROW_BYTES_MAX).contains(bytes))?;
        let is_sound = row_bytes.checked_mul(n_rows) == Some(info.extent.len);
        let (name, extent, is_by_token) = (info.name.clone(), info.extent, Some(n_rows) == n_tokens);
        let table = Self { name, extent, n_rows, row_bytes, is_by_token };
        (is_sound && (is_decoded || info.dtype == GgmlType::F32)).then_some(table)
    }

    fn row(&self, row: i32) -> Option<Extent> {
        let row = u64::try_from(row).ok().filter(|row| *row < self.n_rows)?;
        Some(Extent { offset: self.extent.offset + row * self.row_bytes, len: self.row_bytes, ..self.extent })
    }
}
