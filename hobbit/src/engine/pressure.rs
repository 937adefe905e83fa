//! Memory requests by signal, from the user or another program.

use std::sync::atomic::{AtomicI32, Ordering};

/// The request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemorySignal {
    /// SIGUSR1: use half the memory.
    Halve,
    /// SIGUSR2: use the planned memory again.
    Restore,
}

/// The pending signal's number; 0: none.
static LAST: AtomicI32 = AtomicI32::new(0);

/// Records SIGUSR1 and SIGUSR2 for [`take_memory_signal`] from now on, instead of ending the process.
pub fn watch_memory_signals() {
    extern "C" fn note(signal: libc::c_int) {
        LAST.store(signal, Ordering::Relaxed);
    }
    for signal in [libc::SIGUSR1, libc::SIGUSR2] {
        // SAFETY: the handler only stores to an atomic, which is allowed at any point of a program.
        unsafe { libc::signal(signal, note as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    }
}

/// The last signal since the previous call.
pub fn take_memory_signal() -> Option<MemorySignal> {
    match LAST.swap(0, Ordering::Relaxed) {
        libc::SIGUSR1 => Some(MemorySignal::Halve),
        libc::SIGUSR2 => Some(MemorySignal::Restore),
        _ => None,
    }
}
