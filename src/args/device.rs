//! Flags of devices. Names and meaning are llama.cpp's, except for the last five.

use std::str::FromStr;

use clap::Args;

use super::{gpu_layers, percent};
use crate::argv::Switch;
use hobbit::options::{CpuHelper, DeviceChoice, DeviceOptions, SplitMode, TensorOverride, UnifiedMemory};
use hobbit_core::plan::ExpertCache;

#[derive(Args, Debug)]
#[command(next_help_heading = "Devices")]
pub struct DeviceArgs {
    /// Devices to offload to, in this order; 'none' for the CPU alone (default: every GPU, RPC servers first)
    #[arg(long, value_name = "DEV1,DEV2", env = "LLAMA_ARG_DEVICE")]
    pub device: Option<DeviceChoice>,
    /// Print the devices and exit; with -v also their abilities
    #[arg(long)]
    pub list_devices: bool,
    /// Layers whose ordinary weights go to devices, counted from the last: a number, 'auto' or 'all'
    #[arg(long, value_name = "N", default_value = "auto", value_parser = gpu_layers, env = "LLAMA_ARG_N_GPU_LAYERS")]
    pub n_gpu_layers: i32,
    /// How several devices share the model: by whole layers, or one of them alone (none)
    #[arg(long, value_name = "none|layer", default_value = "layer", value_parser = split_mode,
          env = "LLAMA_ARG_SPLIT_MODE")]
    pub split_mode: SplitMode,
    /// The device that --split-mode none uses, by its place among the devices
    #[arg(long, value_name = "INDEX", default_value = "0", env = "LLAMA_ARG_MAIN_GPU")]
    pub main_gpu: u32,
    /// Portions of the layers for each device, such as 3,1 (default: by free memory)
    #[arg(long, value_name = "N0,N1", env = "LLAMA_ARG_TENSOR_SPLIT")]
    pub tensor_split: Option<TensorSplit>,
    /// RPC servers whose devices may be used, HOST:PORT; comma-separated or repeated
    #[arg(long, value_name = "SERVERS", value_delimiter = ',', env = "LLAMA_ARG_RPC")]
    pub rpc: Vec<String>,
    /// Compute all experts on the CPU
    #[arg(long, env = "LLAMA_ARG_CPU_MOE")]
    pub cpu_moe: Switch,
    /// Compute the experts of the first N layers on the CPU
    #[arg(long, value_name = "N", default_value = "0", env = "LLAMA_ARG_N_CPU_MOE")]
    pub n_cpu_moe: u32,
    /// Copy weights that the CPU computes with to a device for batches of 32 tokens and more: prompts
    #[arg(long, default_value = "on", env = "LLAMA_ARG_OP_OFFLOAD")]
    pub op_offload: Switch,
    /// Ordinary weights whose names contain a pattern go to a buffer type such as CPU or CUDA0; comma-separated or
    /// repeated, the first match decides. Experts are placed by --device-cache and --n-cpu-moe
    #[arg(long, value_name = "PATTERN=BUFFER", value_delimiter = ',', env = "LLAMA_ARG_OVERRIDE_TENSOR")]
    pub override_tensor: Vec<TensorOverride>,
    /// Device memory that holds experts, over all devices: 'auto' (all that is left), a size, or a share of all
    /// experts such as 25%; 0 computes them on the CPU
    #[arg(long, value_name = "SIZE|N%|auto", default_value = "auto", env = "HOBBIT_ARG_DEVICE_CACHE")]
    pub device_cache: ExpertCache,
    /// Share of each device's memory that stays free
    #[arg(long, value_name = "N%", default_value = "10%", value_parser = percent, env = "HOBBIT_ARG_DEVICE_HEADROOM")]
    pub device_headroom: f64,
    /// Compute missing experts on the CPU while the device computes: where that is sooner than copying them (auto),
    /// always, never, or as auto with N threads
    #[arg(long, value_name = "auto|on|off|N", default_value = "auto", env = "HOBBIT_ARG_CPU_HELPER")]
    pub cpu_helper: CpuHelper,
    /// Keep experts in pinned host memory where the device offers it, which makes copies faster
    #[arg(long, default_value = "on", env = "HOBBIT_ARG_PINNED")]
    pub pinned: Switch,
    /// Compute experts in place in host memory, without copies: on GPUs known to share it (auto), on every integrated
    /// GPU while others are refused, or never
    #[arg(long, value_name = "auto|on|off", default_value = "auto", env = "HOBBIT_ARG_UNIFIED")]
    pub unified: UnifiedMemory,
}

impl DeviceArgs {
    /// Where weights and products go.
    pub fn options(&self) -> DeviceOptions {
        DeviceOptions {
            devices: self.device.clone().unwrap_or_default(),
            rpc: self.rpc.clone(),
            split: self.split_mode,
            main: self.main_gpu,
            tensor_split: self.tensor_split.clone().unwrap_or_default().0,
            n_cpu_moe: if self.cpu_moe.0 { u32::MAX } else { self.n_cpu_moe },
            op_offload: self.op_offload.0,
            override_tensors: self.override_tensor.clone(),
            cache: self.device_cache,
            headroom: self.device_headroom,
            cpu_helper: self.cpu_helper,
            pinned: self.pinned.0,
            unified: self.unified,
        }
    }
}

/// Portions of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TensorSplit(pub Vec<f32>);

impl FromStr for TensorSplit {
    type Err = String;

    /// Numbers with commas or slashes between them.
    fn from_str(text: &str) -> Result<Self, String> {
        let portion = |word: &str| word.trim().parse().ok().filter(|portion: &f32| (0.0..1e30).contains(portion));
        let portions = text.split([',', '/']).map(portion).collect::<Option<Vec<_>>>();
        portions.map(Self).ok_or_else(|| "expected numbers from 0 on with commas between them, such as 3,1".to_owned())
    }
}

fn split_mode(word: &str) -> Result<SplitMode, String> {
    match word {
        "row" | "tensor" => {
            Err("row split is not supported: hobbit keeps an expert whole on one device; give layer or none".to_owned())
        }
        _ => word.parse().map_err(|error: hobbit::options::UnknownName| error.to_string()),
    }
}
