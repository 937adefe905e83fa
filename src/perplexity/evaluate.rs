//! Evaluates tokens into rows of logits, one ubatch at a time, so that no more rows are held than llama.cpp computes
//! at once.

use std::ops::Range;

use anyhow::{Context, Result, bail};

use crate::progress::TokenBar;
use hobbit::{BatchToken, Model, Session, Token};
use hobbit_core::perplexity::windows::Windows;

/// Rows processed together: their results are held in memory.
const ROWS_MAX: usize = 32;

/// The token that replaces the first one of every chunk; `None` for models without BOS.
///
/// # Errors
/// A tokenizer that adds a token at the end of a text: chunks have no end.
pub fn start_token(model: &Model) -> Result<Option<Token>> {
    match (model.adds_bos(), model.tokenize("", true, false)?.as_slice()) {
        (false, []) => Ok(None),
        (true, &[bos]) => Ok(Some(bos)),
        (_, special) => bail!(
            "this model's tokenizer makes {} tokens of an empty text: perplexity is defined for models that add at most BOS",
            special.len()
        ),
    }
}

/// A row of logits and the scored token that it predicts.
#[derive(Clone, Copy, Debug)]
pub struct ScoredRow<'a> {
    pub chunk: usize,
    /// Index of the row within the chunk.
    pub row: usize,
    /// `[n_vocab]`.
    pub logits: &'a [f32],
    /// The actual next token.
    pub next: Token,
}

/// Evaluates the chunks of a pass. `tokens` are the text's, `[n_ctx, n_chunk]`. Rows come in blocks of neighbouring
/// rows of one chunk, in order within a chunk. `bar` is advanced between blocks.
pub fn pass(
    session: &mut Session,
    windows: &Windows,
    chunks: Range<usize>,
    tokens: &[Token],
    bos: Option<Token>,
    bar: Option<&TokenBar>,
    mut take: impl FnMut(&[ScoredRow<'_>]) -> Result<()>,
) -> Result<()> {
    session.reset();
    let mut done = 0;
    for piece in windows.pieces(chunks.clone()) {
        let entry = |(chunk, position): (usize, usize)| BatchToken {
            token: bos.filter(|_| position == 0).unwrap_or(tokens[chunk * windows.n_ctx + position]),
            position: position as i32,
            sequence: (chunk - chunks.start) as i32,
            logits: position >= windows.first(),
        };
        let batch: Vec<BatchToken> = piece.places().map(entry).collect();
        session.evaluate(&batch)?;
        done += batch.len();
        bar.inspect(|bar| bar.set(done));
        let mut rows = Vec::new();
        for (i, (chunk, position)) in piece.places().enumerate().filter(|(_, place)| windows.is_scored(place.1)) {
            let logits = session.logits(i).context("llama.cpp holds no logits of a token that asked for them")?;
            let next = tokens[chunk * windows.n_ctx + position + 1];
            rows.push(ScoredRow { chunk, row: position - windows.first(), logits, next });
        }
        for of_chunk in rows.chunk_by(|a, b| a.chunk == b.chunk) {
            of_chunk.chunks(ROWS_MAX).try_for_each(&mut take)?;
        }
    }
    Ok(())
}

/// Evaluates `batch` in ubatches and passes each requested row to `take`, with its index in `batch`.
pub fn rows(
    session: &mut Session,
    batch: &[BatchToken],
    n_ubatch: usize,
    mut take: impl FnMut(usize, &[f32]),
) -> Result<()> {
    for (number, piece) in batch.chunks(n_ubatch).enumerate() {
        session.evaluate(piece)?;
        for (i, _) in piece.iter().enumerate().filter(|(_, entry)| entry.logits) {
            let logits = session.logits(i).context("llama.cpp holds no logits of a token that asked for them")?;
            take(number * n_ubatch + i, logits);
        }
    }
    Ok(())
}

/// Applies `f` to every item on all CPUs, in order.
pub fn on_all_cpus<T: Send, R: Send>(items: Vec<T>, f: impl Fn(T) -> R + Sync) -> Vec<R> {
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
