//! Tools whose reader goes away, as in `gguf-tools inspect model.gguf | head`: status 0, and not a word about it.

use std::io::pipe;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs a tool whose stdout, or both streams, nobody reads.
fn unread(args: &[&str]) {
    for both in [false, true] {
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_gguf-tools"));
        command.args(args).stdin(Stdio::null()).stderr(Stdio::piped());
        if both {
            command.stderr(writer.try_clone().unwrap());
        }
        let output = command.stdout(writer).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).to_lowercase();
        assert_eq!(output.status.code(), Some(0), "{args:?}, both: {both}: {stderr}");
        assert!(!stderr.contains("pipe") && !stderr.contains("panicked"), "{args:?}: {stderr}");
    }
}

#[test]
fn every_tool_ends_in_silence() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo.gguf").display().to_string();
    let (model, pack) = (path("model.gguf"), path("model.pack"));
    unread(&["synth", &model, "--force", "--layers", "1", "--experts", "2"]);
    unread(&["pack", &model, "-o", &pack, "--force"]);
    unread(&["unpack", &pack, "-o", &path("plain.gguf"), "--force"]);
    unread(&["widen", &demo, "--ff", "1024", "-o", &path("wide.gguf"), "--force"]);
    for file in [&model, &pack] {
        unread(&["inspect", file]);
        unread(&["inspect", "--json", file]);
        unread(&["verify", file]);
    }
    unread(&["--help"]);
}
