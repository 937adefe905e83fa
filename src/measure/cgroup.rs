//! A memory control group of its own for each run, v1 or v2.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Tells groups of one process apart.
static NUMBER: AtomicU32 = AtomicU32::new(0);

const V1: &str = "/sys/fs/cgroup/memory";
const V2: &str = "/sys/fs/cgroup";

/// A group with a limit and without swap. Removed when dropped; its processes must have ended by then.
pub struct Cgroup {
    dir: PathBuf,
    is_v2: bool,
}

/// What the kernel counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Largest use in bytes, page cache included; `None` where the kernel does not tell (v2 before 5.19).
    pub peak: Option<u64>,
    /// Times the limit was hit and something had to be reclaimed.
    pub limit_hits: u64,
}

impl Cgroup {
    /// A group with a limit in bytes.
    ///
    /// # Errors
    /// Without root, and without memory control groups.
    pub fn new(limit: u64) -> Result<Self> {
        let is_v1 = Path::new(V1).join("memory.limit_in_bytes").exists();
        let mount = if is_v1 { V1 } else { V2 };
        if !is_v1 {
            enable_v2()?;
        }
        let dir = Path::new(mount).join(format!(
            "hobbit-bench-{}-{}",
            std::process::id(),
            NUMBER.fetch_add(1, Ordering::Relaxed)
        ));
        fs::create_dir(&dir).with_context(|| format!("creating the control group {}", dir.display()))?;
        let group = Self { dir, is_v2: !is_v1 };
        let bytes = limit.to_string();
        if is_v1 {
            group.write("memory.limit_in_bytes", &bytes)?;
            if has_swap() {
                // Met before the limit on memory alone, whose hits are then not counted: only where it is needed.
                group.write("memory.memsw.limit_in_bytes", &bytes)?;
            }
        } else {
            group.write("memory.max", &bytes)?;
            if has_swap() {
                group.write("memory.swap.max", "0")?;
            }
        }
        Ok(group)
    }

    /// The file to which a process writes `0` to enter.
    pub fn entrance(&self) -> Result<File> {
        let path = self.dir.join("cgroup.procs");
        OpenOptions::new().write(true).open(&path).with_context(|| path.display().to_string())
    }

    /// What the kernel counted so far.
    pub fn usage(&self) -> Usage {
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

    fn write(&self, name: &str, value: &str) -> Result<()> {
        let path = self.dir.join(name);
        fs::write(&path, value).with_context(|| format!("writing {value} to {}", path.display()))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for _ in 0..50 {
            if fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            // A process that has just ended may still be counted.
            sleep(Duration::from_millis(20));
        }
        let _ = writeln!(io::stderr(), "the control group {} could not be removed", self.dir.display());
    }
}

fn has_swap() -> bool {
    fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() > 1)
}

/// Lets groups below the root of v2 limit memory.
fn enable_v2() -> Result<()> {
    let root = Path::new(V2);
    let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    if !controllers.split_whitespace().any(|name| name == "memory") {
        bail!("no memory control groups here: neither {V1} nor the memory controller in {V2}");
    }
    fs::write(root.join("cgroup.subtree_control"), "+memory")
        .with_context(|| format!("enabling the memory controller in {V2} (in a container, run the bench outside)"))
}
