//! One run: a text, window by window, the questions about it, and how far it all is from the exact model.

use std::time::Instant;

use anyhow::{Context, Result};
use hobbit::perplexity::softmax::{Normaliser, log_prob_f32};
use hobbit::perplexity::tasks::{Alternatives, Continuation, best};
use hobbit::plan::ExpertCache;
use hobbit::stats::PhaseStats;
use hobbit::{BatchToken, Model, ModelOptions, Session, SessionOptions, Token};

use super::text::{Text, WINDOW, is_scored};
use super::variant::{Ready, Subject};

/// How rows are measured.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// A window is one batch, as a prompt is; otherwise every token is.
    pub whole_windows: bool,
    /// Threads of each row.
    pub threads: i32,
    /// Nothing else runs meanwhile: times mean something.
    pub alone: bool,
}

/// What the exact model says, with everything resident.
pub struct Reference {
    /// Log-probabilities after each scored position, `[n_vocab]` each.
    log_probs: Vec<Vec<f32>>,
    /// Whether each question was answered rightly.
    answers: Vec<bool>,
}

/// What was found, a value for each scored token, question, or token evaluated; in nats.
#[derive(Default)]
pub struct Measured {
    /// Negative log-likelihoods.
    pub nll: Vec<f64>,
    /// How much larger they are than the reference's: tokens are compared one by one, as both models read the same
    /// text.
    pub difference: Vec<f64>,
    /// Kullback-Leibler divergences from the reference, over the whole vocabulary.
    pub kl: Vec<f64>,
    /// Whether both think the same token most probable.
    pub same_top: Vec<bool>,
    /// Whether a question was answered rightly, and whether the reference did.
    pub answers: Vec<(bool, bool)>,
    /// Milliseconds of each token of the windows; empty where they were not measured alone and one by one.
    pub token_ms: Vec<f32>,
    /// Of the windows, without the questions.
    pub stats: PhaseStats,
}

/// Runs the exact model with everything resident.
///
/// # Errors
/// A model that cannot be opened or read.
pub fn reference(subject: &Subject, exact: &Ready, text: &Text, manner: Manner) -> Result<Reference> {
    let model = open(subject, exact, 100.0)?;
    let mut log_probs = Vec::with_capacity(text.n_scored());
    let mut session = windows_session(&model, manner)?;
    run(&mut session, text, manner, |row, _| log_probs.push(row.to_vec()))?;
    drop(session);
    Ok(Reference { log_probs, answers: answers(&model, text, manner)? })
}

/// Runs an arm and compares it with the reference.
///
/// # Errors
/// A model that cannot be opened or read.
pub fn measure(
    subject: &Subject,
    ready: &Ready,
    percent: f64,
    text: &Text,
    reference: &Reference,
    manner: Manner,
) -> Result<Measured> {
    let model = open(subject, ready, percent)?;
    let mut session = windows_session(&model, manner)?;
    let mut measured = Measured::default();
    let mut exact = reference.log_probs.iter();
    let token_ms = run(&mut session, text, manner, |log_probs, next| {
        let exact = exact.next().expect("the reference saw the same windows");
        let nll = |log_probs: &[f32]| -f64::from(log_probs[next as usize]);
        measured.nll.push(nll(log_probs));
        measured.difference.push(nll(log_probs) - nll(exact));
        let divergence: f64 = exact.iter().zip(log_probs).map(|(p, q)| f64::from(p.exp()) * f64::from(p - q)).sum();
        measured.kl.push(if divergence < 0.0 { 0.0 } else { divergence }); // rounding; what is no number stays none
        measured.same_top.push(best(log_probs) == best(exact));
    })?;
    let stats = session.stats().total();
    drop(session);
    let answers = answers(&model, text, manner)?.into_iter().zip(reference.answers.iter().copied()).collect();
    let token_ms = if manner.alone && !manner.whole_windows { token_ms } else { Vec::new() };
    Ok(Measured { stats, answers, token_ms, ..measured })
}

/// Every arm gets the same bytes of cache, and nothing depends on time.
fn open(subject: &Subject, ready: &Ready, percent: f64) -> Result<Model> {
    let mut options = ModelOptions {
        budget: subject.ample_budget(),
        expert_cache: ExpertCache::Bytes(subject.cache_bytes(percent)),
        n_gpu_layers: 0,
        ..ready.options.clone()
    };
    options.precision.deterministic = true;
    Model::open(&ready.path, &options, |_| true).with_context(|| format!("arm '{}'", ready.arm.name))
}

