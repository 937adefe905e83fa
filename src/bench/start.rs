//! Starts processes: each in a control group of its own where there is a limit, from a cold page cache.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use super::answer::Run;
use super::case::{Limits, Task};
use crate::measure::cgroup::{Cgroup, ReadLimit, Usage};
use crate::measure::page_cache;
use crate::signals;
use hobbit::gguf::Gguf;

/// The process that runs, 0 for none: such a signal ends it.
static RUNNING: AtomicU32 = AtomicU32::new(0);

/// From now on Ctrl-C, SIGTERM and SIGHUP end what runs, and then the program, which cleans up.
pub fn end_with_signals() -> Result<()> {
    signals::watch(|_| {
        let running = RUNNING.load(Ordering::SeqCst);
        if running > 0 {
            kill_group(running);
        }
    })
}

/// A control group with limits, or none.
pub struct Group {
    group: Option<Cgroup>,
    /// Of its memory there is a limit.
    is_memory_limited: bool,
}

impl Group {
    /// A control group with what limits there are, and a cold page cache for the models then.
    ///
    /// # Errors
    /// Without root; without control groups; a model that another process has mapped, or that lies on no disk.
    pub fn new(limits: Limits, models: &[PathBuf]) -> Result<Self> {
        if limits == Limits::default() {
            return Ok(Self::none());
        }
        let mut files = Vec::new();
        for model in models {
            match Gguf::open(model) {
                Ok(gguf) => files.extend(gguf.files.iter().map(|file| file.path.clone())),
                // What cannot be read as a model is told by the engine.
                Err(_) if model.is_file() => files.push(model.clone()),
                Err(_) => (),
            }
        }
        files.iter().try_for_each(|file| page_cache::drop_file(file))?;
        let reads = limits.disk.map(|speed| ReadLimit::new(speed, files.iter().map(PathBuf::as_path)));
        let reads = reads.transpose().context("--disk-limit")?;
        let flag = if limits.memory.is_some() { "--limit" } else { "--disk-limit" };
        let group = Cgroup::new(limits.memory, reads.as_ref()).context(flag)?;
        Ok(Self { group: Some(group), is_memory_limited: limits.memory.is_some() })
    }

    /// All there is.
    const fn none() -> Self {
        Self { group: None, is_memory_limited: false }
    }

    /// Starts a process in it, which ends with this one.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        let entrances = self.group.as_ref().map(Cgroup::entrances).transpose()?.unwrap_or_default();
        let descriptors: Vec<_> = entrances.iter().map(AsRawFd::as_raw_fd).collect();
        // A group of its own: what it starts can be ended with it.
        command.process_group(0);
        // SAFETY: between fork and exec only system calls are made; the descriptors are open until the child has started.
        unsafe {
            command.pre_exec(move || {
                #[cfg(target_os = "linux")]
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(io::Error::last_os_error());
                }
                let enters = |entrance: &i32| libc::write(*entrance, c"0".as_ptr().cast(), 1) == 1;
                if descriptors.iter().all(enters) { Ok(()) } else { Err(io::Error::last_os_error()) }
            });
        }
        signals::check()?;
        let program = command.get_program().to_owned();
        let child = command.spawn().with_context(|| format!("starting {}", Path::new(&program).display()))?;
        RUNNING.store(child.id(), Ordering::SeqCst);
        // A signal that came just before has not seen it.
        if signals::came() {
            kill_group(child.id());
        }
        Ok(child)
    }

    /// What the kernel counted so far.
    pub fn usage(&self) -> Usage {
        self.group.as_ref().map(Cgroup::usage).unwrap_or_default()
    }

    /// Whether there is a limit at which processes are killed.
    pub fn kills(&self) -> bool {
        self.is_memory_limited
    }
}

/// Waits for a child.
///
/// # Errors
/// [`Interrupted`](signals::Interrupted); a child that cannot be waited for.
pub fn wait(child: &mut Child) -> Result<ExitStatus> {
    let status = child.wait();
    RUNNING.store(0, Ordering::SeqCst);
    signals::check()?;
    status.context("waiting for a run")
}

