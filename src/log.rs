//! Lines for people: stderr, and the log file if there is one.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};

use super::resolve::Verbosity;
use hobbit::{LogLevel, files};

/// How much a line matters; the number of `--verbosity` from which it shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Error = 1,
    Warning = 2,
    Info = 3,
    More = 4,
    Debug = 5,
}

/// A cheap handle on the log.
#[derive(Clone)]
pub struct Log {
    verbosity: Verbosity,
    file: Option<Arc<Mutex<File>>>,
}

impl Log {
    pub fn new(verbosity: Verbosity, file: Option<&Path>) -> Result<Self> {
        let open = |path: &Path| {
            files::create(path, files::Kind::Log).with_context(|| format!("{}: cannot write this log", path.display()))
        };
        let file = file.map(open).transpose()?.map(|file| Arc::new(Mutex::new(file)));
        Ok(Self { verbosity, file })
    }

    /// Whether lines of this level show on stderr.
    pub fn shows(&self, level: Level) -> bool {
        self.verbosity.shown >= level as u8
    }

    /// Prints a line.
    pub fn line(&self, level: Level, text: impl std::fmt::Display) {
        self.text(level, &format!("{text}\n"));
    }

    /// Prints text that brings its own line ends.
    pub fn text(&self, level: Level, text: &str) {
        // A log that cannot be written must not end the run.
        if self.shows(level) {
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
        if let Some(file) = self.file.as_ref().filter(|_| self.verbosity.logged >= level as u8) {
            let _ = file.lock().unwrap_or_else(PoisonError::into_inner).write_all(text.as_bytes());
        }
    }

    /// Writes a line to the file alone, for what is printed in another way.
    pub fn keep(&self, text: impl std::fmt::Display) {
        if let Some(file) = &self.file {
            let _ = writeln!(file.lock().unwrap_or_else(PoisonError::into_inner), "{text}");
        }
    }

    /// Takes llama.cpp's own lines. They are many, so they rank below ours.
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
