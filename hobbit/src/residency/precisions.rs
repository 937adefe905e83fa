//! In which precision the experts of a batch are wanted: [`crate::route`]'s rules applied to what the router chose.

use std::collections::HashSet;

use crate::expert::ExpertId;
use crate::options::{PrecisionMode, PrecisionOptions};
use crate::route::{Demand, Routing, Thresholds, lower_least_popular, merge, renormalise};

/// Decides demands. One per model; sessions share it.
#[derive(Clone, Debug)]
pub struct Precisions {
    /// Whether low versions may stand in.
    pub mode: PrecisionMode,
    /// When they do.
    pub thresholds: Thresholds,
    /// What else was asked for.
    pub options: PrecisionOptions,
    /// Experts that are used in low precision whatever else holds, for measuring their sensitivity.
    pub forced_low: HashSet<ExpertId>,
    of_token: Vec<Demand>,
}

impl Precisions {
    /// Of a model whose low versions may stand in by these thresholds.
    pub fn new(mode: PrecisionMode, thresholds: Thresholds, options: PrecisionOptions) -> Self {
        Self { mode, thresholds, options, forced_low: HashSet::new(), of_token: Vec::new() }
    }

    /// Every expert in high precision.
    pub fn is_exact(&self) -> bool {
        self.mode == PrecisionMode::Exact
    }

    /// T1 = 0 loads nothing in high precision.
    pub fn loads_high(&self) -> bool {
        self.is_exact() || self.thresholds.t1 > 0.0
    }

    /// Demands of one layer's experts, by expert index; `weights` are the router's, `[n_tokens][n_used]`, with their
    /// sign.
    pub fn demands(&mut self, routing: &Routing, weights: &[f32], n_expert: usize, out: &mut Vec<Demand>) {
        out.clear();
        if self.is_exact() {
            out.resize(n_expert, Demand::High);
            return;
        }
        out.resize(n_expert, Demand::Skip);
        let n_used = routing.n_used.max(1);
        for (ids, weights) in routing.ids.chunks(n_used).zip(weights.chunks(n_used)) {
            self.thresholds.demands(weights, &mut self.of_token);
            merge(ids.iter().copied().zip(self.of_token.iter().copied()), out);
        }
        if routing.n_tokens > 1 && self.thresholds.t1 < 1.0 {
            lower_least_popular(&routing.needed, self.options.prefill_low, out);
        }
    }

    /// How many of a layer's `n_expert` experts a prompt will want in high precision, at the most.
    pub fn at_most_high(&self, n_expert: usize) -> usize {
        if self.is_exact() || self.thresholds.t1 >= 1.0 {
            return n_expert;
        }
        ((1.0 - self.options.prefill_low) * n_expert as f32).ceil() as usize
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
