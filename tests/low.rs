//! Which files may serve as a model's low-precision version.

use std::path::{Path, PathBuf};

use hobbit::engine::{Ggml, LowError, check_low};
use hobbit_core::gguf::{GgmlType, Gguf, HeaderBuilder, Recode, Value};
use hobbit_synth::{self as synth, Format, Spec};

fn write(dir: &Path, name: &str, spec: &Spec) -> PathBuf {
    synth::write(&dir.join(name), spec).unwrap().files.remove(0)
}

fn check(model: &Path, low: &Path) -> Result<(), LowError> {
    check_low(&Gguf::open(model).unwrap(), &Gguf::open(low).unwrap())
}

/// The message, which has to name both files.
fn refusal(model: &Path, low: &Path) -> String {
    let message = check(model, low).expect_err("another model").to_string();
    assert!(message.starts_with(&low.display().to_string()), "{message}");
    assert!(message.contains(&model.display().to_string()), "{message}");
    message
}

fn low(spec: &Spec) -> Spec {
    Spec { types: vec![Format::Q2_K], down_types: vec![Format::Q3_K], ..spec.clone() }
}

#[test]
fn another_quant_is_taken_and_a_fine_tune_refused() {
    let dir = tempfile::tempdir().unwrap();
    for architecture in ["qwen3moe", "deepseek2", "gpt-oss"] {
        let spec = Spec { shards: 1, ..Spec::tiny(architecture) };
        let model = write(dir.path(), "model.gguf", &spec);
        let smaller = write(dir.path(), "small.gguf", &low(&spec));
        check(&model, &smaller).unwrap();
        check(&model, &model).unwrap();
        // A split file of the one and a whole one of the other.
        let split = write(dir.path(), "split.gguf", &Spec { shards: 3, ..low(&spec) });
        check(&model, &split).unwrap();
        check(&split, &model).unwrap();
        // Its fine-tune has another router.
        let other = write(dir.path(), "other.gguf", &Spec { seed: 1, ..low(&spec) });
        let message = refusal(&model, &other);
        assert!(message.contains(".ffn_gate_inp.weight': other weights"), "{message}");
    }
}

#[test]
fn other_sizes_are_refused_by_what_differs() {
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec::tiny("qwen3moe");
    let model = write(dir.path(), "model.gguf", &spec);
    let cases = [
        (Spec { arch: "olmoe".into(), ..spec.clone() }, "general.architecture is olmoe, expected qwen3moe"),
        (Spec { layers: 3, ..spec.clone() }, "qwen3moe.block_count is 3, expected 4"),
        (Spec { embd: 512, ..spec.clone() }, "qwen3moe.embedding_length is 512, expected 256"),
        (Spec { experts: 4, ..spec.clone() }, "qwen3moe.expert_count is 4, expected 8"),
        (Spec { topk: 1, ..spec.clone() }, "qwen3moe.expert_used_count is 1, expected 2"),
        (Spec { vocab: 600, ..spec.clone() }, "tokenizer.ggml.tokens is 600, expected 512"),
        (Spec { ff: 512, ..spec.clone() }, "'blk.0.ffn_gate_exps.weight': [256, 512, 8], expected [256, 256, 8]"),
    ];
    for (other, expected) in cases {
        let other = write(dir.path(), "other.gguf", &low(&other));
        let message = refusal(&model, &other);
        assert!(message.contains(expected), "{message}");
    }
}

const N_EMBD: u64 = 256;
const N_EXPERT: u64 = 8;

/// Reproducible router weights.
fn weights(seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..N_EMBD * N_EXPERT).map(|_| next() + next() + next()).collect()
}

