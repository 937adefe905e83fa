//! The machine of a forecast: given, measured, or assumed.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::PathBuf;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use hobbit_core::expert::Extent;
use hobbit_core::forecast::{Cpu, Device, Host};
use hobbit_core::gguf::{GgmlType, Gguf};
use hobbit_core::plan::{MemoryLimits, MemoryPlan};
use hobbit_core::store::{self, StoreKind, measure_random_read, probe};
use hobbit_core::units::{MIB, parse_bytes};
use serde::Serialize;

/// An ordinary NVMe drive, assumed if no rate is given and there is no file to read.
const DISK_ASSUMED: f64 = 3e9;
/// Time for one measurement.
const BUDGET: Duration = Duration::from_millis(500);
/// Bytes to measure memory bandwidth on: more than caches hold, little of any machine's memory.
const MEMORY_BYTES: usize = 256 << 20;
/// Words that are summed at a time.
const PART_WORDS: usize = 4096;
/// Disk reads: size, queue depth, maximum total bytes.
const READS: (u64, usize, u64) = (2 * MIB, 8, 2 << 30);

/// Bytes or operations per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate(pub f64);

impl FromStr for Rate {
    type Err = String;

    /// `5GB/s`, `800MB/s`, `1.5GiB/s`, `1TB/s`, and the same without `/s` or `B`: powers of 1000, with an `i` of 1024.
    fn from_str(text: &str) -> Result<Self, String> {
        rate(text, "B").ok_or_else(|| format!("'{text}' is no rate: expected 5GB/s, 800MB/s or 1.5GiB/s"))
    }
}

/// A positive number with a prefix and, if it is there, the unit and `/s`.
fn rate(text: &str, unit: &str) -> Option<Rate> {
    let text = text.trim();
    let text = text.strip_suffix("/s").unwrap_or(text);
    let text = text.strip_suffix(unit).unwrap_or(text).trim_end();
    let (text, base) = match text.strip_suffix('i') {
        Some(text) => (text, 1024.0),
        None => (text, 1000.0f64),
    };
    let last = text.chars().last()?;
    let power =
        ["k", "M", "G", "T"].iter().position(|prefix| last.eq_ignore_ascii_case(&prefix.chars().next().unwrap_or(' ')));
    let number = if power.is_some() { text[..text.len() - 1].trim_end() } else { text };
    let power = power.map_or(0, |at| at as i32 + 1);
    let value = number.parse::<f64>().ok()? * base.powi(power);
    (value.is_finite() && value > 0.0).then_some(Rate(value))
}

/// `auto` or a rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DiskWish {
    Auto,
    Given(Rate),
}

impl FromStr for DiskWish {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" { Ok(Self::Auto) } else { text.parse().map(Self::Given) }
    }
}

/// `auto`, or memory bandwidth and, if it is known, operations per second of products with many rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CpuWish {
    Auto,
    Given(Rate, Option<Rate>),
}

impl FromStr for CpuWish {
    type Err = String;

    /// `auto`, `60GB/s`, `60GB/s,800GFLOP/s`.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let Some((memory, operations)) = text.split_once(',') else {
            return text.parse().map(|rate| Self::Given(rate, None));
        };
        let operations =
            rate(operations, "FLOP").ok_or_else(|| format!("'{operations}' is no rate: expected 800GFLOP/s"))?;
        Ok(Self::Given(memory.parse()?, Some(operations)))
    }
}

/// Memory of a GPU and its bandwidth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuWish(pub Device);

impl FromStr for GpuWish {
    type Err = String;

    /// `24GiB@1TB/s`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (memory, bandwidth) = text.split_once('@').ok_or("expected memory and bandwidth, such as 24GiB@1TB/s")?;
        let memory = parse_bytes(memory).ok_or_else(|| format!("'{memory}' is no size: expected 24GiB"))?;
        Ok(Self(Device { memory, bandwidth: bandwidth.parse::<Rate>()?.0 }))
    }
}

/// Where a figure comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    Given,
    Measured,
    Assumed,
}

