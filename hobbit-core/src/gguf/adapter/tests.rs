use std::path::PathBuf;

use super::*;
use crate::gguf::{HeaderBuilder, Value};

/// Name, type and shape of a tensor.
type Tensor<'a> = (&'a str, GgmlType, &'a [u64]);

const F32: GgmlType = GgmlType::F32;

fn write(dir: &Path, name: &str, header: impl FnOnce(&mut HeaderBuilder), tensors: &[Tensor]) -> PathBuf {
    let mut builder = HeaderBuilder::new(32).unwrap();
    header(&mut builder);
    for (name, dtype, dims) in tensors {
        builder.tensor(name, *dtype, dims).unwrap();
    }
    let path = dir.join(name);
    let mut file = std::fs::File::create(&path).unwrap();
    let ones = |tensor: &TensorInfo, out: &mut dyn std::io::Write| {
        let n = tensor.extent.len as usize / 4;
        out.write_all(&1.0f32.to_le_bytes().repeat(n))?;
        out.write_all(&vec![0; tensor.extent.len as usize % 4])
    };
    builder.finish().write(&mut file, ones).unwrap();
    path
}

fn model(dir: &Path, more: &[Tensor]) -> Gguf {
    let header = |header: &mut HeaderBuilder| {
        header.key("general.architecture", "toy").unwrap();
        header.key("toy.embedding_length", 8u32).unwrap();
        header.key("toy.block_count", 3u32).unwrap();
    };
    let plain: [Tensor; 4] = [
        ("token_embd.weight", F32, &[8, 10]),
        ("blk.0.attn_q.weight", F32, &[8, 6]),
        ("blk.0.ffn_gate_inp.weight", F32, &[8, 4]),
        ("blk.0.ffn_up_exps.weight", F32, &[8, 5, 4]),
    ];
    let path = write(dir, "model.gguf", header, &[&plain, more].concat());
    Gguf::open(&path).unwrap()
}

fn lora_header(header: &mut HeaderBuilder) {
    header.key("general.type", "adapter").unwrap();
    header.key("general.architecture", "toy").unwrap();
    header.key("adapter.type", "lora").unwrap();
    header.key("adapter.lora.alpha", 4.0f32).unwrap();
}

const Q_A: Tensor = ("blk.0.attn_q.weight.lora_a", F32, &[8, 2]);
const Q_B: Tensor = ("blk.0.attn_q.weight.lora_b", F32, &[2, 6]);

#[test]
fn an_adapter_adds_to_its_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), &[("output.weight", F32, &[8, 10])]);
    let tensors: [Tensor; 9] = [
        Q_A,
        Q_B,
        ("output.weight.lora_a", GgmlType::F16, &[8, 3]),
        ("output.weight.lora_b", F32, &[3, 10]),
        ("token_embd.weight.lora_a", F32, &[2, 10]),
        ("token_embd.weight.lora_b", F32, &[2, 8]),
        ("blk.0.ffn_up_exps.weight.lora_a", F32, &[8, 2, 4]),
        ("blk.0.ffn_up_exps.weight.lora_b", F32, &[2, 5, 4]),
        ("blk.0.attn_norm.weight", F32, &[8]),
    ];
    let path = write(dir.path(), "lora.gguf", lora_header, &tensors);
    let found = check_lora(&path, &model).unwrap();
    let bytes = 4 * (16 + 12 + 30 + 20 + 16 + 64 + 40) + 2 * 24;
    let expected = LoraSummary {
        bytes,
        row_elements: 10 + 20,
        output_row_elements: 3 + 20,
        of_experts: Some("blk.0.ffn_up_exps.weight".into()),
        n_left_out: 1,
        ..LoraSummary::default()
    };
    assert_eq!(found, expected);
}

#[test]
fn adapters_that_would_stop_llama_cpp_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), &[("blk.0.attn_k_b.weight", F32, &[8, 2, 3])]);
    let refused = |header: &dyn Fn(&mut HeaderBuilder), tensors: &[Tensor], part: &str| {
        let path = write(dir.path(), "lora.gguf", header, tensors);
        let error = check_lora(&path, &model).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("lora.gguf"), "{error}");
    };
    for (key, value, part) in [
        ("general.type", "model".into(), "its general.type is 'model', expected 'adapter'"),
        ("adapter.type", "other".into(), "adapter.type"),
        ("general.architecture", "llama".into(), "architecture 'llama', and the model's is 'toy'"),
        ("adapter.lora.alpha", f32::NAN.into(), "no finite number"),
        ("adapter.alora.invocation_tokens", Value::array([1u32, 2]), "aLoRA"),
    ] {
        let with = |header: &mut HeaderBuilder| {
            let usual = [("general.type", "adapter"), ("general.architecture", "toy"), ("adapter.type", "lora")];
            for (name, usual) in usual.into_iter().filter(|(name, _)| *name != key) {
                header.key(name, usual).unwrap();
            }
            header.key(key, Value::clone(&value)).unwrap();
        };
        refused(&with, &[Q_A, Q_B], part);
    }
    let cases: [(&[Tensor], &str); 11] = [
        (&[], "changes nothing"),
        (&[Q_A], "without blk.0.attn_q.weight.lora_b"),
        (&[Q_B], "without blk.0.attn_q.weight.lora_a"),
        (&[("blk.0.attn_q.weight", F32, &[8, 6])], "neither"),
        (&[("x.weight.lora_a", F32, &[8, 2]), ("x.weight.lora_b", F32, &[2, 6])], "no tensor x.weight"),
        (&[Q_A, ("blk.0.attn_q.weight.lora_b", F32, &[3, 6])], "do not make [8, 6]"),
        (&[("blk.0.attn_q.weight.lora_a", F32, &[6, 2]), Q_B], "do not make [8, 6]"),
        (&[("blk.0.attn_q.weight.lora_a", GgmlType::I64, &[8, 2]), Q_B], "of type i64"),
        (
            &[
                ("blk.0.ffn_up_exps.weight.lora_a", F32, &[8, 2, 3]),
                ("blk.0.ffn_up_exps.weight.lora_b", F32, &[2, 5, 4]),
            ],
            "do not make [8, 5, 4]",
        ),
        (
            &[("blk.0.attn_k_b.weight.lora_a", F32, &[8, 2, 3]), ("blk.0.attn_k_b.weight.lora_b", F32, &[2, 2, 3])],
            "is no matrix",
        ),
        // Also the output's weights, because there is no output.weight.
        (
            &[("token_embd.weight.lora_a", F32, &[2, 10]), ("token_embd.weight.lora_b", F32, &[2, 8])],
            "uses it for its output as well",
        ),
    ];
    for (tensors, part) in cases {
        refused(&lora_header, tensors, part);
    }
    let routers: [Tensor; 2] =
        [("blk.0.ffn_gate_inp.weight.lora_a", F32, &[8, 2]), ("blk.0.ffn_gate_inp.weight.lora_b", F32, &[2, 4])];
    check_lora(&write(dir.path(), "lora.gguf", lora_header, &routers), &model).unwrap();
}

