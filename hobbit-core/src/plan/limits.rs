//! How much memory this process may take: control groups (v1 and v2, nested) and the machine.

#![cfg_attr(windows, allow(dead_code))] // control groups are Linux's

use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};

/// Current memory limits of the system. Without `/proc`, or Windows, nothing is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryLimits {
    /// `MemAvailable` of `/proc/meminfo` in bytes: memory that the machine can provide without swapping. On Windows
    /// free pages.
    pub mem_available: Option<u64>,
    /// The enclosing control group, or job object of Windows, that leaves least; `None` without a limit.
    pub cgroup: Option<CgroupMemory>,
    /// Anonymous memory that this process holds already, in bytes. The other numbers count it as used.
    pub own: u64,
}

/// The memory of a control group that has a limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CgroupMemory {
    pub path: PathBuf,
    pub limit: u64,
    /// Bytes in use that cannot be reclaimed: page cache of files is left out.
    pub used: u64,
}

impl CgroupMemory {
    pub fn available(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum BudgetSource {
    Given,
    Cgroup,
    MemAvailable,
}

impl BudgetSource {
    /// The system's groups of processes that may have a limit.
    pub const GROUP: &str = if cfg!(windows) { "job object" } else { "control group" };
}

impl fmt::Display for BudgetSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given => f.pad("as given"),
            Self::Cgroup => f.pad(&format!("auto: limit of the {}", Self::GROUP)),
            Self::MemAvailable => f.pad("auto: available memory"),
        }
    }
}

impl MemoryLimits {
    /// Reads the limits. Unreadable values count as unknown.
    #[cfg(not(windows))]
    pub fn read() -> Self {
        Self::from_files(&|path| std::fs::read_to_string(path).ok())
    }

    /// Reads the limits: of the machine, and of a job object on the memory that this process commits.
    #[cfg(windows)]
    pub fn read() -> Self {
        let own = crate::windows::own_memory().map_or(0, |own| own.private);
        let job = |limit| CgroupMemory { path: "job object".into(), limit, used: own };
        Self {
            mem_available: crate::windows::available_memory(),
            cgroup: crate::windows::job_memory_limit().map(job),
            own,
        }
    }

    /// Bytes this process may take in total, what it holds included: the tighter of the control group and the machine.
    pub fn budget(&self) -> Option<(u64, BudgetSource)> {
        let cgroup = self.cgroup.as_ref().map(|group| (group.available(), BudgetSource::Cgroup));
        let machine = self.mem_available.map(|bytes| (bytes, BudgetSource::MemAvailable));
        let (available, source) = cgroup.into_iter().chain(machine).min_by_key(|(bytes, _)| *bytes)?;
        Some((available.saturating_add(self.own), source))
    }

    fn from_files(read: &dyn Fn(&Path) -> Option<String>) -> Self {
        let proc = |name: &str| read(&Path::new("/proc").join(name)).unwrap_or_default();
        let groups = memory_cgroups(&proc("self/cgroup"), &proc("self/mountinfo"));
        let status = proc("self/status");
        let own = ["RssAnon:", "RssShmem:"].into_iter().filter_map(|key| kib_field(&status, key)).sum();
        Self {
            mem_available: kib_field(&proc("meminfo"), "MemAvailable:"),
            cgroup: groups.iter().filter_map(|group| group.tightest(read)).min_by_key(CgroupMemory::available),
            own,
        }
    }
}

/// Mount point of a hierarchy of control groups, and this process's place in it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CgroupPlace {
    version: CgroupVersion,
    mount: PathBuf,
    dir: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    V1,
    V2,
}

impl CgroupPlace {
    /// From the process's group up to the mount point: the limited group that leaves least.
    fn tightest(&self, read: &dyn Fn(&Path) -> Option<String>) -> Option<CgroupMemory> {
        let groups = self.dir.ancestors().take_while(|dir| dir.starts_with(&self.mount));
        groups.filter_map(|dir| self.memory_of(dir, read)).min_by_key(CgroupMemory::available)
    }

    fn memory_of(&self, dir: &Path, read: &dyn Fn(&Path) -> Option<String>) -> Option<CgroupMemory> {
        let file = |name: &str| read(&dir.join(name));
        let limit_in = |name: &str| parse_limit(&file(name)?);
        // Above `memory.high` a group is throttled to a crawl, so it limits as `memory.max` does.
        let (limits, usage, prefix) = match self.version {
            CgroupVersion::V1 => ([limit_in("memory.limit_in_bytes"), None], "memory.usage_in_bytes", "total_"),
            CgroupVersion::V2 => ([limit_in("memory.max"), limit_in("memory.high")], "memory.current", ""),
        };
        let limit = limits.into_iter().flatten().min()?;
        let usage = file(usage)?.trim().parse::<u64>().ok()?;
        let reclaimable = file_cache(&file("memory.stat").unwrap_or_default(), prefix);
        Some(CgroupMemory { path: dir.to_owned(), limit, used: usage.saturating_sub(reclaimable) })
    }
}

