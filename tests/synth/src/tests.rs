//! Structure is checked with hobbit's own reader. Exactness tests load and run the files in llama.cpp.

use std::fs;
use std::path::PathBuf;

use hobbit_core::expert::SliceKind::{self, Down, Gate, GateUp, Up};
use hobbit_core::gguf::{GgmlType, Gguf};

use super::format::Format;
use super::random::Random;
use super::vocab::{TOKENS_MIN, Vocab};
use super::*;

fn make(spec: &Spec) -> (tempfile::TempDir, Written, Gguf) {
    let dir = tempfile::tempdir().unwrap();
    let written = write(&dir.path().join("model.gguf"), spec).unwrap();
    let gguf = Gguf::open(&written.files[0]).unwrap();
    (dir, written, gguf)
}

/// Small enough that all architectures together take a second.
fn small(arch: &str) -> Spec {
    Spec { embd: 128, ff: 64, ff_dense: Some(96), vocab: 300, dense_type: Some(Format::Q8_0), ..Spec::tiny(arch) }
}

#[test]
fn every_architecture_has_the_experts_that_were_asked_for() {
    for arch in architectures() {
        let spec = Spec { experts: 6, topk: 3, types: vec![Format::Q8_0], ..small(arch) };
        let (_dir, written, gguf) = make(&spec);
        assert_eq!(gguf.architecture(), arch);
        assert_eq!(gguf.file_bytes(), written.bytes, "{arch}");
        assert_eq!(gguf.metadata.get_u64(&format!("{arch}.expert_used_count")), Some(3), "{arch}");
        let key = |name: &str| gguf.metadata.get_u64(&format!("{arch}.{name}"));
        let lead = key("leading_dense_block_count").unwrap_or(0) as u16;
        // Nemotron-H: layers of experts between others, and no gates.
        let is_apart = arch == "nemotron_h_moe";
        let width = key("moe_latent_size").or(key("expert_latent_length")).unwrap_or(128);
        let map = gguf.experts().unwrap();
        let layers: Vec<u16> = map.layers.iter().map(|layer| layer.layer).collect();
        let expected: Vec<u16> = (lead..4).filter(|layer| !is_apart || layer % 2 == 1).collect();
        assert_eq!(layers, expected, "{arch}");
        for layer in &map.layers {
            assert_eq!(layer.n_expert, 6, "{arch}");
            let found: Vec<_> = layer.tensors.iter().map(|t| (t.kind, t.ne0, t.ne1, t.dtype)).collect();
            let q8_0 = GgmlType::Q8_0;
            let expected = [(Gate, width, 64, q8_0), (Up, width, 64, q8_0), (Down, 64, width, q8_0)];
            assert_eq!(found, expected[usize::from(is_apart)..], "{arch}");
        }
    }
}

#[test]
fn types_take_turns() {
    let spec = Spec {
        types: vec![Format::Q4_K, Format::Q5_K],
        down_types: vec![Format::Q6_K, Format::Q8_0, Format::Q4_K],
        ..Spec::tiny("qwen3moe")
    };
    let (_dir, _, gguf) = make(&spec);
    let types_of = |kind: SliceKind| -> Vec<&str> {
        let map = gguf.experts().unwrap();
        map.layers.iter().map(|layer| layer.tensor(kind).unwrap().dtype.name()).collect()
    };
    assert_eq!(types_of(Gate), ["q4_K", "q5_K", "q4_K", "q5_K"]);
    assert_eq!(types_of(Up), types_of(Gate));
    assert_eq!(types_of(Down), ["q6_K", "q8_0", "q4_K", "q6_K"]);
    assert_eq!(gguf.tensor("output.weight").unwrap().dtype.name(), "q4_K");
}

#[test]
fn gate_and_up_may_be_fused_and_scaled() {
    let (_dir, _, gguf) = make(&Spec { fused: true, expert_scales: true, ..small("deepseek2") });
    for layer in &gguf.experts().unwrap().layers {
        let found: Vec<_> = layer.tensors.iter().map(|t| (t.kind, t.ne1)).collect();
        assert_eq!(found, [(GateUp, 128), (Down, 128)]);
    }
    assert_eq!(gguf.tensor("blk.1.ffn_down_exps.scale").unwrap().dims, [8]);
    assert!(gguf.tensor("blk.1.ffn_gate_exps.scale").is_none());
}

