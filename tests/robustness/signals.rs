//! The real binary is told by signals to make do with less memory.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use gguf_tools::synth::Spec;

use super::fixture;

#[test]
fn caches_follow_signals() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture::write(dir.path(), &Spec { experts: 32, ff: 512, ..Spec::tiny("qwen3moe") });
    let mut child = Command::new(env!("CARGO_BIN_EXE_hobbit-cli"))
        .arg("-m")
        .arg(&model)
        .args(["-p", "x", "-n", "-1", "--ignore-eos", "-t", "1", "-c", "512", "--context-shift", "-no-cnv"])
        .args(["--expert-cache", "100%", "--simple-io"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    // A token: it generates now.
    stdout.read_exact(&mut [0; 8]).unwrap();
    let drain = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let send = |signal| {
        // SAFETY: a child of ours that has not been waited for.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
    };
    let mut answer = || {
        let line = lines.by_ref().map(Result::unwrap).find(|line| line.contains("the expert cache now has"));
        let line = line.expect("it ends by a signal of ours only");
        let numbers: Vec<u64> =
            line.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
        assert_eq!(numbers.len(), 2, "{line}");
        (numbers[0], numbers[1])
    };
    send(libc::SIGUSR1);
    let (half, all) = answer();
    send(libc::SIGUSR1);
    let (quarter, before) = answer();
    send(libc::SIGUSR2);
    let (restored, _) = answer();
    assert!(all > 40, "{all} MiB");
    assert_eq!((half, before, restored), (all / 2, half, all));
    assert!((all / 4 - 1..=all / 4).contains(&quarter), "{quarter} of {all} MiB");
    child.kill().unwrap();
    child.wait().unwrap();
    drain.join().unwrap().unwrap();
}
