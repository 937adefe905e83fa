//! The binaries, with a clean environment.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

pub struct Cli {
    pub dir: tempfile::TempDir,
    pub command: Command,
}

/// A program of hobbit's, independent of the caller's environment and without input.
pub fn program(path: &str) -> Command {
    let mut command = Command::new(path);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("LLAMA_ARG_") || text.starts_with("HOBBIT_") {
            command.env_remove(&name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// hobbit-cli with these arguments.
pub fn cli(args: &[&str]) -> Cli {
    let dir = tempfile::tempdir().unwrap();
    let mut command = program(env!("CARGO_BIN_EXE_hobbit-cli"));
    command.current_dir(dir.path()).args(args);
    Cli { dir, command }
}

/// The same on the demo model: greedy, and on one thread, since tests run side by side.
pub fn demo(args: &[&str]) -> Cli {
    let mut cli = cli(&["--temp", "0", "-t", "1", "-c", "256"]);
    cli.command.arg("-m").arg(demo_model()).args(args);
    cli
}

pub fn demo_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo.gguf")
}

pub struct Ran {
    pub status: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Cli {
    pub fn run(mut self) -> Ran {
        let output = self.command.output().unwrap();
        ran(output)
    }

    pub fn spawn(mut self) -> (Child, tempfile::TempDir) {
        let child = self.command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        (child, self.dir)
    }

    /// With `text` piped in.
    pub fn type_in(mut self, text: impl AsRef<[u8]>) -> Ran {
        self.command.stdin(Stdio::piped());
        let (mut child, _dir) = self.spawn();
        child.stdin.take().unwrap().write_all(text.as_ref()).unwrap();
        ran(child.wait_with_output().unwrap())
    }
}

pub fn ran(output: Output) -> Ran {
    let text = |bytes| String::from_utf8(bytes).expect("everything printed is UTF-8");
    Ran { status: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

impl Ran {
    pub fn expect(self, status: i32) -> Self {
        assert_eq!(self.status, Some(status), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }
}

/// Sends a signal, by its name, to a child that runs.
pub fn send(child: &Child, signal: &str) {
    assert!(Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap().success());
}
