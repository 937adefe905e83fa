//! What programs write: lines for people, and files.
//!
//! One rule for all of them: who reads our output and goes away has seen enough. That is no failure, and nothing is said.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use hobbit_core::files::{self, Kind};

/// Whether an error comes from a reader that went away: then a program ends with status 0 and without a word.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let written = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        // serde_json keeps the system's error to itself.
        let serialised = || cause.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind);
        written.or_else(serialised) == Some(io::ErrorKind::BrokenPipe)
    })
}

/// A line on stdout. `println!` panics where the reader went away.
pub fn say(line: impl Display) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}

/// A line on stderr. Whether anybody reads it changes nothing; `eprintln!` would panic.
pub fn tell(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes JSON where a flag says, '-' for stdout: a file whole or not at all. `what` names it where it cannot be written.
pub fn write_json(path: &Path, value: &Value, what: &str) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    if path == Path::new("-") {
        let mut out = io::stdout().lock();
        return Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush())?);
    }
    let written = files::overwrite(path, Kind::Json, text.as_bytes());
    written.with_context(|| format!("{}: cannot write the {what}", path.display()))
}

/// Writes a file whole or not at all.
pub fn write_whole(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    files::replace(path, content.as_ref()).with_context(|| format!("{}: cannot write this file", path.display()))
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_closed_pipe_is_known_whoever_wrote() {
        let written = anyhow::Error::from(Closed.write(b"x").unwrap_err()).context("printing");
        let serialised = anyhow::Error::from(serde_json::to_writer(Closed, &[1, 2]).unwrap_err());
        let buffered = serde_json::to_writer(io::BufWriter::with_capacity(2, Closed), &[1, 2, 3]).unwrap_err();
        for error in [written, serialised, buffered.into()] {
            assert!(is_closed_pipe(&error), "{error:#}");
        }
        for other in [io::Error::from(io::ErrorKind::StorageFull).into(), anyhow!("broken pipe")] {
            assert!(!is_closed_pipe(&other), "{other:#}");
        }
    }
}
