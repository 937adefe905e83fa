//! Eviction policies behind [`Policy`].
//!
//! As a rule slots are divided among layers ([`crate::cache::allocate()`]), and candidates are of one layer. In a
//! common share ([`crate::cache::PoolLayout::is_common`]) they are of any layer.

mod belady;
mod class_lru;
mod edgemoe;
mod hobbit;
mod learned;
mod recency;
mod smoe;
#[cfg(test)]
mod tests;

pub use belady::{Belady, Upcoming};
pub use class_lru::ClassLru;
pub use edgemoe::EdgeMoe;
pub use hobbit::{Hobbit, Weights, WeightsError};
pub use learned::Learned;
pub use recency::{Arc, Lru};
pub use smoe::Smoe;

use super::ShareId;
use crate::expert::{ExpertId, Precision, Version};
use crate::named::named;

/// The time that policies may know: tokens and layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Tokens of the sequence before this one; of several that are evaluated at once, before the last one.
    pub token: u64,
    /// The layer now running. A prefetch inserts into a later one.
    pub layer: u16,
}

/// Use of an expert that the router chose for a token, or for several that are evaluated at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Use {
    /// Whether every slice of the version used was ready when the router chose the expert. Never for a skipped one.
    pub hit: bool,
    /// `None` if the expert is skipped.
    pub precision: Option<Precision>,
    /// The expert's share of the router's weight among the token's choices, which sum to 1; 1/k if the weights of the k
    /// experts are unknown. For a batch the sum over its tokens.
    pub weight: f32,
    /// Tokens that chose the expert, of those that are evaluated at once: 1 for a single token.
    pub n_tokens: u32,
    /// Tokens after the last one that chose it: 0 for a single token.
    pub since: u32,
}

impl Use {
    pub(crate) fn by_one(hit: bool, precision: Option<Precision>, weight: f32) -> Self {
        Self { hit, precision, weight, n_tokens: 1, since: 0 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub version: Version,
    /// Number of the event that used or inserted this version last: a clock finer than the token.
    pub last_use: u64,
}

/// Position of the candidate with the lowest value; of equal ones the least recently used.
fn lowest(candidates: &[Candidate], mut value: impl FnMut(Version) -> f64) -> usize {
    let ranks = candidates.iter().map(|candidate| (value(candidate.version), candidate.last_use)).enumerate();
    let lowest = ranks.min_by(|(_, a), (_, b)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    lowest.map_or(0, |(position, _)| position)
}

/// Ranks residents for eviction. A policy decides and remembers; it neither loads nor frees.
///
/// The cache guarantees that
/// - every share is announced with its members before anything else;
/// - a version is inserted only while it is not resident, and leaves only by being returned from [`Policy::victim`]
///   or with [`Policy::on_remove`]; an expert's versions come and go independently;
/// - uses are reported for misses and skipped experts too, before the insertion they lead to, so a policy may count
///   experts that are not resident; an insertion without a use before it is a prefetch or an upgrade;
/// - candidates are resident, distinct, of the incoming version's share, neither pinned nor loading, at least one,
///   in slot order. None of them is shielded, or all are. Others may be resident.
///
/// A policy guarantees that equal calls give equal answers: no randomness without a fixed seed, no iteration in
/// hash order. NaN weights and scores cause no panic.
pub trait Policy: Send {
    /// These versions compete for the slots of `share`.
    fn on_share(&mut self, share: ShareId, members: &[Version]) {
        let _ = (share, members);
    }

    fn on_insert(&mut self, version: Version, now: Now) {
        let _ = (version, now);
    }

    /// The router chose `expert`: once for all tokens that are evaluated at once.
    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now);

    /// The router's probabilities of all experts of `layer` for one token, `[n_expert]`, selected or not. If they are
    /// known, they come before the uses of that token and layer, once per token of a batch.
    fn on_scores(&mut self, layer: u16, scores: &[f32], now: Now) {
        let _ = (layer, scores, now);
    }

    /// `version` was released or displaced by an upgrade, not chosen by [`Policy::victim`].
    fn on_remove(&mut self, version: Version, now: Now) {
        let _ = (version, now);
    }

    /// Residents stay; a policy that counts per sequence starts over.
    fn begin_sequence(&mut self) {}

    /// Statistics for another run, between two sequences; may be empty. Residents and the order of their last uses
    /// need not be included: they are inserted again, least recently used first.
    fn save(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Takes the output of [`Policy::save`] before anything is inserted; `false`, without a change, for malformed
    /// bytes.
    fn load(&mut self, saved: &[u8]) -> bool {
        saved.is_empty()
    }

    /// Position in `candidates` of the version to evict for `incoming`.
    fn victim(&mut self, incoming: Version, candidates: &[Candidate], now: Now) -> usize;
}

/// The policies to choose from, baselines first: all but [`Belady`], which needs the future.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PolicyKind {
    Lru,
    /// [`Hobbit`]'s frequency alone.
    Lfu,
    Hobbit,
    EdgeMoe,
    Smoe,
    Arc,
    ClassLru,
    #[default]
    Learned,
}

named! { PolicyKind, "cache policy":
    Lru = "lru", Lfu = "lfu", Hobbit = "hobbit", EdgeMoe = "edgemoe", Smoe = "smoe", Arc = "arc",
    ClassLru = "classlru", Learned = "learned" | "foresight",
}

impl PolicyKind {
    /// Whether it uses [`Policy::on_scores`].
    pub const fn needs_scores(self) -> bool {
        matches!(self, Self::Smoe | Self::Learned)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Layers of the model, dense ones included.
    pub n_layers: u16,
    /// Bytes of a low version for each byte of a high one; 1 without low versions.
    pub low_cost: f32,
}

/// Maximum bytes that a policy keeps for a layer of this many experts.
pub fn table_bytes(kind: PolicyKind, n_expert: u16) -> u64 {
    // Counts and times of each expert, as any policy has them.
    let records = 256 * u64::from(n_expert);
    let pairs = if kind == PolicyKind::Learned { learned::table_bytes(n_expert.into()) } else { 0 };
    records + pairs
}

/// A policy that has seen nothing yet. Only [`PolicyKind::Hobbit`] looks at the weights.
pub fn build(kind: PolicyKind, weights: &Weights, shape: Shape) -> Box<dyn Policy> {
    let hobbit = |weights| Box::new(Hobbit::new(weights, shape.n_layers));
    match kind {
        PolicyKind::Lru => Box::new(Lru),
        PolicyKind::Lfu => hobbit(Weights { lru: 0.0, lfu: 1.0, lhu: 0.0, fld: 0.0 }),
        PolicyKind::Hobbit => hobbit(*weights),
        PolicyKind::EdgeMoe => Box::new(EdgeMoe::new(shape.n_layers)),
        PolicyKind::Smoe => Box::new(Smoe::default()),
        PolicyKind::Arc => Box::new(Arc::default()),
        PolicyKind::ClassLru => Box::new(ClassLru::default()),
        PolicyKind::Learned => Box::new(Learned::new(shape.low_cost)),
    }
}
