//! Processes on Unix: each task is a fork of an idle process.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use std::{env, fs, io, ptr};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, alarm, dup2_stderr, dup2_stdin, dup2_stdout, fork};

use super::{
    CPU_SECONDS, Failure, PATIENCE, QUICK_MICROSECONDS, REVIVALS_MAX, REVIVED, Task, WALL_SECONDS, failed, may_revive,
    outcome_of, receive, send,
};

/// An idle process.
#[derive(Default)]
pub(super) struct Idle {
    /// `None` before the first task.
    stream: Option<UnixStream>,
    /// Unless it was forked.
    child: Option<Child>,
    /// When idle processes were started again.
    revivals: Vec<Instant>,
}

impl Idle {
    /// Sends a task and waits for its result; starts the process again if it is gone.
    pub(super) fn ask(&mut self, is_quick: bool, task: &Task) -> io::Result<Result<String, Failure>> {
        let Some(stream) = &mut self.stream else { return ask(self.revive()?, is_quick, task) };
        let gone = match ask(stream, is_quick, task) {
            Ok(outcome) => return Ok(outcome),
            Err(error) => error,
        };
        if !may_revive(&mut self.revivals, Instant::now()) {
            return Err(io::Error::other(format!("{gone}; it ended {REVIVALS_MAX} times within a minute")));
        }
        ask(self.revive()?, is_quick, task)
    }

    /// Starts this program as an idle process, in place of one that is gone.
    fn revive(&mut self) -> io::Result<&mut UnixStream> {
        if let Some(mut child) = self.child.take() {
            // It may be stopped, or hold the other end of a stream that broke.
            let _ = child.kill();
            let _ = child.wait();
        }
        let (near, far) = UnixStream::pair()?;
        near.set_read_timeout(Some(PATIENCE))?;
        // The file may have another name by now, or none.
        let own = Path::new("/proc/self/exe");
        let mut command = if own.exists() { Command::new(own) } else { Command::new(env::current_exe()?) };
        command.env(REVIVED, "1").stdin(OwnedFd::from(far)).stdout(Stdio::null()).stderr(Stdio::null());
        self.child = Some(command.spawn()?);
        Ok(self.stream.insert(near))
    }
}

/// # Safety
/// This process has one thread.
pub(super) unsafe fn start() -> io::Result<Idle> {
    let (near, far) = UnixStream::pair()?;
    near.set_read_timeout(Some(PATIENCE))?;
    // SAFETY: with one thread, the child may call any function its parent may.
    match unsafe { fork() }? {
        ForkResult::Parent { .. } => Ok(Idle { stream: Some(near), ..Idle::default() }),
        ForkResult::Child => {
            // The idle process ends when the other end of its stream closes: only the program may hold that end.
            drop(near);
            serve(far);
            exit(0);
        }
    }
}

/// Works as an idle process until the program that started this one ends.
pub(super) fn serve_standard_input() -> ! {
    if let Ok(stream) = io::stdin().as_fd().try_clone_to_owned() {
        serve(stream.into());
    }
    exit(0);
}

/// Sends a task and waits for its result.
fn ask(stream: &mut UnixStream, is_quick: bool, task: &Task) -> io::Result<Result<String, Failure>> {
    send(stream, &serde_json::to_vec(&(is_quick, task))?)?;
    Ok(serde_json::from_slice(&receive(stream)?)?)
}

/// Main loop of an idle process: reads tasks and writes results until the program ends.
fn serve(mut stream: UnixStream) {
    detach();
    while let Ok(task) = receive(&mut stream) {
        let outcome = match apart(&task) {
            Ok(outcome) => outcome,
            Err(error) => failed(format!("there is no process for it: {error}")),
        };
        if send(&mut stream, &outcome).is_err() {
            return;
        }
    }
}

/// Replaces the standard streams by /dev/null, and ignores signals that are meant for the program.
fn detach() {
    use Signal::{SIGALRM, SIGCHLD, SIGHUP, SIGINT, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU};
    // The program may pass these on ignored or blocked; limits and the wait for children need them.
    for needed in [SIGALRM, SIGCHLD, SIGPROF, SIGXCPU] {
        // SAFETY: the default runs no handler.
        let _ = unsafe { signal(needed, SigHandler::SigDfl) };
    }
    let _ = nix::sys::signal::SigSet::all().thread_unblock();
    for ignored in [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2] {
        // SAFETY: ignoring a signal runs no handler.
        let _ = unsafe { signal(ignored, SigHandler::SigIgn) };
    }
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        let _ = (dup2_stdin(&null), dup2_stdout(&null), dup2_stderr(&null));
    }
    // Sets the name that `ps` shows. The file exists only on Linux.
    let _ = fs::write("/proc/self/comm", "hobbit-template");
}

