//! Processor, memory and limits. Only Linux tells quotas, load and ulimits.

use std::path::{Path, PathBuf};

use hobbit_core::plan::{BudgetSource, MemoryLimits, MemoryPlan};
use serde::Serialize;
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

use super::Part;

/// Reads files of the system; `None` for those that are not there.
pub type Read<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// The processor and the memory, as `sysinfo` reads them on every system.
#[derive(Clone, Debug, Default)]
pub struct Machine {
    pub processor: Option<String>,
    /// Logical cores.
    pub cores: Option<usize>,
    pub memory: Option<u64>,
    pub swap: Option<u64>,
}

impl Machine {
    pub fn read() -> Self {
        let parts = RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing());
        let system = System::new_with_specifics(parts.with_memory(MemoryRefreshKind::everything()));
        let name = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned());
        Self {
            processor: name.filter(|name| !name.is_empty()),
            cores: Some(system.cpus().len()).filter(|&cores| cores > 0),
            memory: Some(system.total_memory()).filter(|&bytes| bytes > 0),
            swap: Some(system.total_swap()),
        }
    }
}

/// Instruction sets: llama.cpp's name, and the names in `/proc/cpuinfo`.
const KERNELS: [(&str, &[&str]); 16] = [
    ("SSE3", &["pni", "sse3"]),
    ("AVX", &["avx"]),
    ("AVX2", &["avx2"]),
    ("FMA", &["fma"]),
    ("F16C", &["f16c"]),
    ("BMI2", &["bmi2"]),
    ("AVX_VNNI", &["avx_vnni"]),
    ("AVX512", &["avx512f"]),
    ("AVX512_VBMI", &["avx512vbmi"]),
    ("AVX512_VNNI", &["avx512_vnni"]),
    ("AVX512_BF16", &["avx512_bf16"]),
    ("AMX_INT8", &["amx_int8"]),
    ("NEON", &["asimd", "neon"]),
    ("DOTPROD", &["asimddp"]),
    ("MATMUL_INT8", &["i8mm"]),
    ("SVE", &["sve"]),
];

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Processor {
    pub name: Part<String>,
    /// Instruction sets that llama.cpp was built for, and uses.
    pub used: Vec<String>,
    /// Instruction sets that the processor has and this build does not use.
    pub left_out: Vec<String>,
    /// llama.cpp's own words.
    pub system_info: String,
    /// Logical cores of the machine.
    pub cores: Part<usize>,
    /// Cores that this process may use, by affinity and quota.
    pub usable: usize,
    /// Why these are fewer.
    pub limits: Vec<String>,
    /// Programs that wanted a core in the last minute.
    pub load: Option<f64>,
}

impl Processor {
    /// `usable` is the standard library's count, which hobbit's threads follow; `system_info` llama.cpp's line.
    pub fn of(machine: &Machine, read: Read<'_>, system_info: String, usable: usize) -> Self {
        let file = |path: &str| read(Path::new(path)).unwrap_or_default();
        let cpuinfo = file("/proc/cpuinfo");
        let field = |key: &str| {
            let line = cpuinfo.lines().find_map(|line| line.split_once(':').filter(|(name, _)| name.trim() == key));
            line.map(|(_, value)| value.trim().to_owned()).filter(|value| !value.is_empty())
        };
        let flags = field("flags").or_else(|| field("Features")).unwrap_or_else(detected);
        let has = |names: &[&str]| flags.split(' ').any(|flag| names.contains(&flag));
        let used = switched_on(&system_info);
        let left_out = KERNELS.iter().filter(|(name, names)| has(names) && !used.iter().any(|used| used == name));
        let cores = machine.cores;
        let allowed =
            file("/proc/self/status").lines().find_map(|line| n_in_list(line.strip_prefix("Cpus_allowed_list:")?));
        let mut limits = Vec::new();
        if let Some(allowed) = allowed.filter(|allowed| cores.is_some_and(|cores| *allowed < cores)) {
            limits.push(format!("affinity allows {allowed} (taskset, cpuset)"));
        }
        if let Some(quota) = cpu_quota(read).filter(|quota| cores.is_some_and(|cores| *quota < cores as f64)) {
            limits.push(format!("the control group's quota is {quota:.1} cores"));
        }
        Self {
            name: Part::of(machine.processor.clone(), "this system does not name it"),
            left_out: left_out.map(|(name, _)| (*name).to_owned()).collect(),
            used,
            system_info,
            cores: Part::of(cores, "this system does not count them"),
            usable,
            limits,
            load: file("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()),
        }
    }
}

/// Instruction sets of this processor, as in `/proc/cpuinfo`: for systems without that file.
fn detected() -> String {
    let mut names = Vec::new();
    #[cfg(target_arch = "x86_64")]
    macro_rules! detect {
        ($($name:literal $feature:tt),+) => {
            $(if std::arch::is_x86_feature_detected!($feature) { names.push($name); })+
        };
    }
    #[cfg(target_arch = "aarch64")]
    macro_rules! detect {
        ($($name:literal $feature:tt),+) => {
            $(if std::arch::is_aarch64_feature_detected!($feature) { names.push($name); })+
        };
    }
    #[cfg(target_arch = "x86_64")]
    detect!("sse3" "sse3", "avx" "avx", "avx2" "avx2", "fma" "fma", "f16c" "f16c", "bmi2" "bmi2",
        "avx512f" "avx512f", "avx512vbmi" "avx512vbmi", "avx512_vnni" "avx512vnni", "avx512_bf16" "avx512bf16");
    #[cfg(target_arch = "aarch64")]
    detect!("asimd" "neon", "asimddp" "dotprod", "i8mm" "i8mm", "sve" "sve");
    names.join(" ")
}

/// Names that `llama_print_system_info` gives the value 1.
fn switched_on(system_info: &str) -> Vec<String> {
    let words = system_info.split(['|', ':']).filter_map(|part| part.trim().strip_suffix("= 1"));
    words.map(|name| name.trim().to_owned()).collect()
}

/// The program that made the container around this process, if there is one.
pub fn container(read: Read<'_>) -> Option<String> {
    let file = |path: &str| read(Path::new(path));
    let named = file("/run/systemd/container").map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
    named
        .or_else(|| file("/run/.containerenv").map(|_| "podman".to_owned()))
        .or_else(|| file("/.dockerenv").map(|_| "docker".to_owned()))
}

/// How many numbers a list such as `0-3,8` has.
fn n_in_list(list: &str) -> Option<usize> {
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        last.checked_sub(first).map(|more| more + 1)
    };
    list.trim().split(',').map(range).sum()
}

