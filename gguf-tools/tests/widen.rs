//! `widen` as a user runs it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use hobbit_core::gguf::{GgmlType, Gguf, HeaderBuilder};

fn tool(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gguf-tools")).args(args).output().unwrap()
}

/// One layer, two experts of width 32 with 3 input units, every byte of a tensor the same.
fn model(path: &Path, kinds: &[(&str, [u64; 3])]) {
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap().key("toy.feed_forward_length", 32u32).unwrap();
    header.key("toy.expert_count", 2u32).unwrap();
    header.tensor("blk.0.ffn_gate_inp.weight", GgmlType::F32, &[32, 2]).unwrap();
    for (kind, dims) in kinds {
        header.tensor(&format!("blk.0.ffn_{kind}_exps.weight"), GgmlType::Q8_0, dims).unwrap();
    }
    let mut byte = 0;
    let mut file = fs::File::create(path).unwrap();
    let layout = header.finish();
    layout
        .write(&mut file, |tensor, out| {
            byte += 1;
            out.write_all(&vec![byte; tensor.extent.len as usize])
        })
        .unwrap();
}

/// Lengths of runs of equal bytes.
fn runs(path: &Path, name: &str) -> Vec<(u8, usize)> {
    let gguf = Gguf::open(path).unwrap();
    let extent = gguf.tensor(name).unwrap().extent;
    let bytes = &fs::read(path).unwrap()[extent.offset as usize..][..extent.len as usize];
    bytes.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())).collect()
}

#[test]
fn zeros_fill_the_new_units() {
    let dir = tempfile::tempdir().unwrap();
    let (narrow, wide) = (dir.path().join("narrow.gguf"), dir.path().join("wide.gguf"));
    let plain = [("gate", [32, 32, 2]), ("up", [32, 32, 2]), ("down", [32, 32, 2])];
    let row = 34;
    model(&narrow, &plain);
    let args = ["widen", narrow.to_str().unwrap(), "--ff", "64", "-o", wide.to_str().unwrap()];
    let out = tool(&args);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(runs(&wide, "blk.0.ffn_gate_inp.weight"), [(1, 256)]);
    for (name, byte) in [("gate", 2), ("up", 3)] {
        let of_expert = [(byte, 32 * row), (0, 32 * row)];
        assert_eq!(runs(&wide, &format!("blk.0.ffn_{name}_exps.weight")), of_expert.repeat(2));
    }
    assert_eq!(runs(&wide, "blk.0.ffn_down_exps.weight"), [(4, row), (0, row)].repeat(64));
    assert_eq!(Gguf::open(&wide).unwrap().metadata.get_u64("toy.feed_forward_length"), Some(64));

    assert_eq!(tool(&args).status.code(), Some(1), "it is there");
    for (ff, part) in [("16", "blocks of 32"), ("33", "blocks of 32")] {
        let out = tool(&["widen", narrow.to_str().unwrap(), "--ff", ff, "-o", wide.to_str().unwrap(), "--force"]);
        assert_eq!(out.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&out.stderr).contains(part), "{}", String::from_utf8_lossy(&out.stderr));
    }
    let back = tool(&["widen", wide.to_str().unwrap(), "--ff", "32", "-o", narrow.to_str().unwrap(), "--force"]);
    assert!(String::from_utf8_lossy(&back.stderr).contains("have 64 hidden units already"));
}

#[test]
fn fused_halves_stay_halves() {
    let dir = tempfile::tempdir().unwrap();
    let (narrow, wide) = (dir.path().join("narrow.gguf"), dir.path().join("wide.gguf"));
    model(&narrow, &[("gate_up", [32, 64, 2]), ("down", [32, 32, 2])]);
    let out = tool(&["widen", narrow.to_str().unwrap(), "--ff", "96", "-o", wide.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(runs(&wide, "blk.0.ffn_gate_up_exps.weight"), [(2, 32 * 34), (0, 64 * 34)].repeat(4));
}

#[test]
fn shared_experts_go_along_where_their_width_is_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let narrow = fixture_with_shared(dir.path());
    let wide = dir.path().join("wide.gguf");
    let out = tool(&["widen", narrow.to_str().unwrap(), "--ff", "64", "-o", wide.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    let gguf = Gguf::open(&wide).unwrap();
    let dims = |name: &str| gguf.tensor(&format!("blk.0.ffn_{name}_shexp.weight")).unwrap().dims.clone();
    assert_eq!([dims("gate"), dims("up"), dims("down")], [[32, 128], [32, 128], [128, 32]], "two of 64");
    assert_eq!(runs(&wide, "blk.0.ffn_up_shexp.weight"), [(2, 64 * 34), (0, 64 * 34)]);
    assert_eq!(runs(&wide, "blk.0.ffn_down_shexp.weight"), [(3, 2 * 34), (0, 2 * 34)].repeat(32));
}

/// Two experts of width 32, and two shared ones side by side.
fn fixture_with_shared(dir: &Path) -> std::path::PathBuf {
    let path = dir.join("shared.gguf");
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap().key("toy.expert_feed_forward_length", 32u32).unwrap();
    header.key("toy.expert_count", 2u32).unwrap().key("toy.expert_shared_count", 2u32).unwrap();
    for (kind, dims) in [("gate", [32, 64]), ("up", [32, 64]), ("down", [64, 32])] {
        header.tensor(&format!("blk.0.ffn_{kind}_shexp.weight"), GgmlType::Q8_0, &dims).unwrap();
    }
    for kind in ["gate", "up", "down"] {
        header.tensor(&format!("blk.0.ffn_{kind}_exps.weight"), GgmlType::Q8_0, &[32, 32, 2]).unwrap();
    }
    let mut byte = 0;
    let mut file = fs::File::create(&path).unwrap();
    let layout = header.finish();
    layout
        .write(&mut file, |tensor, out| {
            byte += 1;
            out.write_all(&vec![byte; tensor.extent.len as usize])
        })
        .unwrap();
    path
}
