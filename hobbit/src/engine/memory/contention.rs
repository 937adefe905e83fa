//! Detects other programs on our cores; while they compete with the compute threads, threads do not spin at barriers.
//!
//! llama.cpp and the inner backend compute on one OpenMP team. libgomp lets its threads spin at barriers for
//! milliseconds, which costs nothing while the cores are ours and saves waking up. Beside another program it costs most
//! of the speed: to the scheduler, spinning threads look as busy as computing ones, so the thread that all others wait
//! for is scheduled late, and no core ever looks idle.
//!
//! libgomp stops spinning early (after 100 rounds) while there are more OpenMP threads than cores, as its manual
//! describes under `GOMP_SPINCOUNT`. So four times a second during an evaluation, a watcher thread measures how long
//! the process's threads have waited for a core. While they wait, it keeps a team of idle threads that only raise the
//! count. Our threads that read or serve are not another program: their run time may be the cause of the others'
//! waiting. Nor is a thread's own waking up. The threads of a small model meet so often that waking them may cost more
//! than the other program does: where a decode step becomes slower, they spin again. If `OMP_WAIT_POLICY` or
//! `GOMP_SPINCOUNT` is set, the watcher does nothing.

use std::collections::{BTreeSet, HashMap};
#[cfg(unix)]
use std::ffi::c_int;
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};
use std::{fs, thread};

use hobbit_core::store::arena::is_faulting;
use hobbit_core::store::threads;

/// Time between two samples, about a token of a large model.
const INTERVAL: Duration = Duration::from_millis(250);

/// Samples without an evaluation before the watcher sleeps.
const IDLE_LOOKS_MAX: u32 = 8;

/// Wait at the start of a turn that needs no other program: the time to switch to a thread that has woken up.
const SWITCH_NANOSECONDS: u64 = 2_000;

/// Maximum number of idle threads: a machine has fewer cores beyond a session's threads.
const EXTRAS_MAX: usize = 1024;

/// `GOMP_parallel`: runs a function on a team of the given size, the calling thread included.
type Parallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// Name of the idle threads, as process viewers show it.
const EXTRAS_NAME: &str = "hobbit-extras";

/// libgomp, if llama.cpp uses it.
struct Gomp {
    parallel: Parallel,
    n_cores: usize,
}

impl Gomp {
    /// Nothing to look up: only Linux tells how long threads waited.
    #[cfg(not(unix))]
    fn loaded() -> Option<Gomp> {
        None
    }

    /// The loaded copy; `None` if there is none (another OpenMP, or static linking).
    #[cfg(unix)]
    fn loaded() -> Option<Gomp> {
        // SAFETY: the library is only looked up, and stays loaded as long as llama.cpp, which uses it. libgomp's binary
        // interface fixes the types of both functions since its version 4.0.
        unsafe {
            let library = libc::dlopen(c"libgomp.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
            if library.is_null() {
                return None;
            }
            let parallel = libc::dlsym(library, c"GOMP_parallel".as_ptr());
            let n_cores = libc::dlsym(library, c"omp_get_num_procs".as_ptr());
            if parallel.is_null() || n_cores.is_null() {
                return None;
            }
            let parallel = std::mem::transmute::<*mut c_void, Parallel>(parallel);
            let n_cores = std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(n_cores);
            Some(Gomp { parallel, n_cores: n_cores().max(1) as usize })
        }
    }
}

struct Watch {
    gomp: Gomp,
    /// Running evaluations.
    n_running: AtomicUsize,
    /// Threads of the largest session so far.
    n_threads: AtomicUsize,
    /// Decode steps that have ended, and their nanoseconds.
    n_steps: AtomicU64,
    step_nanoseconds: AtomicU64,
    is_asleep: AtomicBool,
    sleep: Mutex<()>,
    wake: Condvar,
}

/// Marks an evaluation as running until dropped.
pub(crate) struct Running(Option<Evaluation>);

struct Evaluation {
    watch: &'static Watch,
    is_step: bool,
    began: Instant,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(Evaluation { watch, is_step, began }) = self.0 {
            watch.n_running.fetch_sub(1, Ordering::SeqCst);
            if is_step {
                watch.step_nanoseconds.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
                watch.n_steps.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Announces an evaluation on `n_threads` threads. `is_step`: it is a decode step of the model, whose time counts.
pub(crate) fn running(n_threads: i32, is_step: bool) -> Running {
    let Some(watch) = usize::try_from(n_threads).ok().filter(|n| *n > 1).and_then(|_| watch()) else {
        return Running(None);
    };
    watch.n_threads.fetch_max(n_threads.unsigned_abs() as usize, Ordering::Relaxed);
    watch.n_running.fetch_add(1, Ordering::SeqCst);
    if watch.is_asleep.load(Ordering::SeqCst) {
        let _guard = watch.sleep.lock().unwrap_or_else(PoisonError::into_inner);
        watch.wake.notify_one();
    }
    Running(Some(Evaluation { watch, is_step, began: Instant::now() }))
}

/// The watcher, started with the first evaluation; `None` where it could not observe or act.
fn watch() -> Option<&'static Watch> {
    static WATCH: OnceLock<Option<&'static Watch>> = OnceLock::new();
    *WATCH.get_or_init(|| {
        let is_decided = ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"].iter().any(|name| std::env::var_os(name).is_some());
        if is_decided || Waited::look().is_none() {
            return None;
        }
        let watch: &'static Watch = Box::leak(Box::new(Watch {
            gomp: Gomp::loaded()?,
            n_running: AtomicUsize::new(0),
            n_threads: AtomicUsize::new(0),
            n_steps: AtomicU64::new(0),
            step_nanoseconds: AtomicU64::new(0),
            is_asleep: AtomicBool::new(false),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        }));
        thread::Builder::new().name("hobbit-cores".into()).spawn(|| watch.run()).ok().map(|_| watch)
    })
}

