//! Which slot holds which expert of one layer.

/// A layer's share of its pool: slots `first..first + capacity`, filled in order, then reused by eviction.
#[derive(Clone, Debug)]
pub(super) struct LayerResidency {
    pub(super) pool: u16,
    pub(super) first: u32,
    pub(super) capacity: u32,
    n_filled: u32,
    slot_of: Vec<Option<u32>>,
}

impl LayerResidency {
    pub(super) fn new(pool: u16, first: u32, capacity: u32, n_expert: u16) -> Self {
        Self { pool, first, capacity, n_filled: 0, slot_of: vec![None; usize::from(n_expert)] }
    }

    /// The slot of the layer's expert `index`. `None` too for an index the layer does not have.
    pub(super) fn slot_of(&self, index: u16) -> Option<u32> {
        self.slot_of.get(usize::from(index)).copied().flatten()
    }

    /// The occupied slots.
    pub(super) fn filled(&self) -> std::ops::Range<u32> {
        self.first..self.first + self.n_filled
    }

    /// Whether a slot is left that nobody has used yet.
    pub(super) fn has_empty(&self) -> bool {
        self.n_filled < self.capacity
    }

    /// The next slot nobody has used yet.
    pub(super) fn take_empty(&mut self) -> Option<u32> {
        (self.n_filled < self.capacity).then(|| {
            self.n_filled += 1;
            self.first + self.n_filled - 1
        })
    }

    pub(super) fn insert(&mut self, index: u16, slot: u32) {
        let entry = &mut self.slot_of[usize::from(index)];
        assert!(entry.is_none(), "expert {index} already has slot {entry:?}");
        *entry = Some(slot);
    }

    pub(super) fn remove(&mut self, index: u16) {
        let slot = self.slot_of[usize::from(index)].take();
        assert!(slot.is_some(), "expert {index} was not resident");
    }
}
