//! Checks input files before anything is measured or printed: a mistyped name is an error, not a row.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::case::{Case, Source};
use hobbit::options::LowSource;
use hobbit_core::gguf::Gguf;

/// Checks the models of all cases, and the text.
///
/// # Errors
/// Names the file and its fault.
pub fn check(cases: &[Case], source: &Source) -> Result<()> {
    let mut known: Vec<&Path> = Vec::new();
    for case in cases {
        if !known.contains(&&*case.model) {
            model(&case.model)?;
            known.push(&case.model);
        }
        if let Some(LowSource::File(low)) = case.model_options()?.low {
            model(&low).context("--low")?;
        }
    }
    match source {
        Source::Random => Ok(()),
        Source::Text(path) => text(path).context("--prompt-file"),
    }
}

/// Checks a model's header.
fn model(path: &Path) -> Result<()> {
    std::fs::metadata(path).with_context(|| format!("{}: cannot open this model", path.display()))?;
    Gguf::open(path)?;
    Ok(())
}

/// Checks a text.
///
/// # Errors
/// A file that is unreadable, not UTF-8 or empty.
fn text(path: &Path) -> Result<()> {
    let found =
        std::fs::read_to_string(path).with_context(|| format!("{}: cannot read this file as text", path.display()))?;
    ensure!(!found.trim().is_empty(), "{}: this file is empty, expected text", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let words = |result: Result<()>| format!("{:#}", result.unwrap_err());
        let missing = dir.path().join("none.gguf");
        assert!(words(model(&missing)).contains("none.gguf: cannot open this model"));
        assert!(words(model(dir.path())).contains("is a directory"));
        assert!(words(model(&write("words.gguf", b"words"))).contains("words.gguf: not a GGUF file"));
        assert!(words(text(&missing)).contains("none.gguf: cannot read this file as text"));
        assert!(words(text(&write("empty", b" \n"))).contains("empty: this file is empty"));
        assert!(words(text(&write("binary", &[0xff, 0xfe]))).contains("binary: cannot read this file as text"));
        assert!(text(&write("text", b"In the beginning")).is_ok());
    }
}
