//! Measuring a device, its link, the CPU and the disk through ggml's generic backend interface, for
//! [`hobbit_core::calibrate`].
//!
//! The CPU is found through ggml's registry, as every device is: a build that loads its backends at run time offers no
//! other access to it.

mod measure;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ggml_sys::llama::{self, ggml_backend_dev_t};

use super::ggml::{self, text};
use super::params::default_threads;
use hobbit_core::calibrate::{Calibrated, Calibration, Machine, Measure, Upload, Wanted, cache_path};
use hobbit_core::expert::Extent;
use hobbit_core::gguf::{Catalog, GgmlType, Gguf, GgufError};
use hobbit_core::options::{CpuHelper, DeviceChoice, DeviceOptions};
use hobbit_core::pack::{Pack, PackError};
use hobbit_core::store::{self, StoreKind, measure_random_read, probe};

/// Bytes per read: close to an expert's slice, and two of the store's chunks.
const READ_BYTES: u64 = 2 << 20;
/// Reads in flight.
const READ_DEPTH: usize = 8;
/// Element types measured when no model is given: a K-quant, and a common high precision.
const USUAL_TYPES: [&str; 2] = ["q4_K", "q8_0"];

/// Errors of [`calibrate_report`].
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    /// A device that does not exist.
    #[error("there is no device '{name}' here; there are {known}")]
    UnknownDevice {
        /// The requested name.
        name: String,
        /// The available devices.
        known: String,
    },
    /// The model file is damaged, incomplete or of an unknown kind.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The pack is damaged.
    #[error(transparent)]
    Pack(#[from] PackError),
}

/// Measurements beside the device itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Subject {
    /// Threads that compute experts on the CPU.
    pub(super) threads: u32,
    /// Element types of experts, most bytes first; empty for the usual ones.
    pub(super) element_types: Vec<GgmlType>,
    /// The model's (first) file; `None` skips file bandwidth.
    pub(super) file: Option<PathBuf>,
}

/// Measures `dev`, or takes the figures from the cache file at `cache`. Takes at most about a second, 64 MiB of host
/// memory and 32 MiB of the device's, all freed again.
pub(super) fn calibrate(dev: ggml_backend_dev_t, subject: &Subject, cache: Option<&Path>) -> Calibrated {
    super::log::install();
    let element_types = match subject.element_types.as_slice() {
        [] => USUAL_TYPES.map(str::to_owned).to_vec(),
        types => types.iter().map(|dtype| dtype.name().to_owned()).collect(),
    };
    let wanted = Wanted {
        machine: machine(dev, subject.threads),
        element_types,
        disk: subject.file.as_deref().and_then(disk_of),
        now_unix_s: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()),
    };
    let mut meter = Meter { dev, threads: subject.threads, file: subject.file.as_deref() };
    Calibration::load_or_measure(cache, &wanted, &mut meter)
}

/// Figures of the devices that `options` choose (with [`DeviceChoice::Auto`] every GPU, or the CPU if there is none),
/// from the user's cache file or measured now, in about a second per device. `model` adds the bandwidth of its file,
/// and its experts' element types.
///
/// The caller must register devices of RPC servers first.
///
/// # Errors
/// An unknown device, or a model that cannot be read. A failed measurement becomes a note in the result.
pub fn calibrate_report(options: &DeviceOptions, model: Option<&Path>) -> Result<Vec<Calibrated>, CalibrateError> {
    let element_types = model.map_or(Ok(Vec::new()), element_types_of)?;
    let subject = Subject { threads: helper_threads(options), element_types, file: model.map(Path::to_owned) };
    let cache = cache_path();
    Ok(chosen(&options.devices)?.into_iter().map(|dev| calibrate(dev, &subject, cache.as_deref())).collect())
}

/// Bytes per second of weights of a type that the CPU multiplies with one row, on a session's default number of
/// threads. Measured now, within `budget` without set-up. `None` for a type without a product.
pub fn cpu_bytes_per_second(element_type: GgmlType, budget: Duration) -> Option<f64> {
    super::log::install();
    let threads = u32::try_from(default_threads()).unwrap_or(1).max(1);
    let seconds = measure::cpu_expert(element_type, threads, budget).ok()?;
    (seconds.is_finite() && seconds > 0.0).then(|| 1.0 / seconds)
}

/// Threads that compute experts on the CPU.
pub(super) fn helper_threads(options: &DeviceOptions) -> u32 {
    match options.cpu_helper {
        CpuHelper::Threads(threads) => u32::from(threads),
        _ => u32::try_from(default_threads()).unwrap_or(1).max(1),
    }
}

fn chosen(choice: &DeviceChoice) -> Result<Vec<ggml_backend_dev_t>, CalibrateError> {
    let (cpus, gpus): (Vec<_>, Vec<_>) = ggml::computing_devices().into_iter().partition(|dev| ggml::is_cpu(*dev));
    match choice {
        DeviceChoice::Auto if !gpus.is_empty() => Ok(gpus),
        DeviceChoice::Auto | DeviceChoice::None => Ok(cpus),
        DeviceChoice::Named(names) => {
            let all = [gpus, cpus].concat();
            let find = |name: &String| all.iter().copied().find(|dev| ggml::name(*dev) == *name);
            let unknown = |name: &String| CalibrateError::UnknownDevice {
                name: name.clone(),
                known: all.iter().copied().map(ggml::name).collect::<Vec<_>>().join(", "),
            };
            names.iter().map(|name| find(name).ok_or_else(|| unknown(name))).collect()
        }
    }
}

