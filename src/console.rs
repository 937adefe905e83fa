//! The console: prints generated text and reads typed lines.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
#[cfg(unix)]
use std::sync::{Mutex, PoisonError};

use anstyle::{AnsiColor, Style};
use crossbeam_channel::{Receiver, Sender};
#[cfg(unix)]
use nix::sys::termios::{self, SetArg, Termios};
use rustyline::error::ReadlineError;
use rustyline::{
    Cmd, ConditionalEventHandler, Config, Event, EventContext, EventHandler, KeyEvent, Movement, RepeatCount,
};

use super::commands::Joiner;
use super::ctrl_c::CtrlC;

/// The source of printed text; each has its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Voice {
    Model,
    /// The model's reasoning, before it answers.
    Reasoning,
    Prompt,
    User,
}

/// Standard output, flushed after every piece.
pub struct Screen {
    colour: bool,
    voice: Voice,
    /// Text on the cursor's line.
    line: String,
}

impl Screen {
    pub fn new(colour: bool) -> Self {
        Self { colour, voice: Voice::Model, line: String::new() }
    }

    pub fn print(&mut self, voice: Voice, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.speak_as(voice)?;
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()?;
        match text.rsplit_once('\n') {
            Some((_, line)) => self.line = line.to_owned(),
            None => self.line.push_str(text),
        }
        Ok(())
    }

    /// Whether the cursor is behind text on its line.
    pub fn is_mid_line(&self) -> bool {
        !self.line.is_empty()
    }

    /// Ends the line unless it is empty, and resets the colour.
    pub fn end_line(&mut self) -> io::Result<()> {
        if !self.line.is_empty() {
            self.print(Voice::Model, "\n")?;
        }
        self.speak_as(Voice::Model)
    }

    pub fn speak_as(&mut self, voice: Voice) -> io::Result<()> {
        if !self.colour || voice == self.voice {
            return Ok(());
        }
        self.voice = voice;
        // llama.cpp's colours (`common/console.cpp`).
        let style = match voice {
            Voice::Model => Style::new(),
            Voice::Reasoning => Style::new().fg_color(Some(AnsiColor::BrightBlack.into())),
            Voice::Prompt => Style::new().fg_color(Some(AnsiColor::Yellow.into())),
            Voice::User => Style::new().bold().fg_color(Some(AnsiColor::Green.into())),
        };
        let mut out = io::stdout().lock();
        write!(out, "{:#}{style}", Style::new().bold())?;
        out.flush()
    }
}

/// The outcome of asking the user.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Text(String),
    /// No more input.
    End,
    /// Ctrl-C with nothing typed, or another signal that ends the program.
    Interrupted,
}

/// A request to the reader thread.
enum Request {
    /// Read a line. The editor shows the prompt.
    Line(String),
    /// Add this input to the editor's history.
    Remember(String),
}

/// Typed lines: edited on a terminal, plain otherwise. They are read on a separate thread, so that signals are
/// handled while the user types nothing.
pub struct Keyboard {
    /// Created at the first request: a program that never asks needs no thread.
    reader: Option<Reader>,
    requests: Sender<Request>,
    lines: Receiver<io::Result<Answer>>,
    /// Whether a requested line is still outstanding, because a signal arrived instead.
    is_awaited: bool,
    edits: bool,
    multiline: bool,
    prompts: bool,
}

impl Keyboard {
    /// `simple` disables editing; `history` is the file that keeps what is typed.
    pub fn new(simple: bool, multiline: bool, history: Option<PathBuf>) -> Self {
        let terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
        let editor = if simple || !terminal { None } else { editor(history.as_deref()) };
        let edits = editor.is_some();
        if edits {
            remember_terminal();
        }
        let (requests, wanted) = crossbeam_channel::unbounded();
        let (send, lines) = crossbeam_channel::unbounded();
        let reader = Some(Reader { editor, history, requests: wanted, lines: send });
        Self { reader, requests, lines, is_awaited: false, edits, multiline, prompts: io::stdin().is_terminal() }
    }

    /// Asks for an input of one or more lines. `prompt` is shown only if a user types.
    pub fn ask(&mut self, prompt: &str, screen: &mut Screen, ctrl_c: &CtrlC) -> io::Result<Answer> {
        let mut joiner = Joiner::new(self.multiline);
        let mut shown = prompt;
        // A plain terminal does not report a partly typed line: the first Ctrl-C may have been meant to clear it.
        let mut was_warned = self.edits || !self.prompts;
        loop {
            match self.line(shown, screen, ctrl_c)? {
                Answer::Text(line) => {
                    if let Some(text) = joiner.push(&line) {
                        let _ = self.requests.send(Request::Remember(text.clone()));
                        return Ok(Answer::Text(text));
                    }
                    shown = "";
                }
                Answer::End => return Ok(joiner.finish().map_or(Answer::End, Answer::Text)),
                Answer::Interrupted if ctrl_c.is_ending() => return Ok(Answer::Interrupted),
                // Drop the lines before this one.
                Answer::Interrupted if joiner.has_text() => {
                    joiner = Joiner::new(self.multiline);
                    shown = prompt;
                }
                Answer::Interrupted if !was_warned => {
                    was_warned = true;
                    screen.print(Voice::Model, "\n")?;
                    let _ = writeln!(io::stderr(), "(Ctrl-C once more ends)");
                    shown = prompt;
                }
                Answer::Interrupted => return Ok(Answer::Interrupted),
            }
        }
    }

