//! Lines for people: stderr, and the log file if there is one.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::args::Verbosity;
use super::exit::{self, FAILED};
use super::output::tell;
use hobbit::LogLevel;
use hobbit_core::files;

/// The level of a line: the least `--verbosity` that shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Error = 1,
    Warning = 2,
    Info = 3,
    More = 4,
    Debug = 5,
}

/// A cheap handle to the log.
#[derive(Clone, Debug)]
pub struct Log {
    verbosity: Verbosity,
    file: Option<Arc<Mutex<LogFile>>>,
    /// Each line is an object.
    is_json: bool,
}

#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    state: State,
}

#[derive(Debug)]
enum State {
    Open(File),
    /// The reader has closed the pipe.
    Unread,
    /// A line could not be written.
    Failed,
}

impl LogFile {
    /// A failure to write the log does not end the run; it is reported once.
    fn write(&mut self, text: &str) {
        let State::Open(file) = &mut self.state else { return };
        let Err(error) = file.write_all(text.as_bytes()) else { return };
        self.state = match error.kind() {
            ErrorKind::BrokenPipe => State::Unread,
            _ => {
                tell(format_args!("error: {}: this log ends here, it cannot be written: {error}", self.path.display()));
                State::Failed
            }
        };
    }
}

impl Log {
    pub fn new(verbosity: Verbosity, file: Option<&Path>) -> Result<Self> {
        let open = |path: &Path| {
            files::create(path, files::Kind::Log).with_context(|| format!("{}: cannot write this log", path.display()))
        };
        let open = |path: &Path| open(path).map(|file| LogFile { path: path.to_owned(), state: State::Open(file) });
        let file = file.map(open).transpose()?.map(|file| Arc::new(Mutex::new(file)));
        Ok(Self { verbosity, file, is_json: false })
    }

    /// Writes each line as a JSON object.
    pub fn in_json(self, is_json: bool) -> Self {
        Self { is_json, ..self }
    }

    /// Ends the log of a run: writes the run's error to the file, and turns a failed log into a failed run.
    pub fn end(&self, outcome: Result<u8>) -> Result<u8> {
        if let Err(error) = &outcome {
            self.keep(format!("error: {}", exit::in_words(error)));
        }
        let has_failed = self.file.as_ref().is_some_and(|file| matches!(locked(file).state, State::Failed));
        outcome.map(|status| if has_failed && status == 0 { FAILED } else { status })
    }

    /// Whether lines of this level show on stderr.
    pub fn shows(&self, level: Level) -> bool {
        self.verbosity.shown >= level as u8
    }

    /// Whether lines of this level go anywhere: others need not be written.
    pub fn wants(&self, level: Level) -> bool {
        self.shows(level) || self.file.is_some() && self.verbosity.logged >= level as u8
    }

    /// Prints a line.
    pub fn line(&self, level: Level, text: impl std::fmt::Display) {
        if self.wants(level) {
            self.text(level, &format!("{text}\n"));
        }
    }

    /// Prints a record as a line, or as a JSON object with its time and level.
    pub fn record(&self, level: Level, line: impl FnOnce() -> String, value: impl FnOnce() -> Value) {
        if !self.is_json {
            return self.line(level, format!("hobbit: {}", line()));
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut object = json!({"time": since.as_secs_f64(), "level": format!("{level:?}").to_lowercase()});
        if let (Value::Object(object), Value::Object(own)) = (&mut object, value()) {
            object.extend(own);
        }
        self.write(level, &format!("{object}\n"));
    }

    /// Prints text that contains its own line ends.
    pub fn text(&self, level: Level, text: &str) {
        if !self.is_json {
            return self.write(level, text);
        }
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let message = line.strip_prefix("hobbit: ").unwrap_or(line);
            self.record(level, String::new, || json!({ "message": message }));
        }
    }

    fn write(&self, level: Level, text: &str) {
        if self.shows(level) {
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
        if let Some(file) = self.file.as_ref().filter(|_| self.verbosity.logged >= level as u8) {
            locked(file).write(text);
        }
    }

    /// Writes a line to the file only, for text that is printed in another way.
    pub fn keep(&self, text: impl std::fmt::Display) {
        if let Some(file) = &self.file {
            locked(file).write(&format!("{text}\n"));
        }
    }

    /// Receives llama.cpp's log lines. They are many, so they rank below ours.
    pub fn take_llama_cpps(&self) {
        let log = self.clone();
        hobbit::set_log(move |level, text| {
            let level = match level {
                LogLevel::Notice => Level::Warning,
                LogLevel::Debug => Level::Debug,
                _ => Level::More,
            };
            log.text(level, text);
        });
    }
}

fn locked(file: &Mutex<LogFile>) -> std::sync::MutexGuard<'_, LogFile> {
    file.lock().unwrap_or_else(PoisonError::into_inner)
}