impl Watch {
    fn run(&self) {
        let mut contention = Contention::default();
        let mut extras: Option<Extras> = None;
        let (mut before, mut at) = (Waited::look(), Instant::now());
        let (mut n_idle, mut was_faulting) = (0, is_faulting());
        loop {
            thread::sleep(INTERVAL);
            let (now, elapsed) = (Waited::look(), at.elapsed());
            at = Instant::now();
            let step_seconds = self.step_seconds();
            // Exclude our own page-fault threads: they take turns with the compute threads as another program would.
            let is_ours = std::mem::replace(&mut was_faulting, is_faulting()) || was_faulting;
            if let (Some(before), Some(now), false) = (&before, &now, is_ours) {
                let sample = Sample { step_seconds, ..now.since(before, elapsed) };
                match (contention.observe(sample), &extras) {
                    (true, None) => extras = self.extras(),
                    (false, Some(_)) => extras = None,
                    _ => {}
                }
            }
            before = now;
            n_idle = if self.n_running.load(Ordering::SeqCst) > 0 { 0 } else { n_idle + 1 };
            if n_idle > IDLE_LOOKS_MAX {
                self.sleep();
                (before, at, n_idle) = (Waited::look(), Instant::now(), 0);
            }
        }
    }

    /// Mean seconds of the decode steps since the last call; `None` after too few.
    fn step_seconds(&self) -> Option<f64> {
        let n = self.n_steps.swap(0, Ordering::Relaxed);
        let nanoseconds = self.step_nanoseconds.swap(0, Ordering::Relaxed);
        (n >= STEPS_MIN).then(|| nanoseconds as f64 / 1e9 / n as f64)
    }

