//! hobbit and plain llama.cpp behind one interface, and the tokens that both evaluate.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use rand_mt::Mt64;

use super::answer::Traffic;
use super::args::Who;
use super::case::{Source, Task, Test};
use super::record::{More, Record};
use crate::advice::idle_flags;
use crate::output::tell;
use crate::run;
use hobbit::engine::{Description, Stock, StockOptions};
use hobbit::options::Repack;
use hobbit::{CachingOptions, Model, ModelOptions, Sampler, SamplingOptions, Session, SessionOptions, Stats, Token};

/// Operations of both engines.
pub trait Engine {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>>;
    /// The token that begins every text, if there is one.
    fn bos(&self) -> Option<Token>;
    fn n_vocab(&self) -> usize;
    /// Evaluates tokens after the current context; keeps the logits of the last token.
    fn feed(&mut self, tokens: &[Token]) -> Result<()>;
    fn logits(&self) -> Option<&[f32]>;
    /// Continues the text by `n` most probable tokens; `chosen` is called after each.
    fn generate(&mut self, _n: usize, _chosen: &mut dyn FnMut()) -> Result<()> {
        bail!("this engine does not draft")
    }
    /// Empties the context.
    fn clear(&mut self);
    /// Loads into memory what is missing and has room.
    fn touch_all(&mut self) -> Result<()> {
        Ok(())
    }
    /// hobbit's counts so far.
    fn stats(&self) -> Option<Stats> {
        None
    }
    /// Extra nanoseconds per single token when recorded routes are followed, if any; empties the context.
    fn stops_ns(&mut self) -> Result<Option<i64>> {
        Ok(None)
    }
    /// The columns about the model, and about hobbit's plan.
    fn describe(&self) -> Record;
}

/// Opens the engine that a task names.
pub fn open(task: &Task) -> Result<Box<dyn Engine>> {
    let (case, session) = (&task.case, task.case.session_options()?);
    let repack = match &*task.repack {
        "0" => Repack::Off,
        "1" => Repack::On,
        _ => Repack::Ordinary,
    };
    let mut options = ModelOptions { repack, ..case.model_options()? };
    options.passthrough &= repack != Repack::Ordinary;
    if task.who == Who::Stock {
        let stock = StockOptions {
            n_gpu_layers: options.n_gpu_layers,
            device: options.device,
            load_mode: (task.load_mode != "auto").then(|| task.load_mode.clone()),
            repack,
            routes: options.routes,
            adapters: options.adapters,
        };
        return Ok(Box::new(Stock::open(&case.model, &stock, &session)?));
    }
    let speculation = case.speculation()?;
    let options = run::reserve_draft(speculation.as_ref(), options, &session)?;
    let mut hobbit = Hobbit::open(&case.model, &options, &session)?;
    if let Some(speculation) = &speculation {
        hobbit.session.speculate(speculation)?;
    }
    Ok(Box::new(hobbit))
}

/// A session of hobbit's.
pub struct Hobbit {
    session: Session,
    caching: CachingOptions,
    n_batch: usize,
    /// Whether costs decide the width of a prompt's batches.
    is_wide: bool,
    /// Index of the last entry of the last batch.
    last: usize,
}

impl Hobbit {
    /// Opens a model and a session of it.
    pub fn open(path: &Path, options: &ModelOptions, session: &SessionOptions) -> Result<Self> {
        let model = Model::open(path, options)?;
        idle_flags(model.idle_options()).for_each(|words| tell(format_args!("note: {words}")));
        let (caching, n_batch) = (options.caching, session.n_batch as usize);
        let session = model.session(session)?;
        idle_flags(&session.description().idle).for_each(|words| tell(format_args!("note: {words}")));
        let is_wide = session.stats().prompt_width.is_some();
        Ok(Self { session, caching, n_batch, is_wide, last: 0 })
    }
}

