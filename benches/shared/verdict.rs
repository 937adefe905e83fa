//! What benches end with: verdicts for people, raw numbers for a file.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use hobbit_programs::bench::host::Host;
use serde::Serialize;
use serde_json::Value;

/// What was promised and what came.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    pub promise: String,
    pub found: String,
    pub is_kept: bool,
}

/// A line for each.
pub fn print(verdicts: &[Verdict]) {
    println!();
    for verdict in verdicts {
        let word = if verdict.is_kept { "OK    " } else { "MISSED" };
        println!("{word} {}: {}", verdict.promise, verdict.found);
    }
}

/// Writes raw numbers to `path`, or else to a file of that name among this machine's results.
pub fn write(raw: &Value, path: Option<&Path>, host: &Host, name: &str) -> Result<()> {
    let results = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("benches/results").join(&host.machine).join(name);
    let path = path.map_or_else(results, Path::to_owned);
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
    fs::write(&path, serde_json::to_string_pretty(raw)? + "\n").with_context(|| path.display().to_string())?;
    eprintln!("raw numbers: {}", path.display());
    Ok(())
}
