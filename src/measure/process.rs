//! What a process costs.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The memory and the handles of a process at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Resident set in bytes.
    pub rss: u64,
    /// Largest resident set so far in bytes.
    pub peak_rss: u64,
    /// Of the resident set, anonymous memory in bytes.
    pub anon: u64,
    /// Threads.
    pub threads: u32,
    /// Open file descriptors.
    pub fds: u32,
}

impl Footprint {
    /// Of a process, by number or `self`; `None` when it has gone or the system does not tell.
    pub fn of(process: &str) -> Option<Self> {
        let dir = Path::new("/proc").join(process);
        let status = fs::read_to_string(dir.join("status")).ok()?;
        let field = |key: &str| -> Option<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse().ok()
        };
        let fds = fs::read_dir(dir.join("fd")).map_or(0, Iterator::count) as u32;
        Some(Self {
            rss: field("VmRSS")? << 10,
            peak_rss: field("VmHWM")? << 10,
            anon: field("RssAnon").unwrap_or(0) << 10,
            threads: field("Threads").unwrap_or(0) as u32,
            // Looking opens one.
            fds: if process == "self" { fds.saturating_sub(1) } else { fds },
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

/// What this process has cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Costs {
    /// Bytes fetched from disks, by the kernel's count.
    pub disk_bytes: u64,
    /// Page faults that read.
    pub major_faults: u64,
    /// CPU time of all threads, in nanoseconds.
    pub cpu_ns: u64,
}

impl Costs {
    /// Until now.
    ///
    /// # Errors
    /// A system without `/proc/self/io`.
    pub fn now() -> Result<Self> {
        let io = fs::read_to_string("/proc/self/io").context("/proc/self/io")?;
        let disk_bytes = io.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok());
        // SAFETY: all zeroes is a valid rusage, which the call fills in.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            anyhow::ensure!(libc::getrusage(libc::RUSAGE_SELF, &mut usage) == 0, "getrusage failed");
            usage
        };
        let ns = |time: libc::timeval| time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1000;
        Ok(Self {
            disk_bytes: disk_bytes.context("no read_bytes in /proc/self/io")?,
            major_faults: usage.ru_majflt as u64,
            cpu_ns: ns(usage.ru_utime) + ns(usage.ru_stime),
        })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn this_process() {
        let now = Footprint::of("self").unwrap();
        assert!(now.rss > 0 && now.peak_rss >= now.rss && now.threads > 0, "{now:?}");
        assert!(now.fds < 10_000);
        assert_eq!(Footprint::of("no number"), None);
        let before = Costs::now().unwrap();
        assert!(Costs::now().unwrap().cpu_ns >= before.cpu_ns);
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
