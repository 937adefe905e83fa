//! The process of one run: opens an engine, evaluates, and reports results and costs.

use std::array;
use std::io::{self, Write};
use std::ops::{Add, Sub};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use xxhash_rust::xxh3::xxh3_64;

use super::answer::{Answer, Rep};
use super::case::Task;
use super::engine::{Engine, open};
use super::process::{Footprint, disk_bytes, heap_bytes};
use super::record::{Moment, Record};
use super::start::now_ns;
use super::tokens::Tokens;
use hobbit::{DeviceKind, Token};

/// Interval between samples of the process.
const LOOK: Duration = Duration::from_millis(100);

/// Runs the task.
///
/// # Errors
/// As [`open`]; a text that is too short; a failed evaluation.
pub fn run(task: &Task) -> Result<Answer> {
    let is_verbose = task.verbose;
    hobbit::set_log(move |level, text| {
        if is_verbose || level == hobbit::LogLevel::Error {
            let _ = write!(io::stderr(), "{text}");
        }
    });
    let began = began(task);
    let mut engine = open(task)?;
    let engine = &mut *engine;
    let mut answer = Answer { load_ns: ns_since(began), ..Answer::default() };
    let watch = Watch::start(began);
    let tokens = Tokens::of(task, engine)?;
    thread::sleep(Duration::from_secs(task.delay));
    if task.warmup {
        warm_up(task, engine, &tokens, &watch)?;
    }
    // Returns the evaluation's nanoseconds.
    let evaluate = |engine: &mut dyn Engine, tokens: &[Token], answer: &mut Answer| -> Result<u64> {
        let started = Instant::now();
        engine.feed(tokens)?;
        let ns = ns_since(started);
        watch.add(tokens.len());
        if !task.warmup {
            answer.first_token_ns.get_or_insert_with(|| ns_since(began));
        }
        Ok(ns)
    };
    for rep in task.first_rep..task.first_rep + task.reps {
        let parts = tokens.rep(rep);
        engine.clear();
        if !parts.depth().is_empty() {
            evaluate(engine, parts.depth(), &mut answer)?;
        }
        let before = (disk_bytes()?, engine.traffic());
        let mut measured = Rep::default();
        if !parts.prompt().is_empty() {
            measured.prompt_ns = evaluate(engine, parts.prompt(), &mut answer)?;
            note_logits(task, engine, &mut answer);
        }
        for token in parts.singles().chunks(1) {
            measured.steps_ns.push(evaluate(engine, token, &mut answer)?);
            note_logits(task, engine, &mut answer);
        }
        answer.disk_bytes += disk_bytes()? - before.0;
        if let Some((before, after)) = before.1.zip(engine.traffic()) {
            let sums = answer.traffic.get_or_insert_default();
            *sums = array::from_fn(|i| sums[i].with(after[i].with(before[i], u64::sub), u64::add));
        }
        answer.reps.push(measured);
    }
    answer.series = watch.stop();
    answer.stops_ns = engine.stops_ns()?;
    answer.peak_rss = Footprint::now().map_or(0, |now| now.peak_rss);
    // Devices last: the query registers hobbit's with ggml.
    answer.about = with_devices(engine.describe())?;
    Ok(answer)
}

fn ns_since(started: Instant) -> u64 {
    started.elapsed().as_nanos() as u64
}

/// Start of the process, by the parent's clock.
fn began(task: &Task) -> Instant {
    // If the clock was set meanwhile, the difference is wrong: limit it to an hour.
    let earlier = now_ns().saturating_sub(task.started_ns).min(3_600_000_000_000) as u64;
    let earlier = if task.started_ns == 0 { 0 } else { earlier };
    let now = Instant::now();
    now.checked_sub(Duration::from_nanos(earlier)).unwrap_or(now)
}

/// As llama-bench: the prompt once, then one token. Without a limit, first load everything that fits, so that the
/// timed repetitions do not pay for first accesses.
fn warm_up(task: &Task, engine: &mut dyn Engine, tokens: &Tokens, watch: &Watch) -> Result<()> {
    // Use a piece behind the measured ones: a text that was just evaluated would be cached.
    let parts = tokens.rep(task.first_rep + task.reps);
    if task.case.limit.is_none() {
        engine.touch_all()?;
    }
    if !parts.prompt().is_empty() {
        engine.feed(parts.prompt())?;
    }
    if let Some(first) = parts.singles().first() {
        engine.feed(&[*first])?;
    }
    watch.add(parts.prompt().len() + parts.singles().len().min(1));
    Ok(())
}

fn note_logits(task: &Task, engine: &dyn Engine, answer: &mut Answer) {
    if let Some(logits) = engine.logits().filter(|_| task.with_hashes) {
        let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_bits().to_le_bytes()).collect();
        answer.hashes.push(xxh3_64(&bytes));
    }
}

/// Adds the device columns.
fn with_devices(about: Record) -> Result<Record> {
    let devices = hobbit::devices(&[])?;
    let names = |wanted: fn(DeviceKind) -> bool| {
        let found = devices.iter().filter(|device| wanted(device.kind)).map(|device| device.description.clone());
        found.collect::<Vec<_>>().join(", ")
    };
    let mut backends: Vec<String> = devices
        .iter()
        .map(|device| device.name.trim_end_matches(|letter: char| letter.is_ascii_digit()).to_owned())
        .collect();
    backends.dedup();
    // As llama-bench: omit the CPU if there is another device.
    if backends.len() > 1 {
        backends.retain(|name| name != "CPU");
    }
    Ok(Record {
        cpu_info: names(|kind| matches!(kind, DeviceKind::Cpu | DeviceKind::Accelerator)),
        gpu_info: names(|kind| matches!(kind, DeviceKind::Gpu | DeviceKind::Integrated)),
        backends: backends.join(","),
        ..about
    })
}

/// Samples the process at intervals.
struct Watch {
    tokens: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    thread: thread::JoinHandle<Vec<Moment>>,
}

impl Watch {
    /// Starts sampling.
    fn start(began: Instant) -> Self {
        let (tokens, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, end) = (Arc::clone(&tokens), Arc::clone(&is_over));
        let thread = thread::spawn(move || {
            let mut series = Vec::new();
            loop {
                let is_last = end.load(Ordering::Acquire);
                if let Some(now) = Footprint::now() {
                    series.push(Moment {
                        t_ns: ns_since(began),
                        rss: now.rss,
                        anon: now.anon,
                        heap: heap_bytes(),
                        fds: now.fds,
                        threads: now.threads,
                        tokens: count.load(Ordering::Relaxed),
                    });
                }
                if is_last {
                    return series;
                }
                thread::park_timeout(LOOK);
            }
        });
        Self { tokens, is_over, thread }
    }

    /// Adds evaluated tokens.
    fn add(&self, n: usize) {
        self.tokens.fetch_add(n as u64, Ordering::Relaxed);
    }

    /// Takes a last sample and stops.
    fn stop(self) -> Vec<Moment> {
        self.is_over.store(true, Ordering::Release);
        self.thread.thread().unpark();
        self.thread.join().unwrap_or_default()
    }
}
