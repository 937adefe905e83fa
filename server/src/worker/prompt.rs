//! Evaluates prompts in pieces, bounded by the time until others must have their next token.

use std::sync::Arc;
use std::time::Instant;

use hobbit::{BatchToken, EvalError, Session};

use super::Worker;
use super::slot::{Run, Slot, Stage};
use super::step::{progress, spelled, traffic};
use crate::error::ApiError;
use crate::job::{Event, Probabilities, Work};
use crate::schedule::{Turn, divide, in_order, take_whole};

impl Worker {
    /// Evaluates one piece, a part of each waiting prompt.
    pub(super) fn evaluate_prompts(&mut self) {
        // Oldest first.
        let mut order: Vec<usize> = (0..self.slots.len()).collect();
        order.sort_by_key(|at| self.slots[*at].run.as_ref().map_or(u64::MAX, |run| run.job.id));
        // Prompts with other adapters than the oldest wait until that one is done.
        let oldest = order.iter().find(|at| self.slots[**at].n_lacking() > 0);
        if let Some(lora) = oldest.map(|at| std::sync::Arc::clone(&self.slots[*at].lora)) {
            order.retain(|at| self.slots[*at].lora == lora);
            self.session.set_adapters(&lora);
        }
        let n_generating = self.slots.iter().filter(|slot| slot.is_generating()).count();
        let others_generate = n_generating > 0;
        let n_waiting = self.slots.iter().filter(|slot| slot.n_lacking() > 0).count();
        if !self.pace.is_due(n_waiting, n_generating) {
            return;
        }
        let starts_with_chunk = |at: &usize| self.slots[*at].next_chunk().is_some_and(|(n_before, _)| n_before == 0);
        if let Some(at) = order.iter().copied().find(starts_with_chunk) {
            return self.evaluate_chunk(at);
        }
        let lacking: Vec<usize> = order.iter().map(|at| self.slots[*at].n_ready()).collect();
        if lacking.iter().all(|n| *n == 0) {
            return;
        }
        let shares = if self.slots.iter().any(is_embedding) {
            // Pooling needs all tokens of a text in one evaluation.
            take_whole(&lacking, |_| true, self.options.n_batch)
        } else {
            let n_ubatch = self.session.width_for(lacking.iter().sum());
            let width = self.pace.width(n_ubatch, others_generate);
            if self.options.has_fused_attention {
                self.turn = if self.turn == Turn::Short { Turn::Long } else { Turn::Short };
                divide(width, n_ubatch, self.turn, &lacking)
            } else {
                in_order(width, n_ubatch, &lacking)
            }
        };
        let members = || order.iter().zip(&shares).filter(|(_, share)| **share > 0);
        let n_scoring = members().filter(|(at, _)| scores_prompt(&self.slots[**at])).count();
        // The last token of each piece has logits, too.
        let n_scored = (self.options.n_outputs.saturating_sub(members().count()) / n_scoring.max(1)).max(1);
        let most = |at: usize| {
            let scored = if scores_prompt(&self.slots[at]) { n_scored } else { usize::MAX };
            self.slots[at].run.as_ref().map_or(0, Run::n_to_cut).min(scored)
        };
        let pieces = members().map(|(at, share)| (*at, (*share).min(most(*at)))).filter(|(_, n)| *n > 0);
        let pieces: Vec<(usize, usize)> = pieces.collect();
        self.evaluate_pieces(&pieces);
    }

    /// Evaluates these (slot, token count) pieces together.
    fn evaluate_pieces(&mut self, pieces: &[(usize, usize)]) {
        let mut batch = Vec::new();
        let mut members = Vec::new();
        for &(at, n) in pieces {
            let slot = &self.slots[at];
            let Some(run) = &slot.run else { continue };
            let logits = is_embedding(slot) || scores_prompt(slot);
            members.push((at, batch.len(), n));
            let piece = &run.job.prompt[run.counts.n_done()..][..n];
            for (&token, position) in piece.iter().zip(slot.tokens(&self.session).len()..) {
                let (position, sequence) = (position as i32, slot.sequence());
                batch.push(BatchToken { token, position, sequence, logits });
            }
            // Request the last logits of every piece: a check for finite values must precede the evaluation of other
            // slots.
            if let Some(entry) = batch.last_mut() {
                entry.logits = true;
            }
        }
        if batch.is_empty() {
            return;
        }
        let slots: Vec<usize> = members.iter().map(|(at, ..)| *at).collect();
        // Long prompts take long: clients see that they are being read, and how far.
        self.show_reading(pieces);
        let (began, before) = (Instant::now(), traffic(&self.session));
        let sequences: Vec<i32> = batch.iter().map(|entry| entry.sequence).collect();
        let evaluated = self.evaluate(&sequences, |session| session.evaluate(&batch));
        pieces.iter().for_each(|(at, _)| self.slots[*at].run.iter_mut().for_each(|run| run.n_reading = 0));
        match evaluated {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return self.failed(&slots, error),
        }
        let seconds = began.elapsed().as_secs_f64();
        self.pace.evaluated(batch.len(), seconds, traffic(&self.session).io_wait_seconds - before.io_wait_seconds);
        self.status.count(|totals| {
            totals.prompt_tokens += batch.len() as u64;
            totals.prompt_seconds += seconds;
            totals.n_decode += 1;
        });
        if !members.iter().all(|&(at, first, n)| self.slots[at].is_finite(&self.session, first, n)) {
            let again = self.purge(&slots);
            let pieces = pieces.iter().filter(|(at, _)| again.contains(at));
            return pieces.for_each(|piece| self.evaluate_pieces(&[*piece]));
        }
        for (at, first, n) in members {
            self.prompted(at, first, n);
        }
    }

