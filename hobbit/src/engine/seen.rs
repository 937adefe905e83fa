//! Which expert tensors' products have come to us: all of them must, or the model is not computed as it should be.

use crate::expert::SliceKind;
use crate::gguf::Catalog;

/// By block: its matrices, their tensors, and whether their products have come.
pub(super) struct Seen(Vec<Vec<(SliceKind, String, bool)>>);

impl Seen {
    /// Nothing has come.
    pub(super) fn of(catalog: &Catalog) -> Self {
        let n_blocks = catalog.layers.last().map_or(0, |layer| usize::from(layer.layer) + 1);
        let mut seen: Vec<Vec<_>> = vec![Vec::new(); n_blocks];
        for layer in &catalog.layers {
            let class = &catalog.classes[usize::from(layer.high[0].class)];
            let name = |kind: SliceKind| format!("blk.{}.{}.weight", layer.layer, kind.tensor_stem());
            let kinds = class.slices.iter().map(|slice| slice.kind);
            seen[usize::from(layer.layer)].extend(kinds.map(|kind| (kind, name(kind), false)));
        }
        Self(seen)
    }

    /// A product of this tensor has come.
    pub(super) fn mark(&mut self, layer: u16, kind: SliceKind) {
        let tensors = self.0.get_mut(usize::from(layer));
        if let Some((.., seen)) = tensors.and_then(|own| own.iter_mut().find(|(known, ..)| *known == kind)) {
            *seen = true;
        }
    }

    /// Names of tensors whose products have not.
    pub(super) fn missing(&self) -> Vec<String> {
        let tensors = self.0.iter().flatten();
        tensors.filter(|(.., seen)| !seen).map(|(_, name, _)| name.clone()).collect()
    }
}
