//! Figures of this machine, measured once: the speed of copies to a device, of file reads, and of an expert's product
//! on the CPU. They are the first estimates of [`crate::load::balance`]; a wrong one costs speed until it is corrected,
//! never a result.
//!
//! The measurements ([`Measure`]) and the time of day come from the caller. The figures are kept in a file of the
//! user's cache directory ([`cache_path`]): JSON, one entry per machine, newest first. A file that is damaged, too
//! large or of another program is ignored with a note and replaced.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, fs, io};

use etcetera::base_strategy::{BaseStrategy, choose_native_strategy};
use serde::{Deserialize, Serialize};

use crate::files;

/// The machine of figures: another device, driver, CPU or number of threads has others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The device's name, as ggml has it.
    pub device: String,
    /// Its description.
    pub device_description: String,
    /// Backend, its version, bus address and memory size, as text, which changes with the driver and the card.
    pub driver: String,
    /// The CPU's model.
    pub cpu: String,
    /// Threads that compute on the CPU.
    pub threads: u32,
}

/// Measured figures of one [`Machine`]. A figure that could not be measured is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// The machine.
    pub machine: Machine,
    /// From pinned host memory to the device, in bytes per second.
    pub upload_bytes_per_s: Option<f64>,
    /// From ordinary host memory to the device, in bytes per second.
    pub upload_pageable_bytes_per_s: Option<f64>,
    /// A copy of 64 bytes, submitted and awaited, in seconds.
    pub upload_latency_s: Option<f64>,
    /// Random reads of the size of an expert's slice, in bytes per second.
    pub file_bytes_per_s: Option<f64>,
    /// The disk that [`Calibration::file_bytes_per_s`] holds for ([`Wanted::disk`]).
    pub file_disk: Option<u64>,
    /// One row times an expert on the CPU, in seconds per weight byte, by the name of the element type.
    pub cpu_expert_seconds_per_byte: BTreeMap<String, f64>,
    /// When the first of them was measured, in seconds since 1970.
    pub measured_at: u64,
    /// Version of hobbit that measured.
    pub hobbit_version: String,
}

/// The figures that are needed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The machine.
    pub machine: Machine,
    /// Element types of experts, by name.
    pub element_types: Vec<String>,
    /// A number for the disk that a model is on (`st_dev`); `None`: no model, no file figure.
    pub disk: Option<u64>,
    /// Now, in seconds since 1970.
    pub now_unix_s: u64,
}

/// How fast bytes reach a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Upload {
    /// From pinned host memory, in bytes per second; `None` where the device offers none.
    pub pinned_bytes_per_s: Option<f64>,
    /// From ordinary host memory, in bytes per second.
    pub pageable_bytes_per_s: f64,
    /// A copy of 64 bytes, in seconds.
    pub latency_s: f64,
}

/// Measurements. Each call returns within `budget`, its own set-up included as far as possible, or the reason for the
/// user why there is no figure.
pub trait Measure {
    /// Copies from host memory to the device.
    fn upload(&mut self, budget: Duration) -> Result<Upload, String>;
    /// Reads from the model's file, in bytes per second.
    fn file_bytes_per_s(&mut self, budget: Duration) -> Result<f64, String>;
    /// One row times an expert on the CPU, in seconds per weight byte.
    fn cpu_seconds_per_byte(&mut self, element_type: &str, budget: Duration) -> Result<f64, String>;
}

/// Result of [`Calibration::load_or_measure`].
#[derive(Clone, Debug, PartialEq)]
pub struct Calibrated {
    /// The figures.
    pub calibration: Calibration,
    /// Notes for the user: a cache file that was ignored, a figure that could not be measured.
    pub notes: Vec<String>,
    /// Whether all of them came from the cache file.
    pub from_cache: bool,
}

impl Calibration {
    /// Time for all measurements together.
    pub const BUDGET: Duration = Duration::from_secs(1);
    /// Time for one figure: enough for a steady value.
    pub const FIGURE_BUDGET_MAX: Duration = Duration::from_millis(150);
    /// Figures older than that are measured again: drivers and cooling change.
    pub const AGE_MAX_S: u64 = 30 * 24 * 3600;
    /// Element types that are measured.
    pub const ELEMENT_TYPES_MAX: usize = 8;

