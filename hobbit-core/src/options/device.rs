//! Placement of ordinary weights and expert products on CPU and devices; additions to a model from other files.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use smart_default::SmartDefault;

use crate::load::balance::HelperMode;
use crate::named::{UnknownName, named};
use crate::plan::ExpertCache;

/// Devices that a model is offloaded to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// Every GPU, RPC servers first; the CPU alone if there is none.
    #[default]
    Auto,
    None,
    /// Named devices, by ggml's names, in this order.
    Named(Vec<String>),
}

impl FromStr for DeviceChoice {
    type Err = UnknownName;

    /// `none`, or names separated by commas.
    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        match text {
            "none" => Ok(Self::None),
            _ if names.iter().any(String::is_empty) => {
                Err(UnknownName::new("device", text, "none, or names of devices, separated by commas"))
            }
            _ => Ok(Self::Named(names)),
        }
    }
}

/// Division of a model among several devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SplitMode {
    /// One device holds everything.
    None,
    #[default]
    Layer,
}

named!(SplitMode, "split mode": None = "none", Layer = "layer");

/// Whether the CPU may compute missing experts while the device computes the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuHelper {
    /// If measured times predict that it is faster than copying.
    #[default]
    Auto,
    /// Every missing expert that is in host memory.
    On,
    Off,
    /// As [`CpuHelper::Auto`], with this many threads.
    Threads(u16),
}

impl From<CpuHelper> for HelperMode {
    fn from(helper: CpuHelper) -> Self {
        match helper {
            CpuHelper::Off => Self::Off,
            CpuHelper::On => Self::On,
            CpuHelper::Auto | CpuHelper::Threads(_) => Self::Auto,
        }
    }
}

impl FromStr for CpuHelper {
    type Err = UnknownName;

    fn from_str(word: &str) -> Result<Self, UnknownName> {
        match word {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => match word.parse::<u16>() {
                Ok(0) => Ok(Self::Off),
                Ok(threads) => Ok(Self::Threads(threads)),
                Err(_) => Err(UnknownName::new("CPU helper setting", word, "auto, on, off, or a number of threads")),
            },
        }
    }
}

impl fmt::Display for CpuHelper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::On => f.write_str("on"),
            Self::Off => f.write_str("off"),
            Self::Threads(threads) => write!(f, "{threads} threads"),
        }
    }
}

/// Whether a device computes experts in place, in memory that it shares with the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnifiedMemory {
    /// On devices that are known to.
    #[default]
    Auto,
    /// On every integrated GPU; other devices are refused.
    On,
    /// On none: experts are copied to slots of the device.
    Off,
}

named!(UnifiedMemory, "unified memory setting": Auto = "auto", On = "on", Off = "off");

/// Placement of ordinary weights by name: as llama.cpp's tensor overrides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorOverride {
    /// A regular expression (C++'s) that a tensor's name contains.
    pub pattern: String,
    /// A buffer type by ggml's name: `CPU`, or a device's such as `CUDA0`.
    pub buffer_type: String,
}

impl FromStr for TensorOverride {
    type Err = UnknownName;

    /// `PATTERN=BUFFER`.
    fn from_str(text: &str) -> Result<Self, UnknownName> {
        match text.rsplit_once('=') {
            Some((pattern, buffer_type))
                if ![pattern, buffer_type].iter().any(|part| part.is_empty() || part.contains('\0')) =>
            {
                Ok(Self { pattern: pattern.to_owned(), buffer_type: buffer_type.to_owned() })
            }
            _ => Err(UnknownName::new("tensor override", text, r"PATTERN=BUFFER, such as attn_.*\.weight=CPU")),
        }
    }
}

impl fmt::Display for TensorOverride {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.pattern, self.buffer_type)
    }
}

