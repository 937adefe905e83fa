//! Our threads beside those that compute, so that they do not count as other programs on our cores.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

static RUNNING: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// The kernel's ids of running threads.
pub fn running() -> BTreeSet<u32> {
    lock().clone()
}

/// Counts the calling thread among ours, until it ends.
pub fn register() {
    thread_local!(static REGISTERED: Running = Running::new());
    REGISTERED.with(|_| ());
}

/// Starts a thread.
pub(super) fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    Builder::new().name(name).spawn(move || {
        register();
        work();
    })
}

/// A thread that runs, until it is dropped.
struct Running(u32);

impl Running {
    fn new() -> Self {
        #[cfg(target_os = "linux")]
        // SAFETY: no arguments, no memory.
        let number = unsafe { libc::gettid() }.unsigned_abs();
        #[cfg(windows)]
        let number = crate::windows::thread_id();
        #[cfg(not(any(target_os = "linux", windows)))]
        let number = 0;
        lock().insert(number);
        Self(number)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        lock().remove(&self.0);
    }
}

fn lock() -> MutexGuard<'static, BTreeSet<u32>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_known_while_it_runs() {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = spawn("hobbit-test".into(), move || {
            // SAFETY: no arguments, no memory.
            tell.send(unsafe { libc::gettid() }.unsigned_abs()).unwrap();
            let _ = ended.recv();
        });
        let number = told.recv().unwrap();
        assert!(running().contains(&number));
        drop(end);
        thread.unwrap().join().unwrap();
        assert!(!running().contains(&number));
    }
}
