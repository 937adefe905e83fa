//! The user's files: no run overwrites its inputs, and no model is mixed with another that has taken its name.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use hobbit::engine::quantise_low;
use hobbit::options::{DeviceChoice, LowSource};
use hobbit::{DeviceOptions, Model, ModelOptions};
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::store::IoMode;
use hobbit_synth::Spec;

use crate::fixture::cli::{CLI, PERPLEXITY, Ran, program, ran};
use crate::fixture::{self, one_thread};

fn spec(seed: u64) -> Spec {
    Spec { embd: 64, ff: 64, heads: 2, layers: 3, seed, ..Spec::tiny("qwen3moe") }
}

/// A model in a directory of its own below `dir`.
fn model(dir: &Path, name: &str, spec: &Spec) -> PathBuf {
    let dir = dir.join(name);
    fs::create_dir(&dir).unwrap();
    fixture::write(&dir, spec)
}

/// A program on `args` in `dir`.
fn run(path: &str, dir: &Path, args: &[&str]) -> Ran {
    ran(program(path).current_dir(dir).args(args).output().unwrap())
}

/// Program, its usual flags, the model, the flag of an output, its file, and the flag of the input that it is.
type Case<'a> = (&'a str, &'a [&'a str], &'a str, &'a str, &'a str, &'a str);

#[test]
fn outputs_over_inputs_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let shards = model(dir.path(), "split", &Spec { shards: 2, ..spec(1) });
    let second = shards.with_file_name("qwen3moe-00002-of-00002.gguf");
    let path = model(dir.path(), "whole", &spec(1));
    symlink(&path, at("symbolic")).unwrap();
    fs::hard_link(&path, at("hard")).unwrap();
    fs::write(at("text.txt"), "In the beginning God created the heaven and the earth. ".repeat(40)).unwrap();
    fs::write(at("grammar"), "root ::= [a-z]+\n").unwrap();
    let before = [&path, &second, &at("text.txt"), &at("grammar")].map(|path| fs::read(path).unwrap());
    let (whole, split) = (path.to_str().unwrap(), shards.to_str().unwrap());
    let cli = ["-p", "a", "-n", "1", "-t", "1", "-c", "64"];
    let perplexity = ["-f", "text.txt", "-c", "64", "--chunks", "1", "-t", "1"];
    let cases: [Case; 11] = [
        (CLI, &cli, whole, "--trace", whole, "-m"),
        (CLI, &cli, whole, "--log-file", "symbolic", "-m"),
        (CLI, &cli, whole, "--cache-state", "hard", "-m"),
        (CLI, &cli, split, "--trace", second.to_str().unwrap(), "-m"),
        (CLI, &["-f", "text.txt", "-n", "1", "-t", "1"], whole, "--log-file", "text.txt", "-f"),
        (CLI, &["-p", "a", "--grammar-file", "grammar"], whole, "--log-file", "grammar", "--grammar-file"),
        (CLI, &["-p", "a", "--low", split], whole, "--trace", second.to_str().unwrap(), "--low"),
        (PERPLEXITY, &perplexity, whole, "--json", whole, "-m"),
        (PERPLEXITY, &perplexity, whole, "--kl-divergence-base", "symbolic", "-m"),
        (PERPLEXITY, &perplexity, whole, "--json", "text.txt", "-f"),
        (PERPLEXITY, &perplexity, whole, "--kl-divergence-base", "text.txt", "-f"),
    ];
    for (program, usual, model, flag, file, reads) in cases {
        let args = [usual, &["-m", model, flag, file]].concat();
        let ran = run(program, dir.path(), &args).expect(2);
        let ran = ran.says(&[flag, file, &format!("the file of {reads}"), "would be destroyed"]);
        assert_eq!(ran.stderr.lines().count(), 1, "nothing was loaded: {}", ran.stderr);
    }
    assert!(before == [&path, &second, &at("text.txt"), &at("grammar")].map(|path| fs::read(path).unwrap()));
}

