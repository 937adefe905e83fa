//! `pack`, `unpack`, and `inspect` and `verify` of packs, on full disks too.

use hobbit_core::expert::{ExpertId, Version};
use hobbit_core::pack::Pack;

use crate::*;

/// Model, pack, and a place for what is unpacked, as arguments.
fn paths(dir: &Path) -> [String; 3] {
    synthesise(&dir.join("model.gguf"), &small_spec());
    ["model.gguf", "pack.gguf", "again.gguf"].map(|name| word(&dir.join(name)).to_owned())
}

fn same(a: &str, b: &str) -> bool {
    fs::read(a).unwrap() == fs::read(b).unwrap()
}

#[test]
fn there_and_back() {
    for (flags, records, shown, version) in [
        (
            &["--threads", "2", "--t1", "0.5", "--t2", "0.8"][..],
            "12 records, high q8_0",
            ["expert pack (full), format version 1", "T1 0.5, T2 0.8", "gate:q8_0 up:q8_0 down:q8_0"],
            1,
        ),
        (
            &["--bit-planes"],
            "24 records, high q8_0, low q4_1",
            ["format version 2", "bit planes: a low record", "gate:q4_1 up:q4_1 down:q4_1"],
            2,
        ),
        (
            &["--low", "q2_k,down=q3_k"],
            "24 records, high q8_0, low q2_K,down=q3_K",
            ["format version 1", "low: q2_K,down=q3_K", "gate:q2_K up:q2_K down:q3_K"],
            1,
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let [model, pack, again] = paths(dir.path());
        let packed = succeed(&[&["pack", &model, "-o", &pack][..], flags].concat());
        assert_eq!(packed.out, format!("{pack}\n"));
        assert_contains(&packed.err, &[records]);
        assert!(succeed(&["verify", &pack]).out.starts_with("ok: full pack"));
        assert_contains(&succeed(&["unpack", &pack, "-o", &again]).err, &["bit for bit model.gguf"]);
        assert!(same(&model, &again));
        assert_contains(&succeed(&["inspect", &pack]).out, &shown);
        let json = json(&["inspect", "--json", &pack]);
        assert_eq!((&json["pack_version"], &json["nested"]), (&version.into(), &(version == 2).into()));
        let sum: u64 =
            ["ordinary_bytes", "high_bytes", "low_bytes"].iter().map(|key| json[key].as_u64().unwrap()).sum();
        assert!(sum < json["bytes"].as_u64().unwrap());
        // 3 slices of 256 x 256: 17 whole blocks of Q8_0 each, or planes of 18 and 16 bytes for each of 2048 blocks.
        let bytes = |precision: &str| json["layers"][2][precision]["record_bytes"][0].as_u64();
        let (high, low) = if version == 2 { (3 * 2048 * 16, Some(3 * 2048 * 18)) } else { (208_896, bytes("low")) };
        assert_eq!((bytes("high"), bytes("low")), (Some(high), low));
    }
}

#[test]
fn commands_that_make_no_sense_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, again] = paths(dir.path());
    let half = Spec { layers: 1, types: vec![synth::Format::F16], ..small_spec() };
    let half = synthesise(&dir.path().join("half.gguf"), &half);
    succeed(&["pack", &model, "-o", &pack, "--nested"]);
    let cases: [(i32, &[&str], &str); 10] = [
        (1, &["pack", &model, "-o", &pack], "exists already"),
        (1, &["unpack", &pack, "-o", &model], "exists already"),
        (1, &["unpack", &model, "-o", &pack, "--force"], "not an expert pack"),
        (1, &["pack", &pack, "-o", &again, "--force"], "is an expert pack already"),
        (1, &["pack", &model, "-o", &again, "--t1", "0.9", "--t2", "0.8", "--force"], "T1 to be at most T2"),
        (1, &["pack", word(&half), "-o", &again, "--bit-planes"], "is f16, expected q8_0"),
        (1, &["pack", &model, "-o", &again, "--bit-planes", "--low", "q4_0"], "give one of the two"),
        (2, &["pack", &model], "--output"),
        (2, &["pack", &model, "-o", "x", "--only-low"], "--low"),
        (2, &["pack", &model, "-o", "x", "--low", "q9"], "q9"),
    ];
    for (code, args, part) in cases {
        refused(code, args, part);
    }
}

