//! Checks of a model's files before llama.cpp computes with them.

use std::fs::File;
use std::path::Path;

use ggml_sys::llama;

use crate::engine::error::OpenError;
use crate::engine::ggml::quantise::Aligned;
use hobbit_core::expert::{ExpertId, Extent, Precision, SliceId, Version};
use hobbit_core::files::FileExt;
use hobbit_core::gguf::{Catalog, ExpertMap, GgmlType, Gguf, GgufError, Stored};
use hobbit_core::options::{KvValue, ModelOptions};
use hobbit_core::planes;

/// Keys below the architecture's name: the epsilon that norms add to a variance before taking its root.
const EPSILONS: [&str; 3] =
    ["attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.group_norm_epsilon"];

/// Keys below the architecture's name by which llama.cpp divides numbers of layers and heads.
const DIVISORS: [&str; 2] = ["full_attention_interval", "attention.output_group_count"];

/// Most rounds in which hyper-connections are balanced for each token; models have 20.
const SINKHORN_ROUNDS_MAX: u64 = 1000;

/// Checks header values, and overrides in `options`, that llama.cpp accepts until it computes with them: a failed
/// assertion, or a division by zero, would then end the process.
///
/// # Errors
/// [`OpenError::Load`] with the key, its value, and the expected value; [`OpenError::Overridden`].
pub(crate) fn check_header(gguf: &Gguf, options: &ModelOptions) -> Result<(), OpenError> {
    check_override_types(gguf, options)?;
    let tokenizer = "tokenizer.ggml.model";
    let chosen = options.kv_overrides.iter().find(|chosen| chosen.key == tokenizer).map(|chosen| &chosen.value);
    let kind = match chosen {
        Some(KvValue::Str(kind)) => Some(kind.as_str()),
        _ => gguf.metadata.get_str(tokenizer),
    };
    // Every function of llama.cpp's vocabulary asserts one.
    if let Some(kind @ ("none" | "no_vocab")) = kind {
        let reason = format!(
            "{tokenizer} is {kind}: without a tokenizer it neither reads nor writes text; convert it again together \
             with its tokenizer"
        );
        return Err(OpenError::Load { path: gguf.files[0].path.clone(), reason });
    }
    let count = |key: &str| gguf.metadata.get_u64(&format!("{}.{key}", gguf.architecture()));
    let overridden = options.kv_overrides.iter().any(|chosen| chosen.key.contains(".expert_"));
    if let (Some(n_used), Some(n), false) = (count("expert_used_count"), count("expert_count"), overridden)
        && n_used > n
    {
        let reason = format!("a token uses {n_used} of {n} experts");
        return Err(OpenError::Load { path: gguf.files[0].path.clone(), reason });
    }
    for key in EPSILONS.map(|key| format!("{}.{key}", gguf.architecture())) {
        let chosen = options.kv_overrides.iter().find(|chosen| chosen.key == key).map(|chosen| &chosen.value);
        let value = match chosen {
            Some(KvValue::Float(value)) => Some(*value as f32),
            // llama.cpp refuses an override of another type.
            Some(_) => None,
            None => gguf.metadata.get_f32(&key),
        };
        if let Some(value) = value.filter(|value| value.is_nan() || *value < 0.0) {
            let reason = format!("{key} is {value}, expected a number that is not negative");
            return Err(OpenError::Load { path: gguf.files[0].path.clone(), reason });
        }
    }
    let whole = |key: &str| {
        let key = format!("{}.{key}", gguf.architecture());
        let chosen = options.kv_overrides.iter().find(|chosen| chosen.key == key).map(|chosen| &chosen.value);
        match chosen {
            Some(KvValue::Int(value)) => u64::try_from(*value).ok(),
            _ => gguf.metadata.get_u64(&key),
        }
    };
    check_whole_numbers(gguf, whole).map_err(|reason| OpenError::Load { path: gguf.files[0].path.clone(), reason })
}