#[test]
fn every_other_layer_has_experts() {
    let (_dir, _, gguf) = make(&Spec { moe_step: 2, ..small("llama4") });
    let layers: Vec<_> = gguf.experts().unwrap().layers.iter().map(|layer| layer.layer).collect();
    assert_eq!(layers, [1, 3]);
    assert!(gguf.tensor("blk.0.ffn_down.weight").is_some());
}

#[test]
fn experts_may_see_a_projection() {
    for (latent, width) in [(None, 64), (Some(32), 32), (Some(0), 128)] {
        let (_dir, _, gguf) = make(&Spec { latent, ..small("nemotron_h_moe") });
        assert_eq!(gguf.tensor("blk.1.ffn_up_exps.weight").unwrap().dims, [width, 64, 8]);
        assert_eq!(gguf.tensor("blk.1.ffn_latent_down.weight").is_some(), latent != Some(0));
    }
}

#[test]
fn every_second_layer_may_have_half_of_the_experts_width() {
    let (_dir, _, gguf) = make(&Spec { uneven: true, ..small("nemotron_h_moe") });
    let widths = [1, 3].map(|layer| gguf.tensor(&format!("blk.{layer}.ffn_up_exps.weight")).unwrap().dims[1]);
    assert_eq!((widths, [1, 3].map(|layer| gguf.n_expert_used(layer))), ([64, 32], [2, 1]));
    let shared = [1, 3].map(|layer| gguf.tensor(&format!("blk.{layer}.ffn_up_shexp.weight")).unwrap().dims[1]);
    assert_eq!(shared, [64, 64]);
}

#[test]
fn layers_of_multi_token_prediction_follow_the_others() {
    for arch in ["glm4moe", "hy_v3", "deepseek4", "qwen35moe", "nemotron_h_moe"] {
        let (_dir, _, gguf) = make(&Spec { mtp: 2, ..small(arch) });
        assert_eq!(gguf.metadata.get_u64(&format!("{arch}.block_count")), Some(6), "{arch}");
        assert_eq!(gguf.metadata.get_u64(&format!("{arch}.nextn_predict_layers")), Some(2), "{arch}");
        let has = |name: &str| gguf.tensor(name).is_some();
        assert!(has("blk.5.nextn.eh_proj.weight") && has("blk.5.ffn_down_exps.weight"), "{arch}");
        assert!(!has("blk.3.nextn.eh_proj.weight"), "{arch}");
    }
}

#[test]
fn layers_have_attention_or_a_recurrent_state() {
    let layers_with = |gguf: &Gguf, name: &str| -> Vec<u32> {
        (0..8).filter(|layer| gguf.tensor(&format!("blk.{layer}.{name}.weight")).is_some()).collect()
    };
    for (arch, state, states, attention) in [
        ("lfm2moe", "shortconv.conv", vec![0, 1, 2, 4, 5, 6], vec![3, 7]),
        ("nemotron_h_moe", "ssm_in", vec![0, 4], vec![2, 6]),
    ] {
        let (_dir, _, gguf) = make(&Spec { layers: 8, ..small(arch) });
        assert_eq!((layers_with(&gguf, state), layers_with(&gguf, "attn_q")), (states, attention), "{arch}");
    }
}

#[test]
fn hash_layers_route_each_token_to_different_experts() {
    let (_dir, written, gguf) = make(&Spec { experts: 6, topk: 3, ..small("deepseek4") });
    let table = gguf.tensor("blk.1.ffn_gate_tid2eid.weight").unwrap();
    assert_eq!((table.dtype.name(), &table.dims[..]), ("i32", &[3, 300][..]));
    assert!(gguf.tensor("blk.2.ffn_gate_tid2eid.weight").is_none());
    let bytes = &fs::read(&written.files[0]).unwrap()[table.extent.offset as usize..table.extent.end() as usize];
    let ids: Vec<u32> = bytes.chunks_exact(4).map(|id| u32::from_le_bytes(id.try_into().unwrap())).collect();
    for row in ids.chunks_exact(3) {
        assert!(row.iter().all(|id| *id < 6) && row[0] != row[1] && row[1] != row[2] && row[0] != row[2], "{row:?}");
    }
    assert!((0..6).all(|expert| ids.iter().filter(|id| **id == expert).count() > 100));
}

