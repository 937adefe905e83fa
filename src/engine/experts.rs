//! What one loaded model's expert tensors, sessions and backends share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    names: HashMap<String, (u16, SliceKind)>,
    residency: Mutex<Option<Residency>>,
    failure: Mutex<Option<String>>,
}

impl Experts {
    pub(super) fn new(map: ExpertMap) -> Self {
        let names = map
            .layers
            .iter()
            .flat_map(|layer| layer.tensors.iter().map(|tensor| (tensor.name.clone(), (layer.layer, tensor.kind))))
            .collect();
        Self { map, names, residency: Mutex::new(None), failure: Mutex::new(None) }
    }

    /// Where the experts lie in the files.
    pub(super) fn map(&self) -> &ExpertMap {
        &self.map
    }

    /// The tag of the expert tensor called `name`; `None` for any other name.
    pub(super) fn tag(self: &Arc<Self>, name: &str) -> Option<ExpertTag> {
        let &(layer, kind) = self.names.get(name)?;
        Some(ExpertTag { layer, kind, experts: Arc::clone(self) })
    }

    /// Cache, loader and counters; `None` before the first session. Held for the length of one expert split.
    pub(super) fn residency(&self) -> MutexGuard<'_, Option<Residency>> {
        self.residency.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes why the running batch cannot be right. The first reason is kept.
    pub(super) fn fail(&self, reason: impl Into<String>) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| reason.into());
    }

    /// Takes the noted reason.
    pub(super) fn take_failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
