//! Flags of what is added to a model.

use std::path::PathBuf;

use clap::Args;

use hobbit::options::{AdapterOptions, ScaledFile};

use crate::argv::PAIR;

#[derive(Args, Debug)]
#[command(next_help_heading = "Model")]
pub struct AdapterArgs {
    /// LoRA adapter, applied to ordinary weights; comma-separated or repeated. One of experts needs memory for the whole model
    #[arg(long, value_name = "FNAME", value_delimiter = ',')]
    pub lora: Vec<PathBuf>,
    /// LoRA adapter and by how much of it; these count after those of --lora
    #[arg(long, value_name = "FNAME:SCALE", value_delimiter = ',')]
    pub lora_scaled: Vec<ScaledFile>,
    /// Control vector, added to what layers put out; comma-separated or repeated
    #[arg(long, value_name = "FNAME", value_delimiter = ',')]
    pub control_vector: Vec<PathBuf>,
    /// Control vector and by how much of it
    #[arg(long, value_name = "FNAME:SCALE", value_delimiter = ',')]
    pub control_vector_scaled: Vec<ScaledFile>,
    /// The first and the last layer that control vectors act on (default: all)
    #[arg(long, value_name = PAIR, value_parser = layers)]
    pub control_vector_layer_range: Option<(u32, u32)>,
}

impl AdapterArgs {
    /// As the engine takes them.
    pub fn options(&self) -> AdapterOptions {
        let all = |whole: &[PathBuf], scaled: &[ScaledFile]| {
            whole.iter().map(ScaledFile::whole).chain(scaled.iter().cloned()).collect()
        };
        AdapterOptions {
            lora: all(&self.lora, &self.lora_scaled),
            control_vectors: all(&self.control_vector, &self.control_vector_scaled),
            control_layers: self.control_vector_layer_range,
        }
    }
}

/// `START,END`; what is not above 0 means the first or the last, as in llama.cpp.
fn layers(text: &str) -> Result<(u32, u32), String> {
    let (start, end) = text.split_once(',').ok_or("expected two numbers")?;
    let layer = |text: &str, all: u32| match text.trim().parse::<i32>() {
        Ok(n) => Ok(u32::try_from(n).ok().filter(|n| *n > 0).unwrap_or(all)),
        Err(_) => Err(format!("'{text}' is no number of a layer")),
    };
    let (first, last) = (layer(start, 1)?, layer(end, i32::MAX as u32)?);
    if first > last { Err(format!("layer {first} is behind layer {last}")) } else { Ok((first, last)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_from_and_to() {
        assert_eq!(layers("2,7"), Ok((2, 7)));
        assert_eq!(layers("0,-1"), Ok((1, i32::MAX as u32)));
        for wrong in ["7", "7,2", "a,2", "1,2,3"] {
            assert!(layers(wrong).is_err(), "{wrong}");
        }
    }
}
