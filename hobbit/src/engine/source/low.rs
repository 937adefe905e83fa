//! Checks that a second GGUF is the same model in a smaller quant, and names low-precision files made by hobbit.
//!
//! Equal shapes prove little: every fine-tune of a model has them. Routers prove more: llama-quantize leaves them
//! unchanged, so two quants of one model have equal routers, and experts are only interchangeable between equal
//! routers.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::engine::error::LowError;
use crate::engine::ggml::quantise::Ggml;
use hobbit_core::files::FileExt;
use hobbit_core::gguf::{Catalog, Gguf, GgufError, Recode, TensorInfo};

/// Bytes of a tensor read at a time, unless a row is longer.
const BATCH_BYTES: u64 = 1 << 20;
/// Maximum elements of a router's row (`n_embd`); no model is near this.
const ROW_ELEMENTS_MAX: u64 = 1 << 24;
/// Tolerance between f32, f16 and bf16 routers: distance of two elements, relative to the tensor's root mean square ...
const FLOAT_TOLERANCE: f64 = 1e-2;
/// ... in addition to rounding to bf16, relative to the element.
const BF16_ROUNDING: f64 = 1.0 / 256.0;
/// Tolerance for a quantised router: root mean square of all distances, relative to the tensor's.
const QUANTISED_TOLERANCE: f64 = 0.1;

/// Checks that `low` is the same model as `model` in another quant: architecture, sizes, vocabulary, the shapes of all
/// experts, and the weights of all routers. Reads the routers of both, at most a few MiB at a time.
///
/// # Errors
/// [`LowError`] with the file, the property and both values; [`GgufError::Io`] if a router cannot be read.
pub fn check_low(model: &Gguf, low: &Gguf) -> Result<(), LowError> {
    let pair = Pair { model, low };
    pair.check_keys()?;
    let experts = model.experts()?;
    let added = Catalog::plain(&experts).add_low(&low.experts()?, model.files.len() as u32);
    added.map_err(|mismatch| pair.differs(mismatch.to_string(), ""))?;
    for tensor in model.tensors.iter().filter(|tensor| is_router(&tensor.name)) {
        pair.check_router(tensor)?;
    }
    match low.tensors.iter().find(|tensor| is_router(&tensor.name) && model.tensor(&tensor.name).is_none()) {
        Some(extra) => Err(pair.router(&extra.name, "a tensor".to_owned(), "no such tensor".to_owned())),
        None => Ok(()),
    }
}

/// Path of the low-precision experts made from `model`: beside it or in `directory`, named after the model (without the
/// shard's number) and the types: `mixtral.gguf` and `q2_k,down=q3_k` give `mixtral.low-q2_k+down-q3_k.hobbit.gguf`.
/// Other types give another name.
pub fn low_cache_path(model: &Path, types: &str, directory: Option<&Path>) -> PathBuf {
    let name = model.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.strip_suffix(".gguf").unwrap_or(&name);
    let types: String = types
        .chars()
        .map(|c| match c.to_ascii_lowercase() {
            ',' => '+',
            '=' => '-',
            c if c.is_ascii_alphanumeric() || c == '.' => c,
            _ => '_',
        })
        .collect();
    let file = format!("{}.low-{types}.hobbit.gguf", without_shard(stem));
    match directory {
        Some(directory) => directory.join(file),
        None => model.with_file_name(file),
    }
}

/// `big-00002-of-00003` is `big`.
fn without_shard(stem: &str) -> &str {
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    let prefix = || {
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        (digits(count) && digits(number) && !prefix.is_empty()).then_some(prefix)
    };
    prefix().unwrap_or(stem)
}

/// Weights, biases and scales of `blk.<l>.ffn_gate_inp`, and `blk.<l>.exp_probs_b`; not the gate of shared experts.
fn is_router(name: &str) -> bool {
    let part = || name.strip_prefix("blk.")?.split('.').nth(1);
    matches!(part(), Some("ffn_gate_inp" | "exp_probs_b"))
}

fn path(gguf: &Gguf) -> Box<Path> {
    gguf.files[0].path.as_path().into()
}

struct Pair<'a> {
    model: &'a Gguf,
    low: &'a Gguf,
}

