//! Processes on Windows: an idle process, this program started again, runs tasks itself. Its memory is limited by a job
//! object; the program watches its time, and ends it if a task takes too much.

use std::io::{self, Write};
use std::os::windows::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use hobbit_core::windows::{Job, cpu_time, crash_silently, exit_at_once};

use super::{
    CPU_SECONDS, Failure, QUICK_MICROSECONDS, REVIVALS_MAX, REVIVED, Task, WALL_SECONDS, may_revive, receive, send,
};

/// Time between two looks at a task that runs.
const LOOK: Duration = Duration::from_millis(5);

/// Memory of a process without a task.
const IDLE_BYTES: u64 = 256 << 20;

/// Longest start of a process, on a busy machine whose disk is slow.
const START: Duration = Duration::from_secs(60);

/// Creation flag of a process without a console: Ctrl-C is for the program, and no console has to be started.
const DETACHED_PROCESS: u32 = 8;

/// An idle process, if one was needed so far.
#[derive(Default)]
pub(super) struct Idle {
    running: Option<Running>,
    /// When processes were started in place of others that had gone.
    revivals: Vec<Instant>,
}

struct Running {
    child: Child,
    tasks: ChildStdin,
    answers: Receiver<io::Result<Vec<u8>>>,
    /// Ends the process when this one ends in any way.
    job: Job,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The first process starts with the first task.
///
/// # Safety
/// Always safe; Unix needs a promise.
pub(super) unsafe fn start() -> io::Result<Idle> {
    Ok(Idle::default())
}

impl Idle {
    /// Sends a task and waits for its result; starts a process if there is none.
    pub(super) fn ask(&mut self, is_quick: bool, task: &Task) -> io::Result<Result<String, Failure>> {
        let is_gone = |running: &mut Running| !matches!(running.child.try_wait(), Ok(None));
        if self.running.as_mut().is_some_and(is_gone) {
            self.running = None;
            if !may_revive(&mut self.revivals, Instant::now()) {
                return Err(io::Error::other(format!("it ended {REVIVALS_MAX} times within a minute")));
            }
        }
        if self.running.is_none() {
            self.running = Some(Running::start()?);
        }
        let running = self.running.as_mut().expect("started above");
        let answer = running.ask(is_quick, task);
        let outcome = match answer {
            Ok(Ok(bytes)) => return Ok(serde_json::from_slice(&bytes)?),
            Ok(Err(failure)) => Ok(Err(failure)),
            Err(error) => Err(error),
        };
        self.running = None;
        outcome
    }
}

impl Running {
    fn start() -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(REVIVED, "1").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.creation_flags(DETACHED_PROCESS).spawn()?;
        let job = Job::new()?;
        job.add(&child)?;
        let (Some(tasks), Some(mut results)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let (sender, answers) = channel();
        let read = move || {
            loop {
                let answer = receive(&mut results);
                let is_last = answer.is_err();
                if sender.send(answer).is_err() || is_last {
                    return;
                }
            }
        };
        thread::Builder::new().name("hobbit-template".into()).spawn(read)?;
        // It says that it is ready: its start is no task's time.
        match answers.recv_timeout(START) {
            Ok(ready) => ready.map(|_| Self { child, tasks, answers, job }),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// The result, or how the task exceeded a limit or ended the process.
    fn ask(&mut self, is_quick: bool, task: &Task) -> io::Result<Result<Vec<u8>, Failure>> {
        let memory = IDLE_BYTES + task.memory_bytes() + task.stack_bytes() as u64;
        self.job.limit_memory(memory)?;
        let (began, cpu_before) = (Instant::now(), cpu_time(&self.child)?);
        send(&mut self.tasks, &serde_json::to_vec(task)?)?;
        let work = |reason: String| Ok(Err(Failure::Work(reason)));
        loop {
            match self.answers.recv_timeout(LOOK) {
                Ok(Ok(bytes)) => return Ok(Ok(bytes)),
                Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => {
                    return work("it calls itself, or nests lists, without end, or llama.cpp fails on it".to_owned());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            let cpu = cpu_time(&self.child)?.saturating_sub(cpu_before);
            if is_quick && cpu > Duration::from_micros(QUICK_MICROSECONDS as u64) {
                return Ok(Err(Failure::Slow));
            }
            if cpu > Duration::from_secs(CPU_SECONDS) {
                return work(format!("it runs for more than {CPU_SECONDS} s"));
            }
            if began.elapsed() > Duration::from_secs(WALL_SECONDS.into()) {
                return work(format!("it took more than {WALL_SECONDS} s"));
            }
        }
    }
}

/// Works as an idle process until the program that started this one ends.
pub(super) fn serve_standard_input() -> ! {
    crash_silently();
    let (mut tasks, mut results) = (io::stdin().lock(), io::stdout().lock());
    if send(&mut results, &[]).and_then(|()| results.flush()).is_err() {
        exit_at_once(0);
    }
    while let Ok(task) = receive(&mut tasks) {
        let Ok(task) = serde_json::from_slice::<Task>(&task) else { break };
        let outcome = serde_json::to_vec(&task.bounded(task.memory_bytes())).unwrap_or_default();
        if send(&mut results, &outcome).and_then(|()| results.flush()).is_err() {
            break;
        }
    }
    exit_at_once(0)
}
