//! The measurements: perplexity of a text, and divergence from a base file.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::{Desk, Measurement, format};
use crate::log::Level;
use crate::surroundings::utf8;
use hobbit::{BatchToken, Model, Session, Token};
use hobbit_core::perplexity::base::{BaseHead, BaseReader, BaseWriter};
use hobbit_core::perplexity::chunking::Chunking;
use hobbit_core::perplexity::divergence::{Divergence, TOKENS_MIN, compare};
use hobbit_core::perplexity::estimate::Sums;
use hobbit_core::perplexity::logits::{Row, encode, nll, row_words};

/// Rows processed together: their results are held in memory.
const ROWS_MAX: usize = 32;

/// The token that replaces the first one of every chunk; `None` for models without BOS.
fn start_token(model: &Model) -> Result<Option<Token>> {
    match (model.adds_bos(), model.tokenize("", true, false)?.as_slice()) {
        (false, []) => Ok(None),
        (true, &[bos]) => Ok(Some(bos)),
        (_, special) => bail!(
            "this model's tokenizer makes {} tokens of an empty text: perplexity is defined for models that add at \
             most BOS",
            special.len()
        ),
    }
}

/// A row of logits and the scored token that it predicts.
#[derive(Clone, Copy, Debug)]
struct ScoredRow<'a> {
    chunk: usize,
    /// Index of the row within the chunk.
    row: usize,
    /// `[n_vocab]`.
    logits: &'a [f32],
    /// The actual next token.
    next: Token,
}

