//! Which batches a case evaluates, and what comes out of them.

use hobbit::{BatchToken, Token};

/// Something that evaluates batches: stock llama.cpp or hobbit.
pub trait Evaluate {
    /// Tokens in the vocabulary.
    fn n_vocab(&self) -> usize;

    /// Evaluates a batch and returns the logits of each of its entries, `[batch.len()][n_vocab]`.
    fn evaluate(&mut self, batch: &[BatchToken]) -> Result<Vec<Vec<f32>>, String>;
}

/// The batches of a case.
#[derive(Clone, Copy, Debug)]
pub enum Script {
    /// A prompt with all of its logits, greedy steps, and batches of a few tokens as speculative decoding makes them.
    Single,
    /// A short prompt and two steps.
    Brief,
    /// Two prompts of unequal length in one batch, then greedy steps of both at once.
    TwoSequences,
    /// A prompt for each of 16 sequences, then greedy steps of 16 of them at once, of fewer and fewer, and of one.
    ManySequences,
}

/// The logits of one token.
pub struct Row {
    /// For messages: "prompt token 3".
    pub what: String,
    /// `[n_vocab]`.
    pub logits: Vec<f32>,
}

const N_PROMPT: usize = 200;
const N_STEPS: usize = 32;
const N_GUESSES: usize = 3;
const N_SEQUENCES: usize = 16;

impl Script {
    /// Runs the script; `n_batch` is the largest batch.
    pub fn run(self, model: &mut dyn Evaluate, n_batch: usize) -> Result<Vec<Row>, String> {
        let mut run = Run { model, rows: Vec::new(), positions: [0; N_SEQUENCES] };
        match self {
            Self::Single => run.single(n_batch)?,
            Self::Brief => run.brief()?,
            Self::TwoSequences => run.two_sequences()?,
            Self::ManySequences => run.many_sequences()?,
        }
        Ok(run.rows)
    }
}

struct Run<'a> {
    model: &'a mut dyn Evaluate,
    rows: Vec<Row>,
    /// Next position of each sequence.
    positions: [i32; N_SEQUENCES],
}

impl Run<'_> {
    fn single(&mut self, n_batch: usize) -> Result<(), String> {
        let prompt: Vec<(usize, Token)> =
            text(self.model.n_vocab(), 7).take(N_PROMPT).map(|token| (0, token)).collect();
        let mut next = Vec::new();
        for (piece, start) in prompt.chunks(n_batch).zip((0..).step_by(n_batch)) {
            next = self.batch(piece, |entry| format!("prompt token {}", start + entry))?;
        }
        let mut token = *next.last().expect("the prompt is not empty");
        for step in 0..N_STEPS {
            token = self.batch(&[(0, token)], |_| format!("step {step}"))?[0];
        }
        for round in 0..2 {
            let guesses = text(self.model.n_vocab(), 70 + round).take(N_GUESSES - 1);
            let batch: Vec<(usize, Token)> = [token].into_iter().chain(guesses).map(|token| (0, token)).collect();
            let next = self.batch(&batch, |entry| format!("batch {round} of {N_GUESSES}, token {entry}"))?;
            token = self.batch(&[(0, next[N_GUESSES - 1])], |_| format!("step after batch {round}"))?[0];
        }
        Ok(())
    }

    fn brief(&mut self) -> Result<(), String> {
        let prompt: Vec<(usize, Token)> = text(self.model.n_vocab(), 6).take(24).map(|token| (0, token)).collect();
        let next = self.batch(&prompt, |entry| format!("prompt token {entry}"))?;
        let next = self.batch(&[(0, next[prompt.len() - 1])], |_| "step 0".to_owned())?;
        self.batch(&[(0, next[0])], |_| "step 1".to_owned())?;
        Ok(())
    }

    fn two_sequences(&mut self) -> Result<(), String> {
        let n_vocab = self.model.n_vocab();
        let (mut long, mut short) = (text(n_vocab, 8).take(70), text(n_vocab, 9).take(45));
        let mut batch = Vec::new();
        loop {
            let (first, second) = (long.next(), short.next());
            batch.extend(first.map(|token| (0, token)));
            batch.extend(second.map(|token| (1, token)));
            if first.is_none() && second.is_none() {
                break;
            }
        }
        let next = self.batch(&batch, |entry| format!("prompt entry {entry}"))?;
        let last = |sequence| batch.iter().rposition(|entry| entry.0 == sequence).expect("both sequences have tokens");
        let mut tokens = [next[last(0)], next[last(1)]];
        for step in 0..N_STEPS {
            let batch = [(0, tokens[0]), (1, tokens[1])];
            let next = self.batch(&batch, |sequence| format!("step {step} of sequence {sequence}"))?;
            tokens.copy_from_slice(&next);
        }
        Ok(())
    }

    fn many_sequences(&mut self) -> Result<(), String> {
        let n_vocab = self.model.n_vocab();
        let mut tokens = Vec::new();
        for sequence in 0..N_SEQUENCES {
            let prompt = text(n_vocab, 20 + sequence as u64).take(20).map(|token| (sequence, token));
            let prompt: Vec<(usize, Token)> = prompt.collect();
            let next = self.batch(&prompt, |entry| format!("prompt token {entry} of sequence {sequence}"))?;
            tokens.extend(next.last());
        }
        for width in [16, 16, 15, 9, 8, 5, 4, 3, 2, 2, 1, 16] {
            for step in 0..2 {
                let batch: Vec<(usize, Token)> = tokens[..width].iter().copied().enumerate().collect();
                let what = |sequence| format!("step {step} of {width}, sequence {sequence}");
                let next = self.batch(&batch, what)?;
                tokens[..width].copy_from_slice(&next);
            }
        }
        Ok(())
    }

    /// Evaluates (sequence, token) pairs and returns the most probable token after each.
    fn batch(&mut self, entries: &[(usize, Token)], what: impl Fn(usize) -> String) -> Result<Vec<Token>, String> {
        let mut batch = Vec::with_capacity(entries.len());
        for &(sequence, token) in entries {
            let position = &mut self.positions[sequence];
            batch.push(BatchToken { token, position: *position, sequence: sequence as i32, logits: true });
            *position += 1;
        }
        let rows = self.model.evaluate(&batch).map_err(|error| format!("{}: {error}", what(0)))?;
        let next = rows.iter().map(|logits| most_probable(logits)).collect();
        self.rows.extend(rows.into_iter().enumerate().map(|(entry, logits)| Row { what: what(entry), logits }));
        Ok(next)
    }
}

fn most_probable(logits: &[f32]) -> Token {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(token, _)| token as Token)
}

/// Endless text of arbitrary tokens.
fn text(n_vocab: usize, seed: u64) -> impl Iterator<Item = Token> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize % n_vocab) as Token
    })
}