#[test]
fn directions_are_summed_up() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), &[]);
    let vector = |name: &str, tensors: &[Tensor]| {
        let header = |header: &mut HeaderBuilder| {
            header.key("general.architecture", "controlvector").unwrap();
        };
        write(dir.path(), name, header, tensors)
    };
    let first = vector("first.gguf", &[("direction.1", F32, &[8]), ("direction.2", F32, &[8])]);
    let second = vector("second.gguf", &[("direction.2", F32, &[8])]);
    let found = read_directions([(first.as_path(), 0.5), (second.as_path(), -2.0)], &model).unwrap();
    assert_eq!(found.n_embd, 8);
    assert_eq!(found.data, [vec![0.5; 8], vec![-1.5; 8]].concat());
    let cases: [(Tensor, &str); 5] = [
        (("direction.0", F32, &[8]), "no direction of a layer"),
        (("direction.x", F32, &[8]), "no direction of a layer"),
        (("direction.3", F32, &[8]), "a direction of layer 3, and the model's last is 2"),
        (("direction.1", F32, &[7]), "the model takes [8] of f32"),
        (("direction.1", GgmlType::F16, &[8]), "the model takes [8] of f32"),
    ];
    for (tensor, part) in cases {
        let wrong = vector("wrong.gguf", &[tensor]);
        let error = read_directions([(wrong.as_path(), 1.0)], &model).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("wrong.gguf"), "{error}");
    }
    let error = read_directions([(first.as_path(), f32::MAX), (first.as_path(), f32::MAX)], &model).unwrap_err();
    assert!(error.to_string().contains("not finite"), "{error}");
    let error = read_directions([(vector("empty.gguf", &[]).as_path(), 1.0)], &model).unwrap_err();
    assert!(error.to_string().contains("no directions"), "{error}");
}

#[test]
fn parts_of_a_file_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), &[]);
    let part = |no: u16, tensors: &[Tensor]| {
        let header = |header: &mut HeaderBuilder| {
            lora_header(header);
            header.key("split.no", no).unwrap();
            header.key("split.count", 2u16).unwrap();
            header.key("split.tensors.count", 2i32).unwrap();
        };
        write(dir.path(), &format!("part-{:05}-of-00002.gguf", no + 1), header, tensors)
    };
    let first = part(0, &[("direction.1", F32, &[8])]);
    part(1, &[("direction.2", F32, &[8])]);
    for error in
        [check_lora(&first, &model).unwrap_err(), read_directions([(first.as_path(), 1.0)], &model).unwrap_err()]
    {
        assert!(error.to_string().contains("it is one of 2 parts"), "{error}");
    }
}

#[test]
fn weights_that_are_not_finite_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), &[("wide.weight", F32, &[32, 6])]);
    // In the middle: the first number, or a block's scale.
    let poison: [(GgmlType, &[u8]); 4] = [
        (F32, &f32::NEG_INFINITY.to_le_bytes()),
        (GgmlType::F16, &[0, 0x7e]),
        (GgmlType::BF16, &[0x80, 0x7f]),
        (GgmlType::Q8_0, &[0, 0x7c]),
    ];
    for (dtype, poison) in poison {
        let pair: [Tensor; 2] =
            [("wide.weight.lora_a", dtype, &[32, 2]), ("wide.weight.lora_b", GgmlType::F32, &[2, 6])];
        let path = write(dir.path(), "lora.gguf", lora_header, &pair);
        check_lora(&path, &model).unwrap();
        let extent = Gguf::open(&path).unwrap().tensor("wide.weight.lora_a").unwrap().extent;
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(poison, extent.offset + extent.len / 2).unwrap();
        let error = check_lora(&path, &model).unwrap_err().to_string();
        assert!(error.contains("lora.gguf") && error.contains("wide.weight.lora_a is not finite"), "{error}");
    }
}
