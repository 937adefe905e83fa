//! Routing that knows what is in memory: an expert that would have to be read gives way to one that is there.
//!
//! One loop serves three rules. It pairs a token's missing experts, by rising score, with unchosen experts in memory,
//! by falling score, and exchanges a pair if the rule allows it:
//!
//! | rule | allows |
//! |---|---|
//! | [`Rerouting::bias`], λ | the top k after λ times the range of the token's scores is added to present experts |
//! | [`Rerouting::substitute`], α | a missing expert below (1 + α) S' for one above (1 - α) S' (SMoE, section 4.2) |
//! | [`Rerouting::only_present`] | everything: what is missing is masked (SwapMoE, section 3.1) |
//!
//! S' is the best score that was not chosen. An expert that is present is never exchanged, so where everything is
//! present not a bit changes. Pure.

use super::demand::scale;

/// Rules of rerouting. The default changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rerouting {
    /// λ: bonus of a present expert, as a part of the range of a token's scores.
    pub bias: f32,
    /// Number of a token's best experts that always stay, for any λ and α.
    pub keep_top: usize,
    /// α: maximum distance of both scores of an exchange from the best score that was not chosen, as a part of it.
    pub substitute: f32,
    /// Most experts of a token that α exchanges; `None` for any number.
    pub substitute_max: Option<usize>,
    /// Missing experts are not used if enough are present.
    pub only_present: bool,
    /// α exchanges nothing in layers whose routers are flat.
    pub spares_flat: bool,
}

/// A router's scores of all experts for one token, `[n_expert]` each.
#[derive(Clone, Copy, Debug)]
pub struct TokenScores<'a> {
    /// Decide the choice; negative infinity is never chosen.
    pub selection: &'a [f32],
    /// Become the weights of the chosen experts.
    pub weights: &'a [f32],
}

/// How a model makes weights of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weighing {
    /// The chosen experts' sum is always the same.
    Normalised,
    /// Shares of the sum over all experts.
    OfAll,
    /// Each score alone.
    Each,
}

/// The choice of a few tokens, to be changed in place.
#[derive(Debug)]
pub struct Choice<'a> {
    /// The router's, `[n_tokens][n_used]`.
    pub ids: &'a mut [u16],
    /// Its weights, `[n_tokens][n_used]`.
    pub weights: &'a mut [f32],
    /// Experts of a token.
    pub n_used: usize,
    /// How these weights were made.
    pub weighing: Weighing,
}

/// Uses of other experts than the router's, while decoding.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct RerouteCounts {
    /// Uses of another expert than the router's, which was in memory.
    pub uses: u64,
    /// Tokens that miss an expert in a layer and were left alone, because their scores do not explain their choice.
    pub refused: u64,
    /// Shares of a token's weight lost by rerouting, summed; divided by `uses` it is the mean.
    pub given_up: f64,
}

impl Rerouting {
    /// Whether no expert is ever exchanged.
    pub fn is_off(&self) -> bool {
        !self.only_present && self.bias <= 0.0 && self.substitute <= 0.0
    }

    /// Whether a missing expert may give way to `candidate`, a present one. `next`: best score of the experts that were
    /// not chosen; `lead`: advantage of present experts.
    fn allows(&self, missing: f32, candidate: f32, next: f32, lead: f32) -> By {
        if self.only_present || self.bias > 0.0 && candidate + lead > missing {
            return By::Lead;
        }
        let alpha = self.substitute;
        let is_near = missing < (1.0 + alpha) * next && candidate >= (1.0 - alpha) * next;
        if alpha > 0.0 && is_near { By::Nearness } else { By::Nothing }
    }

    /// The part of a token's weight that α may exchange for experts in memory; `None` if its scores do not explain its
    /// choice.
    pub(super) fn exchangeable(&self, ids: &[u16], weights: &[f32], scores: &TokenScores<'_>) -> Option<f32> {
        if !explains(scores, ids, weights) {
            return None;
        }
        let most = (1.0 + self.substitute) * best_unchosen(scores.selection, ids);
        let is_near = |index: &u16| scores.selection[usize::from(*index)] < most;
        let all: f32 = weights.iter().map(|weight| weight.abs()).sum();
        let near: f32 = ids.iter().zip(weights).filter(|(index, _)| is_near(index)).map(|(_, own)| own.abs()).sum();
        (all > 0.0).then(|| near / all)
    }

