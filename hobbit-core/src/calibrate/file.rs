//! The cache file: JSON, one entry per machine, newest first.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use etcetera::base_strategy::{BaseStrategy, choose_native_strategy};
use serde::{Deserialize, Serialize};

use super::Calibration;
use crate::files;

/// What `format` says.
const FORMAT: &str = "hobbit-calibration";
/// Counts up when a reader of the last version would misunderstand.
const VERSION: u64 = 1;
/// A file that is longer is not ours.
const BYTES_MAX: u64 = 256 << 10;
/// Machines that are remembered: every device of a computer, and what its home directory is shared with.
const ENTRIES_MAX: usize = 32;

#[derive(Serialize, Deserialize)]
struct Contents {
    format: String,
    version: u64,
    calibrations: Vec<Calibration>,
}

/// `hobbit/calibration.json` in the user's cache directory: `$XDG_CACHE_HOME` or `~/.cache`, on macOS
/// `~/Library/Caches`, on Windows `%LOCALAPPDATA%`. `None` where there is no home.
pub fn cache_path() -> Option<PathBuf> {
    let directories = choose_native_strategy().ok()?;
    Some(directories.cache_dir().join("hobbit").join("calibration.json"))
}

/// What the file holds; nothing if there is none. `Err` says why it is not to be used.
pub(super) fn read(path: &Path) -> Result<Vec<Calibration>, String> {
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|error| error.to_string())?,
    };
    // Opening a pipe would wait for its other end.
    if !metadata.is_file() {
        return Err("it is not a regular file".to_owned());
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(format!("it is longer than {BYTES_MAX} bytes"));
    }
    let contents: Contents = serde_json::from_slice(&bytes).map_err(|error| format!("it is damaged ({error})"))?;
    if contents.format != FORMAT || contents.version != VERSION {
        let Contents { format, version, .. } = contents;
        return Err(format!("it is {format:?} version {version}, expected {FORMAT:?} version {VERSION}"));
    }
    match contents.calibrations.iter().find(|calibration| !calibration.is_sane()) {
        Some(bad) => Err(format!("a figure of {:?} is not a positive number", bad.machine.device)),
        None => Ok(contents.calibrations),
    }
}

/// Replaces the file as a whole: readers see the old one or the new one. The first [`ENTRIES_MAX`] are kept.
pub(super) fn write(path: &Path, calibrations: &[Calibration]) -> io::Result<()> {
    let calibrations = calibrations.iter().take(ENTRIES_MAX).cloned().collect();
    let text = serde_json::to_vec_pretty(&Contents { format: FORMAT.to_owned(), version: VERSION, calibrations })?;
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    files::replace(path, &text)
}
