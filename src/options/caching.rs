//! Which experts stay in memory.

use crate::cache::policy::{PolicyKind, Weights};

/// How the caches, the host's and each device's, choose whom to evict.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CachingOptions {
    /// Who leaves when a slot is needed.
    pub policy: PolicyKind,
    /// The weights of [`PolicyKind::Hobbit`].
    pub weights: Weights,
}