/// Element types of a model's experts, most bytes first.
fn element_types_of(model: &Path) -> Result<Vec<GgmlType>, CalibrateError> {
    let gguf = Gguf::open(model)?;
    let catalog = match Pack::is_pack(&gguf) {
        true => Pack::open(model)?.catalog,
        false => Catalog::plain(&gguf.experts()?),
    };
    Ok(by_bytes(&catalog))
}

/// Element types of the slices in a catalog, most bytes first; ties in the order of their ids.
pub(super) fn by_bytes(catalog: &Catalog) -> Vec<GgmlType> {
    let mut bytes: BTreeMap<GgmlType, u64> = BTreeMap::new();
    for slice in catalog.classes.iter().flat_map(|class| &class.slices) {
        *bytes.entry(slice.dtype).or_default() += slice.bytes;
    }
    let mut types: Vec<_> = bytes.into_iter().collect();
    types.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    types.into_iter().map(|(dtype, _)| dtype).collect()
}

fn machine(dev: ggml_backend_dev_t, threads: u32) -> Machine {
    let props = ggml::properties(dev);
    // SAFETY: returns static text.
    let version = text(unsafe { llama::ggml_version() });
    // SAFETY: returns null if there is no CPU device.
    let cpu = unsafe { llama::ggml_backend_dev_by_type(llama::GGML_BACKEND_DEVICE_TYPE_CPU) };
    Machine {
        device: ggml::name(dev),
        device_description: ggml::description(dev),
        driver: format!("{} {version} {} {} bytes", ggml::backend_name(dev), text(props.device_id), props.memory_total),
        cpu: if cpu.is_null() { String::new() } else { ggml::description(cpu) },
        threads,
    }
}

/// An identifier of the disk that holds a file. A changed identifier only costs a new measurement.
fn disk_of(file: &Path) -> Option<u64> {
    Some(std::fs::metadata(file).ok()?.dev())
}

struct Meter<'a> {
    dev: ggml_backend_dev_t,
    threads: u32,
    file: Option<&'a Path>,
}

impl Measure for Meter<'_> {
    fn upload(&mut self, budget: Duration) -> Result<Upload, String> {
        measure::upload(self.dev, budget)
    }

    fn file_bytes_per_s(&mut self, budget: Duration) -> Result<f64, String> {
        let file = self.file.ok_or("no model is given")?;
        let len = std::fs::metadata(file).map_err(|error| format!("{}: {error}", file.display()))?.len();
        let direct = probe::direct(file).and_then(|()| probe::io_uring());
        let kind = if direct.is_ok() { StoreKind::Direct } else { StoreKind::Buffered };
        let store = store::open(kind, &[file.to_owned()]).map_err(|error| error.to_string())?;
        let whole = [Extent { file: 0, offset: 0, len }];
        let measured = measure_random_read(&*store, &whole, READ_BYTES.min(len), READ_DEPTH, u64::MAX, budget)
            .map_err(|error| error.to_string())?;
        Ok(measured.bytes_per_second())
    }

    fn cpu_seconds_per_byte(&mut self, element_type: &str, budget: Duration) -> Result<f64, String> {
        let dtype = GgmlType::from_name(element_type).ok_or("llama.cpp has no such type")?;
        measure::cpu_expert(dtype, self.threads, budget)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo.gguf");

    #[test]
    fn this_machines_cpu_is_measured_once() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("calibration.json");
        let [cpu] = chosen(&DeviceChoice::None).unwrap()[..] else { panic!("one CPU device was expected") };
        let subject =
            Subject { threads: 2, element_types: element_types_of(DEMO.as_ref()).unwrap(), file: Some(DEMO.into()) };
        let measured = calibrate(cpu, &subject, Some(&cache));
        assert_eq!((measured.notes.as_slice(), measured.from_cache), ([].as_slice(), false));
        let figures = &measured.calibration;
        assert_eq!((figures.machine.device.as_str(), figures.machine.threads), ("CPU", 2));
        let single = [figures.upload_pageable_bytes_per_s, figures.upload_latency_s, figures.file_bytes_per_s];
        let all: Vec<f64> = single
            .into_iter()
            .map(|figure| figure.expect("a CPU, memory and a file can be measured"))
            .chain(figures.cpu_expert_seconds_per_byte.values().copied())
            .collect();
        assert!(
            all.len() > single.len() && all.iter().all(|figure| *figure > 0.0 && figure.is_finite()),
            "{figures:?}"
        );
        let types: Vec<&str> = subject.element_types.iter().map(|dtype| dtype.name()).collect();
        assert!(types.iter().all(|name| figures.cpu_expert_seconds_per_byte.contains_key(*name)), "{types:?}");

        let again = calibrate(cpu, &subject, Some(&cache));
        assert_eq!(again, Calibrated { from_cache: true, ..measured });
    }

    #[test]
    fn a_device_or_a_model_that_is_not_there_is_named() {
        let options = DeviceOptions { devices: DeviceChoice::Named(vec!["CUDA9".into()]), ..DeviceOptions::default() };
        let error = calibrate_report(&options, None).unwrap_err().to_string();
        assert!(error.contains("'CUDA9'") && error.contains("CPU"), "{error}");
        let error =
            calibrate_report(&DeviceOptions::default(), Some("/no/such.gguf".as_ref())).unwrap_err().to_string();
        assert!(error.contains("/no/such.gguf"), "{error}");
        assert_eq!(chosen(&DeviceChoice::Named(vec!["CPU".into()])).unwrap().len(), 1);
    }
}
