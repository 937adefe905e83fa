//! Assignment of layers to devices, and the parameters that tell llama.cpp.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::ptr;

use ggml_sys::llama;

use crate::engine::cpu::expert_device::Device;
use crate::engine::error::OpenError;
use crate::engine::ggml;
use crate::engine::ggml::log;
use crate::engine::ggml::params::Overrides;
use crate::engine::gpu::devices;
use crate::engine::gpu::offload::Wrapper;
use crate::engine::memory::pinned::Reach;
use crate::engine::source::tables::Tables;
use hobbit_core::gguf::{Catalog, ExpertMap, GgmlType, Gguf};
use hobbit_core::options::{DeviceOptions, ModelOptions};
use hobbit_core::plan::{ExpertCache, layer_devices};

/// Expert weights by name, without their biases and scales and without shared experts.
const EXPERTS: &str = r"ffn_(gate|up|down|gate_up)_exps\.weight$";

/// One device's part of a model.
#[derive(Clone)]
pub(crate) struct DeviceLayers {
    pub(crate) wrapper: &'static Wrapper,
    /// Layers whose ordinary weights are on it, without the output layer.
    pub(crate) n_layers: u32,
    /// Experts of these layers.
    pub(crate) n_experts: u64,
    /// Layers whose experts are computed on it.
    pub(crate) experts: Vec<u16>,
    /// Layers whose experts are computed on it in large batches, and else on the CPU (llama.cpp's op-offload).
    pub(crate) offloaded: Vec<u16>,
}

/// Placement of a model's layers.
pub(crate) struct Placement {
    pub(crate) devices: Vec<DeviceLayers>,
    /// The device of each layer.
    layers: Vec<Option<usize>>,
    /// For llama.cpp, null-terminated.
    raw: Vec<llama::ggml_backend_dev_t>,
    tensor_split: Vec<f32>,
    n_gpu_layers: i32,
    overrides: Overrides,
    /// The user's overrides alone, for a model whose experts are llama.cpp's.
    given: Overrides,
}

impl Placement {
    /// As [`Placement::new`], for a model that llama.cpp runs by itself.
    pub(crate) fn plain(options: &ModelOptions, gguf: &Gguf) -> Result<Self, OpenError> {
        Self::new(options, gguf, &ExpertMap::default(), &Catalog::default(), &Tables::default())
    }

    /// Chooses devices and divides the layers. Dense models use the devices directly. `tables` stay in the files.
    ///
    /// # Errors
    /// An unknown device. Experts in types that their layer's device cannot multiply are computed on the CPU instead.
    pub(crate) fn new(
        options: &ModelOptions,
        gguf: &Gguf,
        map: &ExpertMap,
        catalog: &Catalog,
        tables: &Tables,
    ) -> Result<Self, OpenError> {
        let chosen = match options.n_gpu_layers {
            0 => Vec::new(),
            _ => devices::choose(&options.device)?,
        };
        let wrappers: Vec<&'static Wrapper> = chosen.iter().map(|dev| Wrapper::of(*dev)).collect();
        let free: Vec<u64> = chosen.iter().map(|dev| ggml::memory(*dev).0).collect();
        let n_layer = n_layer(gguf);
        // Negative means every layer: experts take no device memory by themselves.
        let n_gpu_layers = if options.n_gpu_layers < 0 { i32::MAX } else { options.n_gpu_layers };
        let (mut layers, mut tensor_split) = layer_devices(n_layer, n_gpu_layers, &options.device.tensor_split, &free);
        layers.truncate(n_layer as usize);
        let holder = |layer: u16| layers.get(usize::from(layer)).copied().flatten();
        let mut parts: Vec<DeviceLayers> = wrappers
            .iter()
            .enumerate()
            .map(|(index, &wrapper)| DeviceLayers {
                wrapper,
                n_layers: layers.iter().filter(|holder| **holder == Some(index)).count() as u32,
                n_experts: 0,
                experts: Vec::new(),
                offloaded: Vec::new(),
            })
            .collect();
        let mut on_cpu = BTreeMap::new();
        for layer in &map.layers {
            let index = holder(layer.layer);
            if let Some(index) = index {
                parts[index].n_experts += u64::from(layer.n_expert);
            }
            if catalog.layer(layer.layer).is_none() {
                continue;
            }
            match index.filter(|_| is_wanted(&options.device, layer.layer)) {
                Some(index) => match not_multiplied(parts[index].wrapper, catalog, layer.layer) {
                    None => parts[index].experts.push(layer.layer),
                    Some(dtype) => *on_cpu.entry((index, dtype.name())).or_insert(0u32) += 1,
                },
                // Those of layers on no device go to the first, as in llama.cpp.
                None => {
                    let part = parts.get_mut(index.unwrap_or(0)).filter(|part| offloads(&options.device, part.wrapper));
                    if let Some(part) = part.filter(|part| not_multiplied(part.wrapper, catalog, layer.layer).is_none())
                    {
                        part.offloaded.push(layer.layer);
                    }
                }
            }
        }
        for ((index, dtype), n) in on_cpu {
            let name = &parts[index].wrapper.name;
            log::notice(format_args!(
                "{name} has no products of {dtype} experts: those of {n} layers are computed on the CPU"
            ));
        }
        let mut raw: Vec<llama::ggml_backend_dev_t> =
            if map.is_empty() { chosen } else { wrappers.iter().map(|wrapper| wrapper.raw).collect() };
        raw.push(ptr::null_mut());
        let mut overrides = overrides_of(&parts, tables)?;
        overrides.add(&options.device.override_tensors, &raw)?;
        let mut given = Overrides::default();
        given.add(&options.device.override_tensors, &raw)?;
        // SAFETY: takes no arguments and returns a constant.
        let n_devices_max = unsafe { llama::llama_max_devices() };
        tensor_split.resize(n_devices_max.max(tensor_split.len()), 0.0);
        let n_gpu_layers = if wrappers.is_empty() { 0 } else { n_gpu_layers.min(n_layer as i32 + 1) };
        Ok(Self { devices: parts, layers, raw, tensor_split, n_gpu_layers, overrides, given })
    }

