//! Files that are written whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Names that are tried before giving up.
const TRIES: u32 = 1000;

/// Puts a file of these bytes in `path`'s place: readers see the old one or the new one. A link to a file is replaced, not
/// followed. What is no file (a pipe, `/dev/null`) is written to.
///
/// # Errors
/// What the system says; nothing is left behind then.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        return OpenOptions::new().write(true).open(path)?.write_all(bytes);
    }
    let (mut file, partial) = fresh_beside(path)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&partial);
    }
    written
}

/// Finds out whether a file can be put in `path`'s place. Nothing stays behind, and what is at `path` is not touched.
///
/// # Errors
/// What the system says.
pub fn try_replacing(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        // A pipe may be opened only once.
        Ok(found) if !found.is_file() => Ok(()),
        _ => fresh_beside(path).and_then(|(_, partial)| fs::remove_file(partial)),
    }
}

/// A file beside `path` that was not there before, to be renamed to it. Whatever has its name, a link too, is left alone:
/// the next name is tried.
fn fresh_beside(path: &Path) -> io::Result<(File, PathBuf)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut taken = None;
    for _ in 0..TRIES {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let partial = temporary_name(path, number);
        // O_CREAT and O_EXCL: POSIX has them fail on a link, wherever it leads.
        match OpenOptions::new().write(true).create_new(true).open(&partial) {
            Ok(file) => return Ok((file, partial)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => taken = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(taken.unwrap_or_else(|| io::ErrorKind::AlreadyExists.into()))
}

fn temporary_name(path: &Path, number: u32) -> PathBuf {
    super::with_suffix(path, &format!(".{}-{number}.tmp", std::process::id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_file_or_the_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        replace(&path, b"one").unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert!(replace(&dir.path().join("absent/a.json"), b"").is_err());
        let error = replace(dir.path(), b"a directory cannot be replaced");
        assert!(error.is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn trying_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        try_replacing(&path).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        fs::write(&path, "one").unwrap();
        try_replacing(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        try_replacing(Path::new("/dev/null")).unwrap();
        assert!(try_replacing(dir.path()).is_err() && try_replacing(&dir.path().join("absent/a.json")).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_file_stays_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("null");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        replace(&link, b"bytes").unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("/dev/null"));
    }

    /// Links are waiting under every name that comes next.
    #[cfg(unix)]
    #[test]
    fn links_under_temporary_names_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, victim) = (dir.path().join("a.json"), dir.path().join("victim"));
        fs::write(&victim, "precious").unwrap();
        for number in 0..TRIES / 2 {
            std::os::unix::fs::symlink(&victim, temporary_name(&path, number)).unwrap();
        }
        replace(&path, b"bytes").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"bytes");
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }
}
