//! Opening files: what is read from sound ones, what is said about others.

use std::fs;
use std::path::{Path, PathBuf};

use super::super::{ExpertMap, GgmlType, Gguf, GgufError, HeaderBuilder, Value, ValueType};
use super::{N_EXPERT, builder, data, file, model, tensors};
use crate::expert::SliceKind;

fn write(dir: &tempfile::TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn open_bytes(bytes: &[u8]) -> Result<Gguf, GgufError> {
    let dir = tempfile::tempdir().unwrap();
    Gguf::open(&write(&dir, "model.gguf", bytes))
}

/// The message must name the file and hold every one of `parts`.
#[track_caller]
fn assert_refused(path: &Path, parts: &[&str]) {
    let message = Gguf::open(path).map(|_| ()).unwrap_err().to_string();
    let name = path.file_name().unwrap().to_str().unwrap();
    for part in parts.iter().chain([&name]) {
        assert!(message.contains(part), "'{part}' is not in: {message}");
    }
}

#[test]
fn a_model_is_read_back() {
    let bytes = model();
    let gguf = open_bytes(&bytes).unwrap();
    assert_eq!((gguf.architecture(), gguf.version, gguf.alignment), ("toy", 3, 32));
    let metadata = &gguf.metadata;
    assert_eq!((metadata.get_u64("toy.expert_count"), metadata.get_u64("toy.rope.freq_base")), (Some(4), None));
    assert_eq!(metadata.get_f32("toy.rope.freq_base"), Some(10000.5));
    assert_eq!(metadata.get_bool("tokenizer.ggml.add_bos_token"), Some(true));
    assert_eq!(metadata.get_u64_arr("toy.attention.head_count_kv"), Some(vec![4, 0, 4]));
    assert_eq!(metadata.get_arr_len("tokenizer.ggml.tokens"), Some(2000));
    assert_eq!(metadata.value_type("tokenizer.ggml.tokens"), Some(ValueType::Str));
    assert_eq!((metadata.get_str("no.such.key"), gguf.tensor("no.such.tensor")), (None, None));
    for (name, dtype, dims) in tensors() {
        let info = gguf.tensor(&name).unwrap();
        assert_eq!((info.dtype, &info.dims), (dtype, &dims));
        let range = info.extent.offset as usize..info.extent.end() as usize;
        assert_eq!(bytes[range], data(&name, info.extent.len), "{name}");
    }
    let mut old = bytes;
    old[4] = 2;
    let old = open_bytes(&old).unwrap();
    assert_eq!((old.version, old.tensors), (2, gguf.tensors));
}

#[test]
fn experts_are_found_by_name() {
    let bytes = model();
    let gguf = open_bytes(&bytes).unwrap();
    let map = gguf.experts().unwrap();
    assert_eq!(map.layers.iter().map(|l| l.layer).collect::<Vec<_>>(), [1, 2]);
    assert!(map.layer(0).is_none());
    let layer = map.layer(2).unwrap();
    let kinds: Vec<_> = layer.tensors.iter().map(|t| t.kind).collect();
    assert_eq!(kinds, [SliceKind::Gate, SliceKind::Up, SliceKind::Down]);
    let (gate, down) = (64 / 32 * 34 * 32, 18 * 64);
    assert_eq!(layer.expert_bytes(), 2 * gate + down);
    assert_eq!(map.bytes(), 2 * N_EXPERT * (2 * gate + down));
    assert_eq!(map.bytes_per_token(|_| 2), 2 * 2 * (2 * gate + down));
    assert_eq!(map.bytes_per_token(|_| 99), map.bytes());
    let tensor = layer.tensor(SliceKind::Down).unwrap();
    let all = data(&tensor.name, down * N_EXPERT);
    for index in 0..N_EXPERT as u16 {
        let extent = tensor.extent(index);
        let start = usize::from(index) * down as usize;
        assert_eq!(bytes[extent.offset as usize..extent.end() as usize], all[start..start + down as usize]);
    }
}

/// The experts of a model, by the names, types and shapes of its tensors.
fn experts_of(tensors: &[(String, GgmlType, Vec<u64>)]) -> Result<ExpertMap, GgufError> {
    open_bytes(&file(builder(32, None), tensors)).unwrap().experts()
}

#[test]
fn models_may_lack_experts_or_gates_or_fuse_gate_and_up() {
    let without = |part: &str| tensors().into_iter().filter(|(name, ..)| !name.contains(part)).collect::<Vec<_>>();
    assert!(experts_of(&without("_exps.weight")).unwrap().is_empty());
    assert_eq!(experts_of(&without("gate")).unwrap().layers[0].tensors.len(), 2);
    let fused = |ne1| {
        let layer = [("down", vec![32, 64, 4]), ("gate_up", vec![64, ne1, 4])];
        experts_of(&layer.map(|(n, dims)| (format!("blk.0.ffn_{n}_exps.weight"), GgmlType::Q8_0, dims)))
    };
    assert_eq!(fused(64).unwrap().layers[0].tensors[0].kind, SliceKind::GateUp);
    assert!(fused(32).unwrap_err().to_string().contains("ffn_gate_up_exps.weight': shape: found"));
}

#[test]
fn files_with_tensors_of_single_experts_are_named_with_the_remedy() {
    let of_expert = |index: u64| {
        let slice =
            |kind: &str, dims: &[u64]| (format!("blk.0.ffn_{kind}.{index}.weight"), GgmlType::Q8_0, dims.into());
        [slice("gate", &[64, 32]), slice("down", &[32, 64]), slice("up", &[64, 32])]
    };
    let all: Vec<_> = (0..N_EXPERT).flat_map(of_expert).collect();
    let message = experts_of(&all).unwrap_err().to_string();
    for part in ["model.gguf", "'blk.0.ffn_gate.0.weight'", "before April 2024", "fetch a newer file"] {
        assert!(message.contains(part), "'{part}' is not in: {message}");
    }
    // Tensors of dense layers and of shared experts.
    for name in ["blk.0.ffn_gate.weight", "blk.0.ffn_up.scale", "blk.0.ffn_gate_inp.weight", "v.blk.0.ffn_up.0.weight"]
    {
        let dense = [(name.to_owned(), GgmlType::F32, vec![4, 4])];
        assert!(experts_of(&dense).unwrap().is_empty(), "{name}");
    }
}

#[test]
fn expert_tensors_must_agree_and_be_complete() {
    // A tensor, its shape instead (or none: it is missing), and parts of the message.
    let cases: &[(&str, &[u64], &[&str])] = &[
        ("blk.1.ffn_up_exps.weight", &[64, 32, 5], &["found 5", "expected 4", "ffn_gate_exps"]),
        ("blk.1.ffn_up_exps.weight", &[64, 64, 4], &["[64, 64, 4]", "[32, 64, 4]", "ffn_down_exps"]),
        ("blk.1.ffn_gate_exps.weight", &[32, 32, 4], &["[32, 32, 4]", "[32, 64, 4]"]),
        ("blk.2.ffn_down_exps.weight", &[32, 96, 4], &["[32, 96, 4]"]),
        ("blk.2.ffn_down_exps.weight", &[32, 64], &["three dimensions"]),
        ("blk.2.ffn_down_exps.weight", &[32, 64, 0], &["1 to 65535"]),
        ("blk.2.ffn_down_exps.weight", &[32, 0, 4], &["no empty dimension"]),
        ("blk.2.ffn_down_exps.weight", &[32, 1, 65536], &["1 to 65535"]),
        ("blk.2.ffn_down_exps.weight", &[], &["no ffn_down_exps"]),
        ("blk.1.ffn_up_exps.weight", &[], &["ffn_gate_exps + ffn_down_exps"]),
    ];
    for (tensor, dims, parts) in cases {
        let mut all = tensors();
        let at = all.iter().position(|(name, ..)| name == tensor).unwrap();
        all[at].2 = dims.to_vec();
        if dims.is_empty() {
            all.remove(at);
        }
        let message = experts_of(&all).unwrap_err().to_string();
        for part in parts.iter().chain([&"model.gguf", &"blk."]) {
            assert!(message.contains(part), "'{part}' is not in: {message}");
        }
    }
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap().key("toy.expert_count", 8u32).unwrap();
    let message = open_bytes(&file(header, &tensors())).unwrap().experts().unwrap_err().to_string();
    assert!(message.contains("found 4, expected 8 as in key 'toy.expert_count'"), "{message}");
}

#[test]
fn things_that_are_no_model_are_named_for_what_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let cases: &[(&[u8], &[&str])] = &[
        (b"", &["empty"]),
        (b"GG", &["starts with \"GG\""]),
        (b"GGUF", &["truncated", "version", "bytes 4..8", "has 4"]),
        (b"version https://git-lfs.github.com/spec/v1", &["git lfs pull"]),
        (b"<!DOCTYPE html>", &["web page"]),
        (b"tjgg\x03\0\0\0", &["old GGML"]),
        (b"PK\x03\x04....", &["PyTorch", "PK\\x03\\x04"]),
        (b"GGUF\0\0\0\x03\0\0\0\0\0\0\0\0", &["big-endian", "gguf_convert_endian"]),
        (b"GGUF\x01\0\0\0", &["version 1", "convert"]),
        (b"GGUF\x04\0\0\0", &["version 4", "newer"]),
    ];
    for (i, (bytes, parts)) in cases.iter().enumerate() {
        assert_refused(&write(&dir, &format!("case{i}.gguf"), bytes), parts);
    }
    assert_refused(dir.path(), &["is a directory", "name the file inside it", "case0.gguf"]);
    let other = tempfile::tempdir().unwrap();
    assert_refused(other.path(), &["is a directory without a .gguf file"]);
    write(&other, "model-00001-of-00002.safetensors", b"");
    assert_refused(other.path(), &["is a directory of safetensors", "convert_hf_to_gguf.py"]);
    let device = if cfg!(unix) { "/dev/zero" } else { "NUL" };
    assert_refused(Path::new(device), &["is not a regular file"]);
    assert_refused(&dir.path().join("absent.gguf"), &["cannot open"]);
}

