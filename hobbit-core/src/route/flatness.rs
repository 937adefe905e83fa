//! Flat routers: those whose choices hardly stand out. A router's low scores say "of little use" only where others are
//! much higher, so SMoE's substitution goes wrong where all are alike. Pure.

use super::{Rerouting, TokenScores};

/// How much of their weight tokens could exchange, layer by layer.
#[derive(Clone, Debug, Default)]
pub struct Flatness {
    layers: Vec<Exchangeable>,
}

/// The part of a token's weight that α may exchange in a layer: that of the chosen experts that are near the best one
/// that was not chosen.
#[derive(Clone, Copy, Debug, Default)]
struct Exchangeable {
    n_tokens: u32,
    /// Mean of the last tokens.
    share: f32,
}

impl Flatness {
    /// Largest share of a router that is not flat. With α 0.3, shares of 0.2 to 0.5 cost 0.1 % of perplexity, shares
    /// above 0.7 cost 6 to 16 % (benches/results/routing.md).
    pub const SHARE_MAX: f32 = 0.5;
    const TOKENS_MIN: u32 = 32;
    /// Half of the past is forgotten after 177 tokens.
    const TOKENS_MAX: u32 = 256;

    /// Observes a token's choice in a layer. `weights` are those of the chosen experts `ids`.
    pub fn observe(&mut self, layer: u16, rules: &Rerouting, ids: &[u16], weights: &[f32], scores: &TokenScores<'_>) {
        let layer = usize::from(layer);
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, Exchangeable::default());
        }
        if let Some(share) = rules.exchangeable(ids, weights, scores) {
            let own = &mut self.layers[layer];
            own.n_tokens = (own.n_tokens + 1).min(Self::TOKENS_MAX);
            own.share += (share - own.share) / own.n_tokens as f32;
        }
    }

    /// The part of its tokens' weight that could be exchanged; `None` where nothing was observed.
    pub fn share(&self, layer: u16) -> Option<f32> {
        self.layers.get(usize::from(layer)).filter(|own| own.n_tokens > 0).map(|own| own.share)
    }

    pub fn is_flat(&self, layer: u16) -> bool {
        let own = self.layers.get(usize::from(layer));
        own.is_some_and(|own| own.n_tokens >= Self::TOKENS_MIN && own.share > Self::SHARE_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_flat_while_most_of_the_weight_could_be_exchanged() {
        let rules = Rerouting { substitute: 0.3, ..Rerouting::default() };
        let mut flatness = Flatness::default();
        let mut see = |layer: u16, scores: &[f32], n_tokens: usize| {
            let of = TokenScores { selection: scores, weights: scores };
            (0..n_tokens).for_each(|_| flatness.observe(layer, &rules, &[0, 1], &scores[..2], &of));
            (flatness.share(layer).unwrap(), flatness.is_flat(layer))
        };
        let (steep, flat) = ([0.5, 0.24, 0.2, 0.06], [0.28, 0.26, 0.24, 0.22]);
        let (share, is_flat) = see(3, &steep, 100);
        assert!((share - 0.24 / 0.74).abs() < 1e-5 && !is_flat, "{share}");
        assert_eq!(see(2, &flat, 31), (1.0, false), "too few tokens");
        assert_eq!(see(2, &flat, 1), (1.0, true));
        assert!(!see(2, &steep, 300).1, "the text has changed");
        assert!(flatness.share(9).is_none() && flatness.share(0).is_none() && !flatness.is_flat(9));
    }
}
