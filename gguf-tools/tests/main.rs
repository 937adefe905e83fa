//! The tools as a user runs them: output, exit status, messages.

#[path = "../../common/src/hub/tests/server.rs"]
#[allow(dead_code, reason = "for the tests of downloads, which share this")]
mod server;

mod tools {
    mod cache;
    mod doctor;
    mod forecast_records;
    mod inspect_verify;
    mod pack;
    mod pack_profile;
    mod plan;
    mod profile;
    mod profile_paths;
}

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use hobbit_core::gguf::HeaderBuilder;
use hobbit_synth::{self as synth, Spec};

/// A finished tool.
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

fn run_command(command: &mut Command) -> Ran {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

fn run(args: &[&str]) -> Ran {
    run_command(Command::new(env!("CARGO_BIN_EXE_gguf-tools")).args(args))
}

fn succeed(args: &[&str]) -> Ran {
    let ran = run(args);
    assert_eq!(ran.code, Some(0), "{args:?}: {}", ran.err);
    ran
}

/// The tool fails with this status and names `part`.
#[track_caller]
fn refused(code: i32, args: &[&str], part: &str) {
    let ran = run(args);
    assert_eq!(ran.code, Some(code), "{args:?}: {}", ran.err);
    assert!(ran.err.contains(part), "{args:?}: '{part}' is not in:\n{}", ran.err);
}

#[track_caller]
fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "'{part}' is not in:\n{text}");
    }
}

fn json(args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&run(args).out).unwrap()
}

fn word(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A file of the repository's models directory.
fn bundled(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models").join(name)
}

/// Writes a model of random weights; its first file.
fn synthesise(path: &Path, spec: &Spec) -> PathBuf {
    synth::write(path, spec).unwrap().files.remove(0)
}

fn small_spec() -> Spec {
    Spec { layers: 3, experts: 4, vocab: 300, heads: 2, ..Spec::tiny("qwen3moe") }
}

/// A model with random weights, and a text for it.
fn random(dir: &Path, spec: &Spec) -> (PathBuf, PathBuf) {
    let text = dir.join("text.txt");
    fs::write(&text, "In the beginning was the word, and nobody read it twice. ".repeat(8)).unwrap();
    (synthesise(&dir.join("random.gguf"), spec), text)
}

/// Writes a file of these tensors, all bytes of the nth being n.
fn numbered(path: &Path, header: HeaderBuilder) {
    let (mut byte, mut file) = (0, fs::File::create(path).unwrap());
    let write = |tensor: &hobbit_core::gguf::TensorInfo, out: &mut dyn std::io::Write| {
        byte += 1;
        out.write_all(&vec![byte; tensor.extent.len as usize])
    };
    header.finish().write(&mut file, write).unwrap();
}