#[test]
fn only_files_of_the_same_kind_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let path = model(dir.path(), "a", &spec(1));
    let other = model(dir.path(), "b", &spec(2));
    fs::write(at("notes"), "precious").unwrap();
    let usual = ["-p", "a", "-n", "1", "-t", "1", "-c", "64", "-no-cnv", "-m", path.to_str().unwrap()];
    let other = other.to_str().unwrap();
    for (flag, file, kind) in [
        ("--trace", "notes", "no trace"),
        ("--stats-json", "notes", "no JSON"),
        ("--log-file", other, "no text"),
        ("--stats-json", other, "no JSON"),
    ] {
        run(CLI, dir.path(), &[&usual[..], &[flag, file]].concat()).expect(2).says(&[flag, file, kind]);
    }
    let twice = run(CLI, dir.path(), &[&usual[..], &["--trace", "x", "--log-file", "./x"]].concat()).expect(2);
    twice.says(&["the file of --trace too"]);
    run(CLI, dir.path(), &["--list-devices", "--stats-json", "notes"]).expect(2).says(&["no JSON"]);
    assert_eq!(fs::read(at("notes")).unwrap(), b"precious");
    assert!(!at("x").exists());

    // Twice the same: the second run replaces what the first has written.
    let all = ["--trace", "run.trace", "--stats-json", "stats.json", "--log-file", "run.log", "--cache-state", "state"];
    for _ in 0..2 {
        run(CLI, dir.path(), &[&usual[..], &all].concat()).expect(0);
    }
    assert!(at("run.trace").exists() && at("state").exists());
}

/// The library has the same rule as the programs.
#[test]
fn a_trace_over_the_model_is_refused_before_it_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), "a", &spec(1));
    let before = fs::read(&path).unwrap();
    let options = ModelOptions { trace: Some(path.clone()), ..options(IoMode::Auto) };
    let mut loads = false;
    let error = Model::open_with(&path, &options, |_| {
        loads = true;
        true
    });
    let error = error.err().unwrap().to_string();
    assert!(error.starts_with("trace ") && error.contains("would be destroyed") && !loads, "{error}");
    assert!(fs::read(&path).unwrap() == before);
}

fn options(io: IoMode) -> ModelOptions {
    ModelOptions {
        budget: Budget::Bytes(4 << 30),
        expert_cache: ExpertCache::Percent(25.0),
        io,
        device: DeviceOptions { devices: DeviceChoice::None, ..DeviceOptions::default() },
        ..ModelOptions::default()
    }
}

fn logits(model: &Model) -> anyhow::Result<Vec<f32>> {
    let mut session = model.session(&one_thread(64))?;
    let mut all = Vec::new();
    for token in 10..20 {
        session.feed(&[token])?;
        all.extend_from_slice(session.logits(0).unwrap());
    }
    Ok(all)
}

/// `cp -p from to`: the same inode, length and time of the last write as before. File systems count time in ticks:
/// repeat until the time of the last change, which programs cannot set, is another.
fn copy_with_time(from: &Path, to: &Path) {
    let before = fs::metadata(to).unwrap();
    assert_eq!(fs::metadata(from).unwrap().len(), before.len());
    let changed = |found: &fs::Metadata| (found.ctime(), found.ctime_nsec());
    while changed(&fs::metadata(to).unwrap()) == changed(&before) {
        fs::write(to, fs::read(from).unwrap()).unwrap();
        fs::File::options().write(true).open(to).unwrap().set_modified(before.modified().unwrap()).unwrap();
    }
    let now = fs::metadata(to).unwrap();
    assert_eq!(
        (now.ino(), now.len(), now.modified().unwrap()),
        (before.ino(), before.len(), before.modified().unwrap())
    );
}