    /// Whether a layer's ordinary weights are in host memory.
    pub(crate) fn is_on_host(&self, layer: u64) -> bool {
        self.devices.is_empty() || matches!(self.layers.get(layer as usize), Some(None))
    }

    /// Layers of the CPU that a device computes in large batches, with the device that llama.cpp gets.
    pub(crate) fn offloaded(&self) -> BTreeMap<u16, ggml::Device> {
        let parts = self.devices.iter();
        parts.flat_map(|part| part.offloaded.iter().map(|&layer| (layer, ggml::Device(part.wrapper.raw)))).collect()
    }

    /// Sets llama.cpp's parameters. The pointers in `params` refer to `self`.
    pub(crate) fn apply(&mut self, params: &mut llama::llama_model_params, with_experts: bool) {
        params.devices = self.raw.as_mut_ptr();
        params.n_gpu_layers = self.n_gpu_layers;
        params.split_mode = llama::LLAMA_SPLIT_MODE_LAYER;
        params.tensor_split = self.tensor_split.as_ptr();
        params.tensor_buft_overrides = if with_experts { self.overrides.end() } else { self.given.end() };
    }
}

/// Layers of a model, without the output layer.
pub(crate) fn n_layer(gguf: &Gguf) -> u32 {
    let n_layer = gguf.metadata.get_u64(&format!("{}.block_count", gguf.architecture())).unwrap_or(0);
    u32::try_from(n_layer).unwrap_or(u32::MAX).min(1 << 16)
}

/// Our buffer types for experts, and for tables that stay in the files.
fn overrides_of(parts: &[DeviceLayers], tables: &Tables) -> Result<Overrides, OpenError> {
    let mut overrides = Overrides::default();
    for pattern in tables.patterns() {
        overrides.push(CString::new(pattern).expect("names of a header"), Device::get()?.buffer_type);
    }
    for layer in tables.resident_layers() {
        let pattern = CString::new(format!(r"^blk\.{layer}\.{EXPERTS}")).expect("digits and constants");
        // SAFETY: takes no arguments; the type lives as long as the process.
        overrides.push(pattern, unsafe { llama::ggml_backend_cpu_buffer_type() });
    }
    for part in parts.iter().filter(|part| !part.experts.is_empty()) {
        let layers: Vec<String> = part.experts.iter().map(u16::to_string).collect();
        let pattern = format!(r"^blk\.({})\.{EXPERTS}", layers.join("|"));
        overrides.push(CString::new(pattern).expect("digits and constants"), part.wrapper.buffer_type);
    }
    overrides.push(CString::new(format!(r"\.{EXPERTS}")).expect("a constant"), Device::get()?.buffer_type);
    Ok(overrides)
}

/// Whether the options want a layer's experts computed on the device that holds the layer.
fn is_wanted(options: &DeviceOptions, layer: u16) -> bool {
    let none = matches!(options.cache, ExpertCache::Bytes(0)) || options.cache == ExpertCache::Percent(0.0);
    !none && u32::from(layer) >= options.n_cpu_moe
}

/// Whether a device computes experts of large batches that the CPU computes otherwise.
fn offloads(options: &DeviceOptions, wrapper: &Wrapper) -> bool {
    options.op_offload && wrapper.offloads() && !Reach::of(wrapper.inner, options.unified).is_unified()
}

/// The first of the layer's expert types that the device cannot multiply.
fn not_multiplied(wrapper: &Wrapper, catalog: &Catalog, layer: u16) -> Option<GgmlType> {
    let layer = catalog.layer(layer)?;
    let versions = layer.high.iter().chain(layer.low.iter().flatten());
    let mut classes: Vec<u16> = versions.map(|version| version.class).collect();
    classes.sort_unstable();
    classes.dedup();
    let slices = || classes.iter().flat_map(|class| &catalog.classes[usize::from(*class)].slices);
    let refused = slices().find(|slice| {
        let ne = [slice.ne0, slice.ne1, u64::from(layer.n_expert)];
        !wrapper.multiplies(slice.dtype.id() as llama::ggml_type, ne)
    });
    refused.map(|slice| slice.dtype)
}
