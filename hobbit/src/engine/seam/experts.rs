//! State shared by one loaded model's expert tensors, sessions and backends.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ggml_sys::llama::ggml_tensor;

use crate::engine::ggml;
use crate::engine::memory::tiers::Tiers;
use crate::engine::source::tables::Tables;
use hobbit_core::expert::SliceKind;
use hobbit_core::gguf::{ExpertMap, ExpertTensor};

/// Written into `ggml_tensor::extra` of a tensor in an expert buffer.
pub(crate) enum Tag {
    Expert(ExpertTag),
    Table(TableTag),
    /// No graph uses the tensor.
    Idle,
}

/// The tag of an expert tensor.
pub(crate) struct ExpertTag {
    /// Layer number (llama.cpp's block).
    pub(crate) layer: u16,
    /// The matrix.
    pub(crate) kind: SliceKind,
    /// The model of the tensor.
    pub(crate) experts: Arc<Experts>,
}

/// Written into `ggml_tensor::extra` of a table.
pub(crate) struct TableTag {
    /// Index among the model's tables.
    pub(crate) table: usize,
    /// The model of the table.
    pub(crate) experts: Arc<Experts>,
}

/// Ids or weights of a layer's router, four bytes each, `[n_tokens][n_used]`, in llama.cpp's memory until the ubatch is
/// done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouterValues {
    tensor: *const ggml_tensor,
    data: *mut u8,
    pub(crate) n_used: usize,
    pub(crate) n_tokens: usize,
    /// Strides of ranks and of tokens, in bytes.
    strides: [usize; 2],
}

impl RouterValues {
    /// The values of a tensor whose dimension `d` counts ranks and `d + 1` tokens; it may be a strided view, such as an
    /// argsort's.
    pub(crate) fn of(tensor: &ggml_tensor, d: usize) -> Self {
        Self {
            tensor,
            data: tensor.data.cast(),
            n_used: tensor.ne[d].max(0) as usize,
            n_tokens: tensor.ne[d + 1].max(0) as usize,
            strides: [tensor.nb[d], tensor.nb[d + 1]],
        }
    }

    /// An expert product's weights in a copy of the tensor, in host memory.
    pub(crate) fn of_copy(tensor: &ggml_tensor, data: *mut u8, d: usize) -> Self {
        Self { data, ..Self::of(tensor, d) }
    }

    /// The tensor of the values.
    pub(crate) fn tensor(&self) -> *mut ggml_tensor {
        self.tensor.cast_mut()
    }

    /// Address of a token's value at a rank.
    ///
    /// # Safety
    /// The ubatch is being computed in host memory, and `token` and `rank` are among its tokens and ranks.
    pub(crate) unsafe fn at<T>(&self, token: usize, rank: usize) -> *mut T {
        let [of_rank, of_token] = self.strides;
        // SAFETY: by the caller.
        unsafe { self.data.add(token * of_token + rank * of_rank).cast() }
    }

    /// All values.
    ///
    /// # Safety
    /// The ubatch is being computed in host memory for as long as the iterator lives, and values are of type `T`.
    pub(crate) unsafe fn read<T: Copy>(self) -> impl Iterator<Item = T> {
        (0..self.n_tokens).flat_map(move |token| {
            // SAFETY: by the caller.
            (0..self.n_used).map(move |rank| unsafe { self.at::<T>(token, rank).read_unaligned() })
        })
    }
}

/// The experts of one model, and its tables that stay in the files as they do.
pub(crate) struct Experts {
    map: ExpertMap,
    tables: Tables,
    /// Tensors of `map` that llama.cpp created, known once it has loaded the model.
    placed: OnceLock<ExpertMap>,
    placed_names: Mutex<HashSet<String>>,
    /// Layers of the CPU that a device computes in large batches.
    offloaded: BTreeMap<u16, ggml::Device>,
    memories: Mutex<Option<Tiers>>,
}

impl Experts {
    pub(crate) fn new(map: ExpertMap, tables: Tables, offloaded: BTreeMap<u16, ggml::Device>) -> Self {
        Self {
            map,
            tables,
            placed: OnceLock::new(),
            placed_names: Mutex::default(),
            offloaded,
            memories: Mutex::default(),
        }
    }

    /// Whether a device computes a layer of the CPU in large batches.
    pub(crate) fn is_offloaded(&self, layer: u16, device: ggml::Device) -> bool {
        self.offloaded.get(&layer) == Some(&device)
    }

    /// Locations of the experts in the files. After loading, without the tensors that llama.cpp left out, and without
    /// the layers for multi-token prediction, which plain decoding never runs.
    pub(crate) fn map(&self) -> &ExpertMap {
        self.placed.get().unwrap_or(&self.map)
    }

    pub(crate) fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Loading has ended: experts that were not placed are not served, nor those from the layer `n_layer` on, which do
    /// not run.
    pub(crate) fn loaded(&self, n_layer: i32) {
        let names = self.placed_names.lock().unwrap_or_else(PoisonError::into_inner);
        let mut map = self.map.clone();
        for layer in &mut map.layers {
            layer.tensors.retain(|tensor| names.contains(&tensor.name));
        }
        map.layers.retain(|layer| !layer.tensors.is_empty() && i32::from(layer.layer) < n_layer);
        self.placed.get_or_init(|| map);
    }

    /// The tag of the expert tensor or table called `name`, which llama.cpp has just placed; `None` for any other name.
    pub(crate) fn tag(self: &Arc<Self>, name: &str) -> Option<Tag> {
        if let Some(table) = self.tables.find(name) {
            return Some(Tag::Table(TableTag { table, experts: Arc::clone(self) }));
        }
        if self.tables.contains(name) {
            return Some(Tag::Idle);
        }
        let mut tensors =
            self.map.layers.iter().flat_map(|layer| layer.tensors.iter().map(|tensor| (layer.layer, tensor)));
        let (layer, ExpertTensor { kind, .. }) = tensors.find(|(_, tensor)| tensor.name == name)?;
        self.placed_names.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
        Some(Tag::Expert(ExpertTag { layer, kind: *kind, experts: Arc::clone(self) }))
    }

    /// The model's memories; `None` before the first session. The lock is held during one expert split.
    pub(crate) fn memories(&self) -> MutexGuard<'_, Option<Tiers>> {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
