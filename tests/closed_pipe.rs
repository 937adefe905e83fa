//! Programs whose reader closes the pipe, as in `hobbit-sim show trace | head`: status 0 and no message.

use std::io::pipe;
use std::path::Path;
use std::process::Stdio;

use crate::cli::rig::program;

const CLI: &str = env!("CARGO_BIN_EXE_hobbit-cli");
const BENCH: &str = env!("CARGO_BIN_EXE_hobbit-bench");
const PERPLEXITY: &str = env!("CARGO_BIN_EXE_hobbit-perplexity");
const SIM: &str = env!("CARGO_BIN_EXE_hobbit-sim");

/// Runs a program whose stdout is closed.
fn unread(path: &str, args: &[&str]) {
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    let output = program(path).args(args).stdout(writer).stderr(Stdio::piped()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).to_lowercase();
    assert_eq!(output.status.code(), Some(0), "{path} {args:?}: {stderr}");
    assert!(!stderr.contains("pipe") && !stderr.contains("panicked"), "{path} {args:?}: {stderr}");
}

#[test]
fn every_program_ends_in_silence() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("run.trace").display().to_string();
    let made =
        program(CLI).args(["-p", "In the beginning", "-n", "24", "-t", "1", "--trace", &trace]).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    for args in [&["show", &trace][..], &["show", "--header", &trace], &["replay", &trace], &["recall", &trace]] {
        unread(SIM, args);
    }
    let prose = root.join("models/demo-heldout-prose.txt").display().to_string();
    unread(PERPLEXITY, &["-f", &prose, "-c", "64", "-b", "64", "--chunks", "2", "-t", "1"]);
    unread(CLI, &["-p", "In the beginning", "-n", "4", "-t", "1"]);
    let small = ["-t", "1", "-r", "1", "-p", "4", "-n", "0", "--no-roofline", "-o"];
    for format in ["md", "csv", "json", "jsonl", "sql"] {
        unread(BENCH, &[&small[..], &[format]].concat());
    }
    for path in [CLI, BENCH, PERPLEXITY, SIM] {
        unread(path, &["--help"]);
        unread(path, &["--version"]);
    }
    unread(CLI, &["--list-devices"]);
}
