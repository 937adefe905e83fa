//! Answers and refusals before a model runs, and programs whose reader closes the pipe.

use std::io::pipe;

use serde_json::Value;

use crate::fixture::bundled;
use crate::fixture::cli::*;

#[test]
fn help_version_and_scripts_are_printed() {
    let help = cli(&["--help"]).run().expect(0).stdout;
    for part in ["-m, --model", "-no-cnv", "--mem-budget", "LLAMA_ARG_MODEL", "Memory and I/O", "Devices:", "Examples:"]
    {
        assert!(help.contains(part), "{part} is missing in:\n{help}");
    }
    let research = help.find("Routing that knows").unwrap().max(help.find("Papers as published").unwrap());
    assert!(help.find("Model:") < help.find("Sampling:") && help.find("Output:").unwrap() < research, "{help}");
    let brief = cli(&["-h"]).run().expect(0).stdout;
    let n_flags = brief.lines().filter(|line| line.starts_with("  -") || line.starts_with("      --")).count();
    assert!((20..=28).contains(&n_flags) && !brief.contains("\u{1b}"), "{n_flags} flags: {brief}");
    for part in ["-m, --model", "-hf", "--mem-budget", "Examples:", "hobbit-cli --help lists every flag"] {
        assert!(brief.contains(part), "{part} is missing in:\n{brief}");
    }
    assert!(!brief.contains("--virtual-experts") && !brief.contains("LLAMA_ARG_MODEL"), "{brief}");
    let version = concat!("hobbit-cli ", env!("HOBBIT_VERSION"), "\n");
    assert_eq!(cli(&["--version"]).run().expect(0).stdout, version);
    for (args, part) in [
        (&["--completions", "bash"][..], "complete -F _hobbit__cli"),
        (&["--completion-bash"], "complete -F _hobbit__cli"),
        (&["--man"], ".TH hobbit-cli 1"),
    ] {
        let ran = cli(args).run().expect(0);
        assert!(ran.stdout.contains(part) && ran.stderr.is_empty(), "{args:?}: {}", ran.stderr);
    }
}

#[test]
fn mistakes_are_named_before_a_model_loads() {
    // Bound and closed: no other process gets this port meanwhile.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let gone = format!("127.0.0.1:{port}");
    let usage: &[(&[&str], i32, &str)] = &[
        (&["-frob"], 2, "unknown flag '-frob'"),
        (&["-n", "many"], 2, "invalid value 'many' for '--predict <N>': expected a whole number"),
        (&["-n", "5000000000000000000000"], 2, ": this number is too large"),
        (&["-n1", "-p"], 2, "unknown flag '-n1'; write '-n 1'"),
        (&["fine.gguf"], 2, "'fine.gguf' is no flag; to run this model, give -m fine.gguf"),
        (&["--mmproj-url", "x"], 2, "'--mmproj-url' is a flag of llama.cpp or ik_llama.cpp that hobbit does not have"),
        (&["-ser", "6,1"], 2, "--drop leaves out missing experts"),
        (&["-np", "2"], 2, "unknown flag '-np'; hobbit-server has it"),
        (&["--host", "x"], 2, "unknown flag '--host'; hobbit-server has it"),
        (&["--mmproj", "none.gguf", "-p", "x"], 1, "error: none.gguf: this projector cannot be used"),
        (&["--man", "-n", "1"], 2, "--man"),
        (&["--completions", "csh"], 2, "csh"),
        (&["-m", "nowhere.gguf", "-p", "x"], 1, "error: nowhere.gguf: "),
        (&["-f", "none.txt"], 1, "error: none.txt: cannot read this file"),
        (&["-p", "x", "-j", "{not json"], 1, "error: --json-schema: "),
        (&["-p", "x", "--stats-json", "absent/x.json"], 1, "error: --stats-json absent/x.json: cannot write this file"),
        (&["-p", "x", "--cache-state", "absent/x"], 1, "error: --cache-state absent/x: cannot write this file"),
        (&["-p", "x", "--trace", "absent/x"], 1, "error: --trace absent/x: cannot write this file"),
        (&["-p", "x", "--prompt-cache", "absent/x"], 1, "error: --prompt-cache absent/x: cannot write this file"),
        (&["-p", "x", "-dev", "Warp9"], 1, "error: there is no device named 'Warp9' (there "),
        (&["-p", "x", "-dev", "CPU"], 1, "error: 'CPU' is the CPU, "),
    ];
    check_refusals(|args| demo(args).run(), usage);
    if cfg!(feature = "rpc") {
        let unreachable = format!("error: cannot connect to the RPC server {gone}: ");
        let rpc: &[(&[&str], i32, &str)] = &[
            (&["--rpc", &gone, "--list-devices"], 1, &unreachable),
            (&["--rpc", &gone, "-p", "x"], 1, &unreachable),
            (&["--rpc", "nowhere", "--list-devices"], 1, "'nowhere' is no RPC endpoint"),
        ];
        check_refusals(|args| demo(args).run(), rpc);
    }
    let ran = demo(&["-p", "x", "-n", "1", "-dev", "none", "-ngl", "99", "-rtr", "-fmoe", "-mla", "3", "-amb", "512"]);
    let hints = ["-ngl", "-rtr", "-fmoe", "-mla", "-amb"].map(|flag| format!("note: {flag} has no effect: "));
    ran.run().expect(0).says(&hints.each_ref().map(String::as_str));
    // No tip is better than an unrelated flag.
    let far = cli(&["--sleep-or-path"]).run().expect(2).stderr;
    assert!(far.contains("'--sleep-or-path'") && !far.contains("tip:"), "{far}");
    assert!(cli(&["--predicd", "1"]).run().expect(2).stderr.contains("'--predict'"));
    let mut lost = cli(&[]);
    lost.command.env("HOBBIT_DEMO_MODEL", "absent.gguf");
    assert!(lost.run().expect(1).stderr.contains("absent.gguf: the demo model that HOBBIT_DEMO_MODEL names"));
}

