//! The machine of a forecast: given, measured, or assumed.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use hobbit::{DeviceInfo, DeviceKind};
use hobbit_core::expert::Extent;
use hobbit_core::forecast::{Cpu, Device, Host};
use hobbit_core::gguf::{GgmlType, Gguf};
use hobbit_core::plan::{MemoryLimits, MemoryPlan};
use hobbit_core::store::{self, StoreKind, measure_random_read, probe};
use hobbit_core::units::MIB;
use serde::Serialize;

use super::published;
use crate::shared::size;

/// An ordinary NVMe drive, assumed if no rate is given and there is no file to read.
const DISK_ASSUMED: f64 = 3e9;
/// Time for one measurement.
const BUDGET: Duration = Duration::from_millis(500);
/// Measurements of the processor, of which the best counts.
const ROUNDS: usize = 3;
/// Bytes to measure memory bandwidth on: more than caches hold, little of any machine's memory.
const MEMORY_BYTES: usize = 256 << 20;
/// Words that are summed at a time.
const PART_WORDS: usize = 4096;
/// Disk reads: size, queue depth, maximum total bytes.
const READS: (u64, usize, u64) = (2 * MIB, 8, 2 << 30);

/// A flag's value; `None` for `auto`. (clap treats `Option` itself as an optional flag.)
pub type Auto<T> = Option<T>;

/// `5GB/s`, `800MB/s`, `1.5GiB/s`, `1TB/s`, and the same without `/s` or the unit: powers of 1000, with an `i` of 1024.
fn rate(text: &str, unit: &str) -> Result<f64, String> {
    let parse = || {
        let text = text.trim();
        let text = text.strip_suffix("/s").unwrap_or(text);
        let text = text.strip_suffix(unit).unwrap_or(text).trim_end();
        let (text, base) = text.strip_suffix('i').map_or((text, 1000.0f64), |text| (text, 1024.0));
        let last = text.chars().last()?;
        let power = "kMGT".chars().position(|prefix| prefix.eq_ignore_ascii_case(&last));
        let number = if power.is_some() { text[..text.len() - 1].trim_end() } else { text };
        let value = number.parse::<f64>().ok()? * base.powi(power.map_or(0, |at| at as i32 + 1));
        (value.is_finite() && value > 0.0).then_some(value)
    };
    parse().ok_or_else(|| format!("'{text}' is no rate: expected 5G{unit}/s, 800M{unit}/s or 1.5Gi{unit}/s"))
}

/// A rate of a flag: in bytes per second, or the name of hardware with a published one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    pub bytes: f64,
    pub from: Origin,
}

impl Rate {
    fn parse(text: &str, published: fn(&str) -> Option<f64>, names: &str) -> Result<Self, String> {
        match published(text) {
            Some(bytes) => Ok(Self { bytes, from: Origin::Published }),
            None => match rate(text, "B") {
                Ok(bytes) => Ok(Self { bytes, from: Origin::Given }),
                Err(error) => Err(format!("{error}, or a name such as {names}")),
            },
        }
    }
}

/// Parses `auto`, `5GB/s` or `PCIe4`.
pub fn parse_disk(text: &str) -> Result<Auto<Rate>, String> {
    if text == "auto" { Ok(None) } else { Rate::parse(text, published::disk, "PCIe4 or SATA").map(Some) }
}

/// Parses `auto`, `60GB/s`, `60GB/s,800GFLOP/s` or `DDR5-5600x2`: memory bandwidth and operations per second of
/// products with many rows.
pub fn parse_cpu(text: &str) -> Result<Auto<(Rate, Option<f64>)>, String> {
    if text == "auto" {
        return Ok(None);
    }
    let (memory, operations) = text.split_once(',').map_or((text, None), |(memory, rest)| (memory, Some(rest)));
    let memory = Rate::parse(memory, published::memory, "DDR5-5600x2 (two channels)")?;
    Ok(Some((memory, operations.map(|text| rate(text, "FLOP")).transpose()?)))
}

/// A value of `--gpu`; `None` for `auto`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gpu {
    /// Forecast without one.
    Absent,
    Of(Device, Origin),
}

