//! One run, in a process of its own: opens a model, reads a prompt, decodes, and tells what it cost.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hobbit_programs::measure::disk::{RandomReads, random_reads};
use hobbit_programs::measure::process::Costs;
use hobbit::plan::{Budget, ExpertCache};
use hobbit::stats::{PhaseStats, PrecisionCounts, peak_rss_bytes};
use hobbit::{LowShare, Model, ModelOptions, Session, SessionOptions, Token};
use serde::{Deserialize, Serialize};

use super::contestant::{Contestant, Files};
use super::stock::Stock;

/// `n_batch` and `n_ubatch` of both: a prompt is evaluated in pieces of this many tokens.
pub const N_BATCH: u32 = 512;

/// Real text, the same for every model: what is read first is the prompt, what follows is "decoded".
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo-heldout-prose.txt");

/// Time for each depth at which the disk is measured.
const DISK_TIME: Duration = Duration::from_millis(1500);

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Work {
    /// A text is evaluated.
    Run(Contestant),
    /// The disk is read.
    Disk,
}

/// What to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    pub work: Work,
    pub files: Files,
    pub threads: i32,
    pub prompt_tokens: usize,
    pub decode_tokens: usize,
    /// Tokens of the text that are passed over.
    pub skip_tokens: usize,
    /// Where a warm start finds what was in memory.
    pub cache_state: Option<PathBuf>,
    /// hobbit's budget in bytes; `None`: everything resident, and measured in a second pass.
    pub budget: Option<u64>,
    /// The part of the expert cache that low versions get, in words.
    pub low_share: String,
    /// llama.cpp's load mode, by its name; `None`: mmap.
    pub load_mode: Option<String>,
    /// llama.cpp's extra buffer types.
    pub extra_bufts: bool,
}

impl Task {
    /// Context length in tokens.
    pub fn n_ctx(&self) -> u32 {
        ((self.prompt_tokens + self.decode_tokens) as u32).next_multiple_of(256).max(1024)
    }
}

/// What a phase cost.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Phase {
    pub tokens: usize,
    pub seconds: f64,
    /// Of each evaluation.
    pub step_seconds: Vec<f64>,
    /// Bytes fetched from the disk for this process, by the kernel's count.
    pub disk_bytes: u64,
    pub major_faults: u64,
    pub cpu_seconds: f64,
    pub experts: Option<Traffic>,
}

impl Phase {
    /// Tokens per second.
    pub fn speed(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// hobbit's own count.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Traffic {
    pub hits: u64,
    pub misses: u64,
    pub bytes_read: u64,
    pub io_busy_seconds: f64,
    pub io_wait_seconds: f64,
    /// Uses of experts by a token, as they were computed.
    pub used: Counts,
    /// Experts that were not resident in high precision, by what was done.
    pub missed: Counts,
    /// Low versions that a high one replaced.
    pub upgrades: u64,
}

/// Experts by precision.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Counts {
    pub high: u64,
    pub low: u64,
    pub skipped: u64,
}

impl From<PrecisionCounts> for Counts {
    fn from(counts: PrecisionCounts) -> Self {
        Self { high: counts.high, low: counts.low, skipped: counts.skipped }
    }
}

/// What a run answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Run(Box<Run>),
    Disk(Vec<RandomReads>),
}

/// A run of an engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    pub contestant: Contestant,
    pub threads: i32,
    pub load_seconds: f64,
    pub prompt: Phase,
    pub decode: Phase,
    /// Of the logits after the prompt, then after each decoded token: equal bits, equal hash.
    pub logits_hash: Vec<String>,
    pub peak_rss_bytes: u64,
    /// hobbit: how reads are done, and why.
    pub io_choice: Option<String>,
    /// hobbit: the memory plan.
    pub plan: Option<serde_json::Value>,
    /// hobbit: thresholds, types, sizes.
    pub precision: Option<serde_json::Value>,
}

/// llama.cpp and hobbit alike.
pub trait Evaluate {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>>;
    /// Evaluates after what is in the context; logits of the last token are kept.
    fn evaluate(&mut self, tokens: &[Token]) -> Result<()>;
    fn last_logits(&self) -> Result<&[f32]>;
    /// Empties the context.
    fn begin_again(&mut self);
    /// hobbit's counts so far: prompt and decode.
    fn traffic(&self) -> Option<(PhaseStats, PhaseStats)> {
        None
    }
}

/// Runs the task in this process.
pub fn run(task: &Task) -> Result<Answer> {
    match task.work {
        // The plain model's slices, whoever runs next: one roofline for all.
        Work::Disk => random_reads(&task.files.model, DISK_TIME).map(Answer::Disk),
        Work::Run(Contestant::Stock) => {
            let started = Instant::now();
            let mut stock = Stock::open(task)?;
            let run = evaluate(task, Contestant::Stock, &mut stock, started.elapsed())?;
            Ok(Answer::Run(Box::new(run)))
        }
        Work::Run(contestant) => {
            let started = Instant::now();
            let mut hobbit = open_hobbit(task, contestant)?;
            let mut run = evaluate(task, contestant, &mut hobbit, started.elapsed())?;
            let mut io_choice = hobbit.session.io_choice().to_owned();
            for path in contestant.reads(&task.files) {
                io_choice = io_choice.replace(&path.display().to_string(), "the model");
            }
            run.io_choice = Some(io_choice);
            run.plan = Some(serde_json::to_value(hobbit.session.plan())?);
            run.precision = Some(serde_json::to_value(hobbit.session.precision())?);
            Ok(Answer::Run(Box::new(run)))
        }
    }
}

