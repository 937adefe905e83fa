//! EdgeMoE's frequency over distance (section III-C2).

use super::{Candidate, Now, Policy, Use, lowest};
use crate::cache::bytes::{Cursor, Writer};
use crate::cache::slots::ByExpert;
use crate::expert::{ExpertId, Version};

/// Evicts the highest `-f / ((i - I) mod S)`, among equals the least recently used: `f` is the number of uses of an
/// expert of layer `i` in the whole run, `I` the running layer, `S` the number of layers. The distance counts the
/// layers that run until `i` does; the running layer's own is a whole round, `S`.
///
/// The paper prints `(S - i + I) mod S`, how long ago layer `i` ran, which evicts the layers that run next. Its prose
/// gives "priority to the eviction of experts ... whose layers are farther away from the current block", and we follow
/// that. Inside a share of one layer all candidates have the same distance.
#[derive(Clone, Debug)]
pub struct EdgeMoe {
    n_layers: u16,
    uses: ByExpert<u64>,
}

impl EdgeMoe {
    pub fn new(n_layers: u16) -> Self {
        Self { n_layers: n_layers.max(1), uses: ByExpert::default() }
    }

    /// `f / distance`: the score without its sign.
    fn worth(&self, expert: ExpertId, running: u16) -> f64 {
        let n_layers = i32::from(self.n_layers);
        let distance = match (i32::from(expert.layer) - i32::from(running)).rem_euclid(n_layers) {
            0 => n_layers,
            distance => distance,
        };
        self.uses.get(expert).copied().unwrap_or(0) as f64 / f64::from(distance)
    }
}

impl Policy for EdgeMoe {
    fn on_use(&mut self, expert: ExpertId, usage: Use, _now: Now) {
        if usage.precision.is_some() {
            *self.uses.entry(expert) += u64::from(usage.n_tokens);
        }
    }

    fn save(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.count(self.uses.layers().len());
        for uses in self.uses.layers() {
            out.count(uses.len());
            uses.iter().for_each(|uses| out.u64(*uses));
        }
        out.0
    }

    fn load(&mut self, saved: &[u8]) -> bool {
        let mut cursor = Cursor(saved);
        let layers: Option<Vec<Vec<u64>>> = cursor.count(4).and_then(|n| {
            let layer = |_| (0..cursor.count(8)?).map(|_| cursor.events()).collect();
            (0..n).map(layer).collect()
        });
        let layers = layers.and_then(|layers| cursor.end(layers));
        layers.map(|layers| self.uses = ByExpert::of_layers(layers)).is_some()
    }

    fn victim(&mut self, _incoming: Version, candidates: &[Candidate], now: Now) -> usize {
        lowest(candidates, |version| self.worth(version.expert, now.layer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::tests::scripts::{aged, at, high, insert, token, used, victim_of};
    use crate::expert::Precision;

    #[test]
    fn the_least_used_of_the_whole_run_goes() {
        let mut edgemoe = aged(EdgeMoe::new(8));
        insert(&mut edgemoe, &[0, 1, 2]);
        token(&mut edgemoe, 0, &[0, 1]);
        edgemoe.begin_sequence();
        token(&mut edgemoe, 0, &[2, 1]);
        assert_eq!(victim_of(&mut edgemoe, &[0, 1, 2]), 0, "equal counts go by age");
        token(&mut edgemoe, 1, &[0]);
        assert_eq!(victim_of(&mut edgemoe, &[0, 1, 2]), 2, "counts outlive the sequence");
    }

    #[test]
    fn frequency_is_divided_by_distance() {
        let mut edgemoe = aged(EdgeMoe::new(8));
        let of_layer = |layer| ExpertId { layer, index: 0 };
        for layer in [1, 1, 1, 3, 3, 3, 3, 4] {
            edgemoe.on_use(of_layer(layer), used(Precision::High), at(0));
        }
        // Layer 3 runs: layer 4 is next, layer 1 comes in six layers, layer 3 in a whole round.
        assert_eq!([4, 1, 3, 2].map(|layer| edgemoe.worth(of_layer(layer), 3)), [1.0, 0.5, 0.5, 0.0]);
        let mut victim = |layers: [u16; 2]| edgemoe.victim(high(9), &layers.map(|l| Version::high(of_layer(l))), at(0));
        assert_eq!([victim([4, 1]), victim([1, 4])], [1, 0], "what runs next stays, though it was used less");
        assert_eq!(victim([3, 4]), 0);
    }
}
