//! State shared by one loaded model's expert tensors, sessions and backends.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

use ggml_sys::llama::ggml_tensor;

use super::hierarchy::Hierarchy;
use hobbit_core::expert::SliceKind;
use hobbit_core::gguf::{ExpertMap, ExpertTensor};

/// Written into `ggml_tensor::extra` of an expert tensor.
pub(super) struct ExpertTag {
    /// Layer number (llama.cpp's block).
    pub(super) layer: u16,
    /// The matrix.
    pub(super) kind: SliceKind,
    /// The model of the tensor.
    pub(super) experts: Arc<Experts>,
}

/// Ids or weights of a layer's router, four bytes each, `[n_tokens][n_used]`, in llama.cpp's memory until the ubatch is
/// done.
#[derive(Clone, Copy, Debug)]
pub(super) struct RouterValues {
    tensor: *const ggml_tensor,
    data: *mut u8,
    pub(super) n_used: usize,
    pub(super) n_tokens: usize,
    /// Strides of ranks and of tokens, in bytes.
    strides: [usize; 2],
}

// SAFETY: only an address; each reader argues that the ubatch is still being computed.
unsafe impl Send for RouterValues {}

impl RouterValues {
    /// The values of a tensor whose dimension `d` counts ranks and `d + 1` tokens; it may be a strided view, such as an
    /// argsort's.
    pub(super) fn of(tensor: &ggml_tensor, d: usize) -> Self {
        Self {
            tensor,
            data: tensor.data.cast(),
            n_used: tensor.ne[d].max(0) as usize,
            n_tokens: tensor.ne[d + 1].max(0) as usize,
            strides: [tensor.nb[d], tensor.nb[d + 1]],
        }
    }

    /// The same of a copy of the tensor's bytes in host memory.
    pub(super) fn of_copy(tensor: &ggml_tensor, bytes: &mut [u8], d: usize) -> Self {
        Self { data: bytes.as_mut_ptr(), ..Self::of(tensor, d) }
    }

    /// The tensor of the values.
    pub(super) fn tensor(&self) -> *mut ggml_tensor {
        self.tensor.cast_mut()
    }

    /// Address of a token's value at a rank.
    ///
    /// # Safety
    /// The ubatch is being computed in host memory, and `token` and `rank` are among its tokens and ranks.
    pub(super) unsafe fn at<T>(&self, token: usize, rank: usize) -> *mut T {
        let [of_rank, of_token] = self.strides;
        // SAFETY: by the caller.
        unsafe { self.data.add(token * of_token + rank * of_rank).cast() }
    }

    /// All values.
    ///
    /// # Safety
    /// The ubatch is being computed in host memory for as long as the iterator lives, and values are of type `T`.
    pub(super) unsafe fn read<T: Copy>(self) -> impl Iterator<Item = T> {
        (0..self.n_tokens).flat_map(move |token| {
            // SAFETY: by the caller.
            (0..self.n_used).map(move |rank| unsafe { self.at::<T>(token, rank).read_unaligned() })
        })
    }
}

/// The experts of one model.
pub(super) struct Experts {
    map: ExpertMap,
    /// Tensors of `map` that llama.cpp created, known once it has loaded the model.
    placed: OnceLock<ExpertMap>,
    placed_names: Mutex<HashSet<String>>,
    memories: Mutex<Option<Hierarchy>>,
    /// Layer and weights that a router hook saw last, by evaluating thread.
    router_weights: Mutex<HashMap<ThreadId, (u16, RouterValues)>>,
    /// By evaluating thread: sessions of one model may run at the same time.
    failures: Mutex<HashMap<ThreadId, String>>,
}

impl Experts {
    pub(super) fn new(map: ExpertMap) -> Self {
        Self {
            map,
            placed: OnceLock::new(),
            placed_names: Mutex::default(),
            memories: Mutex::default(),
            router_weights: Mutex::default(),
            failures: Mutex::default(),
        }
    }

    /// Locations of the experts in the files. After loading, without the tensors that llama.cpp left out (layers for
    /// multi-token prediction, for example).
    pub(super) fn map(&self) -> &ExpertMap {
        self.placed.get().unwrap_or(&self.map)
    }

    /// Loading has ended: experts that were not placed are not served.
    pub(super) fn loaded(&self) {
        let names = self.placed_names.lock().unwrap_or_else(PoisonError::into_inner);
        let mut map = self.map.clone();
        for layer in &mut map.layers {
            layer.tensors.retain(|tensor| names.contains(&tensor.name));
        }
        map.layers.retain(|layer| !layer.tensors.is_empty());
        self.placed.get_or_init(|| map);
    }

    /// The tag of the expert tensor called `name`, which llama.cpp has just placed; `None` for any other name.
    pub(super) fn tag(self: &Arc<Self>, name: &str) -> Option<ExpertTag> {
        let mut tensors =
            self.map.layers.iter().flat_map(|layer| layer.tensors.iter().map(|tensor| (layer.layer, tensor)));
        let (layer, ExpertTensor { kind, .. }) = tensors.find(|(_, tensor)| tensor.name == name)?;
        self.placed_names.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
        Some(ExpertTag { layer, kind: *kind, experts: Arc::clone(self) })
    }

    /// The model's memories; `None` before the first session. The lock is held during one expert split.
    pub(super) fn memories(&self) -> MutexGuard<'_, Option<Hierarchy>> {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the weights of the layer that this thread computes.
    pub(super) fn set_router_weights(&self, layer: u16, weights: RouterValues) {
        let mut all = self.router_weights.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(thread::current().id(), (layer, weights));
    }

    /// The weights of `layer`, if a router hook saw them last on this thread.
    pub(super) fn router_weights(&self, layer: u16) -> Option<RouterValues> {
        let all = self.router_weights.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&thread::current().id()).filter(|(seen, _)| *seen == layer).map(|(_, weights)| *weights)
    }

    /// A ubatch has ended: its weights are no longer valid.
    pub(super) fn forget_router_weights(&self) {
        let mut all = self.router_weights.lock().unwrap_or_else(PoisonError::into_inner);
        all.remove(&thread::current().id());
    }

    /// Records why the current batch of this thread fails. Keeps the first reason.
    pub(super) fn fail(&self, reason: impl Into<String>) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.entry(thread::current().id()).or_insert_with(|| reason.into());
    }

    /// Takes the reason recorded by this thread.
    pub(super) fn take_failure(&self) -> Option<String> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).remove(&thread::current().id())
    }
}
