//! `--mirror`: experts read from copies of the model's files, and the same results whatever happens to these.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use hobbit::stats::CopyReport;
use hobbit::{BatchToken, Model, ModelOptions, Session, Token};
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::store::IoMode;
use hobbit_synth::Spec;

use crate::fixture::cli::{cli, demo, demo_model};
use crate::fixture::{self, no_reads_ahead, notices_about, one_thread, quiet_llama_cpp};

fn spec() -> Spec {
    Spec { embd: 256, ff: 512, heads: 2, experts: 8, layers: 3, ..Spec::tiny("qwen3moe") }
}

fn options(io: IoMode, mirrors: &[PathBuf]) -> ModelOptions {
    ModelOptions { io, mirrors: mirrors.to_vec(), ..no_reads_ahead(25.0, PolicyKind::Lru) }
}

/// Evaluates tokens one by one from `position` on; all logits of the last one.
fn evaluate(session: &mut Session, position: i32) -> Vec<f32> {
    for position in position..position + 24 {
        let token = (position * 37 % 500) as Token;
        session.evaluate(&[BatchToken { token, position, sequence: 0, logits: true }]).unwrap();
    }
    session.logits(0).unwrap().to_vec()
}

/// The logits of two halves of a text, with `between` called between them, and the copies that were read.
fn run(path: &Path, options: &ModelOptions, between: impl FnOnce()) -> ([Vec<f32>; 2], Vec<CopyReport>) {
    let model = Model::open(path, options).unwrap();
    let mut session = model.session(&one_thread(256)).unwrap();
    let first = evaluate(&mut session, 0);
    between();
    let second = evaluate(&mut session, 24);
    ([first, second], session.stats().copies)
}

/// Writes the first `len` bytes of a file to another directory.
fn copy(file: &Path, len: usize, dir: &Path) -> PathBuf {
    fs::create_dir_all(dir).unwrap();
    let path = dir.join(file.file_name().unwrap());
    fs::write(&path, &fs::read(file).unwrap()[..len]).unwrap();
    path
}

#[test]
fn whole_and_partial_mirrors_are_read_and_change_no_logit() {
    quiet_llama_cpp();
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &spec());
    let len = fs::metadata(&path).unwrap().len() as usize;
    let whole = copy(&path, len, &dir.path().join("whole"));
    let two_thirds = copy(&path, len * 2 / 3, &dir.path().join("part"));
    fixture::reads_directly("mirrors", &path);
    let (expected, copies) = run(&path, &options(IoMode::Buffered, &[]), || ());
    assert!(copies.is_empty());
    for io in [IoMode::Buffered, IoMode::Direct] {
        let directory = whole.parent().unwrap().to_owned();
        for mirrors in [vec![whole.clone()], vec![two_thirds.clone()], vec![two_thirds.clone(), directory]] {
            let (found, copies) = run(&path, &options(io, &mirrors), || ());
            assert!(found == expected, "{io}, {mirrors:?}");
            assert_eq!(copies.len(), 1 + mirrors.len());
            assert!(copies.iter().all(|copy| copy.reads > 0 && copy.left_out.is_none()), "{copies:#?}");
        }
    }
    assert_eq!(notices_about(dir.path().to_str().unwrap()), [""; 0]);
}

/// The engine reads the model's file instead of a mirror that was cut or rewritten, and prints one line. A slow answer
/// on a busy machine can keep it from reading the mirror again, so the test repeats the run.
#[test]
fn mirrors_that_change_while_they_are_read_change_no_logit() {
    quiet_llama_cpp();
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &spec());
    let len = fs::metadata(&path).unwrap().len() as usize;
    let (expected, _) = run(&path, &options(IoMode::Buffered, &[]), || ());
    for io in [IoMode::Buffered, IoMode::Direct] {
        for (name, reason) in [("cut", "cut while in use"), ("rewritten", "was replaced or written to")] {
            let run_changed = |attempt: u32| {
                let mirror = copy(&path, len, &dir.path().join(format!("{io} {name} {attempt}")));
                let change = || match name {
                    "cut" => File::options().write(true).open(&mirror).unwrap().set_len(len as u64 / 3).unwrap(),
                    _ => fs::write(&mirror, vec![0xDD; len + 1]).unwrap(),
                };
                let (found, copies) = run(&path, &options(io, std::slice::from_ref(&mirror)), change);
                assert!(found == expected, "{io}, {name}");
                let notices = notices_about(mirror.to_str().unwrap());
                (!notices.is_empty()).then_some((notices, copies))
            };
            let asked_again = (0..10).find_map(run_changed);
            let (notices, copies) =
                asked_again.unwrap_or_else(|| panic!("{io}, {name}: the mirror is not asked again"));
            assert_eq!(notices.len(), 1, "{notices:?}");
            assert!(notices[0].contains("this mirror is not read any more"), "{notices:?}");
            let left_out = copies[1].left_out.as_ref().unwrap();
            assert!(left_out.contains(reason) || left_out.contains("file shrank"), "{io}, {name}: {left_out}");
            assert!(copies[1].reads > 0 && copies[1].reads < copies[0].reads, "{copies:#?}");
        }
    }
}

