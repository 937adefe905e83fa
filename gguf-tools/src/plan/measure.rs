//! The exact predictions for a text, and what a plan makes of them, token by token.

use std::collections::HashSet;

use anyhow::Context;
use hobbit::BatchToken;
use hobbit::profile::{Loss, log_softmax};

use crate::bar::Bar;
use crate::profile::text::{Runner, Text, WARM_UP};

/// Memory for exact predictions, in bytes: of a longer text only the first windows are decoded by the plan.
const ROWS_BYTES_MAX: usize = 1 << 30;

/// Log-probabilities of a text's first windows.
pub struct Exact {
    /// `[n_predicted][n_vocab]` of each window.
    windows: Vec<Vec<f32>>,
}

impl Exact {
    /// With every expert present: what the windows' tokens are predicted, and seconds of a token that is decoded, without what it
    /// waits for reads.
    ///
    /// # Errors
    /// As `Session::evaluate`.
    pub fn measure(runner: &mut Runner, text: &Text) -> anyhow::Result<(f64, Self)> {
        runner.model.mask_experts(Some(HashSet::new()));
        let n_vocab = runner.model.n_vocab();
        let bytes = text.windows[0].len() * n_vocab * size_of::<f32>();
        let n_windows = (ROWS_BYTES_MAX / bytes.max(1)).clamp(1, text.windows.len());
        let bar = Bar::of_units("exact predictions", n_windows as u64 + 1)?;
        let (mut windows, mut row) = (Vec::new(), Vec::new());
        for window in &text.windows[..n_windows] {
            let mut rows = Vec::with_capacity(window.len().saturating_sub(WARM_UP) * n_vocab);
            runner.window(window, window.len(), |logits, _| {
                log_softmax(logits, &mut row);
                rows.extend_from_slice(&row);
            })?;
            windows.push(rows);
            bar.step()?;
        }
        let window = &text.windows[0];
        let before = runner.session.stats().decode;
        runner.window(&window[..window.len().min(2 * WARM_UP)], 1, |_, _| {})?;
        let after = runner.session.stats().decode;
        let seconds = (after.seconds - before.seconds) - (after.io_wait_seconds - before.io_wait_seconds);
        Ok((seconds / (after.tokens - before.tokens).max(1) as f64, Self { windows }))
    }
}

/// Each window's first tokens as a prompt, the others one by one: the loss, and mean seconds of a token.
///
/// # Errors
/// As `Session::evaluate`.
pub fn tokens_alone(runner: &mut Runner, text: &Text, exact: &Exact) -> anyhow::Result<(Loss, f64)> {
    let bar = Bar::of_units("the plan", exact.windows.len() as u64)?;
    let n_vocab = runner.model.n_vocab();
    let mut loss = Loss::default();
    let before = runner.session.stats().decode;
    for (window, rows) in text.windows.iter().zip(&exact.windows) {
        runner.session.reset();
        let mut rows = rows.chunks_exact(n_vocab);
        let (prompt, others) = window.split_at(WARM_UP.min(window.len()));
        let entry = |position: usize, logits: bool| BatchToken {
            token: window[position],
            position: position as i32,
            sequence: 0,
            logits,
        };
        let prompt: Vec<BatchToken> = (0..prompt.len()).map(|position| entry(position, false)).collect();
        runner.session.evaluate(&prompt)?;
        for position in prompt.len()..prompt.len() + others.len() {
            runner.session.evaluate(&[entry(position, true)])?;
            let Some(&next) = window.get(position + 1) else { break };
            let logits = runner.session.logits(0).context("llama.cpp gave no logits")?;
            let row = rows.next().context("both runs predict the same tokens")?;
            loss.add(row, logits, usize::try_from(next)?);
        }
        bar.step()?;
    }
    let after = runner.session.stats().decode;
    let seconds = (after.seconds - before.seconds) / (after.tokens - before.tokens).max(1) as f64;
    Ok((loss, seconds))
}
