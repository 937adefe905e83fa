//! The available devices, and the choice of those for a model, by the rule of llama.cpp's
//! `llama_prepare_model_devices`.

mod rpc;

use std::collections::BTreeMap;

use ggml_sys::llama;
use ggml_sys::llama::ggml_backend_dev_t;
use serde::Serialize;

use crate::engine::cpu::expert_device::Device;
use crate::engine::error::DeviceError;
use crate::engine::ggml;
use crate::engine::ggml::text;
use crate::engine::memory::pinned::Reach;
use crate::engine::seam::registration::NAME;
use hobbit_core::options::{DeviceChoice, DeviceOptions, SplitMode, UnifiedMemory};

/// A device as ggml describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceInfo {
    /// ggml's name, such as `CUDA0` or `RPC0`.
    pub name: String,
    /// Its description, such as `NVIDIA GeForce RTX 4090`; for an RPC device the server's endpoint.
    pub description: String,
    /// Its kind.
    pub kind: DeviceKind,
    /// Free memory, in bytes; 0 if unknown.
    pub free: u64,
    /// Total memory, in bytes; 0 if unknown.
    pub total: u64,
    /// Whether it offers pinned host memory.
    pub pinned_host: bool,
    /// Whether copies and computations are asynchronous.
    pub asynchronous: bool,
    /// Whether one queue can wait for an event of another.
    pub events: bool,
    /// Whether experts are computed in place in host memory ([`DeviceOptions::unified`] at `Auto`).
    pub unified: bool,
}

/// Every device of this process in ggml's order, including those of the RPC servers `rpc` (`host:port`), without
/// hobbit's own.
///
/// # Errors
/// [`DeviceError`] for a malformed endpoint, an unreachable server, or a build without RPC.
pub fn devices(rpc: &[String]) -> Result<Vec<DeviceInfo>, DeviceError> {
    Ok(found(rpc)?.into_iter().map(info).collect())
}

/// The devices to offload to, in llama.cpp's order; empty for the CPU alone.
///
/// # Errors
/// As [`devices`]; an unknown name, or a device that models are not offloaded to; [`DeviceOptions::main`] out of range;
/// [`UnifiedMemory::On`] for a device that does not share the host's memory.
pub(crate) fn choose(options: &DeviceOptions) -> Result<Vec<ggml_backend_dev_t>, DeviceError> {
    let found = found(&options.rpc)?;
    let candidates: Vec<Candidate> = found.iter().map(|device| candidate(*device)).collect();
    let chosen = choose_among(&candidates, options)?;
    let chosen: Vec<ggml_backend_dev_t> = chosen.into_iter().map(|index| found[index]).collect();
    let is_apart = |device: &&ggml_backend_dev_t| !Reach::of(**device, options.unified).is_unified();
    match chosen.iter().find(is_apart).filter(|_| options.unified == UnifiedMemory::On) {
        Some(device) => {
            Err(DeviceError::NotUnified { name: ggml::name(*device), backend: ggml::backend_name(*device) })
        }
        None => Ok(chosen),
    }
}

/// The named devices, null-terminated, without registering hobbit's own; `None` leaves the choice to llama.cpp.
///
/// # Errors
/// As [`choose`].
pub(crate) fn by_name(options: &DeviceOptions) -> Result<Option<Vec<ggml_backend_dev_t>>, DeviceError> {
    rpc::add_servers(&options.rpc)?;
    let names = match &options.devices {
        DeviceChoice::Auto => return Ok(None),
        DeviceChoice::None => &[][..],
        DeviceChoice::Named(names) => names,
    };
    let find = |name: &String| {
        let found = ggml::devices().find(|device| ggml::name(*device).eq_ignore_ascii_case(name));
        found.ok_or_else(|| DeviceError::Unknown { name: name.clone(), known: Vec::new() })
    };
    let mut devices = names.iter().map(find).collect::<Result<Vec<_>, _>>()?;
    devices.push(std::ptr::null_mut());
    Ok(Some(devices))
}

/// Every device except ours.
fn found(rpc: &[String]) -> Result<Vec<ggml_backend_dev_t>, DeviceError> {
    // Our backend first: it installs the handler that ends a failed ggml assertion with a message.
    Device::get()?;
    ggml::ready();
    rpc::add_servers(rpc)?;
    let ours = NAME.to_string_lossy();
    without_gone(ggml::devices().filter(|device| ggml::backend_name(*device) != ours), rpc)
}

/// Removes devices of unreachable RPC servers: even a query of their properties would end the process.
///
/// # Errors
/// A server in `rpc` is unreachable.
fn without_gone(
    all: impl Iterator<Item = ggml_backend_dev_t>,
    rpc: &[String],
) -> Result<Vec<ggml_backend_dev_t>, DeviceError> {
    let mut gone: BTreeMap<String, bool> = BTreeMap::new();
    let mut there = Vec::new();
    for device in all {
        if ggml::is_remote(device) {
            let endpoint = ggml::description(device);
            let is_gone = match gone.get(&endpoint) {
                Some(known) => *known,
                None => match rpc::probe(&endpoint) {
                    Err(error) if rpc.contains(&endpoint) => return Err(error),
                    probed => probed.is_err(),
                },
            };
            gone.insert(endpoint, is_gone);
            if is_gone {
                continue;
            }
        }
        there.push(device);
    }
    Ok(there)
}

