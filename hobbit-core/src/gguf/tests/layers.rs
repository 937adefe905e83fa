//! Facts about layers, from headers without weights.

use super::super::{GgmlType, Gguf, HeaderBuilder, Value};

fn gguf(keys: &[(&str, Value)], tensors: &[&str]) -> Gguf {
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap();
    for (key, value) in keys {
        header.key(&format!("toy.{key}"), value.clone()).unwrap();
    }
    for name in tensors {
        header.tensor(name, GgmlType::F32, &[32]).unwrap();
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), header.finish().header).unwrap();
    Gguf::open_partial(file.path()).unwrap()
}

#[test]
fn layers_for_multi_token_prediction_do_not_run() {
    let tensors = ["output.weight", "blk.3.attn_q.weight", "blk.4.attn_q.weight", "blk.5.nextn.eh_proj.weight"];
    let two = gguf(&[("block_count", 6u32.into()), ("nextn_predict_layers", 2u32.into())], &tensors);
    assert_eq!(two.n_layers_run(), 4);
    assert_eq!(
        two.tensors_from(4).map(|tensor| &tensor.name).collect::<Vec<_>>(),
        tensors[2..].iter().collect::<Vec<_>>()
    );
    assert_eq!(two.mtp_layers(), None, "no blk.4.nextn.eh_proj.weight, nor a known architecture");
    let more_than_there_are = gguf(&[("block_count", 1u32.into()), ("nextn_predict_layers", 2u32.into())], &[]);
    assert_eq!(more_than_there_are.n_layers_run(), 0);
    assert_eq!(gguf(&[], &tensors).n_layers_run(), u64::MAX);
}

/// Where only other layers pool their keys, llama.cpp's graph has an input without a value.
#[test]
fn layers_of_qwen4exp_that_do_not_pool_predict_nothing() {
    let file = |ratios: &[u32], tensors: &[&str]| {
        let mut header = HeaderBuilder::new(32).unwrap();
        header.key("general.architecture", "qwen4exp").unwrap();
        header.key("qwen4exp.block_count", 3u32).unwrap();
        header.key("qwen4exp.nextn_predict_layers", 1u32).unwrap();
        header.key("qwen4exp.attention.compress_ratios", Value::array(ratios.iter().copied())).unwrap();
        for name in tensors {
            header.tensor(name, GgmlType::F32, &[32]).unwrap();
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), header.finish().header).unwrap();
        Gguf::open_partial(file.path()).unwrap()
    };
    let whole = |ratios: &[u32]| file(ratios, &["blk.0.attn_q.weight", "blk.2.nextn.eh_proj.weight"]).mtp_layers();
    assert_eq!([[0, 4, 4], [0, 0, 0], [0, 4, 0]].map(|ratios| whole(&ratios)), [Some(2..3), Some(2..3), None]);
    // In a file of their own they lose the key.
    let head = |ratios: &[u32]| file(ratios, &["blk.2.nextn.eh_proj.weight"]);
    assert!(head(&[0, 4, 4]).is_mtp_head() && head(&[0, 4, 4]).mtp_head_mended().is_none());
    assert!(head(&[0, 4, 0]).is_mtp_head() && head(&[0, 4, 0]).mtp_head_mended().is_some());
}

#[test]
fn experts_used_are_one_number_or_one_for_each_layer() {
    let one = gguf(&[("expert_used_count", 8u32.into())], &[]);
    assert_eq!((one.n_expert_used(0), one.n_expert_used(7), one.n_expert_used_max()), (8, 8, 8));
    let each = gguf(&[("expert_used_count", Value::array([0u32, 4, 22, 4]))], &[]);
    assert_eq!([0, 1, 2, 9].map(|layer| each.n_expert_used(layer)), [0, 4, 22, 0]);
    assert_eq!(each.n_expert_used_max(), 22);
    assert_eq!(gguf(&[], &[]).n_expert_used_max(), 0);
}

#[test]
fn only_layers_with_attention_keep_tokens() {
    let keys = |head_count_kv: Value| {
        [
            ("block_count", 4u32.into()),
            ("embedding_length", 512u32.into()),
            ("attention.head_count", 8u32.into()),
            ("attention.head_count_kv", head_count_kv),
            ("ssm.inner_size", 1024u32.into()),
            ("ssm.state_size", 16u32.into()),
            ("ssm.conv_kernel", 4u32.into()),
        ]
    };
    let row = 64 + 64;
    // By the header.
    assert_eq!(gguf(&keys(Value::array([0u32, 0, 2, 0])), &[]).kv_elements(), 2 * row);
    // By the tensors: three recurrent layers, one with keys.
    let tensors = ["blk.0.ssm_a", "blk.1.ssm_a", "blk.2.ssm_a", "blk.2.ssm_d", "blk.3.attn_k.weight"];
    let hybrid = gguf(&keys(2u32.into()), &tensors);
    assert_eq!(hybrid.kv_elements(), 2 * row);
    assert_eq!(hybrid.state_elements(), 3 * (1024 * 16 + 1024 * 4));
    // Keys that have another name are everywhere.
    let plain = gguf(&keys(2u32.into()), &["blk.0.attn_qkv.weight"]);
    assert_eq!((plain.kv_elements(), plain.state_elements()), (4 * 2 * row, 0));
}