impl Pair<'_> {
    fn check_keys(&self) -> Result<(), LowError> {
        let architecture = self.model.architecture();
        let own = |gguf: &Gguf, key: &str| gguf.metadata.get_u64(&format!("{architecture}.{key}"));
        self.same("general.architecture", |gguf| Some(gguf.architecture().to_owned()))?;
        for key in ["block_count", "embedding_length", "expert_count"] {
            self.same(&format!("{architecture}.{key}"), |gguf| own(gguf, key).map(|n| n.to_string()))?;
        }
        let used = |gguf: &Gguf| Some(gguf.n_expert_used_max().to_string());
        self.same(&format!("{architecture}.expert_used_count"), used)?;
        self.same("number of tokens in tokenizer.ggml.tokens", |gguf| {
            gguf.metadata.get_arr_len("tokenizer.ggml.tokens").map(|n| n.to_string())
        })
    }

    fn same(&self, key: &str, value: impl Fn(&Gguf) -> Option<String>) -> Result<(), LowError> {
        let (found, expected) = (value(self.low), value(self.model));
        if found == expected {
            return Ok(());
        }
        let word = |value: Option<String>| value.unwrap_or_else(|| "missing".to_owned());
        Err(self.differs(format!("{key} is {}, expected {}", word(found), word(expected)), ""))
    }

    fn differs(&self, what: String, note: &'static str) -> LowError {
        LowError::OtherModel { low: path(self.low), model: path(self.model), what, note }
    }

    fn router(&self, tensor: &str, found: String, expected: String) -> LowError {
        let what = format!("tensor '{tensor}': {found}, expected {expected}");
        self.differs(what, "; this is another model or fine-tune of the same shape")
    }

    fn check_router(&self, ours: &TensorInfo) -> Result<(), LowError> {
        let shape = |tensor: &TensorInfo| format!("shape {:?}", tensor.dims);
        let Some(theirs) = self.low.tensor(&ours.name).filter(|theirs| theirs.dims == ours.dims) else {
            let found = self.low.tensor(&ours.name).map_or("no such tensor".to_owned(), shape);
            return Err(self.router(&ours.name, found, shape(ours)));
        };
        let (mut ours_rows, mut theirs_rows) = (Rows::open(self.model, ours)?, Rows::open(self.low, theirs)?);
        // Quantisers differ between versions and with an importance matrix, so equal quantised types may differ in
        // values.
        let is_quantised = ours.dtype.is_quantized() || theirs.dtype.is_quantized();
        let must_be_equal = !is_quantised && ours.dtype == theirs.dtype;
        let mut distance = Distance::default();
        // Both batches have the same number of rows, whatever their types; an empty tensor has none.
        let n_rows = ours.extent.len.checked_div(ours_rows.row_bytes).unwrap_or(0);
        let at_once = (BATCH_BYTES / ours_rows.row_bytes.max(theirs_rows.row_bytes).max(1)).max(1);
        for first in (0..n_rows).step_by(at_once as usize) {
            let n = at_once.min(n_rows - first);
            ours_rows.read(first, n)?;
            theirs_rows.read(first, n)?;
            if must_be_equal && ours_rows.bytes != theirs_rows.bytes {
                let expected = format!("the same bytes, both being {}", ours.dtype);
                return Err(self.router(&ours.name, "other weights".to_owned(), expected));
            }
            distance.add(&ours_rows.values, &theirs_rows.values);
        }
        let is_close = match is_quantised {
            _ if must_be_equal => true,
            true => distance.relative() < QUANTISED_TOLERANCE,
            false => distance.largest_in_rms() <= FLOAT_TOLERANCE,
        };
        if is_close {
            return Ok(());
        }
        let (found, most) = match is_quantised {
            true => (
                format!("{:.0} % apart", distance.relative() * 100.0),
                format!("less than {} %", QUANTISED_TOLERANCE * 100.0),
            ),
            false => (
                format!("up to {:.2} root mean squares apart", distance.largest_in_rms()),
                format!("at most {FLOAT_TOLERANCE}"),
            ),
        };
        let (ours_type, theirs_type) = (ours.dtype, theirs.dtype);
        let expected = format!("{most} between {theirs_type} and {ours_type}");
        Err(self.router(&ours.name, format!("{theirs_type} weights {found}"), expected))
    }
}

/// Distance of two tensors.
#[derive(Default)]
struct Distance {
    squares: f64,
    square_errors: f64,
    n: u64,
    /// Largest distance of two elements beyond rounding.
    largest: f64,
}

impl Distance {
    fn add(&mut self, ours: &[f32], theirs: &[f32]) {
        for (a, b) in ours.iter().zip(theirs) {
            let (a, b) = (f64::from(*a), f64::from(*b));
            let error = (a - b).abs();
            self.squares += a * a;
            self.square_errors += error * error;
            let excess = error - BF16_ROUNDING * a.abs();
            // Not `max`, which ignores NaN.
            if !(excess <= self.largest || self.largest.is_nan()) {
                self.largest = excess;
            }
        }
        self.n += ours.len() as u64;
    }

    /// The largest distance, in root mean squares of the first tensor. NaN stays NaN, which is within no tolerance.
    fn largest_in_rms(&self) -> f64 {
        if self.largest == 0.0 { 0.0 } else { self.largest / (self.squares / self.n as f64).sqrt() }
    }