fn candidate(device: ggml_backend_dev_t) -> Candidate {
    let properties = ggml::properties(device);
    Candidate {
        name: text(properties.name),
        kind: kind(properties.type_),
        backend: ggml::backend_name(device),
        hardware: (!properties.device_id.is_null()).then(|| text(properties.device_id)),
    }
}

/// ggml's description of a device.
pub(crate) fn info(device: ggml_backend_dev_t) -> DeviceInfo {
    let properties = ggml::properties(device);
    let (free, total) = ggml::memory(device);
    DeviceInfo {
        name: text(properties.name),
        description: text(properties.description),
        kind: kind(properties.type_),
        free,
        total,
        pinned_host: properties.caps.host_buffer,
        asynchronous: properties.caps.async_,
        events: properties.caps.events,
        unified: Reach::of(device, UnifiedMemory::Auto).is_unified(),
    }
}

fn kind(found: llama::ggml_backend_dev_type) -> DeviceKind {
    match found {
        llama::GGML_BACKEND_DEVICE_TYPE_CPU => DeviceKind::Cpu,
        llama::GGML_BACKEND_DEVICE_TYPE_GPU => DeviceKind::Gpu,
        llama::GGML_BACKEND_DEVICE_TYPE_IGPU => DeviceKind::Integrated,
        _ => DeviceKind::Accelerator,
    }
}

/// A device's kind (`ggml_backend_dev_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The processor and its memory.
    Cpu,
    /// A GPU with memory of its own; also every device of an RPC server.
    Gpu,
    /// A GPU that shares the host's memory.
    Integrated,
    /// A helper of the CPU, such as BLAS; models are not offloaded to it.
    Accelerator,
}

impl DeviceKind {
    /// For messages.
    pub(crate) const fn in_words(self) -> &'static str {
        match self {
            Self::Cpu => "the CPU",
            Self::Gpu => "a GPU",
            Self::Integrated => "an integrated GPU",
            Self::Accelerator => "a helper of the CPU",
        }
    }
}

/// The properties of a device that the choice depends on.
#[derive(Clone, Debug)]
struct Candidate {
    name: String,
    kind: DeviceKind,
    /// ggml's name of the backend it belongs to.
    backend: String,
    /// Identifies hardware that several backends present as a device.
    hardware: Option<String>,
}

impl Candidate {
    fn is_remote(&self) -> bool {
        self.backend == "RPC"
    }

    fn can_hold_layers(&self) -> bool {
        matches!(self.kind, DeviceKind::Gpu | DeviceKind::Integrated)
    }
}

/// Indices of the chosen devices, in order.
fn choose_among(all: &[Candidate], options: &DeviceOptions) -> Result<Vec<usize>, DeviceError> {
    let chosen = match &options.devices {
        DeviceChoice::Auto => automatic(all),
        DeviceChoice::None => Vec::new(),
        DeviceChoice::Named(names) => named(all, names)?,
    };
    match options.split {
        SplitMode::None if !chosen.is_empty() => match chosen.get(options.main as usize) {
            Some(main) => Ok(vec![*main]),
            None => Err(DeviceError::MainOutOfRange { main: options.main, n_devices: chosen.len() }),
        },
        _ => Ok(chosen),
    }
}

/// RPC servers first, to minimise transfers between devices; then GPUs, each piece of hardware once; integrated ones
/// only if this machine has no other GPU.
fn automatic(all: &[Candidate]) -> Vec<usize> {
    let of = |kind: DeviceKind| (0..all.len()).filter(move |index| all[*index].kind == kind);
    let (remote, local): (Vec<_>, Vec<_>) = of(DeviceKind::Gpu).partition(|index| all[*index].is_remote());
    let mut gpus: Vec<usize> = Vec::new();
    for index in local {
        let hardware = &all[index].hardware;
        let is_known = hardware.is_some() && gpus.iter().any(|known| all[*known].hardware == *hardware);
        if !is_known {
            gpus.push(index);
        }
    }
    if gpus.is_empty() {
        // Several backends may see the same integrated GPU; one backend sees each once.
        let first = of(DeviceKind::Integrated).next();
        gpus = of(DeviceKind::Integrated)
            .filter(|index| Some(&all[*index].backend) == first.map(|first| &all[first].backend))
            .collect();
    }
    [remote, gpus].concat()
}

