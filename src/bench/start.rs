//! Starts the processes of runs. With a memory limit, each has its own control group (v1 or v2) and a cold page cache.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use super::answer::Run;
use super::case::Task;
use super::cgroup::{Cgroup, drop_file};
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

/// Has a process enter a group, which it does while the result is kept, and end with this one.
#[cfg(unix)]
fn prepare(group: Option<&Cgroup>, command: &mut Command) -> Result<Option<std::fs::File>> {
    use std::os::fd::AsRawFd;
    use std::os::unix::process::CommandExt;
    let entrance = group.map(Cgroup::entrance).transpose()?;
    let descriptor = entrance.as_ref().map(AsRawFd::as_raw_fd);
    // Its own process group, so that its children can be ended with it.
    command.process_group(0);
    signals::end_with_this(command, signals::SIGKILL);
    // SAFETY: between fork and exec only system calls are made; the descriptor is open until the child has started.
    unsafe {
        command.pre_exec(move || {
            let enters = |entrance| libc::write(entrance, c"0".as_ptr().cast(), 1) == 1;
            if descriptor.is_none_or(enters) { Ok(()) } else { Err(io::Error::last_os_error()) }
        });
    }
    Ok(entrance)
}

/// Starts a process in a group; it ends with this one.
fn spawn(group: Option<&Cgroup>, command: &mut Command) -> Result<Child> {
    #[cfg(unix)]
    let _entrance = prepare(group, command)?;
    #[cfg(windows)]
    let _ = group;
    signals::check()?;
    let program = command.get_program().to_owned();
    let mut child = command.spawn().with_context(|| format!("starting {}", Path::new(&program).display()))?;
    signals::bind(&mut child);
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
    } else if is_killed(status) && group.is_some() {
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

/// Whether the system ended the process.
fn is_killed(status: ExitStatus) -> bool {
    #[cfg(unix)]
    return std::os::unix::process::ExitStatusExt::signal(&status) == Some(libc::SIGKILL);
    #[cfg(windows)]
    {
        let _ = status;
        false
    }
}

/// Ends a process. Its children end with it.
#[cfg(windows)]
fn kill_group(process: u32) {
    signals::send(process, signals::SIGKILL);
}

/// Ends a process and its children.
#[cfg(unix)]
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
