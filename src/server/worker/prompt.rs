//! Pieces of prompts: as much as may be evaluated before others must have their next token, divided among those that wait.

use std::time::Instant;

use hobbit::{BatchToken, Session};

use super::Worker;
use super::slot::{Phase, Slot};
use super::step::progress;
use crate::server::job::{Event, Failure, Work};
use crate::server::schedule::{Turn, divide};

impl Worker {
    /// Evaluates one piece of the prompts that wait, a part of each.
    pub(super) fn evaluate_prompts(&mut self) {
        // The oldest first.
        let mut order: Vec<usize> = (0..self.slots.len()).collect();
        order.sort_by_key(|at| self.slots[*at].run.as_ref().map_or(u64::MAX, |run| run.job.id));
        // Those with other adapters than the oldest wait until it is through.
        let oldest = order.iter().find(|at| self.slots[**at].n_lacking() > 0);
        if let Some(lora) = oldest.map(|at| std::sync::Arc::clone(&self.slots[*at].lora)) {
            order.retain(|at| self.slots[*at].lora == lora);
            self.session.set_adapters(&lora);
        }
        let lacking: Vec<usize> = order.iter().map(|at| self.slots[*at].n_lacking()).collect();
        if lacking.iter().all(|n| *n == 0) {
            return;
        }
        let is_embedding = |slot: &Slot| slot.run.as_ref().is_some_and(|run| matches!(run.job.work, Work::Embed));
        let n_batch = self.options.n_batch;
        let shares = match self.slots.iter().any(is_embedding) {
            // What is made one of a text's tokens is made of one evaluation.
            true => whole(n_batch, &lacking),
            false => {
                let others_generate = self.slots.iter().any(Slot::is_generating);
                self.turn = if self.turn == Turn::Short { Turn::Long } else { Turn::Short };
                let n_ubatch = self.options.n_ubatch;
                divide(self.pace.width(n_ubatch, others_generate), n_ubatch, self.turn, &lacking)
            }
        };
        let mut batch = Vec::new();
        let mut members = Vec::new();
        for ((&at, &share), &lacks) in order.iter().zip(&shares).zip(&lacking) {
            let slot = &self.slots[at];
            let Some(run) = slot.run.as_ref().filter(|_| share > 0) else { continue };
            let is_embedding = is_embedding(slot);
            members.push((at, batch.len(), share));
            let piece = &run.job.prompt[run.n_prompt_done..][..share];
            for (&token, position) in piece.iter().zip(slot.tokens.len()..) {
                let (position, sequence) = (position as i32, slot.sequence());
                batch.push(BatchToken { token, position, sequence, logits: is_embedding });
            }
            if let Some(entry) = batch.last_mut() {
                entry.logits |= share == lacks;
            }
        }
        let (began, before) = (Instant::now(), self.traffic());
        if let Err(error) = self.evaluate(&batch) {
            let members: Vec<usize> = members.into_iter().map(|(at, ..)| at).collect();
            return self.failed(&members, &error);
        }
        let seconds = began.elapsed().as_secs_f64();
        self.pace.evaluated(batch.len(), seconds, (self.traffic() - before).io_wait_ms / 1e3);
        self.status.prompted(batch.len(), seconds);
        for (at, first, share) in members {
            self.prompted(at, first, share);
        }
    }

    /// A piece of a slot's prompt is evaluated, entries of the batch from `first` on.
    fn prompted(&mut self, at: usize, first: usize, n: usize) {
        let slot = &mut self.slots[at];
        let Some(run) = slot.run.as_mut() else { return };
        let piece = &run.job.prompt[run.n_prompt_done..][..n];
        slot.tokens.extend_from_slice(piece);
        if let Some(sampler) = &mut run.sampler {
            piece.iter().for_each(|token| sampler.accept(*token));
        }
        run.n_prompt_done += n;
        let is_last = run.n_prompt_done == run.job.prompt.len();
        if is_last {
            run.prompted = Some(Instant::now());
        }
        let is_embedding = matches!(run.job.work, Work::Embed);
        progress(slot);
        match (is_last, is_embedding) {
            (false, _) => {}
            (true, true) => self.embedded(at, first),
            (true, false) => {
                if let Some(run) = self.slots[at].run.as_mut() {
                    run.phase = Phase::Generating;
                }
                self.choose(at, first + n - 1);
            }
        }
    }

    /// Tells the embeddings of a slot's sequence, whose entries begin at `first`.
    fn embedded(&mut self, at: usize, first: usize) {
        let slot = &mut self.slots[at];
        let Some(run) = slot.run.take() else { return };
        let rows = rows(&self.session, slot.sequence(), first, run.job.prompt.len());
        let _ = match rows {
            Some(rows) => run.job.events.send(Event::Embedding(rows)),
            None => run.job.events.send(Event::Failed(Failure::server("llama.cpp computed no embeddings"))),
        };
        // Nothing goes on from here.
        slot.tokens.clear();
        let sequence = slot.sequence();
        let _ = self.session.forget_from(sequence, 0);
        self.freed(at);
    }
}

/// Whole prompts, as many as fit into one evaluation; the first always.
fn whole(n_batch: usize, lacking: &[usize]) -> Vec<usize> {
    let mut left = n_batch;
    let take = |&n: &usize| match n <= left {
        true => {
            left -= n;
            n
        }
        false => 0,
    };
    lacking.iter().map(take).collect()
}

/// The embeddings of a sequence: one row where they are pooled, else one for each token.
fn rows(session: &Session, sequence: i32, first: usize, n_tokens: usize) -> Option<Vec<Vec<f32>>> {
    if session.pooling().is_some() {
        return Some(vec![session.embedding_of_sequence(sequence)?.to_vec()]);
    }
    (first..first + n_tokens).map(|index| session.embedding_of(index).map(<[f32]>::to_vec)).collect()
}
