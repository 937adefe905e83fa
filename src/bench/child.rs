//! The process of one run: opens an engine, evaluates, and reports results and costs.

use std::array;
use std::io::{self, Write};
use std::ops::{Add, Sub};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use xxhash_rust::xxh3::xxh3_64;

use super::answer::{Answer, Rep};
use super::case::Task;
use super::engine::{Engine, Tokens, open, traffic};
use super::record::{Moment, Record};
use super::start::now_ns;
use hobbit::{DeviceKind, Token};
use hobbit_core::expert::Extent;
use hobbit_core::gguf::{ExpertMap, Gguf};
use hobbit_core::pack::Pack;
use hobbit_core::store::{self, StoreKind, measure_random_read, probe};

/// Samples of the process in a run.
const LOOKS: u64 = 300;

/// Runs the task.
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
    let n_tokens = task.case.test.n_tokens() as u64 * u64::from(task.reps);
    let mut watch = Watch { began, every: n_tokens.div_ceil(LOOKS), tokens: 0, series: Vec::new() };
    let tokens = Tokens::of(task, engine)?;
    thread::sleep(Duration::from_secs(task.delay));
    if task.warmup {
        warm_up(task, engine, &tokens, &mut watch)?;
    }
    // Returns the evaluation's nanoseconds.
    let evaluate = |engine: &mut dyn Engine, tokens: &[Token], answer: &mut Answer, watch: &mut Watch| -> Result<u64> {
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
            evaluate(engine, parts.depth(), &mut answer, &mut watch)?;
        }
        let (bytes_before, before) = (disk_bytes()?, engine.stats());
        let mut measured = Rep::default();
        if !parts.prompt().is_empty() {
            measured.prompt_ns = evaluate(engine, parts.prompt(), &mut answer, &mut watch)?;
            note_logits(task, engine, &mut answer);
        }
        let n_given = if task.case.generates() { 1 } else { usize::MAX };
        for token in parts.singles().chunks(1).take(n_given) {
            measured.steps_ns.push(evaluate(engine, token, &mut answer, &mut watch)?);
            note_logits(task, engine, &mut answer);
        }
        let (mut last, steps_ns) = (Instant::now(), &mut measured.steps_ns);
        let n_left = parts.singles().len() - steps_ns.len();
        if n_left > 0 {
            engine.generate(n_left, &mut || {
                steps_ns.push(ns_since(last));
                watch.add(1);
                last = Instant::now();
            })?;
        }
        answer.disk_bytes += disk_bytes()? - bytes_before;
        answer.reps.push(measured);
        if let Some((before, after)) = before.zip(engine.stats()) {
            let (from, to) = (traffic(&before), traffic(&after));
            let sums = answer.traffic.get_or_insert_default();
            *sums = array::from_fn(|i| sums[i].with(to[i].with(from[i], u64::sub), u64::add));
            if let Some((before, after)) = before.speculation.zip(after.speculation) {
                let [drafted, accepted] = answer.drafts.get_or_insert_default();
                *drafted += after.drafted - before.drafted;
                *accepted += after.accepted - before.accepted;
            }
        }
    }
    watch.look();
    answer.series = watch.series;
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
fn warm_up(task: &Task, engine: &mut dyn Engine, tokens: &Tokens, watch: &mut Watch) -> Result<()> {
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

/// Samples the process after each `every` tokens.
struct Watch {
    began: Instant,
    every: u64,
    tokens: u64,
    series: Vec<Moment>,
}

impl Watch {
    /// Adds evaluated tokens.
    fn add(&mut self, n: usize) {
        let before = self.tokens / self.every;
        self.tokens += n as u64;
        if self.tokens / self.every > before {
            self.look();
        }
    }

    fn look(&mut self) {
        if let Some(Footprint { rss, anon, fds, .. }) = Footprint::now() {
            let (t_ns, heap) = (ns_since(self.began), heap_bytes());
            self.series.push(Moment { t_ns, rss, anon, heap, fds, tokens: self.tokens });
        }
    }
}

/// The memory and the handles of this process at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Footprint {
    /// Resident set in bytes.
    rss: u64,
    /// Largest resident set so far in bytes.
    peak_rss: u64,
    /// Anonymous memory of the resident set in bytes.
    anon: u64,
    /// Open file descriptors.
    fds: u32,
}

impl Footprint {
    /// `None` where the system does not tell.
    #[cfg(windows)]
    fn now() -> Option<Self> {
        let memory = hobbit_core::windows::own_memory()?;
        let (.., fds) = hobbit_core::windows::own_traffic()?;
        Some(Self { rss: memory.resident, peak_rss: memory.resident_peak, anon: memory.private, fds })
    }

    #[cfg(not(windows))]
    fn now() -> Option<Self> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let field = |key: &str| -> Option<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse().ok()
        };
        let fds = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as u32;
        Some(Self {
            rss: field("VmRSS")? << 10,
            peak_rss: field("VmHWM")? << 10,
            anon: field("RssAnon").unwrap_or(0) << 10,
            fds: fds.saturating_sub(1), // Looking opens one.
        })
    }
}

