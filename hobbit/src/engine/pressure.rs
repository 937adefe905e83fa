//! What another program, or the user, says about memory by a signal.

use std::sync::atomic::{AtomicI32, Ordering};

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemorySignal {
    /// SIGUSR1: make do with half.
    Halve,
    /// SIGUSR2: take again what was planned.
    Restore,
}

/// Its number; 0: none.
static LAST: AtomicI32 = AtomicI32::new(0);

/// From now on SIGUSR1 and SIGUSR2 are kept for [`take_memory_signal`] instead of ending the process.
pub fn watch_memory_signals() {
    extern "C" fn note(signal: libc::c_int) {
        LAST.store(signal, Ordering::Relaxed);
    }
    for signal in [libc::SIGUSR1, libc::SIGUSR2] {
        // SAFETY: the handler only stores to an atomic, which is allowed at any point of a program.
        unsafe { libc::signal(signal, note as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    }
}

/// The last signal since the last call.
pub fn take_memory_signal() -> Option<MemorySignal> {
    match LAST.swap(0, Ordering::Relaxed) {
        libc::SIGUSR1 => Some(MemorySignal::Halve),
        libc::SIGUSR2 => Some(MemorySignal::Restore),
        _ => None,
    }
}
