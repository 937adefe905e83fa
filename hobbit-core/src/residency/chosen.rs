//! What a layer's router chose, and what is decided of it: the way of every layer, whoever multiplies.

use super::step::{Asked, Choices, Elsewhere, LayerStep, Need};
use super::wanted::Wanted;
use super::{Observer, Precisions, Reads, Residency, ScoresBy, TokenChoices};
use crate::expert::{ExpertId, Precision, SliceKind, Version};
use crate::predict::Popularity;
use crate::route::{Choice, Demand, Phase, Rerouted, Routing, TokenScores, Weighing, reroute};

/// A batch that needs so many tenths of a layer's experts is dense: the next layer will need nearly all of its own.
const DENSE_TENTHS: usize = 9;

/// Products of one layer that are computed together.
#[derive(Clone, Copy, Debug)]
pub struct Split<'a> {
    /// Block number.
    pub layer: u16,
    /// Experts of the layer.
    pub n_expert: usize,
    /// Experts that the router chooses for a token.
    pub n_used: usize,
    /// The matrices, in the order of the products.
    pub kinds: &'a [SliceKind],
    /// Tells one choice of the layer from another: a layer that comes in several splits has the same in each.
    pub key: usize,
    /// What the batch is evaluated for.
    pub phase: Phase,
}

/// What is known of the router of a layer that has chosen.
#[derive(Clone, Copy, Debug)]
pub struct RouterSays<'a> {
    /// Its weights of the chosen experts, `[n_tokens][n_used]`.
    pub weights: &'a [f32],
    /// What it says of all experts, by token; empty where it is not understood.
    pub scores: &'a [TokenScores<'a>],
    /// How weights are made of that.
    pub weighing: Weighing,
}

/// A layer's choice. One per context, which shows it layer after layer.
///
/// A layer may come in several splits, and between two of them another session may begin a layer: what the first one
/// decided is kept here.
#[derive(Debug, Default)]
pub struct Chosen {
    /// Who is routed where.
    pub routing: Routing,
    /// The router's weights, `[n_tokens][n_used]`; empty in exact mode.
    pub weights: Vec<f32>,
    /// The same of a batch that decodes in exact mode, where scores are known.
    known: Vec<f32>,
    /// Each expert's share of the weights, by expert index: a token's sum to 1.
    pub(super) shares: Vec<f32>,
    /// What [`Chosen::heard`] was told.
    said: Vec<f32>,
    input_norms: Vec<f32>,
    /// Of a prompt: how many tokens are expected to use which expert of the next layer, if that is known.
    pub expected: Popularity,
    /// What the router chose, if tokens have been sent elsewhere.
    wanted: Option<Wanted>,
    phase: Phase,
    /// What is asked of each expert, by expert index.
    pub demands: Vec<Demand>,
    /// Layer and key of the choice that was decided last.
    decided: Option<(u16, usize)>,
    /// What of it has come.
    kinds: Vec<SliceKind>,
    /// What was decided, by expert index.
    choices: Vec<Option<Precision>>,
    /// The split is not the first one of its layer.
    is_again: bool,
    /// Its layer's tokens have been counted.
    has_entered: bool,
    /// The split's own part of [`Chosen::kinds`] begins here.
    first_kind: usize,
    /// Experts of the layer.
    pub n_expert: usize,
}

impl Chosen {
    /// A split has come, with its router's choice, `[n_tokens][n_used]`.
    ///
    /// # Errors
    /// An id that is no expert.
    pub fn set(&mut self, split: &Split, ids: impl Iterator<Item = i32>) -> Result<(), i32> {
        self.routing.set(ids, split.n_used, split.n_expert)?;
        self.n_expert = split.n_expert;
        let key = Some((split.layer, split.key));
        self.has_entered = false;
        self.is_again = self.decided == key && split.kinds.iter().all(|kind| !self.kinds.contains(kind));
        if !self.is_again {
            (self.decided, self.choices) = (key, Vec::new());
            self.kinds.clear();
            self.weights.clear();
            self.wanted = None;
        }
        self.phase = split.phase;
        self.known.clear();
        self.shares.clear();
        self.expected.clear();
        self.input_norms.clear();
        self.said.clear();
        self.first_kind = self.kinds.len();
        self.kinds.extend_from_slice(split.kinds);
        Ok(())
    }