fn named(all: &[Candidate], names: &[String]) -> Result<Vec<usize>, DeviceError> {
    let known = || all.iter().filter(|device| device.can_hold_layers()).map(|device| device.name.clone()).collect();
    let mut chosen = Vec::new();
    for name in names {
        // ggml compares names without case.
        let index = all.iter().position(|device| device.name.eq_ignore_ascii_case(name));
        let index = index.ok_or_else(|| DeviceError::Unknown { name: name.clone(), known: known() })?;
        let device = &all[index];
        if !device.can_hold_layers() {
            let (name, kind) = (device.name.clone(), device.kind);
            return Err(DeviceError::NotOffloadable { name, kind: kind.in_words(), known: known() });
        }
        if chosen.contains(&index) {
            return Err(DeviceError::Twice { name: device.name.clone() });
        }
        chosen.push(index);
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_found_and_our_own_device_is_not() {
        let found = devices(&[]).unwrap();
        assert!(found.iter().any(|device| device.kind == DeviceKind::Cpu && device.total > 0), "{found:?}");
        assert!(!found.iter().any(|device| device.name == "HOBBIT"), "{found:?}");
    }

    fn device(name: &str, kind: DeviceKind, backend: &str, hardware: &str) -> Candidate {
        let hardware = Some(hardware.to_owned()).filter(|id| !id.is_empty());
        Candidate { name: name.to_owned(), kind, backend: backend.to_owned(), hardware }
    }

    fn cpu() -> Candidate {
        device("CPU", DeviceKind::Cpu, "CPU", "")
    }

    fn gpu(name: &str, hardware: &str) -> Candidate {
        device(name, DeviceKind::Gpu, name.trim_end_matches(char::is_numeric), hardware)
    }

    fn integrated(name: &str) -> Candidate {
        device(name, DeviceKind::Integrated, name.trim_end_matches(char::is_numeric), "")
    }

    fn chosen(all: &[Candidate], change: impl FnOnce(&mut DeviceOptions)) -> Result<Vec<String>, String> {
        let mut options = DeviceOptions::default();
        change(&mut options);
        let chosen = choose_among(all, &options).map_err(|error| error.to_string())?;
        Ok(chosen.into_iter().map(|index| all[index].name.clone()).collect())
    }

    #[test]
    fn automatic_choices_are_llama_cpps() {
        let auto = |all: &[Candidate]| chosen(all, |_| ()).unwrap().join(" ");
        let blas = device("BLAS", DeviceKind::Accelerator, "BLAS", "");
        assert_eq!(auto(&[blas.clone(), cpu()]), "");
        assert_eq!(auto(&[gpu("CUDA0", "a"), gpu("CUDA1", "b"), blas, cpu()]), "CUDA0 CUDA1");
        assert_eq!(auto(&[gpu("CUDA0", ""), cpu(), gpu("RPC0", ""), gpu("RPC1", "")]), "RPC0 RPC1 CUDA0");
        // One card, seen by two backends.
        assert_eq!(auto(&[gpu("CUDA0", "pci1"), gpu("Vulkan0", "pci1"), gpu("Vulkan1", "pci2")]), "CUDA0 Vulkan1");
        assert_eq!(auto(&[gpu("CUDA0", ""), gpu("CUDA1", "")]), "CUDA0 CUDA1", "no id is not the same id");
        // Integrated GPUs.
        assert_eq!(auto(&[gpu("CUDA0", ""), integrated("Vulkan0"), cpu()]), "CUDA0");
        assert_eq!(auto(&[integrated("Vulkan0"), integrated("OpenCL0"), cpu(), gpu("RPC0", "")]), "RPC0 Vulkan0");
        assert_eq!(auto(&[integrated("CUDA0"), integrated("CUDA1")]), "CUDA0 CUDA1");
    }

    #[test]
    fn names() {
        let all = [gpu("CUDA0", ""), gpu("CUDA1", ""), integrated("Vulkan0"), cpu()];
        let named = |names: &[&str]| {
            let names = names.iter().map(|name| name.to_string()).collect();
            chosen(&all, |options| options.devices = DeviceChoice::Named(names))
        };
        assert_eq!(named(&["Vulkan0", "cuda1"]), Ok(vec!["Vulkan0".into(), "CUDA1".into()]));
        let there = "there are CUDA0, CUDA1, Vulkan0";
        assert_eq!(named(&["CUDA0", "CUDA7"]), Err(format!("there is no device named 'CUDA7' ({there})")));
        assert_eq!(named(&["cpu"]), Err(format!("'CPU' is the CPU, and models are not offloaded to it ({there})")));
        assert_eq!(named(&["CUDA0", "cuda0"]), Err("the device 'CUDA0' is named twice".to_owned()));
        let none = chosen(&[cpu()], |options| options.devices = DeviceChoice::Named(vec!["CUDA0".into()]));
        assert!(none.unwrap_err().contains("(there is none beside the CPU)"));
        assert_eq!(chosen(&all, |options| options.devices = DeviceChoice::None), Ok(Vec::new()));
    }

    #[test]
    fn one_device_alone() {
        let all = [gpu("CUDA0", ""), gpu("CUDA1", ""), cpu()];
        let alone =
            |main, all: &[Candidate]| chosen(all, |options| (options.split, options.main) = (SplitMode::None, main));
        assert_eq!(alone(1, &all), Ok(vec!["CUDA1".into()]));
        let error = alone(2, &all).unwrap_err();
        assert_eq!(error, "the main device is number 2, but there are 2 devices; numbers begin at 0");
        assert_eq!(alone(0, &[cpu()]), Ok(Vec::new()));
    }
}