    fn relative(&self) -> f64 {
        if self.square_errors == 0.0 { 0.0 } else { (self.square_errors / self.squares).sqrt() }
    }
}

/// A tensor's values, some rows at a time.
struct Rows<'a> {
    file: File,
    path: &'a Path,
    tensor: &'a TensorInfo,
    row_bytes: u64,
    bytes: Vec<u8>,
    values: Vec<f32>,
}

impl<'a> Rows<'a> {
    fn open(gguf: &'a Gguf, tensor: &'a TensorInfo) -> Result<Self, LowError> {
        let path = gguf.files[tensor.extent.file as usize].path.as_path();
        let file = File::open(path).map_err(|error| io(path, "open".to_owned(), error))?;
        let ne0 = tensor.dims[0];
        if ne0 > ROW_ELEMENTS_MAX {
            let what = format!("row length of tensor '{}'", tensor.name);
            return Err(GgufError::TooLarge { path: path.to_owned(), what, found: ne0, limit: ROW_ELEMENTS_MAX }.into());
        }
        // The reader has checked that rows are whole blocks.
        let row_bytes = tensor.dtype.row_bytes(ne0).unwrap_or(0);
        Ok(Self { file, path, tensor, row_bytes, bytes: Vec::new(), values: Vec::new() })
    }

    fn read(&mut self, first: u64, n: u64) -> Result<(), LowError> {
        let Self { file, path, tensor: TensorInfo { name, dtype, dims, extent, .. }, row_bytes, bytes, values } = self;
        bytes.resize((n * *row_bytes) as usize, 0);
        let read = file.read_exact_at(bytes, extent.offset + first * *row_bytes);
        read.map_err(|error| io(path, format!("read tensor '{name}'"), error))?;
        let decoded = Ggml.dequantise(*dtype, dims[0], bytes, values);
        decoded.map_err(|source| LowError::Values { path: path.to_path_buf(), tensor: name.clone(), source })
    }
}

fn io(path: &Path, action: String, error: std::io::Error) -> LowError {
    GgufError::Io { path: path.to_owned(), action, error }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routers_are_known_by_name() {
        for name in
            ["blk.0.ffn_gate_inp.weight", "blk.11.ffn_gate_inp.bias", "blk.3.exp_probs_b.bias", "blk.3.exp_probs_b"]
        {
            assert!(is_router(name), "{name}");
        }
        for name in ["blk.0.ffn_gate_inp_shexp.weight", "ffn_gate_inp.weight", "blk.0.ffn_gate.weight", "blk.0"] {
            assert!(!is_router(name), "{name}");
        }
    }

    #[test]
    fn cache_files_are_named_after_model_and_types() {
        let name = |model: &str, types| low_cache_path(Path::new(model), types, None);
        assert_eq!(name("/m/mixtral.gguf", "q2_K"), Path::new("/m/mixtral.low-q2_k.hobbit.gguf"));
        assert_eq!(name("mixtral.gguf", "q2_k,down=q3_k"), Path::new("mixtral.low-q2_k+down-q3_k.hobbit.gguf"));
        assert_eq!(name("/m/big-00002-of-00003.gguf", "q2_k"), Path::new("/m/big.low-q2_k.hobbit.gguf"));
        assert_eq!(name("/m/big-0002-of-00003.gguf", "q2_k"), Path::new("/m/big-0002-of-00003.low-q2_k.hobbit.gguf"));
        assert_eq!(name("/m/model", "../x"), Path::new("/m/model.low-.._x.hobbit.gguf"));
        let elsewhere = low_cache_path(Path::new("/m/mixtral.gguf"), "q2_k", Some(Path::new("/fast")));
        assert_eq!(elsewhere, Path::new("/fast/mixtral.low-q2_k.hobbit.gguf"));
    }

    #[test]
    fn distances_do_not_overlook_nan() {
        let satisfied = |ours: &[f32], theirs: &[f32]| {
            let mut distance = Distance::default();
            distance.add(ours, theirs);
            [distance.largest_in_rms() <= FLOAT_TOLERANCE, distance.relative() < QUANTISED_TOLERANCE]
        };
        assert_eq!(satisfied(&[1.0, 2.0, 3.0], &[1.0, f32::NAN, 3.5]), [false, false]);
        assert_eq!(satisfied(&[1.0, f32::NAN, 3.0], &[1.0, 2.0, 3.0]), [false, false]);
        assert_eq!(satisfied(&[0.0; 4], &[0.0; 4]), [true, true]);
        assert_eq!(satisfied(&[0.0; 4], &[0.0, 0.0, 0.1, 0.0]), [false, false]);
        assert_eq!(satisfied(&[1.0; 4], &[1.0, 1.0, 1.05, 1.0]), [false, true]);
        assert_eq!(satisfied(&[1.0; 4], &[1.01; 4]), [true, true]);
    }
}
