//! LoRA adapters and control vectors: files beside a model's, checked against it before llama.cpp sees them.
//!
//! For each weight W, `[n_in, n_out]`, that it changes, an adapter (`general.type` = `adapter`) has `W.lora_a`,
//! `[n_in, rank]`, and `W.lora_b`, `[rank, n_out]`; W x becomes W x + scale · alpha / rank · B A x (llama.cpp,
//! `build_lora_mm`). A control vector has tensors `direction.<layer>`, `[n_embd]` of f32, added to a layer's output.

use std::path::{Path, PathBuf};

use super::experts::parse_name;
use super::{GgmlType, Gguf, GgufError, TensorInfo};
use crate::files::FileExt;

/// Why a file cannot be used beside a model.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("{}: this file cannot be used as a {kind}: {fault}", path.display())]
    Unusable { path: PathBuf, kind: &'static str, fault: String },
    #[error(
        "{}: this LoRA adapter changes experts ({tensor}), which hobbit reads as the model's file has them; merge it \
         into the model (llama-export-lora)", path.display()
    )]
    OfExperts { path: PathBuf, tensor: String },
}

/// Facts from the header of an adapter that fits the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoraSummary {
    pub bytes: u64,
    /// The most elements of a row that its products add to the graph: rank, and twice as many as a weight puts out.
    pub row_elements: u64,
    /// `row_elements` of the output weights, which multiply few rows of a batch.
    pub output_row_elements: u64,
    /// An expert tensor that it changes.
    pub of_experts: Option<String>,
    /// Norm vectors, which llama.cpp leaves out.
    pub n_left_out: usize,
    /// `adapter.lora.task_name`.
    pub task_name: String,
    /// `adapter.lora.prompt_prefix`.
    pub prompt_prefix: String,
}

const LORA: &str = "LoRA adapter";
const CONTROL: &str = "control vector";

/// Reads an adapter's header, holds it against the model's, and looks through its weights for numbers that are not
/// finite.
pub fn check_lora(path: &Path, model: &Gguf) -> Result<LoraSummary, AdapterError> {
    let adapter = Gguf::open(path)?;
    let unusable = |fault| AdapterError::Unusable { path: path.to_owned(), kind: LORA, fault };
    let summary = lora_summary(&adapter, model).map_err(unusable)?;
    let read = |error| GgufError::Io { path: path.to_owned(), action: "read".to_owned(), error };
    let file = std::fs::File::open(path).map_err(read)?;
    for tensor in &adapter.tensors {
        if !is_finite(&file, tensor).map_err(read)? {
            return Err(unusable(format!("{} is not finite", tensor.name)));
        }
    }
    Ok(summary)
}

/// Bytes that are read at once: whole blocks of every type that [`multiplies`].
const PIECE_BYTES: usize = 68 << 14;