/// Evaluates the chunks of `tokens`, `[n_ctx, n_chunk]`. `score` gets blocks of neighbouring rows of one chunk, in
/// order within a chunk; `done` gets the scores of each chunk in order.
fn evaluate<T>(
    (desk, session, who): (&Desk, &mut Session, &str),
    windows: &Chunking,
    tokens: &[Token],
    bos: Option<Token>,
    mut score: impl FnMut(&[ScoredRow<'_>]) -> Result<Vec<T>>,
    mut done: impl FnMut(usize, Vec<T>) -> Result<()>,
) -> Result<()> {
    for pass in windows.passes() {
        let started = Instant::now();
        let bar = desk.bar(session, windows, &pass);
        let mut scores: Vec<Vec<T>> = pass.clone().map(|_| Vec::new()).collect();
        let mut n_done = 0;
        session.reset();
        for piece in windows.pieces(pass.clone()) {
            let entry = |(chunk, position): (usize, usize)| BatchToken {
                token: bos.filter(|_| position == 0).unwrap_or(tokens[chunk * windows.n_ctx + position]),
                position: position as i32,
                sequence: (chunk - pass.start) as i32,
                logits: position >= windows.first(),
            };
            let batch: Vec<BatchToken> = piece.places().map(entry).collect();
            session.evaluate(&batch)?;
            n_done += batch.len();
            bar.as_ref().inspect(|bar| bar.set(n_done));
            let mut rows = Vec::new();
            for (i, (chunk, position)) in piece.places().enumerate().filter(|(_, place)| windows.is_scored(place.1)) {
                let logits = session.logits(i).context("llama.cpp holds no logits of a token that asked for them")?;
                let next = tokens[chunk * windows.n_ctx + position + 1];
                rows.push(ScoredRow { chunk, row: position - windows.first(), logits, next });
            }
            for block in rows.chunk_by(|a, b| a.chunk == b.chunk).flat_map(|of_chunk| of_chunk.chunks(ROWS_MAX)) {
                scores[block[0].chunk - pass.start].extend(score(block)?);
            }
        }
        drop(bar);
        if pass.start == 0 {
            desk.print_eta(who, started.elapsed(), windows)?;
        }
        pass.zip(scores).try_for_each(|(chunk, scores)| done(chunk, scores))?;
    }
    Ok(())
}

/// Applies `f` to every item on all CPUs, in order.
fn on_all_cpus<T: Send, R: Send>(items: Vec<T>, f: impl Fn(T) -> R + Sync) -> Vec<R> {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len() / 4);
    if n_threads < 2 {
        return items.into_iter().map(f).collect();
    }
    let share = items.len().div_ceil(n_threads);
    let mut items = items.into_iter();
    let parts: Vec<Vec<T>> = (0..n_threads).map(|_| items.by_ref().take(share).collect()).collect();
    let f = &f;
    std::thread::scope(|scope| {
        let workers: Vec<_> =
            parts.into_iter().map(|part| scope.spawn(move || part.into_iter().map(f).collect::<Vec<R>>())).collect();
        let joined = workers.into_iter().map(|worker| worker.join());
        joined.flat_map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// The tokens of the text, with the special tokens that the model expects before it.
fn tokens_of_text(desk: &Desk, model: &Model, n_ctx: usize) -> Result<Vec<Token>> {
    let (name, text) = desk.args.text.as_ref().context("no text: give a file with -f")?;
    desk.log.line(Level::Info, "perplexity: tokenizing the input ..");
    let started = Instant::now();
    let tokens = model.tokenize(utf8(&text.0, name)?, true, false)?;
    let milliseconds = format::significant(started.elapsed().as_micros() as f64 * 1e-3);
    desk.log.line(Level::Info, format!("perplexity: tokenization took {milliseconds} ms"));
    if tokens.len() < 2 * n_ctx {
        bail!(
            "you need at least {} tokens to evaluate perplexity with a context of {n_ctx}: the data file you provided \
             ({}) tokenizes to only {} tokens; give a longer text or a smaller -c",
            2 * n_ctx,
            name.display(),
            tokens.len()
        );
    }
    Ok(tokens)
}

/// Prepares perplexity of disjoint chunks; `base` stores the log-probabilities.
pub fn perplexity<'a>(desk: &'a Desk, model: &Model, base: Option<&Path>) -> Result<Measurement<'a>> {
    let bos = start_token(model)?;
    if let Some(path) = base {
        desk.log.line(Level::Info, format!("perplexity: saving all logits to {}", path.display()));
    }
    let n_ctx = desk.args.run.session_options.n_ctx as usize;
    let mut tokens = tokens_of_text(desk, model, n_ctx)?;
    let n_tokens = tokens.len();
    let windows = desk.windows(n_ctx, n_tokens / n_ctx);
    tokens.truncate(windows.n_ctx * windows.n_chunk);
    let head = || BaseHead { n_ctx, n_vocab: model.n_vocab(), tokens: tokens.clone() };
    let mut base = base.map(|path| BaseWriter::create(path, head())).transpose()?;
    let run = move |session: &mut Session| {
        desk.log_windows("perplexity: calculating perplexity", &windows);
        let n_words = row_words(session.model().n_vocab());
        let (mut all, mut chunks, mut words) = (Sums::default(), Vec::new(), Vec::new());
        let score = |rows: &[ScoredRow<'_>]| {
            let Some(base) = &mut base else {
                return Ok(on_all_cpus(rows.to_vec(), |row| nll(row.logits, row.next)));
            };
            words.resize(rows.len() * n_words, 0u16);
            let pairs = rows.iter().zip(words.chunks_exact_mut(n_words)).collect();
            let losses = on_all_cpus(pairs, |(row, words)| f64::from(encode(row.logits, row.next, words)));
            base.rows(rows[0].chunk, rows[0].row, &words)?;
            Ok(losses)
        };
        evaluate((desk, session, "perplexity"), &windows, &tokens, bos, score, |chunk, losses| {
            losses.iter().for_each(|&loss| all.add(loss));
            let ppl = all.mean().exp();
            chunks.push(ppl);
            let start = (chunk - chunk % windows.n_seq()) * windows.n_ctx;
            desk.print(&if desk.args.in_lines {
                format::chunk_line(start, &all)
            } else {
                format::chunk(chunk + 1, ppl)
            })
        })?;
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
    };
    Ok((windows, Box::new(run)))
}

/// Prepares a comparison with a base file.
pub fn divergence<'a>(desk: &'a Desk, model: &Model, path: &Path) -> Result<Measurement<'a>> {
    let bos = start_token(model)?;
    let mut base = BaseReader::open(path)?;
    let head = &base.head;
    if head.n_vocab != model.n_vocab() {
        bail!(
            "{}: inconsistent vocabulary ({} vs {}): the base is another model's; make one with a model of the same \
             family",
            path.display(),
            head.n_vocab,
            model.n_vocab()
        );
    }
    let n_ctx = desk.args.run.session_options.n_ctx as usize;
    if head.n_ctx > n_ctx {
        bail!(
            "{} has been computed with {}, while the current context is {n_ctx}. Increase it with -c and retry",
            path.display(),
            head.n_ctx
        );
    }
    if let Some((name, text)) = &desk.args.text {
        is_of_text(head, &model.tokenize(utf8(&text.0, name)?, true, false)?, path)?;
    }
    let windows = desk.windows(head.n_ctx, head.n_chunk());
    base.holds(windows.n_chunk)?;
    let run = move |session: &mut Session| {
        desk.log_windows("kl_divergence: computing", &windows);
        let tokens = base.head.tokens.clone();
        let n_vocab = session.model().n_vocab();
        let n_words = row_words(n_vocab);
        let (mut all, mut chunks, mut words) = (Divergence::default(), Vec::new(), Vec::new());
        let score = |rows: &[ScoredRow<'_>]| {
            words.resize(rows.len() * n_words, 0u16);
            base.rows(rows[0].chunk, rows[0].row, &mut words)?;
            let pairs = rows.iter().zip(words.chunks_exact(n_words)).collect();
            let found = on_all_cpus(pairs, |(row, words)| compare(row.logits, Row::new(words, n_vocab)?, row.next));
            // Vocabulary and tokens were checked: every token has its place.
            Ok(found.into_iter().flatten().collect())
        };
        evaluate((desk, session, "kl_divergence"), &windows, &tokens, bos, score, |chunk, compared| {
            if chunk == 0 {
                desk.print(format::DIVERGENCE_HEAD)?;
            }
            compared.iter().for_each(|one| all.add(one));
            let means = all.means();
            chunks.push(means.ppl.value);
            desk.print(&format::divergence_line(chunk + 1, &means))
        })?;
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
    };
    Ok((windows, Box::new(run)))
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
