//! Changes to a model from other files: LoRA adapters and control vectors.

use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The largest absolute factor of a LoRA adapter or control vector. Useful factors are around 1, and ComfyUI, too,
/// accepts LoRA strengths up to 100. Far larger ones overflow keys and values of F16.
pub const SCALE_MAX: f32 = 100.0;

/// A file and its factor.
#[derive(Clone, Debug, PartialEq)]
pub struct ScaledFile {
    /// The file.
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

    /// Whether there are no adapters.
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