#[test]
fn a_seed_decides_every_byte() {
    let bytes = |seed| {
        let (_dir, written, _) = make(&Spec { seed, ..small("llama") });
        fs::read(&written.files[0]).unwrap()
    };
    assert_eq!(bytes(1), bytes(1));
    assert_ne!(bytes(1), bytes(2));
}

#[test]
fn shards_hold_the_same_model() {
    let whole = small("qwen3moe");
    let (_dir, _, one) = make(&whole);
    let (_dir, written, many) = make(&Spec { shards: 7, ..whole });
    let names: Vec<_> = written.files.iter().map(|file| file.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names[0], "model-00001-of-00007.gguf");
    assert_eq!(names.len(), 7);
    assert_eq!(many.tensors.len(), one.tensors.len());
    for (a, b) in one.tensors.iter().zip(&many.tensors) {
        assert_eq!((&a.name, a.dtype, &a.dims, a.extent.len), (&b.name, b.dtype, &b.dims, b.extent.len));
        let read = |gguf: &Gguf, at: hobbit_core::expert::Extent| {
            let file = fs::read(&gguf.files[at.file as usize].path).unwrap();
            file[at.offset as usize..at.end() as usize].to_vec()
        };
        assert_eq!(read(&one, a.extent), read(&many, b.extent), "{}", a.name);
    }
}

#[test]
fn a_shard_for_every_tensor_and_no_more() {
    let spec = small("llama");
    let (_dir, _, gguf) = make(&spec);
    let tensors = gguf.tensors.len() as u32;
    let (_dir, written, _) = make(&Spec { shards: tensors, ..spec.clone() });
    assert_eq!(written.files.len() as u32, tensors);
    let fault = write(&PathBuf::from("unused.gguf"), &Spec { shards: tensors + 1, ..spec }).unwrap_err();
    assert!(fault.to_string().starts_with("--split"), "{fault}");
}

#[test]
fn nothing_is_left_of_a_failed_write() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("missing").join("model.gguf");
    assert!(write(&path, &small("llama")).unwrap_err().is::<std::io::Error>());
    // A directory in the way: found only when everything is written.
    let taken = dir.path().join("taken.gguf");
    fs::create_dir(&taken).unwrap();
    assert!(write(&taken, &small("llama")).is_err());
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["taken.gguf"]);
}