fn windows_session(model: &Model, manner: Manner) -> Result<Session> {
    let n = WINDOW as u32;
    let threads = Some(manner.threads);
    let options =
        SessionOptions { n_ctx: n, n_batch: n, n_ubatch: n, threads, warmup: false, ..SessionOptions::default() };
    Ok(model.session(&options)?)
}

/// Shows `score` the log-probabilities after each scored position, and the token that came. Milliseconds of each batch.
fn run(session: &mut Session, text: &Text, manner: Manner, mut score: impl FnMut(&[f32], Token)) -> Result<Vec<f32>> {
    // After the last token nothing is scored.
    let positions: Vec<usize> = (0..WINDOW - usize::from(!manner.whole_windows)).collect();
    let mut times = Vec::new();
    for window in &text.windows {
        session.reset();
        for batch in positions.chunks(if manner.whole_windows { WINDOW } else { 1 }) {
            let entry =
                |&at: &usize| BatchToken { token: window[at], position: at as i32, sequence: 0, logits: is_scored(at) };
            let batch_tokens: Vec<BatchToken> = batch.iter().map(entry).collect();
            let started = Instant::now();
            session.evaluate(&batch_tokens)?;
            times.push(1e3 * started.elapsed().as_secs_f32());
            for (index, at) in batch.iter().enumerate().filter(|(_, at)| is_scored(**at)) {
                let logits = session.logits(index).context("logits were asked for")?;
                let row = Normaliser::of(logits);
                let shift = row.max + row.sum_exp.ln() as f32;
                score(&logits.iter().map(|logit| logit - shift).collect::<Vec<_>>(), window[at + 1]);
            }
        }
    }
    Ok(times)
}

/// Whether each question is answered rightly: the text's own continuation has the largest log-probability.
fn answers(model: &Model, text: &Text, manner: Manner) -> Result<Vec<bool>> {
    if manner.whole_windows || text.questions.is_empty() {
        return Ok(Vec::new());
    }
    let texts = || text.questions.iter().map(|question| &question.texts);
    let (longest, n_seq) =
        texts().fold((0, 0), |(tokens, n), texts| (texts.longest().max(tokens), texts.sequences.len().max(n)));
    let options = SessionOptions {
        // Sequences share no cells.
        n_ctx: (longest * n_seq) as u32,
        n_batch: 32,
        n_ubatch: 32,
        n_seq_max: n_seq as u32,
        threads: Some(manner.threads),
        warmup: false,
        ..SessionOptions::default()
    };
    let mut session = model.session(&options)?;
    let answer = |Continuation { texts, gold }: &Continuation| -> Result<bool> {
        Ok(best(&log_probs(&mut session, texts)?) == *gold)
    };
    text.questions.iter().map(answer).collect()
}

/// Summed log-probability of each ending, token by token: the common beginning once, then each ending after it.
fn log_probs(session: &mut Session, texts: &Alternatives) -> Result<Vec<f64>> {
    let Alternatives { sequences, common_prefix } = texts;
    let log_prob = |session: &Session, next: Token| -> Result<f64> {
        Ok(log_prob_f32(session.logits(0).context("logits were asked for")?, next).into())
    };
    let evaluate = |session: &mut Session, sequence: usize, at: usize, logits: bool| {
        let token = sequences[sequence][at];
        session.evaluate(&[BatchToken { token, position: at as i32, sequence: sequence as i32, logits }])
    };
    session.reset();
    for at in 0..*common_prefix {
        evaluate(session, 0, at, at + 1 == *common_prefix)?;
    }
    let first = |text: &Vec<Token>| log_prob(session, text[*common_prefix]);
    let mut sums: Vec<f64> = sequences.iter().map(first).collect::<Result<_>>()?;
    for other in 1..sequences.len() {
        session.copy_sequence(0, other as i32)?;
    }
    for (sequence, text) in sequences.iter().enumerate() {
        for at in *common_prefix..text.len() - 1 {
            evaluate(session, sequence, at, true)?;
            sums[sequence] += log_prob(session, text[at + 1])?;
        }
    }
    Ok(sums)
}