    /// Takes the wanted figures from the file at `cache` (`None`: no file), measures the missing ones, and writes them
    /// back.
    ///
    /// A failure becomes a note, and its figure stays absent.
    pub fn load_or_measure(cache: Option<&Path>, wanted: &Wanted, measure: &mut dyn Measure) -> Calibrated {
        let mut notes = Vec::new();
        let mut known = cache.map_or_else(Vec::new, |path| {
            read(path).unwrap_or_else(|why| {
                notes.push(format!("{}: calibration ignored: {why}; measuring again", path.display()));
                Vec::new()
            })
        });
        let found = known.iter().position(|known| known.holds_for(wanted)).map(|at| known.remove(at));
        known.retain(|known| known.machine != wanted.machine);
        let mut calibration = found.unwrap_or_else(|| Self {
            machine: wanted.machine.clone(),
            measured_at: wanted.now_unix_s,
            hobbit_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Self::default()
        });

        let before = calibration.clone();
        let from_cache = !calibration.measure_missing(wanted, measure, &mut notes);
        if calibration != before
            && let Some(path) = cache
        {
            known.insert(0, calibration.clone());
            if let Err(why) = write(path, &known) {
                notes.push(format!("{}: calibration not kept: {why}", path.display()));
            }
        }
        Calibrated { calibration, notes, from_cache }
    }

    fn holds_for(&self, wanted: &Wanted) -> bool {
        let is_fresh = wanted.now_unix_s.checked_sub(self.measured_at).is_some_and(|age| age <= Self::AGE_MAX_S);
        self.machine == wanted.machine && is_fresh && self.hobbit_version == env!("CARGO_PKG_VERSION")
    }

    /// Whether every figure could be one.
    fn is_sane(&self) -> bool {
        let single =
            [self.upload_bytes_per_s, self.upload_pageable_bytes_per_s, self.upload_latency_s, self.file_bytes_per_s];
        single.into_iter().flatten().chain(self.cpu_expert_seconds_per_byte.values().copied()).all(is_figure)
    }

    /// Measures the missing figures; false if none is missing.
    fn measure_missing(&mut self, wanted: &Wanted, measure: &mut dyn Measure, notes: &mut Vec<String>) -> bool {
        let upload = self.upload_pageable_bytes_per_s.is_none();
        let file = wanted.disk.is_some() && (self.file_bytes_per_s.is_none() || self.file_disk != wanted.disk);
        let mut types: Vec<&String> = Vec::new();
        for name in &wanted.element_types {
            if !self.cpu_expert_seconds_per_byte.contains_key(name) && !types.contains(&name) {
                types.push(name);
            }
        }
        types.truncate(Self::ELEMENT_TYPES_MAX);
        // An upload is three figures, of which the last takes no time.
        let n_figures = 2 * usize::from(upload) + usize::from(file) + types.len();
        if n_figures == 0 {
            return false;
        }
        let budget = (Self::BUDGET / n_figures as u32).min(Self::FIGURE_BUDGET_MAX);
        if upload {
            let what = format!("copies to {}", self.machine.device);
            let sane = |upload: &Upload| {
                is_figure(upload.pageable_bytes_per_s)
                    && is_figure(upload.latency_s)
                    && upload.pinned_bytes_per_s.is_none_or(is_figure)
            };
            if let Some(upload) = checked(measure.upload(2 * budget), sane, &what, notes) {
                self.upload_bytes_per_s = upload.pinned_bytes_per_s.map(rounded);
                self.upload_pageable_bytes_per_s = Some(rounded(upload.pageable_bytes_per_s));
                self.upload_latency_s = Some(rounded(upload.latency_s));
            }
        }
        let sane = |figure: &f64| is_figure(*figure);
        if file {
            self.file_bytes_per_s = checked(measure.file_bytes_per_s(budget), sane, "file reads", notes).map(rounded);
            self.file_disk = self.file_bytes_per_s.and(wanted.disk);
        }
        for name in types {
            let what = format!("{name} experts on the CPU");
            if let Some(seconds) = checked(measure.cpu_seconds_per_byte(name, budget), sane, &what, notes) {
                self.cpu_expert_seconds_per_byte.insert(name.clone(), rounded(seconds));
            }
        }
        true
    }
}