#[test]
fn a_file_cut_anywhere_in_its_data_is_truncated() {
    let bytes = model();
    let dir = tempfile::tempdir().unwrap();
    let gguf = open_bytes(&bytes).unwrap();
    let path = dir.path().join("cut.gguf");
    for info in &gguf.tensors {
        for cut in [info.extent.offset, info.extent.offset + 1, info.extent.end() - 1] {
            fs::write(&path, &bytes[..cut as usize]).unwrap();
            assert_refused(&path, &["truncated", "data of tensor"]);
        }
    }
    // Only the padding after the last tensor may lack.
    fs::write(&path, &bytes[..gguf.tensors.last().unwrap().extent.end() as usize]).unwrap();
    assert!(Gguf::open(&path).is_ok());
}

#[test]
fn faults_name_key_or_tensor() {
    // Header of tensors "t" and "u", 16 numbers each: magic 4, version 4, counts 16; then for each name 8 + 1,
    // dimensions 4 + 16, type 4, offset 8.
    let (name, n_dims, dim0, id, offset) = (32, 33, 37, 53, 57);
    let second = 41;
    let two = ["t", "u"].map(|name| (name.to_owned(), GgmlType::F32, vec![4, 4]));
    let cases: &[(usize, &[u8], &str)] = &[
        (n_dims, &[5], "number of dimensions: found 5, expected at most 4"),
        (dim0 + 7, &[0x80], "fewer than 2^63 elements"),
        (dim0 + 7, &[0x40], "fewer than 2^63 elements"),
        (dim0 + 7, &[0x10], "fewer than 2^64 bytes"),
        (dim0 + 6, &[4], "truncated"),
        (id, &[2], "a multiple of 32, the block size of q4_0"),
        (id, &[31], "removed Q4_0_4_4"),
        (id, &[139], "IQ4_K of ik_llama.cpp"),
        (id, &[0xe8, 3], "ggml type 1000 (unknown)"),
        (offset, &[8], "a multiple of the alignment 32"),
        (second + offset, &[0x80], "truncated: data of tensor 'u'"),
        (offset, &[0xe0, 255, 255, 255, 255, 255, 255, 255], "truncated: data of tensor 't'"),
        (name, &[0], "without NUL"),
        (name, &[0xff], "\\xff"),
        (8 + 5, &[1], "number of tensors is 1099511627778"),
        (16 + 5, &[1], "number of keys is 1099511627776"),
        (second + offset, &[32], "tensors 't' and 'u' overlap at byte 160"),
        (second + name, b"t", "tensor 't' occurs twice"),
    ];
    for (at, with, part) in cases {
        let mut bytes = file(HeaderBuilder::new(32).unwrap(), &two);
        bytes[*at..at + with.len()].copy_from_slice(with);
        let message = open_bytes(&bytes).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains(part) && message.contains("model.gguf"), "'{part}' is not in: {message}");
    }
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("k", 1u8).unwrap().key("l", 1u8).unwrap();
    let mut bytes = file(header, &[]);
    let second = bytes.iter().rposition(|b| *b == b'l').unwrap();
    bytes[second] = b'k';
    let message = open_bytes(&bytes).unwrap_err().to_string();
    assert!(message.contains("key 'k': found two values"), "{message}");
}

