//! The measurements: perplexity of a text, in disjoint chunks or overlapping windows, and divergence from a base
//! file.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};
use serde_json::json;

use super::evaluate::{self, on_all_cpus, start_token};
use super::{Desk, Measurement, format};
use crate::log::Level;
use hobbit::{BatchToken, Model, Token};
use hobbit_core::perplexity::base::{BaseHead, BaseReader, BaseWriter};
use hobbit_core::perplexity::divergence::{Divergence, TOKENS_MIN, compare};
use hobbit_core::perplexity::estimate::Sums;
use hobbit_core::perplexity::logits::{Row, encode, nll, probability, row_words};
use hobbit_core::perplexity::windows::Windows;

/// llama.cpp rounds a context up to this many tokens (`llama_context`), and `llama-perplexity` fills it.
const CONTEXT_STEP: usize = 256;

/// The tokens of the text, with the special tokens that the model expects before it.
///
/// # Errors
/// Text that is not UTF-8, or has fewer tokens than two contexts.
fn tokens_of_text(desk: &Desk, model: &Model, n_ctx: usize) -> Result<Vec<Token>> {
    let text = desk.text()?;
    desk.log.line(Level::Info, "perplexity: tokenizing the input ..");
    let started = Instant::now();
    let tokens = model.tokenize(text.as_str()?, true, false)?;
    let milliseconds = format::significant(started.elapsed().as_micros() as f64 * 1e-3);
    desk.log.line(Level::Info, format!("perplexity: tokenization took {milliseconds} ms"));
    if tokens.len() < 2 * n_ctx {
        bail!(
            "you need at least {} tokens to evaluate perplexity with a context of {n_ctx}: the data file you provided \
             ({}) tokenizes to only {} tokens; give a longer text or a smaller -c",
            2 * n_ctx,
            text.name.display(),
            tokens.len()
        );
    }
    Ok(tokens)
}

/// Prepares perplexity of disjoint chunks; `base` stores the log-probabilities.
///
/// # Errors
/// A text that is too short, a base file that cannot be written.
pub fn perplexity<'a>(desk: &'a Desk, model: &Model, base: Option<&Path>) -> Result<Measurement<'a>> {
    let bos = start_token(model)?;
    if let Some(path) = base {
        desk.log.line(Level::Info, format!("perplexity: saving all logits to {}", path.display()));
    }
    let n_ctx = desk.args.session_options.n_ctx as usize;
    let mut tokens = tokens_of_text(desk, model, n_ctx)?;
    let n_tokens = tokens.len();
    let windows = desk.windows(n_ctx, n_tokens / n_ctx);
    tokens.truncate(windows.n_ctx * windows.n_chunk);
    let head = || BaseHead { n_ctx, n_vocab: model.n_vocab(), tokens: tokens.clone() };
    let mut base = base.map(|path| BaseWriter::create(path, head())).transpose()?;
    Ok(Measurement::new(&windows, move |session| {
        desk.log_windows("perplexity: calculating perplexity", &windows);
        let n_words = row_words(session.model().n_vocab());
        let mut all = Sums::default();
        let mut chunks = Vec::new();
        let mut words = Vec::new();
        for pass in windows.passes() {
            let started = Instant::now();
            let mut losses: Vec<Vec<f64>> = vec![Vec::new(); pass.len()];
            let bar = desk.bar(session, &windows, &pass);
            evaluate::pass(session, &windows, pass.clone(), &tokens, bos, bar.as_ref(), |rows| {
                let losses = &mut losses[rows[0].chunk - pass.start];
                let Some(base) = &mut base else {
                    losses.extend(on_all_cpus(rows.to_vec(), |row| nll(row.logits, row.next)));
                    return Ok(());
                };
                words.resize(rows.len() * n_words, 0u16);
                let pairs = rows.iter().zip(words.chunks_exact_mut(n_words)).collect();
                losses.extend(on_all_cpus(pairs, |(row, words)| f64::from(encode(row.logits, row.next, words))));
                Ok(base.rows(rows[0].chunk, rows[0].row, &words)?)
            })?;
            drop(bar);
            if pass.start == 0 {
                desk.print_eta("perplexity", started.elapsed(), &windows)?;
            }
            for (chunk, losses) in pass.clone().zip(&losses) {
                losses.iter().for_each(|&loss| all.add(loss));
                let ppl = all.mean().exp();
                chunks.push(ppl);
                desk.print(&match desk.args.in_lines {
                    false => format::chunk(chunk + 1, ppl),
                    true => format::chunk_line(pass.start * windows.n_ctx, &all),
                })?;
            }
        }
        if let Some(base) = base {
            base.finish()?;
        }
        desk.print("\n")?;
        match format::final_estimate(&all) {
            Some(line) => desk.log.line(Level::Info, line),
            None => desk.log.line(Level::Error, "Unexpected negative standard deviation of log(prob)"),
        }
        let ppl = all.mean().exp();
        Ok(json!({
            "n_tokens": n_tokens,
            "n_tokens_scored": all.count(),
            "ppl": ppl,
            "ppl_uncertainty": all.uncertainty().map(|error| error * ppl),
            "mean_nll": all.mean(),
            "mean_nll_uncertainty": all.uncertainty(),
            "ppl_after_chunk": chunks,
        }))
    }))
}