    /// Sleeps until the next evaluation.
    fn sleep(&self) {
        let mut guard = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_asleep.store(true, Ordering::SeqCst);
        while self.n_running.load(Ordering::SeqCst) == 0 {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.is_asleep.store(false, Ordering::SeqCst);
    }

    /// One thread more than there are cores for, including the compute threads.
    fn extras(&self) -> Option<Extras> {
        let n_threads = self.n_threads.load(Ordering::Relaxed);
        Extras::new(&self.gomp, (self.gomp.n_cores.saturating_sub(n_threads) + 2).min(EXTRAS_MAX))
    }
}

/// A team of idle threads, which sleep and are counted until this is dropped.
struct Extras {
    _end: Sender<()>,
}

impl Extras {
    /// `None` where the system refuses a thread.
    fn new(gomp: &Gomp, n: usize) -> Option<Self> {
        let (_end, ended) = mpsc::channel::<()>();
        let (formed, is_formed) = mpsc::channel();
        let parallel = gomp.parallel;
        let team = move || {
            // SAFETY: the function takes no data. Threads of a team stay in the pool of the thread that formed it, and
            // are counted as long as it lives.
            unsafe { parallel(nothing, std::ptr::null_mut(), n as c_uint, 0) };
            let _ = formed.send(());
            let _ = ended.recv();
        };
        thread::Builder::new().name(EXTRAS_NAME.into()).spawn(team).ok()?;
        is_formed.recv().ok().map(|()| Self { _end })
    }
}

extern "C" fn nothing(_: *mut c_void) {}

/// Nanoseconds run, nanoseconds waited and turns by thread, and which threads only serve the compute threads.
struct Waited {
    all: HashMap<u32, (u64, u64, u64)>,
    serving: BTreeSet<u32>,
}

impl Waited {
    /// `None` if the kernel does not report them.
    fn look() -> Option<Self> {
        let threads = fs::read_dir("/proc/self/task").ok()?.flatten().filter_map(|entry| {
            let thread = entry.file_name().to_str()?.parse().ok()?;
            // A thread that has just ended has no file.
            Some((thread, parse(&fs::read_to_string(entry.path().join("schedstat")).ok()?)?))
        });
        Some(Self { all: threads.collect(), serving: threads::running() }).filter(|seen| !seen.all.is_empty())
    }

    /// The difference to an earlier sample.
    fn since(&self, before: &Self, elapsed: Duration) -> Sample {
        let (mut ran_computing, mut waited_computing, mut ran_serving) = (0, 0, 0);
        for (thread, (ran, waited, turns)) in &self.all {
            let (ran_before, waited_before, turns_before) = before.all.get(thread).copied().unwrap_or_default();
            let ran = ran.saturating_sub(ran_before);
            if self.serving.contains(thread) {
                ran_serving += ran;
            } else {
                let switches = turns.saturating_sub(turns_before).saturating_mul(SWITCH_NANOSECONDS);
                ran_computing += ran;
                waited_computing += waited.saturating_sub(waited_before).saturating_sub(switches);
            }
        }
        Sample {
            seconds: elapsed.as_secs_f64(),
            ran_seconds: ran_computing as f64 / 1e9,
            waited_seconds: waited_computing.saturating_sub(ran_serving) as f64 / 1e9,
            step_seconds: None,
        }
    }
}

/// Nanoseconds run, nanoseconds waited and turns, from the kernel's line with the three.
fn parse(text: &str) -> Option<(u64, u64, u64)> {
    let mut numbers = text.split_ascii_whitespace().map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?))
}

// The decision: competition for our cores from how long our threads wait for one.

/// Activity of the process's threads between two samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sample {
    seconds: f64,
    /// Seconds run, summed over all compute threads.
    ran_seconds: f64,
    /// Seconds the compute threads were runnable while other programs had the cores; our own serving threads do
    /// not count.
    waited_seconds: f64,
    /// Mean time of a decode step, for models so small that several fit into a sample.
    step_seconds: Option<f64>,
}

/// Decode steps in a sample whose mean counts.
const STEPS_MIN: u64 = 8;

/// How much longer a decode step may take on threads that sleep at barriers: more than the difference between steps.
const SLEEPING_COST_MAX: f64 = 1.5;

/// Seconds for which threads spin, whatever they wait, after sleeping made them slower; doubled each time.
const SPIN_SECONDS: f64 = 8.0;
const SPIN_SECONDS_MAX: f64 = 64.0;

/// Share of runnable time spent waiting at which the cores count as contended, if two samples in a row agree.
const WAITED_SHARE_CONTENDED: f64 = 0.05;

/// Share at which one sample suffices. A smaller share may be a moment of the system's own work.
const WAITED_SHARE_CERTAIN: f64 = 0.15;

/// Share below which the cores are free again.
const WAITED_SHARE_CALM: f64 = 0.02;

/// Minimum load, in cores, for a sample to count.
const BUSY_CORES_MIN: f64 = 0.1;

/// Initial calm time before threads spin again, in seconds. Short, because the contention may have been a moment of the
/// system's own work.
const PATIENCE_SECONDS: f64 = 0.5;