#[test]
fn inconsistent_specs_are_refused() {
    let refused = |spec: Spec, beginning: &str| {
        let fault = write(&PathBuf::from("unused.gguf"), &spec).unwrap_err().to_string();
        assert!(fault.starts_with(beginning), "{fault}");
    };
    refused(Spec::tiny("nope"), "--arch 'nope': expected one of llama,");
    refused(Spec { topk: 9, ..Spec::tiny("llama") }, "--topk 9: expected 1 to 8");
    refused(Spec { ff: 100, ..Spec::tiny("llama") }, "--ff 100: expected a multiple of 32");
    refused(Spec { kv_heads: Some(3), ..Spec::tiny("llama") }, "--kv-heads 3");
    refused(Spec { kv_heads: Some(2), ..Spec::tiny("olmoe") }, "--kv-heads 2: expected as many as --heads");
    refused(Spec { head_dim: Some(20), ..Spec::tiny("llama") }, "--head-dim 20");
    refused(Spec { router_spread: f32::NAN, ..Spec::tiny("llama") }, "--router-spread NaN: expected a number above 0");
    refused(Spec { fused: true, ..Spec::tiny("llama") }, "--fused given: expected one of deepseek2");
    refused(Spec { dense_lead: Some(1), ..Spec::tiny("llama") }, "--dense-lead 1");
    refused(Spec { shared: Some(0), ..Spec::tiny("deepseek2") }, "--shared 0");
    refused(Spec { groups: Some(ExpertGroups { count: 3, used: 1 }), ..Spec::tiny("deepseek2") }, "--groups 3/1");
    refused(Spec { layers: 3, ..Spec::tiny("qwen3next") }, "--layers 3: expected 4 to 512");
    refused(Spec { latent: Some(128), ..Spec::tiny("llama") }, "--latent 128: expected 0");
    refused(Spec { latent: Some(40), ..Spec::tiny("kimi-k3") }, "--latent 40: expected a multiple of 32");
    refused(Spec { uneven: true, ..Spec::tiny("llama") }, "--uneven given: expected nemotron_h_moe");
    refused(Spec { mtp: 1, ..Spec::tiny("llama") }, "--mtp 1: expected 0 to 0");
    refused(Spec { vocab: 10, ..Spec::tiny("llama") }, "--vocab 10");
    refused(Spec { types: vec![Format::Q4_K], ff: 288, ..Spec::tiny("llama") }, "tensor 'blk.0.ffn_down_exps.weight'");
    assert!(Format::all().all(|format| format.name().parse::<Format>().is_ok_and(|parsed| parsed == format)));
    assert!("q9_9".parse::<Format>().is_err() && Spec::preset("nope").is_err());
    refused(Spec { experts: 512, embd: 1 << 17, ff: 1 << 18, layers: 512, heads: 256, ..Spec::tiny("llama") }, ".: ");
}

#[test]
fn weights_have_the_wanted_spread() {
    // Decoders of the simple formats; the K-quants' constants were checked against ggml's own.
    fn scale(block: &[u8]) -> f32 {
        half::f16::from_le_bytes([block[0], block[1]]).to_f32()
    }
    fn f32s(block: &[u8]) -> Vec<f32> {
        vec![f32::from_le_bytes(block.try_into().unwrap())]
    }
    fn q8_0(block: &[u8]) -> Vec<f32> {
        block[2..].iter().map(|quant| scale(block) * f32::from(*quant as i8)).collect()
    }
    fn q4_0(block: &[u8]) -> Vec<f32> {
        let quants = block[2..].iter().flat_map(|byte| [byte & 15, byte >> 4]);
        quants.map(|quant| scale(block) * (f32::from(quant) - 8.0)).collect()
    }
    type Decode = fn(&[u8]) -> Vec<f32>;
    let decoders: [(Format, Decode); 3] = [(Format::F32, f32s), (Format::Q8_0, q8_0), (Format::Q4_0, q4_0)];
    for (format, decode) in decoders {
        let mut bytes = vec![0; format.block_bytes() * 4096];
        format.fill(&mut bytes, &mut Random::new(7, "spread"), 0.0, 0.25);
        let weights: Vec<f32> = bytes.chunks(format.block_bytes()).flat_map(decode).collect();
        let mean = weights.iter().sum::<f32>() / weights.len() as f32;
        let square = weights.iter().map(|w| w * w).sum::<f32>() / weights.len() as f32;
        assert!(mean.abs() < 0.01 && (square.sqrt() - 0.25).abs() < 0.01, "{format}: {mean} {}", square.sqrt());
    }
}

#[test]
fn the_vocabulary_merges_only_what_it_has() {
    for size in [TOKENS_MIN, 400, 4096, 40_000] {
        let vocab = Vocab::new(size);
        assert_eq!((vocab.tokens.len(), vocab.types.len()), (size as usize, size as usize));
        let known: std::collections::HashSet<_> = vocab.tokens.iter().collect();
        assert_eq!(known.len(), size as usize, "no token twice");
        assert_eq!(vocab.merges.len(), size as usize - TOKENS_MIN as usize);
        for merge in &vocab.merges {
            let (left, right) = merge.split_once(' ').unwrap();
            for token in [left, right, &format!("{left}{right}")] {
                assert!(known.contains(&token.to_owned()), "{merge}");
            }
        }
        assert_eq!(vocab.tokens[vocab.im_end as usize], "<|im_end|>");
    }
    assert_eq!(Vocab::new(super::vocab::TOKENS_MAX).tokens.len(), super::vocab::TOKENS_MAX as usize);
}