/// Runs a task in a child, which may fail; returns the result as JSON.
fn apart(task: &[u8]) -> io::Result<Vec<u8>> {
    let (mut near, far) = UnixStream::pair()?;
    // SAFETY: this process has one thread.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(near);
            let done = work(task, far);
            exit(i32::from(done.is_err()));
        }
        ForkResult::Parent { child } => {
            drop(far);
            let mut outcome = Vec::new();
            let read = near.read_to_end(&mut outcome);
            let status = loop {
                match waitpid(child, None) {
                    Err(nix::Error::EINTR) => {}
                    other => break other?,
                }
            };
            match status {
                WaitStatus::Exited(_, 0) if read.is_ok() => Ok(outcome),
                WaitStatus::Signaled(_, Signal::SIGPROF, _) => Ok(outcome_of(Failure::Slow)),
                WaitStatus::Signaled(_, signal, _) => Ok(failed(reason_for(signal))),
                _ => Ok(failed("the process that worked on it ended without a result".to_owned())),
            }
        }
    }
}

/// The child's work.
fn work(task: &[u8], mut into: UnixStream) -> io::Result<()> {
    let (is_quick, task): (bool, Task) = serde_json::from_slice(task)?;
    let memory = task.memory_bytes();
    limit(task.stack_bytes() as u64 + memory)?;
    if is_quick {
        end_after(QUICK_MICROSECONDS)?;
    }
    let outcome = task.bounded(memory);
    into.write_all(&serde_json::to_vec(&outcome)?)
}

/// Limits CPU time, wall time and memory of this process, and makes it the kernel's first choice when memory runs out.
fn limit(memory: u64) -> io::Result<()> {
    lower(Resource::RLIMIT_CORE, 0)?;
    lower(Resource::RLIMIT_CPU, CPU_SECONDS)?;
    alarm::set(WALL_SECONDS);
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
    // Only Linux counts private memory against this limit, and reports how much is mapped already.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mapped = status.lines().find_map(|line| line.strip_prefix("VmData:")?.trim().strip_suffix(" kB")?.parse().ok());
    mapped.map_or(Ok(()), |mapped: u64| lower(Resource::RLIMIT_DATA, (mapped << 10) + memory))
}

/// Ends this process by SIGPROF after this CPU time.
fn end_after(microseconds: i64) -> io::Result<()> {
    let never = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let once = libc::timeval { tv_sec: microseconds / 1_000_000, tv_usec: (microseconds % 1_000_000) as _ };
    let timer = libc::itimerval { it_interval: never, it_value: once };
    // SAFETY: the kernel reads the timer, which lives through the call; the old one is not asked for.
    match unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const timer, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn lower(resource: Resource, to: u64) -> io::Result<()> {
    let (soft, hard) = getrlimit(resource)?;
    // Beyond the hard limit the kernel kills the process, even if SIGXCPU is handled.
    Ok(setrlimit(resource, soft.min(to), hard.min(to.saturating_add(1)))?)
}

/// The reason for the end of a task.
fn reason_for(signal: Signal) -> String {
    match signal {
        Signal::SIGXCPU => format!("it runs for more than {CPU_SECONDS} s"),
        Signal::SIGALRM => format!("it took more than {WALL_SECONDS} s"),
        Signal::SIGKILL => "the process that worked on it was killed, as is done where memory is short".to_owned(),
        Signal::SIGSEGV | Signal::SIGABRT | Signal::SIGBUS => {
            format!("it calls itself, or nests lists, without end, or llama.cpp fails on it ({signal})")
        }
        other => format!("llama.cpp failed on it ({other})"),
    }
}

/// Ends this process without running the program's exit handlers.
fn exit(status: i32) -> ! {
    // SAFETY: ends the process; its state is no longer needed.
    unsafe { libc::_exit(status) }
}
