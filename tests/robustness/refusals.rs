//! Memory and address space that the system refuses, and signals to take less of it. Limits of a process and signals
//! are Unix's.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use hobbit_synth::Spec;

use crate::fixture::{self, cli};

/// Slots are whole pages, so that many small slices take several times the memory that they take in the file: loading
/// fits below the limit, the cache does not.
#[test]
fn an_expert_cache_that_the_system_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec { embd: 32, ff: 32, heads: 1, experts: 512, layers: 40, ..Spec::tiny("llama") };
    let path = fixture::write(dir.path(), &spec);
    let whole = ["--mem-budget", "4G", "--expert-cache", "100%"];
    cli::run(&path, &whole).expect(0);
    let refused = cli::run_within_address_space(450 << 10, &path, &whole);
    refused.is_refused(&["cannot allocate", "expert cache", "--expert-cache"]).unwrap();
}

/// With less and less address space, each refusal ends the process with a message.
#[test]
fn little_address_space() {
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec { layers: 8, experts: 64, ..Spec::tiny("qwen3moe") });
    for mib in (128..=512).step_by(32) {
        let run = cli::run_within_address_space(mib << 10, &path, &[]);
        match run.status {
            Some(0) => {}
            Some(1) => assert!(!run.stderr.trim().is_empty(), "{mib} MiB: no message"),
            code => panic!("{mib} MiB: exit code {code:?}:\n{}", run.stderr),
        }
    }
}

/// `SIGUSR1` halves the expert cache, `SIGUSR2` restores it.
#[test]
fn caches_follow_signals() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture::write(dir.path(), &Spec { experts: 32, ff: 512, ..Spec::tiny("qwen3moe") });
    let mut child = cli::program(cli::CLI)
        .arg("-m")
        .arg(&model)
        .args(["-p", "x", "-n", "-1", "--ignore-eos", "-t", "1", "-c", "512", "--context-shift", "-no-cnv"])
        .args(["--expert-cache", "100%", "--simple-io"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    // A token: it generates now.
    stdout.read_exact(&mut [0; 8]).unwrap();
    let drain = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut answer = || {
        let line = lines.by_ref().map(Result::unwrap).find(|line| line.contains("the expert cache now has"));
        let line = line.expect("only our signals end it");
        let numbers: Vec<u64> =
            line.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
        assert_eq!(numbers.len(), 2, "{line}");
        (numbers[0], numbers[1])
    };
    cli::send(&child, "USR1");
    let (half, all) = answer();
    cli::send(&child, "USR1");
    let (quarter, before) = answer();
    cli::send(&child, "USR2");
    let (restored, _) = answer();
    assert!(all > 40, "{all} MiB");
    assert_eq!((half, before, restored), (all / 2, half, all));
    assert!((all / 4 - 1..=all / 4).contains(&quarter), "{quarter} of {all} MiB");
    child.kill().unwrap();
    child.wait().unwrap();
    drain.join().unwrap().unwrap();
}
