//! Signals, and other ends from outside.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::rig::*;

/// Generates without end: context shift, no EOS. Returns when it has begun.
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
    let mut first = [0u8; 32];
    stdout.read_exact(&mut first).unwrap();
    let reader = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()).unwrap());
    (child, dir, reader)
}

const ENDLESS: [&str; 6] = ["-p", "In the beginning", "-n", "-1", "--ignore-eos", "--context-shift"];

/// The status, and all of stderr.
fn end_of(mut child: Child) -> (Option<i32>, String) {
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (child.wait().unwrap().code(), stderr)
}

fn stats_in(dir: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join("stats.json")).unwrap()).unwrap()
}

#[test]
fn signals_end_a_completion_in_order_and_the_status_tells_which() {
    for (signal, status) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let files = ["--stats-json", "stats.json", "--cache-state", "a.state", "--trace", "a.trace"];
        let (child, dir, reader) = endless(demo(&[&ENDLESS[..], &files, &["--expert-cache", "50%"]].concat()));
        send(&child, signal);
        let (code, stderr) = end_of(child);
        assert_eq!(code, Some(status), "{signal}: {stderr}");
        reader.join().unwrap();
        assert!(stderr.contains("hobbit: decode: "), "{signal}: {stderr}");
        assert_eq!(stats_in(dir.path())["stop"], "interrupted", "{signal}");
        assert!(std::fs::metadata(dir.path().join("a.state")).unwrap().len() > 0, "{signal}");
        let trace = dir.path().join("a.trace");
        let shown = Command::new(env!("CARGO_BIN_EXE_hobbit-sim")).arg("show").arg(&trace).output().unwrap();
        ran(shown).expect(0);
    }
}

/// How many bytes wait in a pipe.
#[cfg(target_os = "linux")]
fn waiting_in(pipe: &impl std::os::fd::AsRawFd) -> libc::c_int {
    let mut n = 0;
    // SAFETY: the pipe is open, and the call writes one number.
    assert_eq!(unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut n) }, 0);
    n
}

/// The main thread is blocked in a write and cannot poll for signals.
#[test]
#[cfg(target_os = "linux")]
fn a_signal_ends_a_program_that_hangs() {
    use std::os::fd::AsRawFd;
    let (mut child, _dir) = demo(&ENDLESS).spawn();
    let stdout = child.stdout.take().unwrap();
    // SAFETY: the pipe is open; the call changes how much it holds.
    assert!(unsafe { libc::fcntl(stdout.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) } > 0);
    // The pipe is not read, so once it is full its length stays constant.
    let mut n_same = 0;
    while n_same < 20 {
        let before = waiting_in(&stdout);
        std::thread::sleep(std::time::Duration::from_millis(10));
        n_same = if before > 3072 && before == waiting_in(&stdout) { n_same + 1 } else { 0 };
    }
    send(&child, "TERM");
    let (code, stderr) = end_of(child);
    assert_eq!(code, Some(143), "{stderr}");
    drop(stdout);
}

/// As nohup does.
#[test]
fn an_ignored_hang_up_stays_ignored() {
    let mut cli = demo(&[]);
    let program = cli.command.get_program().to_owned();
    let args: Vec<_> = cli.command.get_args().map(ToOwned::to_owned).collect();
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(program).args(args).args(ENDLESS);
    command.args(["--stats-json", "stats.json"]).current_dir(cli.dir.path()).stdin(Stdio::null());
    cli.command = command;
    let (child, dir, reader) = endless(cli);
    send(&child, "HUP");
    send(&child, "INT");
    let (code, stderr) = end_of(child);
    reader.join().unwrap();
    // Had the first one ended it, the second would have ended it at once: without statistics.
    assert_eq!((code, &stats_in(dir.path())["stop"]), (Some(130), &"interrupted".into()), "{stderr}");
}

/// It waits for a line that does not come.
#[test]
fn a_signal_is_handled_while_a_line_is_awaited() {
    let args = ["-cnv", "--chat-template", "chatml", "-n", "4", "--stats-json", "stats.json"];
    let once = demo(&[&args[..], &["-st", "-p", "hello", "--no-display-prompt"]].concat()).run().expect(0).stdout;
    for (signal, status) in [("INT", 130), ("TERM", 143)] {
        let mut talk = demo(&args);
        talk.command.stdin(Stdio::piped());
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
        assert!(stats_in(dir.path())["prompt"]["tokens"].as_u64().is_some_and(|n| n > 0), "{stderr}");
    }
}

/// A signal before the model is opened: the process waits for its prompt.
#[test]
fn memory_signals_wait_for_the_model() {
    let mut cli =
        cli(&["-m", demo_model().to_str().unwrap(), "-f", "prompt", "-n", "2", "-t", "1", "-c", "256", "-no-cnv"]);
    let prompt = cli.dir.path().join("prompt");
    assert!(Command::new("mkfifo").arg(&prompt).status().unwrap().success());
    cli.command.args(["--expert-cache", "100%"]);
    let (child, _dir) = cli.spawn();
    // Opened once the child opens it, too.
    let mut text = std::fs::File::options().write(true).open(prompt).unwrap();
    send(&child, "USR1");
    text.write_all(b"In the beginning").unwrap();
    drop(text);
    let (status, stderr) = end_of(child);
    assert_eq!(status, Some(0), "{stderr}");
    assert!(stderr.contains("the expert cache now has"), "{stderr}");
}

#[test]
fn a_mapped_model_that_is_cut_ends_the_run_with_its_name() {
    let cli = cli(&[&ENDLESS[..], &["-t", "1", "-c", "256", "-no-cnv", "--no-repack", "-m", "model.gguf"]].concat());
    let model = cli.dir.path().join("model.gguf");
    std::fs::copy(demo_model(), &model).unwrap();
    let (child, _dir, reader) = endless(cli);
    std::fs::File::options().write(true).open(&model).unwrap().set_len(4096).unwrap();
    let (status, stderr) = end_of(child);
    reader.join().unwrap();
    assert_eq!(status, Some(1), "{stderr}");
    let last = stderr.lines().last().unwrap_or_default();
    // Either an evaluation touches a lost page, or the check behind it finds the file too short: one message for both.
    assert!(last.starts_with("error: "), "{stderr}");
    for part in ["model.gguf: a part of this file cannot be read any more", "put it back and start again"] {
        assert!(last.contains(part), "{stderr}");
    }
}