#[test]
fn low_versions_of_another_model_are_refused() {
    fixture::quiet_llama_cpp();
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (model(dir.path(), "a", &spec(1)), model(dir.path(), "b", &spec(2)));
    let own = fs::read(&path).unwrap();
    let low = quantise_low(&path, "q4_0", None, &mut |_| true).unwrap();
    let with_low = ModelOptions { low: Some(LowSource::File(low.clone())), ..options(IoMode::Auto) };
    let open = || Model::open(&path, &with_low).map(drop).map_err(|error| error.to_string());
    let is_refused = || {
        let error = open().unwrap_err();
        let names = [low.to_str().unwrap(), path.to_str().unwrap(), "another model", "its weights differ"];
        assert!(names.iter().all(|part| error.contains(part)), "{error}");
    };
    open().unwrap();
    assert!(!makes_low(&path), "it is there already");

    copy_with_time(&other, &path);
    is_refused();
    // The same weights under another name are the same model.
    let moved = dir.path().join("moved.gguf");
    fs::write(&moved, &own).unwrap();
    Model::open(&moved, &with_low).unwrap();

    // A pack without fingerprint is of no model.
    let mut old = fs::read(&low).unwrap();
    let key = b"hobbit.source.fingerprint";
    let at = old.windows(key.len()).position(|window| window == key).expect("the pack has a fingerprint");
    old[at + key.len() - 1] = b'_';
    fs::write(&low, &old).unwrap();
    fs::write(&path, &own).unwrap();
    let error = open().unwrap_err();
    assert!(error.contains("the pack has no fingerprint of its model"), "{error}");

    // A pack of hobbit's own is made again, whatever the model's age: without a fingerprint, and for another model.
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    fs::File::options().write(true).open(&path).unwrap().set_modified(long_ago).unwrap();
    assert!(makes_low(&path) && !makes_low(&path));
    copy_with_time(&other, &path);
    is_refused();
    assert!(makes_low(&path) && !makes_low(&path));
    open().unwrap();
}

/// Whether there was something to make.
fn makes_low(path: &Path) -> bool {
    let mut has_begun = false;
    let mut progress = |_| {
        has_begun = true;
        true
    };
    quantise_low(path, "q4_0", None, &mut progress).unwrap();
    has_begun
}

#[test]
fn a_model_replaced_while_open_is_still_read() {
    fixture::quiet_llama_cpp();
    for io in [IoMode::Buffered, IoMode::Direct] {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (model(dir.path(), "a", &spec(1)), model(dir.path(), "b", &spec(2)));
        let expected = logits(&Model::open(&path, &options(io)).unwrap()).unwrap();
        let opened = Model::open(&path, &options(io)).unwrap();
        fs::rename(&other, &path).unwrap();
        assert!(logits(&opened).unwrap() == expected, "{io}");
        assert!(logits(&Model::open(&path, &options(io)).unwrap()).unwrap() != expected, "{io}");
    }
}

#[test]
fn a_model_changed_while_open_is_an_error() {
    fixture::quiet_llama_cpp();
    let names = |error: anyhow::Error, path: &Path| {
        let error = error.to_string();
        let parts = [path.to_str().unwrap(), "replaced or written to after it was opened", "start again"];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    for io in [IoMode::Buffered, IoMode::Direct] {
        let dir = tempfile::tempdir().unwrap();
        let split = |seed| Spec { shards: 2, ..spec(seed) };
        let (path, other) = (model(dir.path(), "a", &split(1)), model(dir.path(), "b", &split(2)));
        let second = |path: &Path| path.with_file_name("qwen3moe-00002-of-00002.gguf");
        let opened = Model::open(&path, &options(io)).unwrap();
        copy_with_time(&second(&other), &second(&path));
        names(logits(&opened).unwrap_err(), &second(&path));

        // During a run the time of the write is checked.
        let opened = Model::open(&path, &options(io)).unwrap();
        let mut session = opened.session(&one_thread(64)).unwrap();
        session.feed(&[10]).unwrap();
        fs::hard_link(&path, dir.path().join("a second name")).unwrap();
        session.feed(&[11]).unwrap();
        let written = || fs::metadata(second(&path)).unwrap().modified().unwrap();
        let (before, bytes) = (written(), fs::read(second(&path)).unwrap());
        while written() == before {
            fs::write(second(&path), &bytes).unwrap();
        }
        names(session.feed(&[12]).unwrap_err().into(), &second(&path));
    }
}

#[test]
fn a_line_is_noted_once_with_a_count() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notes");
    let open = || fs::OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path).unwrap();
    for line in ["a: no disk", "a: no disk (large)", "a: no disk", "b: no network", "a: no disk"] {
        crate::fixture::not_run::add(open(), line).unwrap();
    }
    let notes = fs::read_to_string(&path).unwrap();
    assert_eq!(notes, "a: no disk (large)\nb: no network\na: no disk (3 times)\n");
}