/// Bytes that malloc has handed out and not got back; `None` where it does not tell.
fn heap_bytes() -> Option<u64> {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: no arguments; counts under malloc's own locks.
        let info = unsafe { libc::mallinfo2() };
        Some((info.uordblks + info.hblkhd) as u64)
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    None
}

/// Bytes that this process has read from files so far, those in the system's cache too.
#[cfg(windows)]
fn disk_bytes() -> Result<u64> {
    hobbit_core::windows::own_traffic().map(|(read, ..)| read).context("this process's counts of reads")
}

/// Bytes that the kernel has fetched from disks for this process so far.
#[cfg(not(windows))]
fn disk_bytes() -> Result<u64> {
    let io = std::fs::read_to_string("/proc/self/io").context("/proc/self/io")?;
    let bytes = io.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok());
    bytes.context("no read_bytes in /proc/self/io")
}

/// Queue depths to try.
const DEPTHS: [usize; 3] = [4, 8, 16];
/// Maximum bytes read per depth.
const BYTES_MAX: u64 = 2 << 30;

/// Bytes per second of random reads of single expert slices of a model, at the best of several queue depths, each
/// measured for `time`, with direct I/O where possible.
pub fn random_reads(model: &Path, time: Duration) -> Result<f64> {
    let gguf = Gguf::open(model)?;
    let (ranges, slice_bytes) =
        if Pack::is_pack(&gguf) { of_pack(&Pack::open(model)?) } else { of_plain(&gguf.experts()?) };
    ensure!(slice_bytes > 0, "{}: a dense model has no experts to read", model.display());
    let files: Vec<PathBuf> = gguf.files.iter().map(|file| file.path.clone()).collect();
    let can_direct = probe::io_uring().is_ok() && files.iter().all(|file| probe::direct(file).is_ok());
    let store = store::open(if can_direct { StoreKind::Direct } else { StoreKind::Buffered }, &files)?;
    DEPTHS.into_iter().try_fold(0.0, |best: f64, depth| {
        let measured = measure_random_read(&*store, &ranges, slice_bytes, depth, BYTES_MAX, time);
        let measured = measured.with_context(|| format!("{}: measuring the disk", model.display()))?;
        Ok(best.max(measured.bytes_per_second()))
    })
}

/// The extents of a plain model's experts, and the mean bytes of a slice.
fn of_plain(experts: &ExpertMap) -> (Vec<Extent>, u64) {
    let tensors: Vec<_> = experts.layers.iter().flat_map(|layer| &layer.tensors).collect();
    let ranges = tensors.iter().map(|tensor| {
        let first = tensor.extent(0);
        Extent { len: first.len * u64::from(tensor.n_expert), ..first }
    });
    let bytes: u64 = tensors.iter().map(|tensor| tensor.slice_bytes).sum();
    (ranges.collect(), bytes / tensors.len().max(1) as u64)
}

/// Ranges and mean size of a pack's records, which have several slices each.
fn of_pack(pack: &Pack) -> (Vec<Extent>, u64) {
    let records = pack.raw.tensors.iter().filter(|tensor| tensor.name.contains(".ffn_exps."));
    let versions: Vec<_> = pack.catalog.layers.iter().flat_map(|layer| &layer.high).collect();
    let bytes: u64 = versions.iter().map(|version| version.bytes()).sum();
    let n_slices: usize = versions.iter().map(|version| version.slices.len()).sum();
    (records.map(|tensor| tensor.extent).collect(), bytes / n_slices.max(1) as u64)
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use hobbit::engine::Ggml;
    use hobbit_core::pack::{PackKind, PackSpec, write};

    use super::*;

    #[test]
    fn this_process() {
        let now = Footprint::now().unwrap();
        assert!(now.rss > 0 && now.peak_rss >= now.rss && now.fds < 10_000, "{now:?}");
        assert!(disk_bytes().unwrap() <= disk_bytes().unwrap());
        assert!(heap_bytes().is_none_or(|bytes| bytes > 0));
    }

    /// A pack and a plain model have equal slices.
    #[test]
    fn packs_are_read_as_plain_models() {
        let dir = tempfile::tempdir().unwrap();
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo.gguf");
        let source = Gguf::open(&model).unwrap();
        let (ranges, slice_bytes) = of_plain(&source.experts().unwrap());
        let bytes: u64 = ranges.iter().map(|range| range.len).sum();
        for bit_planes in [false, true] {
            let out = dir.path().join(format!("{bit_planes}.gguf"));
            let spec = PackSpec { bit_planes, ..PackSpec::new(PackKind::Full) };
            write(&source, &out, &spec, &Ggml, &mut |_| ControlFlow::Continue(())).unwrap();
            let (own, own_slice_bytes) = of_pack(&Pack::open(&out).unwrap());
            assert_eq!(own_slice_bytes, slice_bytes);
            assert!(own.iter().map(|range| range.len).sum::<u64>() >= bytes);
        }
        assert!(random_reads(&dir.path().join("true.gguf"), Duration::from_millis(1)).unwrap() > 0.0);
    }
}
