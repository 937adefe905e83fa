//! Saved caches: their residents and the policies' statistics.
//!
//! A restored cache continues as after [`Cache::begin_sequence`]: equal residents, of equal age. The file is a hint:
//! bytes of experts come from the model alone, so a wrong one only costs time.
//!
//! ```text
//! "HOBBITCS"  version: u32
//! model name  model bytes: u64  catalog: u64  policy name
//! number of caches, and of each:  name  number of residents, and of each:  layer: u16  expert: u16  precision: u8
//!                                 the policy's own bytes
//! XXH3 of everything before: u64
//! ```
//!
//! Numbers are little-endian; names and lists begin with their length as `u32`.

#[cfg(test)]
mod tests;

use super::bytes::{Cursor, Writer};
use super::{Cache, Pools, ShareId, SlotId};
use crate::cache::policy::PolicyKind;
use crate::expert::{ExpertId, Precision, Version};
use std::collections::{BTreeMap, BTreeSet};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: [u8; 8] = *b"HOBBITCS";

/// Counts up when a reader of the last version would misunderstand.
const VERSION: u32 = 1;

const RESIDENT_BYTES: usize = 5;

/// Characters of a model's name in [`ModelMark::state_name`]: file systems bound names by 255 bytes.
const NAME_CHARS_MAX: usize = 48;

/// Caches that a state may have: the host's, and one for each device.
const CACHES_MAX: usize = 256;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelMark {
    pub name: String,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// [`crate::gguf::Catalog::fingerprint`].
    pub catalog: u64,
}

impl ModelMark {
    /// A name for the model's state in a directory that has one of each model.
    pub fn state_name(&self) -> String {
        let known = [self.name.as_bytes(), &self.bytes.to_le_bytes(), &self.catalog.to_le_bytes()].concat();
        let begin: String = self.name.chars().take(NAME_CHARS_MAX).collect();
        format!("{begin}-{:016x}.state", xxh3_64(&known))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedCache {
    /// The device's name; empty for the host's.
    pub name: String,
    /// Least recently used first.
    pub residents: Vec<Version>,
    pub statistics: Vec<u8>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheState {
    pub model: ModelMark,
    pub policy: String,
    /// At most 256.
    pub caches: Vec<SavedCache>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    #[error("it is not a cache state")]
    Foreign,
    #[error("it is a cache state of version {found}, expected {VERSION}")]
    Version { found: u32 },
    /// Cut off, or changed since it was written.
    #[error("it is damaged")]
    Damaged,
}

impl SavedCache {
    /// Puts `earlier` residents that have left, least recently used first, in front of these: a run that ends before
    /// its cache is full forgets none of them.
    pub fn remember(&mut self, earlier: &[Version]) {
        let now: BTreeSet<Version> = self.residents.iter().copied().collect();
        self.residents.splice(0..0, earlier.iter().copied().filter(|version| !now.contains(version)));
    }
}

impl CacheState {
    pub const BYTES_MAX: usize = 64 << 20;

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.put(MAGIC);
        out.put(VERSION.to_le_bytes());
        out.bytes(self.model.name.as_bytes());
        out.u64(self.model.bytes);
        out.u64(self.model.catalog);
        out.bytes(self.policy.as_bytes());
        out.count(self.caches.len());
        for SavedCache { name, residents, statistics } in &self.caches {
            out.bytes(name.as_bytes());
            out.count(residents.len());
            for Version { expert: ExpertId { layer, index }, precision } in residents {
                out.put(layer.to_le_bytes());
                out.put(index.to_le_bytes());
                out.put([*precision as u8]);
            }
            out.bytes(statistics);
        }
        let sum = xxh3_64(&out.0);
        out.u64(sum);
        out.0
    }

    /// Reads the output of [`CacheState::to_bytes`].
    ///
    /// # Errors
    /// Bytes that are not a state, or not all of one. Nothing at all is damaged, not foreign: it may be replaced.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, StateError> {
        let n = bytes.len().min(MAGIC.len());
        if bytes[..n] != MAGIC[..n] {
            return Err(StateError::Foreign);
        }
        let mut cursor = Cursor(&bytes[n..]);
        let found = cursor.array().map(u32::from_le_bytes).ok_or(StateError::Damaged)?;
        if found != VERSION {
            return Err(StateError::Version { found });
        }
        let (before, sum) = bytes.split_last_chunk().ok_or(StateError::Damaged)?;
        if bytes.len() > Self::BYTES_MAX || xxh3_64(before) != u64::from_le_bytes(*sum) {
            return Err(StateError::Damaged);
        }
        let body = before.get(MAGIC.len() + size_of_val(&VERSION)..).ok_or(StateError::Damaged)?;
        read_body(&mut Cursor(body)).ok_or(StateError::Damaged)
    }
}

fn read_body(cursor: &mut Cursor) -> Option<CacheState> {
    let model = ModelMark { name: text(cursor)?, bytes: cursor.u64()?, catalog: cursor.u64()? };
    let policy = text(cursor)?;
    // A policy may have been renamed since.
    let policy = policy.parse().map_or(policy, |kind: PolicyKind| kind.name().to_owned());
    let mut state = CacheState { model, policy, caches: Vec::new() };
    for _ in 0..cursor.count(1).filter(|n| *n <= CACHES_MAX)? {
        let name = text(cursor)?;
        let n_residents = cursor.count(RESIDENT_BYTES)?;
        let residents: Option<Vec<Version>> = (0..n_residents).map(|_| resident(cursor)).collect();
        state.caches.push(SavedCache { name, residents: residents?, statistics: cursor.bytes()?.to_vec() });
    }
    cursor.end(state)
}

fn text(cursor: &mut Cursor) -> Option<String> {
    String::from_utf8(cursor.bytes()?.to_vec()).ok()
}

fn resident(cursor: &mut Cursor) -> Option<Version> {
    let expert = ExpertId { layer: cursor.u16()?, index: cursor.u16()? };
    let [precision] = cursor.array()?;
    Some(Version { expert, precision: *Precision::ALL.get(usize::from(precision))? })
}

impl Cache {
    /// Complete residents, and the policy's statistics. Begins a sequence, because statistics are saved between two.
    pub fn save(&mut self, name: &str) -> SavedCache {
        self.begin_sequence();
        let ready = self.residents().filter(|(_, slot)| self.is_ready(*slot)).map(|(version, _)| version);
        let mut residents: Vec<Version> = ready.collect();
        residents.sort_by_key(|version| self.pools.last_use(*version));
        SavedCache { name: name.to_owned(), residents, statistics: self.policy.save() }
    }