fn is_figure(value: f64) -> bool {
    value > 0.0 && value.is_finite()
}

/// To four digits: further ones are noise, and would not come back from JSON bit for bit.
fn rounded(figure: f64) -> f64 {
    format!("{figure:.3e}").parse().unwrap_or(figure)
}

/// A measurement that makes sense, or a note.
fn checked<T: Copy + fmt::Debug>(
    measured: Result<T, String>,
    sane: impl Fn(&T) -> bool,
    what: &str,
    notes: &mut Vec<String>,
) -> Option<T> {
    let measured = measured.and_then(|value| match sane(&value) {
        true => Ok(value),
        false => Err(format!("{value:?} is no figure")),
    });
    measured.map_err(|why| notes.push(format!("cannot measure {what}: {why}"))).ok()
}

/// A few aligned lines, the device's name first, without a newline at the end.
impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { device, device_description, threads, .. } = &self.machine;
        write!(f, "{device}: {device_description}")?;
        for (what, bytes_per_s) in [
            ("upload, pinned", self.upload_bytes_per_s),
            ("upload, pageable", self.upload_pageable_bytes_per_s),
            ("file reads", self.file_bytes_per_s),
        ] {
            if let Some(bytes_per_s) = bytes_per_s {
                write!(f, "\n  {what:<24}{:>8.2} GB/s", bytes_per_s / 1e9)?;
            }
        }
        if let Some(seconds) = self.upload_latency_s {
            write!(f, "\n  {:<24}{:>8.1} µs", "upload latency", seconds * 1e6)?;
        }
        for (name, seconds_per_byte) in &self.cpu_expert_seconds_per_byte {
            let what = format!("CPU experts, {name}");
            write!(f, "\n  {what:<24}{:>8.2} GB/s, {threads} threads", seconds_per_byte.recip() / 1e9)?;
        }
        Ok(())
    }
}

// The cache file.

/// Value of `format`.
const FORMAT: &str = "hobbit-calibration";
/// Increased by incompatible changes.
const VERSION: u64 = 1;
/// A file that is longer is not ours.
const BYTES_MAX: u64 = 256 << 10;
/// Maximum machines: the devices of all computers that share the home directory.
const ENTRIES_MAX: usize = 32;

#[derive(Serialize, Deserialize)]
struct Contents {
    format: String,
    version: u64,
    calibrations: Vec<Calibration>,
}

/// `hobbit/calibration.json` in the user's cache directory: `$XDG_CACHE_HOME` or `~/.cache`, on macOS
/// `~/Library/Caches`, on Windows `%LOCALAPPDATA%`. `None` where there is no home.
pub fn cache_path() -> Option<PathBuf> {
    let directories = choose_native_strategy().ok()?;
    Some(directories.cache_dir().join("hobbit").join("calibration.json"))
}

/// Reads the file; empty if there is none. `Err` is the reason to ignore it.
fn read(path: &Path) -> Result<Vec<Calibration>, String> {
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|error| error.to_string())?,
    };
    // Opening a FIFO would block until its other end opens.
    if !metadata.is_file() {
        return Err("it is not a regular file".to_owned());
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(format!("it is longer than {BYTES_MAX} bytes"));
    }
    let contents: Contents = serde_json::from_slice(&bytes).map_err(|error| format!("it is damaged ({error})"))?;
    if contents.format != FORMAT || contents.version != VERSION {
        let Contents { format, version, .. } = contents;
        return Err(format!("it is {format:?} version {version}, expected {FORMAT:?} version {VERSION}"));
    }
    match contents.calibrations.iter().find(|calibration| !calibration.is_sane()) {
        Some(bad) => Err(format!("a figure of {:?} is not a positive number", bad.machine.device)),
        None => Ok(contents.calibrations),
    }
}

/// Replaces the file as a whole: readers see the old one or the new one. The first [`ENTRIES_MAX`] are kept.
fn write(path: &Path, calibrations: &[Calibration]) -> io::Result<()> {
    let calibrations = calibrations.iter().take(ENTRIES_MAX).cloned().collect();
    let text = serde_json::to_vec_pretty(&Contents { format: FORMAT.to_owned(), version: VERSION, calibrations })?;
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    files::replace(path, &text)
}

#[cfg(test)]
mod tests;
