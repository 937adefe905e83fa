//! Policies by name.

use super::{Arc, EdgeMoe, Hobbit, Learned, LearnedOptions, Lru, Policy, Smoe, Weights, learned};
use crate::named::named;

/// The policies to choose from, baselines first: all but [`super::Belady`], which needs the future.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PolicyKind {
    Lru,
    /// [`Hobbit`]'s frequency alone.
    Lfu,
    Hobbit,
    EdgeMoe,
    Smoe,
    Arc,
    #[default]
    Learned,
}

named! { PolicyKind, "cache policy":
    Lru = "lru", Lfu = "lfu", Hobbit = "hobbit", EdgeMoe = "edgemoe", Smoe = "smoe", Arc = "arc",
    Learned = "learned" | "foresight",
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
        PolicyKind::Learned => Box::new(Learned::new(LearnedOptions::default(), shape.low_cost)),
    }
}
