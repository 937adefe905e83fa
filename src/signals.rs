//! Signals that end a program: Ctrl-C, a polite request (SIGTERM), a terminal that is gone (SIGHUP). Every program hears them
//! here; what it does then is its own: stop a generation (`ctrl_c`), end what it has started, or finish a record.

use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// A signal that asks for the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Ctrl-C.
    Interrupt = SIGINT as isize,
    Terminate = SIGTERM as isize,
    HangUp = SIGHUP as isize,
}

impl Signal {
    fn of(number: i32) -> Option<Self> {
        [Self::Interrupt, Self::Terminate, Self::HangUp].into_iter().find(|signal| *signal as i32 == number)
    }

    /// Exit status of a program that it ends, as shells number it.
    pub fn status(self) -> u8 {
        128 + self as u8 // 1, 2 and 15 everywhere
    }
}

/// A signal that asks for the end, where nothing was left to stop.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Status of the last signal; 0 while there was none.
static LAST: AtomicU8 = AtomicU8::new(0);

/// Exit status of a run that was interrupted: 128 and the number of the last signal.
pub fn status() -> u8 {
    match LAST.load(Ordering::SeqCst) {
        0 => Signal::Interrupt.status(),
        status => status,
    }
}

/// Whether a signal came that asks for the end.
pub fn came() -> bool {
    LAST.load(Ordering::SeqCst) != 0
}

pub fn check() -> Result<(), Interrupted> {
    if came() { Err(Interrupted) } else { Ok(()) }
}

/// Calls `handler`, on a thread of its own, for every signal that asks for the end. Once per process.
pub fn watch(mut handler: impl FnMut(Signal) + Send + 'static) -> Result<()> {
    let mut signals = wanted()?;
    let deliver = move || {
        for signal in signals.forever().filter_map(Signal::of) {
            LAST.store(signal.status(), Ordering::SeqCst);
            handler(signal);
        }
    };
    let spawned = std::thread::Builder::new().name("signals".into()).spawn(deliver);
    spawned.map(drop).context("cannot handle signals")
}

/// The signals that ask for the end. What nohup has set to be ignored stays ignored.
fn wanted() -> Result<Signals> {
    let is_wanted = |signal: &i32| *signal != SIGHUP || !ignores_hang_up();
    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP].iter().filter(|signal| is_wanted(signal)));
    signals.context("cannot handle signals")
}

/// Runs `work`, during which `handler` is called, on a thread of its own, for every signal that asks for the end. Afterwards others may
/// watch.
pub fn during<T>(mut handler: impl FnMut(Signal) + Send + 'static, work: impl FnOnce() -> T) -> Result<T> {
    let mut signals = wanted()?;
    let handle = signals.handle();
    let deliver = move || {
        for signal in signals.forever().filter_map(Signal::of) {
            LAST.store(signal.status(), Ordering::SeqCst);
            handler(signal);
        }
    };
    let thread = std::thread::Builder::new().name("signals".into()).spawn(deliver).context("cannot handle signals")?;
    let result = work();
    handle.close();
    let _ = thread.join();
    Ok(result)
}

/// Whether whoever started this process has SIGHUP ignored, as nohup does.
fn ignores_hang_up() -> bool {
    // SAFETY: all-zero is a valid `sigaction`; with no new one the call only fills it in.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGHUP, std::ptr::null(), &mut now) == 0 && now.sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_those_of_shells() {
        let statuses = [1, 2, 15, 9].map(|number| Signal::of(number).map(Signal::status));
        assert_eq!(statuses, [Some(129), Some(130), Some(143), None]);
    }
}