fn evaluate(task: &Task, contestant: Contestant, engine: &mut dyn Evaluate, load: Duration) -> Result<Run> {
    let text = std::fs::read_to_string(TEXT).context("models/demo-heldout-prose.txt")?;
    let tokens = engine.tokenize(&text)?;
    let wanted = task.skip_tokens + task.prompt_tokens + task.decode_tokens;
    ensure!(tokens.len() >= wanted, "the text has {} tokens, {wanted} are wanted", tokens.len());
    let (prompt, rest) = tokens[task.skip_tokens..].split_at(task.prompt_tokens);
    let decoded: Vec<&[Token]> = rest[..task.decode_tokens].chunks(1).collect();
    if task.budget.is_none() {
        // Everything that the measured pass needs becomes resident, for llama.cpp in the page cache.
        engine.evaluate(prompt)?;
        decoded.iter().try_for_each(|token| engine.evaluate(token))?;
        engine.begin_again();
    }
    let mut logits_hash = Vec::new();
    let (before, _) = engine.traffic().unzip();
    let mut prompt = phase(engine, &[prompt], &mut logits_hash)?;
    prompt.experts = before.zip(engine.traffic()).map(|(before, (after, _))| traffic(&before, &after));
    let (_, before) = engine.traffic().unzip();
    let mut decode = phase(engine, &decoded, &mut logits_hash)?;
    decode.experts = before.zip(engine.traffic()).map(|(before, (_, after))| traffic(&before, &after));
    Ok(Run {
        contestant,
        threads: task.threads,
        load_seconds: load.as_secs_f64(),
        prompt,
        decode,
        logits_hash,
        peak_rss_bytes: peak_rss_bytes(),
        io_choice: None,
        plan: None,
        precision: None,
    })
}

fn phase(engine: &mut dyn Evaluate, batches: &[&[Token]], logits_hash: &mut Vec<String>) -> Result<Phase> {
    let before = Costs::now()?;
    let mut step_seconds = Vec::with_capacity(batches.len());
    for batch in batches {
        let started = Instant::now();
        engine.evaluate(batch)?;
        step_seconds.push(started.elapsed().as_secs_f64());
        logits_hash.push(hash(engine.last_logits()?));
    }
    let costs = Costs::now()?.since(before);
    Ok(Phase {
        tokens: batches.iter().map(|batch| batch.len()).sum(),
        seconds: step_seconds.iter().sum(),
        step_seconds,
        disk_bytes: costs.disk_bytes,
        major_faults: costs.major_faults,
        cpu_seconds: costs.cpu_ns as f64 * 1e-9,
        experts: None,
    })
}

fn traffic(before: &PhaseStats, after: &PhaseStats) -> Traffic {
    Traffic {
        hits: after.hits - before.hits,
        misses: after.misses - before.misses,
        bytes_read: after.bytes_read - before.bytes_read,
        io_busy_seconds: after.io_busy_seconds - before.io_busy_seconds,
        io_wait_seconds: after.io_wait_seconds - before.io_wait_seconds,
        used: after.used.since(before.used).into(),
        missed: after.missed.since(before.missed).into(),
        upgrades: after.upgrades - before.upgrades,
    }
}

/// FNV-1a over the bits.
fn hash(logits: &[f32]) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in logits.iter().flat_map(|logit| logit.to_bits().to_le_bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{hash:016x}")
}

struct Hobbit {
    session: Session,
    /// Index of the last entry of the last batch.
    last: usize,
}

fn open_hobbit(task: &Task, contestant: Contestant) -> Result<Hobbit> {
    let (path, low) = contestant.sources(&task.files)?;
    let low_share: LowShare = task.low_share.parse()?;
    let precision = contestant.precision();
    let (caching, cache_state) = (contestant.caching(), task.cache_state.clone());
    let mut options = ModelOptions {
        n_gpu_layers: 0,
        stand_aside: false,
        low,
        low_share,
        precision,
        caching,
        cache_state,
        ..ModelOptions::default()
    };
    match task.budget {
        Some(bytes) => options.budget = Budget::Bytes(bytes),
        None => options.expert_cache = ExpertCache::Percent(100.0),
    }
    let model = Model::open(path, &options, |_| true)?;
    let session = model.session(&SessionOptions {
        n_ctx: task.n_ctx(),
        n_batch: N_BATCH,
        n_ubatch: N_BATCH,
        threads: Some(task.threads),
        ..SessionOptions::default()
    })?;
    if task.budget.is_none() && model.info().is_moe() && !session.plan().is_fully_resident() {
        bail!("not every expert fits into this machine's memory: --resident needs a smaller model");
    }
    Ok(Hobbit { session, last: 0 })
}

impl Evaluate for Hobbit {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        Ok(self.session.model().tokenize(text, true, false)?)
    }

    fn evaluate(&mut self, tokens: &[Token]) -> Result<()> {
        self.last = (tokens.len() - 1) % N_BATCH as usize;
        Ok(self.session.feed(tokens)?)
    }

    fn last_logits(&self) -> Result<&[f32]> {
        self.session.logits(self.last).context("hobbit has no logits")
    }

    fn begin_again(&mut self) {
        self.session.reset();
    }

    fn traffic(&self) -> Option<(PhaseStats, PhaseStats)> {
        let stats = self.session.stats();
        Some((stats.prompt, stats.decode))
    }
}
