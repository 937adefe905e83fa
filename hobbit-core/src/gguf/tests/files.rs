//! Opening files: what is read from sound ones, what is said about others.

use std::fs;
use std::path::{Path, PathBuf};

use super::super::{GgmlType, Gguf, GgufError, HeaderBuilder, Value, ValueType};
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
    assert_eq!(gguf.architecture(), "toy");
    assert_eq!((gguf.version, gguf.alignment), (3, 32));
    assert_eq!(gguf.metadata.get_u64("toy.expert_count"), Some(4));
    assert_eq!(gguf.metadata.get_u64("toy.rope.freq_base"), None);
    assert_eq!(gguf.metadata.get_f32("toy.rope.freq_base"), Some(10000.5));
    assert_eq!(gguf.metadata.get_bool("tokenizer.ggml.add_bos_token"), Some(true));
    assert_eq!(gguf.metadata.get_u64_arr("toy.attention.head_count_kv"), Some(vec![4, 0, 4]));
    assert_eq!(gguf.metadata.get_arr_len("tokenizer.ggml.tokens"), Some(2000));
    assert_eq!(gguf.metadata.value_type("tokenizer.ggml.tokens"), Some(ValueType::Str));
    assert_eq!(gguf.metadata.get_str("no.such.key"), None);
    for (name, dtype, dims) in tensors() {
        let info = gguf.tensor(&name).unwrap();
        assert_eq!((info.dtype, &info.dims), (dtype, &dims));
        let range = info.extent.offset as usize..info.extent.end() as usize;
        assert_eq!(bytes[range], data(&name, info.extent.len), "{name}");
    }
    assert_eq!(gguf.tensor("no.such.tensor"), None);
}

#[test]
fn version_2_is_read_like_version_3() {
    let mut bytes = model();
    bytes[4] = 2;
    let gguf = open_bytes(&bytes).unwrap();
    assert_eq!(gguf.version, 2);
    assert_eq!(gguf.tensors, open_bytes(&model()).unwrap().tensors);
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
    assert_eq!(map.bytes_per_token(2), 2 * 2 * (2 * gate + down));
    assert_eq!(map.bytes_per_token(99), map.bytes());
    let tensor = layer.tensor(SliceKind::Down).unwrap();
    let all = data(&tensor.name, down * N_EXPERT);
    for index in 0..N_EXPERT as u16 {
        let extent = tensor.extent(index);
        let start = usize::from(index) * down as usize;
        assert_eq!(bytes[extent.offset as usize..extent.end() as usize], all[start..start + down as usize]);
    }
}

#[test]
fn a_dense_model_has_no_experts() {
    let dense: Vec<_> = tensors().into_iter().filter(|(name, ..)| !name.contains("_exps.weight")).collect();
    assert!(open_bytes(&file(builder(32, None), &dense)).unwrap().experts().unwrap().is_empty());
}

#[test]
fn gate_and_up_may_be_one_tensor_and_gate_may_lack() {
    let fused = |ne1| {
        let layer = [("down", vec![32, 64, 4]), ("gate_up", vec![64, ne1, 4])];
        let all = layer.map(|(n, dims)| (format!("blk.0.ffn_{n}_exps.weight"), GgmlType::Q8_0, dims));
        open_bytes(&file(builder(32, None), &all)).unwrap().experts()
    };
    let map = fused(64).unwrap();
    assert_eq!(map.layers[0].tensors[0].kind, SliceKind::GateUp);
    assert!(matches!(fused(32), Err(GgufError::Experts { what: "shape", .. })));
    let ungated: Vec<_> = tensors().into_iter().filter(|(name, ..)| !name.contains("gate")).collect();
    assert_eq!(open_bytes(&file(builder(32, None), &ungated)).unwrap().experts().unwrap().layers[0].tensors.len(), 2);
}

#[test]
fn expert_tensors_must_agree() {
    // (tensor, its shape instead, what the message says)
    let cases: &[(&str, &[u64], &[&str])] = &[
        ("blk.1.ffn_up_exps.weight", &[64, 32, 5], &["found 5", "expected 4", "ffn_gate_exps"]),
        ("blk.1.ffn_up_exps.weight", &[64, 64, 4], &["[64, 64, 4]", "[32, 64, 4]", "ffn_down_exps"]),
        ("blk.1.ffn_gate_exps.weight", &[32, 32, 4], &["[32, 32, 4]", "[32, 64, 4]"]),
        ("blk.2.ffn_down_exps.weight", &[32, 96, 4], &["[32, 96, 4]"]),
        ("blk.2.ffn_down_exps.weight", &[32, 64], &["three dimensions"]),
        ("blk.2.ffn_down_exps.weight", &[32, 64, 0], &["1 to 65535"]),
        ("blk.2.ffn_down_exps.weight", &[32, 0, 4], &["no empty dimension"]),
        ("blk.2.ffn_down_exps.weight", &[32, 1, 65536], &["1 to 65535"]),
    ];
    for (tensor, dims, parts) in cases {
        let mut all = tensors();
        all.iter_mut().find(|(name, ..)| name == tensor).unwrap().2 = dims.to_vec();
        let message = open_bytes(&file(builder(32, None), &all)).unwrap().experts().unwrap_err().to_string();
        for part in parts.iter().chain([&"model.gguf", &"blk."]) {
            assert!(message.contains(part), "'{part}' is not in: {message}");
        }
    }
}