#[test]
fn devices_are_listed_without_a_model() {
    let text = cli(&["-m", "nowhere.gguf", "--list-devices"]).run().expect(0);
    let (headline, devices) = text.stdout.split_once('\n').unwrap();
    assert_eq!((headline, text.stderr.as_str()), ("Available devices:", ""));
    let json = cli(&["--list-devices", "--stats-json", "-"]).run().expect(0).stdout;
    let json: Value = serde_json::from_str(&json).unwrap();
    let found = json["devices"].as_array().unwrap();
    assert!(!found.is_empty() || devices == "  (none)\n", "{devices}");
    for device in found {
        let (name, description) = (device["name"].as_str().unwrap(), device["description"].as_str().unwrap());
        assert!(devices.contains(&format!("  {name}: {description} (")), "{devices}");
        assert!(name != "CPU" && name != "HOBBIT", "{json}");
    }
}

/// Runs a program whose stdout is closed, as in `hobbit-sim show trace | head`.
fn run_unread(path: &str, args: &[&str]) {
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    let ran = ran(program(path).args(args).stdout(writer).output().unwrap()).expect(0);
    let stderr = ran.stderr.to_lowercase();
    assert!(!stderr.contains("pipe") && !stderr.contains("panicked"), "{path} {args:?}: {stderr}");
}

#[test]
fn a_closed_pipe_ends_every_program_without_a_message() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("run.trace").display().to_string();
    ran(program(CLI).args(["-p", "a", "-n", "24", "-t", "1", "--trace", &trace]).output().unwrap()).expect(0);
    for args in [&["show", &trace][..], &["show", "--header", &trace], &["replay", &trace], &["recall", &trace]] {
        run_unread(SIM, args);
    }
    let prose = bundled("demo-heldout-prose.txt").display().to_string();
    run_unread(PERPLEXITY, &["-f", &prose, "-c", "64", "-b", "64", "--chunks", "2", "-t", "1"]);
    run_unread(CLI, &["-p", "In the beginning", "-n", "4", "-t", "1"]);
    for format in ["md", "csv", "json", "jsonl"] {
        run_unread(BENCH, &["-t", "1", "-r", "1", "-p", "4", "-n", "0", "--no-roofline", "-o", format]);
    }
    for path in [CLI, BENCH, PERPLEXITY, SIM] {
        run_unread(path, &["--help"]);
    }
}

/// Debian's own cargo is the first mistake that a newcomer can make. The script is for Unix.
#[cfg(unix)]
#[test]
fn an_old_cargo_is_refused_with_the_remedy() {
    use std::fs;
    use std::path::Path;

    let dir = tempfile::tempdir().unwrap();
    let setup = |version: &str| {
        let cargo = dir.path().join("cargo");
        fs::write(&cargo, format!("#!/bin/sh\necho 'cargo {version} (abc 2022)'\n")).unwrap();
        fs::set_permissions(&cargo, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        // Nothing else is there: it ends before it would install anything.
        let path = std::env::join_paths([dir.path(), Path::new("/none")]).unwrap();
        let mut command = std::process::Command::new("/bin/sh");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("setup.sh");
        let words = format!("sed() {{ /bin/sed \"$@\"; }}; uname() {{ echo Other; }}; . {}", script.display());
        let output = command.args(["-c", &words]).env("PATH", path).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for old in ["1.63.0", "1.87.0"] {
        let (status, told) = setup(old);
        assert!(status == Some(1) && told.contains(&format!("cargo {old} (abc 2022) is too old")), "{told}");
        assert!(told.contains("rustup"), "{told}");
    }
    let (_, told) = setup("1.95.0");
    assert!(!told.contains("too old") && told.contains("git cmake make g++ clang"), "{told}");
}

#[test]
fn wrong_overrides_are_named_as_such() {
    let file = bundled("demo.gguf");
    for (flags, parts) in [
        (["-ot", "[=CPU"], ["regular expression", "--override-tensor takes PATTERN=BUFFER"]),
        (
            ["--override-kv", "llama.expert_used_count=int:99"],
            ["another value of llama.expert_used_count", "--override-kv"],
        ),
        // llama.cpp would ignore it.
        (["--override-kv", "llama.context_length=str:abc"], ["its type is int, not str", "--override-kv"]),
        (["--override-kv", "llama.rope.freq_base=int:1000"], ["its type is float, not int", "--override-kv"]),
    ] {
        let ran =
            cli(&["-m", file.to_str().unwrap(), flags[0], flags[1], "-p", "x", "-n", "1", "-t", "1"]).run().expect(1);
        assert!(parts.iter().all(|part| ran.stderr.contains(part)), "{flags:?}: {}", ran.stderr);
        assert!(!ran.stderr.contains("fetch or convert"), "{}", ran.stderr);
    }
}
