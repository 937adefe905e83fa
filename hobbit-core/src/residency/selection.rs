//! The selection of a layer: the experts that its router chose, where tokens were rerouted, and what is demanded of
//! each; and the step that is made of it, with the versions that it uses.

use super::precisions::Precisions;
use crate::cache::{SlotId, Use};
use crate::expert::{ExpertId, Precision, SliceKind, Version};
use crate::predict::{Popularity, RouterScores};
use crate::route::{
    Choice, Demand, Flatness, Pair, Phase, RerouteCounts, Rerouting, Routing, TokenScores, Weighing, reroute,
};

/// A batch that needs this many tenths of a layer's experts is dense: the next layer will need nearly all of its own.
const DENSE_TENTHS: usize = 9;

/// Products of one layer that are computed together.
#[derive(Clone, Copy, Debug)]
pub struct Split<'a> {
    /// Block number.
    pub layer: u16,
    pub n_expert: usize,
    /// Experts that the router chooses for a token.
    pub n_used: usize,
    /// The matrices, in the order of the products.
    pub kinds: &'a [SliceKind],
    /// Tells one choice of the layer from another: a layer that comes in several splits has the same in each.
    pub key: usize,
    pub phase: Phase,
}

/// The selection of a layer. One per context, which sets it layer after layer.
///
/// A layer may come in several splits, and another session may begin a layer between two of them: the decisions of the
/// first split are kept here.
#[derive(Debug, Default)]
pub struct Selection {
    /// The experts that tokens use.
    pub routing: Routing,
    /// The router's weights, `[n_tokens][n_used]`; empty in exact mode.
    pub weights: Vec<f32>,
    /// `weights` of a batch that decodes in exact mode, if scores are known.
    known: Vec<f32>,
    /// Each expert's fraction of the weights, by expert index: a token's sum to 1.
    pub(super) fractions: Vec<f32>,
    /// The router's own choice, if tokens were rerouted.
    pub(super) unmasked: Option<Unmasked>,
    observed: Observed,
    /// Expected uses of the next layer's experts by a prompt's tokens, if they are known.
    pub expected: Popularity,
    phase: Phase,
    /// The demand for each expert, by expert index.
    pub demands: Vec<Demand>,
    splits: Splits,
    /// The precision in which each expert is used, by expert index.
    pub(super) precisions: Vec<Option<Precision>>,
    pub n_expert: usize,
}

/// The splits of a layer so far.
#[derive(Debug, Default)]
struct Splits {
    /// Layer and key of the selection that was decided last.
    decided: Option<(u16, usize)>,
    /// Kinds of its splits so far.
    kinds: Vec<SliceKind>,
    /// The last split's kinds begin here.
    first_kind: usize,
    is_later: bool,
}

/// For virtual experts.
#[derive(Debug, Default)]
struct Observed {
    /// The router's weights of its own choice.
    weights: Vec<f32>,
    /// Norms of its inputs.
    norms: Vec<f32>,
}

/// Experts of each token of a decode batch, with their weights, which sum to 1.
#[derive(Clone, Debug, Default)]
pub struct TokenChoices {
    /// Those that the router chose.
    pub wanted: Vec<Vec<(u16, f32)>>,
    /// Those that tokens use; `None`: the same.
    pub used: Option<Vec<Vec<(u16, f32)>>>,
}

/// A router's own choice for tokens that were rerouted.
#[derive(Debug)]
pub(super) struct Unmasked {
    pub(super) routing: Routing,
    /// `[n_tokens][n_used]`.
    weights: Vec<f32>,
    /// As [`Selection::fractions`].
    pub(super) fractions: Vec<f32>,
}

impl Selection {
    /// Versions of one layer and precision that no token uses.
    pub(super) fn unused(versions: &[Version], kinds: &[SliceKind], n_expert: usize) -> Self {
        let Version { expert: ExpertId { layer, .. }, precision } = versions[0];
        let mut routing = Routing::default();
        routing.needed.extend(versions.iter().map(|version| version.expert.index));
        Self {
            routing,
            splits: Splits { decided: Some((layer, 0)), kinds: kinds.to_vec(), first_kind: 0, is_later: true },
            precisions: vec![Some(precision); n_expert],
            n_expert,
            ..Self::default()
        }
    }

