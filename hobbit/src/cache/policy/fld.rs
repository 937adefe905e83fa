//! Farthest layer distance (HOBBIT, section 4.4).

use super::recency::LastUse;
use super::{Now, Policy, Use};
use crate::expert::{ExpertId, Version};

/// HOBBIT's `p_fld = 1 - ((l_t - l_i + L) mod L) / L`: 1 for the running layer `l_i`, less for layers `l_t` that run
/// later. `n_layers` is `L`, at least 1.
pub(super) fn nearness(layer: u16, running: u16, n_layers: u16) -> f64 {
    let n_layers = i32::from(n_layers.max(1));
    let ahead = (i32::from(layer) - i32::from(running)).rem_euclid(n_layers);
    1.0 - f64::from(ahead) / f64::from(n_layers)
}

/// Evicts from the layer that runs last. Shares are of one layer, so what remains of it there is the tie-break: least
/// recently used.
#[derive(Clone, Debug)]
pub struct Fld {
    n_layers: u16,
    last_use: LastUse,
}

impl Fld {
    /// For a model of so many layers.
    pub fn new(n_layers: u16) -> Self {
        Self { n_layers, last_use: LastUse::default() }
    }
}

impl Policy for Fld {
    fn on_insert(&mut self, version: Version, _now: Now) {
        self.last_use.mark(version);
    }

    fn on_use(&mut self, expert: ExpertId, usage: Use, _now: Now) {
        self.last_use.on_use(expert, usage);
    }

    fn victim(&mut self, _incoming: Version, candidates: &[Version], now: Now) -> usize {
        self.last_use.lowest(candidates, |version| nearness(version.expert.layer, now.layer, self.n_layers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::scripts::{at, high, insert, victim_of};

    #[test]
    fn the_layer_that_runs_last_goes() {
        let mut fld = Fld::new(8);
        let of_layer = |layer| Version::high(ExpertId { layer, index: 0 });
        let candidates = [4, 3, 7, 0, 2, 1].map(of_layer);
        candidates.iter().for_each(|&version| fld.on_insert(version, at(0)));
        // Layer 3 runs: 2 comes round in seven layers, 4 is next.
        assert_eq!(candidates[fld.victim(of_layer(5), &candidates, at(0))].expert.layer, 2);
        assert_eq!(candidates[fld.victim(of_layer(5), &candidates[..4], at(0))].expert.layer, 0);
        assert_eq!([3, 4, 2].map(|layer| nearness(layer, 3, 8)), [1.0, 0.875, 0.125]);
        assert_eq!(nearness(3, 3, 0), 1.0, "no layers is one");
    }

    #[test]
    fn within_a_layer_it_is_lru() {
        let mut fld = Fld::new(8);
        insert(&mut fld, &[2, 0, 1]);
        fld.on_use(high(2).expert, crate::cache::policy::scripts::used(crate::expert::Precision::High), at(1));
        assert_eq!(victim_of(&mut fld, &[0, 1, 2]), 0);
    }
}