/// The least quota of the control groups around this process, in cores.
fn cpu_quota(read: Read<'_>) -> Option<f64> {
    let groups = read(Path::new("/proc/self/cgroup"))?;
    let quotas = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
        let mount = match controllers {
            "" => PathBuf::from("/sys/fs/cgroup"),
            list if list.split(',').any(|name| name == "cpu") => Path::new("/sys/fs/cgroup").join(list),
            _ => return None,
        };
        let dirs = path.split('/').scan(mount.clone(), |dir, name| {
            dir.push(name);
            Some(dir.clone())
        });
        // In a container the path may lie outside of the mount.
        std::iter::once(mount.clone()).chain(dirs).filter_map(|dir| quota_of(&dir, read)).reduce(f64::min)
    });
    quotas.reduce(f64::min)
}

fn quota_of(dir: &Path, read: Read<'_>) -> Option<f64> {
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|number| *number > 0.0);
    let file = |name: &str| read(&dir.join(name));
    if let Some(text) = file("cpu.max") {
        let (quota, period) = text.split_once(' ')?;
        return Some(number(quota)? / number(period)?);
    }
    Some(number(&file("cpu.cfs_quota_us")?)? / number(&file("cpu.cfs_period_us")?)?)
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Memory {
    pub total: Part<u64>,
    pub available: Part<u64>,
    pub swap: Option<u64>,
    /// Limit of the control group, and what is left of it; `None` without a limit.
    pub cgroup: Option<(u64, u64)>,
    /// `None` where the system has no such limits.
    pub ulimits: Option<Ulimits>,
    /// The memory that hobbit takes without `--mem-budget`.
    pub budget: Part<u64>,
    /// The limit that decides the budget.
    pub budget_from: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ulimits {
    /// `ulimit -v`; `None` for unlimited.
    pub address_space: Option<u64>,
    /// `ulimit -l`; `None` for unlimited.
    pub locked: Option<u64>,
}

impl Memory {
    pub fn of(machine: &Machine, read: Read<'_>, limits: &MemoryLimits) -> Self {
        let ulimits = read(Path::new("/proc/self/limits")).map(|text| {
            let soft = |key: &str| {
                let line = text.lines().find_map(|line| line.strip_prefix(key))?;
                line.split_whitespace().next()?.parse().ok()
            };
            Ulimits { address_space: soft("Max address space"), locked: soft("Max locked memory") }
        });
        let unknown = "this system does not say";
        let budget = limits.budget();
        Self {
            total: Part::of(machine.memory, unknown),
            available: Part::of(limits.mem_available, unknown),
            swap: machine.swap,
            cgroup: limits.cgroup.as_ref().map(|group| (group.limit, group.available())),
            ulimits,
            budget: Part::of(budget.map(|(bytes, source)| MemoryPlan::without_margin(bytes, source)), unknown),
            budget_from: budget.map(|(_, source)| match source {
                BudgetSource::Cgroup => format!("the {}'s limit", BudgetSource::GROUP),
                BudgetSource::MemAvailable | BudgetSource::Given => "available memory".to_owned(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn files(files: &[(&str, &str)]) -> impl Fn(&Path) -> Option<String> + use<> {
        let files: HashMap<PathBuf, String> = files.iter().map(|(path, text)| (path.into(), (*text).into())).collect();
        move |path| files.get(path).cloned()
    }

    const INFO: &str = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | AMX_INT8 = 0 | LLAMAFILE = 1 | ";

    #[test]
    fn kernels_that_a_build_leaves_out_are_named() {
        let machine = Machine { processor: Some("EPYC 9".to_owned()), cores: Some(16), ..Machine::default() };
        let cpuinfo = "processor : 0\nflags\t\t: pni avx avx2 avx512f amx_int8\n";
        let read = files(&[
            ("/proc/cpuinfo", cpuinfo),
            ("/proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-3,8\n"),
            ("/proc/self/cgroup", "0::/user.slice/a.scope\n"),
            ("/sys/fs/cgroup/user.slice/cpu.max", "250000 100000\n"),
            ("/sys/fs/cgroup/user.slice/a.scope/cpu.max", "max 100000\n"),
            ("/proc/loadavg", "0.50 1 1 1/2 3\n"),
        ]);
        let found = Processor::of(&machine, &read, INFO.to_owned(), 2);
        assert_eq!(found.name, Part::Known("EPYC 9".to_owned()));
        assert_eq!(
            (&*found.used.join(" "), &*found.left_out.join(" ")),
            ("SSE3 AVX AVX2 LLAMAFILE", "AVX512 AMX_INT8")
        );
        assert_eq!((found.cores, found.usable, found.load), (Part::Known(16), 2, Some(0.5)));
        assert_eq!(found.limits, ["affinity allows 5 (taskset, cpuset)", "the control group's quota is 2.5 cores"]);
    }

    #[test]
    fn containers_are_named() {
        assert_eq!(container(&files(&[("/run/systemd/container", "lxc\n"), ("/.dockerenv", "")])).unwrap(), "lxc");
        assert_eq!(container(&files(&[("/run/.containerenv", "")])).unwrap(), "podman");
        assert_eq!(container(&files(&[("/.dockerenv", "")])).unwrap(), "docker");
        assert_eq!(container(&files(&[])), None);
    }

    #[test]
    fn quotas_of_the_first_version_count() {
        let read = files(&[
            ("/proc/self/cgroup", "4:memory:/jobs\n3:cpu,cpuacct:/jobs\n"),
            ("/sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us", "150000\n"),
            ("/sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us", "100000\n"),
            ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
        ]);
        assert_eq!(cpu_quota(&read), Some(1.5));
        assert_eq!((n_in_list("0"), n_in_list(""), n_in_list("3-1")), (Some(1), None, None));
    }

    #[test]
    fn a_part_that_the_system_does_not_tell_says_so() {
        let found = Processor::of(&Machine::default(), &|_| None, String::new(), 4);
        assert!(matches!((&found.name, &found.cores), (Part::Unknown { .. }, Part::Unknown { .. })));
        let memory = Memory::of(&Machine::default(), &|_| None, &MemoryLimits::default());
        assert!(matches!((&memory.total, &memory.budget), (Part::Unknown { .. }, Part::Unknown { .. })));
        assert_eq!((memory.ulimits, memory.swap), (None, None));
    }

    #[test]
    fn this_machine() {
        let machine = Machine::read();
        assert!(machine.processor.is_some() && machine.memory > Some(1 << 28), "{machine:?}");
        let usable = std::thread::available_parallelism().unwrap().get();
        assert!(machine.cores >= Some(usable), "{machine:?}, usable {usable}");
        // With all that the processor has, nothing is left out.
        let flags = format!("flags : {}\n", detected());
        let of = |info: &str| {
            let read = files(&[("/proc/cpuinfo", &*flags)]);
            Processor::of(&machine, &read, info.to_owned(), usable).left_out
        };
        assert!(!of("").is_empty());
        let all: String = KERNELS.iter().map(|(name, _)| format!("{name} = 1 | ")).collect();
        assert_eq!(of(&all), [""; 0]);
    }

    #[test]
    fn limits_of_memory() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max locked memory         8388608              8388608              bytes     \n\
             Max address space         unlimited            unlimited            bytes     \n";
        let machine = Machine { memory: Some(2 << 20), swap: Some(0), ..Machine::default() };
        let read = files(&[("/proc/self/limits", limits)]);
        let memory = Memory::of(&machine, &read, &MemoryLimits { mem_available: Some(1 << 20), cgroup: None, own: 0 });
        assert_eq!((memory.total, memory.swap), (Part::Known(2 << 20), Some(0)));
        assert_eq!(memory.ulimits, Some(Ulimits { locked: Some(8 << 20), address_space: None }));
        assert_eq!((memory.available, memory.budget_from.as_deref()), (Part::Known(1 << 20), Some("available memory")));
    }
}
