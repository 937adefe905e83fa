//! The available devices, and the choice of those for a model: ggml's registry, read through its generic interface.

mod choice;
mod rpc;

use std::collections::BTreeMap;

use ggml_sys::llama::{self, ggml_backend_dev_t};
use serde::Serialize;

use super::backends;
use super::device::Device;
use super::device_error::DeviceError;
use super::device_kind::DeviceKind;
use super::error::Error;
use super::ggml::{self, text};
use super::registration::NAME;
use choice::Candidate;
use hobbit_core::options::{DeviceChoice, DeviceOptions};

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
}

/// Every device of this process in ggml's order, including those of the RPC servers `rpc` (`host:port`), without
/// hobbit's own.
///
/// # Errors
/// [`Error::Device`] for a malformed endpoint, an unreachable server, or a build without RPC.
pub fn devices(rpc: &[String]) -> Result<Vec<DeviceInfo>, Error> {
    Ok(found(rpc)?.into_iter().map(info).collect())
}

/// The devices to offload to, in llama.cpp's order; empty for the CPU alone.
///
/// # Errors
/// As [`devices`]; an unknown name, or a device that models are not offloaded to; [`DeviceOptions::main`] out of range.
pub(super) fn choose(options: &DeviceOptions) -> Result<Vec<ggml_backend_dev_t>, Error> {
    let found = found(&options.rpc)?;
    let candidates: Vec<Candidate> = found.iter().map(|device| candidate(*device)).collect();
    let chosen = choice::choose(&candidates, options)?;
    Ok(chosen.into_iter().map(|index| found[index]).collect())
}

/// The named devices, null-terminated, without registering hobbit's own; `None` leaves the choice to llama.cpp.
///
/// # Errors
/// As [`choose`].
pub(super) fn by_name(options: &DeviceOptions) -> Result<Option<Vec<ggml_backend_dev_t>>, Error> {
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
fn found(rpc: &[String]) -> Result<Vec<ggml_backend_dev_t>, Error> {
    // Our backend first: it installs the handler that ends a failed ggml assertion with a message.
    Device::get()?;
    backends::ready();
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
) -> Result<Vec<ggml_backend_dev_t>, Error> {
    let mut gone: BTreeMap<String, bool> = BTreeMap::new();
    let mut there = Vec::new();
    for device in all {
        if ggml::is_remote(device) {
            let endpoint = ggml::description(device);
            let is_gone = match gone.get(&endpoint) {
                Some(known) => *known,
                None => match rpc::probe(&endpoint) {
                    Err(error) if rpc.contains(&endpoint) => return Err(error.into()),
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
pub(super) fn info(device: ggml_backend_dev_t) -> DeviceInfo {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_found_and_our_own_device_is_not() {
        let found = devices(&[]).unwrap();
        assert!(found.iter().any(|device| device.kind == DeviceKind::Cpu && device.total > 0), "{found:?}");
        assert!(!found.iter().any(|device| device.name == "HOBBIT"), "{found:?}");
    }
}
