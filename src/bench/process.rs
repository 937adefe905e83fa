//! The memory and the reads of this process.

use std::fs;

use anyhow::{Context, Result};

/// The memory and the handles of this process at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Resident set in bytes.
    pub rss: u64,
    /// Largest resident set so far in bytes.
    pub peak_rss: u64,
    /// Anonymous memory of the resident set in bytes.
    pub anon: u64,
    /// Threads.
    pub threads: u32,
    /// Open file descriptors.
    pub fds: u32,
}

impl Footprint {
    /// `None` where the system does not tell.
    pub fn now() -> Option<Self> {
        let status = fs::read_to_string("/proc/self/status").ok()?;
        let field = |key: &str| -> Option<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse().ok()
        };
        let fds = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as u32;
        Some(Self {
            rss: field("VmRSS")? << 10,
            peak_rss: field("VmHWM")? << 10,
            anon: field("RssAnon").unwrap_or(0) << 10,
            threads: field("Threads").unwrap_or(0) as u32,
            fds: fds.saturating_sub(1), // Looking opens one.
        })
    }
}

/// Bytes that malloc has handed out and not got back; `None` where it does not tell.
pub fn heap_bytes() -> Option<u64> {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: no arguments; counts under malloc's own locks.
        let info = unsafe { libc::mallinfo2() };
        Some((info.uordblks + info.hblkhd) as u64)
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    None
}

/// Bytes that the kernel has fetched from disks for this process so far.
///
/// # Errors
/// A system without `/proc/self/io`.
pub fn disk_bytes() -> Result<u64> {
    let io = fs::read_to_string("/proc/self/io").context("/proc/self/io")?;
    let bytes = io.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok());
    bytes.context("no read_bytes in /proc/self/io")
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn this_process() {
        let now = Footprint::now().unwrap();
        assert!(now.rss > 0 && now.peak_rss >= now.rss && now.threads > 0, "{now:?}");
        assert!(now.fds < 10_000);
        let before = disk_bytes().unwrap();
        assert!(disk_bytes().unwrap() >= before);
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn the_heap_counts_what_is_held() {
        // Larger than what other tests hold for a moment.
        let before = heap_bytes().unwrap();
        let held = std::hint::black_box(Vec::<u8>::with_capacity(1 << 30));
        let with = heap_bytes().unwrap();
        assert!(with > before + (1 << 29), "{before} and {with} with {}", held.capacity());
        drop(held);
    }
}
