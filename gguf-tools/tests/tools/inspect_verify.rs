//! `inspect`, `verify` and forecasts; readers that go away; another reader of the format.

use std::io::pipe;
use std::process::Stdio;

use gguf_rs::get_gguf_container_array_size;
use hobbit_core::gguf::{GgmlType, Gguf};
use serde_json::Value;

use crate::*;

fn model(dir: &Path) -> PathBuf {
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap().key("toy.expert_used_count", 2u32).unwrap();
    for slice in ["gate", "up", "down"] {
        header.tensor(&format!("blk.0.ffn_{slice}_exps.weight"), GgmlType::Q8_0, &[32, 32, 8]).unwrap();
    }
    let path = dir.join("toy.gguf");
    numbered(&path, header);
    path
}

#[test]
fn inspect_shows_experts() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path());
    let parts = ["architecture toy", "one token uses 2 per layer: 6.38 KiB"];
    assert_contains(&succeed(&["inspect", word(&path)]).out, &parts);
    let json = json(&["inspect", "--json", word(&path)]);
    assert_eq!((&json["expert_bytes"], &json["expert_bytes_per_token"]), (&26_112.into(), &6528.into()));
}

#[test]
fn verify_passes_a_sound_file_and_fails_a_damaged_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path());
    let args = ["verify", word(&path)];
    let sound = succeed(&args);
    assert!(sound.err.is_empty() && sound.out.starts_with("ok: "), "{}", sound.err);

    let mut bytes = fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[end - 33] = 0x7e; // the last block's scale
    fs::write(&path, &bytes).unwrap();
    refused(
        1,
        &args,
        "toy.gguf: llama.cpp cannot load this model: tensor 'blk.0.ffn_down_exps.weight[7]' has invalid data",
    );
    let report = json(&["verify", "--json", word(&path)]);
    assert_eq!(report["ok"], false);
    assert_contains(report["error"].as_str().unwrap(), &["has invalid data"]);

    fs::write(&path, &bytes[..end - 1]).unwrap();
    refused(1, &["verify", "--json", word(&path)], "toy.gguf: truncated");
    assert_contains(json(&["verify", "--json", word(&path)])["error"].as_str().unwrap(), &["truncated"]);
}

/// A Mixtral of before April 2024, and a file of ik_llama.cpp's.
#[test]
fn verify_names_formats_that_llama_cpp_does_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("old.gguf");
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "llama").unwrap();
    for (expert, slice) in (0..2).flat_map(|expert| ["gate", "down", "up"].map(|slice| (expert, slice))) {
        header.tensor(&format!("blk.0.ffn_{slice}.{expert}.weight"), GgmlType::F32, &[32, 32]).unwrap();
    }
    numbered(&path, header);
    for tool in ["verify", "inspect"] {
        refused(1, &[tool, word(&path)], "before April 2024");
    }

    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap().tensor("marked", GgmlType::F32, &[32, 32]).unwrap();
    numbered(&path, header);
    let mut bytes = fs::read(&path).unwrap();
    // Behind the name: the number of dimensions, and two of them.
    let at = bytes.windows(6).position(|six| six == b"marked").unwrap() + 6 + 4 + 16;
    bytes[at] = 144;
    fs::write(&path, &bytes).unwrap();
    refused(1, &["verify", word(&path)], "IQ4_KS of ik_llama.cpp");
}

/// A forecast for a machine that is given, so that nothing is measured.
fn forecast<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&["inspect", "--forecast", "--disk", "5GB/s", "--cpu", "60GB/s,800GFLOP/s"], args].concat()
}

/// Parameters as published, in billions, and the parameters that a token uses.
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
        let report = json(&forecast(&["--json", "--ram", "64GiB", "--shape", name]));
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
    let whole = fs::read(model(dir.path())).unwrap();
    let part = dir.path().join("part.gguf");
    let half = whole.len() / 2;
    fs::write(&part, &whole[..half]).unwrap();
    let report = json(&forecast(&["--json", "--ram", "4GiB", word(&part)]));
    assert_eq!(report["model"]["partial"], serde_json::json!([half, whole.len() - half]));
    assert_eq!(report["forecast"]["is_passthrough"], true);
    let page = succeed(&forecast(&["--ram", "4GiB", word(&part)])).out;
    let parts = ["enough to forecast, nothing to run", "llama.cpp runs by itself", "60.0 GB/s (given)", "t/s"];
    assert_contains(&page, &parts);
    // Without --forecast it is a damaged file.
    refused(1, &["inspect", word(&part)], "truncated");
    fs::write(&part, &whole[..100]).unwrap();
    refused(1, &forecast(&["--ram", "4GiB", word(&part)]), "part.gguf: the 100 bytes that are there end inside");
}