    /// Whether an earlier split has decided already: then nothing is asked or counted again.
    pub fn is_again(&self) -> bool {
        self.is_again
    }

    /// Block number; 0 before the first layer.
    pub fn layer(&self) -> u16 {
        self.decided.map_or(0, |(layer, _)| layer)
    }

    /// What the batch is evaluated for.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether it is the first split of a layer of a batch that decodes: what concerns each token is then told to policies and
    /// predictors.
    pub fn decodes_anew(&self) -> bool {
        self.phase.is_decode() && !self.is_again
    }

    /// Whether experts that are missing may be replaced here by others.
    pub fn may_reroute<R: Reads, O: Observer>(&self, residency: &Residency<R, O>) -> bool {
        !self.is_again && !residency.rerouting.is_off() && (self.phase.is_decode() || residency.reroutes_prompts)
    }

    /// The router's `weights` of its own choice, `[n_tokens][n_used]`, and its `input`, `[n_tokens][width]`, where that is known: for
    /// who counts what is wanted.
    pub fn heard(&mut self, weights: &[f32], input: Option<&[f32]>) {
        let width = input.map_or(0, |input| input.len() / self.routing.n_tokens.max(1)).max(1);
        let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
        self.said.clear();
        self.said.extend_from_slice(weights);
        self.input_norms.clear();
        self.input_norms.extend(input.unwrap_or_default().chunks_exact(width).map(norm));
    }

    /// Whether [`Chosen::reroute`] may change anything: an expert is missing and would take another's slot (what finds a free one
    /// is read once and stays), or what is missing changes all weights. `weighing` is asked only where that decides.
    pub fn wants_scores<R: Reads, O: Observer>(
        &self,
        residency: &Residency<R, O>,
        elsewhere: &Elsewhere,
        weighing: impl FnOnce() -> Weighing,
    ) -> bool {
        let layer = self.layer();
        let only_present = residency.rerouting.only_present;
        let is_there = |&&index: &&u16| residency.is_present(ExpertId { layer, index }, elsewhere.has);
        let mut missing = self.routing.needed.iter().filter(|index| !is_there(index)).peekable();
        if missing.peek().is_none() {
            return only_present && weighing() == Weighing::OfAll;
        }
        let has_room = |&index: &u16| residency.cache().has_empty_slot(Version::high(ExpertId { layer, index }));
        only_present || !missing.any(has_room)
    }

    /// Sends tokens to experts that are in memory, as [`Residency::rerouting`] says: before anything is asked for.
    /// Whether ids or weights have changed: they are [`Chosen::routing`]'s and `weights` from then on, for everything that
    /// computes; policies and whoever looks on see what the router chose.
    pub fn reroute<R: Reads, O: Observer>(
        &mut self,
        residency: &mut Residency<R, O>,
        elsewhere: &Elsewhere,
        router: &RouterSays,
        weights: &mut Vec<f32>,
    ) -> bool {
        let (layer, n_used) = (self.layer(), self.routing.n_used);
        let mut ids = self.routing.ids.clone();
        weights.clear();
        weights.extend_from_slice(router.weights);
        if router.scores.len() != self.routing.n_tokens || weights.len() != ids.len() {
            let refused = self.routing.n_tokens as u64;
            residency.count_rerouted(layer, Rerouted { refused, ..Rerouted::default() });
            return false;
        }
        let choice = Choice { ids: &mut ids, weights, n_used, weighing: router.weighing };
        let is_present = |index| residency.is_present(ExpertId { layer, index }, elsewhere.has);
        let outcome = reroute(&residency.rerouting, choice, router.scores, &is_present);
        residency.count_rerouted(layer, outcome);
        let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        if ids == self.routing.ids && weights.iter().zip(router.weights).all(is_same) {
            return false;
        }
        let mut routing = Routing::default();
        let known = ids.into_iter().map(i32::from);
        routing.set(known, n_used, self.n_expert).expect("they are experts of the layer");
        let wanted = std::mem::replace(&mut self.routing, routing);
        let mut shares = vec![0.0; self.n_expert];
        for &expert in &wanted.needed {
            shares[usize::from(expert)] = wanted.share(expert, router.weights);
        }
        self.wanted = Some(Wanted { routing: wanted, weights: router.weights.to_vec(), shares });
        self.known.extend_from_slice(weights);
        true
    }

