//! Output of programs: lines for people, and files.
//!
//! A rule for all output: a reader that closes the pipe has seen enough. This is no failure and causes no message.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use hobbit_core::files::{self, Kind};

/// Has a console of Windows show UTF-8 and colours. The first action of a program.
pub fn prepare_console() {
    #[cfg(windows)]
    hobbit_core::windows::prepare_console();
}

/// Whether an error comes from a closed pipe: the program then ends silently with status 0.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let written = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        // serde_json hides the system's error.
        let serialised = || cause.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind);
        written.or_else(serialised) == Some(io::ErrorKind::BrokenPipe)
    })
}

/// Prints a line on stdout. `println!` panics if the pipe is closed.
pub fn say(line: impl Display) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}

/// Prints a line on stderr and ignores errors; `eprintln!` would panic.
pub fn tell(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes JSON to a file, whole or not at all, or to stdout for '-'. `what` names the file's purpose in errors.
pub fn write_json(path: &Path, value: &Value, what: &str) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    if path == Path::new("-") {
        let mut out = io::stdout().lock();
        return Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush())?);
    }
    let written = files::overwrite(path, Kind::Json, text.as_bytes());
    written.with_context(|| format!("{}: cannot write the {what}", path.display()))
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
    fn a_closed_pipe_is_known_in_every_wrapping() {
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