    /// Publishes which pieces of prompts are being evaluated.
    fn show_reading(&mut self, pieces: &[(usize, usize)]) {
        for &(at, n) in pieces {
            self.slots[at].run.iter_mut().for_each(|run| run.n_reading = n);
        }
        self.publish();
    }

    /// Encodes and evaluates the image or sound that is next in a slot's prompt.
    fn evaluate_chunk(&mut self, at: usize) {
        let slot = &self.slots[at];
        let sequence = slot.sequence();
        let chunk = slot.next_chunk().map(|(_, chunk)| Arc::clone(chunk));
        let (Some(chunk), Some(projector)) = (chunk, self.projector.clone()) else { return };
        self.show_reading(&[]);
        let began = Instant::now();
        loop {
            match self.session.evaluate_media(&projector, &chunk, sequence) {
                Ok(()) => break,
                Err(error @ EvalError::ContextFull { .. }) => match self.give_way(None, &[]) {
                    Ok(Some(gone)) if gone != at => {}
                    Ok(Some(_)) => return,
                    Ok(None) => return self.failed(&[at], error),
                    Err(error) => return self.failed(&[at], error),
                },
                Err(error) => return self.failed(&[at], error),
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        self.pace.spent(seconds);
        self.status.count(|totals| {
            totals.prompt_tokens += chunk.n_tokens() as u64;
            totals.prompt_seconds += seconds;
            totals.n_decode += 1;
        });
        let last = chunk.n_tokens().saturating_sub(1) % self.options.n_batch;
        if !self.session.has_finite_logits(last) {
            // If it may have been innocent, the next round evaluates it again.
            self.purge(&[at]);
            return;
        }
        self.prompted(at, last, chunk.n_positions());
    }

    /// Records an evaluated piece of a slot's prompt, whose batch entries begin at `first`.
    fn prompted(&mut self, at: usize, first: usize, n: usize) {
        let slot = &mut self.slots[at];
        let Some(run) = slot.run.as_mut() else { return };
        let scores = scores(run, &self.session, first, n);
        if !scores.is_empty() {
            let _ = run.job.events.send(Event::Scores(scores));
        }
        let piece = &run.job.prompt[run.counts.n_done()..][..n];
        if let Some(sampler) = &mut run.sampler {
            piece.iter().for_each(|token| sampler.accept(*token));
        }
        run.counts.n_prompt += n;
        run.release_encoder();
        let is_last = run.counts.n_done() == run.job.prompt.len();
        if is_last {
            run.prompted = Some(Instant::now());
        }
        let is_embedding = matches!(run.job.work, Work::Embed);
        let cut = run.cuts.iter().copied().find(|cut| cut.at == run.counts.n_done());
        progress(slot);
        if let Err(error) = self.session.sequences_mut().evaluated_piece(slot.sequence(), cut) {
            return self.failed(&[at], error);
        }
        match (is_last, is_embedding) {
            (false, _) => {}
            (true, true) => self.embedded(at, first),
            (true, false) => {
                if let Some(run) = self.slots[at].run.as_mut() {
                    run.stage = Stage::Generating;
                }
                self.choose(at);
            }
        }
    }

    /// Sends the embeddings of a slot's sequence, whose entries begin at `first`.
    fn embedded(&mut self, at: usize, first: usize) {
        let slot = &mut self.slots[at];
        let Some(run) = slot.run.take() else { return };
        let rows = slot.rows(&self.session, first, run.job.prompt.len());
        run.job.events.send(match rows {
            Some(rows) => Event::Embedding(rows),
            None => Event::Failed(ApiError::server("llama.cpp computed no embeddings")),
        });
        // Embeddings are not continued.
        let _ = slot.forget(&mut self.session);
        self.freed(at);
    }
}

fn scores_prompt(slot: &Slot) -> bool {
    slot.run.as_ref().is_some_and(Run::scores_prompt)
}

fn is_embedding(slot: &Slot) -> bool {
    slot.run.as_ref().is_some_and(|run| matches!(run.job.work, Work::Embed))
}

/// The candidates for the tokens after those of an evaluated piece, if the request wants them.
fn scores(run: &Run, session: &Session, first: usize, n: usize) -> Vec<Probabilities> {
    let Some(generate) = run.generate().filter(|generate| generate.scores_prompt) else { return Vec::new() };
    let next = run.job.prompt[run.counts.n_done()..].iter().skip(1).take(n);
    let scored = next.zip(first..).filter_map(|(&token, index)| {
        let found = hobbit::engine::Probabilities::of_logits(session.logits(index)?, token, generate.n_probs);
        Some(spelled(session.model(), token, found))
    });
    scored.collect()
}