impl Engine for Hobbit {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        Ok(self.session.model().tokenize(text, false, false)?)
    }

    fn bos(&self) -> Option<Token> {
        let model = self.session.model();
        // BOS is the token that tokenizing an empty text adds.
        model.adds_bos().then(|| model.tokenize("", true, false).ok()?.first().copied()).flatten()
    }

    fn n_vocab(&self) -> usize {
        self.session.model().n_vocab()
    }

    fn feed(&mut self, tokens: &[Token]) -> Result<()> {
        if !self.is_wide {
            self.session.feed(tokens)?;
            self.last = (tokens.len() - 1) % self.n_batch;
            return Ok(());
        }
        // Costs decide how many tokens the last batch has.
        let (mut before, mut end) = (0, 0);
        self.session.feed_with(tokens, |done| (before, end) = (end, done))?;
        self.last = end - before - 1;
        Ok(())
    }

    fn logits(&self) -> Option<&[f32]> {
        self.session.logits(self.last)
    }

    fn generate(&mut self, n: usize, chosen: &mut dyn FnMut()) -> Result<()> {
        let sampling = SamplingOptions { temp: 0.0, ignore_eos: true, ..SamplingOptions::default() };
        let mut sampler = Sampler::new(self.session.model(), &sampling)?;
        for token in self.session.generate(&mut sampler, Some(n)) {
            token?;
            chosen();
        }
        Ok(())
    }

    fn touch_all(&mut self) -> Result<()> {
        self.session.model().finish_filling();
        Ok(())
    }

    fn clear(&mut self) {
        self.session.reset();
    }

    fn stats(&self) -> Option<Stats> {
        Some(self.session.stats())
    }

    fn describe(&self) -> Record {
        let info = self.session.model().info();
        let Description { plan, precision, caching, .. } = self.session.description();
        let Stats { kernels, latency, .. } = self.session.stats();
        Record {
            model_type: info.description.clone(),
            model_size: info.tensor_bytes,
            model_n_params: info.n_params,
            hobbit_budget: Some(plan.budget),
            hobbit_expert_cache: Some(plan.expert_cache),
            hobbit_expert_bytes: Some(info.expert_bytes),
            hobbit_n_slots: Some(plan.n_slots),
            hobbit_n_experts: Some(plan.n_experts),
            hobbit_n_expert: Some(info.n_expert),
            hobbit_n_expert_used: Some(info.n_expert_used),
            hobbit_precision: Some(precision.mode.to_string()),
            hobbit_policy: Some(caching.policy.clone()),
            hobbit_predictor: Some(self.caching.predictor.map_or("auto".into(), |kind| kind.to_string())),
            hobbit_prefetch: Some(self.caching.prefetch.to_string()),
            hobbit_kernels: Some(kernels.choice.to_string()),
            more: More {
                hobbit_kernel_trials: kernels.trials,
                hobbit_target_latency: latency.and_then(|latency| serde_json::to_value(latency).ok()),
                ..More::default()
            },
            ..Record::default()
        }
    }
}

/// Traffic of prompts, and of single tokens.
pub fn traffic(stats: &Stats) -> [Traffic; 2] {
    let ns = |seconds: f64| (seconds * 1e9) as u64;
    [&stats.prompt, &stats.decode].map(|phase| Traffic {
        hits: phase.hits,
        misses: phase.misses,
        bytes: phase.bytes_read,
        io_busy_ns: ns(phase.io_busy_seconds),
        stall_ns: ns(phase.io_wait_seconds),
    })
}

impl Engine for Stock {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        Ok(Stock::tokenize(self, text)?)
    }

    fn bos(&self) -> Option<Token> {
        Stock::bos(self)
    }

    fn n_vocab(&self) -> usize {
        Stock::n_vocab(self)
    }

    fn feed(&mut self, tokens: &[Token]) -> Result<()> {
        Ok(Stock::feed(self, tokens)?)
    }

    fn logits(&self) -> Option<&[f32]> {
        Stock::logits(self)
    }

    fn touch_all(&mut self) -> Result<()> {
        Ok(Stock::touch_all(self)?)
    }

    fn clear(&mut self) {
        Stock::clear(self);
    }

    fn stops_ns(&mut self) -> Result<Option<i64>> {
        Ok(self.seconds_of_stops()?.map(|seconds| (seconds * 1e9) as i64))
    }

    fn describe(&self) -> Record {
        let (model_type, model_size, model_n_params) = Stock::describe(self);
        Record { model_type, model_size, model_n_params, ..Record::default() }
    }
}