#[test]
fn presets_are_valid() {
    for name in presets() {
        let spec = Spec::preset(name).unwrap();
        assert!(spec.sizes().is_ok(), "{name}");
    }
}

#[test]
fn qwen3_8_flash_next_has_the_published_sizes() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let open = |spec: &Spec| {
        fs::write(file.path(), header(spec).unwrap()).unwrap();
        Gguf::open_partial(file.path()).unwrap()
    };
    let spec = Spec::preset("qwen3.8-flash-next").unwrap();
    let gguf = open(&spec);
    let gib = |bytes: u64| (bytes as f64 / f64::from(1 << 30) * 10.0).round() / 10.0;
    let numbers = |tensor: &hobbit_core::gguf::TensorInfo| tensor.dims.iter().product::<u64>();
    // "125B parameters, an additional 51B of n-gram embeddings": the model's card.
    let table = gguf.tensor("per_layer_token_embd.weight").unwrap();
    assert_eq!((&table.dims[..], gib(table.extent.len)), (&[160, 320_001_536][..], 26.8));
    let all: u64 = gguf.tensors.iter().map(numbers).sum();
    assert_eq!(((all - numbers(table)) / 100_000_000, numbers(table) / 100_000_000), (1257, 512));
    // Sums of UD-Q4_K_XL, but that its layer of Q5_K (1.1 GiB) is Q4_K here, and 41.3 GiB without it.
    let of_type = |name: &str| {
        let of_name = gguf.tensors.iter().filter(|tensor| tensor.dtype.name() == name);
        gib(of_name.map(|tensor| tensor.extent.len).sum())
    };
    assert_eq!(["q4_K", "q5_1", "q8_0", "iq4_nl"].map(of_type), [42.2, 25.2, 9.0, 26.8]);
    let key = |name: &str| gguf.metadata.get_u64(&format!("qwen4exp.{name}")).unwrap();
    let keys = ["block_count", "ssm.inner_size", "ssm.time_step_rank", "ssm.group_count", "ssm.state_size"];
    assert_eq!(keys.map(key), [48, 6144, 48, 16, 128]);
    let keys = [
        "rope.dimension_count",
        "hyper_connection.low_rank",
        "attention.indexer.head_count",
        "embedding_length_per_layer_input",
    ];
    assert_eq!(keys.map(key), [64, 320, 4, 160]);

    // "4B MTP": the layer and the embeddings, in a file of their own.
    let head = open(&Spec { mtp: 1, only_mtp: true, ..spec });
    assert_eq!(head.tensors.iter().map(numbers).sum::<u64>() / 100_000_000, 38);
}

#[test]
fn sizes_of_qwen4exp_fit_each_other() {
    let refused = |qwen4exp: Qwen4Exp, beginning: &str| {
        let spec = Spec { qwen4exp, ..Spec::tiny("qwen4exp") };
        let fault = header(&spec).unwrap_err().to_string();
        assert!(fault.starts_with(beginning), "{fault}");
        // Others do not have these sizes.
        assert!(header(&Spec { arch: "llama".to_owned(), ..spec }).is_ok());
    };
    let small = Qwen4Exp::default();
    refused(Qwen4Exp { ngram: 1, ..small }, "qwen4exp: ngram 1: expected 2 to 3");
    refused(Qwen4Exp { ngram: 3, ngram_heads: 33, ..small }, "qwen4exp: ngram_heads 33: expected 1 to 32");
    refused(Qwen4Exp { ngram_heads: 3, ..small }, "qwen4exp: 3 heads of n-grams: expected a divisor of 256");
    refused(Qwen4Exp { ngram_rows: Some(u32::MAX), ..small }, "qwen4exp: rows of n-grams 4294967295");
    refused(Qwen4Exp { rotated: Some(96), ..small }, "qwen4exp: rotated 96: expected 8 to 64");
    refused(Qwen4Exp { key_heads: 3, ..small }, "qwen4exp: key_heads 3: expected a divisor of 4");
    refused(Qwen4Exp { index_budget: 9, ..small }, "qwen4exp: index_budget: expected a multiple of 4");
}