#[test]
fn wrong_usage_and_hopeless_forecasts_are_refused() {
    for args in [&["inspect"][..], &["verify", "--frob", "x"], &["no-such-tool"], &["inspect", "--shape", "x"]] {
        refused(2, args, "");
    }
    for known in ["kimi-k2", "deepseek-v3", "qwen3-235b"] {
        refused(2, &forecast(&["--shape", "gpt-9"]), known);
    }
    for (flag, value) in [("--ram", "16"), ("--gpu", "16@1TB/s")] {
        let args = forecast(&["--shape", "kimi-k2", flag, value]);
        refused(2, &args, "a number alone counts bytes: give 16GiB for gibibytes");
    }
    for (flag, value) in [("model.gguf", None), ("--gpu", Some("24GiB")), ("--ram", Some("0"))] {
        let args = [&["--shape", "kimi-k2", flag][..], value.as_slice()].concat();
        refused(2, &forecast(&args), "");
    }
    refused(2, &forecast(&["--shape", "kimi-k2", "--gpu", "RTX9999"]), "GTX1080Ti, ");
    refused(2, &["inspect", "--shape", "kimi-k2"], "--forecast");
    let small = succeed(&forecast(&["--shape", "kimi-k2", "--ram", "2GiB"])).out;
    assert_contains(
        &small,
        &["No: a memory budget of 2.00 GiB", "; give it ", "MiB of memory, or a smaller context", "64.00 GiB"],
    );
    assert!(!small.contains("--mem-budget") && !small.contains("-c)"), "{small}");
    let gpu = succeed(&forecast(&["--shape", "qwen3-30b-a3b", "--ram", "6GiB", "--gpu", "8GiB@1TB/s"])).out;
    assert_contains(&gpu, &["no run on a GPU was ever measured"]);

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dense.gguf");
    let mut header = HeaderBuilder::new(32).unwrap();
    header.key("general.architecture", "toy").unwrap().tensor("blk.0.ffn_up.weight", GgmlType::F32, &[32, 2]).unwrap();
    fs::write(&path, header.finish().header).unwrap();
    refused(1, &forecast(&["--ram", "4GiB", word(&path)]), "a dense model");
}

/// Experts in a GPU's memory are not read.
#[test]
fn a_larger_gpu_reads_less() {
    let read = |gpu: &[&str]| {
        let machine = ["--json", "--shape", "gpt-oss-120b", "--ram", "8GiB"];
        let report = json(&forecast(&[&machine, gpu].concat()));
        report["forecast"]["expected"]["bytes_read"].as_f64().unwrap()
    };
    let read =
        [&["--gpu", "none"][..], &["--gpu", "8GiB@250GB/s"], &["--gpu", "24GiB@1TB/s"], &["--gpu", "48GiB@1TB/s"]]
            .map(read);
    assert!(read.is_sorted_by(|a, b| *b < 0.9 * a), "{read:?}");
    let named = succeed(&forecast(&["--shape", "gpt-oss-120b", "--ram", "16GiB", "--gpu", "RTX4090"])).out;
    assert_contains(
        &named,
        &["a GPU with 24.00 GiB at 1.01 TB/s behind a link of 31.5 GB/s (published: an upper bound)"],
    );
    let all = json(&forecast(&["--json", "--shape", "gpt-oss-120b", "--ram", "8GiB", "--gpu", "80GiB@2TB/s"]));
    assert_eq!(all["forecast"]["expected"]["bytes_read"], 0.0);
    assert_eq!(all["forecast"]["share"], 1.0);
}

/// If stdout, or both streams, have no reader, as in `gguf-tools inspect model.gguf | head`: status 0, and no message.
#[test]
fn a_closed_pipe_ends_a_tool_in_silence() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (model, pack, plain) = (path("model.gguf"), path("pack.gguf"), path("plain.gguf"));
    let commands: [&[&str]; 9] = [
        &["synth", &model, "--force", "--layers", "1", "--experts", "2"],
        &["pack", &model, "-o", &pack, "--force"],
        &["unpack", &pack, "-o", &plain, "--force"],
        &["inspect", &model],
        &["inspect", "--json", &pack],
        &["inspect", &pack],
        &["verify", &model],
        &["verify", &pack],
        &["--help"],
    ];
    for (args, both) in commands.into_iter().flat_map(|args| [(args, false), (args, true)]) {
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_gguf-tools"));
        command.args(args).stdin(Stdio::null()).stderr(Stdio::piped());
        if both {
            command.stderr(writer.try_clone().unwrap());
        }
        let ran = run_command(command.stdout(writer));
        let err = ran.err.to_lowercase();
        assert_eq!(ran.code, Some(0), "{args:?}, both: {both}: {err}");
        assert!(!err.contains("pipe") && !err.contains("panicked"), "{args:?}: {err}");
    }
}

/// Compares every key whose value both readers have, and every tensor. Returns the number of keys.
fn compare(path: &Path) -> usize {
    let ours = Gguf::open(path).unwrap();
    let mut theirs = get_gguf_container_array_size(word(path), u64::MAX).unwrap();
    let theirs = theirs.decode().unwrap();
    let metadata = &ours.metadata;
    let sorted = |mut keys: Vec<String>| {
        keys.sort_unstable();
        keys
    };
    let their_keys = theirs.metadata().keys().cloned().collect();
    assert_eq!(sorted(metadata.keys().map(str::to_owned).collect()), sorted(their_keys));
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

#[test]
fn gguf_rs_reads_the_same_headers() {
    assert!(compare(&bundled("demo.gguf")) > 10);
    let dir = tempfile::tempdir().unwrap();
    for arch in ["qwen3moe", "deepseek2", "gpt-oss", "llama4"] {
        let path = dir.path().join(format!("{arch}.gguf"));
        let sizes = ["--layers", "2", "--embd", "256", "--ff", "256", "--experts", "4", "--topk", "2"];
        let types = ["--type", "q4_k", "--down-type", "q6_k"];
        succeed(&[&["synth", word(&path), "--arch", arch][..], &sizes, &types].concat());
        assert!(compare(&path) > 10, "{arch}");
    }
}
