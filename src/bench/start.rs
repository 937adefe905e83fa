//! Starts the processes of runs. With a memory limit, each has its own control group (v1 or v2) and a cold page cache.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};

use super::answer::{Run, Usage};
use super::case::Task;
use crate::signals;
use hobbit_core::gguf::Gguf;

/// The running process, which signals end; 0 for none.
static RUNNING: AtomicU32 = AtomicU32::new(0);

/// From now on Ctrl-C, SIGTERM and SIGHUP end the running process and then the program, which cleans up.
pub fn end_with_signals() -> Result<()> {
    signals::watch(|_| {
        let running = RUNNING.load(Ordering::SeqCst);
        if running > 0 {
            kill_group(running);
        }
    })
}

/// A control group limited to `limit`, with a cold page cache for the models; none without a limit.
fn group(limit: Option<u64>, models: &[PathBuf]) -> Result<Option<Cgroup>> {
    let Some(bytes) = limit else { return Ok(None) };
    for model in models {
        match Gguf::open(model) {
            Ok(gguf) => gguf.files.iter().try_for_each(|file| drop_file(&file.path))?,
            // The engine reports files that are not models.
            Err(_) if model.is_file() => drop_file(model)?,
            Err(_) => (),
        }
    }
    Ok(Some(Cgroup::new(bytes).context("--limit")?))
}

/// Starts a process in a group; it ends with this one.
fn spawn(group: Option<&Cgroup>, command: &mut Command) -> Result<Child> {
    let entrance = group.map(Cgroup::entrance).transpose()?;
    let descriptor = entrance.as_ref().map(AsRawFd::as_raw_fd);
    // Its own process group, so that its children can be ended with it.
    command.process_group(0);
    signals::end_with_this(command, libc::SIGKILL);
    // SAFETY: between fork and exec only system calls are made; the descriptor is open until the child has started.
    unsafe {
        command.pre_exec(move || {
            let enters = |entrance| libc::write(entrance, c"0".as_ptr().cast(), 1) == 1;
            if descriptor.is_none_or(enters) { Ok(()) } else { Err(io::Error::last_os_error()) }
        });
    }
    signals::check()?;
    let program = command.get_program().to_owned();
    let child = command.spawn().with_context(|| format!("starting {}", Path::new(&program).display()))?;
    RUNNING.store(child.id(), Ordering::SeqCst);
    // A signal that arrived just before did not see the process.
    if signals::came() {
        kill_group(child.id());
    }
    Ok(child)
}

/// Waits for a child.
fn wait(child: &mut Child) -> Result<ExitStatus> {
    let status = child.wait();
    RUNNING.store(0, Ordering::SeqCst);
    signals::check()?;
    status.context("waiting for a run")
}

/// Runs a task in its own process.
///
/// # Errors
/// A failure to start the process; [`Interrupted`](signals::Interrupted). A failure inside the process is an outcome.
pub fn run(task: &Task) -> Result<Run> {
    let mut models = vec![task.case.model.clone()];
    if let Some(hobbit::options::LowSource::File(low)) = task.case.model_options()?.low {
        models.push(low);
    }
    let group = group(task.case.limit, &models)?;
    let task = Task { started_ns: now_ns(), ..task.clone() };
    let mut command = own("child")?;
    command.arg(serde_json::to_string(&task)?).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = spawn(group.as_ref(), &mut command)?;
    let errors = child.stderr.take().context("a run without stderr")?;
    let errors = std::thread::spawn(move || passed_on(errors));
    let (text, status) = answer_of(&mut child)?;
    let text = text.context("reading what a run answers")?;
    let output = errors.join().unwrap_or_default();
    let outcome = if status.success() {
        Ok(serde_json::from_str(text.trim()).context("the answer of a run")?)
    } else if status.signal() == Some(libc::SIGKILL) && group.is_some() {
        Err("killed".to_owned())
    } else {
        let last = output.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        let last = last.strip_prefix("error: ").unwrap_or(last);
        Err(if last.is_empty() { format!("failed: {status}") } else { format!("failed: {last}") })
    };
    Ok((outcome, group.as_ref().map(Cgroup::usage).unwrap_or_default()))
}

/// Measures the disk of a model in bytes per second, within the same limit.
///
/// # Errors
/// The process cannot be started or measured, or it fails.
pub fn disk(model: &Path, limit: Option<u64>) -> Result<f64> {
    let group = group(limit, &[model.to_owned()])?;
    let mut command = own("disk")?;
    command.arg(model).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = spawn(group.as_ref(), &mut command)?;
    let (text, status) = answer_of(&mut child)?;
    let text = text?;
    if !status.success() {
        bail!("measuring the disk failed: {status}");
    }
    text.trim().parse().context("the disk's speed")
}

/// Waits for a child; returns its stdout.
fn answer_of(child: &mut Child) -> Result<(io::Result<String>, ExitStatus)> {
    let mut text = String::new();
    let read = child.stdout.take().context("a run without stdout")?.read_to_string(&mut text);
    let status = wait(child)?;
    Ok((read.map(|_| text), status))
}

/// Nanoseconds since 1970.
pub fn now_ns() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos())
}

/// Ends a process and its children.
fn kill_group(group: u32) {
    if let Ok(group) = libc::pid_t::try_from(group)
        && group > 1
    {
        // SAFETY: a signal; a group that has gone is an error that changes nothing.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
}

/// This program, started for one unit of work.
fn own(work: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("finding this program's file")?);
    command.arg(work);
    Ok(command)
}

