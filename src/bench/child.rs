//! The process of one run: opens an engine, evaluates, and tells what it cost.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use xxhash_rust::xxh3::xxh3_64;

use super::answer::{Answer, Experts, Rep, Traffic};
use super::case::Task;
use super::engine::{Engine, open};
use super::record::Moment;
use super::tokens::Tokens;
use crate::measure::energy::Energy;
use crate::measure::process::{Costs, Footprint, heap_bytes};
use hobbit::{DeviceKind, Token};

/// Between two looks at the process.
const LOOK: Duration = Duration::from_millis(100);

/// Does what the task says.
///
/// # Errors
/// As [`open`]; a text that is too short; what fails while it is evaluated.
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
    let load_ns = began.ns();
    let watch = Watch::start(began);
    let tokens = Tokens::of(task, engine)?;
    let mut answer = Answer { load_ns, ..Answer::default() };
    if task.delay > 0 {
        thread::sleep(Duration::from_secs(task.delay));
    }
    if task.warmup {
        warm_up(task, engine, &tokens, &watch)?;
    }
    let energy = Energy::find();
    let (mut prompt, mut decode) = (Traffic::default(), Traffic::default());
    for rep in task.first_rep..task.first_rep + task.reps {
        let parts = tokens.rep(rep)?;
        engine.clear();
        if !parts.depth().is_empty() {
            engine.feed(parts.depth())?;
            watch.add(parts.depth().len());
            note_first(task, &mut answer, began);
        }
        let before = (Costs::now()?, engine.traffic(), energy.read());
        let mut measured = Rep::default();
        if !parts.prompt().is_empty() {
            measured.prompt_ns = timed(engine, parts.prompt())?;
            watch.add(parts.prompt().len());
            note_first(task, &mut answer, began);
            note_logits(task, engine, &mut answer);
        }
        for token in parts.singles().chunks(1) {
            measured.steps_ns.push(timed(engine, token)?);
            watch.add(1);
            note_first(task, &mut answer, began);
            note_logits(task, engine, &mut answer);
        }
        let costs = Costs::now()?.since(before.0);
        answer.disk_bytes += costs.disk_bytes;
        answer.major_faults += costs.major_faults;
        answer.cpu_ns += costs.cpu_ns;
        if let (Some(before), Some(after)) = (&before.2, energy.read()) {
            *answer.energy_uj.get_or_insert(0) += energy.between(before, &after);
        }
        let after = engine.traffic();
        prompt = prompt + since(after.0, before.1.0);
        decode = decode + since(after.1, before.1.1);
        answer.reps.push(measured);
    }
    answer.series = watch.stop();
    answer.peak_rss = Footprint::of("self").map_or(0, |now| now.peak_rss);
    answer.experts = engine.experts().map(|experts| Experts { prompt, decode, ..experts });
    (answer.model_type, answer.model_size, answer.model_n_params) = engine.describe();
    about_devices(&mut answer)?;
    Ok(answer)
}

/// The process's start.
#[derive(Clone, Copy)]
pub struct Began {
    here: Instant,
    /// What had passed then.
    earlier_ns: u64,
}

impl Began {
    /// Nanoseconds since the process was started.
    pub fn ns(self) -> u64 {
        self.earlier_ns + self.here.elapsed().as_nanos() as u64
    }
}

/// Reckons from the time that the parent noted.
pub fn began(task: &Task) -> Began {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    // A clock that is set meanwhile makes nonsense of it: an hour is no start of a process.
    let earlier = now.saturating_sub(task.started_ns).min(3_600_000_000_000);
    Began { here: Instant::now(), earlier_ns: if task.started_ns == 0 { 0 } else { earlier as u64 } }
}

/// As llama-bench: the prompt once, then one token. Without a limit everything that fits is brought into memory before, or who
/// touches it first would pay for it while time is taken.
fn warm_up(task: &Task, engine: &mut dyn Engine, tokens: &Tokens, watch: &Watch) -> Result<()> {
    // Behind what is measured: a text that was just read is no new one.
    let parts = tokens.rep(task.first_rep + task.reps)?;
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

fn timed(engine: &mut dyn Engine, tokens: &[Token]) -> Result<u64> {
    let started = Instant::now();
    engine.feed(tokens)?;
    Ok(started.elapsed().as_nanos() as u64)
}

/// The first logits of a process that did not warm up.
fn note_first(task: &Task, answer: &mut Answer, began: Began) {
    if !task.warmup && answer.first_token_ns.is_none() {
        answer.first_token_ns = Some(began.ns());
    }
}

fn note_logits(task: &Task, engine: &dyn Engine, answer: &mut Answer) {
    if let Some(logits) = engine.logits().filter(|_| task.with_hashes) {
        let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_bits().to_le_bytes()).collect();
        answer.hashes.push(xxh3_64(&bytes));
    }
}

fn since(after: Traffic, before: Traffic) -> Traffic {
    Traffic {
        hits: after.hits - before.hits,
        misses: after.misses - before.misses,
        bytes: after.bytes - before.bytes,
        io_busy_ns: after.io_busy_ns - before.io_busy_ns,
        stall_ns: after.stall_ns - before.stall_ns,
    }
}

/// Asked last: it makes hobbit's device known to ggml.
fn about_devices(answer: &mut Answer) -> Result<()> {
    let devices = hobbit::devices(&[])?;
    let names = |wanted: fn(DeviceKind) -> bool| {
        let found = devices.iter().filter(|device| wanted(device.kind)).map(|device| device.description.clone());
        found.collect::<Vec<_>>().join(", ")
    };
    answer.cpu_info = names(|kind| matches!(kind, DeviceKind::Cpu | DeviceKind::Accelerator));
    answer.gpu_info = names(|kind| matches!(kind, DeviceKind::Gpu | DeviceKind::Integrated));
    let mut backends: Vec<String> = devices
        .iter()
        .map(|device| device.name.trim_end_matches(|letter: char| letter.is_ascii_digit()).to_owned())
        .collect();
    backends.dedup();
    // As llama-bench: the CPU is not told beside another.
    if backends.len() > 1 {
        backends.retain(|name| name != "CPU");
    }
    answer.backends = backends.join(",");
    Ok(())
}

/// Looks at the process from time to time.
pub struct Watch {
    tokens: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    thread: thread::JoinHandle<Vec<Moment>>,
}

impl Watch {
    /// Begins to look.
    pub fn start(began: Began) -> Self {
        let (tokens, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, end) = (Arc::clone(&tokens), Arc::clone(&is_over));
        let thread = thread::spawn(move || {
            let mut series = Vec::new();
            loop {
                let is_last = end.load(Ordering::Acquire);
                if let Some(now) = Footprint::of("self") {
                    series.push(Moment {
                        t_ns: began.ns(),
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

    /// So many tokens more were evaluated.
    pub fn add(&self, n: usize) {
        self.tokens.fetch_add(n as u64, Ordering::Relaxed);
    }

    /// Looks once more.
    pub fn stop(self) -> Vec<Moment> {
        self.is_over.store(true, Ordering::Release);
        self.thread.thread().unpark();
        self.thread.join().unwrap_or_default()
    }
}
