//! A control group of its own for each run, v1 or v2: a limit of its memory, or of what it reads from disks.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Tells groups of one process apart.
static NUMBER: AtomicU32 = AtomicU32::new(0);

const V1: &str = "/sys/fs/cgroup/memory";
const V1_DISKS: &str = "/sys/fs/cgroup/blkio";
const V2: &str = "/sys/fs/cgroup";

/// A group with a limit and without swap. Removed when dropped; its processes must have ended by then.
pub struct Cgroup {
    /// Of v1 one for each limit.
    dirs: Vec<PathBuf>,
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

/// So many bytes a second at most, of each of these disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadLimit {
    bytes_per_second: u64,
    /// `major:minor`.
    disks: Vec<String>,
}

impl ReadLimit {
    /// For the disks on which files lie.
    ///
    /// # Errors
    /// A file that is not there, or on no disk of this machine: in memory, on a network, on several disks at once.
    pub fn new<'a>(bytes_per_second: u64, files: impl Iterator<Item = &'a Path>) -> Result<Self> {
        let mut disks = files.map(disk_of).collect::<Result<Vec<_>>>()?;
        disks.sort();
        disks.dedup();
        Ok(Self { bytes_per_second, disks })
    }
}

/// The disk on which a file lies: of a partition the whole one, which is what limits are for.
fn disk_of(file: &Path) -> Result<String> {
    let device = fs::metadata(file).with_context(|| file.display().to_string())?.dev();
    let (major, minor) = (libc::major(device), libc::minor(device));
    let of = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
    let of =
        fs::canonicalize(&of).with_context(|| format!("{} lies on no disk that can be limited", file.display()))?;
    let whole = if of.join("partition").exists() { of.parent().unwrap_or(&of) } else { &of };
    let number = fs::read_to_string(whole.join("dev")).with_context(|| whole.display().to_string())?;
    Ok(number.trim().to_owned())
}

impl Cgroup {
    /// A group with a limit of its memory in bytes, of its reads, or of both.
    ///
    /// # Errors
    /// Without root, and without control groups that have such limits.
    pub fn new(memory: Option<u64>, reads: Option<&ReadLimit>) -> Result<Self> {
        let is_v1 = Path::new(V1).join("memory.limit_in_bytes").exists();
        let mut group = Self { dirs: Vec::new(), is_v2: !is_v1 };
        let name = format!("hobbit-bench-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        if !is_v1 {
            let controllers: Vec<&str> = memory.map(|_| "memory").into_iter().chain(reads.map(|_| "io")).collect();
            enable_v2(&controllers)?;
            group.make(V2, &name)?;
        }
        if let Some(bytes) = memory.map(|bytes| bytes.to_string()) {
            if is_v1 {
                let dir = group.make(V1, &name)?;
                write(&dir, "memory.limit_in_bytes", &bytes)?;
                if has_swap() {
                    // Met before the limit on memory alone, whose hits are then not counted: only where it is needed.
                    write(&dir, "memory.memsw.limit_in_bytes", &bytes)?;
                }
            } else {
                write(&group.dirs[0], "memory.max", &bytes)?;
                if has_swap() {
                    write(&group.dirs[0], "memory.swap.max", "0")?;
                }
            }
        }
        if let Some(ReadLimit { bytes_per_second, disks }) = reads {
            let dir = if is_v1 { group.make(V1_DISKS, &name)? } else { group.dirs[0].clone() };
            for disk in disks {
                match is_v1 {
                    true => write(&dir, "blkio.throttle.read_bps_device", &format!("{disk} {bytes_per_second}"))?,
                    false => write(&dir, "io.max", &format!("{disk} rbps={bytes_per_second}"))?,
                }
            }
        }
        Ok(group)
    }

    /// A directory, which is removed with the group.
    fn make(&mut self, mount: &str, name: &str) -> Result<PathBuf> {
        let dir = Path::new(mount).join(name);
        fs::create_dir(&dir).with_context(|| format!("creating the control group {}", dir.display()))?;
        self.dirs.push(dir.clone());
        Ok(dir)
    }

    /// The files to which a process writes `0` to enter.
    pub fn entrances(&self) -> Result<Vec<File>> {
        let open = |dir: &PathBuf| {
            let path = dir.join("cgroup.procs");
            OpenOptions::new().write(true).open(&path).with_context(|| path.display().to_string())
        };
        self.dirs.iter().map(open).collect()
    }

    /// What the kernel counted so far.
    pub fn usage(&self) -> Usage {
        let read = |name: &str| {
            let found = self.dirs.iter().find_map(|dir| fs::read_to_string(dir.join(name)).ok());
            found.unwrap_or_default()
        };
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
}

fn write(dir: &Path, name: &str, value: &str) -> Result<()> {
    let path = dir.join(name);
    fs::write(&path, value).with_context(|| format!("writing {value} to {}", path.display()))
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for dir in &self.dirs {
            // A process that has just ended may still be counted.
            let is_gone =
                (0..50).any(|_| fs::remove_dir(dir).inspect_err(|_| sleep(Duration::from_millis(20))).is_ok());
            if !is_gone {
                let _ = writeln!(io::stderr(), "the control group {} could not be removed", dir.display());
            }
        }
    }
}

fn has_swap() -> bool {
    fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() > 1)
}

/// Lets groups below the root of v2 have such limits.
fn enable_v2(wanted: &[&str]) -> Result<()> {
    let root = Path::new(V2);
    let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    for name in wanted {
        if !controllers.split_whitespace().any(|own| own == *name) {
            bail!("no control groups with limits of {name} here: neither v1's nor the controller in {V2}");
        }
        fs::write(root.join("cgroup.subtree_control"), format!("+{name}")).with_context(|| {
            format!("enabling the {name} controller in {V2} (in a container, run the bench outside)")
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_on_no_disk_is_named() {
        let error = ReadLimit::new(1, std::iter::once(Path::new("/proc/version"))).unwrap_err();
        assert!(format!("{error:#}").contains("/proc/version lies on no disk"), "{error:#}");
        let error = ReadLimit::new(1, std::iter::once(Path::new("/nowhere/at/all"))).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/at/all"), "{error:#}");
    }
}