/// Placement of ordinary weights and expert products.
#[derive(Clone, Debug, PartialEq, SmartDefault)]
pub struct DeviceOptions {
    pub devices: DeviceChoice,
    /// Endpoints (`host:port`) of ggml RPC servers that offer devices.
    pub rpc: Vec<String>,
    /// How several devices share the model.
    pub split: SplitMode,
    /// Index, among the chosen devices, of the only device used with [`SplitMode::None`].
    pub main: u32,
    /// Portions of the layers per device, in the order of the devices; empty divides by free memory.
    pub tensor_split: Vec<f32>,
    /// Number of layers, from the first, whose experts the CPU computes although the layer is on a device.
    pub n_cpu_moe: u32,
    /// Whether devices compute the experts of such layers, and other weights in host memory, in large batches, where
    /// they do so for llama.cpp.
    #[default(true)]
    pub op_offload: bool,
    /// Ordinary weights placed elsewhere; the first match decides. Experts ignore this.
    pub override_tensors: Vec<TensorOverride>,
    /// Device memory for experts, over all devices, or percent of all experts.
    pub cache: ExpertCache,
    /// Percent of a device's memory that stays free, `0.0..=100.0`.
    #[default(Self::HEADROOM)]
    pub headroom: f64,
    /// Whether the CPU computes missing experts.
    pub cpu_helper: CpuHelper,
    /// Keep experts in pinned host memory where the device offers it.
    #[default(true)]
    pub pinned: bool,
    /// Whether experts are computed in place in host memory.
    pub unified: UnifiedMemory,
}

impl DeviceOptions {
    /// Room for drivers, other programs and the backend's temporary buffers.
    pub(crate) const HEADROOM: f64 = 10.0;
}

/// The largest absolute factor of a LoRA adapter or control vector. Useful factors are around 1, and ComfyUI, too,
/// accepts LoRA strengths up to 100. Far larger ones overflow keys and values of F16.
pub const SCALE_MAX: f32 = 100.0;

#[derive(Clone, Debug, PartialEq)]
pub struct ScaledFile {
    pub path: PathBuf,
    /// Factor, at most [`SCALE_MAX`] either way.
    pub scale: f32,
}

/// LoRA adapters and control vectors, as in llama.cpp. Experts are used as stored in their files: an adapter for
/// experts is refused, unless the whole model fits and llama.cpp runs it by itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterOptions {
    /// LoRA adapters: low-rank additions to ordinary weights. A scale of 0 loads one without applying it.
    pub lora: Vec<ScaledFile>,
    /// Control vectors: directions added to the layers' outputs, summed up.
    pub control_vectors: Vec<ScaledFile>,
    /// First and last layer that control vectors act on, from 1; `None` for all but layer 0, for which no vector
    /// exists.
    pub control_layers: Option<(u32, u32)>,
}

impl AdapterOptions {
    /// Files of all adapters, each with the name of its option.
    pub fn files(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let lora = self.lora.iter().map(|file| ("lora", file.path.as_path()));
        lora.chain(self.control_vectors.iter().map(|file| ("control_vectors", file.path.as_path())))
    }

    pub fn is_empty(&self) -> bool {
        self.lora.is_empty() && self.control_vectors.is_empty()
    }
}

impl ScaledFile {
    /// A file with factor 1.
    pub fn whole(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), scale: 1.0 }
    }
}

impl FromStr for ScaledFile {
    type Err = String;

    /// `FNAME:SCALE`; the scale follows the last colon.
    fn from_str(text: &str) -> Result<Self, String> {
        let (path, scale) = text.rsplit_once(':').filter(|(path, _)| !path.is_empty()).ok_or("expected FNAME:SCALE")?;
        let scale = scale.parse::<f32>().ok().filter(|scale| scale.abs() <= SCALE_MAX);
        let scale = scale.ok_or_else(|| {
            format!("expected a number from -{SCALE_MAX} to {SCALE_MAX} behind the last colon of '{text}'")
        })?;
        Ok(Self { path: path.into(), scale })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_a_scale() {
        let file = ScaledFile { path: "a:b.gguf".into(), scale: -0.5 };
        assert_eq!("a:b.gguf:-0.5".parse(), Ok(file));
        for wrong in ["a.gguf", ":1", "a.gguf:", "a.gguf:inf", "a.gguf:nan", "a.gguf:101", "a.gguf:-1e38", "a.gguf:x"] {
            assert!(wrong.parse::<ScaledFile>().is_err(), "{wrong}");
        }
    }
}
