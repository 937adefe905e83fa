//! `inspect` and `verify` as a user runs them: output, exit status, messages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use hobbit_core::gguf::{GgmlType, HeaderBuilder};

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

/// A forecast for a machine that is given, so that nothing is measured.
fn forecast(args: &[&str]) -> Output {
    let machine = ["inspect", "--forecast", "--disk", "5GB/s", "--cpu", "60GB/s,800GFLOP/s"];
    tool(&[&machine[..], args].concat())
}

fn json_of(out: &Output) -> serde_json::Value {
    assert_eq!((out.status.code(), text(&out.stderr)), (Some(0), ""));
    serde_json::from_slice(&out.stdout).unwrap()
}

/// Parameters as published, in billions, and how many of them a token uses.
#[test]
fn shapes_are_as_large_as_the_models() {
    for (name, all, used) in [
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141.0, 39.0),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b", 235.0, 22.0),
        ("gpt-oss-20b", 20.9, 3.6),
        ("gpt-oss-120b", 116.8, 5.1),
        ("glm-4.5-air", 106.0, 12.0),
        ("minimax-m2", 230.0, 10.0),
        ("deepseek-v3", 671.0, 37.0),
        ("kimi-k2", 1026.0, 32.0),
    ] {
        let report = json_of(&forecast(&["--json", "--ram", "64GiB", "--shape", name]));
        let number = |key: &str| report["model"][key].as_f64().unwrap() / 1e9;
        assert!((number("n_parameters") / all - 1.0).abs() < 0.01, "{name}: {}", number("n_parameters"));
        // Published counts of used parameters differ in what they leave out: embeddings, mostly.
        assert!((number("n_parameters_used") / used - 1.0).abs() < 0.1, "{name}: {}", number("n_parameters_used"));
        assert!(report["forecast"]["expected"]["tokens_per_second"].as_f64().unwrap() > 0.0, "{name}");
    }
}

#[test]
fn a_forecast_needs_a_header_and_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path());
    let whole = fs::read(&path).unwrap();
    let part = dir.path().join("part.gguf");
    fs::write(&part, &whole[..whole.len() / 2]).unwrap();
    let part = part.to_str().unwrap();

    let report = json_of(&forecast(&["--json", "--ram", "4GiB", part]));
    let there = (whole.len() / 2) as u64;
    assert_eq!(report["model"]["partial"], serde_json::json!([there, whole.len() as u64 - there]));
    assert_eq!(report["forecast"]["is_passthrough"], true);
    let page = forecast(&["--ram", "4GiB", part]);
    for told in ["enough to forecast, nothing to run", "llama.cpp runs by itself", "60.0 GB/s (given)", "t/s"] {
        assert!(text(&page.stdout).contains(told), "'{told}' is not in:\n{}", text(&page.stdout));
    }
    // Without --forecast it is a damaged file, as ever.
    assert_eq!(tool(&["inspect", part]).status.code(), Some(1));

    fs::write(part, &whole[..100]).unwrap();
    let cut = forecast(&["--ram", "4GiB", part]);
    assert_eq!(cut.status.code(), Some(1));
    assert!(text(&cut.stderr).contains("end inside the header") && text(&cut.stderr).contains("part.gguf"));
}

#[test]
fn a_forecast_says_no_in_words() {
    let unknown = forecast(&["--shape", "gpt-9"]);
    assert_eq!(unknown.status.code(), Some(2));
    for known in ["kimi-k2", "deepseek-v3", "qwen3-235b"] {
        assert!(text(&unknown.stderr).contains(known), "{}", text(&unknown.stderr));
    }
    for wrong in [
        &["--shape", "kimi-k2", "model.gguf"][..],
        &[],
        &["--shape", "kimi-k2", "--gpu", "24GiB"],
        &["--shape", "kimi-k2", "--ram", "0"],
    ] {
        assert_eq!(forecast(wrong).status.code(), Some(2), "{wrong:?}");
    }
    assert_eq!(tool(&["inspect", "--shape", "kimi-k2"]).status.code(), Some(2), "without --forecast");
    let small = forecast(&["--shape", "kimi-k2", "--ram", "2GiB"]);
    assert_eq!(small.status.code(), Some(0));
    assert!(
        text(&small.stdout).contains("No: a memory budget of 2.00 GiB") && text(&small.stdout).contains("64.00 GiB")
    );
    let gpu = forecast(&["--shape", "qwen3-30b-a3b", "--ram", "6GiB", "--gpu", "8GiB@1TB/s"]);
    assert!(text(&gpu.stdout).contains("no run on a GPU was ever measured"), "{}", text(&gpu.stdout));

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dense.gguf");
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap().tensor("blk.0.ffn_up.weight", GgmlType::F32, &[32, 2]).unwrap();
    fs::write(&path, header.finish().header).unwrap();
    let dense = forecast(&["--ram", "4GiB", path.to_str().unwrap()]);
    assert_eq!(dense.status.code(), Some(1));
    assert!(text(&dense.stderr).contains("a dense model"), "{}", text(&dense.stderr));
}
