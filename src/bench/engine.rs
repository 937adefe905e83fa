//! What is measured: hobbit and plain llama.cpp behind one interface.

use std::path::Path;

use anyhow::Result;

use super::answer::{Experts, Traffic};
use super::args::Who;
use super::case::Task;
use hobbit::engine::{Stock, StockOptions};
use hobbit::stats::{DeviceCounters, PhaseStats};
use hobbit::{CachingOptions, Model, ModelOptions, Session, SessionOptions, Token};

/// llama.cpp and hobbit alike.
pub trait Engine {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>>;
    /// The token that begins every text, if there is one.
    fn bos(&self) -> Option<Token>;
    fn n_vocab(&self) -> usize;
    /// Evaluates after what is in the context; logits of the last token are kept.
    fn feed(&mut self, tokens: &[Token]) -> Result<()>;
    fn logits(&self) -> Option<&[f32]>;
    /// Empties the context.
    fn clear(&mut self);
    /// Brings into memory what is not there yet and has room.
    fn touch_all(&mut self) -> Result<()> {
        Ok(())
    }
    /// hobbit's counts so far: of prompts, of single tokens.
    fn traffic(&self) -> (Traffic, Traffic) {
        Default::default()
    }
    /// Name, bytes, parameters.
    fn describe(&self) -> (String, u64, u64);
    /// hobbit's plan.
    fn experts(&self) -> Option<Experts> {
        None
    }
    /// hobbit's counts so far on the first device.
    fn device(&self) -> Option<DeviceCounters> {
        None
    }
    /// Bytes of the text that a token stands for.
    fn piece(&self, token: Token) -> Vec<u8>;
}

/// Opens the engine that a task names.
///
/// # Errors
/// As [`Model::open`] and [`Stock::open`].
pub fn open(task: &Task) -> Result<Box<dyn Engine>> {
    let (case, session) = (&task.case, task.case.session_options()?);
    let options = ModelOptions { repack: task.repack, ..case.model_options()? };
    if task.who == Who::Stock {
        let stock = StockOptions {
            n_gpu_layers: options.n_gpu_layers,
            device: options.device,
            load_mode: (task.load_mode != "auto").then(|| task.load_mode.clone()),
            repack: task.repack,
            routes: options.routes,
        };
        return Ok(Box::new(Stock::open(&case.model, &stock, &session)?));
    }
    Ok(Box::new(Hobbit::open(&case.model, &options, &session)?))
}

/// A session of hobbit's.
pub struct Hobbit {
    session: Session,
    caching: CachingOptions,
    n_batch: usize,
    /// Index of the last entry of the last batch.
    last: usize,
}

impl Hobbit {
    /// Opens a model and a session of it.
    ///
    /// # Errors
    /// As [`Model::open`] and [`Model::session`].
    pub fn open(path: &Path, options: &ModelOptions, session: &SessionOptions) -> Result<Self> {
        let model = Model::open(path, options, |_| true)?;
        let (caching, n_batch) = (options.caching, session.n_batch as usize);
        Ok(Self { session: model.session(session)?, caching, n_batch, last: 0 })
    }
}

impl Engine for Hobbit {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        Ok(self.session.model().tokenize(text, false, false)?)
    }

    fn bos(&self) -> Option<Token> {
        let model = self.session.model();
        // What is added to nothing.
        model.adds_bos().then(|| model.tokenize("", true, false).ok()?.first().copied()).flatten()
    }

    fn n_vocab(&self) -> usize {
        self.session.model().n_vocab()
    }

    fn feed(&mut self, tokens: &[Token]) -> Result<()> {
        self.session.feed(tokens)?;
        self.last = (tokens.len() - 1) % self.n_batch;
        Ok(())
    }

    fn logits(&self) -> Option<&[f32]> {
        self.session.logits(self.last)
    }

    fn touch_all(&mut self) -> Result<()> {
        self.session.model().finish_filling();
        Ok(())
    }

    fn clear(&mut self) {
        self.session.reset();
    }

    fn traffic(&self) -> (Traffic, Traffic) {
        let stats = self.session.stats();
        (traffic(&stats.prompt), traffic(&stats.decode))
    }

    fn describe(&self) -> (String, u64, u64) {
        let info = self.session.model().info();
        (info.description.clone(), info.tensor_bytes, info.n_params)
    }

    fn experts(&self) -> Option<Experts> {
        let (info, plan) = (self.session.model().info(), self.session.plan());
        let caching = self.session.caching();
        Some(Experts {
            budget: plan.budget,
            expert_cache: plan.expert_cache,
            expert_bytes: info.expert_bytes,
            n_slots: plan.n_slots,
            n_experts: plan.n_experts,
            n_expert: info.n_expert,
            n_expert_used: info.n_expert_used,
            precision: word(&self.session.precision().mode),
            policy: word(&caching.policy),
            predictor: self.caching.predictor.to_string(),
            prefetch: self.caching.prefetch.to_string(),
            ..Experts::default()
        })
    }

    fn device(&self) -> Option<DeviceCounters> {
        self.session.stats().devices.first().copied()
    }

    fn piece(&self, token: Token) -> Vec<u8> {
        self.session.model().piece(token, false)
    }
}

/// As it is serialised.
fn word(value: &impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(text)) => text,
        Ok(other) => other.to_string(),
        Err(_) => String::new(),
    }
}

fn traffic(stats: &PhaseStats) -> Traffic {
    let ns = |seconds: f64| (seconds * 1e9) as u64;
    Traffic {
        hits: stats.hits,
        misses: stats.misses,
        bytes: stats.bytes_read,
        io_busy_ns: ns(stats.io_busy_seconds),
        stall_ns: ns(stats.io_wait_seconds),
    }
}

impl Engine for Stock {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        Ok(Stock::tokenize(self, text))
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

    fn describe(&self) -> (String, u64, u64) {
        Stock::describe(self)
    }

    fn piece(&self, token: Token) -> Vec<u8> {
        Stock::piece(self, token)
    }
}
