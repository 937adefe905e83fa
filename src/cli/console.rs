//! The user's side: generated text out, typed lines in.

use std::io::{self, BufRead, IsTerminal, Write};

use anstyle::{AnsiColor, Style};
use rustyline::error::ReadlineError;

use super::lines::Joiner;

/// Whose words are printed; they differ in colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Voice {
    Model,
    Prompt,
    User,
}

/// Standard output, flushed at every piece.
pub struct Screen {
    colour: bool,
    voice: Voice,
    /// What the cursor's line shows.
    line: String,
}

impl Screen {
    pub fn new(colour: bool) -> Self {
        Self { colour, voice: Voice::Model, line: String::new() }
    }

    /// # Errors
    /// A closed pipe, a full disk.
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

    /// Ends the line if it is not empty, and any colour.
    pub fn end_line(&mut self) -> io::Result<()> {
        if !self.line.is_empty() {
            self.print(Voice::Model, "\n")?;
        }
        self.speak_as(Voice::Model)
    }

    /// The user pressed Return.
    fn line_was_ended(&mut self) {
        self.line.clear();
    }

    pub fn speak_as(&mut self, voice: Voice) -> io::Result<()> {
        if !self.colour || voice == self.voice {
            return Ok(());
        }
        self.voice = voice;
        // llama.cpp's colours (`common/console.cpp`).
        let style = match voice {
            Voice::Model => Style::new(),
            Voice::Prompt => Style::new().fg_color(Some(AnsiColor::Yellow.into())),
            Voice::User => Style::new().bold().fg_color(Some(AnsiColor::Green.into())),
        };
        let mut out = io::stdout().lock();
        write!(out, "{:#}{style}", Style::new().bold())?;
        out.flush()
    }
}

/// What came of asking the user.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Text(String),
    /// No more input.
    End,
    /// Ctrl-C.
    Interrupted,
}

/// Typed lines: edited on a terminal, plain otherwise.
pub struct Keyboard {
    editor: Option<rustyline::DefaultEditor>,
    multiline: bool,
    prompts: bool,
}

impl Keyboard {
    /// `simple` never edits.
    pub fn new(simple: bool, multiline: bool) -> Self {
        let terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
        let editor = if simple || !terminal { None } else { rustyline::DefaultEditor::new().ok() };
        Self { editor, multiline, prompts: io::stdin().is_terminal() }
    }

    /// Asks for an input of one or more lines. `prompt` shows only where somebody types.
    ///
    /// # Errors
    /// Input that cannot be read.
    pub fn ask(&mut self, prompt: &str, screen: &mut Screen) -> io::Result<Answer> {
        let mut joiner = Joiner::new(self.multiline);
        let mut prompt = prompt;
        loop {
            match self.line(prompt, screen)? {
                Answer::Text(line) => {
                    if let Some(text) = joiner.push(&line) {
                        if let Some(editor) = &mut self.editor {
                            let _ = editor.add_history_entry(&text);
                        }
                        return Ok(Answer::Text(text));
                    }
                }
                Answer::End => return Ok(joiner.finish().map_or(Answer::End, Answer::Text)),
                Answer::Interrupted => return Ok(Answer::Interrupted),
            }
            prompt = "";
        }
    }

    fn line(&mut self, prompt: &str, screen: &mut Screen) -> io::Result<Answer> {
        if let Some(editor) = &mut self.editor {
            // The editor draws the whole line: what stands there already is part of its prompt.
            let answer = match editor.readline(&format!("{}{prompt}", screen.line)) {
                Ok(line) => Answer::Text(line),
                Err(ReadlineError::Eof) => Answer::End,
                Err(ReadlineError::Interrupted) => Answer::Interrupted,
                Err(ReadlineError::Io(error)) => return Err(error),
                Err(error) => return Err(io::Error::other(error)),
            };
            screen.line_was_ended();
            return Ok(answer);
        }
        if self.prompts {
            screen.print(Voice::User, prompt)?;
        }
        let mut bytes = Vec::new();
        if io::stdin().lock().read_until(b'\n', &mut bytes)? == 0 {
            return Ok(Answer::End);
        }
        if self.prompts {
            screen.line_was_ended();
        }
        let text = String::from_utf8_lossy(&bytes);
        Ok(Answer::Text(text.trim_end_matches('\n').trim_end_matches('\r').to_owned()))
    }
}
