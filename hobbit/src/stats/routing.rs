//! What routing gave up for fewer reads.

use serde::Serialize;

use crate::route::Rerouted;

/// Uses of experts that went elsewhere than the router said, while decoding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RerouteCounts {
    /// Uses by another expert than the router's, which was in memory.
    pub uses: u64,
    /// Tokens in a layer that were left alone, because hobbit did not understand their router's choice.
    pub refused: u64,
    /// Shares of a token's weight that uses gave up by going elsewhere, summed; over `uses` it is the mean.
    pub given_up: f64,
}

super::field_by_field!(RerouteCounts: Add::add { uses, refused, given_up });
super::field_by_field!(RerouteCounts: Sub::sub { uses, refused, given_up });

impl RerouteCounts {
    /// The mean share of a token's weight that a use gave up by going elsewhere; `None` where none did.
    pub fn mean_given_up(&self) -> Option<f64> {
        super::ratio(self.given_up, self.uses as f64)
    }
}

impl From<Rerouted> for RerouteCounts {
    fn from(Rerouted { exchanged, refused, given_up }: Rerouted) -> Self {
        Self { uses: exchanged, refused, given_up }
    }
}