impl Origin {
    pub fn word(self) -> &'static str {
        match self {
            Self::Given => "given",
            Self::Measured => "measured here",
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
}

/// The values given on the command line.
#[derive(Clone, Copy, Debug)]
pub struct Wishes {
    pub ram: Option<u64>,
    pub disk: DiskWish,
    pub cpu: CpuWish,
    pub gpu: Option<Device>,
}

impl Machine {
    /// The requested machine; missing values are taken from this one. `gguf` is read to measure the disk if the file
    /// is complete; products are measured with `types`.
    ///
    /// # Errors
    /// The memory of this machine is unknown; a file cannot be read.
    pub fn of(wishes: &Wishes, gguf: Option<&Gguf>, types: &[GgmlType]) -> anyhow::Result<Self> {
        let (memory, memory_from) = match wishes.ram {
            Some(bytes) => (bytes, Origin::Given),
            None => {
                let (bytes, source) = MemoryLimits::read().budget().context(
                    "this system does not say how much memory is available; give --ram, for example --ram 16GiB",
                )?;
                (MemoryPlan::without_margin(bytes, source), Origin::Measured)
            }
        };
        let (disk, disk_from) = match (wishes.disk, gguf) {
            (DiskWish::Given(rate), _) => (rate.0, Origin::Given),
            (DiskWish::Auto, Some(gguf)) => (disk_bandwidth(gguf)?, Origin::Measured),
            (DiskWish::Auto, None) => (DISK_ASSUMED, Origin::Assumed),
        };
        let (cpu, cpu_from) = match wishes.cpu {
            CpuWish::Given(memory, operations) => {
                let operations = operations.map(|rate| rate.0);
                (Cpu { memory: memory.0, by_type: BTreeMap::new(), operations }, Origin::Given)
            }
            CpuWish::Auto => {
                let cpu = Cpu { memory: memory_bandwidth(), by_type: products_by_type(types), operations: None };
                (cpu, Origin::Measured)
            }
        };
        Ok(Self { host: Host { memory, disk, cpu, device: wishes.gpu }, memory_from, disk_from, cpu_from })
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

/// Bandwidth of memory: all cores sum the same bytes repeatedly for half a second. The best time counts, because
/// other programs disturb this measurement but not the later run.
fn memory_bandwidth() -> f64 {
    let n = thread::available_parallelism().map_or(1, |n| n.get());
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
#[cfg(feature = "engine")]
fn products_by_type(types: &[GgmlType]) -> BTreeMap<GgmlType, f64> {
    let budget = BUDGET / types.len().max(1) as u32;
    let rate = |dtype: &GgmlType| Some((*dtype, hobbit::engine::cpu_bytes_per_second(*dtype, budget)?));
    types.iter().filter_map(rate).collect()
}

#[cfg(not(feature = "engine"))]
fn products_by_type(_types: &[GgmlType]) -> BTreeMap<GgmlType, f64> {
    BTreeMap::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_decimal_unless_they_say_otherwise() {
        for (text, rate) in [
            ("5GB/s", 5e9),
            ("5G", 5e9),
            ("800 MB/s", 8e8),
            ("1.5GiB/s", 1.5 * (1u64 << 30) as f64),
            ("1TB/s", 1e12),
            ("4096", 4096.0),
            ("64kB/s", 64e3),
        ] {
            assert_eq!(text.parse(), Ok(Rate(rate)), "{text}");
        }
        for bad in ["", "0", "-1GB/s", "GB/s", "fast", "1XB/s", "nan", "inf", "/s", "é"] {
            assert!(bad.parse::<Rate>().is_err(), "{bad}");
        }
    }

    #[test]
    fn machines_are_read() {
        assert_eq!("auto".parse(), Ok(CpuWish::Auto));
        assert_eq!("60GB/s".parse(), Ok(CpuWish::Given(Rate(6e10), None)));
        assert_eq!("60GB/s,800GFLOP/s".parse(), Ok(CpuWish::Given(Rate(6e10), Some(Rate(8e11)))));
        assert!("60GB/s,much".parse::<CpuWish>().is_err());
        let gpu = GpuWish(Device { memory: 24 << 30, bandwidth: 1e12 });
        assert_eq!("24GiB@1TB/s".parse(), Ok(gpu));
        for bad in ["24GiB", "@1TB/s", "24GiB@", "x@y"] {
            assert!(bad.parse::<GpuWish>().is_err(), "{bad}");
        }
    }
}