    /// The router's choice, and its weights as far as they are known, `[n_tokens][n_used]`: wherever tokens went.
    fn wanted(&self) -> (&Routing, &[f32]) {
        match &self.wanted {
            Some(wanted) => (&wanted.routing, &wanted.weights),
            None => (&self.routing, self.known_weights()),
        }
    }

    /// Asks for a precision for each expert, by the router's `weights`, `[n_tokens][n_used]`; none are wanted in exact
    /// mode.
    pub fn ask(&mut self, precisions: &mut Precisions, weights: impl IntoIterator<Item = f32>) {
        self.weights.clear();
        self.weights.extend(weights);
        precisions.demands(&self.routing, &self.weights, self.n_expert, self.phase, &mut self.demands);
    }

    /// As it was recorded: the experts in the order of need, each once, and each one's share of the weights, by expert
    /// index.
    pub fn recorded(&mut self, needed: &[u16], shares: &[f32]) {
        self.routing.needed.clear();
        self.routing.needed.extend_from_slice(needed);
        self.shares.clear();
        self.shares.extend_from_slice(shares);
        self.shares.resize(self.n_expert, 0.0);
    }

    /// The router's weights, and what is known of them in exact mode.
    fn known_weights(&self) -> &[f32] {
        if self.weights.is_empty() { &self.known } else { &self.weights }
    }

    /// An expert's share of the router's weights, summed over tokens, of each of which all shares sum to 1. Once the
    /// layer has begun.
    pub fn share(&self, expert: u16) -> f32 {
        self.shares.get(usize::from(expert)).copied().unwrap_or(0.0)
    }

    /// Each token's experts and their shares, which sum to 1.
    pub fn tokens(&self) -> Vec<Vec<(u16, f32)>> {
        match self.routing.n_tokens {
            1 => vec![self.routing.needed.iter().map(|&index| (index, self.share(index))).collect()],
            _ => self.routing.tokens(self.known_weights()),
        }
    }

    /// The same of the experts that its router chose, where tokens were rerouted.
    fn wanted_tokens(&self) -> Option<Vec<Vec<(u16, f32)>>> {
        self.wanted.as_ref().map(|wanted| wanted.routing.tokens(&wanted.weights))
    }

    /// The layer's tokens are counted, once: before anything is told of them. [`Chosen::begin`] does so where nobody has.
    pub fn enter<R: Reads, O: Observer>(&mut self, residency: &mut Residency<R, O>) {
        if !self.is_again && !self.has_entered {
            self.has_entered = true;
            residency.enter(self.layer(), self.routing.n_tokens);
        }
    }