/// Maximum calm time, reached by doubling after each relapse.
const PATIENCE_SECONDS_MAX: f64 = 32.0;

/// Contention that returns within this time never ended: sleeping threads wait less.
const RELAPSE_SECONDS: f64 = 2.0;

/// State between two samples.
#[derive(Debug)]
struct Contention {
    is_contended: bool,
    /// The last sample was above the contended share but below the certain one.
    is_suspected: bool,
    /// Seconds of calm so far; when not contended, seconds since contention ended.
    calm_seconds: f64,
    patience_seconds: f64,
    /// A decode step in the sample that began the contention, while threads were spinning.
    step_seconds: Option<f64>,
    /// Seconds for which threads still spin in any case, and for how many they do after the next failure.
    spin_seconds: f64,
    next_spin_seconds: f64,
}

impl Default for Contention {
    fn default() -> Self {
        Self {
            is_contended: false,
            is_suspected: false,
            calm_seconds: f64::INFINITY,
            patience_seconds: PATIENCE_SECONDS,
            step_seconds: None,
            spin_seconds: 0.0,
            next_spin_seconds: SPIN_SECONDS,
        }
    }
}

impl Contention {
    /// Whether others compute on our cores and sleeping at barriers helps.
    fn observe(&mut self, sample: Sample) -> bool {
        let could_run = sample.ran_seconds + sample.waited_seconds;
        if could_run < BUSY_CORES_MIN * sample.seconds {
            return self.is_contended;
        }
        let share = sample.waited_seconds / could_run;
        if !self.is_contended {
            self.calm_seconds += sample.seconds;
            self.spin_seconds -= sample.seconds;
            if self.spin_seconds > 0.0 {
                return false;
            }
            let was_suspected = std::mem::replace(&mut self.is_suspected, share >= WAITED_SHARE_CONTENDED);
            if share >= WAITED_SHARE_CERTAIN || self.is_suspected && was_suspected {
                self.patience_seconds = if self.calm_seconds <= RELAPSE_SECONDS {
                    (2.0 * self.patience_seconds).min(PATIENCE_SECONDS_MAX)
                } else {
                    PATIENCE_SECONDS
                };
                (self.is_contended, self.calm_seconds, self.step_seconds) = (true, 0.0, sample.step_seconds);
            }
        } else if self.is_slower(sample) {
            (self.is_contended, self.calm_seconds) = (false, 0.0);
            self.spin_seconds = self.next_spin_seconds;
            self.next_spin_seconds = (2.0 * self.next_spin_seconds).min(SPIN_SECONDS_MAX);
        } else if share >= WAITED_SHARE_CALM {
            self.calm_seconds = 0.0;
        } else {
            self.calm_seconds += sample.seconds;
            if self.calm_seconds >= self.patience_seconds {
                (self.is_contended, self.calm_seconds) = (false, 0.0);
                self.next_spin_seconds = SPIN_SECONDS;
            }
        }
        self.is_contended
    }