/// The memory hierarchies of `/proc/self/cgroup` that `/proc/self/mountinfo` shows mounted.
fn memory_cgroups(cgroup: &str, mountinfo: &str) -> Vec<CgroupPlace> {
    let mut places = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let version = match controllers {
            "" => CgroupVersion::V2,
            _ if controllers.split(',').any(|name| name == "memory") => CgroupVersion::V1,
            _ => continue,
        };
        let found = mountinfo.lines().find_map(|line| cgroup_mount(line, version));
        if let Some((root, mount)) = found {
            // In a container the mount may show a subtree (`root`), and the path may lie outside of it.
            let below = Path::new(path).strip_prefix(root).ok();
            let below = below.filter(|path| !path.components().any(|part| part.as_os_str() == ".."));
            let mount = PathBuf::from(mount);
            places.push(CgroupPlace { version, dir: mount.join(below.unwrap_or(Path::new(""))), mount });
        }
    }
    places
}

/// (root, mount point) if the line of `mountinfo` mounts the memory hierarchy of this version.
fn cgroup_mount(line: &str, version: CgroupVersion) -> Option<(&str, &str)> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (root, mount) = (place.next()?, place.next()?);
    let mut kind = kind.split(' ');
    let (name, options) = (kind.next()?, kind.nth(1)?);
    let is_ours = match version {
        CgroupVersion::V1 => name == "cgroup" && options.split(',').any(|option| option == "memory"),
        CgroupVersion::V2 => name == "cgroup2",
    };
    is_ours.then_some((root, mount))
}

/// Bytes, or `None` for no limit: `max` in v2, a number near 2^63 in v1.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|bytes| *bytes < 1 << 60)
}

/// Bytes of page cache of files in `memory.stat`: the kernel drops them before it fails an allocation.
fn file_cache(stat: &str, prefix: &str) -> u64 {
    let value = |line: &str| {
        let (key, value) = line.split_once(' ')?;
        let is_file = matches!(key.strip_prefix(prefix)?, "inactive_file" | "active_file");
        is_file.then(|| value.trim().parse::<u64>().ok())?
    };
    stat.lines().filter_map(value).sum()
}