    /// Takes the router's choice for a split, `[n_tokens][n_used]`.
    pub fn set(&mut self, split: &Split, ids: impl Iterator<Item = i32>) -> Result<(), i32> {
        self.routing.set(ids, split.n_used, split.n_expert)?;
        self.n_expert = split.n_expert;
        let key = Some((split.layer, split.key));
        let splits = &mut self.splits;
        splits.is_later = splits.decided == key && split.kinds.iter().all(|kind| !splits.kinds.contains(kind));
        if !splits.is_later {
            splits.decided = key;
            splits.kinds.clear();
            self.precisions = Vec::new();
            self.weights.clear();
            self.unmasked = None;
        }
        self.phase = split.phase;
        self.known.clear();
        self.fractions.clear();
        self.expected.clear();
        self.observed.weights.clear();
        self.observed.norms.clear();
        self.splits.first_kind = self.splits.kinds.len();
        self.splits.kinds.extend_from_slice(split.kinds);
        Ok(())
    }

    /// Whether an earlier split has decided already: then nothing is demanded or counted again.
    pub fn is_later_split(&self) -> bool {
        self.splits.is_later
    }

    /// Block number; 0 before the first layer.
    pub fn layer(&self) -> u16 {
        self.splits.decided.map_or(0, |(layer, _)| layer)
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether it is the first split of a layer of a batch that decodes: policies and predictors then see each token.
    pub fn is_new_decode(&self) -> bool {
        self.phase.is_decode() && !self.splits.is_later
    }

    /// The kinds of the split, in the order of its products.
    pub(super) fn split_kinds(&self) -> &[SliceKind] {
        &self.splits.kinds[self.splits.first_kind..]
    }

    /// Notes the router's `weights` of its own choice, `[n_tokens][n_used]`, and its inputs, if they are known.
    pub(super) fn observe(&mut self, weights: &[f32], inputs: &[&[f32]]) {
        let norm = |x: &&[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
        self.observed.weights.clear();
        self.observed.weights.extend_from_slice(weights);
        self.observed.norms.clear();
        self.observed.norms.extend(inputs.iter().map(norm));
    }

    /// Reroutes tokens to experts that `is_present` accepts, by expert index. Returns counts, and the new weights if
    /// ids or weights change: products use these and [`Selection::routing`], policies and observers go on seeing the
    /// router's own choice.
    pub(super) fn reroute(
        &mut self,
        rules: &Rerouting,
        before: &[f32],
        (scores, weighing): (&[RouterScores], Weighing),
        is_present: &dyn Fn(u16) -> bool,
    ) -> (RerouteCounts, Option<Vec<f32>>) {
        let n_used = self.routing.n_used;
        let (mut ids, mut weights) = (self.routing.ids.clone(), before.to_vec());
        if scores.len() != self.routing.n_tokens || weights.len() != ids.len() {
            return (RerouteCounts { refused: self.routing.n_tokens as u64, ..RerouteCounts::default() }, None);
        }
        let scores: Vec<TokenScores> =
            scores.iter().map(|RouterScores { selection, weights }| TokenScores { selection, weights }).collect();
        let choice = Choice { ids: &mut ids, weights: &mut weights, n_used, weighing };
        let outcome = reroute(rules, choice, &scores, is_present);
        let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        if ids == self.routing.ids && weights.iter().zip(before).all(is_same) {
            return (outcome, None);
        }
        let mut routing = Routing::default();
        let known = ids.into_iter().map(i32::from);
        routing.set(known, n_used, self.n_expert).expect("they are experts of the layer");
        let unmasked = std::mem::replace(&mut self.routing, routing);
        let mut fractions = vec![0.0; self.n_expert];
        for &expert in &unmasked.needed {
            fractions[usize::from(expert)] = unmasked.fraction(expert, before);
        }
        self.unmasked = Some(Unmasked { routing: unmasked, weights: before.to_vec(), fractions });
        self.known.extend_from_slice(&weights);
        (outcome, Some(weights))
    }

    /// Observes how flat the layer's router is.
    pub(super) fn observe_flatness(
        &self,
        flatness: &mut Flatness,
        rules: &Rerouting,
        before: &[f32],
        scores: &[RouterScores],
    ) {
        let n_used = self.routing.n_used.max(1);
        let tokens = self.routing.ids.chunks(n_used).zip(before.chunks(n_used)).zip(scores);
        for ((ids, weights), RouterScores { selection, weights: of_all }) in tokens {
            let scores = TokenScores { selection, weights: of_all };
            flatness.observe(self.layer(), rules, ids, weights, &scores);
        }
    }

    /// Whether tokens were rerouted.
    pub(crate) fn is_rerouted(&self) -> bool {
        self.unmasked.is_some()
    }

    /// The router's own choice, and its weights as far as they are known, `[n_tokens][n_used]`.
    pub(super) fn unmasked(&self) -> (&Routing, &[f32]) {
        match &self.unmasked {
            Some(unmasked) => (&unmasked.routing, &unmasked.weights),
            None => (&self.routing, self.known_weights()),
        }
    }

    /// Demands a precision of each expert, by the router's `weights`, `[n_tokens][n_used]`, if these decide anything.
    pub(crate) fn demand(&mut self, precisions: &mut Precisions, weights: &[f32]) {
        self.weights.clear();
        if precisions.asks_weights(self.phase) {
            self.weights.extend_from_slice(weights);
        }
        precisions.demands(&self.routing, &self.weights, self.n_expert, self.phase, &mut self.demands);
    }

    /// Takes a recorded order of need, each expert once, and each expert's fraction of the weights, by expert index.
    pub(crate) fn recorded(&mut self, needed: &[u16], fractions: &[f32]) {
        self.routing.needed.clear();
        self.routing.needed.extend_from_slice(needed);
        self.fractions.clear();
        self.fractions.extend_from_slice(fractions);
        self.fractions.resize(self.n_expert, 0.0);
    }

    /// The router's weights, and what is known of them in exact mode.
    fn known_weights(&self) -> &[f32] {
        if self.weights.is_empty() { &self.known } else { &self.weights }
    }

    /// An expert's fraction of the router's weights, summed over tokens; all fractions of a token sum to 1. Known once
    /// the layer has begun.
    pub fn fraction(&self, expert: u16) -> f32 {
        self.fractions.get(usize::from(expert)).copied().unwrap_or(0.0)
    }

    /// The router's own choice, and each expert's fraction of its weights, by expert index: policies go by these.
    fn of_router(&self) -> (&Routing, &[f32]) {
        match &self.unmasked {
            Some(unmasked) => (&unmasked.routing, &unmasked.fractions),
            None => (&self.routing, &self.fractions),
        }
    }

    /// Experts that the router chose and no token uses.
    pub fn passed_over(&self) -> impl Iterator<Item = ExpertId> {
        let chosen = self.unmasked.iter().flat_map(|unmasked| &unmasked.routing.needed);
        let unused = chosen.copied().filter(|&index| self.routing.pairs_of(index).is_empty());
        unused.map(|index| ExpertId { layer: self.layer(), index })
    }

    /// How an expert was used, for policies; `None` of a substitute, which no router chose.
    pub fn usage(&self, expert: u16, hit: bool, precision: Option<Precision>) -> Option<Use> {
        let (routing, fractions) = self.of_router();
        let (n_tokens, since) = routing.uses_of(expert);
        let weight = fractions.get(usize::from(expert)).copied().unwrap_or(0.0);
        let is_chosen = self.unmasked.is_none() || !routing.pairs_of(expert).is_empty();
        is_chosen.then_some(Use { hit, precision, weight, n_tokens, since })
    }

    /// Tokens whose router chose an expert, and its fraction of each one's weights.
    pub(super) fn tokens_of(&self, expert: u16) -> Vec<(usize, f32)> {
        let (routing, weights) = self.unmasked();
        let position = |pair: &Pair| pair.token as usize * routing.n_used + pair.rank as usize;
        let fraction = |pair: &Pair| (pair.token as usize, routing.fraction_of_pair(position(pair), weights));
        routing.pairs_of(expert).iter().map(fraction).collect()
    }

    /// Each token's experts and their fractions, which sum to 1.
    pub fn tokens(&self) -> Vec<Vec<(u16, f32)>> {
        match self.routing.n_tokens {
            1 => vec![self.routing.needed.iter().map(|&index| (index, self.fraction(index))).collect()],
            _ => self.routing.tokens(self.known_weights()),
        }
    }

    /// The executed experts of each token, and the router's choice where it differs.
    pub(super) fn token_choices(&self) -> TokenChoices {
        match &self.unmasked {
            None => TokenChoices { wanted: self.tokens(), used: None },
            Some(unmasked) => {
                TokenChoices { wanted: unmasked.routing.tokens(&unmasked.weights), used: Some(self.tokens()) }
            }
        }
    }

    /// Keeps of a router's `scores`, `[n_tokens][n_expert]`, those of the chosen experts: they are its weights.
    pub(super) fn know(&mut self, scores: &[f32]) {
        if self.unmasked.is_none() {
            let tokens =
                scores.chunks_exact(self.n_expert.max(1)).zip(self.routing.ids.chunks(self.routing.n_used.max(1)));
            self.known.extend(tokens.flat_map(|(scores, ids)| ids.iter().map(|&id| scores[usize::from(id)])));
        }
    }

    /// The router's weights of its own choice, as first seen, and the norms of its inputs; empty where not known.
    pub(super) fn observed(&self) -> (&[f32], &[f32]) {
        let Observed { weights, norms } = &self.observed;
        (if weights.is_empty() { self.unmasked().1 } else { weights }, norms)
    }

    /// Sums up each expert's fraction of the weights, unless a recording has said it.
    pub(super) fn sum_fractions(&mut self) {
        if self.fractions.is_empty() {
            let weights = if self.weights.is_empty() { &self.known } else { &self.weights };
            self.fractions.resize(self.n_expert, 0.0);
            for &expert in &self.routing.needed {
                self.fractions[usize::from(expert)] = self.routing.fraction(expert, weights);
            }
        }
    }

    /// Whether the next layer will need nearly all of its experts, too: they are read ahead.
    pub fn is_dense(&self) -> bool {
        self.routing.n_tokens > 1 && self.routing.needed.len() * 10 >= self.n_expert * DENSE_TENTHS
    }

    /// Takes the experts that a step leaves out from the router's weights. Whether any weight may have changed.
    pub(super) fn leave_out(&mut self, step: &LayerStep, precisions: &Precisions) -> bool {
        if !self.leaves_out(step) {
            return false;
        }
        let without = |weights: &mut [f32], left_out: &[bool]| precisions.without_skipped(weights, left_out);
        self.routing.leave_out(&step.skipped, &mut self.weights, without);
        true
    }

    /// Whether router weights change because experts are left out.
    pub(super) fn leaves_out(&self, step: &LayerStep) -> bool {
        !step.skipped.is_empty() && !self.splits.is_later && !self.weights.is_empty()
    }

    /// Whether it is the last split of its layer, which has `n_kinds` matrices, of a batch that decodes.
    pub(super) fn ends_decoded_layer(&self, n_kinds: usize) -> bool {
        self.phase.is_decode() && self.splits.kinds.len() >= n_kinds
    }
}

// The step.

/// A needed expert and the version of it that is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    pub index: u16,
    pub precision: Precision,
    /// The number of the layer's share that the version belongs to.
    pub share: u16,
    /// Its row in the share; `None` for one that streams through staging, or is on the device.
    pub row: Option<u32>,
    /// The device that multiplies has it: nothing is read.
    pub is_on_device: bool,
}

/// A layer in progress, or one of the splits in which it comes.
#[derive(Debug)]
pub struct LayerStep {
    pub layer: u16,
    /// Needed experts that are multiplied, in the order of need.
    pub used: Vec<Used>,
    /// Needed experts that are left out.
    pub skipped: Vec<u16>,
    /// Used experts that were there.
    pub(super) n_hits: u64,
    pub(super) pinned: Vec<SlotId>,
}

impl LayerStep {
    /// The version of an expert that this step multiplies.
    pub fn version(&self, used: Used) -> Version {
        Version { expert: ExpertId { layer: self.layer, index: used.index }, precision: used.precision }
    }

    pub(super) fn versions(&self) -> impl Iterator<Item = Version> {
        self.used.iter().map(|&used| self.version(used))
    }
}