/// Mirrors that cannot be used are named with the reason, and the run goes on.
#[test]
fn other_files_are_no_mirrors() {
    quiet_llama_cpp();
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &spec());
    let whole = fs::read(&path).unwrap();
    let (expected, _) = run(&path, &options(IoMode::Buffered, &[]), || ());
    let place = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let changed = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let (looped, empty) = (dir.path().join("looped"), dir.path().join("directory"));
    #[cfg(unix)]
    std::os::unix::fs::symlink(&looped, &looped).unwrap();
    fs::create_dir(&empty).unwrap();
    let absent = format!("cannot read this file: {}", fixture::no_such_file());
    let mut others = vec![
        (place("header", &changed(100)), "this file differs from"),
        (place("weights", &changed(whole.len() - 1)), "this file differs from"),
        (place("longer", &[&whole[..], &[0; 32]].concat()), "this file is longer than"),
        (place("empty", &[]), "this file is empty"),
        (dir.path().join("absent"), absent.as_str()),
        (empty, "no file of the model's names is in this directory"),
        (place("named", &whole).with_file_name(path.file_name().unwrap()), "this file is the model's own"),
    ];
    if cfg!(unix) {
        others.push((looped, "cannot read this file: Too many levels of symbolic links"));
    }
    for (mirror, reason) in others {
        let (found, copies) = run(&path, &options(IoMode::Buffered, std::slice::from_ref(&mirror)), || ());
        assert!(found == expected && copies.is_empty(), "{mirror:?}");
        let notices = notices_about(&format!("{}: ", mirror.display()));
        assert_eq!(notices.len(), 1, "{mirror:?}: {notices:?}");
        assert!(notices[0].contains(reason) && notices[0].ends_with("is not used as a mirror\n"), "{notices:?}");
    }
}

#[test]
fn shards_are_found_by_name() {
    quiet_llama_cpp();
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec { shards: 3, ..spec() };
    let path = fixture::write(dir.path(), &spec);
    let (expected, _) = run(&path, &options(IoMode::Buffered, &[]), || ());
    let shards: Vec<PathBuf> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let mirror = dir.path().join("mirror");
    for shard in shards.iter().filter(|shard| !shard.to_str().unwrap().contains("00002-of")) {
        copy(shard, fs::metadata(shard).unwrap().len() as usize, &mirror);
    }
    let (found, copies) = run(&path, &options(IoMode::Direct, &[mirror]), || ());
    assert!(found == expected);
    assert!(copies[1].bytes < copies[0].bytes && copies[1].reads > 0, "{copies:#?}");
}

#[test]
fn programs_report_mirrors_and_name_those_without_use() {
    let len = fs::metadata(demo_model()).unwrap().len() as usize;
    let mirror = |cli: &crate::fixture::cli::Cli| copy(&demo_model(), len / 2, cli.dir.path());
    let flags = ["-p", "In the beginning", "-n", "8", "--temp", "0", "--expert-cache", "25%", "--stats-json", "s.json"];
    let plain = demo(&flags).run().expect(0);
    let run = demo(&[&flags[..], &["--io", "direct", "--mirror", "demo.gguf"]].concat());
    mirror(&run);
    let (ran, stats) = run.json("s.json");
    assert_eq!(ran.stdout, plain.stdout);
    assert!(ran.stderr.contains("; mirror demo.gguf (6.00 MiB, 50 % of the model, "), "{}", ran.stderr);
    assert!(ran.stderr.contains(" of the bytes read came from mirrors"), "{}", ran.stderr);
    let copies = &stats["copies"];
    assert_eq!((&copies[1]["path"], &copies[1]["left_out"]), (&"demo.gguf".into(), &serde_json::Value::Null));
    let shares = [0, 1].map(|copy| copies[copy]["share"].as_f64().unwrap());
    assert!(shares[1] > 0.0 && (shares[0] + shares[1] - 1.0).abs() < 1e-9, "{copies:#}");
    // Everything fits.
    let fits = demo(&["-p", "a", "-n", "1", "--mirror", "demo.gguf"]).run().expect(0);
    let why = "--mirror has no effect: no expert is missing, because the whole model fits";
    assert!(fits.stderr.contains(why), "{}", fits.stderr);
    // The page cache holds the rest.
    let cached = demo(&["-p", "a", "-n", "1", "--expert-cache", "25%", "--mirror", "demo.gguf"]).run().expect(0);
    assert!(cached.stderr.contains("mirrors are not needed"), "{}", cached.stderr);
    let dir = tempfile::tempdir().unwrap();
    let tiny = Spec::tiny("deepseek");
    let dense = fixture::write(dir.path(), &Spec { dense_lead: Some(tiny.layers), ..tiny });
    let dense = cli(&["-m", dense.to_str().unwrap(), "-p", "a", "-n", "1", "--mirror", "x"]).run().expect(0);
    assert!(dense.stderr.contains("--mirror has no effect: this model has no experts"), "{}", dense.stderr);
    // No output destroys a mirror.
    let run = demo(&["-p", "a", "--mirror", "demo.gguf", "--trace", "demo.gguf"]);
    mirror(&run);
    run.run().expect(2).says(&["--trace demo.gguf: this is the file of --mirror"]);
}