/// llama-bench's random numbers use C's default seed; ours use the same seed with another generator.
const SEED: u64 = 1;

/// All tokens to evaluate: each repetition takes the next piece, and starts over after the last.
#[derive(Debug)]
pub struct Tokens {
    test: Test,
    row: Vec<Token>,
}

/// The tokens of one repetition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    test: Test,
    tokens: &'a [Token],
}

impl<'a> Piece<'a> {
    /// Tokens in the context beforehand.
    pub fn depth(self) -> &'a [Token] {
        &self.tokens[..self.test.n_depth as usize]
    }

    /// The prompt.
    pub fn prompt(self) -> &'a [Token] {
        &self.tokens[self.test.n_depth as usize..][..self.test.n_prompt as usize]
    }

    /// Tokens evaluated one by one.
    pub fn singles(self) -> &'a [Token] {
        &self.tokens[(self.test.n_depth + self.test.n_prompt) as usize..]
    }
}

impl Tokens {
    /// Reads and tokenises the task's source.
    pub fn of(task: &Task, engine: &dyn Engine) -> Result<Self> {
        let row = match &task.source {
            Source::Random => random(task, engine.n_vocab()),
            Source::Text(path) => {
                let text = std::fs::read_to_string(path);
                let text = text.with_context(|| format!("{}: cannot read this file as text", path.display()))?;
                engine.tokenize(&text)?
            }
        };
        Self::new(task.case.test, row, engine.bos())
    }

    fn new(test: Test, mut row: Vec<Token>, bos: Option<Token>) -> Result<Self> {
        let n = test.n_tokens();
        ensure!(
            row.len() >= n,
            "the text has {} tokens, and a repetition takes {n}: give a longer --prompt-file, or smaller -p, -n, -pg \
             and -d",
            row.len()
        );
        if let Some(bos) = bos {
            row.iter_mut().step_by(n).for_each(|first| *first = bos);
        }
        Ok(Self { test, row })
    }

    /// The tokens of a repetition.
    pub fn rep(&self, rep: u32) -> Piece<'_> {
        let n = self.test.n_tokens();
        let first = rep as usize % (self.row.len() / n) * n;
        Piece { test: self.test, tokens: &self.row[first..first + n] }
    }
}

/// Tokens for all repetitions and the warm-up.
fn random(task: &Task, n_vocab: usize) -> Vec<Token> {
    let (mut random, n_vocab) = (Mt64::new(SEED), n_vocab.max(1) as u64);
    let n_pieces = (task.first_rep + task.reps + 1) as usize;
    (0..task.case.test.n_tokens() * n_pieces).map(|_| (random.next_u64() % n_vocab) as Token).collect()
}

#[cfg(test)]
mod tests {
    use super::super::case::Case;
    use super::*;

    const TEST: Test = Test { n_prompt: 2, n_gen: 1, n_depth: 1 };

    #[test]
    fn a_text_continues_from_repetition_to_repetition() {
        let tokens = Tokens::new(TEST, (97..107).collect(), Some(1000)).unwrap();
        let first = tokens.rep(0);
        assert_eq!((first.depth(), first.prompt(), first.singles()), (&[1000][..], &[98, 99][..], &[100][..]));
        assert_eq!(tokens.rep(1).prompt(), [102, 103]);
        assert_eq!(tokens.rep(2), first, "it begins again");
        let error = Tokens::new(TEST, vec![1, 2, 3], None).unwrap_err().to_string();
        assert!(error.contains("has 3 tokens, and a repetition takes 4"), "{error}");
    }

    #[test]
    fn random_tokens_differ_by_repetition() {
        let task = Task { reps: 2, case: Case { test: TEST, ..Case::default() }, ..Task::default() };
        let tokens = Tokens::new(TEST, random(&task, 256), None).unwrap();
        assert_eq!(random(&task, 256), tokens.row);
        assert_ne!(tokens.rep(0), tokens.rep(1));
        assert!(tokens.rep(2).prompt().iter().all(|token| (0..256).contains(token)), "the warm-up's");
    }
}