/// Rows of 2880 weights are no whole blocks of most types of few bits: gpt-oss, as it is published.
#[test]
fn types_that_save_nothing_are_refused_with_one_that_does() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| word(&dir.path().join(name)).to_owned();
    let [model, low] = ["oss.gguf", "low.gguf"].map(at);
    let small = ["--layers", "1", "--experts", "2", "--topk", "1", "--vocab", "300", "--ctx", "256"];
    succeed(&[&["synth", &model, "--preset", "gpt-oss-20b"][..], &small].concat());
    let pack = |types| ["pack", &model, "-o", &low, "--only-low", "--low", types].map(str::to_owned);
    for types in ["q2_k", "q3_k", "mxfp4"] {
        let ran = run(&pack(types).each_ref().map(String::as_str));
        assert_eq!(ran.code, Some(1), "{types}: {}", ran.err);
        assert!(ran.err.ends_with("; give --low q2_0\n"), "{types}: {}", ran.err);
        assert!(types == "mxfp4" || ran.err.contains("rows of 2880 weights are no whole blocks"), "{}", ran.err);
    }
    succeed(&pack("q2_0").each_ref().map(String::as_str));
    assert_contains(&succeed(&["inspect", &low]).out, &["low: q2_0"]);
}

/// What `--low auto` and the presets of papers take.
#[test]
fn every_known_model_has_smaller_types() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("header.gguf");
    for preset in synth::presets() {
        let published = Spec { layers: 4, ..Spec::preset(preset).unwrap() };
        let types = ["q8_0", "q4_0", "mxfp4", "f16"].map(|name| name.parse().unwrap());
        let plain = |format| Spec { types: vec![format], down_types: Vec::new(), ..published.clone() };
        for spec in types.map(plain).into_iter().chain([published.clone()]) {
            fs::write(&path, synth::header(&spec).unwrap()).unwrap();
            let experts = hobbit_core::gguf::Gguf::open_partial(&path).unwrap().experts().unwrap();
            let chosen = hobbit_core::pack::TypeChoice::below(&experts);
            let layers =
                experts.layers.iter().map(|layer| hobbit_core::gguf::ExpertMap { layers: vec![layer.clone()] });
            for layer in layers {
                assert!(chosen.lowers(&layer), "{preset} {:?}: {chosen}", spec.types);
            }
        }
    }
}

/// `--force` replaces a file: never a pipe, a device, or a link to a file.
#[cfg(unix)]
#[test]
fn pipes_devices_and_links_stay() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, _] = paths(dir.path());
    succeed(&["pack", &model, "-o", &pack]);
    let at = |name: &str| word(&dir.path().join(name)).to_owned();
    let [pipe, null, link, target] = ["pipe", "null", "link.gguf", "target.gguf"].map(at);
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::os::unix::fs::symlink("/dev/null", &null).unwrap();
    std::os::unix::fs::symlink("target.gguf", &link).unwrap();
    let tools = |out: &str, force: &[&str]| {
        let [packs, unpacks] = [["pack", &model, "-o", out], ["unpack", &pack, "-o", out]].map(|words| words.to_vec());
        let makes = vec!["synth", out, "--layers", "1", "--experts", "2", "--topk", "1", "--vocab", "300"];
        let owned = |words: Vec<&str>| words.iter().chain(force).map(|word| (*word).to_owned()).collect::<Vec<_>>();
        [packs, unpacks, makes].map(owned)
    };
    for force in [&[][..], &["--force"]] {
        for (out, found) in [(&pipe, "pipe"), (&null, "device")] {
            for words in tools(out, force) {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                refused(2, &words, &format!("{out}: this is a {found}"));
            }
        }
    }
    assert_eq!(fs::read_link(&null).unwrap(), Path::new("/dev/null"));
    let mut bytes = Vec::new();
    for (first, again) in tools(&link, &[]).iter().zip(&tools(&link, &["--force"])) {
        // The link leads to nothing at first.
        for words in [first, again] {
            succeed(&words.iter().map(String::as_str).collect::<Vec<_>>());
            assert_eq!(fs::read_link(&link).unwrap(), Path::new("target.gguf"));
            bytes.push(fs::read(&target).unwrap());
        }
        fs::remove_file(&target).unwrap();
    }
    assert!(bytes[0] == fs::read(&pack).unwrap() && bytes[2] == fs::read(&model).unwrap());
    assert!(bytes.chunks(2).all(|two| two[0] == two[1]));
    let left = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("partial")), "{left:?}");
}

