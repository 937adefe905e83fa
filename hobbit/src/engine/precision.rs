//! In which precision the experts of a batch are wanted: [`crate::route`]'s rules applied to what the router chose.

use std::collections::HashSet;

use crate::expert::ExpertId;
use crate::options::{PrecisionMode, PrecisionOptions};
use crate::route::{Demand, Thresholds, lower_least_popular, renormalise};
use crate::routing::Routing;

/// Decides demands. One per model; sessions share it.
#[derive(Clone, Debug)]
pub(super) struct Precisions {
    pub(super) mode: PrecisionMode,
    pub(super) thresholds: Thresholds,
    pub(super) options: PrecisionOptions,
    /// Experts that are used in low precision whatever else holds, for measuring their sensitivity.
    pub(super) forced_low: HashSet<ExpertId>,
    of_token: Vec<Demand>,
}

impl Precisions {
    pub(super) fn new(mode: PrecisionMode, thresholds: Thresholds, options: PrecisionOptions) -> Self {
        Self { mode, thresholds, options, forced_low: HashSet::new(), of_token: Vec::new() }
    }

    /// Every expert in high precision.
    pub(super) fn is_exact(&self) -> bool {
        self.mode == PrecisionMode::Exact
    }

    /// T1 = 0 loads nothing in high precision.
    pub(super) fn loads_high(&self) -> bool {
        self.is_exact() || self.thresholds.t1 > 0.0
    }

    /// Demands of one layer's experts, by expert index; `weights` are the router's, `[n_tokens][n_used]`, with their
    /// sign.
    pub(super) fn demands(&mut self, routing: &Routing, weights: &[f32], n_expert: usize, out: &mut Vec<Demand>) {
        out.clear();
        if self.is_exact() {
            out.resize(n_expert, Demand::High);
            return;
        }
        out.resize(n_expert, Demand::Skip);
        for (ids, weights) in routing.ids.chunks(routing.n_used).zip(weights.chunks(routing.n_used)) {
            self.thresholds.demands(weights, &mut self.of_token);
            for (&id, &demand) in ids.iter().zip(&self.of_token) {
                let place = &mut out[usize::from(id)];
                *place = demand.max(*place);
            }
        }
        if routing.n_tokens > 1 && self.thresholds.t1 < 1.0 {
            lower_least_popular(&routing.needed, self.options.prefill_low, out);
        }
    }

    /// How many of a layer's `n_expert` experts a prompt will want in high precision, at the most.
    pub(super) fn at_most_high(&self, n_expert: usize) -> usize {
        match self.is_exact() || self.thresholds.t1 >= 1.0 {
            true => n_expert,
            false => ((1.0 - self.options.prefill_low) * n_expert as f32).ceil() as usize,
        }
    }

    /// Whether an expert is to be used in low precision even where its high version is resident.
    pub(super) fn is_forced_low(&self, expert: ExpertId) -> bool {
        !self.forced_low.is_empty() && self.forced_low.contains(&expert)
    }

    /// Takes skipped experts out of a token's weights, `[n_used]`.
    pub(super) fn without_skipped(&self, weights: &mut [f32], skipped: &[bool]) {
        if self.options.renormalise {
            renormalise(weights, skipped);
        } else {
            weights.iter_mut().zip(skipped).filter(|(_, skipped)| **skipped).for_each(|(weight, _)| *weight = 0.0);
        }
    }
}