/// Parses `auto`, `none`, `RTX4090`, or memory, bandwidth and link of a GPU: `24GiB@1TB/s`, `24GiB@1TB/s,32GB/s`.
pub fn parse_gpu(text: &str) -> Result<Auto<Gpu>, String> {
    if let Some((memory, rates)) = text.split_once('@') {
        let (bandwidth, link) = rates.split_once(',').map_or((rates, None), |(rate, link)| (rate, Some(link)));
        let link = link.map(|text| rate(text, "B")).transpose()?;
        let device = Device { memory: size(memory)?, bandwidth: rate(bandwidth, "B")?, link };
        return Ok(Some(Gpu::Of(device, Origin::Given)));
    }
    match (text, published::gpu(text)) {
        ("auto", _) => Ok(None),
        ("none", _) => Ok(Some(Gpu::Absent)),
        (_, Some(device)) => Ok(Some(Gpu::Of(device, Origin::Published))),
        (_, None) => {
            let names: Vec<&str> = published::gpu_names().collect();
            Err(format!(
                "'{text}' is not in the list of GPUs: {}; give memory and bandwidth, such as 24GiB@1TB/s",
                names.join(", ")
            ))
        }
    }
}

/// This machine's GPUs, as far as a forecast knows them.
#[derive(Clone, Debug, Default, PartialEq)]
struct Found {
    device: Option<Device>,
    /// Names of the GPUs, whether or not their rates are known.
    names: Vec<String>,
}

impl Found {
    /// The GPUs that this build can use.
    fn here() -> Self {
        // Without devices the forecast is that of the processor.
        Self::among(&hobbit::devices(&[]).unwrap_or_default())
    }

    /// GPUs of one backend together: their memories, and the rates of the slowest. A GPU in the host's memory has none
    /// of its own.
    fn among(devices: &[DeviceInfo]) -> Self {
        let backend = |device: &DeviceInfo| device.name.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
        let gpus = || devices.iter().filter(|device| device.kind == DeviceKind::Gpu && !device.unified);
        let first = gpus().next().map(backend);
        let gpus: Vec<&DeviceInfo> = gpus().filter(|device| Some(backend(device)) == first).collect();
        let known = |gpu: &&DeviceInfo| {
            let memory = [gpu.free, gpu.total].into_iter().find(|bytes| *bytes > 0)?;
            Some(Device { memory, ..published::gpu(&gpu.description)? })
        };
        let joined = |a: Device, b: Device| Device {
            memory: a.memory + b.memory,
            bandwidth: a.bandwidth.min(b.bandwidth),
            link: a.link.zip(b.link).map(|(a, b)| a.min(b)),
        };
        let device = gpus.iter().map(known).collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().reduce(joined));
        Self { device, names: gpus.iter().map(|gpu| gpu.description.clone()).collect() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    Given,
    Published,
    Measured,
    /// A GPU of this machine: its memory is free memory, its rates are published.
    Found,
    Assumed,
}

impl Origin {
    pub fn word(self) -> &'static str {
        match self {
            Self::Given => "given",
            Self::Published => "published: an upper bound",
            Self::Measured => "measured here",
            Self::Found => "found here, with published rates: an upper bound",
            Self::Assumed => "assumed",
        }
    }
}

/// A machine, and the source of each figure.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    #[serde(flatten)]
    pub host: Host,
    pub memory_from: Origin,
    pub disk_from: Origin,
    pub cpu_from: Origin,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_from: Option<Origin>,
    /// Names of this machine's GPUs, if they were looked for. Without [`Host::device`] their rates are unknown.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<String>,
    /// Programs that wanted a core in the last minute, where something was measured and they wanted many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load: Option<f64>,
}

/// The load average in the text of `/proc/loadavg`, if others want more than half of `n_cores`.
fn high_load(text: &str, n_cores: usize) -> Option<f64> {
    let load = text.split_whitespace().next()?.parse::<f64>().ok()?;
    (load > n_cores as f64 / 2.0).then_some(load)
}