/// Whether a tensor of a type that [`multiplies`] holds finite numbers only: where the exponent of a number, or of a
/// block's scale, has all its bits set, it does not. Other types are refused, or not loaded.
fn is_finite(file: &std::fs::File, tensor: &TensorInfo) -> std::io::Result<bool> {
    let (block, exponent_at, exponent) = match tensor.dtype {
        GgmlType::F32 => (4, 2, 0x7f80),
        GgmlType::BF16 => (2, 0, 0x7f80),
        GgmlType::F16 => (2, 0, 0x7c00),
        GgmlType::Q8_0 => (34, 0, 0x7c00),
        _ => return Ok(true),
    };
    let is_special =
        |block: &[u8]| u16::from_le_bytes([block[exponent_at], block[exponent_at + 1]]) & exponent == exponent;
    let mut bytes = vec![0; PIECE_BYTES];
    for at in (0..tensor.extent.len).step_by(PIECE_BYTES) {
        let n = (tensor.extent.len - at).min(PIECE_BYTES as u64) as usize;
        file.read_exact_at(&mut bytes[..n], tensor.extent.offset + at)?;
        if bytes[..n].chunks_exact(block).any(is_special) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// llama.cpp reads one file, and so does [`read_directions`].
fn check_whole(file: &Gguf) -> Result<(), String> {
    match file.files.len() {
        1 => Ok(()),
        n => Err(format!("it is one of {n} parts, and has to be one file")),
    }
}

fn lora_summary(adapter: &Gguf, model: &Gguf) -> Result<LoraSummary, String> {
    check_whole(adapter)?;
    let text = |key: &str| adapter.metadata.get_str(key).unwrap_or_default();
    for (key, expected) in [("general.type", "adapter"), ("adapter.type", "lora")] {
        if text(key) != expected {
            return Err(format!("its {key} is '{}', expected '{expected}'", text(key)));
        }
    }
    if text("general.architecture") != model.architecture() {
        let (found, expected) = (text("general.architecture"), model.architecture());
        return Err(format!("it is made for the architecture '{found}', and the model's is '{expected}'"));
    }
    const ALPHA: &str = "adapter.lora.alpha";
    if adapter.metadata.value_type(ALPHA).is_some() && adapter.metadata.get_f32(ALPHA).is_none() {
        return Err(format!("its {ALPHA} is no finite number"));
    }
    if adapter.metadata.get_arr_len("adapter.alora.invocation_tokens").is_some() {
        return Err("it is to be applied behind certain tokens only (aLoRA), which is not supported".to_owned());
    }
    let mut summary = LoraSummary {
        task_name: text("adapter.lora.task_name").to_owned(),
        prompt_prefix: text("adapter.lora.prompt_prefix").to_owned(),
        ..LoraSummary::default()
    };
    let mut n_pairs = 0;
    for tensor in &adapter.tensors {
        if let Some(name) = tensor.name.strip_suffix(".lora_b") {
            if adapter.tensor(&format!("{name}.lora_a")).is_none() {
                return Err(format!("{} is there without {name}.lora_a", tensor.name));
            }
        } else if let Some(name) = tensor.name.strip_suffix(".lora_a") {
            let missing = || format!("{} is there without {name}.lora_b", tensor.name);
            let b = adapter.tensor(&format!("{name}.lora_b")).ok_or_else(missing)?;
            let weight = model.tensor(name).ok_or_else(|| format!("the model has no tensor {name}"))?;
            check_pair(weight, tensor, b, model).map_err(|fault| format!("{name}: {fault}"))?;
            summary.add(weight, tensor, b);
            n_pairs += 1;
        } else if tensor.name.ends_with("_norm.weight") {
            summary.n_left_out += 1;
        } else {
            return Err(format!("its tensor {} is neither .lora_a nor .lora_b", tensor.name));
        }
    }
    if n_pairs == 0 {
        return Err("it changes nothing: it has no pair of tensors .lora_a and .lora_b".to_owned());
    }
    Ok(summary)
}

impl LoraSummary {
    fn add(&mut self, weight: &TensorInfo, a: &TensorInfo, b: &TensorInfo) {
        self.bytes = self.bytes.saturating_add(a.extent.len).saturating_add(b.extent.len);
        let row = rows(a).saturating_add(rows(weight).saturating_mul(2));
        let most = if weight.name == "output.weight" { &mut self.output_row_elements } else { &mut self.row_elements };
        *most = row.max(*most);
        if parse_name(&weight.name).is_some() {
            self.of_experts.get_or_insert_with(|| weight.name.clone());
        }
    }
}

fn rows(tensor: &TensorInfo) -> u64 {
    tensor.dims.get(1).copied().unwrap_or(1)
}

/// Compares a pair's shapes with its weight's: llama.cpp checks them only while it computes, and ends the process.
fn check_pair(weight: &TensorInfo, a: &TensorInfo, b: &TensorInfo, model: &Gguf) -> Result<(), String> {
    let dims = |tensor: &TensorInfo| [0, 1, 2, 3].map(|axis| tensor.dims.get(axis).copied().unwrap_or(1));
    let ([n_in, n_out, n_expert, last], a_dims, b_dims) = (dims(weight), dims(a), dims(b));
    let is_embedding = weight.name == "token_embd.weight";
    if is_embedding && model.tensor("output.weight").is_none() {
        return Err("the model uses it for its output as well, which an adapter cannot change alike".to_owned());
    }
    if last != 1 || (n_expert != 1 && parse_name(&weight.name).is_none()) {
        return Err(format!("{:?} is no matrix", weight.dims));
    }
    let rank = if is_embedding { a_dims[0] } else { a_dims[1] };
    let expected = match is_embedding {
        // Rows are looked up.
        true => ([rank, n_out, 1, 1], [rank, n_in, 1, 1]),
        false => ([n_in, rank, n_expert, 1], [rank, n_out, n_expert, 1]),
    };
    if (a_dims, b_dims) != expected || rank == 0 {
        return Err(format!("shapes {:?} and {:?} do not make {:?}", a.dims, b.dims, weight.dims));
    }
    let wrong = [a, b].into_iter().find(|tensor| !multiplies(tensor.dtype));
    wrong.map_or(Ok(()), |tensor| Err(format!("{} is of type {}", tensor.name, tensor.dtype)))
}

/// Types that adapters are converted to (`convert_lora_to_gguf.py`), and that every backend multiplies.
fn multiplies(dtype: GgmlType) -> bool {
    [GgmlType::F32, GgmlType::F16, GgmlType::BF16, GgmlType::Q8_0].contains(&dtype)
}

/// Directions of several control vectors, summed up: `[n_layer - 1][n_embd]`, from layer 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Directions {
    /// One after the other.
    pub data: Vec<f32>,
    pub n_embd: u32,
}

/// Reads control vectors, each a file and its factor.
pub fn read_directions<'a>(
    files: impl IntoIterator<Item = (&'a Path, f32)>,
    model: &Gguf,
) -> Result<Directions, AdapterError> {
    let number = |key: &str| model.metadata.get_u64(&format!("{}.{key}", model.architecture()));
    let n_embd = number("embedding_length").and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
    // As many as the header of a model that was loaded may say.
    let n_layer = number("block_count").unwrap_or(0).min(u16::MAX.into()) as usize;
    let mut data = vec![0.0; n_embd as usize * n_layer.saturating_sub(1)];
    for (path, scale) in files {
        let vector = Gguf::open(path)?;
        let unusable = |fault| AdapterError::Unusable { path: path.to_owned(), kind: CONTROL, fault };
        let directions = check_whole(&vector).and_then(|()| directions(&vector, n_embd, n_layer)).map_err(unusable)?;
        let read = |error| GgufError::Io { path: path.to_owned(), action: "read".to_owned(), error };
        let file = std::fs::File::open(path).map_err(read)?;
        let mut bytes = vec![0; n_embd as usize * 4];
        for (layer, tensor) in directions {
            file.read_exact_at(&mut bytes, tensor.extent.offset).map_err(read)?;
            let values = bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
            let into = &mut data[(layer - 1) * n_embd as usize..layer * n_embd as usize];
            into.iter_mut().zip(values).for_each(|(sum, value)| *sum += value * scale);
            if into.iter().any(|value| !value.is_finite()) {
                return Err(unusable(format!("{} is not finite", tensor.name)));
            }
        }
    }
    Ok(Directions { data, n_embd })
}

fn directions(vector: &Gguf, n_embd: u32, n_layer: usize) -> Result<Vec<(usize, &TensorInfo)>, String> {
    let direction = |tensor| {
        let TensorInfo { name, dtype, dims, .. }: &TensorInfo = tensor;
        let layer = name.strip_prefix("direction.").and_then(|layer| layer.parse::<usize>().ok());
        let layer =
            layer.filter(|layer| *layer > 0).ok_or_else(|| format!("its tensor {name} is no direction of a layer"))?;
        if layer >= n_layer {
            return Err(format!(
                "it has a direction of layer {layer}, and the model's last is {}",
                n_layer.saturating_sub(1)
            ));
        }
        if *dtype != GgmlType::F32 || dims.iter().skip(1).any(|n| *n != 1) || dims.first() != Some(&n_embd.into()) {
            return Err(format!("{name} is {dims:?} of {dtype}, and the model takes [{n_embd}] of f32"));
        }
        Ok((layer, tensor))
    };
    let found: Vec<_> = vector.tensors.iter().map(direction).collect::<Result<_, _>>()?;
    if found.is_empty() { Err("it has no directions".to_owned()) } else { Ok(found) }
}

#[cfg(test)]
mod tests;
