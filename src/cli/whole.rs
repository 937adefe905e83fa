//! Files that are written whole or not at all.

use std::path::Path;

use anyhow::{Context, Result};

/// Writes a file whole or not at all.
///
/// # Errors
/// What the system says, with the file's name.
pub fn write_whole(path: &Path, text: &str) -> Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    let partial = Path::new(&name);
    let written = std::fs::write(partial, text).and_then(|()| std::fs::rename(partial, path));
    if written.is_err() {
        let _ = std::fs::remove_file(partial);
    }
    written.with_context(|| format!("{}: cannot write this file", path.display()))
}