    /// Whether sleeping at barriers costs more than it saves: a small model's threads meet so often that waking them
    /// takes longer than what they compute.
    fn is_slower(&self, sample: Sample) -> bool {
        let both = self.step_seconds.zip(sample.step_seconds);
        both.is_some_and(|(spinning, sleeping)| sleeping > SLEEPING_COST_MAX * spinning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn n_extras() -> usize {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.trim_end() == EXTRAS_NAME).count()
    }

    /// llama.cpp is linked to the libgomp that is found here, and its threads start and end on request.
    #[test]
    fn extra_threads_live_until_dropped() {
        let gomp = Gomp::loaded().expect("llama.cpp computes with libgomp");
        assert!(gomp.n_cores > 0);
        let extras = Extras::new(&gomp, 3).unwrap();
        assert_eq!(n_extras(), 3);
        drop(extras);
        // The threads are still ending.
        while n_extras() > 0 {
            thread::yield_now();
        }
    }

    #[test]
    fn threads_that_come_and_go_do_not_confuse_the_sum() {
        let look = |threads: &[(u32, (u64, u64, u64))]| Waited {
            all: threads.iter().copied().collect(),
            serving: BTreeSet::from([7]),
        };
        let before = look(&[(1, (1_000_000_000, 0, 7)), (2, (5_000_000_000, 3_000_000_000, 9))]);
        let now = look(&[(1, (1_500_000_000, 250_000_000, 7)), (3, (500_000_000, 0, 0))]);
        let expected = Sample { seconds: 1.0, ran_seconds: 1.0, waited_seconds: 0.25, step_seconds: None };
        assert_eq!(now.since(&before, Duration::from_secs(1)), expected);
        // A reader thread: it waited for ours, and ours for it.
        for (ran, waited) in [(200_000_000, 0.05), (900_000_000, 0.0)] {
            let mut now = look(&[(1, (1_500_000_000, 250_000_000, 7)), (7, (ran, 400_000_000, 1))]);
            now.all.insert(3, (500_000_000, 0, 0));
            let expected = Sample { waited_seconds: waited, ..expected };
            assert_eq!(now.since(&before, Duration::from_secs(1)), expected);
        }
    }

    /// Threads that sleep at barriers wait a moment after each: 20,000 wake-ups cost 40 ms without another program.
    #[test]
    fn waking_up_is_no_waiting() {
        let look = |ran, waited, turns| Waited { all: [(1, (ran, waited, turns))].into(), serving: BTreeSet::new() };
        let before = look(0, 0, 0);
        let alone = look(800_000_000, 30_000_000, 20_000).since(&before, Duration::from_secs(1));
        assert_eq!(alone.waited_seconds, 0.0);
        let beside = look(800_000_000, 140_000_000, 20_000).since(&before, Duration::from_secs(1));
        assert_eq!(beside.waited_seconds, 0.1);
    }

    /// A second in which two threads could run and waited for this share of it.
    fn second(share: f64) -> Sample {
        Sample { seconds: 1.0, ran_seconds: 2.0 * (1.0 - share), waited_seconds: 2.0 * share, step_seconds: None }
    }

    /// Calm seconds until the cores count as free.
    fn seconds_to_calm(contention: &mut Contention) -> usize {
        (1..200).find(|_| !contention.observe(second(0.0))).expect("it ends")
    }

    #[test]
    fn contention_begins_at_once_and_ends_after_calm() {
        let mut contention = Contention::default();
        assert!(!contention.observe(second(0.01)));
        assert!(contention.observe(second(0.2)));
        for _ in 0..100 {
            assert!(contention.observe(second(0.03)), "less waiting is still waiting");
        }
        assert_eq!(seconds_to_calm(&mut contention), 1);
        assert!(!contention.observe(second(0.01)));
    }

    #[test]
    fn a_moment_of_waiting_is_no_contention() {
        let mut contention = Contention::default();
        for _ in 0..3 {
            assert!(!contention.observe(second(0.1)));
            assert!(!contention.observe(second(0.0)));
        }
        assert!(!contention.observe(second(0.1)));
        assert!(contention.observe(second(0.1)));
    }

    #[test]
    fn threads_spin_again_where_sleeping_makes_a_step_slower() {
        let mut contention = Contention::default();
        let step = |share, seconds| Sample { step_seconds: Some(seconds), ..second(share) };
        assert!(contention.observe(step(0.2, 1e-3)));
        assert!(contention.observe(step(0.1, 1.4e-3)), "a step differs from another");
        assert!(contention.observe(second(0.1)), "too few steps ended");
        for expected in [8, 16, 32, 64, 64] {
            assert!(!contention.observe(step(0.1, 1e-2)));
            let spun = (1..200).find(|_| contention.observe(step(0.2, 1e-3)));
            assert_eq!(spun, Some(expected));
        }
    }

    #[test]
    fn contention_that_returns_soon_lasts_longer() {
        let mut contention = Contention::default();
        for expected in [1, 1, 2, 4, 8, 16, 32, 32] {
            assert!(contention.observe(second(0.2)));
            assert_eq!(seconds_to_calm(&mut contention), expected);
        }
        for _ in 0..3 {
            assert!(!contention.observe(second(0.0)));
        }
        assert!(contention.observe(second(0.2)));
        assert_eq!(seconds_to_calm(&mut contention), 1, "after a while it starts anew");
    }
}
