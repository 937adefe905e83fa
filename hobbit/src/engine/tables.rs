//! Tensors that stay in their files although they are no experts: those of layers that do not run, and embedding
//! tables. Of a table only the rows of each batch's tokens are read.
//!
//! llama.cpp places such a table in the expert buffer type, which has addresses and no memory, and ggml's scheduler
//! sends every `GET_ROWS` on it to the expert backend. Other operations on it fail the batch with the table's name.

use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ggml_sys::llama::{self, ggml_tensor};

use super::experts::{Experts, Tag};
use hobbit_core::gguf::{GgmlType, Gguf, TensorInfo};
use hobbit_core::options::ModelOptions;
use hobbit_core::store::{RowReader, RowTable, Store, StoreError};

/// Written into `ggml_tensor::extra` of a table.
pub(super) struct TableTag {
    /// Index among the model's tables.
    pub(super) table: usize,
    /// The model of the table.
    pub(super) experts: Arc<Experts>,
}

/// A model's tensors that stay in the files, and the reader of its tables.
#[derive(Default)]
pub(super) struct Tables {
    /// The tables, and behind them what no graph uses.
    names: Vec<String>,
    tables: Vec<RowTable>,
    idle_bytes: u64,
    /// Tables that have a row for each token.
    by_token: Vec<usize>,
    /// `None` before the first session.
    reader: Mutex<Option<RowReader>>,
}

impl Tables {
    /// The tables of a model that is loaded at the seam. In memory stay the tied ones, those that a LoRA adapter may
    /// change, and all if an override of the user places embeddings.
    pub(super) fn of(gguf: &Gguf, options: &ModelOptions) -> Self {
        let is_placed = options.device.override_tensors.iter().any(|own| own.pattern.contains("token_embd"));
        let n_tokens = gguf.tensor("token_embd.weight").and_then(|tensor| tensor.dims.get(1));
        let mut new = Self::default();
        for info in gguf.row_tables().filter(|_| !is_placed && options.adapters.lora.is_empty()) {
            let Some(table) = row_table(info) else { continue };
            if info.dims.get(1) == n_tokens {
                new.by_token.push(new.tables.len());
            }
            new.names.push(info.name.clone());
            new.tables.push(table);
        }
        for info in gguf.tensors_from(n_layers_run(gguf, options)) {
            new.names.push(info.name.clone());
            new.idle_bytes = new.idle_bytes.saturating_add(info.extent.len);
        }
        new
    }

