//! The layers with experts: which versions there are, how many bytes they have, and whose slots each may take.

use super::interfaces::{Asked, Target};
use crate::cache::{Cache, ShareId, SlotId};
use crate::expert::{ExpertId, Precision, SliceId, SliceKind, Version};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Block number.
    pub layer: u16,
    pub n_expert: u16,
    /// The matrices of its experts, in load order.
    pub kinds: Vec<SliceKind>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VersionBytes {
    /// By [`SliceKind::index`]; 0 for matrices that there are not.
    pub slices: [u64; SliceKind::COUNT],
    /// Bytes of one read for the whole slot, if the file lays the version out like a slot.
    pub record: Option<u64>,
    /// Bytes of a high version that its low version lacks, if that is part of it.
    pub rest: Option<RestBytes>,
}

/// Bytes of what a low version lacks of the high one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestBytes {
    /// By [`SliceKind::index`].
    pub slices: [u64; SliceKind::COUNT],
    /// Bytes of one read for all of it, if it is together in the file.
    pub record: Option<u64>,
}

/// A layer's part of a pool of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShare {
    pub id: ShareId,
    /// Counted in the pool.
    pub first_slot: u32,
    pub n_slots: u32,
    /// One of the versions that belong to it: all of them are alike.
    pub member: Version,
}

/// The experts of a model, their bytes and their shares of the cache.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// By block number.
    layers: Vec<Option<Layer>>,
}

#[derive(Clone, Debug)]
struct Layer {
    n_expert: u16,
    kinds: Vec<SliceKind>,
    shares: Vec<LayerShare>,
    /// By precision and expert.
    versions: [Vec<Option<Entry>>; Precision::COUNT],
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Position in the layer's shares.
    share: Option<u16>,
    bytes: VersionBytes,
}

impl Entry {
    fn new(version: Version, bytes: VersionBytes, shares: &mut Vec<LayerShare>, cache: &Cache) -> Self {
        let share = cache.pools().share_of(version).map(|id| {
            let known = shares.iter().position(|share| share.id == id).unwrap_or_else(|| {
                let slots = cache.pools().slots_of_share(id);
                shares.push(LayerShare { id, first_slot: slots.start, n_slots: slots.len() as u32, member: version });
                shares.len() - 1
            });
            known as u16 // fewer shares than versions
        });
        Self { share, bytes }
    }
}

impl Layout {
    /// The layout of layers whose versions have slots in `cache`. `bytes`: the size of each version that exists.
    pub fn new(
        layers: impl IntoIterator<Item = LayerShape>,
        cache: &Cache,
        bytes: impl Fn(Version) -> Option<VersionBytes>,
    ) -> Self {
        let mut layout = Self::default();
        for LayerShape { layer, n_expert, kinds } in layers {
            let mut new = Layer { n_expert, kinds, shares: Vec::new(), versions: [const { Vec::new() }; 2] };
            for precision in Precision::ALL {
                let versions = (0..n_expert).map(|index| Version { expert: ExpertId { layer, index }, precision });
                let entry = |version| Some(Entry::new(version, bytes(version)?, &mut new.shares, cache));
                new.versions[precision.index()] = versions.map(entry).collect();
            }
            let at = usize::from(layer);
            if layout.layers.len() <= at {
                layout.layers.resize_with(at + 1, || None);
            }
            layout.layers[at] = Some(new);
        }
        layout
    }

    /// One more than the number of the last block with experts.
    pub fn n_blocks(&self) -> u16 {
        self.layers.len() as u16 // block numbers are u16
    }

    /// The layers with experts, ascending.
    pub fn layers(&self) -> impl DoubleEndedIterator<Item = u16> {
        (0..self.n_blocks()).filter(|layer| self.has(*layer))
    }

    /// Whether a block has experts.
    pub fn has(&self, layer: u16) -> bool {
        self.layers.get(usize::from(layer)).is_some_and(Option::is_some)
    }

    /// Experts of a layer.
    ///
    /// # Panics
    /// As the following: of a block without experts.
    pub fn n_expert(&self, layer: u16) -> u16 {
        self.layer(layer).n_expert
    }

    /// The matrices of a layer's experts.
    pub fn kinds(&self, layer: u16) -> &[SliceKind] {
        &self.layer(layer).kinds
    }

