//! Perplexity of a text, in windows that overlap: every token but the first has a long context.

use std::time::Instant;

use anyhow::{Result, bail};
use serde_json::json;

use super::evaluate::{self, on_all_cpus};
use super::text::tokens_of_text;
use super::{Desk, Measurement, format};
use crate::log::Level;
use hobbit::perplexity::softmax::probability;
use hobbit::perplexity::windows::Windows;
use hobbit::{BatchToken, Model};

/// llama.cpp rounds a context up to this many tokens (`llama_context`), and `llama-perplexity` fills it.
const CONTEXT_STEP: usize = 256;

/// Prepares it.
///
/// # Errors
/// A text that is too short, a stride that exceeds the window.
pub fn strided<'a>(desk: &'a Desk, model: &Model, stride: usize) -> Result<Measurement<'a>> {
    evaluate::start_token(model)?;
    let given = desk.args.session_options.n_ctx as usize;
    let wanted = given + stride / 2;
    desk.log.line(
        Level::Info,
        format!("Will perform strided perplexity calculation -> adjusting context size from {given} to {wanted}"),
    );
    let n_ctx = wanted.next_multiple_of(CONTEXT_STEP);
    if stride >= n_ctx {
        bail!("--ppl-stride {stride} exceeds the window of {n_ctx} tokens; give at most {given}");
    }
    let tokens = tokens_of_text(desk, model, n_ctx)?;
    desk.log.line(Level::Info, format!("perplexity_v2: have {} tokens. Calculation chunk = {n_ctx}", tokens.len()));
    let n_chunk = (tokens.len() - n_ctx).div_ceil(stride).min(desk.args.n_chunk_max.unwrap_or(usize::MAX));
    let n_batch = (desk.args.session_options.n_batch as usize).min(n_ctx);
    let n_ubatch = (desk.args.session_options.n_ubatch as usize).min(n_batch);
    let windows = Windows { n_ctx, n_batch, n_ubatch, n_chunk };
    Ok(Measurement::of_windows(&windows, move |session| {
        desk.log_windows("perplexity_v2: computing", &windows);
        let scored = n_ctx - stride - 1..n_ctx - 1;
        let (mut nll, mut count) = (0.0, 0usize);
        let mut chunks = Vec::new();
        for chunk in 0..n_chunk {
            let started = Instant::now();
            let start = chunk * stride;
            let window = &tokens[start..start + n_ctx];
            session.reset();
            let batch: Vec<BatchToken> = window
                .iter()
                .zip(0..)
                .map(|(&token, position)| BatchToken {
                    token,
                    position,
                    sequence: 0,
                    logits: scored.contains(&(position as usize)),
                })
                .collect();
            let mut probabilities = Vec::new();
            for (number, batch) in batch.chunks(n_batch).enumerate() {
                evaluate::rows(session, batch, n_ubatch, |i, logits| {
                    probabilities.push(probability(logits, window[number * n_batch + i + 1]));
                })?;
            }
            if chunk == 0 {
                desk.print_eta("perplexity_v2", started.elapsed(), &windows)?;
            }
            for loss in on_all_cpus(probabilities, |p| -p.ln()) {
                nll += f64::from(loss);
                count += 1;
            }
            let ppl = (nll / count as f64).exp();
            chunks.push(ppl);
            desk.print(&match desk.args.in_lines {
                false => format::chunk(chunk + 1, ppl),
                true => format!("{start:8}  {ppl:.4}\n"),
            })?;
        }
        desk.print("\n")?;
        Ok(json!({
            "n_tokens": tokens.len(),
            "n_tokens_scored": count,
            "stride": stride,
            "window": n_ctx,
            "ppl": (nll / count as f64).exp(),
            "mean_nll": nll / count as f64,
            "ppl_after_chunk": chunks,
        }))
    }))
}
