//! `hobbit-prove` as its users meet it: the real binary on the demo model and on records.

#[path = "../../../tests/fixture/not_run.rs"]
mod not_run;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn demo() -> String {
    root().join("models/demo.gguf").display().to_string()
}

/// Of the machine that the documents speak of.
fn measured() -> PathBuf {
    root().join("benches/results/amd-epyc-2c-24gib-virtio/prove")
}

struct Ran {
    status: Option<i32>,
    stdout: String,
    stderr: String,
}

/// Nothing of the caller's environment can change what it does.
fn prove(args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hobbit-prove"));
    for (name, _) in std::env::vars_os() {
        let word = name.to_string_lossy();
        if word.starts_with("LLAMA_ARG_") || word.starts_with("HOBBIT_") {
            command.env_remove(&name);
        }
    }
    let output = command.args(args).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).expect("everything printed is UTF-8");
    Ran { status: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

impl Ran {
    fn expect(self, status: i32) -> Self {
        assert_eq!(self.status, Some(status), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    /// What `-o jsonl` printed.
    fn records(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Who reads and goes away has seen enough.
#[test]
fn a_closed_pipe_is_no_failure() {
    let records = measured().display().to_string();
    for args in [&["report", &records, "--table", "claims"][..], &["machine", "."], &["--help"], &["--version"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_hobbit-prove"));
        let output = command.args(args).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), stderr.as_ref()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn files_that_are_missing_are_told_before_anything_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty.txt").display().to_string();
    fs::write(&empty, "").unwrap();
    let (demo, records) = (demo(), measured().display().to_string());
    for (args, part) in [
        (&["peers", "-m", "none.gguf", "--prompt-file", &empty][..], "none.gguf: cannot open this model"),
        (&["peers", "-m", &demo, "--prompt-file", &empty], "empty.txt: this file is empty"),
        (
            &["report", &records, "--table", "claims", "-o", "/none/page.html"],
            "/none/page.html: cannot write this file",
        ),
    ] {
        let ran = prove(args).expect(1);
        assert!(ran.stderr.contains(part), "{args:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, "", "{args:?}");
    }
}

#[test]
fn the_whole_command_is_timed_from_start_to_end() {
    if !Path::new(env!("CARGO_BIN_EXE_hobbit-prove")).with_file_name("hobbit-cli").is_file() {
        return not_run::not_run("prove: --cli", "no hobbit-cli beside hobbit-prove (cargo build --release makes it)");
    }
    let dir = tempfile::tempdir().unwrap();
    let prompt = dir.path().join("prompt.txt");
    fs::write(&prompt, "In the beginning God created the").unwrap();
    let (demo, prompt) = (demo(), prompt.display().to_string());
    let args = ["peers", "-m", &demo, "--prompt-file", &prompt, "-n", "6", "-t", "1", "-o", "jsonl", "--label", "fits"];
    let more = ["--cli", "--warm", "--flags", "--expert-cache 50%", "--baseline-threads", "1,2", "--repack", "1"];
    let records = prove(&[&args[..], &more].concat()).expect(0).records();
    let number = |record: &Value, key: &str| record[key].as_u64().unwrap();
    for record in &records {
        let parts = number(record, "hobbit_load_ns") + number(record, "avg_ns");
        assert!(number(record, "hobbit_whole_ns") > parts, "{record}");
        assert_eq!((&record["hobbit_warm"], &record["n_gen"]), (&true.into(), &6.into()));
        assert_eq!(record["hobbit_wholes_ns"].as_array().unwrap().len(), 2, "there and back");
        assert!(
            record["hobbit_prompt_ts"].as_f64().unwrap() > 0.0 && record["hobbit_decode_ts"].as_f64().unwrap() > 0.0
        );
    }
    let (ours, stock) = (&records[0], &records[1]);
    assert_eq!((&ours["hobbit_engine"], &stock["hobbit_engine"]), (&"hobbit".into(), &"llama.cpp".into()));
    assert_eq!((&ours["hobbit_flags"], &stock["repack"]), (&"--expert-cache 50%".into(), &true.into()));
    assert!(ours["hobbit_expert_cache"].as_u64().unwrap() < ours["hobbit_expert_bytes"].as_u64().unwrap());
    assert!(ours["hobbit_generated"].as_str().unwrap().trim_start().starts_with("heaven"), "{ours}");
    assert_eq!(stock["hobbit_threads_tried"].as_array().unwrap().len(), 2);
}

/// A program as in `benches/peers`.
fn peer(dir: &Path, name: &str, script: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let dir = dir.join(name);
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("run"), format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(dir.join("run"), fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

#[test]
fn peers_continue_the_same_text() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = dir.path().join("prompt.txt");
    fs::write(&prompt, "In the beginning God created the").unwrap();
    let answer = r#"echo '{"engine":"x","version":"1","load_ns":5,"prompt_tokens":6,"prompt_ns":1000000000,"decode_tokens":3,"decode_ns":1000000000,"text":" heaven and xyz"}'"#;
    let there = [
        peer(dir.path(), "good", &format!("echo noise; [ \"$5\" = --predict ] || exit 3; {answer}")),
        peer(dir.path(), "bad", "echo 'no such model' >&2; exit 4"),
        peer(dir.path(), "silent", "true"),
    ]
    .map(|path| path.display().to_string());
    let (demo, prompt) = (demo(), prompt.display().to_string());
    let mut args = vec!["peers", "-m", &demo, "--prompt-file", &prompt, "-n", "4", "-t", "1", "-o", "jsonl"];
    args.extend(there.iter().map(String::as_str));
    let records = prove(&args).expect(0).records();
    let engines: Vec<&str> = records.iter().map(|record| record["hobbit_engine"].as_str().unwrap()).collect();
    assert_eq!(engines, ["hobbit", "llama.cpp", "good", "bad", "silent"]);
    let (ours, stock, good) = (&records[0], &records[1], &records[2]);
    assert_eq!(ours["hobbit_generated"], stock["hobbit_generated"]);
    assert_eq!((&ours["hobbit_text_equal"], &ours["hobbit_label"]), (&ours["hobbit_text_chars"], &"peers".into()));
    assert_eq!(ours["samples_ns"].as_array().unwrap().len(), 2, "there and back");
    assert_eq!(good["hobbit_decode_ts"], 3.0);
    let equal = good["hobbit_text_equal"].as_u64().unwrap();
    assert!(equal > 0 && equal < good["hobbit_text_chars"].as_u64().unwrap(), "{good}");
    let outcome = |at: usize| records[at]["hobbit_outcome"].as_str().unwrap().to_owned();
    assert!(outcome(3).contains("exit status: 4, no such model"), "{}", outcome(3));
    assert!(outcome(4).contains("printed no JSON"), "{}", outcome(4));

    let ran = prove(&["peers", "-m", &demo, "--prompt-file", &prompt, "nowhere"]).expect(1);
    assert!(ran.stderr.contains("nowhere: no program `run`"), "{}", ran.stderr);
    prove(&["peers", "-m", &demo]).expect(2);
}

/// Each can be set up and run, and is told of.
#[test]
fn adapters_are_complete() {
    use std::os::unix::fs::PermissionsExt;
    let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../peers");
    let readme = fs::read_to_string(peers.join("README.md")).unwrap();
    let dirs = fs::read_dir(&peers).unwrap().map(|entry| entry.unwrap().path());
    let adapters: Vec<PathBuf> = dirs.filter(|dir| dir.join("run").exists()).collect();
    assert!(adapters.len() >= 13, "{adapters:?}");
    for dir in adapters {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        assert!(readme.contains(&format!("| `{name}` |")), "{name} is not in the README");
        for program in ["run", "setup.sh"] {
            let mode = fs::metadata(dir.join(program)).unwrap().permissions().mode();
            assert!(mode & 0o111 == 0o111, "{name}/{program} is no program");
            let text = fs::read_to_string(dir.join(program)).unwrap();
            assert!(
                text.starts_with("#!/usr/bin/env bash\n") && text.contains("set -euo pipefail"),
                "{name}/{program}"
            );
        }
        // What no registry has is built from a directory that a variable names, and the README says which.
        if let Ok(variable) = fs::read_to_string(dir.join("source-directory")) {
            assert!(readme.contains(&format!("{}=", variable.trim())), "{name}: {variable}");
        }
    }
}

#[test]
fn a_program_that_does_not_end_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = dir.path().join("prompt.txt");
    fs::write(&prompt, "In the").unwrap();
    // `read` waits for what never comes; its own child would outlive a shell that is killed alone.
    let stuck = peer(dir.path(), "stuck", "tail -f /dev/null").display().to_string();
    let (demo, prompt) = (demo(), prompt.display().to_string());
    let args =
        ["peers", "-m", &demo, "--prompt-file", &prompt, "-n", "2", "-t", "1", "--timeout", "2", "-o", "jsonl", &stuck];
    let records = prove(&args).expect(0).records();
    assert_eq!(records[2]["hobbit_outcome"], "failed: not ready after 2 s");
}

#[test]
fn reports_are_made_of_records() {
    let dir = tempfile::tempdir().unwrap();
    let (raw, page, readme) =
        (dir.path().join("raw.jsonl"), dir.path().join("page.html"), dir.path().join("readme.md"));
    fs::copy(measured().join("resident.jsonl"), &raw).unwrap();
    fs::write(&readme, "before\n<!-- hobbit-prove resident -->\n<!-- /hobbit-prove resident -->\nafter\n").unwrap();
    let words = [&raw, &page, &readme].map(|path| path.display().to_string());
    let [raw, page, readme] = &words;
    prove(&["report", raw, "--readme", readme, "--check"]).expect(1);
    prove(&["report", raw, "-o", page, "--readme", readme]).expect(0);
    prove(&["report", raw, "--readme", readme, "--check"]).expect(0);
    let filled = fs::read_to_string(readme).unwrap();
    assert!(filled.starts_with("before\n") && filled.ends_with("after\n") && filled.contains("| "), "{filled}");
    let html = fs::read_to_string(page).unwrap();
    assert!(html.contains("<svg") || html.contains("<table"), "{}", html.len());
    assert!(!html.contains("http://") && !html.contains("https://"), "nothing from outside");
    prove(&["report"]).expect(2);
    let ran = prove(&["report", "nowhere.jsonl", "--table", "claims"]).expect(1);
    assert!(ran.stderr.contains("nowhere.jsonl"), "{}", ran.stderr);
}

#[test]
fn the_tables_in_the_documents_are_what_the_records_make_them() {
    let raw = measured();
    for page in [root().join("README.md"), raw.join("README.md")] {
        let (raw, page) = (raw.display().to_string(), page.display().to_string());
        prove(&["report", &raw, "--readme", &page, "--check"]).expect(0);
    }
}
