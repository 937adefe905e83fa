//! `widen`.

use hobbit_core::gguf::{GgmlType, Gguf};

use crate::*;

/// One layer, two experts of width 32 with 32 input units; `keys` beside the usual ones, and more tensors.
fn model(path: &Path, keys: &[(&str, u32)], tensors: &[(&str, &[u64])]) {
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap().key("toy.expert_count", 2u32).unwrap();
    for (key, value) in keys {
        header.key(key, *value).unwrap();
    }
    for (name, dims) in tensors {
        header.tensor(&format!("blk.0.ffn_{name}.weight"), GgmlType::Q8_0, dims).unwrap();
    }
    numbered(path, header);
}

/// Lengths of runs of equal bytes.
fn runs(path: &Path, name: &str) -> Vec<(u8, usize)> {
    let gguf = Gguf::open(path).unwrap();
    let extent = gguf.tensor(&format!("blk.0.ffn_{name}.weight")).unwrap().extent;
    let bytes = &fs::read(path).unwrap()[extent.offset as usize..][..extent.len as usize];
    bytes.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())).collect()
}

/// Bytes of a row of 32 weights.
const ROW: usize = 34;
const WIDTH: (&str, u32) = ("toy.feed_forward_length", 32);

#[test]
fn zeros_fill_the_new_units() {
    let dir = tempfile::tempdir().unwrap();
    let [narrow, wide] = ["narrow.gguf", "wide.gguf"].map(|name| dir.path().join(name));
    let square: &[u64] = &[32, 32, 2];
    let tensors: [(&str, &[u64]); 4] =
        [("gate_inp", &[32, 2]), ("gate_exps", square), ("up_exps", square), ("down_exps", square)];
    model(&narrow, &[WIDTH], &tensors);
    let args = ["widen", word(&narrow), "--ff", "64", "-o", word(&wide)];
    succeed(&args);
    assert_eq!(runs(&wide, "gate_inp"), [(1, 2 * ROW)]);
    for (name, byte) in [("gate_exps", 2), ("up_exps", 3)] {
        assert_eq!(runs(&wide, name), [(byte, 32 * ROW), (0, 32 * ROW)].repeat(2));
    }
    assert_eq!(runs(&wide, "down_exps"), [(4, ROW), (0, ROW)].repeat(64));
    assert_eq!(Gguf::open(&wide).unwrap().metadata.get_u64("toy.feed_forward_length"), Some(64));

    refused(1, &args, "give --force");
    for ff in ["16", "33"] {
        refused(1, &["widen", word(&narrow), "--ff", ff, "-o", word(&wide), "--force"], "blocks of 32");
    }
    let back = ["widen", word(&wide), "--ff", "32", "-o", word(&narrow), "--force"];
    refused(1, &back, "have 64 hidden units already");
}

#[test]
fn fused_halves_stay_halves_and_shared_experts_widen_too() {
    let dir = tempfile::tempdir().unwrap();
    let [narrow, wide] = ["narrow.gguf", "wide.gguf"].map(|name| dir.path().join(name));
    model(&narrow, &[WIDTH], &[("gate_up_exps", &[32, 64, 2]), ("down_exps", &[32, 32, 2])]);
    succeed(&["widen", word(&narrow), "--ff", "96", "-o", word(&wide)]);
    assert_eq!(runs(&wide, "gate_up_exps"), [(1, 32 * ROW), (0, 64 * ROW)].repeat(4));

    // Two shared experts side by side, whose width is that of the others.
    let square: &[u64] = &[32, 32, 2];
    let tensors: [(&str, &[u64]); 6] = [
        ("gate_shexp", &[32, 64]),
        ("up_shexp", &[32, 64]),
        ("down_shexp", &[64, 32]),
        ("gate_exps", square),
        ("up_exps", square),
        ("down_exps", square),
    ];
    model(&narrow, &[("toy.expert_feed_forward_length", 32), ("toy.expert_shared_count", 2)], &tensors);
    succeed(&["widen", word(&narrow), "--ff", "64", "-o", word(&wide), "--force"]);
    assert_eq!(runs(&wide, "up_shexp"), [(2, 64 * ROW), (0, 64 * ROW)]);
    assert_eq!(runs(&wide, "down_shexp"), [(3, 2 * ROW), (0, 2 * ROW)].repeat(32));
}
