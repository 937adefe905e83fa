//! The memory of a program that runs a model: its allocator, and the signals that resize its caches. SIGUSR1 halves
//! the caches, SIGUSR2 restores their planned size.

use super::log::{Level, Log};
use hobbit::Model;
use hobbit::engine::{MemorySignal, take_memory_signal};
use hobbit_core::plan::ExpertCache;

/// Prepares the process for a model. Must be the first action of a program: threads started earlier have their own
/// arenas, and until then a signal about caches ends the process.
pub fn begin() {
    hobbit::engine::watch_memory_signals();
    few_arenas();
}

/// Limits what the allocator keeps of freed memory. Memory freed in one thread's arena cannot be used by other threads
/// and seldom returns to the system. A large buffer is a mapping of its own: glibc would put later ones on pages of
/// earlier ones, which a memory plan would count twice.
pub fn few_arenas() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const ARENAS: libc::c_int = 2;
        const MAPPED_BYTES_MIN: libc::c_int = 1 << 20;
        // SAFETY: they set numbers that are looked at where a thread allocates.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, ARENAS);
            libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN);
        }
    }
}

/// Resizes the caches if a signal asked for it since the last call.
pub fn obey(model: &Model, log: &Log) {
    let Some(signal) = take_memory_signal() else { return };
    let device_bytes = || model.device_reports().iter().map(|device| device.cache_bytes).sum::<u64>();
    let wanted = |now: u64| match signal {
        MemorySignal::Halve => ExpertCache::Bytes(now / 2),
        MemorySignal::Restore => ExpertCache::Auto,
    };
    let (host_before, device_before) = (model.host_cache_bytes(), device_bytes());
    let device = model.set_device_cache(wanted(device_before));
    let host = model.set_host_cache(wanted(host_before));
    let line = |what: &str, before: u64, now: u64| {
        log.line(Level::Warning, format!("{what} now has {} MiB, before {}", now >> 20, before >> 20));
    };
    let stays = host == host_before && host > 0 && device_before + device > 0;
    line(
        if stays { "the expert cache (pinned memory, or a device's, keeps its size)" } else { "the expert cache" },
        host_before,
        host,
    );
    if device_before + device > 0 {
        line("the device cache", device_before, device);
    }
}
