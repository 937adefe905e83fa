//! In which precision the experts of a batch are wanted: [`crate::route`]'s rules applied to what the router chose.

use std::collections::HashSet;

use crate::expert::ExpertId;
use crate::options::{PrecisionMode, PrecisionOptions};
use crate::route::{Demand, Phase, Routing, Thresholds, lower_least_popular, merge, renormalise, unimportance};

/// Decides demands. One per model; sessions share it.
#[derive(Clone, Debug)]
pub struct Precisions {
    /// Whether low versions may stand in.
    pub mode: PrecisionMode,
    /// When they do.
    pub thresholds: Thresholds,
    pub options: PrecisionOptions,
    /// While it decodes, what has less than so many times the uniform share of each of its tokens' weight is left out
    /// where it is missing; 0: nothing is.
    pub drop: f32,
    /// Experts that are used in low precision whatever else holds, for measuring their sensitivity.
    pub forced_low: HashSet<ExpertId>,
    /// Reused: of one token's experts.
    of_token: Vec<f32>,
    /// Reused: whether an expert is some token's most important one, by expert index.
    is_first: Vec<bool>,
}

impl Precisions {
    /// The rules of a model whose low versions may stand in by these thresholds.
    pub fn new(mode: PrecisionMode, thresholds: Thresholds, options: PrecisionOptions) -> Self {
        let (forced_low, of_token, is_first) = Default::default();
        Self { mode, thresholds, options, drop: 0.0, forced_low, of_token, is_first }
    }

    pub fn is_exact(&self) -> bool {
        self.mode == PrecisionMode::Exact
    }

    /// Whether the router's weights decide anything.
    pub fn asks_weights(&self, phase: Phase) -> bool {
        !self.is_exact() || self.drop > 0.0 && phase.is_decode()
    }

    /// Share of a layer's experts, the least popular ones, that this phase uses in low precision, if popularity alone
    /// decides (Fate, section 4.5); else 0: which experts tokens rank first is not known before.
    pub(super) fn low_by_popularity(&self, phase: Phase) -> f32 {
        let is_alone = phase == Phase::Prompt && !self.is_exact() && self.thresholds.t1 >= 1.0;
        if is_alone { self.options.prefill_low_at(self.thresholds.t1) } else { 0.0 }
    }

    /// T1 = 0 loads nothing in high precision.
    pub fn loads_high(&self) -> bool {
        self.is_exact() || self.thresholds.t1 > 0.0
    }

    /// Demands of one layer's experts, by expert index; `weights` are the router's, `[n_tokens][n_used]`, with their
    /// sign. An expert is wanted as the token wants it that wants it most; of a prompt, the least popular ones are
    /// lowered besides; where HOBBIT's scorer is on, none that a token ranks first.
    pub fn demands(
        &mut self,
        routing: &Routing,
        weights: &[f32],
        n_expert: usize,
        phase: Phase,
        out: &mut Vec<Demand>,
    ) {
        out.clear();
        if !self.asks_weights(phase) {
            out.resize(n_expert, Demand::High);
            return;
        }
        let (is_exact, drop) = (self.is_exact(), if phase.is_decode() { self.drop } else { 0.0 });
        out.resize(n_expert, Demand::Skip);
        let n_used = routing.n_used.max(1);
        let is_prompt = phase == Phase::Prompt;
        // With T1 = 1 it is off, and popularity alone decides: Fate as published.
        let is_scored = self.thresholds.t1 < 1.0;
        self.is_first.clear();
        self.is_first.resize(n_expert, false);
        for (ids, weights) in routing.ids.chunks(n_used).zip(weights.chunks(n_used)) {
            unimportance(weights, &mut self.of_token);
            let sum: f32 = weights.iter().map(|weight| weight.abs()).sum();
            let is_slight = |weight: &f32| weight.abs() * (n_used as f32) < drop * sum;
            let demands = self.of_token.iter().zip(weights).map(|(&unimportance, weight)| match weight {
                weight if is_slight(weight) => Demand::Skip,
                _ if is_exact => Demand::High,
                _ => self.thresholds.demand(unimportance),
            });
            merge(ids.iter().copied().zip(demands), out);
            if is_prompt && is_scored {
                let firsts = ids.iter().zip(&self.of_token).filter(|(_, unimportance)| **unimportance == 0.0);
                firsts.for_each(|(&index, _)| self.is_first[usize::from(index)] = true);
            }
        }
        if is_prompt && !is_exact {
            let share = self.options.prefill_low_at(self.thresholds.t1);
            lower_least_popular(&routing.needed, share, |index| self.is_first[usize::from(index)], out);
        }
    }

    /// Whether an expert is to be used in low precision even where its high version is resident.
    pub fn is_forced_low(&self, expert: ExpertId) -> bool {
        !self.forced_low.is_empty() && self.forced_low.contains(&expert)
    }

