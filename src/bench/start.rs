//! Starts the processes of runs: with a memory limit, each in its own control group with a cold page cache.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use super::answer::Run;
use super::case::Task;
use super::limits::{Cgroup, Usage, drop_file};
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

/// A control group with a memory limit, or none.
struct Group(Option<Cgroup>);

impl Group {
    /// A control group limited to `limit`, with a cold page cache for the models; none without a limit.
    ///
    /// # Errors
    /// No root; no control groups; a model that another process has mapped.
    fn new(limit: Option<u64>, models: &[PathBuf]) -> Result<Self> {
        let Some(bytes) = limit else { return Ok(Self(None)) };
        for model in models {
            match Gguf::open(model) {
                Ok(gguf) => gguf.files.iter().try_for_each(|file| drop_file(&file.path))?,
                // The engine reports files that are not models.
                Err(_) if model.is_file() => drop_file(model)?,
                Err(_) => (),
            }
        }
        Ok(Self(Some(Cgroup::new(bytes).context("--limit")?)))
    }

    /// Starts a process in the group; it ends with this one.
    fn spawn(&self, command: &mut Command) -> Result<Child> {
        let entrance = self.0.as_ref().map(Cgroup::entrance).transpose()?;
        let descriptor = entrance.as_ref().map(AsRawFd::as_raw_fd);
        // Its own process group, so that its children can be ended with it.
        command.process_group(0);
        // SAFETY: between fork and exec only system calls are made; the descriptor is open until the child has started.
        unsafe {
            command.pre_exec(move || {
                #[cfg(target_os = "linux")]
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(io::Error::last_os_error());
                }
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

    /// The kernel's counts so far.
    fn usage(&self) -> Usage {
        self.0.as_ref().map(Cgroup::usage).unwrap_or_default()
    }
}

/// Waits for a child.
///
/// # Errors
/// [`Interrupted`](signals::Interrupted); a child that cannot be waited for.
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
    let group = Group::new(task.case.limit, &models)?;
    let task = Task { started_ns: now_ns(), ..task.clone() };
    let mut command = own("child")?;
    command.arg(serde_json::to_string(&task)?).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = group.spawn(&mut command)?;
    let errors = child.stderr.take().context("a run without stderr")?;
    let errors = std::thread::spawn(move || passed_on(errors));
    let (text, status) = answer_of(&mut child)?;
    let text = text.context("reading what a run answers")?;
    let said = errors.join().unwrap_or_default();
    let outcome = if status.success() {
        Ok(serde_json::from_str(text.trim()).context("the answer of a run")?)
    } else if status.signal() == Some(libc::SIGKILL) && group.0.is_some() {
        Err("killed".to_owned())
    } else {
        let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        let last = last.strip_prefix("error: ").unwrap_or(last);
        Err(if last.is_empty() { format!("failed: {status}") } else { format!("failed: {last}") })
    };
    Ok((outcome, group.usage()))
}

/// Measures the disk of a model in bytes per second, within the same limit.
///
/// # Errors
/// As [`run`]; a failure inside the process is an error as well.
pub fn disk(model: &Path, limit: Option<u64>) -> Result<f64> {
    let group = Group::new(limit, &[model.to_owned()])?;
    let mut child = group.spawn(own("disk")?.arg(model).stdin(Stdio::null()).stdout(Stdio::piped()))?;
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
