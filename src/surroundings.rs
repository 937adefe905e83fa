//! The environment that settings depend on: files, the bundled model, the terminal.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// See the [module](self).
pub trait Surroundings {
    /// The bytes of a file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// The bundled model, or the reason why there is none.
    fn demo_model(&self) -> Result<PathBuf, String>;
    /// A GBNF grammar for a JSON schema.
    fn grammar_of_schema(&self, schema: &str) -> Result<String>;
    /// Whether the output is a terminal that shows colours.
    fn shows_colour(&self) -> bool;
    /// Whether the standard input is a pipe or a file: neither a terminal nor `/dev/null`.
    fn has_input(&self) -> bool {
        false
    }
    /// Whether the standard input is a terminal.
    fn is_typed_in(&self) -> bool {
        false
    }
    /// A variable of the environment.
    fn variable(&self, _name: &str) -> Option<OsString> {
        None
    }
    /// All bytes of the standard input.
    fn input(&self) -> io::Result<Vec<u8>> {
        Ok(Vec::new())
    }
}

/// A file's bytes.
pub fn read(path: &Path, around: &dyn Surroundings) -> Result<Vec<u8>> {
    around.read(path).with_context(|| format!("{}: cannot read this file", path.display()))
}

/// A file's text.
pub fn utf8<'a>(bytes: &'a [u8], path: &Path) -> Result<&'a str> {
    let error = match std::str::from_utf8(bytes) {
        Ok(text) => return Ok(text),
        Err(error) => error,
    };
    bail!("{}: not UTF-8 text (at byte {})", path.display(), error.valid_up_to())
}

/// A text without the byte order mark that some editors put before it.
pub fn unmarked(mut text: Vec<u8>) -> Vec<u8> {
    if text.starts_with("\u{feff}".as_bytes()) {
        text.drain(.."\u{feff}".len());
    }
    text
}

/// The text of a file, without a byte order mark.
pub fn file(path: &Path, around: &dyn Surroundings) -> Result<String> {
    Ok(utf8(&unmarked(read(path, around)?), path)?.to_owned())
}
