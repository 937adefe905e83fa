//! A terminal, with its line editor.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Stdio};

use nix::pty::openpty;
use nix::sys::termios::{LocalFlags, tcgetattr};

use super::rig::*;

/// The program at the other end of a terminal.
struct Terminal {
    child: Child,
    keys: File,
    seen: String,
    _dir: tempfile::TempDir,
}

impl Terminal {
    fn start(mut cli: Cli) -> Self {
        let pair = openpty(None, None).unwrap();
        let end = || Stdio::from(pair.slave.try_clone().unwrap());
        cli.command.env("TERM", "xterm").stdin(end()).stdout(end()).stderr(end());
        let child = cli.command.spawn().unwrap();
        Self { child, keys: File::from(pair.master), seen: String::new(), _dir: cli.dir }
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

    /// Its status at the end, and whether the terminal shows what is typed again.
    fn end(mut self) -> (Option<i32>, bool) {
        let mut bytes = [0; 4096];
        // The terminal of a program that has ended cannot be read.
        while self.keys.read(&mut bytes).is_ok_and(|n| n > 0) {}
        let code = self.child.wait().unwrap().code();
        let flags = tcgetattr(&self.keys).unwrap().local_flags;
        (code, flags.contains(LocalFlags::ECHO | LocalFlags::ICANON))
    }
}

/// The editor writes this when it begins to read keys: bracketed paste.
const EDITS: &str = "\x1b[?2004h";
const TALK: [&str; 8] = ["-cnv", "--chat-template", "chatml", "-n", "4", "--color", "off", "--quiet"];

#[test]
fn ctrl_c_clears_a_line_and_ends_on_an_empty_one() {
    let mut terminal = Terminal::start(demo(&TALK));
    terminal.wait_for("> ");
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
    let mut terminal = Terminal::start(demo(&TALK));
    terminal.wait_for("> ");
    terminal.type_in("half");
    terminal.wait_for("half");
    send(&terminal.child, "TERM");
    assert_eq!(terminal.end(), (Some(143), true));
}
