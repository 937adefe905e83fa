//! Drafted tokens in a batch. Until they are judged, their uses are held back from a cache's policy; those of rejected
//! ones never reach it, and experts that only these read are evicted first.

use super::selection::Selection;
use crate::cache::{Cache, Use};
use crate::expert::{ExpertId, Precision, Version};

/// The drafts of the running batch, and what one cache will be told of them.
#[derive(Debug, Default)]
pub struct Drafts {
    /// By token of the batch; empty: there are none.
    is_draft: Vec<bool>,
    held: Vec<Held>,
}

/// An event of a drafted token.
#[derive(Debug)]
struct Held {
    token: usize,
    layer: u16,
    event: Event,
}

#[derive(Debug)]
enum Event {
    /// The router's scores of all experts, `[n_expert]`.
    Scores(Vec<f32>),
    /// `is_alone`: drafts only chose the expert.
    Use { expert: ExpertId, usage: Use, is_alone: bool },
}

impl Drafts {
    /// Which tokens of the batch that has begun are drafts.
    pub fn expect(&mut self, is_draft: &[bool]) {
        self.is_draft.clear();
        if is_draft.contains(&true) {
            self.is_draft.extend_from_slice(is_draft);
        }
    }

    /// Forgets drafts that were not judged.
    pub fn forget(&mut self) {
        self.is_draft.clear();
        self.held.clear();
    }

    /// Tokens that are no drafts in a batch of `n_tokens`.
    pub fn n_certain(&self, n_tokens: u32) -> u32 {
        n_tokens.saturating_sub(self.is_draft.iter().filter(|is_draft| **is_draft).count() as u32)
    }

    /// Tokens of a layer that are no drafts.
    pub fn n_certain_of(&self, selection: &Selection) -> u32 {
        let n_tokens = u32::try_from(selection.routing.n_tokens).unwrap_or(u32::MAX);
        if self.of(selection).is_empty() { n_tokens } else { self.n_certain(n_tokens) }
    }

    /// Which tokens of a layer are drafts, if it has the batch's tokens: not if llama.cpp has divided the batch.
    fn of(&self, selection: &Selection) -> &[bool] {
        let has_all = self.is_draft.len() == selection.routing.n_tokens;
        if has_all { &self.is_draft } else { &[] }
    }

    /// Whether only drafts chose an expert.
    pub(super) fn is_alone(&self, selection: &Selection, expert: ExpertId) -> bool {
        let is_draft = self.of(selection);
        !is_draft.is_empty() && selection.tokens_of(expert.index).iter().all(|(token, _)| is_draft[*token])
    }

    /// Tells a policy the router's scores of a layer's token, at once or when its draft is accepted.
    pub fn scores(&mut self, cache: &mut Cache, selection: &Selection, token: usize, scores: &[f32]) {
        let layer = selection.layer();
        if self.of(selection).get(token) == Some(&true) {
            self.held.push(Held { token, layer, event: Event::Scores(scores.to_vec()) });
        } else {
            cache.scores(layer, scores);
        }
    }

    /// Tells a policy how tokens used an expert, at once or when their drafts are accepted. A substitute is used, not
    /// wanted: policies learn the choices of routers.
    pub fn touch(
        &mut self,
        cache: &mut Cache,
        selection: &Selection,
        expert: ExpertId,
        hit: bool,
        precision: Option<Precision>,
    ) {
        if self.of(selection).is_empty() {
            let usage = selection.usage(expert.index, hit, precision);
            if let Some(usage) = usage {
                cache.touch(expert, usage);
            }
            return;
        }
        let Self { is_draft, held } = self;
        let tokens = selection.tokens_of(expert.index);
        let certain = |token: &usize| !is_draft[*token];
        let last = tokens.iter().map(|(token, _)| *token).rfind(certain);
        for &(token, weight) in tokens.iter().filter(|(token, _)| is_draft[*token]) {
            let usage = Use::by_one(hit, precision, weight);
            let event = Event::Use { expert, usage, is_alone: last.is_none() };
            held.push(Held { token, layer: expert.layer, event });
        }
        if let Some(last) = last {
            let not_drafts = tokens.iter().filter(|(token, _)| certain(token));
            let n_tokens = not_drafts.clone().count() as u32;
            let weight = not_drafts.map(|(_, weight)| weight).sum();
            let since = is_draft[last + 1..].iter().filter(|is_draft| !**is_draft).count() as u32;
            cache.touch(expert, Use { hit, precision, weight, n_tokens, since });
        }
    }

    /// Judges the drafts of the batch that was evaluated last: the policy sees the accepted ones as if each had come
    /// alone. `is_accepted` is by token of the batch.
    pub fn judge(&mut self, cache: &mut Cache, is_accepted: &[bool]) {
        let held = std::mem::take(&mut self.held);
        let is_accepted = |token: usize| is_accepted.get(token).copied().unwrap_or(false);
        for Held { token, event, .. } in &held {
            let Event::Use { expert, usage: Use { hit: false, precision: Some(precision), .. }, is_alone: true } =
                event
            else {
                continue;
            };
            if !is_accepted(*token) {
                cache.set_unwanted(Version { expert: *expert, precision: *precision });
            }
        }
        for token in (0..self.is_draft.len()).filter(|token| self.is_draft[*token] && is_accepted(*token)) {
            cache.begin_batch(false);
            let mut running = None;
            for Held { layer, event, .. } in held.iter().filter(|held| held.token == token) {
                if running.replace(*layer) != Some(*layer) {
                    cache.begin_layer(*layer, 1);
                }
                match event {
                    Event::Scores(scores) => cache.scores(*layer, scores),
                    Event::Use { expert, usage, .. } => {
                        let version = usage.precision.map(|precision| Version { expert: *expert, precision });
                        // It may have been evicted since.
                        let hit = version.is_some_and(|version| cache.is_complete(version));
                        cache.touch(*expert, Use { hit, ..*usage });
                    }
                }
            }
            cache.end_batch(1);
        }
        self.is_draft.clear();
    }
}
