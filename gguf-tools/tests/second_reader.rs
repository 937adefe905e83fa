//! What hobbit reads in a header is what gguf-rs, another reader, finds there.

use std::path::Path;
use std::process::Command;

use gguf_rs::get_gguf_container_array_size;
use hobbit_core::gguf::Gguf;
use serde_json::Value;

/// Every key whose value both have, and every tensor. How many keys were compared.
fn compare(path: &Path) -> usize {
    let ours = Gguf::open(path).unwrap();
    let mut theirs = get_gguf_container_array_size(path.to_str().unwrap(), u64::MAX).unwrap();
    let theirs = theirs.decode().unwrap();
    let metadata = &ours.metadata;
    assert!(metadata.keys().eq(sorted(theirs.metadata().keys().map(String::as_str), metadata.keys())), "keys");
    let mut n_compared = 0;
    for (key, value) in theirs.metadata() {
        let is_alike = match value {
            Value::String(text) => metadata.get_str(key) == Some(text),
            Value::Bool(truth) => metadata.get_bool(key) == Some(*truth),
            Value::Number(number) if number.is_u64() => metadata.get_u64(key) == number.as_u64(),
            Value::Number(number) if number.is_i64() => metadata.get_i64(key) == number.as_i64(),
            Value::Number(number) => metadata.get_f32(key) == number.as_f64().map(|number| number as f32),
            Value::Array(items) => metadata.get_arr_len(key) == Some(items.len() as u64),
            _ => continue,
        };
        assert!(is_alike, "{key}: {value}");
        n_compared += 1;
    }
    let start = ours.tensors.iter().map(|tensor| tensor.extent.offset).min().unwrap();
    let first = theirs.tensors().iter().map(|tensor| tensor.offset).min().unwrap();
    assert_eq!(ours.tensors.len(), theirs.tensors().len());
    for tensor in theirs.tensors() {
        let own = ours.tensor(&tensor.name).unwrap();
        // The format's number of dimensions may end in ones.
        let shape: Vec<u64> = tensor.shape.iter().copied().take(own.dims.len()).collect();
        assert_eq!((own.dtype.id(), &own.dims, own.extent.len), (tensor.kind, &shape, tensor.size), "{}", tensor.name);
        assert_eq!(own.extent.offset - start, tensor.offset - first, "{}", tensor.name);
    }
    n_compared
}

/// `keys` in the order in which `order` has them.
fn sorted<'a>(keys: impl Iterator<Item = &'a str>, order: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let order: Vec<&str> = order.collect();
    let mut keys: Vec<&str> = keys.collect();
    keys.sort_by_key(|key| order.iter().position(|own| own == key));
    keys
}

#[test]
fn another_reader_finds_the_same() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo.gguf");
    assert!(compare(&demo) > 10);
    let dir = tempfile::tempdir().unwrap();
    for arch in ["qwen3moe", "deepseek2", "gpt-oss", "llama4"] {
        let path = dir.path().join(format!("{arch}.gguf"));
        let made = Command::new(env!("CARGO_BIN_EXE_gguf-tools"))
            .args(["synth", path.to_str().unwrap(), "--arch", arch, "--layers", "2", "--embd", "256", "--ff", "256"])
            .args(["--experts", "4", "--topk", "2", "--type", "q4_k", "--down-type", "q6_k"])
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        assert!(compare(&path) > 10, "{arch}");
    }
}