    /// Lowers the predicted scores of a later layer's router for experts that are not there, so that what is read
    /// ahead is what will be used. `scores` are shares, `[n_expert]`, of which the best `n_used` will be chosen.
    pub(crate) fn lower_missing(&self, scores: &mut [f32], n_used: usize, is_present: &dyn Fn(u16) -> bool) {
        if self.is_off() || scores.len() <= n_used {
            return;
        }
        let order = by_score(scores, 0..scores.len() as u16);
        let score = |rank: usize| scores[usize::from(order[rank])];
        let lead = self.bias * (score(0) - score(order.len() - 1));
        let top = (1.0 + self.substitute) * score(n_used);
        let n_kept = if self.only_present { 0 } else { self.keep_top };
        for &index in &order[n_kept.min(order.len())..] {
            let score = &mut scores[usize::from(index)];
            if is_present(index) {
                continue;
            }
            if self.only_present || self.substitute > 0.0 && *score < top {
                *score = 0.0;
            }
            *score = (*score - lead).max(0.0);
        }
    }
}

/// Which rule allows an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Nothing,
    Lead,
    Nearness,
}

/// Exchanges missing experts of `choice` for present ones, as far as `rules` allow. `scores`: one for each token.
/// `is_present`: whether an expert can be used without a read. Experts that other tokens of the batch need anyway
/// count as present.
pub fn reroute(
    rules: &Rerouting,
    choice: Choice<'_>,
    scores: &[TokenScores<'_>],
    is_present: &dyn Fn(u16) -> bool,
) -> RerouteCounts {
    let Choice { ids, weights, n_used, weighing } = choice;
    let mut outcome = RerouteCounts::default();
    if rules.is_off() || n_used == 0 {
        return outcome;
    }
    // The experts that each token uses in any case, and those that earlier tokens use.
    let mut needs: Vec<Vec<u16>> = match scores.len() {
        1 => vec![Vec::new()],
        _ => ids.chunks(n_used).zip(scores).map(|(ids, scores)| kept(rules, ids, scores)).collect(),
    };
    let tokens = ids.chunks_mut(n_used).zip(weights.chunks_mut(n_used)).zip(scores);
    // Masked experts change all weights, whatever was chosen.
    let masks = rules.only_present && weighing == Weighing::OfAll;
    for (token, ((ids, weights), scores)) in tokens.enumerate() {
        let is_needed =
            |index: u16| needs.iter().enumerate().any(|(other, needs)| other != token && needs.contains(&index));
        let is_there = |index: u16| is_present(index) || is_needed(index);
        if masks || ids.iter().any(|&index| !is_there(index)) {
            if !explains(scores, ids, weights) {
                outcome.refused += 1;
                continue;
            }
            exchange(rules, ids, weights, scores, weighing, &is_there, &mut outcome);
        }
        if needs.len() > 1 {
            needs[token] = ids.to_vec();
        }
    }
    outcome
}

/// The experts that a token keeps, present or not.
fn kept(rules: &Rerouting, ids: &[u16], scores: &TokenScores<'_>) -> Vec<u16> {
    if rules.only_present || !is_whole(scores, ids) {
        return Vec::new();
    }
    let order = by_score(scores.selection, ids.iter().copied());
    let next = best_unchosen(scores.selection, ids);
    let is_near = |index: u16| scores.selection[usize::from(index)] < (1.0 + rules.substitute) * next;
    let stays = |rank: usize, index: u16| rank < rules.keep_top || rules.bias <= 0.0 && !is_near(index);
    order.iter().enumerate().filter(|(rank, index)| stays(*rank, **index)).map(|(_, index)| *index).collect()
}

/// Every expert of the choice has scores.
fn is_whole(scores: &TokenScores<'_>, ids: &[u16]) -> bool {
    let n_expert = scores.selection.len();
    scores.weights.len() == n_expert && ids.iter().all(|&index| usize::from(index) < n_expert)
}

/// Whether a choice was made by these scores: no expert that was left has a higher one.
fn explains(scores: &TokenScores<'_>, ids: &[u16], weights: &[f32]) -> bool {
    if !is_whole(scores, ids) || weights.len() != ids.len() || weights.iter().any(|weight| !weight.is_finite()) {
        return false;
    }
    let of = |index: u16| scores.selection[usize::from(index)];
    let lowest = ids.iter().map(|&index| of(index)).fold(f32::INFINITY, f32::min);
    let is_distinct = ids.iter().enumerate().all(|(rank, id)| !ids[..rank].contains(id));
    let are_numbers = scores.selection.iter().chain(scores.weights).all(|score| !score.is_nan());
    is_distinct && are_numbers && lowest.is_finite() && best_unchosen(scores.selection, ids) <= lowest
}

/// The best score that was not chosen; negative infinity where everything was.
fn best_unchosen(selection: &[f32], ids: &[u16]) -> f32 {
    let unchosen = selection.iter().zip(0u16..).filter(|(_, index)| !ids.contains(index));
    unchosen.map(|(score, _)| *score).fold(f32::NEG_INFINITY, f32::max)
}

/// Experts by falling score, equal ones by number.
fn by_score(scores: &[f32], experts: impl Iterator<Item = u16>) -> Vec<u16> {
    let mut order: Vec<u16> = experts.collect();
    order.sort_unstable_by(|a, b| scores[usize::from(*b)].total_cmp(&scores[usize::from(*a)]).then(a.cmp(b)));
    order
}

fn exchange(
    rules: &Rerouting,
    ids: &mut [u16],
    weights: &mut [f32],
    scores: &TokenScores<'_>,
    weighing: Weighing,
    is_present: &dyn Fn(u16) -> bool,
    outcome: &mut RerouteCounts,
) {
    let of = |index: u16| scores.selection[usize::from(index)];
    let n_kept = if rules.only_present { 0 } else { rules.keep_top };
    let chosen = by_score(scores.selection, ids.iter().copied());
    let missing: Vec<u16> = chosen.into_iter().skip(n_kept).rev().filter(|&index| !is_present(index)).collect();
    if !missing.is_empty() {
        let sum = |weights: &[f32]| weights.iter().copied().map(f64::from).sum::<f64>();
        let all = scores.selection.len() as u16;
        let finite = || scores.selection.iter().copied().filter(|score| score.is_finite());
        let [low, high] = [finite().fold(f32::INFINITY, f32::min), finite().fold(f32::NEG_INFINITY, f32::max)];
        let (next, lead) = (best_unchosen(scores.selection, ids), rules.bias * (high - low));
        let is_candidate = |index: &u16| !ids.contains(index) && of(*index).is_finite() && is_present(*index);
        let mut candidates = by_score(scores.selection, (0..all).filter(is_candidate)).into_iter().peekable();
        let whole: f64 = ids.iter().map(|&index| f64::from(scores.weights[usize::from(index)])).sum();
        let (before, mut by_nearness) = (sum(weights), 0);
        let mut exchanged = 0;
        for index in missing {
            let Some(&candidate) = candidates.peek() else { break };
            match rules.allows(of(index), of(candidate), next, lead) {
                By::Nothing => break,
                By::Lead => {}
                By::Nearness if rules.substitute_max.is_some_and(|max| by_nearness >= max) => break,
                By::Nearness => by_nearness += 1,
            }
            let [old, new] = [index, candidate].map(|index| f64::from(scores.weights[usize::from(index)]));
            let Some(rank) = ids.iter().position(|id| *id == index).filter(|_| old > 0.0) else { continue };
            candidates.next();
            ids[rank] = candidate;
            weights[rank] = (f64::from(weights[rank]) * (new / old)) as f32;
            exchanged += 1;
            outcome.given_up += (old - new) / whole;
        }
        outcome.uses += exchanged;
        if exchanged > 0 && weighing == Weighing::Normalised {
            scale(weights, before / sum(weights));
        }
    }
    if rules.only_present && weighing == Weighing::OfAll {
        let present = (0u16..).zip(scores.weights).filter(|(index, _)| is_present(*index) || ids.contains(index));
        let masked: f64 = present.map(|(_, weight)| f64::from(*weight)).sum();
        let all: f64 = scores.weights.iter().copied().map(f64::from).sum();
        if masked < all {
            scale(weights, all / masked);
        }
    }
}

#[cfg(test)]
mod tests;
