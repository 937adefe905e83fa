//! Who leaves when a slot is needed: one policy per file behind [`Policy`].

mod lru;

pub use lru::Lru;

use crate::expert::{ExpertId, Precision, Version};

/// When something happens, as far as policies may know. There is no clock but the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Tokens of the sequence before this one.
    pub token: u64,
    /// The layer now running. A prefetch inserts into a later one.
    pub layer: u16,
}

/// What becomes of an expert that the router chose for a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// Whether every slice of the version used was ready when the router chose the expert. Never for a skipped one.
    pub hit: bool,
    /// In which precision the expert is used; `None` if it is skipped.
    pub precision: Option<Precision>,
}

/// Ranks residents for eviction. A policy decides and remembers; it neither loads nor frees.
///
/// The cache guarantees that
/// - a version is inserted only while it is not resident, and leaves only by being returned from [`Policy::victim`]
///   or with [`Policy::on_remove`]; an expert's versions come and go independently;
/// - uses are reported for misses and skipped experts too, before the insertion they lead to, so a policy may count
///   experts that are not resident; an insertion without a use before it is a prefetch or an upgrade;
/// - candidates are resident, distinct, of the incoming version's share, neither pinned nor loading, at least one,
///   in slot order. Others may be resident and shielded.
///
/// A policy guarantees that equal calls give equal answers: no randomness without a fixed seed, no iteration in
/// hash order.
pub trait Policy: Send {
    /// `version` became resident.
    fn on_insert(&mut self, version: Version, now: Now);

    /// The router chose `expert`.
    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now);

    /// `version` left without being chosen by [`Policy::victim`]: released, or displaced by an upgrade.
    fn on_remove(&mut self, version: Version, now: Now) {
        let _ = (version, now);
    }

    /// A new sequence began. What is resident stays so; a policy that counts per sequence starts over.
    fn begin_sequence(&mut self) {}

    /// Position in `candidates` of the version that gives its slot to `incoming`. It is evicted.
    fn victim(&mut self, incoming: Version, candidates: &[Version], now: Now) -> usize;
}