#[test]
fn experts_must_be_complete_and_match_expert_count() {
    let without = |lacking: &str| {
        let some: Vec<_> = tensors().into_iter().filter(|(name, ..)| !name.contains(lacking)).collect();
        open_bytes(&file(builder(32, None), &some)).unwrap().experts().unwrap_err().to_string()
    };
    assert!(without("blk.2.ffn_down_exps").contains("no ffn_down_exps"));
    assert!(without("blk.1.ffn_up_exps").contains("ffn_gate_exps + ffn_down_exps"));
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
    assert!(matches!(Gguf::open(dir.path()), Err(GgufError::Directory { .. })));
    assert_refused(&dir.path().join("absent.gguf"), &["cannot open"]);
}

#[cfg(unix)]
#[test]
fn a_device_is_refused_without_reading_it() {
    assert!(matches!(Gguf::open(Path::new("/dev/zero")), Err(GgufError::NotAFile { .. })));
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
    let f32 = GgmlType::F32;
    let one = |name: &str, edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = file(HeaderBuilder::new(32).unwrap(), &[(name.to_owned(), f32, vec![2, 2])]);
        edit(&mut bytes);
        open_bytes(&bytes).map(|_| ()).unwrap_err().to_string()
    };
    // Header of one tensor "t": magic 4, version 4, counts 16, name 8 + 1, n_dims 4, dims 16, type 4, offset 8.
    let (n_dims, dim0, id, offset) = (33, 37, 53, 57);
    let put32 = |at: usize, v: u32| move |b: &mut Vec<u8>| b[at..at + 4].copy_from_slice(&v.to_le_bytes());
    let put64 = |at: usize, v: u64| move |b: &mut Vec<u8>| b[at..at + 8].copy_from_slice(&v.to_le_bytes());
    let cases = [
        (one("t", &put32(n_dims, 5)), "number of dimensions: found 5, expected at most 4"),
        (one("t", &put64(dim0, 1 << 63)), "fewer than 2^63 elements"),
        (one("t", &put64(dim0, 1 << 62)), "fewer than 2^63 elements"),
        (one("t", &put64(dim0, 1 << 61)), "fewer than 2^64 bytes"),
        (one("t", &put64(dim0, 1 << 50)), "truncated"),
        (one("t", &put32(id, 2)), "a multiple of 32, the block size of q4_0"),
        (one("t", &put32(id, 31)), "removed Q4_0_4_4"),
        (one("t", &put32(id, 1000)), "ggml type 1000 (unknown)"),
        (one("t", &put64(offset, 8)), "a multiple of the alignment 32"),
        (one("t", &put64(offset, 32)), "truncated: data of tensor 't'"),
        (one("t", &put64(offset, u64::MAX - 31)), "truncated: data of tensor 't'"),
        (one("t", &|b| b[32] = 0), "without NUL"),
        (one("t", &|b| b[32] = 0xff), "\\xff"),
        (one("t", &put64(8, 1 << 40)), "number of tensors is 1099511627776"),
        (one("t", &put64(16, 1 << 40)), "number of keys is 1099511627776"),
    ];
    for (message, part) in cases {
        assert!(message.contains(part) && message.contains("model.gguf"), "'{part}' is not in: {message}");
    }
}

#[test]
fn overlaps_and_duplicates_are_refused() {
    let two = |first: &str, second: &str| [first, second].map(|n| (n.to_owned(), GgmlType::F32, vec![16])).to_vec();
    let mut bytes = file(HeaderBuilder::new(32).unwrap(), &two("a", "b"));
    // Second tensor's entry: 8 + 1 + 4 + 8 + 4, then its offset.
    let offset = 24 + 33 + 25;
    assert_eq!(bytes[offset], 64);
    bytes[offset] = 32;
    assert!(matches!(open_bytes(&bytes), Err(GgufError::Overlap { offset: 128, .. })), "{:?}", open_bytes(&bytes));
    bytes[offset] = 64;
    bytes[24 + 33 + 8] = b'a';
    assert!(matches!(open_bytes(&bytes), Err(GgufError::DuplicateTensor { .. })));

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
    let with = |value: Value| {
        let mut header = HeaderBuilder::new(32).unwrap();
        header.key("general.alignmenT", value).unwrap();
        let mut bytes = file(header, &[]);
        bytes[24 + 8 + 16] = b't';
        open_bytes(&bytes).unwrap_err().to_string()
    };
    for (value, found) in [(Value::from(0u32), "found 0"), (48u32.into(), "found 48"), (32u64.into(), "found u64")] {
        let message = with(value);
        assert!(message.contains(found) && message.contains("power of two"), "{message}");
    }
    assert!(with(Value::array([32u32])).contains("found array of u32"));
}

/// The first bytes of a download: a header that is whole tells everything, one that is cut says so.
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
        let error = Gguf::open_partial(&path).unwrap_err();
        let is_told = matches!(&error, GgufError::HeaderCut { len: found, .. } if *found == len as u64);
        assert!(is_told || len < 4 && matches!(error, GgufError::NotGguf { .. }), "{len}: {error}");
    }
    std::fs::write(&path, b"").unwrap();
    assert!(matches!(Gguf::open_partial(&path), Err(GgufError::Empty { .. })));
}