/// Checks divisors, and the widths and lists by which llama.cpp makes an indexer's cache: for one without layers it
/// doubles the size of a rotation until that is 0, and divides by it. `whole` reads a key below the architecture's
/// name.
fn check_whole_numbers(gguf: &Gguf, whole: impl Fn(&str) -> Option<u64>) -> Result<(), String> {
    let arch = gguf.architecture();
    if let Some(key) = DIVISORS.into_iter().find(|key| whole(key) == Some(0)) {
        return Err(format!("{arch}.{key} is 0, expected at least 1"));
    }
    // Kernels then rotate without an end.
    if arch.starts_with("minimax") && whole("rope.dimension_count") == Some(0) {
        return Err(format!("{arch}.rope.dimension_count is 0, expected at least 1"));
    }
    let rounds = "hyper_connection.sinkhorn_iterations";
    if let Some(n) = whole(rounds).filter(|n| *n > SINKHORN_ROUNDS_MAX) {
        return Err(format!("{arch}.{rounds} is {n}, expected at most {SINKHORN_ROUNDS_MAX}"));
    }
    // A list, or one number for all layers.
    let of_layers = |key: &str| {
        let list = gguf.metadata.get_u64_arr(&format!("{arch}.{key}"));
        list.or_else(|| whole(key).map(|value| vec![value]))
    };
    let has_none = |key: &str, is_wanted: &dyn Fn(u64) -> bool| {
        let n_layer = whole("block_count").and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
        of_layers(key).is_some_and(|values| !values.into_iter().take(n_layer).any(is_wanted))
    };
    match arch {
        "deepseek4" => {
            let (key, indexer) = ("attention.key_length", "attention.indexer.key_length");
            let of_heads = || Some(whole("embedding_length")? / whole("attention.head_count").filter(|n| *n > 0)?);
            let width = whole(key).or_else(of_heads);
            if let Some(width) = width.filter(|width| whole(indexer) == Some(*width)) {
                return Err(format!("{arch}.{indexer} is {width}, which llama.cpp cannot run if heads are as wide"));
            }
            let ratios = "attention.compress_ratios";
            if has_none(ratios, &|ratio| ratio == 4) {
                return Err(format!("{arch}.{ratios} has no 4, and llama.cpp needs a layer with an indexer"));
            }
        }
        "glm-dsa" | "dots3note" => {
            let types = "attention.indexer.types";
            if has_none(types, &|kind| kind != 0) {
                return Err(format!("{arch}.{types} has only 0, and llama.cpp needs a layer with an indexer"));
            }
            let n_layer = whole("block_count").unwrap_or(0).saturating_sub(whole("nextn_predict_layers").unwrap_or(0));
            let kinds = of_layers(types).into_iter().flatten().take(n_layer as usize).enumerate();
            let named = kinds.filter(|(_, kind)| *kind != 0);
            for name in named.map(|(layer, _)| format!("blk.{layer}.indexer.attn_k.weight")) {
                // A file of layers for multi-token prediction has no others.
                if gguf.tensor(&name).is_none() && !gguf.is_mtp_head() {
                    return Err(format!("{arch}.{types} names a layer whose tensor {name} is missing"));
                }
            }
        }
        _ => {}
    }
    Ok(())
}

/// llama.cpp ignores an override whose type is not the file's.
fn check_override_types(gguf: &Gguf, options: &ModelOptions) -> Result<(), OpenError> {
    for chosen in &options.kv_overrides {
        let (key, file) = (&chosen.key, &gguf.metadata);
        let kinds = [
            ("int", file.get_i64(key).is_some() || file.get_u64(key).is_some()),
            ("bool", file.get_bool(key).is_some()),
            ("str", file.get_str(key).is_some()),
            ("float", file.get_f32(key).is_some()),
        ];
        let given = match &chosen.value {
            KvValue::Int(_) => "int",
            KvValue::Float(_) => "float",
            KvValue::Bool(_) => "bool",
            KvValue::Str(_) => "str",
        };
        // An integer is readable as a float, too: the first kind is the file's.
        let Some((kind, _)) = kinds.into_iter().find(|(_, is_it)| *is_it) else { continue };
        if kind != given {
            let (path, keys) = (gguf.files[0].path.clone(), vec![key.clone()]);
            return Err(OpenError::Overridden { path, keys, reason: format!("its type is {kind}, not {given}") });
        }
    }
    Ok(())
}

/// Bytes read at once.
const PIECE_BYTES: usize = 4 << 20;

/// Checks that a model to run has layers that run: llama.cpp would compute with tensors that are not there.
///
/// # Errors
/// [`OpenError::Load`] with the first one that is missing.
pub(crate) fn check_layers(gguf: &Gguf) -> Result<(), OpenError> {
    let Some(name) = gguf.lacks_layers() else { return Ok(()) };
    let reason = format!("it lacks {name}; layers for multi-token prediction alone are a draft (-md) for their model");
    Err(OpenError::Load { path: gguf.files[0].path.clone(), reason })
}

/// Checks the tables of layers that choose experts by the token alone (DeepSeek V4). Kernels check no id from such a
/// table, and devices use it before the host has seen it.
///
/// # Errors
/// [`GgufError::Malformed`] with a value that is none of the layer's experts; a file that cannot be read.
pub(crate) fn check_tables_of_experts(gguf: &Gguf, map: &ExpertMap) -> Result<(), OpenError> {
    for layer in &map.layers {
        let name = format!("blk.{}.ffn_gate_tid2eid.weight", layer.layer);
        let Some(table) = gguf.tensor(&name) else { continue };
        let path = gguf.files[table.extent.file as usize].path.as_path();
        let malformed = |what: &str, found: String, expected: String| {
            let (path, what) = (path.to_owned(), format!("tensor '{name}': {what}"));
            let remedy = "the model was converted wrongly, fetch or convert it again";
            GgufError::Malformed { path, what, found, expected, remedy }
        };
        if table.dtype != GgmlType::I32 {
            return Err(malformed("type", table.dtype.to_string(), GgmlType::I32.to_string()).into());
        }
        let failed = |action| move |source| OpenError::Io { path: path.to_owned(), action, source };
        let file = File::open(path).map_err(failed("open"))?;
        let experts = 0..layer.n_expert as i32;
        let mut buffer = vec![0u8; PIECE_BYTES.min(table.extent.len as usize)];
        for at in (0..table.extent.len).step_by(PIECE_BYTES) {
            let n = (table.extent.len - at).min(PIECE_BYTES as u64) as usize;
            file.read_exact_at(&mut buffer[..n], table.extent.offset + at).map_err(failed("read"))?;
            let mut ids = buffer[..n].as_chunks().0.iter().map(|le| i32::from_le_bytes(*le));
            if let Some(other) = ids.find(|id| !experts.contains(id)) {
                let expected = format!("0 to {}", layer.n_expert - 1);
                return Err(malformed("expert", other.to_string(), expected).into());
            }
        }
    }
    Ok(())
}