impl Machine {
    /// The requested machine; missing values are taken from this one. `gguf` is read to measure the disk if the file
    /// is complete; products are measured with `types`.
    pub fn of(args: &super::Args, gguf: Option<&Gguf>, types: &[GgmlType]) -> anyhow::Result<Self> {
        let (memory, memory_from) = match args.ram {
            Some(bytes) => (bytes, Origin::Given),
            None => {
                let (bytes, source) = MemoryLimits::read().budget().context(
                    "this system does not say how much memory is available; give --ram, for example --ram 16GiB",
                )?;
                (MemoryPlan::without_margin(bytes, source), Origin::Measured)
            }
        };
        let (disk, disk_from) = match (args.disk, gguf) {
            (Some(rate), _) => (rate.bytes, rate.from),
            (None, Some(gguf)) => (disk_bandwidth(gguf)?, Origin::Measured),
            (None, None) => (DISK_ASSUMED, Origin::Assumed),
        };
        let loadavg = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let is_measured = args.cpu.is_none() || disk_from == Origin::Measured;
        let load = high_load(&loadavg, cores()).filter(|_| is_measured);
        let (cpu, cpu_from) = match args.cpu {
            Some((memory, operations)) => {
                (Cpu { memory: memory.bytes, by_type: BTreeMap::new(), operations }, memory.from)
            }
            None => {
                let memory = best(memory_bandwidth);
                let cpu = Cpu { memory, by_type: products_by_type(types), operations: None };
                (cpu, Origin::Measured)
            }
        };
        let (device, gpu_from, gpus) = match args.gpu {
            Some(Gpu::Absent) => (None, None, Vec::new()),
            Some(Gpu::Of(device, from)) => (Some(device), Some(from), Vec::new()),
            None => {
                let Found { device, names } = Found::here();
                (device, device.map(|_| Origin::Found), names)
            }
        };
        Ok(Self { host: Host { memory, disk, cpu, device }, memory_from, disk_from, cpu_from, gpu_from, gpus, load })
    }
}

/// Random reads of the model's own file.
fn disk_bandwidth(gguf: &Gguf) -> anyhow::Result<f64> {
    let file = &gguf.files[0];
    let direct = probe::direct(&file.path).and_then(|()| probe::io_uring());
    let kind = if direct.is_ok() { StoreKind::Direct } else { StoreKind::Buffered };
    let paths: Vec<PathBuf> = vec![file.path.clone()];
    let store = store::open(kind, &paths)?;
    let whole = [Extent { file: 0, offset: 0, len: file.len }];
    let (bytes, depth, most) = READS;
    let measured = measure_random_read(&*store, &whole, bytes.min(file.len).max(1), depth, most, BUDGET)?;
    let rate = measured.bytes_per_second();
    anyhow::ensure!(rate > 0.0, "{}: nothing could be read to measure its disk; give --disk", file.path.display());
    Ok(rate)
}

fn cores() -> usize {
    thread::available_parallelism().map_or(1, |n| n.get())
}

/// The best of several measurements: other programs disturb them, but not the later run.
fn best(measure: impl Fn() -> f64) -> f64 {
    (0..ROUNDS).map(|_| measure()).fold(0.0, f64::max)
}