    /// Whether a tensor stays in the file.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.names.iter().any(|own| own == name)
    }

    /// The tag of such a tensor of `experts`' model.
    pub(super) fn tag(&self, name: &str, experts: &Arc<Experts>) -> Option<Tag> {
        let table = self.names.iter().position(|own| own == name)?;
        let is_idle = table >= self.tables.len();
        Some(if is_idle { Tag::Idle } else { Tag::Table(TableTag { table, experts: Arc::clone(experts) }) })
    }

    /// Regular expressions for the names: few, because llama.cpp tries each at every tensor of the model.
    pub(super) fn patterns(&self) -> Vec<String> {
        let (tables, idle) = self.names.split_at(self.tables.len());
        let mut layers: Vec<&str> = idle.iter().filter_map(|name| name.split('.').nth(1)).collect();
        layers.sort_unstable();
        layers.dedup();
        let of_layers = (!layers.is_empty()).then(|| format!(r"^blk\.({})\.", layers.join("|")));
        tables.iter().map(|name| format!("^{}$", name.replace('.', r"\."))).chain(of_layers).collect()
    }

    /// Bytes that stay in the files.
    pub(super) fn file_bytes(&self) -> u64 {
        self.tables.iter().map(|table| table.extent.len).fold(self.idle_bytes, u64::saturating_add)
    }

    /// Memory for rows, in bytes.
    pub(super) fn memory_bytes(&self) -> u64 {
        if self.tables.is_empty() { 0 } else { RowReader::memory_bytes(&self.tables) }
    }

    /// Reads rows from `store` from now on.
    ///
    /// # Errors
    /// No memory for rows.
    pub(super) fn open(&self, store: &Arc<dyn Store>) -> Result<(), StoreError> {
        if !self.tables.is_empty() {
            *self.reader() = Some(RowReader::new(Arc::clone(store), self.tables.clone())?);
        }
        Ok(())
    }

    /// Starts reading the rows of a batch's tokens.
    pub(super) fn expect(&self, tokens: &[i32]) {
        if let Some(reader) = self.reader().as_mut() {
            let rows = |&table: &usize| {
                let n_rows = self.tables[table].n_rows;
                let known = tokens.iter().filter_map(|token| u32::try_from(*token).ok());
                known.filter(move |row| u64::from(*row) < n_rows).map(move |row| (table, row))
            };
            reader.expect(self.by_token.iter().flat_map(rows));
        }
    }

    /// Computes a `GET_ROWS` on a table: the same floats as ggml's, by the same functions.
    ///
    /// # Safety
    /// `node` is live and `table` its source's number; its ids are computed and its result allocated, in host memory.
    pub(super) unsafe fn get_rows(&self, node: &ggml_tensor, table: usize) -> Result<(), String> {
        // SAFETY: sources of a live node are live.
        let (weights, ids) = unsafe { (&*node.src[0], &*node.src[1]) };
        let (ne0, n_rows) = (weights.ne[0] as usize, self.tables[table].n_rows);
        // SAFETY: by the caller; ids may be a strided view.
        let id = |at: usize| unsafe { ids.data.cast::<u8>().add(at * ids.nb[0]).cast::<i32>().read_unaligned() };
        let rows = (0..ids.ne[0] as usize).map(id);
        if let Some(wrong) = rows.clone().find(|id| u64::try_from(*id).map_or(true, |id| id >= n_rows)) {
            return Err(format!("{} has no row {wrong}: it has {n_rows}", self.names[table]));
        }
        // SAFETY: an entry of a static table, of a type that `row_table` accepted.
        let to_float = unsafe { (*llama::ggml_get_type_traits(weights.type_)).to_float };
        let take = |at: usize, bytes: &[u8]| {
            // SAFETY: by the caller; the result has a row of `ne0` floats for each id.
            let out =
                unsafe { slice::from_raw_parts_mut(node.data.cast::<u8>().add(at * node.nb[1]).cast::<f32>(), ne0) };
            match to_float.filter(|_| weights.type_ != llama::GGML_TYPE_F32) {
                // SAFETY: `bytes` are a whole row, aligned as in the file's tensor.
                Some(to_float) => unsafe { to_float(bytes.as_ptr().cast(), out.as_mut_ptr(), ne0 as i64) },
                None => out.iter_mut().zip(bytes.as_chunks().0).for_each(|(out, le)| *out = f32::from_le_bytes(*le)),
            }
        };
        let mut reader = self.reader();
        let reader = reader.as_mut().ok_or("no session has opened the model's tables")?;
        reader.read(table, rows.map(|id| id as u32), take).map_err(|error| error.to_string())
    }

    fn reader(&self) -> MutexGuard<'_, Option<RowReader>> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Number of a model's layers that run; `u64::MAX` if the header does not tell, or the caller replaces what it tells.
pub(super) fn n_layers_run(gguf: &Gguf, options: &ModelOptions) -> u64 {
    let keys = ["block_count", "nextn_predict_layers"].map(|key| format!("{}.{key}", gguf.architecture()));
    let is_replaced = options.kv_overrides.iter().any(|chosen| keys.contains(&chosen.key));
    if is_replaced { u64::MAX } else { gguf.n_layers_run() }
}

/// A tensor as a table, if it is one that rows can be read of.
fn row_table(info: &TensorInfo) -> Option<RowTable> {
    let &[ne0, n_rows] = info.dims.as_slice() else { return None };
    // SAFETY: an entry of a static table; the reader of headers knows only types of current llama.cpp.
    let is_decoded = unsafe { (*llama::ggml_get_type_traits(info.dtype.id() as llama::ggml_type)).to_float.is_some() };
    let row_bytes = info.dtype.row_bytes(ne0).filter(|bytes| (1..=RowTable::ROW_BYTES_MAX).contains(bytes))?;
    let is_sound = n_rows > 0 && row_bytes.checked_mul(n_rows) == Some(info.extent.len);
    (is_sound && (is_decoded || info.dtype == GgmlType::F32)).then_some(RowTable { extent: info.extent, n_rows })
}
