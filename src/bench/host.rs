//! The environment of a result: the machine, without its name or paths, and the code.

#[cfg(target_os = "linux")]
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

/// Machine, kernel, code.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Name of the directory of results.
    pub machine: String,
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    pub ram_bytes: u64,
    pub kernel: String,
    pub os: String,
    /// The disk of the model.
    pub disk: DiskKind,
    /// The commit that was built, or `unknown`.
    pub commit: String,
    pub hobbit: String,
    pub llama_cpp_sys: String,
    /// CPU features that llama.cpp uses.
    pub system_info: String,
}

/// The disk of the model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskKind {
    /// `nvme`, `virtio`, `ssd`, `hdd`, or `unknown`.
    pub kind: String,
    pub model: Option<String>,
    /// The kernel's read-ahead, which page faults depend on.
    pub read_ahead_kib: Option<u64>,
    pub scheduler: Option<String>,
}

impl Host {
    /// This machine, and the disk that holds `model`.
    pub fn describe(model: &Path) -> Self {
        let parts = RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing());
        let system = System::new_with_specifics(parts.with_memory(MemoryRefreshKind::nothing().with_ram()));
        let name = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned()).filter(|name| !name.is_empty());
        let cpu = name.unwrap_or_else(|| std::env::consts::ARCH.to_owned());
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let ram_bytes = system.total_memory();
        let disk = DiskKind::of(model);
        let ram_gib = (ram_bytes as f64 / (1u64 << 30) as f64).round();
        Self {
            machine: sanitised(&format!("{cpu} {cores}c {ram_gib}gib {}", disk.kind)),
            cpu,
            cores,
            ram_bytes,
            kernel: System::kernel_version().unwrap_or_default(),
            os: System::long_os_version().unwrap_or_default(),
            disk,
            commit: env!("HOBBIT_COMMIT").to_owned(),
            hobbit: env!("CARGO_PKG_VERSION").to_owned(),
            llama_cpp_sys: env!("HOBBIT_LLAMA_CPP_SYS").to_owned(),
            system_info: system_info(),
        }
    }
}

impl DiskKind {
    #[cfg(not(target_os = "linux"))]
    fn of(_: &Path) -> Self {
        Self { kind: "unknown".to_owned(), ..Self::default() }
    }

    #[cfg(target_os = "linux")]
    fn of(model: &Path) -> Self {
        use std::os::unix::fs::MetadataExt;
        let unknown = Self { kind: "unknown".to_owned(), ..Self::default() };
        let Ok(metadata) = fs::metadata(model) else { return unknown };
        let (major, minor) = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
        let Ok(mut device) = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")) else { return unknown };
        if device.join("partition").exists() {
            device.pop();
        }
        let name = device.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let queue = |file: &str| fs::read_to_string(device.join("queue").join(file)).unwrap_or_default();
        let kind = match () {
            () if name.starts_with("nvme") => "nvme",
            () if name.starts_with("vd") => "virtio",
            () if queue("rotational").trim() == "1" => "hdd",
            () if queue("rotational").trim() == "0" => "ssd",
            () => "unknown",
        };
        let scheduler = queue("scheduler");
        let scheduler = scheduler.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(name, _)| name);
        let model = fs::read_to_string(device.join("device/model")).unwrap_or_default();
        Self {
            kind: kind.to_owned(),
            model: Some(model.trim().to_owned()).filter(|model| !model.is_empty()),
            read_ahead_kib: queue("read_ahead_kb").trim().parse().ok(),
            scheduler: scheduler.map(str::to_owned),
        }
    }
}

/// CPU features that llama.cpp uses; empty without the engine.
fn system_info() -> String {
    #[cfg(feature = "engine")]
    return hobbit::engine::system_info();
    #[cfg(not(feature = "engine"))]
    String::new()
}

/// Lower-case words joined by `-`, safe in a file name.
pub fn sanitised(text: &str) -> String {
    let lower = text.to_lowercase();
    let words = lower.split(|letter: char| !letter.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-")
}
