//! What one loaded model's expert tensors, sessions and backends share.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

use super::residency::Residency;
use crate::expert::SliceKind;
use crate::gguf::ExpertMap;

/// Written into `ggml_tensor::extra` of an expert tensor.
pub(super) struct ExpertTag {
    /// Block number.
    pub(super) layer: u16,
    /// Which matrix.
    pub(super) kind: SliceKind,
    /// The model it belongs to.
    pub(super) experts: Arc<Experts>,
}

/// The experts of one model.
pub(super) struct Experts {
    map: ExpertMap,
    /// Those of `map` that llama.cpp created, known once it has loaded the model.
    placed: OnceLock<ExpertMap>,
    placed_names: Mutex<HashSet<String>>,
    names: HashMap<String, (u16, SliceKind)>,
    residency: Mutex<Option<Residency>>,
    /// By the thread that evaluates: sessions of one model may run side by side.
    failures: Mutex<HashMap<ThreadId, String>>,
}

impl Experts {
    pub(super) fn new(map: ExpertMap) -> Self {
        let names = map
            .layers
            .iter()
            .flat_map(|layer| layer.tensors.iter().map(|tensor| (tensor.name.clone(), (layer.layer, tensor.kind))))
            .collect();
        Self {
            map,
            placed: OnceLock::new(),
            placed_names: Mutex::default(),
            names,
            residency: Mutex::new(None),
            failures: Mutex::default(),
        }
    }

    /// Where the experts lie in the files. After loading, without the tensors that llama.cpp left out (layers for
    /// multi-token prediction, say).
    pub(super) fn map(&self) -> &ExpertMap {
        self.placed.get().unwrap_or(&self.map)
    }

    /// Loading has ended: experts that were never placed are not served.
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
        let &(layer, kind) = self.names.get(name)?;
        self.placed_names.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
        Some(ExpertTag { layer, kind, experts: Arc::clone(self) })
    }

    /// Cache, loader and counters; `None` before the first session. Held for the length of one expert split.
    pub(super) fn residency(&self) -> MutexGuard<'_, Option<Residency>> {
        self.residency.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes why the batch that this thread evaluates cannot be right. The first reason is kept.
    pub(super) fn fail(&self, reason: impl Into<String>) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.entry(thread::current().id()).or_insert_with(|| reason.into());
    }

    /// Takes the reason noted by this thread.
    pub(super) fn take_failure(&self) -> Option<String> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).remove(&thread::current().id())
    }
}
