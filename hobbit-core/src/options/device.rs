//! Where ordinary weights and expert products go when there is more than one place.

use std::fmt;
use std::str::FromStr;

use smart_default::SmartDefault;

use crate::load::balance::HelperMode;
use crate::plan::ExpertCache;
use crate::words::{UnknownWord, named};

/// Which devices a model is offloaded to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// Every GPU there is, RPC servers first; the CPU alone where there is none.
    #[default]
    Auto,
    /// The CPU alone.
    None,
    /// These, by the names that `--list-devices` shows, in this order.
    Named(Vec<String>),
}

impl FromStr for DeviceChoice {
    type Err = UnknownWord;

    /// `none`, or names separated by commas.
    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        match text {
            "none" => Ok(Self::None),
            _ if names.iter().any(String::is_empty) => {
                Err(UnknownWord::new("device", text, "none, or names of devices, separated by commas"))
            }
            _ => Ok(Self::Named(names)),
        }
    }
}

/// How a model is divided among several devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SplitMode {
    /// One device holds everything.
    None,
    /// Whole layers.
    #[default]
    Layer,
}

named!(SplitMode, "split mode": None = "none", Layer = "layer");

/// Whether missing experts may be computed on the CPU while the device computes the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuHelper {
    /// Where measured times say that it is sooner than copying.
    #[default]
    Auto,
    /// Every missing expert that is in host memory.
    On,
    /// Never.
    Off,
    /// As [`CpuHelper::Auto`], with so many threads.
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
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        match word {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => match word.parse::<u16>() {
                Ok(0) => Ok(Self::Off),
                Ok(threads) => Ok(Self::Threads(threads)),
                Err(_) => Err(UnknownWord::new("CPU helper setting", word, "auto, on, off, or a number of threads")),
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

/// Where ordinary weights of some names go: llama.cpp's `--override-tensor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorOverride {
    /// A regular expression (C++'s) that a tensor's name contains.
    pub pattern: String,
    /// A buffer type by ggml's name: `CPU`, or a device's such as `CUDA0`.
    pub buffer_type: String,
}

impl FromStr for TensorOverride {
    type Err = UnknownWord;

    /// `PATTERN=BUFFER`.
    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        match text.rsplit_once('=') {
            Some((pattern, buffer_type))
                if ![pattern, buffer_type].iter().any(|part| part.is_empty() || part.contains('\0')) =>
            {
                Ok(Self { pattern: pattern.to_owned(), buffer_type: buffer_type.to_owned() })
            }
            _ => Err(UnknownWord::new("tensor override", text, r"PATTERN=BUFFER, such as attn_.*\.weight=CPU")),
        }
    }
}

impl fmt::Display for TensorOverride {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.pattern, self.buffer_type)
    }
}

/// Where ordinary weights and expert products go.
#[derive(Clone, Debug, PartialEq, SmartDefault)]
pub struct DeviceOptions {
    /// Which devices.
    pub devices: DeviceChoice,
    /// Endpoints (`host:port`) of ggml RPC servers whose devices are to be had.
    pub rpc: Vec<String>,
    /// How several devices share the model.
    pub split: SplitMode,
    /// The device that is used alone with [`SplitMode::None`], counted among the chosen ones.
    pub main: u32,
    /// Portions of the layers per device, in the order of the devices; empty divides by free memory.
    pub tensor_split: Vec<f32>,
    /// Layers, counted from the first, whose experts are computed on the CPU although the layer is on a device.
    pub n_cpu_moe: u32,
    /// Ordinary weights that go elsewhere, the first match deciding. Experts are placed by what comes after this.
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
    /// Measure link and CPU before the first token, about a second unless this machine has been measured before. Without
    /// it the CPU helper learns as it goes.
    pub calibrate: bool,
}

impl DeviceOptions {
    /// Drivers, other programs and the backend's temporary buffers need room, too.
    pub const HEADROOM: f64 = 10.0;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_word_decides() {
        let modes = [CpuHelper::Auto, CpuHelper::On, CpuHelper::Off, CpuHelper::Threads(3)].map(HelperMode::from);
        assert_eq!(modes, [HelperMode::Auto, HelperMode::On, HelperMode::Off, HelperMode::Auto]);
    }
}
