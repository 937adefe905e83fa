//! Drafted tokens in a batch. Until they are judged, their uses are held back from the policy; those of rejected ones
//! never reach it, and experts that only these read are evicted first.

use super::selection::Selection;
use super::{Observer, Reads, Residency};
use crate::cache::Use;
use crate::expert::{ExpertId, Precision, Version};

/// The drafts of the running batch.
#[derive(Debug, Default)]
pub(super) struct Drafts {
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
    /// Tokens that are no drafts, of so many.
    pub(super) fn n_certain(&self, n_tokens: u32) -> u32 {
        n_tokens.saturating_sub(self.is_draft.iter().filter(|is_draft| **is_draft).count() as u32)
    }

    /// Which tokens of a layer are drafts, if it has the batch's tokens: not if llama.cpp has divided the batch.
    pub(super) fn of(&self, selection: &Selection) -> &[bool] {
        let has_all = self.is_draft.len() == selection.routing.n_tokens;
        if has_all { &self.is_draft } else { &[] }
    }
}

impl<R: Reads, O: Observer> Residency<R, O> {
    /// Tokens of the batch that has begun, and which of them are drafts.
    pub fn expect_drafts(&mut self, is_draft: &[bool]) {
        self.drafts.is_draft.clear();
        if is_draft.contains(&true) {
            self.drafts.is_draft.extend_from_slice(is_draft);
        }
    }

    /// Judges the drafts of the batch that was evaluated last: the policy sees the accepted ones as if each had come
    /// alone. `is_accepted` is by token of the batch.
    pub fn judge_drafts(&mut self, is_accepted: &[bool]) {
        let held = std::mem::take(&mut self.drafts.held);
        let is_accepted = |token: usize| is_accepted.get(token).copied().unwrap_or(false);
        for Held { token, event, .. } in &held {
            let Event::Use { expert, usage: Use { hit: false, precision: Some(precision), .. }, is_alone: true } =
                event
            else {
                continue;
            };
            if !is_accepted(*token) {
                self.cache.set_unwanted(Version { expert: *expert, precision: *precision });
            }
        }
        for token in (0..self.drafts.is_draft.len()).filter(|token| self.drafts.is_draft[*token] && is_accepted(*token))
        {
            self.cache.begin_batch(false);
            let mut running = None;
            for Held { layer, event, .. } in held.iter().filter(|held| held.token == token) {
                if running.replace(*layer) != Some(*layer) {
                    self.cache.begin_layer(*layer, 1);
                }
                match event {
                    Event::Scores(scores) => self.cache.scores(*layer, scores),
                    Event::Use { expert, usage, .. } => {
                        let version = usage.precision.map(|precision| Version { expert: *expert, precision });
                        // It may have been evicted since.
                        let hit = version.is_some_and(|version| self.cache.is_complete(version));
                        self.cache.touch(*expert, Use { hit, ..*usage });
                    }
                }
            }
            self.cache.end_batch(1);
        }
        self.drafts.is_draft.clear();
    }

    /// Tells the policy the scores of a layer's token, at once or when its draft is accepted.
    pub(super) fn tell_scores_of(&mut self, selection: &Selection, token: usize, scores: &[f32]) {
        let layer = selection.layer();
        if self.drafts.of(selection).get(token) == Some(&true) {
            self.drafts.held.push(Held { token, layer, event: Event::Scores(scores.to_vec()) });
        } else {
            self.tell_scores(layer, scores);
        }
    }

    /// Tells the policy how tokens used an expert, at once or when their drafts are accepted. A substitute is used, not
    /// wanted: policies learn the choices of routers.
    pub(super) fn touch(&mut self, selection: &Selection, expert: ExpertId, hit: bool, precision: Option<Precision>) {
        if self.drafts.of(selection).is_empty() {
            let usage = selection.usage(expert.index, hit, precision);
            usage.into_iter().for_each(|usage| self.cache.touch(expert, usage));
            return;
        }
        let Drafts { is_draft, held } = &mut self.drafts;
        let tokens = selection.tokens_of(expert.index);
        let certain = |token: &usize| !is_draft[*token];
        let last = tokens.iter().map(|(token, _)| *token).rfind(certain);
        for &(token, weight) in tokens.iter().filter(|(token, _)| is_draft[*token]) {
            let usage = Use::by_one(hit, precision, weight);
            let event = Event::Use { expert, usage, is_alone: last.is_none() };
            held.push(Held { token, layer: expert.layer, event });
        }
        if let Some(last) = last {
            let own = tokens.iter().filter(|(token, _)| certain(token));
            let n_tokens = own.clone().count() as u32;
            let weight = own.map(|(_, weight)| weight).sum();
            let since = is_draft[last + 1..].iter().filter(|is_draft| !**is_draft).count() as u32;
            self.cache.touch(expert, Use { hit, precision, weight, n_tokens, since });
        }
    }

    /// Forgets drafts that were not judged.
    pub(super) fn forget_drafts(&mut self) {
        self.drafts.is_draft.clear();
        self.drafts.held.clear();
    }
}
