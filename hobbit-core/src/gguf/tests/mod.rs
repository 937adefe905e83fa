//! Reader, experts, writer and virtual file together, on small models written by the writer.

mod files;
mod hostile;
mod layers;
mod virtual_files;
mod writing;

use std::io::Write;

use super::{GgmlType, HeaderBuilder, Value};

pub(super) const N_EXPERT: u64 = 4;

/// Tensors of a model with two expert layers and one dense layer.
pub(super) fn tensors() -> Vec<(String, GgmlType, Vec<u64>)> {
    let q4_0 = GgmlType::from_name("q4_0").unwrap();
    let mut all = vec![("token_embd.weight".to_owned(), GgmlType::F16, vec![64, 10])];
    all.push(("blk.0.ffn_up.weight".to_owned(), GgmlType::F32, vec![64, 3]));
    for l in 1..3 {
        all.push((format!("blk.{l}.ffn_down_exps.weight"), q4_0, vec![32, 64, N_EXPERT]));
        all.push((format!("blk.{l}.ffn_gate_exps.weight"), GgmlType::Q8_0, vec![64, 32, N_EXPERT]));
        all.push((format!("blk.{l}.ffn_up_exps.weight"), GgmlType::Q8_0, vec![64, 32, N_EXPERT]));
        all.push((format!("blk.{l}.ffn_up_exps.bias"), GgmlType::F32, vec![32, N_EXPERT]));
    }
    all.push(("output_norm.weight".to_owned(), GgmlType::F32, vec![3])); // 12 bytes: padding follows
    all
}

/// Header with the usual kinds of keys, and `split` as (no, count, tensors) where given.
pub(super) fn builder(alignment: u64, split: Option<(u16, u16, i32)>) -> HeaderBuilder {
    let mut header = HeaderBuilder::new(alignment).unwrap();
    header.key("general.architecture", "toy").unwrap();
    header.key("toy.expert_count", N_EXPERT as u32).unwrap();
    header.key("toy.expert_used_count", 2u32).unwrap();
    header.key("toy.rope.freq_base", 10000.5f32).unwrap();
    header.key("toy.attention.head_count_kv", Value::array([4u32, 0, 4])).unwrap();
    header.key("tokenizer.ggml.tokens", Value::array((0..2000).map(|i| format!("t{i}")))).unwrap();
    header.key("tokenizer.ggml.add_bos_token", true).unwrap();
    if let Some((no, count, tensors)) = split {
        header.key("split.no", no).unwrap();
        header.key("split.count", count).unwrap();
        header.key("split.tensors.count", tensors).unwrap();
    }
    header
}

/// Data of a tensor: bytes that differ between tensors and along them.
pub(super) fn data(name: &str, len: u64) -> Vec<u8> {
    let seed = name.bytes().fold(7u64, |h, b| h.wrapping_mul(31) + u64::from(b));
    (0..len).map(|i| ((seed + i).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// The file that holds `tensors`.
pub(super) fn file(mut header: HeaderBuilder, tensors: &[(String, GgmlType, Vec<u64>)]) -> Vec<u8> {
    for (name, dtype, dims) in tensors {
        header.tensor(name, *dtype, dims).unwrap();
    }
    let mut bytes = Vec::new();
    let write = |t: &super::TensorInfo, out: &mut dyn Write| out.write_all(&data(&t.name, t.extent.len));
    header.finish().write(&mut bytes, write).unwrap();
    bytes
}

pub(super) fn model() -> Vec<u8> {
    file(builder(32, None), &tensors())
}
