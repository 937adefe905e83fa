//! Files that are written whole or not at all.

use std::path::Path;

use anyhow::{Context, Result};

use hobbit::files;

/// Writes a file whole or not at all.
///
/// # Errors
/// What the system says, with the file's name.
pub fn write_whole(path: &Path, text: &str) -> Result<()> {
    files::replace(path, text.as_bytes()).with_context(|| format!("{}: cannot write this file", path.display()))
}
