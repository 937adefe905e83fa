//! Choice of the devices for a model: the rule of llama.cpp's `llama_prepare_model_devices`.

use crate::engine::device_error::DeviceError;
use crate::engine::device_kind::DeviceKind;
use hobbit_core::options::{DeviceChoice, DeviceOptions, SplitMode};

/// The properties of a device that the choice depends on.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) name: String,
    pub(super) kind: DeviceKind,
    /// ggml's name of the backend it belongs to.
    pub(super) backend: String,
    /// Identifies hardware that several backends present as a device.
    pub(super) hardware: Option<String>,
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
pub(super) fn choose(all: &[Candidate], options: &DeviceOptions) -> Result<Vec<usize>, DeviceError> {
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
            return Err(DeviceError::NotOffloadable { name, kind, known: known() });
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
        let chosen = choose(all, &options).map_err(|error| error.to_string())?;
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
