//! A table by layer and expert that grows with what is put in.

use crate::expert::ExpertId;

/// One `T` per expert; those never written are `T::default()`.
#[derive(Clone, Debug)]
pub(super) struct ByExpert<T> {
    layers: Vec<Vec<T>>,
}

impl<T> Default for ByExpert<T> {
    fn default() -> Self {
        Self { layers: Vec::new() }
    }
}

impl<T: Clone + Default> ByExpert<T> {
    /// The expert's entry; `None` if it lies beyond all that were written.
    pub(super) fn get(&self, expert: ExpertId) -> Option<&T> {
        self.layer(expert.layer).get(usize::from(expert.index))
    }

    pub(super) fn get_mut(&mut self, expert: ExpertId) -> Option<&mut T> {
        self.layers.get_mut(usize::from(expert.layer))?.get_mut(usize::from(expert.index))
    }

    /// The expert's entry, to write, made if need be.
    pub(super) fn entry(&mut self, expert: ExpertId) -> &mut T {
        let (layer, index) = (usize::from(expert.layer), usize::from(expert.index));
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, Vec::new());
        }
        let experts = &mut self.layers[layer];
        if experts.len() <= index {
            experts.resize(index + 1, T::default());
        }
        &mut experts[index]
    }

    /// The entries of a layer by expert index, as far as they were written.
    pub(super) fn layer(&self, layer: u16) -> &[T] {
        self.layers.get(usize::from(layer)).map_or(&[], Vec::as_slice)
    }

    pub(super) fn layers(&self) -> &[Vec<T>] {
        &self.layers
    }

    pub(super) fn of_layers(layers: Vec<Vec<T>>) -> Self {
        Self { layers }
    }

    pub(super) fn clear(&mut self) {
        self.layers.clear();
    }
}