    pub fn shares(&self, layer: u16) -> &[LayerShare] {
        &self.layer(layer).shares
    }

    /// The number, among the layer's shares, of the one that a version belongs to.
    ///
    /// # Panics
    /// For a version without one.
    pub fn share_of(&self, version: Version) -> u16 {
        let share = self.find(version).and_then(|entry| entry.share);
        share.expect("every version in use belongs to a share")
    }

    /// Every version that has a share, and the share's number.
    pub fn versions_with_shares(&self) -> impl Iterator<Item = (Version, u16)> {
        let versions = self.layers().flat_map(move |layer| {
            let indices = move || (0..self.n_expert(layer)).map(move |index| ExpertId { layer, index });
            Precision::ALL
                .into_iter()
                .flat_map(move |precision| indices().map(move |expert| Version { expert, precision }))
        });
        versions.filter_map(|version| Some((version, self.find(version)?.share?)))
    }

    /// The row of a slot in its share.
    pub fn row(&self, layer: u16, share: u16, slot: SlotId) -> u32 {
        slot.index - self.layer(layer).shares[usize::from(share)].first_slot
    }

    /// Whether there is such a version.
    pub fn has_version(&self, version: Version) -> bool {
        self.find(version).is_some()
    }

    /// Bytes of all slices of a version; `None` if there is no such version.
    pub fn bytes(&self, version: Version) -> Option<u64> {
        self.find(version).map(|entry| entry.bytes.slices.iter().sum())
    }

    /// Bytes of a slice; 0 if there is no such slice.
    pub fn slice_bytes(&self, slice: SliceId) -> u64 {
        self.find(slice.version).map_or(0, |entry| entry.bytes.slices[slice.kind.index()])
    }

    /// Bytes of the read that brings all of a version's slot, if there is one.
    pub fn record_bytes(&self, version: Version) -> Option<u64> {
        self.find(version)?.bytes.record
    }

    /// Bytes of a high version that its low version lacks, if that is part of it.
    pub fn rest(&self, version: Version) -> Option<RestBytes> {
        self.find(version)?.bytes.rest
    }

    /// The slot of the low version that is a part of a high one, where it is complete, and what it lacks.
    pub(super) fn part_of(&self, cache: &Cache, version: Version) -> Option<(SlotId, RestBytes)> {
        let rest = self.rest(version)?;
        let slot = cache.lookup(Version::low(version.expert)).filter(|&slot| cache.is_ready(slot))?;
        Some((slot, rest))
    }

    /// Bytes that have to be read for a version that is not resident; `None` if there is no such version.
    pub(super) fn bytes_missing(&self, cache: &Cache, version: Version) -> Option<u64> {
        let rest = self.part_of(cache, version).map(|(_, rest)| rest.slices.iter().sum());
        rest.or_else(|| self.bytes(version))
    }

    /// Bytes of weights that a read brings.
    pub(super) fn bytes_of(&self, Asked { target, held, .. }: Asked) -> u64 {
        if let Some(rest) = self.rest(target.version()).filter(|_| held.is_some()) {
            return match target {
                Target::Slot { slice, .. } | Target::Staging { slice, .. } => rest.slices[slice.kind.index()],
                Target::Record { .. } => rest.slices.iter().sum(),
            };
        }
        match target {
            Target::Slot { slice, .. } | Target::Staging { slice, .. } => self.slice_bytes(slice),
            Target::Record { version, .. } => self.bytes(version).unwrap_or(0),
        }
    }

    /// All matrices of the layer: those of `first` in their order, then the rest.
    pub(super) fn load_order(&self, layer: u16, first: &[SliceKind]) -> Vec<SliceKind> {
        let mut order = first.to_vec();
        order.extend(self.kinds(layer).iter().copied().filter(|kind| !first.contains(kind)));
        order
    }

    fn find(&self, version: Version) -> Option<&Entry> {
        let ExpertId { layer, index } = version.expert;
        let layer = self.layers.get(usize::from(layer))?.as_ref()?;
        layer.versions[version.precision.index()].get(usize::from(index))?.as_ref()
    }

    fn layer(&self, layer: u16) -> &Layer {
        self.layers[usize::from(layer)].as_ref().expect("only MoE layers have expert products")
    }
}