/// Bandwidth of memory: all cores sum the same bytes repeatedly. The best time counts.
fn memory_bandwidth() -> f64 {
    let n = cores();
    let words = vec![1u64; MEMORY_BYTES / size_of::<u64>()];
    let started = Instant::now();
    let mut best = f64::INFINITY;
    while best.is_infinite() || started.elapsed() < BUDGET {
        let round = Instant::now();
        thread::scope(|scope| {
            for own in words.chunks(words.len().div_ceil(n)) {
                scope.spawn(|| {
                    // Keep it simple: with AVX-512 the compiler turns several sums into gathers, a tenth as fast.
                    for part in own.chunks(PART_WORDS) {
                        black_box(part.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
                    }
                });
            }
        });
        best = best.min(round.elapsed().as_secs_f64());
    }
    MEMORY_BYTES as f64 / best
}

/// Speed of ggml's own products with these types: fewer bits take more time per byte.
fn products_by_type(types: &[GgmlType]) -> BTreeMap<GgmlType, f64> {
    let budget = BUDGET / types.len().max(1) as u32;
    let measure = |dtype| best(|| hobbit::engine::cpu_bytes_per_second(dtype, budget).unwrap_or(0.0));
    let rate = |dtype: &GgmlType| Some((*dtype, measure(*dtype))).filter(|(_, rate)| *rate > 0.0);
    types.iter().filter_map(rate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_high_load_is_noticed() {
        assert_eq!(high_load("5.20 2.10 1.00 3/200 99", 2), Some(5.2));
        assert_eq!((high_load("0.90 9 9 1/2 3", 2), high_load("", 2)), (None, None));
        let measured = std::cell::Cell::new(0.0);
        let next = || measured.replace(measured.get() + 1.0);
        assert_eq!((best(next), measured.get()), (2.0, 3.0), "the best of three");
    }

    #[test]
    fn rates_and_machines_are_parsed() {
        let given = |bytes| Rate { bytes, from: Origin::Given };
        for (text, rate) in [
            ("5GB/s", 5e9),
            ("5G", 5e9),
            ("800 MB/s", 8e8),
            ("1.5GiB/s", 1.5 * (1u64 << 30) as f64),
            ("1TB/s", 1e12),
            ("4096", 4096.0),
            ("64kB/s", 64e3),
        ] {
            assert_eq!(parse_disk(text), Ok(Some(given(rate))), "{text}");
        }
        for bad in ["", "0", "-1GB/s", "GB/s", "fast", "1XB/s", "nan", "inf", "/s", "\u{e9}"] {
            assert!(parse_disk(bad).is_err(), "{bad}");
        }
        assert_eq!((parse_disk("auto"), parse_cpu("auto")), (Ok(None), Ok(None)));
        assert_eq!(parse_cpu("60GB/s"), Ok(Some((given(6e10), None))));
        assert_eq!(parse_cpu("60GB/s,800GFLOP/s"), Ok(Some((given(6e10), Some(8e11)))));
        let published = |bytes| Rate { bytes, from: Origin::Published };
        assert_eq!(parse_cpu("DDR4-3200x2,1TFLOP/s"), Ok(Some((published(51.2e9), Some(1e12)))));
        assert_eq!(parse_disk("SATA"), Ok(Some(published(0.6e9))));
        assert!(parse_cpu("60GB/s,much").is_err());
    }

    #[test]
    fn gpus_are_given_by_their_rates_or_by_name() {
        let device = |link| Device { memory: 24 << 30, bandwidth: 1e12, link };
        assert_eq!(parse_gpu("24GiB@1TB/s"), Ok(Some(Gpu::Of(device(None), Origin::Given))));
        assert_eq!(parse_gpu("24GiB@1TB/s,32GB/s"), Ok(Some(Gpu::Of(device(Some(32e9)), Origin::Given))));
        assert_eq!((parse_gpu("auto"), parse_gpu("none")), (Ok(None), Ok(Some(Gpu::Absent))));
        let named = published::gpu("RTX4090").unwrap();
        assert_eq!(parse_gpu("rtx4090"), Ok(Some(Gpu::Of(named, Origin::Published))));
        let bad = ["24GiB", "@1TB/s", "24GiB@", "x@y", "24@1TB/s", "24GiB@1TB/s,", "RTX4090@1TB/s"];
        assert!(bad.into_iter().all(|bad| parse_gpu(bad).is_err()));
        assert!(parse_gpu("RTX9999").unwrap_err().contains("GTX1080Ti, RTX2080Ti, "));
    }

    #[test]
    fn gpus_of_this_machine_are_used_if_their_rates_are_known() {
        let gpu = |name: &str, description: &str, kind| DeviceInfo {
            name: name.to_owned(),
            description: description.to_owned(),
            kind,
            free: 20 << 30,
            total: 24 << 30,
            pinned_host: true,
            asynchronous: true,
            events: true,
            unified: false,
        };
        let (card, host) = (DeviceKind::Gpu, gpu("CPU", "a processor", DeviceKind::Cpu));
        assert_eq!(Found::among(std::slice::from_ref(&host)), Found::default());
        let two = [
            gpu("CUDA0", "NVIDIA GeForce RTX 4090", card),
            gpu("CUDA1", "NVIDIA GeForce RTX 3060", card),
            gpu("Vulkan0", "NVIDIA GeForce RTX 4090", card),
            host,
        ];
        let both = Found::among(&two).device.unwrap();
        assert_eq!((both.memory, both.bandwidth), (40 << 30, 360e9), "the free memory of both, at the slower rate");
        let unknown = Found::among(&[two[0].clone(), gpu("CUDA1", "NVIDIA GeForce RTX 9999", card)]);
        assert_eq!((unknown.device, unknown.names.len()), (None, 2));
        assert_eq!(Found::among(&[gpu("CUDA0", "Orin", DeviceKind::Integrated)]), Found::default());
    }
}