#[test]
fn a_damaged_expert_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, again] = paths(dir.path());
    succeed(&["pack", &model, "-o", &pack]);
    let expert = Version::high(ExpertId { layer: 1, index: 2 });
    let versions = Pack::open(Path::new(&pack)).unwrap().versions;
    let record = versions.iter().find(|own| own.version == expert).unwrap().record;
    let mut bytes = fs::read(&pack).unwrap();
    bytes[record.offset as usize + 100] ^= 1;
    fs::write(&pack, &bytes).unwrap();
    refused(1, &["verify", &pack], "1 faults");
    assert_contains(&run(&["verify", &pack]).out, &["layer 1 expert 2 (high): its checksum differs"]);
    let report = json(&["verify", "--json", &pack]);
    assert_eq!((&report["ok"], &report["faults"][0]["expert"]), (&false.into(), &2.into()));
    refused(1, &["unpack", &pack, "-o", &again], "gguf-tools verify");
    assert!(!Path::new(&again).exists());
}

/// Files of at most 1 MiB: a clear error, and nothing is left.
#[cfg(unix)]
#[test]
fn a_full_disk() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, _] = paths(dir.path());
    let script = "trap '' XFSZ; ulimit -f 2048; exec \"$0\" \"$@\"";
    let tool = env!("CARGO_BIN_EXE_gguf-tools");
    let ran = run_command(Command::new("sh").args(["-c", script, tool, "pack", &model, "-o", &pack]));
    assert_eq!(ran.code, Some(1));
    assert_contains(&ran.err, &["pack.gguf.partial: cannot write"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing but the model");
}

#[test]
fn other_types_and_low_packs() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, again] = paths(dir.path());
    let low = word(&dir.path().join("low.gguf")).to_owned();
    // High versions of other types unpack to a plain model that is sound.
    succeed(&["pack", &model, "-o", &pack, "--high", "q4_k"]);
    succeed(&["unpack", &pack, "-o", &again]);
    assert!(succeed(&["verify", &again]).out.starts_with("ok: 1 file(s)"));
    assert_eq!(json(&["inspect", "--json", &again])["layers"][0]["expert_types"]["down"], "q4_K");
    succeed(&["pack", &model, "-o", &low, "--low", "q4_0", "--only-low"]);
    assert!(fs::metadata(&low).unwrap().len() < fs::metadata(&model).unwrap().len() / 2);
    refused(1, &["unpack", &low, "-o", &again, "--force"], "--low");
}

/// Under any of its names, whatever is forced: exit status 2, before anything is read.
#[test]
fn no_output_is_an_input() {
    let dir = tempfile::tempdir().unwrap();
    let [model, pack, _] = paths(dir.path());
    let split = dir.path().join("split.gguf");
    let shards = synth::write(&split, &Spec { shards: 2, ..small_spec() }).unwrap().files;
    let [first, second] = [0, 1].map(|i| word(&shards[i]));
    let [hard, notes] = ["hard", "notes"].map(|name| word(&dir.path().join(name)).to_owned());
    fs::hard_link(&model, &hard).unwrap();
    fs::write(&notes, "precious").unwrap();
    succeed(&["pack", &model, "-o", &pack]);
    let files = [&model, &pack, first, second, &notes];
    let before = files.map(|path| fs::read(path).unwrap());
    let cases: [(&[&str], &str); 8] = [
        (&["pack", &model, "-o", &model, "--force"], "the file of the model"),
        (&["pack", &model, "-o", &hard, "--force"], "the file of the model"),
        (&["pack", first, "-o", second, "--force"], "the file of the model"),
        (&["pack", &model, "-o", &pack, "--force", "--imatrix", &pack], "the file of --imatrix"),
        (&["pack", &model, "-o", &notes, "--force"], "is no GGUF"),
        (&["unpack", &pack, "-o", &pack, "--force"], "the file of the pack"),
        (&["unpack", &pack, "-o", &notes, "--force"], "is no GGUF"),
        (&["synth", &notes, "--force"], "is no GGUF"),
    ];
    for (args, part) in cases {
        refused(2, args, part);
    }
    assert!(before == files.map(|path| fs::read(path).unwrap()));
    // All shards are checked, not only the name that was given.
    refused(1, &["synth", word(&split), "--split", "2"], "split-00001-of-00002.gguf: this file exists already");
}
