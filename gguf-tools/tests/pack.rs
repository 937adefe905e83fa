//! `pack`, `unpack`, and what `inspect` and `verify` say of packs, as a user runs them: kills and full disks included.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gguf_tools::synth::{self, Spec};

fn model(dir: &Path) -> PathBuf {
    let spec = Spec { layers: 3, experts: 4, vocab: 300, heads: 2, ..Spec::tiny("qwen3moe") };
    synth::write(&dir.join("model.gguf"), &spec).unwrap().files[0].clone()
}

fn tool(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gguf-tools")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Model, pack, and a place for what is unpacked, as arguments.
fn paths(dir: &Path) -> [String; 3] {
    let model = model(dir);
    [model, dir.join("pack.gguf"), dir.join("again.gguf")].map(|path| path.to_str().unwrap().to_owned())
}

fn succeed(args: &[&str]) -> Output {
    let out = tool(args);
    assert_eq!(out.status.code(), Some(0), "{args:?}: {}", text(&out.stderr));
    out
}

#[test]
fn there_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, again] = paths(dir.path());
    let out = succeed(&["pack", &model, "-o", &pack, "--threads", "2", "--t1", "0.5", "--t2", "0.8"]);
    assert_eq!(text(&out.stdout), format!("{pack}\n"));
    assert!(text(&out.stderr).contains("12 records, high q8_0"), "{}", text(&out.stderr));
    let out = succeed(&["verify", &pack]);
    assert!(text(&out.stdout).starts_with("ok: full pack"), "{}", text(&out.stdout));
    let out = succeed(&["unpack", &pack, "-o", &again]);
    assert!(text(&out.stderr).contains("bit for bit model.gguf"), "{}", text(&out.stderr));
    assert!(fs::read(&model).unwrap() == fs::read(&again).unwrap());

    let out = succeed(&["inspect", &pack]);
    for part in [
        "expert pack (full), format version 1",
        "blk.1 high",
        "hobbit.index",
        "T1 0.5, T2 0.8",
        "gate:q8_0 up:q8_0 down:q8_0",
    ] {
        assert!(text(&out.stdout).contains(part), "'{part}' is not in:\n{}", text(&out.stdout));
    }
    let json: serde_json::Value = serde_json::from_slice(&succeed(&["inspect", "--json", &pack]).stdout).unwrap();
    let records = &json["layers"][2]["high"];
    // 3 slices of 256 x 256 in Q8_0: 17 whole blocks each.
    assert_eq!(
        (&records["n"], &records["record_bytes"][0], &records["weight_bytes"]),
        (&4.into(), &208_896.into(), &835_584.into())
    );
    let all = ["ordinary_bytes", "high_bytes", "low_bytes"].iter().map(|key| json[key].as_u64().unwrap()).sum::<u64>();
    assert!(all < json["bytes"].as_u64().unwrap() && json["low"].is_null());

    for (args, part) in [
        (["pack", &model, "-o", &pack].as_slice(), "exists already"),
        (&["unpack", &pack, "-o", &again], "exists already"),
        (&["unpack", &model, "-o", &pack, "--force"], "not an expert pack"),
        (&["pack", &pack, "-o", &again, "--force"], "is an expert pack already"),
        (&["pack", &model, "-o", &again, "--t1", "0.9", "--t2", "0.8", "--force"], "T1 to be at most T2"),
    ] {
        let out = tool(args);
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        assert!(text(&out.stderr).contains(part), "{args:?}: {}", text(&out.stderr));
    }
    for args in
        [&["pack", &model][..], &["pack", &model, "-o", "x", "--only-low"], &["pack", &model, "-o", "x", "--low", "q9"]]
    {
        assert_eq!(tool(args).status.code(), Some(2), "{args:?}");
    }
}