    /// Takes skipped experts out of a token's weights, `[n_used]`.
    pub fn without_skipped(&self, weights: &mut [f32], skipped: &[bool]) {
        if self.options.renormalise {
            renormalise(weights, skipped);
        } else {
            weights.iter_mut().zip(skipped).filter(|(_, skipped)| **skipped).for_each(|(weight, _)| *weight = 0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Demand::{High, Low, Skip};
    use super::*;

    /// Demands of tokens with these experts and weights, in a layer of eight experts. Nine tokens are a prompt.
    fn demands(precisions: &mut Precisions, tokens: &[[(u16, f32); 2]]) -> Vec<Demand> {
        let mut routing = Routing::default();
        let all = || tokens.iter().flatten();
        routing.set(all().map(|(index, _)| (*index).into()), 2, 8).unwrap();
        let (mut out, phase) = (Vec::new(), Phase::of(tokens.len(), tokens.len() < 9));
        precisions.demands(&routing, &all().map(|(_, weight)| *weight).collect::<Vec<_>>(), 8, phase, &mut out);
        out
    }

    fn dynamic(t1: f32, t2: f32, prefill_low: Option<f32>) -> Precisions {
        let options = PrecisionOptions { prefill_low, ..PrecisionOptions::default() };
        Precisions::new(PrecisionMode::Dynamic, Thresholds { t1, t2 }, options)
    }

    #[test]
    fn few_tokens_at_once_are_asked_what_each_would_be() {
        let tokens = [[(0, 0.7), (1, 0.3)], [(2, 0.95), (3, 0.05)], [(4, 0.8), (1, 0.2)], [(1, 0.9), (5, 0.1)]];
        let all_low = &mut dynamic(0.6, 0.9, Some(1.0));
        assert_eq!(demands(all_low, &tokens[..2]), [High, Low, High, Skip, Skip, Skip, Skip, Skip]);
        assert_eq!(
            demands(all_low, &tokens),
            [High, High, High, Skip, High, Low, Skip, Skip],
            "expert 1 is some token's first choice"
        );
        let eight = [tokens, tokens].concat();
        assert_eq!(demands(all_low, &eight), demands(all_low, &tokens));
    }

    /// Nine tokens: expert 0 is the first of five of them, 4 of two, 1 and 2 of one each; 3 of none.
    fn prompt() -> [[(u16, f32); 2]; 9] {
        let mut tokens = [[(0, 0.5), (1, 0.49)]; 9];
        (tokens[5], tokens[6]) = ([(4, 0.6), (3, 0.4)], [(4, 0.6), (5, 0.4)]);
        (tokens[7], tokens[8]) = ([(1, 0.6), (5, 0.4)], [(2, 0.6), (0, 0.4)]);
        tokens
    }

    #[test]
    fn a_prompt_lowers_the_least_popular_but_no_tokens_first_choice() {
        // By popularity: 0 and 1 (6), 4 and 5 (2), 2 and 3 (1). A half of six are three.
        let lowered = demands(&mut dynamic(0.6, 0.9, Some(0.5)), &prompt());
        assert_eq!(lowered, [High, High, High, Low, High, Low, Skip, Skip]);
        let one = demands(&mut dynamic(0.6, 0.9, Some(0.25)), &prompt());
        assert_eq!(one, [High, High, High, Low, High, High, Skip, Skip]);
        let none = demands(&mut dynamic(0.6, 0.9, Some(0.0)), &prompt());
        assert_eq!(none, [High, High, High, High, High, High, Skip, Skip]);
        // Nothing in high precision, not even first ones.
        assert_eq!(demands(&mut dynamic(0.0, 1.0, None), &prompt())[..6], [Low; 6]);
    }

    #[test]
    fn missing_experts_of_little_weight_are_dropped() {
        let tokens = [[(0, 0.7), (1, 0.3)], [(1, 0.95), (3, 0.05)]];
        let mut exact = Precisions::new(PrecisionMode::Exact, Thresholds { t1: 0.6, t2: 0.9 }, Default::default());
        assert_eq!(demands(&mut exact, &tokens), [High; 8]);
        exact.drop = 0.7;
        // Half is the uniform share: 0.3 and 0.05 are below 0.35, but 1 is a token's first.
        assert_eq!(demands(&mut exact, &tokens[..1])[..2], [High, Skip]);
        assert_eq!(demands(&mut exact, &tokens)[..4], [High, High, Skip, Skip]);
        let mut routing = Routing::default();
        routing.set([0, 1].into_iter(), 2, 2).unwrap();
        let mut out = Vec::new();
        exact.demands(&routing, &[0.7, 0.3], 2, Phase::Prompt, &mut out);
        assert_eq!(out, [High; 2], "a prompt");
        let with_low = &mut dynamic(0.6, 1.0, None);
        with_low.drop = 0.7;
        assert_eq!(demands(with_low, &tokens[..1])[..2], [High, Skip]);
        with_low.drop = 0.5;
        assert_eq!(demands(with_low, &tokens[..1])[..2], [High, Low]);
    }

    #[test]
    fn fates_prompts_are_lowered_while_it_decodes_all_in_high_precision() {
        let fate = &mut dynamic(1.0, 1.0, Some(0.25));
        assert_eq!(demands(fate, &prompt()), [High, High, High, Low, High, High, Skip, Skip]);
        let half = demands(&mut dynamic(1.0, 1.0, Some(0.5)), &prompt());
        assert_eq!(
            half[..6],
            [High, High, Low, Low, High, Low],
            "expert 2 is some token's first choice, and as unpopular as 3"
        );
        assert_eq!(demands(fate, &prompt()[..1])[..2], [High; 2]);
        assert_eq!(demands(fate, &prompt()[..8])[..6], [High, High, Skip, High, High, High]);
        // T1 = 1 alone takes everything in high precision.
        assert_eq!(demands(&mut dynamic(1.0, 1.0, None), &prompt())[..6], [High; 6]);
    }
}