/// A run of whole blocks of one type.
struct Weights {
    name: String,
    dtype: GgmlType,
    extent: Extent,
    /// Only the high plane, which holds the scales.
    is_plane: bool,
}

/// `--check-tensors`: checks, as llama.cpp does while loading, that every block of every weight holds numbers, in all
/// versions of experts. Experts have no memory for llama.cpp to check, so the files are read once more. `progress` is
/// called with 0..=1 and stops by returning false.
///
/// # Errors
/// The first tensor with a block that contains NaN or infinity; a file that cannot be read; [`OpenError::Cancelled`].
pub(crate) fn check_tensors(
    gguf: &Gguf,
    map: &ExpertMap,
    catalog: &Catalog,
    paths: &[&Path],
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<(), OpenError> {
    let all = in_file_order(gguf, map, catalog);
    let total: u64 = all.iter().map(|weights| weights.extent.len).sum();
    let mut done = 0;
    let mut buffer = Aligned::default();
    for of_file in all.chunk_by(|a, b| a.extent.file == b.extent.file) {
        let path = paths[of_file[0].extent.file as usize];
        let failed = |action| move |source| OpenError::Io { path: path.to_owned(), action, source };
        let file = File::open(path).map_err(failed("open"))?;
        for Weights { name, dtype, extent, is_plane } in of_file {
            let block = if *is_plane { planes::HIGH_BYTES as u64 } else { dtype.type_size().max(1) };
            let most = PIECE_BYTES as u64 / block * block;
            for at in (0..extent.len).step_by(most as usize) {
                let n = most.min(extent.len - at) as usize;
                let piece = buffer.bytes(n);
                file.read_exact_at(piece, extent.offset + at).map_err(failed("read"))?;
                let is_valid = match is_plane {
                    true => planes::has_sound_scales(piece),
                    // SAFETY: the bytes are there, aligned for every type of block.
                    false => unsafe {
                        llama::ggml_validate_row_data(dtype.id() as llama::ggml_type, piece.as_ptr().cast(), n)
                    },
                };
                if !is_valid {
                    let reason = format!("{name} has invalid data");
                    return Err(OpenError::Load { path: path.to_owned(), reason });
                }
                done += n as u64;
                if !progress(done as f32 / total.max(1) as f32) {
                    return Err(OpenError::Cancelled);
                }
            }
        }
    }
    Ok(())
}

/// Checks a plain model that is not opened, as [`ModelOptions::check_tensors`] does.
///
/// # Errors
/// As `check_tensors`.
pub fn check_weights(gguf: &Gguf, progress: &mut dyn FnMut(f32) -> bool) -> Result<(), OpenError> {
    let map = gguf.experts()?;
    let paths: Vec<&Path> = gguf.files.iter().map(|file| file.path.as_path()).collect();
    check_tensors(gguf, &map, &Catalog::plain(&map), &paths, progress)
}

fn in_file_order(gguf: &Gguf, map: &ExpertMap, catalog: &Catalog) -> Vec<Weights> {
    let is_expert = |name: &str| map.layers.iter().any(|layer| layer.tensors.iter().any(|tensor| tensor.name == name));
    let ordinary = gguf.tensors.iter().filter(|tensor| !is_expert(&tensor.name));
    let mut all: Vec<Weights> = ordinary
        .map(|tensor| Weights {
            name: format!("tensor '{}'", tensor.name),
            dtype: tensor.dtype,
            extent: tensor.extent,
            is_plane: false,
        })
        .collect();
    for layer in &catalog.layers {
        let each = (0..layer.n_expert).flat_map(|index| Precision::ALL.map(|precision| (index, precision)));
        for (index, precision) in each {
            let Some(source) = layer.source(index, precision) else { continue };
            let version = Version { expert: ExpertId { layer: layer.layer, index }, precision };
            let shapes = &catalog.classes[usize::from(source.class)].slices;
            all.extend(shapes.iter().zip(&source.slices).map(|(shape, slice)| Weights {
                name: format!("tensor '{}'", SliceId { version, kind: shape.kind }),
                dtype: shape.dtype,
                extent: slice.extent,
                is_plane: slice.stored != Stored::Whole,
            }));
        }
    }
    all.sort_by_key(|weights| (weights.extent.file, weights.extent.offset));
    all
}
