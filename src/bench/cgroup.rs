//! Control groups with a memory limit, and a cold page cache.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::answer::Usage;

/// Distinguishes the groups of one process.
static NUMBER: AtomicU32 = AtomicU32::new(0);

const V1: &str = "/sys/fs/cgroup/memory";
const V2: &str = "/sys/fs/cgroup";
/// Bytes of a dropped file that may stay in the page cache: pages on their way between lists.
const LEFT_BYTES_MAX: usize = 16 << 20;

/// A control group with a memory limit and without swap. Removed when dropped; its processes must have ended before.
pub(super) struct Cgroup {
    dir: PathBuf,
    is_v2: bool,
}

impl Cgroup {
    /// A group limited to `bytes`.
    pub(super) fn new(bytes: u64) -> Result<Self> {
        let is_v2 = !Path::new(V1).join("memory.limit_in_bytes").exists();
        if is_v2 {
            enable_v2()?;
        }
        let name = format!("hobbit-bench-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let dir = Path::new(if is_v2 { V2 } else { V1 }).join(name);
        fs::create_dir(&dir).with_context(|| format!("creating the control group {}", dir.display()))?;
        let group = Self { dir, is_v2 };
        group.write(if is_v2 { "memory.max" } else { "memory.limit_in_bytes" }, bytes)?;
        // Only with swap: otherwise v1 meets this limit first and stops counting hits of the other.
        match (has_swap(), is_v2) {
            (true, true) => group.write("memory.swap.max", 0)?,
            (true, false) => group.write("memory.memsw.limit_in_bytes", bytes)?,
            (false, _) => (),
        }
        Ok(group)
    }

    /// The file to which a process writes `0` to enter the group.
    pub(super) fn entrance(&self) -> Result<File> {
        let path = self.dir.join("cgroup.procs");
        OpenOptions::new().write(true).open(&path).with_context(|| path.display().to_string())
    }

    /// The kernel's counts so far.
    pub(super) fn usage(&self) -> Usage {
        let read = |name: &str| fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        let number = |name: &str| read(name).trim().parse().ok();
        let (peak, hits) = if self.is_v2 {
            let events = read("memory.events");
            let hits = events.lines().find_map(|line| line.strip_prefix("max ")?.trim().parse().ok());
            (number("memory.peak"), hits)
        } else {
            (number("memory.max_usage_in_bytes"), number("memory.failcnt"))
        };
        Usage { peak, limit_hits: hits.unwrap_or(0) }
    }

    fn write(&self, name: &str, value: u64) -> Result<()> {
        let path = self.dir.join(name);
        fs::write(&path, value.to_string()).with_context(|| format!("writing {value} to {}", path.display()))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has just ended may still be counted.
        let is_gone =
            (0..50).any(|_| fs::remove_dir(&self.dir).inspect_err(|_| sleep(Duration::from_millis(20))).is_ok());
        if !is_gone {
            let _ = writeln!(io::stderr(), "the control group {} could not be removed", self.dir.display());
        }
    }
}

fn has_swap() -> bool {
    fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() > 1)
}

/// Enables memory limits for groups below the root of v2.
fn enable_v2() -> Result<()> {
    let root = Path::new(V2);
    let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    ensure!(
        controllers.split_whitespace().any(|controller| controller == "memory"),
        "no control groups that limit memory: neither v1's nor the controller in {V2}"
    );
    fs::write(root.join("cgroup.subtree_control"), "+memory")
        .with_context(|| format!("enabling the memory controller in {V2} (in a container, run hobbit-bench outside)"))
}

/// Drops the file from the page cache; if that does not suffice, as root, drops all caches.
pub(super) fn drop_file(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    file.sync_all().with_context(|| path.display().to_string())?; // dirty pages cannot be dropped
    // SAFETY: the descriptor is open; the call touches no memory of ours.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    if resident_bytes(&file)? <= LEFT_BYTES_MAX {
        return Ok(());
    }
    fs::write("/proc/sys/vm/drop_caches", "1").context("writing /proc/sys/vm/drop_caches")?;
    let left = resident_bytes(&file)?;
    ensure!(
        left <= LEFT_BYTES_MAX,
        "{} MiB of {} stay in the page cache: another process has it mapped",
        left >> 20,
        path.display()
    );
    Ok(())
}

/// Bytes of the file in the page cache.
fn resident_bytes(file: &File) -> Result<usize> {
    let len = usize::try_from(file.metadata()?.len())?;
    if len == 0 {
        return Ok(0);
    }
    // SAFETY: sysconf has no preconditions.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let mut pages = vec![0u8; len.div_ceil(page_bytes)];
    // SAFETY: a fresh read-only mapping of `len` bytes, unmapped below and never read; `pages` has a byte for each
    // of its pages.
    let code = unsafe {
        let map = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        ensure!(map != libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
        let code = libc::mincore(map, len, pages.as_mut_ptr());
        libc::munmap(map, len);
        code
    };
    ensure!(code == 0, "mincore: {}", io::Error::last_os_error());
    Ok(pages.iter().filter(|page| **page & 1 == 1).count() * page_bytes)
}
