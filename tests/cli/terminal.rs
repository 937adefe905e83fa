//! Conversations at a terminal, which is one of Unix here.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Stdio};

use nix::pty::openpty;
use nix::sys::termios::{LocalFlags, tcgetattr};

use super::conversations::TALK;
use crate::fixture::cli::*;

/// The program at the other end of a terminal.
struct Terminal {
    child: Child,
    keys: File,
    seen: String,
    dir: tempfile::TempDir,
}

impl Terminal {
    /// A conversation that awaits its first line.
    fn start() -> Self {
        Self::start_with(None, &[])
    }

    /// With the user's state in this directory, else in one of its own.
    fn start_with(state: Option<&Path>, flags: &[&str]) -> Self {
        let mut cli = demo(&[&TALK[..], &["--color", "off", "--quiet"], flags].concat());
        cli.command.env("XDG_STATE_HOME", state.unwrap_or(cli.dir.path()));
        let pair = openpty(None, None).unwrap();
        let end = || Stdio::from(pair.slave.try_clone().unwrap());
        cli.command.env("TERM", "xterm").stdin(end()).stdout(end()).stderr(end());
        let child = cli.command.spawn().unwrap();
        let mut terminal = Self { child, keys: File::from(pair.master), seen: String::new(), dir: cli.dir };
        terminal.wait_for("> ");
        terminal
    }

    fn type_in(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until `text` is shown, after the text awaited before.
    fn wait_for(&mut self, text: &str) {
        let mut bytes = [0; 4096];
        while !self.seen.contains(text) {
            let n = self.keys.read(&mut bytes).unwrap_or_else(|_| panic!("it ended without {text:?}: {}", self.seen));
            self.seen += &String::from_utf8_lossy(&bytes[..n]);
        }
        self.seen = self.seen.split_once(text).unwrap().1.to_owned();
    }

    /// Its status at the end, and whether the terminal echoes keys again.
    fn end(mut self) -> (Option<i32>, bool) {
        let mut bytes = [0; 4096];
        // The terminal of a program that has ended cannot be read.
        while self.keys.read(&mut bytes).is_ok_and(|n| n > 0) {}
        let code = self.child.wait().unwrap().code();
        drop(self.dir);
        let flags = tcgetattr(&self.keys).unwrap().local_flags;
        (code, flags.contains(LocalFlags::ECHO | LocalFlags::ICANON))
    }
}

/// The editor writes this when it begins to read keys: bracketed paste.
const EDITS: &str = "\x1b[?2004h";

#[test]
fn ctrl_c_clears_a_line_and_ends_on_an_empty_one() {
    let mut terminal = Terminal::start();
    terminal.type_in("half typed");
    terminal.wait_for("half typed");
    terminal.type_in("\x03/help\r");
    terminal.wait_for("/regen");
    terminal.wait_for("> ");
    // Lines that wait for the rest are dropped as well.
    terminal.type_in("one\\\r");
    terminal.wait_for("one");
    terminal.wait_for(EDITS);
    terminal.type_in("\x03");
    terminal.wait_for("> ");
    terminal.type_in("/help\r");
    terminal.wait_for("/regen");
    terminal.wait_for("> ");
    terminal.type_in("\x03");
    assert_eq!(terminal.end(), (Some(130), true));
}

#[test]
fn sigterm_while_a_line_is_edited_leaves_a_sane_terminal() {
    let mut terminal = Terminal::start();
    terminal.type_in("half");
    terminal.wait_for("half");
    send(&terminal.child, "TERM");
    assert_eq!(terminal.end(), (Some(143), true));
}

#[test]
fn typed_lines_are_kept_and_private() {
    let state = tempfile::tempdir().unwrap();
    let help = |terminal: &mut Terminal, keys: &str| {
        terminal.type_in(keys);
        terminal.wait_for("/regen");
        terminal.wait_for("> ");
    };
    let end = |mut terminal: Terminal| {
        terminal.type_in("\x03");
        assert_eq!(terminal.end(), (Some(130), true));
    };
    let mut first = Terminal::start_with(Some(state.path()), &[]);
    help(&mut first, "/help\r");
    help(&mut first, " /help \r");
    end(first);
    let mut silent = Terminal::start_with(Some(state.path()), &["--no-history"]);
    help(&mut silent, "/help  \r");
    end(silent);

    let file = state.path().join("hobbit/history");
    let kept = std::fs::read_to_string(&file).unwrap();
    assert_eq!(kept.lines().filter(|line| line.contains("help")).collect::<Vec<_>>(), ["/help"], "{kept}");
    for (path, mode) in [(&file, 0o600), (&state.path().join("hobbit"), 0o700)] {
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, mode, "{}", path.display());
    }
    // The arrow up brings it back.
    let mut second = Terminal::start_with(Some(state.path()), &[]);
    help(&mut second, "\x1b[A\r");
    end(second);
}