/// Both precisions in the bytes of one.
#[test]
fn nested_there_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, again] = paths(dir.path());
    let out = succeed(&["pack", &model, "-o", &pack, "--nested"]);
    assert!(text(&out.stderr).contains("24 records, high q8_0, low q4_1"), "{}", text(&out.stderr));
    let out = succeed(&["verify", &pack]);
    assert!(text(&out.stdout).starts_with("ok: full pack"), "{}", text(&out.stdout));
    let out = succeed(&["unpack", &pack, "-o", &again]);
    assert!(text(&out.stderr).contains("bit for bit model.gguf"), "{}", text(&out.stderr));
    assert!(fs::read(&model).unwrap() == fs::read(&again).unwrap());

    let out = succeed(&["inspect", &pack]);
    for part in ["format version 2", "blk.1 nested", "nested: a low record", "low: q4_1", "gate:q4_1 up:q4_1 down:q4_1"]
    {
        assert!(text(&out.stdout).contains(part), "'{part}' is not in:\n{}", text(&out.stdout));
    }
    let json: serde_json::Value = serde_json::from_slice(&succeed(&["inspect", "--json", &pack]).stdout).unwrap();
    let layer = &json["layers"][2];
    // 3 slices of 256 x 256: 2048 blocks each, 18 bytes of which are the high plane's and 16 the low one's.
    let bytes = |precision: &str| layer[precision]["record_bytes"][0].as_u64().unwrap();
    assert_eq!((bytes("low"), bytes("high")), (3 * 2048 * 18, 3 * 2048 * 16));
    assert_eq!((&json["nested"], &json["pack_version"]), (&true.into(), &2.into()));

    let half = synth::write(
        &dir.path().join("half.gguf"),
        &Spec { layers: 1, vocab: 300, heads: 2, types: vec![synth::Format::F16], ..Spec::tiny("qwen3moe") },
    );
    let half = half.unwrap().files[0].to_str().unwrap().to_owned();
    let mut refused = vec![(vec!["pack", &half, "-o", &again, "--nested", "--force"], "is f16, expected q8_0")];
    if cfg!(feature = "engine") {
        let both = vec!["pack", &model, "-o", &again, "--nested", "--low", "q4_0", "--force"];
        refused.push((both, "give one of the two"));
    }
    for (args, part) in refused {
        let out = tool(&args);
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        assert!(text(&out.stderr).contains(part), "{args:?}: {}", text(&out.stderr));
    }
}

#[test]
fn a_damaged_expert_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, again] = paths(dir.path());
    succeed(&["pack", &model, "-o", &pack]);
    let json: serde_json::Value = serde_json::from_slice(&succeed(&["inspect", "--json", &pack]).stdout).unwrap();
    let region = json["layout"].as_array().unwrap().iter().find(|region| region["what"] == "blk.1 high").unwrap();
    let record = region["bytes"].as_u64().unwrap() / 4;
    let mut bytes = fs::read(&pack).unwrap();
    bytes[(region["offset"].as_u64().unwrap() + 2 * record + 100) as usize] ^= 1;
    fs::write(&pack, &bytes).unwrap();
    let out = tool(&["verify", &pack]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stdout).contains("layer 1 expert 2 (high): its checksum differs"), "{}", text(&out.stdout));
    let json: serde_json::Value = serde_json::from_slice(&tool(&["verify", "--json", &pack]).stdout).unwrap();
    assert_eq!((&json["ok"], &json["faults"][0]["expert"]), (&false.into(), &2.into()));
    let out = tool(&["unpack", &pack, "-o", &again]);
    assert!(text(&out.stderr).contains("gguf-tools verify"), "{}", text(&out.stderr));
    assert!(!Path::new(&again).exists());
}

/// The process is killed at different places; nothing opens as a pack, and the same command makes the same file.
#[cfg(unix)]
#[test]
fn killed_in_the_middle() {
    use std::os::unix::process::ExitStatusExt;
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, _] = paths(dir.path());
    for (nested, n) in
        [&[][..], &["--nested"]].into_iter().flat_map(|nested| ["1", "7", "20", "40"].map(|n| (nested, n)))
    {
        let args = [&["pack", &model, "-o", &pack][..], nested].concat();
        succeed(&args);
        let expected = fs::read(&pack).unwrap();
        fs::remove_file(&pack).unwrap();
        let out = tool(&[&args[..], &["--threads", "2", "--stop-after", n]].concat());
        assert_eq!(out.status.code(), None, "{:?}", out.status);
        assert!(out.status.signal().is_some() && !Path::new(&pack).exists());
        let partial = tool(&["verify", &format!("{pack}.partial")]);
        assert_eq!(partial.status.code(), Some(1), "what was killed does not open as a pack");
        succeed(&args);
        assert!(fs::read(&pack).unwrap() == expected, "{n}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left but model and pack");
        fs::remove_file(&pack).unwrap();
    }
}

/// The file system takes no more (here: files of at most 1 MiB): a clear error, and nothing is left.
#[cfg(unix)]
#[test]
fn a_full_disk() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, again] = paths(dir.path());
    let limited = |blocks: u32| {
        let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
        let tool = env!("CARGO_BIN_EXE_gguf-tools");
        Command::new("sh").args(["-c", &script, tool, "pack", &model, "-o", &pack]).output().unwrap()
    };
    let out = limited(2048);
    assert_eq!(out.status.code(), Some(1), "{:?}", out.status);
    let message = text(&out.stderr);
    assert!(message.contains("pack.gguf.partial: cannot write"), "{message}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing but the model");
    succeed(&["pack", &model, "-o", &pack]);
    succeed(&["verify", &pack]);
    succeed(&["unpack", &pack, "-o", &again]);
    assert!(fs::read(&model).unwrap() == fs::read(&again).unwrap());
}

