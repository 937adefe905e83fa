//! The text, cut into independent windows, and a model run over it.

use std::path::Path;

use anyhow::Context;
use hobbit::engine::RouterObserver;
use hobbit::{BatchToken, Model, Session, SessionOptions, Token};
use hobbit_core::expert::ExpertId;
use hobbit_core::predict::PathBatches;
use hobbit_core::profile::{Loss, TextId, Uses, log_softmax, nll};

use crate::shared::{Bar, file_name};

/// First tokens of a window that only give context: their predictions are mostly noise.
pub const WARM_UP: usize = 32;

/// Tokens of a piece of the text: `asked`, but no more than the model was trained with.
pub fn context(asked: u32, model: &Model) -> usize {
    (asked as usize).min((model.info().n_ctx_train as usize).max(2 * WARM_UP))
}

/// Tokens of a text in windows of equal length; the rest is left out.
pub struct Text {
    pub windows: Vec<Vec<Token>>,
}

impl Text {
    /// The first `n_tokens` of a file, in windows of `context`; one shorter window if the text has no more.
    pub fn read(path: &Path, model: &Model, n_tokens: usize, context: usize) -> anyhow::Result<Self> {
        let bytes = std::fs::read(path).with_context(|| format!("{}: cannot read", path.display()))?;
        let tokens = model.tokenize(&*String::from_utf8_lossy(&bytes), false, false)?;
        let n_least = 2 * WARM_UP;
        anyhow::ensure!(
            tokens.len() >= n_least,
            "{}: the text is too short: {} tokens, expected at least {n_least}, better some thousands; give --text a \
                longer one",
            path.display(),
            tokens.len()
        );
        let tokens = &tokens[..tokens.len().min(n_tokens.max(n_least))];
        let context = context.min(tokens.len());
        Ok(Self { windows: tokens.chunks_exact(context).map(<[Token]>::to_vec).collect() })
    }

    /// The description of this text, read from `path`, in a profile or plan.
    pub fn id(&self, path: &Path, context: usize, perplexity: f64) -> TextId {
        TextId { file: file_name(path), tokens: self.n_tokens(), context: context as u32, perplexity }
    }

    pub fn n_tokens(&self) -> u64 {
        self.windows.iter().map(|window| window.len() as u64).sum()
    }
}

pub struct Runner {
    pub model: Model,
    pub session: Session,
    /// Compute logits for every token, even unneeded ones, so that the last layer is computed for all tokens.
    every_row: bool,
}

impl Runner {
    /// Prepares to run windows of up to `context` tokens.
    pub fn new(
        model: Model,
        context: usize,
        threads: Option<i32>,
        observer: Option<RouterObserver>,
    ) -> anyhow::Result<Self> {
        let length = u32::try_from(context)?;
        let options =
            SessionOptions { n_ctx: length, n_batch: length, n_ubatch: length.min(512), threads, ..Default::default() };
        let session = match observer {
            Some(observer) => model.session_observed(&options, observer)?,
            None => model.session(&options)?,
        };
        Ok(Self { model, session, every_row: false })
    }

    /// Runs one window, `step` tokens at a time; `row` receives the logits `[n_vocab]` that predict a token, and the
    /// actual token.
    pub fn window(&mut self, tokens: &[Token], step: usize, mut row: impl FnMut(&[f32], usize)) -> anyhow::Result<()> {
        self.session.reset();
        let every_row = self.every_row;
        let predicts = |position: usize| position >= WARM_UP && position + 1 < tokens.len();
        let entry = |position: usize| BatchToken {
            token: tokens[position],
            position: position as i32,
            sequence: 0,
            logits: every_row || predicts(position),
        };
        for first in (0..tokens.len()).step_by(step) {
            let positions = first..(first + step).min(tokens.len());
            let batch: Vec<BatchToken> = positions.clone().map(entry).collect();
            self.session.evaluate(&batch)?;
            for (i, position) in positions.enumerate().filter(|(_, position)| predicts(*position)) {
                let logits = self.session.logits(i).context("llama.cpp gave no logits")?;
                row(logits, usize::try_from(tokens[position + 1])?);
            }
        }
        Ok(())
    }

    /// Perplexity on the whole text.
    pub fn perplexity(&mut self, text: &Text, stage: &str) -> anyhow::Result<f64> {
        let bar = Bar::of_units(stage, text.windows.len() as u64)?;
        let (mut sum, mut n) = (0.0, 0u64);
        for window in &text.windows {
            self.window(window, window.len(), |logits, next| {
                sum += nll(logits, next);
                n += 1;
            })?;
            bar.step(1)?;
        }
        Ok((sum / n.max(1) as f64).exp())
    }

    /// Loss of lowering each of these sets of experts, over the whole text.
    pub fn losses(&mut self, text: &Text, sets: &[Vec<ExpertId>], stage: &str) -> anyhow::Result<Vec<Loss>> {
        let losses = self.losses_of(text, sets, stage, |model, set| model.force_low(set.iter().copied()));
        self.model.force_low([]);
        losses
    }

    /// Each set's loss; `change` applies a set to the model, and an empty set changes nothing.
    pub fn losses_of(
        &mut self,
        text: &Text,
        sets: &[Vec<ExpertId>],
        stage: &str,
        change: impl Fn(&Model, &[ExpertId]),
    ) -> anyhow::Result<Vec<Loss>> {
        let bar = Bar::of_units(stage, (text.windows.len() * sets.len()) as u64)?;
        let mut losses = vec![Loss::default(); sets.len()];
        let mut exact = Vec::new();
        let mut row = Vec::new();
        for window in &text.windows {
            change(&self.model, &[]);
            exact.clear();
            self.window(window, window.len(), |logits, _| {
                log_softmax(logits, &mut row);
                exact.extend_from_slice(&row);
            })?;
            for (set, loss) in sets.iter().zip(&mut losses) {
                change(&self.model, set);
                let mut exact_rows = exact.chunks_exact(self.model.n_vocab());
                self.window(window, window.len(), |logits, next| {
                    let exact = exact_rows.next().expect("both runs predict the same tokens");
                    loss.add(exact, logits, next);
                })?;
                bar.step(1)?;
            }
        }
        Ok(losses)
    }
}

/// One exact pass: returns its perplexity and the uses of experts; `paths` counts which experts follow which.
pub fn observe(
    model: Model,
    text: &Text,
    context: usize,
    threads: Option<i32>,
    mut paths: Option<&mut PathBatches>,
) -> anyhow::Result<(f64, Uses)> {
    let (sender, choices) = std::sync::mpsc::channel();
    let observer: RouterObserver = Box::new(move |choice| drop(sender.send(choice)));
    let mut runner = Runner::new(model, context, threads, Some(observer))?;
    runner.every_row = paths.is_some();
    let bar = Bar::of_units("routing", text.windows.len() as u64)?;
    let (mut uses, mut sum, mut n) = (Uses::default(), 0.0, 0u64);
    for window in &text.windows {
        runner.window(window, window.len(), |logits, next| {
            sum += nll(logits, next);
            n += 1;
        })?;
        for choice in choices.try_iter() {
            uses.observe(choice.layer, choice.n_expert_used, &choice.experts, &choice.weights);
            if let Some(paths) = &mut paths {
                // An invalid id must not be taken for an expert.
                let experts = choice.experts.iter().map(|&id| u16::try_from(id).unwrap_or(u16::MAX));
                paths.layer(choice.layer, choice.n_expert_used, experts);
            }
        }
        paths.iter_mut().for_each(|paths| paths.end_batch());
        bar.step(1)?;
    }
    Ok(((sum / n.max(1) as f64).exp(), uses))
}
