//! Requests to end on Windows: the console's, and for the server's models the end of standard input.

use std::collections::HashMap;
use std::io;
use std::process::{Child, ChildStdin, Command};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use hobbit_core::windows::{Control, Job, end_process, exit_at_once, watch_console};

use super::{LAST, Signal};

// Numbers of Unix: exit statuses are the same.
pub(super) const SIGHUP: i32 = 1;
pub(super) const SIGINT: i32 = 2;
pub const SIGKILL: i32 = 9;
pub const SIGTERM: i32 = 15;

/// Receiver of signals; `None` while no thread listens.
static LISTENER: Mutex<Option<Sender<Signal>>> = Mutex::new(None);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends listening.
pub(super) struct Handle;

impl Handle {
    pub fn close(&self) {
        locked(&LISTENER).take();
    }
}

fn deliver(signal: Signal) {
    let sent = locked(&LISTENER).as_ref().map(|listener| listener.send(signal));
    if sent.is_none() {
        exit_at_once(signal.status().into());
    }
}

pub(super) fn listen(mut handler: impl FnMut(Signal) + Send + 'static) -> Result<(Handle, JoinHandle<()>)> {
    let (sender, signals) = channel();
    *locked(&LISTENER) = Some(sender);
    watch_console(|control| {
        deliver(match control {
            Control::Interrupt => Signal::Interrupt,
            Control::Break => Signal::Terminate,
            Control::Close => Signal::HangUp,
        });
    })
    .context("cannot handle the console's requests")?;
    let take = move || {
        for signal in signals {
            LAST.store(signal.status(), Ordering::SeqCst);
            handler(signal);
        }
    };
    let thread = std::thread::Builder::new().name("signals".into()).spawn(take).context("cannot handle signals")?;
    Ok((Handle, thread))
}

/// The end of standard input counts as [`Signal::Terminate`] from now on.
pub fn watch_standard_input() -> io::Result<()> {
    let wait = || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        deliver(Signal::Terminate);
    };
    std::thread::Builder::new().name("stdin".into()).spawn(wait).map(drop)
}

/// Ends this process at once: no exit handlers and no destructors run.
pub fn end_at_once(status: u8) -> ! {
    exit_at_once(status.into())
}

/// Nothing: [`bind`] takes the process.
pub fn end_with_this(_: &mut Command, _: i32) {}

/// Standard inputs of processes, by their numbers.
static INPUTS: Mutex<Option<HashMap<u32, ChildStdin>>> = Mutex::new(None);

/// The process ends when this one ends in any way. Its standard input, if it is a pipe, stays open until [`send`]
/// asks it to end.
pub fn bind(child: &mut Child) {
    static JOB: OnceLock<Option<Job>> = OnceLock::new();
    if let Some(job) = JOB.get_or_init(|| Job::new().ok()) {
        // Without it the process only ends by itself.
        let _ = job.add(child);
    }
    if let Some(input) = child.stdin.take() {
        locked(&INPUTS).get_or_insert_default().insert(child.id(), input);
    }
}

/// Asks a process to end by ending its standard input; [`SIGKILL`] ends it at once.
pub fn send(process: u32, number: i32) {
    let input = locked(&INPUTS).as_mut().and_then(|inputs| inputs.remove(&process));
    drop(input);
    if number == SIGKILL {
        end_process(process);
    }
}
