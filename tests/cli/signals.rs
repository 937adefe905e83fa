//! Signals, and other ends from outside.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command};

use crate::fixture::cli::*;

/// Generates without end: context shift, no EOS.
const ENDLESS: [&str; 6] = ["-p", "In the beginning", "-n", "-1", "--ignore-eos", "--context-shift"];

/// Starts such a run; returns when it has begun.
fn endless(mut cli: Cli) -> (Child, tempfile::TempDir, std::thread::JoinHandle<u64>) {
    use std::os::unix::process::CommandExt;
    // The caller may ignore hang-ups (nohup), which a child inherits.
    // SAFETY: setting a disposition is safe between fork and exec.
    unsafe {
        cli.command.pre_exec(|| {
            libc::signal(libc::SIGHUP, libc::SIG_DFL);
            Ok(())
        });
    }
    let (mut child, dir) = cli.spawn();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 32]).unwrap();
    let reader = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()).unwrap());
    (child, dir, reader)
}

/// The status, and all of stderr.
fn end_of(mut child: Child) -> (Option<i32>, String) {
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (child.wait().unwrap().code(), stderr)
}

#[test]
fn signals_end_a_completion_in_order() {
    for (signal, status) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let files = ["--stats-json", "stats.json", "--cache-state", "a.state", "--trace", "a.trace"];
        let (child, dir, reader) = endless(demo(&[&ENDLESS[..], &files, &["--expert-cache", "50%"]].concat()));
        send(&child, signal);
        let (code, stderr) = end_of(child);
        reader.join().unwrap();
        assert!(code == Some(status) && stderr.contains("hobbit: decode: "), "{signal}: {code:?} {stderr}");
        assert_eq!(json(&dir.path().join("stats.json"))["stop"], "interrupted", "{signal}");
        assert!(std::fs::metadata(dir.path().join("a.state")).unwrap().len() > 0, "{signal}");
        ran(program(SIM).arg("show").arg(dir.path().join("a.trace")).output().unwrap()).expect(0);
    }
}

/// The main thread is blocked in a write and cannot poll for signals.
#[test]
#[cfg(target_os = "linux")]
fn a_signal_ends_a_program_that_hangs() {
    use std::os::fd::AsRawFd;
    let (stdout, mut full) = std::io::pipe().unwrap();
    let descriptor = full.as_raw_fd();
    let set_flags = |flags: libc::c_int| {
        // SAFETY: the pipe is open; the call changes whether writes block, for this process and the child alike.
        assert_eq!(unsafe { libc::fcntl(descriptor, libc::F_SETFL, flags) }, 0);
    };
    set_flags(libc::O_NONBLOCK);
    while full.write(&[0]).is_ok() {}
    set_flags(0);
    let mut cli = demo(&ENDLESS);
    cli.command.stdout(full).stderr(std::process::Stdio::piped());
    let mut child = cli.command.spawn().unwrap();
    // After the start-up lines come prompt and text, which find no room.
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.starts_with("hobbit: memory: ")));
    send(&child, "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
    drop(stdout);
}

/// As nohup does.
#[test]
fn an_ignored_hang_up_stays_ignored() {
    let model = demo_model();
    let usual = ["-t", "1", "-c", "256", "--stats-json", "stats.json", "-m", model.to_str().unwrap()];
    let cli = in_own_dir(program_after("trap '' HUP", CLI), &[&ENDLESS[..], &usual].concat());
    let (child, dir, reader) = endless(cli);
    send(&child, "HUP");
    send(&child, "INT");
    let (code, stderr) = end_of(child);
    reader.join().unwrap();
    // Had the first one ended it, the second would have ended it at once: without statistics.
    assert_eq!((code, &json(&dir.path().join("stats.json"))["stop"]), (Some(130), &"interrupted".into()), "{stderr}");
}

#[test]
fn a_signal_is_handled_while_a_line_is_awaited() {
    let args = ["-cnv", "--chat-template", "chatml", "-n", "4", "--stats-json", "stats.json"];
    let once = demo(&[&args[..], &["-st", "-p", "hello", "--no-display-prompt"]].concat()).run().expect(0).stdout;
    for (signal, status) in [("INT", 130), ("TERM", 143)] {
        let mut talk = demo(&args);
        talk.command.stdin(std::process::Stdio::piped());
        let (mut child, dir) = talk.spawn();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(b"hello\n").unwrap();
        // The answer, and the empty line behind it.
        let mut answer = vec![0; once.len() + 1];
        child.stdout.as_mut().unwrap().read_exact(&mut answer).unwrap();
        assert_eq!(answer, (once.clone() + "\n").as_bytes());
        send(&child, signal);
        let (code, stderr) = end_of(child);
        assert_eq!(code, Some(status), "{stderr}");
        let stats = json(&dir.path().join("stats.json"));
        assert!(stats["prompt"]["tokens"].as_u64().is_some_and(|n| n > 0), "{stderr}");
    }
}

/// A signal before the model is opened: the process waits for its prompt.
#[test]
fn memory_signals_wait_for_the_model() {
    let cli = demo(&["-f", "prompt", "-n", "2", "-no-cnv", "--expert-cache", "100%"]);
    let prompt = cli.dir.path().join("prompt");
    assert!(Command::new("mkfifo").arg(&prompt).status().unwrap().success());
    let (child, _dir) = cli.spawn();
    // Opened once the child opens it, too.
    let mut text = std::fs::File::options().write(true).open(prompt).unwrap();
    send(&child, "USR1");
    text.write_all(b"In the beginning").unwrap();
    drop(text);
    let (status, stderr) = end_of(child);
    assert!(status == Some(0) && stderr.contains("the expert cache now has"), "{status:?} {stderr}");
}

#[test]
fn a_cut_mapped_model_is_named() {
    let cli = cli(&[&ENDLESS[..], &["-t", "1", "-c", "256", "-no-cnv", "--no-repack", "-m", "model.gguf"]].concat());
    let model = cli.dir.path().join("model.gguf");
    std::fs::copy(demo_model(), &model).unwrap();
    let (child, _dir, reader) = endless(cli);
    std::fs::File::options().write(true).open(&model).unwrap().set_len(4096).unwrap();
    let (status, stderr) = end_of(child);
    reader.join().unwrap();
    assert_eq!(status, Some(1), "{stderr}");
    // Either an evaluation touches a lost page, or the check behind it finds the file too short: one message for both.
    let last = stderr.lines().last().unwrap_or_default();
    for part in ["error: ", "model.gguf: a part of this file cannot be read any more", "put it back and start again"] {
        assert!(last.contains(part), "{stderr}");
    }
}