#[test]
fn alignment_is_a_u32_power_of_two() {
    let gguf = open_bytes(&file(builder(4096, None), &tensors())).unwrap();
    assert_eq!(gguf.alignment, 4096);
    assert!(gguf.tensors.iter().all(|t| t.extent.offset.is_multiple_of(4096)));
    for (value, found) in [
        (Value::from(0u32), "found 0"),
        (48u32.into(), "found 48"),
        (32u64.into(), "found u64"),
        (Value::array([32u32]), "found array of u32"),
    ] {
        let mut header = HeaderBuilder::new(32).unwrap();
        header.key("general.alignmenT", value).unwrap();
        let mut bytes = file(header, &[]);
        bytes[24 + 8 + 16] = b't';
        let message = open_bytes(&bytes).unwrap_err().to_string();
        assert!(message.contains(found) && message.contains("power of two"), "{message}");
    }
}

/// The first bytes of a download: a whole header suffices, a cut one is an error.
#[test]
fn a_file_that_ends_too_early_can_be_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("part.gguf");
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap();
    for slice in ["up", "down"] {
        header.tensor(&format!("blk.0.ffn_{slice}_exps.weight"), GgmlType::F32, &[32, 32, 4]).unwrap();
    }
    let layout = header.finish();
    let mut whole = layout.header.clone();
    whole.resize(layout.len as usize, 0);

    for len in [layout.header.len(), layout.header.len() + 1, whole.len() - 1] {
        std::fs::write(&path, &whole[..len]).unwrap();
        assert!(matches!(Gguf::open(&path), Err(GgufError::Truncated { .. })), "{len}");
        let part = Gguf::open_partial(&path).unwrap();
        assert_eq!((part.missing_bytes(), part.experts().unwrap().bytes()), ((whole.len() - len) as u64, 2 * 4 * 4096));
    }
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(Gguf::open_partial(&path).unwrap().missing_bytes(), 0);
    for len in 1..layout.header.len() {
        std::fs::write(&path, &whole[..len]).unwrap();
        let error = Gguf::open_partial(&path).unwrap_err().to_string();
        assert!(error.contains(&format!("the {len} bytes that are there end")), "{error}");
    }
    std::fs::write(&path, b"").unwrap();
    assert!(Gguf::open_partial(&path).unwrap_err().to_string().contains("file is empty"));
}