    /// Gives the policy the statistics of one of its kind; `false` if it refuses them.
    pub fn load_statistics(&mut self, saved: &SavedCache) -> bool {
        self.policy.load(&saved.statistics)
    }

    /// Makes the saved versions resident, in their order; with fewer slots the policy evicts. Resident and unknown
    /// versions are ignored. Returns the new residents, whose slices are free: the caller reads them.
    pub fn restore(&mut self, saved: &SavedCache) -> Vec<(SlotId, Version)> {
        let mut taken = Vec::new();
        for &version in &saved.residents {
            let is_known = self.pools.share_of(version).is_some();
            if is_known && self.lookup(version).is_none() && self.acquire(version).is_some() {
                taken.push(version);
            }
        }
        taken.sort_unstable();
        taken.dedup();
        let slots = taken.into_iter().filter_map(|version| Some((self.lookup(version)?, version)));
        slots.filter(|(slot, _)| !self.is_ready(*slot)).collect()
    }
}

impl Pools {
    /// The saved versions that would fit into an empty cache, the most recently used ones if there are too many; in
    /// their order, each once by its last use (a hostile file may repeat them).
    pub fn that_fit(&self, saved: &SavedCache) -> Vec<Version> {
        let mut left: BTreeMap<ShareId, usize> = BTreeMap::new();
        let mut fit: Vec<Version> = Vec::new();
        let mut seen = BTreeSet::new();
        for &version in saved.residents.iter().rev().filter(|version| seen.insert(**version)) {
            let Some(share) = self.share_of(version) else { continue };
            let left = left.entry(share).or_insert_with(|| self.slots_of_share(share).len());
            if *left > 0 {
                *left -= 1;
                fit.push(version);
            }
        }
        fit.reverse();
        fit
    }

    /// [`Pools::that_fit`] in the order in which free slots are filled: the most recently used version of every layer,
    /// as layers run, then the next one of every layer.
    pub fn in_filling_order(&self, saved: &SavedCache) -> Vec<Version> {
        let mut of_layer: BTreeMap<u16, u32> = BTreeMap::new();
        let ranked = self.that_fit(saved).into_iter().rev().map(|version| {
            let rank = of_layer.entry(version.expert.layer).or_default();
            *rank += 1;
            (*rank, version)
        });
        let mut order: Vec<(u32, Version)> = ranked.collect();
        order.sort_by_key(|(rank, version)| (*rank, version.expert.layer));
        order.into_iter().map(|(_, version)| version).collect()
    }
}