/// Prepares perplexity of overlapping windows: every token but the first has a long context.
///
/// # Errors
/// A text that is too short, a stride that exceeds the window.
pub fn strided<'a>(desk: &'a Desk, model: &Model, stride: usize) -> Result<Measurement<'a>> {
    start_token(model)?;
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
    Ok(Measurement::new(&windows, move |session| {
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

/// Prepares a comparison with a base file.
///
/// # Errors
/// An incomplete base file, or one of another vocabulary or text.
pub fn divergence<'a>(desk: &'a Desk, model: &Model, path: &Path) -> Result<Measurement<'a>> {
    let bos = start_token(model)?;
    let mut base = BaseReader::open(path)?;
    let head = &base.head;
    if head.n_vocab != model.n_vocab() {
        bail!(
            "{}: inconsistent vocabulary ({} vs {}): the base is another model's; make one with a model of the same family",
            path.display(),
            head.n_vocab,
            model.n_vocab()
        );
    }
    let n_ctx = desk.args.session_options.n_ctx as usize;
    if head.n_ctx > n_ctx {
        bail!(
            "{} has been computed with {}, while the current context is {n_ctx}. Increase it with -c and retry",
            path.display(),
            head.n_ctx
        );
    }
    if desk.args.text.is_some() {
        let tokens = model.tokenize(desk.text()?.as_str()?, true, false)?;
        is_of_text(head, &tokens, path)?;
    }
    let windows = desk.windows(head.n_ctx, head.n_chunk());
    base.holds(windows.n_chunk)?;
    Ok(Measurement::new(&windows, move |session| {
        desk.log_windows("kl_divergence: computing", &windows);
        let tokens = base.head.tokens.clone();
        let n_vocab = session.model().n_vocab();
        let n_words = row_words(n_vocab);
        let mut all = Divergence::default();
        let mut chunks = Vec::new();
        let mut words = Vec::new();
        for pass in windows.passes() {
            let started = Instant::now();
            let mut compared = vec![Vec::new(); pass.len()];
            let bar = desk.bar(session, &windows, &pass);
            evaluate::pass(session, &windows, pass.clone(), &tokens, bos, bar.as_ref(), |rows| {
                words.resize(rows.len() * n_words, 0u16);
                base.rows(rows[0].chunk, rows[0].row, &mut words)?;
                let pairs = rows.iter().zip(words.chunks_exact(n_words)).collect();
                let found = on_all_cpus(pairs, |(row, words)| compare(row.logits, Row::new(words, n_vocab)?, row.next));
                // Vocabulary and tokens were checked: every token has its place.
                compared[rows[0].chunk - pass.start].extend(found.into_iter().flatten());
                Ok(())
            })?;
            drop(bar);
            if pass.start == 0 {
                desk.print_eta("kl_divergence", started.elapsed(), &windows)?;
                desk.print(format::DIVERGENCE_HEAD)?;
            }
            for (chunk, compared) in pass.zip(&compared) {
                compared.iter().for_each(|one| all.add(one));
                let means = all.means();
                chunks.push(means.ppl.value);
                desk.print(&format::divergence_line(chunk + 1, &means))?;
            }
        }
        desk.print("\n")?;
        if all.count() >= TOKENS_MIN {
            desk.print(&format::divergence_table(&all))?;
        }
        Ok(json!({
            "n_tokens_scored": all.count(),
            "means": all.means(),
            "kld": all.klds(),
            "p_diff": all.p_diffs(),
            "ppl_after_chunk": chunks,
        }))
    }))
}

/// Whether a base was made from this text.
fn is_of_text(head: &BaseHead, tokens: &[Token], path: &Path) -> Result<()> {
    let equal = head.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
    if equal < head.tokens.len() {
        bail!(
            "{} was computed on another text: token {equal} of {} differs; give the base's text with -f, or none",
            path.display(),
            head.tokens.len()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_recognised_by_its_tokens() {
        let head = BaseHead { n_ctx: 2, n_vocab: 9, tokens: vec![1, 2, 3, 4] };
        let path = Path::new("base");
        is_of_text(&head, &[1, 2, 3, 4, 5], path).unwrap();
        let error = is_of_text(&head, &[1, 2, 7, 4], path).unwrap_err().to_string();
        assert!(error.contains("base was computed on another text: token 2 of 4 differs"), "{error}");
        assert!(is_of_text(&head, &[1, 2], path).is_err());
    }
}
