//! Who leaves when a slot is needed: one policy per file behind [`Policy`].

mod lru;

pub use lru::Lru;

use crate::expert::ExpertId;

/// When something happens, as far as policies may know. There is no clock but the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Tokens of the sequence before this one.
    pub token: u64,
    /// The layer now running. A prefetch inserts into a later one.
    pub layer: u16,
}

/// One use of an expert by one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// Whether every slice was ready when the router chose the expert.
    pub hit: bool,
}

/// Ranks residents for eviction. A policy decides and remembers; it neither loads nor frees.
///
/// The cache guarantees that
/// - an expert is inserted only while it is not resident, and leaves only by being returned from [`Policy::victim`];
/// - uses are reported for misses too, before the insertion they lead to, so a policy may count experts that are
///   not resident; an insertion without a use before it is a prefetch;
/// - candidates are resident, distinct, of the incoming expert's layer, neither pinned nor loading, at least one,
///   in slot order. Others may be resident and shielded.
///
/// A policy guarantees that equal calls give equal answers: no randomness without a fixed seed, no iteration in
/// hash order.
pub trait Policy: Send {
    /// `expert` became resident.
    fn on_insert(&mut self, expert: ExpertId, now: Now);

    /// The router chose `expert`.
    fn on_use(&mut self, expert: ExpertId, usage: Use, now: Now);

    /// A new sequence began. What is resident stays so; a policy that counts per sequence starts over.
    fn begin_sequence(&mut self) {}

    /// Position in `candidates` of the expert that gives its slot to `incoming`. It is evicted.
    fn victim(&mut self, incoming: ExpertId, candidates: &[ExpertId], now: Now) -> usize;
}