    fn line(&mut self, prompt: &str, screen: &mut Screen, ctrl_c: &CtrlC) -> io::Result<Answer> {
        // The editor redraws the whole line: text that is already there is part of its prompt.
        let drawn = format!("{}{prompt}", screen.line);
        if self.prompts && !self.edits {
            screen.print(Voice::User, prompt)?;
        }
        if let Some(reader) = self.reader.take() {
            std::thread::Builder::new().name("keyboard".to_owned()).spawn(move || reader.run())?;
        }
        if !self.is_awaited {
            let _ = self.requests.send(Request::Line(drawn));
        }
        let line = ctrl_c.while_asking(|signals| {
            crossbeam_channel::select! {
                recv(self.lines) -> line => Some(line.unwrap_or(Ok(Answer::End))),
                recv(signals) -> _ => None,
            }
        });
        self.is_awaited = line.is_none();
        if ctrl_c.is_ending() && self.prompts {
            restore_terminal();
            // Return was not pressed, so end the line; the terminal may be gone.
            let _ = screen.print(Voice::Model, "\n");
        } else if self.prompts {
            // Return was pressed.
            screen.line.clear();
        }
        match line.unwrap_or(Ok(Answer::Interrupted)) {
            // The terminal is gone.
            #[cfg(unix)]
            Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(Answer::End),
            answer => answer,
        }
    }
}

type Editor = rustyline::Editor<(), rustyline::history::DefaultHistory>;

/// Messages that the history keeps.
const HISTORY_MAX: usize = 1000;

/// The file of the history: `hobbit/history` in the user's state directory.
pub fn history(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = path("XDG_STATE_HOME")
        .or_else(|| path("LOCALAPPDATA").filter(|_| cfg!(windows)))
        .or_else(|| Some(path("HOME")?.join(".local/state")))?;
    Some(state.join("hobbit").join("history"))
}

fn editor(history: Option<&Path>) -> Option<Editor> {
    let config = Config::builder().history_ignore_space(true).max_history_size(HISTORY_MAX).ok()?;
    let mut editor = Editor::with_config(config.build()).ok()?;
    // Others must not read it. Without a history the program works as well.
    if let Some((path, directory)) = history.and_then(|path| Some((path, path.parent()?))) {
        let mut builder = DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        let _ = builder.recursive(true).create(directory);
        let _ = editor.load_history(path);
    }
    editor.bind_sequence(KeyEvent::ctrl('C'), EventHandler::Conditional(Box::new(ClearLine)));
    Some(editor)
}

/// Ctrl-C on a line with text empties it.
struct ClearLine;

impl ConditionalEventHandler for ClearLine {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, line: &EventContext) -> Option<Cmd> {
        Some(if line.line().is_empty() { Cmd::Interrupt } else { Cmd::Kill(Movement::WholeBuffer) })
    }
}

/// Handles of the reader thread.
struct Reader {
    editor: Option<Editor>,
    history: Option<PathBuf>,
    requests: Receiver<Request>,
    lines: Sender<io::Result<Answer>>,
}

impl Reader {
    fn run(mut self) {
        for request in &self.requests {
            let line = match (request, &mut self.editor) {
                (Request::Line(prompt), Some(editor)) => edited_line(editor, &prompt),
                (Request::Line(_), None) => plain_line(),
                (Request::Remember(text), Some(editor)) => {
                    let _ = editor.add_history_entry(&text);
                    if let Some(path) = &self.history {
                        let _ = editor.append_history(path);
                    }
                    continue;
                }
                (Request::Remember(_), None) => continue,
            };
            if self.lines.send(line).is_err() {
                return;
            }
        }
    }
}

fn edited_line(editor: &mut Editor, prompt: &str) -> io::Result<Answer> {
    match editor.readline(prompt) {
        Ok(line) => Ok(Answer::Text(line)),
        Err(ReadlineError::Eof) => Ok(Answer::End),
        Err(ReadlineError::Interrupted | ReadlineError::Signal(_)) => Ok(Answer::Interrupted),
        Err(ReadlineError::Io(error)) => Err(error),
        Err(error) => Err(io::Error::other(error)),
    }
}

fn plain_line() -> io::Result<Answer> {
    let mut bytes = Vec::new();
    if io::stdin().lock().read_until(b'\n', &mut bytes)? == 0 {
        return Ok(Answer::End);
    }
    let text = String::from_utf8_lossy(&bytes);
    Ok(Answer::Text(text.trim_end_matches('\n').trim_end_matches('\r').to_owned()))
}

/// The terminal's settings before a line editor changed them. Windows's console gets its own back by the editor.
#[cfg(unix)]
static SETTINGS: Mutex<Option<Termios>> = Mutex::new(None);

/// Saves the settings for [`restore_terminal`].
fn remember_terminal() {
    #[cfg(unix)]
    {
        *SETTINGS.lock().unwrap_or_else(PoisonError::into_inner) = termios::tcgetattr(io::stdin()).ok();
    }
}

/// Restores the settings that a waiting editor has changed, before the program ends.
pub fn restore_terminal() {
    #[cfg(unix)]
    if let Some(settings) = &*SETTINGS.lock().unwrap_or_else(PoisonError::into_inner) {
        let _ = termios::tcsetattr(io::stdin(), SetArg::TCSANOW, settings);
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn the_history_is_in_the_users_state_directory() {
        let of = |set: &'static [(&str, &str)]| {
            history(|name| set.iter().find(|(own, _)| *own == name).map(|(_, value)| value.into()))
        };
        assert_eq!(of(&[("HOME", "/h")]), Some("/h/.local/state/hobbit/history".into()));
        assert_eq!(of(&[("HOME", "/h"), ("XDG_STATE_HOME", "/s")]), Some("/s/hobbit/history".into()));
        assert_eq!(of(&[("HOME", "/h"), ("XDG_STATE_HOME", "")]), Some("/h/.local/state/hobbit/history".into()));
        assert_eq!(of(&[]), None);
    }
}