#[cfg(not(feature = "engine"))]
#[test]
fn without_ggml_types_stay() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, _] = paths(dir.path());
    let out = tool(&["pack", &model, "-o", &pack, "--low", "q2_k"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("without the feature 'engine'"), "{}", text(&out.stderr));
}

#[cfg(feature = "engine")]
#[test]
fn low_versions_are_quantised() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, again] = paths(dir.path());
    let out = succeed(&["pack", &model, "-o", &pack, "--low", "q2_k,down=q3_k"]);
    assert!(text(&out.stderr).contains("24 records, high q8_0, low q2_K,down=q3_K"), "{}", text(&out.stderr));
    succeed(&["verify", &pack]);
    succeed(&["unpack", &pack, "-o", &again]);
    assert!(fs::read(&model).unwrap() == fs::read(&again).unwrap());

    // After a run that was killed, on another number of threads: the same bytes.
    let other = dir.path().join("other.gguf");
    let other = other.to_str().unwrap();
    let args = ["pack", &model, "-o", other, "--low", "q2_k,down=q3_k", "--threads", "1"];
    assert_eq!(tool(&[&args[..], &["--stop-after", "30"]].concat()).status.code(), None);
    succeed(&args);
    assert!(fs::read(&pack).unwrap() == fs::read(other).unwrap());

    // High versions of other types unpack to a plain model that is sound.
    let high = dir.path().join("high.gguf");
    let high = high.to_str().unwrap();
    succeed(&["pack", &model, "-o", high, "--high", "q4_k"]);
    succeed(&["unpack", high, "-o", &again, "--force"]);
    let out = succeed(&["verify", &again]);
    assert!(text(&out.stdout).starts_with("ok: 1 file(s)"), "{}", text(&out.stdout));
    let json: serde_json::Value = serde_json::from_slice(&succeed(&["inspect", "--json", &again]).stdout).unwrap();
    assert_eq!(json["layers"][0]["expert_types"]["down"], "q4_K");

    let low = dir.path().join("low.gguf");
    let low = low.to_str().unwrap();
    succeed(&["pack", &model, "-o", low, "--low", "q4_0", "--only-low"]);
    assert!(fs::metadata(low).unwrap().len() < fs::metadata(&pack).unwrap().len() / 2);
    assert!(text(&tool(&["unpack", low, "-o", &again, "--force"]).stderr).contains("--low"));
}

/// Under any of its names, whatever is forced: exit status 2, before anything is read.
#[test]
fn no_output_is_an_input() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, _] = paths(dir.path());
    let split = Spec { shards: 2, layers: 3, experts: 4, vocab: 300, heads: 2, ..Spec::tiny("qwen3moe") };
    let shards = synth::write(&dir.path().join("split.gguf"), &split).unwrap().files;
    let shards = shards.iter().map(|path| path.to_str().unwrap().to_owned()).collect::<Vec<_>>();
    let hard = dir.path().join("hard").to_str().unwrap().to_owned();
    fs::hard_link(&model, &hard).unwrap();
    let notes = dir.path().join("notes").to_str().unwrap().to_owned();
    fs::write(&notes, "precious").unwrap();
    succeed(&["pack", &model, "-o", &pack]);
    let files = [&model, &pack, &shards[0], &shards[1], &notes];
    let before = files.map(|path| fs::read(path).unwrap());
    let cases: [(&[&str], &str); 10] = [
        (&["pack", &model, "-o", &model, "--force"], "the file of the model"),
        (&["pack", &model, "-o", &hard, "--force"], "the file of the model"),
        (&["pack", &shards[0], "-o", &shards[1], "--force"], "the file of the model"),
        (&["pack", &model, "-o", &pack, "--force", "--policy", &pack], "the file of --policy"),
        (&["pack", &model, "-o", &notes, "--force"], "is no GGUF"),
        (&["unpack", &pack, "-o", &pack, "--force"], "the file of the pack"),
        (&["unpack", &pack, "-o", &notes, "--force"], "is no GGUF"),
        (&["widen", &model, "--ff", "4096", "-o", &model, "--force"], "the file of the model"),
        (&["widen", &shards[0], "--ff", "4096", "-o", &shards[1], "--force"], "the file of the model"),
        (&["synth", &notes, "--force"], "is no GGUF"),
    ];
    for (args, part) in cases {
        let out = tool(args);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {}", text(&out.stderr));
        assert!(text(&out.stderr).contains(part), "{args:?}: {}", text(&out.stderr));
    }
    assert!(before == files.map(|path| fs::read(path).unwrap()));
    // Every shard that is there, not only the name that was given.
    let name = dir.path().join("split.gguf");
    let out = tool(&["synth", name.to_str().unwrap(), "--split", "2"]);
    assert!(text(&out.stderr).contains("split-00001-of-00002.gguf: this file exists already"), "{}", text(&out.stderr));
}