/// A file with nothing but one layer's router, of type `dtype`, its bias where there is one, and experts.
fn toy(dir: &Path, name: &str, dtype: &str, weights: &[f32], bias: Option<&str>) -> PathBuf {
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap();
    for (key, value) in [("block_count", 1), ("embedding_length", N_EMBD), ("expert_count", N_EXPERT)] {
        header.key(&format!("toy.{key}"), value as u32).unwrap();
    }
    header.key("toy.expert_used_count", 2u32).unwrap();
    header.key("tokenizer.ggml.tokens", Value::array(["a", "b"])).unwrap();
    let dtype = GgmlType::from_name(dtype).unwrap();
    let plain: Vec<u8> = weights.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut router = Vec::new();
    Ggml.recode(GgmlType::F32, dtype, N_EMBD, &plain, None, &mut router).unwrap();
    header.tensor("blk.0.ffn_gate_inp.weight", dtype, &[N_EMBD, N_EXPERT]).unwrap();
    for stem in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"] {
        header.tensor(&format!("blk.0.{stem}.weight"), GgmlType::Q8_0, &[N_EMBD, N_EMBD, N_EXPERT]).unwrap();
    }
    if let Some(bias) = bias {
        header.tensor(bias, GgmlType::F32, &[N_EXPERT]).unwrap();
    }
    let path = dir.join(name);
    let mut file = std::fs::File::create(&path).unwrap();
    let written = header.finish().write(&mut file, |tensor, out| {
        if tensor.name.contains("inp") {
            out.write_all(&router)
        } else {
            out.write_all(&vec![0; tensor.extent.len as usize])
        }
    });
    written.unwrap();
    path
}

#[test]
fn routers_of_other_types_may_differ_by_rounding() {
    let dir = tempfile::tempdir().unwrap();
    let mut original = weights(1);
    original[77] = 9.0; // rounding of an outlier is large next to the other weights
    let mut nudged = original.clone();
    nudged[100] += 0.02; // 0.04 root mean squares
    let half = |values: &[f32]| values.iter().map(|v| v * 0.85).collect::<Vec<_>>();
    let of = |name: &str, dtype: &str, values: &[f32]| toy(dir.path(), name, dtype, values, None);
    // Types, and router weights that are too far for them.
    for (ours, theirs, far) in [
        ("f32", "f16", nudged.clone()),
        ("f32", "bf16", nudged.clone()),
        ("f16", "bf16", nudged.clone()),
        ("bf16", "f32", nudged.clone()),
        ("f32", "q8_0", half(&original)),
        ("q4_K", "f16", half(&original)),
        ("q8_0", "q8_0", half(&original)),
        ("f32", "f32", nudged),
    ] {
        let model = of("model.gguf", ours, &original);
        check(&model, &of("low.gguf", theirs, &original)).unwrap();
        let message = refusal(&model, &of("low.gguf", theirs, &far));
        assert!(message.contains("tensor 'blk.0.ffn_gate_inp.weight'"), "{message}");
        let unrelated = refusal(&model, &of("low.gguf", theirs, &weights(2)));
        assert!(unrelated.contains("tensor 'blk.0.ffn_gate_inp.weight'"), "{unrelated}");
    }
}

#[test]
fn router_biases_are_compared_too() {
    let dir = tempfile::tempdir().unwrap();
    let bias = "blk.0.exp_probs_b.bias";
    let without = toy(dir.path(), "without.gguf", "f32", &weights(1), None);
    let with = toy(dir.path(), "with.gguf", "f32", &weights(1), Some(bias));
    check(&with, &with).unwrap();
    assert!(refusal(&with, &without).contains("'blk.0.exp_probs_b.bias': no such tensor, expected shape [8]"));
    assert!(refusal(&without, &with).contains("'blk.0.exp_probs_b.bias': a tensor, expected no such tensor"));
}

#[test]
fn a_truncated_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec::tiny("qwen3moe");
    let model = write(dir.path(), "model.gguf", &spec);
    let smaller = write(dir.path(), "small.gguf", &low(&spec));
    let opened = (Gguf::open(&model).unwrap(), Gguf::open(&smaller).unwrap());
    let file = std::fs::OpenOptions::new().write(true).open(&smaller).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    let message = Gguf::open(&smaller).unwrap_err().to_string();
    assert!(message.contains("truncated"), "{message}");
    // As if the file had been cut after its header was read.
    file.set_len(4096).unwrap();
    let message = check_low(&opened.0, &opened.1).unwrap_err().to_string();
    assert!(message.contains("small.gguf: cannot read tensor 'blk.0.ffn_gate_inp.weight'"), "{message}");
}

#[test]
fn routers_without_values_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut original = weights(1);
    let model = toy(dir.path(), "model.gguf", "f16", &original, None);
    original[5] = f32::NAN;
    // f32 is copied; the recoder would refuse it.
    let broken = toy(dir.path(), "low.gguf", "f32", &original, None);
    refusal(&model, &broken);
}
