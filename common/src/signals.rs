//! Signals that end a program: Ctrl-C, SIGTERM and SIGHUP. Every program receives them here and reacts in its own
//! way: it stops a generation (`ctrl_c`), ends its child processes, or finishes a record. Windows has requests of its
//! console instead.

#[cfg(windows)]
#[path = "signals/windows.rs"]
mod system;

#[cfg(unix)]
use std::io;
use std::path::Path;
#[cfg(unix)]
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
#[cfg(unix)]
use std::thread::JoinHandle;

#[cfg(unix)]
use anyhow::Context;
use anyhow::Result;
#[cfg(unix)]
pub use libc::{SIGKILL, SIGTERM};
#[cfg(unix)]
use signal_hook::consts::{SIGHUP, SIGINT};
#[cfg(unix)]
use signal_hook::iterator::{Handle, Signals};

#[cfg(windows)]
use system::{SIGHUP, SIGINT, listen};
#[cfg(windows)]
pub use system::{SIGKILL, SIGTERM, bind, end_at_once, end_with_this, send, watch_standard_input};

/// A signal that ends the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Ctrl-C.
    Interrupt = SIGINT as isize,
    Terminate = SIGTERM as isize,
    HangUp = SIGHUP as isize,
}

impl Signal {
    #[cfg(unix)]
    fn of(number: i32) -> Option<Self> {
        [Self::Interrupt, Self::Terminate, Self::HangUp].into_iter().find(|signal| *signal as i32 == number)
    }

    /// Exit status of a program that the signal ends, as in shells.
    pub fn status(self) -> u8 {
        128 + self as u8 // 1, 2 and 15 everywhere
    }
}

/// An ending signal that found nothing to stop.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Number of the last signal; 0 if none came.
static LAST: AtomicU8 = AtomicU8::new(0);

/// Exit status of a run that was interrupted: 128 and the number of the last signal.
pub fn status() -> u8 {
    match LAST.load(Ordering::SeqCst) {
        0 => Signal::Interrupt.status(),
        status => status,
    }
}

/// Whether an ending signal came.
pub fn came() -> bool {
    LAST.load(Ordering::SeqCst) != 0
}

pub fn check() -> Result<(), Interrupted> {
    if came() { Err(Interrupted) } else { Ok(()) }
}

/// Calls `handler` on a separate thread for every ending signal. Once per process.
pub fn watch(handler: impl FnMut(Signal) + Send + 'static) -> Result<()> {
    listen(handler).map(drop)
}

/// Runs `work`, and meanwhile calls `handler` on a separate thread for every ending signal. Afterwards other code may
/// watch.
pub fn during<T>(handler: impl FnMut(Signal) + Send + 'static, work: impl FnOnce() -> T) -> Result<T> {
    let (handle, thread) = listen(handler)?;
    let result = work();
    handle.close();
    let _ = thread.join();
    Ok(result)
}

/// A signal that nohup set to be ignored stays ignored.
#[cfg(unix)]
fn listen(mut handler: impl FnMut(Signal) + Send + 'static) -> Result<(Handle, JoinHandle<()>)> {
    let is_wanted = |signal: &i32| *signal != SIGHUP || !ignores_hang_up();
    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP].iter().filter(|signal| is_wanted(signal)));
    let mut signals = signals.context("cannot handle signals")?;
    let handle = signals.handle();
    let deliver = move || {
        for signal in signals.forever().filter_map(Signal::of) {
            LAST.store(signal.status(), Ordering::SeqCst);
            handler(signal);
        }
    };
    let thread = std::thread::Builder::new().name("signals".into()).spawn(deliver).context("cannot handle signals")?;
    Ok((handle, thread))
}

/// Ends this process at once: no exit handlers and no destructors run.
#[cfg(unix)]
pub fn end_at_once(status: u8) -> ! {
    signal_hook::low_level::exit(i32::from(status))
}

/// Whether the parent process set SIGHUP to be ignored, as nohup does.
#[cfg(unix)]
fn ignores_hang_up() -> bool {
    // SAFETY: all-zero is a valid `sigaction`; with no new one the call only fills it in.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGHUP, std::ptr::null(), &mut now) == 0 && now.sa_sigaction == libc::SIG_IGN
    }
}

/// Gives the process of `command` the signal `number` when the thread that starts it ends, and so when this process
/// ends in any way. Only Linux can do that.
#[cfg(unix)]
pub fn end_with_this(command: &mut Command, number: i32) {
    let parent = std::process::id();
    // SAFETY: between fork and exec only system calls are made.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(command, move || {
            #[cfg(target_os = "linux")]
            if libc::prctl(libc::PR_SET_PDEATHSIG, number) != 0 {
                return Err(io::Error::last_os_error());
            }
            // It may have ended before that.
            if libc::getppid().cast_unsigned() == parent { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
        });
    }
}

/// Nothing: [`end_with_this`] has prepared the command. Windows takes the process afterwards.
#[cfg(unix)]
pub fn bind(_: &mut Child) {}

/// Sends the signal `number` to a process that is known not to have been waited for.
#[cfg(unix)]
pub fn send(process: u32, number: i32) {
    if let Ok(process) = libc::pid_t::try_from(process) {
        // SAFETY: a signal; a process that has gone is an error that changes nothing.
        unsafe { libc::kill(process, number) };
    }
}

/// The last message of a process that can no longer read a page of a file.
static LOST_PAGE: OnceLock<String> = OnceLock::new();

/// From now on an unreadable page of a mapped file ends the process with a message that names `model`, and with the
/// status of a failure: if all of a model fits, llama.cpp maps its file.
#[cfg_attr(not(target_os = "linux"), expect(clippy::needless_return, reason = "a handler follows on Linux"))]
pub fn explain_lost_pages(model: &Path) {
    let line = format!(
        "error: {}: a part of this file cannot be read any more: it was cut or written to while in use, or its disk \
         fails; put it back and start again (to replace a model, rename another file to its name)\n",
        model.display()
    );
    if LOST_PAGE.set(line).is_err() {
        return;
    }
    // The standard library's handler detects stack overflow by SIGSEGV on Linux and SIGBUS elsewhere.
    #[cfg(target_os = "linux")]
    // SAFETY: all-zero is a valid `sigaction`. The handler has the signature that SA_SIGINFO asks for, and does only
    // what is allowed at any point of a program: it loads an atomic, and calls `write`, `signal` and `_exit`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = lost_page;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    }
}

#[cfg(target_os = "linux")]
extern "C" fn lost_page(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `info`; the line is never changed or freed.
    unsafe {
        match LOST_PAGE.get().filter(|_| (*info).si_code == libc::BUS_ADRERR) {
            Some(line) => {
                libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
                libc::_exit(1);
            }
            // Any other fault recurs and ends the process as usual.
            None => {
                libc::signal(signal, libc::SIG_DFL);
            }
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_those_of_shells() {
        let statuses = [1, 2, 15, 9].map(|number| Signal::of(number).map(Signal::status));
        assert_eq!(statuses, [Some(129), Some(130), Some(143), None]);
    }
}
