//! What routers chose, where tokens went elsewhere.

use crate::route::Routing;

/// What a router chose for tokens that went elsewhere.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) routing: Routing,
    /// `[n_tokens][n_used]`.
    pub(super) weights: Vec<f32>,
    /// As `Chosen::shares`.
    pub(super) shares: Vec<f32>,
}

impl Wanted {
    pub(super) fn has(&self, index: u16) -> bool {
        !self.routing.pairs_of(index).is_empty()
    }
}