    /// Begins the split: versions are chosen, slots given, reads submitted. `scores`: what the router says of all
    /// experts, `[n_tokens][n_expert]`; empty where that is not known.
    pub fn begin<R: Reads, O: Observer>(
        &mut self,
        residency: &mut Residency<R, O>,
        scores: &[f32],
        elsewhere: &Elsewhere,
    ) -> LayerStep {
        let layer = self.layer();
        self.enter(residency);
        if !self.is_again {
            let ids = self.routing.ids.chunks(self.routing.n_used.max(1));
            for (scores, ids) in scores.chunks_exact(self.n_expert.max(1)).zip(ids) {
                residency.tell_scores(layer, scores);
                if self.wanted.is_none() {
                    self.known.extend(ids.iter().map(|&id| scores[usize::from(id)]));
                }
            }
            let (routing, weights) = self.wanted();
            let said = if self.said.is_empty() { weights } else { &self.said };
            residency.count_wanted(layer, routing, said, &self.input_norms);
            residency.begin_record(layer, routing, weights, scores);
            if self.wanted.is_some() {
                residency.observer_mut().rerouted(&self.routing.ids);
            }
            self.share_weights();
        }
        let asked = Asked {
            routing: &self.routing,
            demands: &self.demands,
            shares: &self.shares,
            wanted: self.wanted.as_ref(),
        };
        let need = Need {
            layer,
            experts: &self.routing.needed,
            kinds: &self.kinds[self.first_kind..],
            is_dense: self.is_dense(),
            expected: &self.expected,
            choices: if self.is_again { Choices::Made(&self.choices) } else { Choices::Of(asked) },
        };
        let mut step = residency.begin(&need, elsewhere);
        self.choices = std::mem::take(&mut step.choices);
        step
    }

    fn share_weights(&mut self) {
        if self.shares.is_empty() {
            let weights = if self.weights.is_empty() { &self.known } else { &self.weights };
            self.shares.resize(self.n_expert, 0.0);
            for &expert in &self.routing.needed {
                self.shares[usize::from(expert)] = self.routing.share(expert, weights);
            }
        }
    }

    /// Whether the next layer will need nearly all of its experts, too: they are read ahead.
    pub fn is_dense(&self) -> bool {
        self.routing.n_tokens > 1 && self.routing.needed.len() * 10 >= self.n_expert * DENSE_TENTHS
    }

    /// Of a layer of a batch that decodes, once: looks ahead, and reads what is worth it. `scores`: what the routers of later
    /// layers say about this layer's input, for each token: the layer and `[n_expert]` of those that are known. `is_elsewhere`:
    /// whether a version is on a device.
    pub fn predict<R: Reads, O: Observer>(
        &self,
        residency: &mut Residency<R, O>,
        step: &LayerStep,
        scores: &mut dyn FnMut(&[u16]) -> Vec<ScoresBy<u16>>,
        is_elsewhere: &dyn Fn(Version) -> bool,
    ) {
        if self.decodes_anew() && residency.looks_ahead() {
            let chosen = &self.tokens();
            let scores = &mut |targets: &[(u8, u16)]| {
                let layers: Vec<u16> = targets.iter().map(|(_, layer)| *layer).collect();
                let distance = |layer| targets.iter().find(|(_, own)| *own == layer).map(|(distance, _)| *distance);
                let by_distance = |scores: ScoresBy<u16>| {
                    scores.into_iter().filter_map(|(layer, scores)| Some((distance(layer)?, scores))).collect()
                };
                scores(&layers).into_iter().map(by_distance).collect()
            };
            let rerouted = self.wanted_tokens();
            let wanted = rerouted.as_ref().unwrap_or(chosen);
            residency.predict(step, TokenChoices { chosen, wanted, layer_seconds: None, scores }, is_elsewhere);
        }
    }

    /// Whether router weights are to be changed because experts are left out.
    pub fn leaves_out(&self, step: &LayerStep) -> bool {
        !step.skipped.is_empty() && !self.is_again && !self.weights.is_empty()
    }

    /// Takes the experts that are left out from the router's weights: `write` gets what changes, by token and rank.
    pub fn leave_out(&mut self, step: &LayerStep, precisions: &Precisions, write: impl FnMut(usize, usize, f32)) {
        let without = |weights: &mut [f32], left_out: &[bool]| precisions.without_skipped(weights, left_out);
        self.routing.leave_out(&step.skipped, &mut self.weights, without, write);
    }

    /// The split has been computed: its experts may be evicted again.
    pub fn end<R: Reads, O: Observer>(&self, residency: &mut Residency<R, O>, step: LayerStep) {
        let is_last = self.kinds.len() >= residency.layout().kinds(step.layer).len();
        residency.end(step, self.phase.is_decode() && is_last);
    }
}