/// Bytes of a `Name:   123 kB` line of a file under `/proc`.
pub(crate) fn kib_field(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key))?;
    value.trim().strip_suffix("kB")?.trim_end().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const MIB: u64 = 1 << 20;
    const MEMINFO: &str = "MemTotal:       24684092 kB\nMemFree:         942996 kB\nMemAvailable:    8388608 kB\n";
    const STATUS: &str =
        "Name:\thobbit\nVmRSS:\t   90000 kB\nRssAnon:\t   51200 kB\nRssFile:\t   30000 kB\nRssShmem:\t       0 kB\n";
    const V2_MOUNT: &str = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1_MOUNTS: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
         32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
         35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
         41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
    const V1_CGROUP: &str = "9:name=systemd:/\n4:memory:/jobs/a62b\n1:cpu:/\n0::/\n";

    fn limits(files: &[(&str, &str)]) -> MemoryLimits {
        let files: HashMap<&Path, &str> = files.iter().map(|(path, text)| (Path::new(*path), *text)).collect();
        MemoryLimits::from_files(&|path| files.get(path).map(|text| (*text).to_owned()))
    }

    #[test]
    fn the_machine_alone() {
        let found = limits(&[("/proc/meminfo", MEMINFO), ("/proc/self/status", STATUS)]);
        assert_eq!(found, MemoryLimits { mem_available: Some(8192 * MIB), cgroup: None, own: 50 * MIB });
        assert_eq!(found.budget(), Some((8242 * MIB, BudgetSource::MemAvailable)));
    }

    #[test]
    fn nothing_is_known_without_proc() {
        assert_eq!(limits(&[]), MemoryLimits::default());
        assert_eq!(limits(&[]).budget(), None);
    }

    #[test]
    fn v2_takes_the_tightest_of_nested_groups() {
        let found = limits(&[
            ("/proc/meminfo", MEMINFO),
            ("/proc/self/cgroup", "0::/user.slice/run.scope\n"),
            ("/proc/self/mountinfo", V2_MOUNT),
            ("/sys/fs/cgroup/user.slice/run.scope/memory.max", "4294967296\n"),
            ("/sys/fs/cgroup/user.slice/run.scope/memory.high", "max\n"),
            ("/sys/fs/cgroup/user.slice/run.scope/memory.current", "104857600\n"),
            ("/sys/fs/cgroup/user.slice/memory.max", "3221225472\n"),
            ("/sys/fs/cgroup/user.slice/memory.current", "2147483648\n"),
            (
                "/sys/fs/cgroup/user.slice/memory.stat",
                "anon 1048576\nfile 1610612736\ninactive_anon 5\ninactive_file 1073741824\nactive_file 536870912\n",
            ),
        ]);
        let cgroup = found.cgroup.clone().unwrap();
        assert_eq!(cgroup.path, Path::new("/sys/fs/cgroup/user.slice"));
        assert_eq!((cgroup.limit, cgroup.used), (3072 * MIB, 512 * MIB));
        assert_eq!(found.budget(), Some((2560 * MIB, BudgetSource::Cgroup)));
    }

    #[test]
    fn v2_high_limits_like_max() {
        let found = limits(&[
            ("/proc/self/cgroup", "0::/"),
            ("/proc/self/mountinfo", V2_MOUNT),
            ("/sys/fs/cgroup/memory.max", "max\n"),
            ("/sys/fs/cgroup/memory.high", "1073741824\n"),
            ("/sys/fs/cgroup/memory.current", "0\n"),
        ]);
        assert_eq!(found.budget(), Some((1024 * MIB, BudgetSource::Cgroup)));
    }

    #[test]
    fn v1_reads_totals_and_walks_up_past_a_group_without_limit() {
        let found = limits(&[
            ("/proc/meminfo", MEMINFO),
            ("/proc/self/status", STATUS),
            ("/proc/self/cgroup", V1_CGROUP),
            ("/proc/self/mountinfo", V1_MOUNTS),
            ("/sys/fs/cgroup/memory/jobs/a62b/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/jobs/a62b/memory.usage_in_bytes", "104857600\n"),
            ("/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", "1887436800\n"),
            ("/sys/fs/cgroup/memory/jobs/memory.usage_in_bytes", "314572800\n"),
            (
                "/sys/fs/cgroup/memory/jobs/memory.stat",
                "inactive_file 12288\nactive_file 163840\ntotal_inactive_file 104857600\ntotal_active_file 104857600\n",
            ),
        ]);
        let cgroup = found.cgroup.clone().unwrap();
        assert_eq!((cgroup.limit, cgroup.used), (1800 * MIB, 100 * MIB));
        assert_eq!(found.budget(), Some((1750 * MIB, BudgetSource::Cgroup)), "what we hold counts as ours");
    }

    #[test]
    fn a_group_without_limit_is_no_limit() {
        for (file, text) in [("memory.max", "max\n"), ("memory.limit_in_bytes", "9223372036854771712\n")] {
            let path = format!("/sys/fs/cgroup/{file}");
            let found =
                limits(&[("/proc/self/cgroup", "0::/"), ("/proc/self/mountinfo", V2_MOUNT), (path.as_str(), text)]);
            assert_eq!(found.cgroup, None, "{file}");
        }
    }

    #[test]
    fn containers_see_a_subtree_or_less() {
        let bind = "36 32 0:32 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let dirs = |cgroup, mountinfo| -> Vec<PathBuf> {
            memory_cgroups(cgroup, mountinfo).into_iter().map(|place| place.dir).collect()
        };
        let mount = Path::new("/sys/fs/cgroup/memory");
        assert_eq!(dirs("4:memory:/docker/ab/inner\n", bind), [mount.join("inner")]);
        assert_eq!(dirs("4:cpu,memory:/docker/ab\n", bind), [mount]);
        assert_eq!(dirs("4:memory:/elsewhere\n", bind), [mount]);
        assert_eq!(dirs("0::/../../init.scope\n", V2_MOUNT), [Path::new("/sys/fs/cgroup")]);
        assert_eq!(dirs("0::/\n", bind), Vec::<PathBuf>::new());
        assert_eq!(dirs("nonsense\n4:memory\n", bind), Vec::<PathBuf>::new());
    }

    #[test]
    fn damaged_files_are_unknown_not_zero() {
        assert_eq!(kib_field("MemAvailable: lots\n", "MemAvailable:"), None);
        assert_eq!(kib_field("MemAvailable: 18446744073709551615 kB", "MemAvailable:"), None);
        assert_eq!(cgroup_mount("35 24 0:30 / /sys/fs/cgroup rw - cgroup2", CgroupVersion::V2), None);
        assert_eq!(file_cache("inactive_file x\nactive_file\n", ""), 0);
    }
}