/// Copies a run's output to this process's stderr, and returns the text.
fn passed_on(mut from: impl Read) -> String {
    let (mut text, mut buffer) = (Vec::new(), [0u8; 4096]);
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        let _ = io::stderr().write_all(&buffer[..n]);
        text.extend_from_slice(&buffer[..n]);
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Distinguishes the groups of one process.
static NUMBER: AtomicU32 = AtomicU32::new(0);

const V1: &str = "/sys/fs/cgroup/memory";
const V2: &str = "/sys/fs/cgroup";
/// Bytes of a dropped file that may stay in the page cache: pages on their way between lists.
const LEFT_BYTES_MAX: usize = 16 << 20;

/// A control group with a memory limit and without swap. Removed when dropped; its processes must have ended before.
struct Cgroup {
    dir: PathBuf,
    is_v2: bool,
}

impl Cgroup {
    /// A group limited to `bytes`.
    fn new(bytes: u64) -> Result<Self> {
        let is_v2 = !Path::new(V1).join("memory.limit_in_bytes").exists();
        if is_v2 {
            enable_v2()?;
        }
        let name = format!("hobbit-bench-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let dir = Path::new(if is_v2 { V2 } else { V1 }).join(name);
        fs::create_dir(&dir).with_context(|| format!("creating the control group {}", dir.display()))?;
        let group = Self { dir, is_v2 };
        group.write(if is_v2 { "memory.max" } else { "memory.limit_in_bytes" }, bytes)?;
        // Only with swap: otherwise v1 meets this limit first and stops counting hits of the other.
        match (has_swap(), is_v2) {
            (true, true) => group.write("memory.swap.max", 0)?,
            (true, false) => group.write("memory.memsw.limit_in_bytes", bytes)?,
            (false, _) => (),
        }
        Ok(group)
    }

    /// The file to which a process writes `0` to enter the group.
    fn entrance(&self) -> Result<File> {
        let path = self.dir.join("cgroup.procs");
        OpenOptions::new().write(true).open(&path).with_context(|| path.display().to_string())
    }

    /// The kernel's counts so far.
    fn usage(&self) -> Usage {
        let read = |name: &str| fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        let number = |name: &str| read(name).trim().parse().ok();
        let (peak, hits) = if self.is_v2 {
            let events = read("memory.events");
            let hits = events.lines().find_map(|line| line.strip_prefix("max ")?.trim().parse().ok());
            (number("memory.peak"), hits)
        } else {
            (number("memory.max_usage_in_bytes"), number("memory.failcnt"))
        };
        Usage { peak, limit_hits: hits.unwrap_or(0) }
    }

    fn write(&self, name: &str, value: u64) -> Result<()> {
        let path = self.dir.join(name);
        fs::write(&path, value.to_string()).with_context(|| format!("writing {value} to {}", path.display()))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has just ended may still be counted.
        let is_gone =
            (0..50).any(|_| fs::remove_dir(&self.dir).inspect_err(|_| sleep(Duration::from_millis(20))).is_ok());
        if !is_gone {
            let _ = writeln!(io::stderr(), "the control group {} could not be removed", self.dir.display());
        }
    }
}

fn has_swap() -> bool {
    fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() > 1)
}

/// Enables memory limits for groups below the root of v2.
fn enable_v2() -> Result<()> {
    let root = Path::new(V2);
    let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    ensure!(
        controllers.split_whitespace().any(|controller| controller == "memory"),
        "no control groups that limit memory: neither v1's nor the controller in {V2}"
    );
    fs::write(root.join("cgroup.subtree_control"), "+memory")
        .with_context(|| format!("enabling the memory controller in {V2} (in a container, run hobbit-bench outside)"))
}

/// Drops the file from the page cache; if that does not suffice, as root, drops all caches.
fn drop_file(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    file.sync_all().with_context(|| path.display().to_string())?; // dirty pages cannot be dropped
    // SAFETY: the descriptor is open; the call touches no memory of ours.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    if resident_bytes(&file)? <= LEFT_BYTES_MAX {
        return Ok(());
    }
    fs::write("/proc/sys/vm/drop_caches", "1").context("writing /proc/sys/vm/drop_caches")?;
    let left = resident_bytes(&file)?;
    ensure!(
        left <= LEFT_BYTES_MAX,
        "{} MiB of {} stay in the page cache: another process has it mapped",
        left >> 20,
        path.display()
    );
    Ok(())
}

/// Bytes of the file in the page cache.
fn resident_bytes(file: &File) -> Result<usize> {
    let len = usize::try_from(file.metadata()?.len())?;
    if len == 0 {
        return Ok(0);
    }
    // SAFETY: sysconf has no preconditions.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let mut pages = vec![0u8; len.div_ceil(page_bytes)];
    // SAFETY: a fresh read-only mapping of `len` bytes, unmapped below and never read; `pages` has a byte for each
    // of its pages.
    let code = unsafe {
        let map = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        ensure!(map != libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
        let code = libc::mincore(map, len, pages.as_mut_ptr());
        libc::munmap(map, len);
        code
    };
    ensure!(code == 0, "mincore: {}", io::Error::last_os_error());
    Ok(pages.iter().filter(|page| **page & 1 == 1).count() * page_bytes)
}