/// Runs a task in a process of its own.
///
/// # Errors
/// What keeps it from being started; [`Interrupted`](signals::Interrupted). What fails in it is an outcome.
pub fn run(task: &Task, pressure: Option<u64>) -> Result<Run> {
    let mut models = vec![task.case.model.clone()];
    if let Some(hobbit::options::LowSource::File(low)) = task.case.model_options()?.low {
        models.push(low);
    }
    let group = Group::new(task.case.limits(), &models)?;
    let mut others: Vec<Other> = Vec::new();
    if let Some(bytes) = pressure {
        let did_not_last =
            "the process of --pressure did not last as long as the run; give a larger --limit or less --pressure";
        others.push(Other::start(&group, own("hog")?.arg(bytes.to_string()).arg(&task.case.model), did_not_last)?);
    }
    // Outside of the limit: they are to take time, not memory.
    let unlimited = Group::none();
    for _ in 0..task.case.busy {
        let did_not_last = "a process of --busy did not last as long as the run; something else has ended it";
        others.push(Other::start(&unlimited, &mut own("busy")?, did_not_last)?);
    }
    let task = Task { started_ns: now_ns(), ..task.clone() };
    let mut command = own("child")?;
    command.arg(serde_json::to_string(&task)?).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = group.spawn(&mut command)?;
    let errors = child.stderr.take().context("a run without stderr")?;
    let errors = std::thread::spawn(move || passed_on(errors));
    let (text, status) = answer_of(&mut child)?;
    // Without it to the end there was no pressure.
    let gone = others.iter_mut().find_map(Other::has_ended);
    drop(others);
    let text = text.context("reading what a run answers")?;
    let said = errors.join().unwrap_or_default();
    let outcome = if let Some(why) = gone {
        Err(format!("failed: {why}"))
    } else if status.success() {
        Ok(serde_json::from_str(text.trim()).context("the answer of a run")?)
    } else if status.signal() == Some(libc::SIGKILL) && group.kills() {
        Err("killed".to_owned())
    } else {
        let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        let last = last.strip_prefix("error: ").unwrap_or(last);
        Err(if last.is_empty() { format!("failed: {status}") } else { format!("failed: {last}") })
    };
    Ok((outcome, group.usage()))
}

/// Measures the disk of a model, within the same limits: bytes per second.
///
/// # Errors
/// As [`run`]; what fails is an error here.
pub fn disk(model: &Path, limits: Limits) -> Result<f64> {
    let group = Group::new(limits, &[model.to_owned()])?;
    let mut child = group.spawn(own("disk")?.arg(model).stdin(Stdio::null()).stdout(Stdio::piped()))?;
    let (text, status) = answer_of(&mut child)?;
    let text = text?;
    if !status.success() {
        bail!("measuring the disk failed: {status}");
    }
    text.trim().parse().context("the disk's speed")
}

/// Waits for a child; what it has written to stdout.
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

/// The signal that ended a process.
pub fn signal(status: ExitStatus) -> Option<i32> {
    status.signal()
}

/// Ends a process and what it has started.
pub fn kill_group(group: u32) {
    if let Ok(group) = libc::pid_t::try_from(group)
        && group > 1
    {
        // SAFETY: a signal; a group that has gone is an error that changes nothing.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
}

/// This program, asked for work that it does in a process of its own.
pub fn own(work: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("finding this program's file")?);
    command.arg(work);
    Ok(command)
}

/// The last line that says something.
pub fn last_line(from: impl Read) -> String {
    use io::BufRead;
    let lines = io::BufReader::new(from).split(b'\n').map_while(Result::ok);
    let lines = lines.map(|line| String::from_utf8_lossy(&line).trim().to_owned()).filter(|line| !line.is_empty());
    lines.last().unwrap_or_default()
}

/// Copies what a run says to this process's stderr; the text.
fn passed_on(mut from: impl Read) -> String {
    let (mut text, mut buffer) = (Vec::new(), [0u8; 4096]);
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        let _ = io::stderr().write_all(&buffer[..n]);
        text.extend_from_slice(&buffer[..n]);
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Another process, which is there as long as a run.
struct Other {
    process: Child,
    /// What to say if it was not.
    did_not_last: &'static str,
}

impl Other {
    fn start(group: &Group, command: &mut Command, did_not_last: &'static str) -> Result<Self> {
        Ok(Self { process: group.spawn(command.stdin(Stdio::null()).stdout(Stdio::null()))?, did_not_last })
    }

    /// Why the run does not count.
    fn has_ended(&mut self) -> Option<&'static str> {
        (!matches!(self.process.try_wait(), Ok(None))).then_some(self.did_not_last)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Computes until it is killed, with the priority that every program begins with.
pub fn busy() -> ! {
    let mut state = 1u64;
    loop {
        for _ in 0..1 << 20 {
            state = std::hint::black_box(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
    }
}

/// Takes memory up to `bytes` and gives it back, again and again, and reads a file through the page cache meanwhile, until
/// it is killed: what other programs do to a machine. Lowest priority, so that it takes memory rather than time.
pub fn hog(bytes: u64, file: &Path) -> Result<()> {
    // SAFETY: no preconditions; without effect where it is refused.
    unsafe { libc::nice(19) };
    let step = 16usize << 20;
    let mut file = fs::File::open(file).with_context(|| file.display().to_string())?;
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let mut held: Vec<Vec<u8>> = Vec::new();
        while (held.len() * step) as u64 + step as u64 <= bytes {
            held.push(std::hint::black_box(vec![1; step]));
            if file.read(&mut buffer)? == 0 {
                io::Seek::rewind(&mut file)?;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
