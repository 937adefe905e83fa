//! `inspect` and `verify` as a user runs them: output, exit status, messages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use hobbit::gguf::{GgmlType, HeaderBuilder};

fn model(dir: &Path) -> PathBuf {
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap().key("toy.expert_used_count", 2u32).unwrap();
    for slice in ["gate", "up", "down"] {
        header.tensor(&format!("blk.0.ffn_{slice}_exps.weight"), GgmlType::Q8_0, &[32, 32, 8]).unwrap();
    }
    let path = dir.join("toy.gguf");
    let mut file = fs::File::create(&path).unwrap();
    header.finish().write(&mut file, |t, out| out.write_all(&vec![1; t.extent.len as usize])).unwrap();
    path
}

fn tool(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gguf-tools")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn inspect_shows_experts_and_residency() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path());
    let out = tool(&["inspect", path.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(0));
    for part in ["architecture toy", "one token uses 2 per layer: 6.38 KiB", "less than one token uses", "100 %"] {
        assert!(text(&out.stdout).contains(part), "'{part}' is not in:\n{}", text(&out.stdout));
    }
    let out = tool(&["inspect", "--json", path.to_str().unwrap()]);
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(json["expert_bytes"], 3 * 8 * 34 * 32);
    assert_eq!(json["expert_bytes_per_token"], 3 * 2 * 34 * 32);
    assert_eq!(json["residency"].as_array().unwrap().len(), 10);
}

#[test]
fn verify_passes_a_sound_file_and_fails_a_damaged_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path());
    let path = path.to_str().unwrap();
    let out = tool(&["verify", path]);
    assert_eq!((out.status.code(), text(&out.stderr)), (Some(0), ""));
    assert!(text(&out.stdout).starts_with("ok: "));

    let mut bytes = fs::read(path).unwrap();
    let end = bytes.len();
    bytes[end - 33] = 0x7e; // the last block's scale
    fs::write(path, &bytes).unwrap();
    let out = tool(&["verify", path]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stdout).contains("tensor 'blk.0.ffn_down_exps.weight' (q8_0): 1 blocks not finite"));
    assert!(text(&out.stderr).contains("1 of 3 tensors"), "{}", text(&out.stderr));
    let json: serde_json::Value = serde_json::from_slice(&tool(&["verify", "--json", path]).stdout).unwrap();
    assert_eq!((&json["ok"], &json["faults"][0]["first_block"]), (&false.into(), &255.into()));

    fs::write(path, &bytes[..end - 1]).unwrap();
    let out = tool(&["verify", "--json", path]);
    assert_eq!(out.status.code(), Some(1));
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert!(json["error"].as_str().unwrap().contains("truncated"));
    assert!(text(&out.stderr).starts_with("error: ") && text(&out.stderr).contains("toy.gguf"));
}

#[test]
fn wrong_usage_is_status_2() {
    assert_eq!(tool(&["inspect"]).status.code(), Some(2));
    assert_eq!(tool(&["verify", "--threads", "0", "x"]).status.code(), Some(2));
    assert_eq!(tool(&["no-such-tool"]).status.code(), Some(2));
}

#[test]
fn a_closed_pipe_is_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_gguf-tools"))
        .args(["inspect", model(dir.path()).to_str().unwrap()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert_eq!((out.status.code(), text(&out.stderr)), (Some(0), ""));
}
