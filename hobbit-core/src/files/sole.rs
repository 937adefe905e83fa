//! Partial files under a fixed name, `OUT.partial`, so that the next run replaces the file of a killed run. The file
//! must be ours alone: no link, no second name of another file, and one writer at a time.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;

use super::FileState;

/// Tries to open and lock a file that others rename or remove.
const TRIES: u32 = 100;

/// Why a partial file cannot be written.
#[derive(Debug)]
pub(crate) enum SoleError {
    /// Another process holds it.
    Busy,
    /// A link, a file with a second name, or no regular file, in words.
    NotOurs(&'static str),
    /// The operating system refused.
    Io(io::Error),
}

impl From<io::Error> for SoleError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Opens `path` for reading and writing without truncating it, or makes it; locked until it is dropped. A file system
/// without locks does not keep two processes apart.
pub fn open(path: &Path) -> Result<File, SoleError> {
    for _ in 0..TRIES {
        let file = open_unlinked(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(SoleError::Busy),
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        // Between opening and locking, the lock's holder may have renamed or removed the file; then our lock protects
        // nothing.
        if is_still_at(path, &file)? {
            return Ok(file);
        }
    }
    Err(SoleError::Busy)
}

fn is_still_at(path: &Path, file: &File) -> io::Result<bool> {
    match FileState::of_link(path) {
        Ok(there) => Ok(FileState::of(file)?.is_same_file(&there)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn open_unlinked(path: &Path) -> Result<File, SoleError> {
    let is_link = |found: &fs::Metadata| found.file_type().is_symlink();
    if fs::symlink_metadata(path).is_ok_and(|found| is_link(&found)) {
        return Err(SoleError::NotOurs("a link"));
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = open_itself(&mut options, path)?;
    let metadata = file.metadata();
    if super::outputs::is_device(path) || !metadata?.is_file() {
        return Err(SoleError::NotOurs("no regular file"));
    }
    if links(&file)? > 1 {
        return Err(SoleError::NotOurs("a file that has another name too"));
    }
    Ok(file)
}

/// Opens a file, but no link: one may have appeared just now.
#[cfg(unix)]
fn open_itself(options: &mut OpenOptions, path: &Path) -> Result<File, SoleError> {
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NOFOLLOW);
    match options.open(path) {
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Err(SoleError::NotOurs("a link")),
        other => Ok(other?),
    }
}

/// Opens a file, but no link: one may have appeared just now.
#[cfg(windows)]
fn open_itself(options: &mut OpenOptions, path: &Path) -> Result<File, SoleError> {
    use windows_sys::Win32::Storage::FileSystem::FILE_FLAG_OPEN_REPARSE_POINT;
    std::os::windows::fs::OpenOptionsExt::custom_flags(options, FILE_FLAG_OPEN_REPARSE_POINT);
    let file = options.open(path)?;
    let is_link = file.metadata().is_ok_and(|found| found.file_type().is_symlink());
    if is_link { Err(SoleError::NotOurs("a link")) } else { Ok(file) }
}

/// Names of an open file.
fn links(file: &File) -> io::Result<u64> {
    #[cfg(unix)]
    return Ok(std::os::unix::fs::MetadataExt::nlink(&file.metadata()?));
    #[cfg(windows)]
    Ok(crate::windows::file_facts(file)?.links.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn links_of_both_kinds_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        let at = |name: &str| dir.path().join(name);
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(&victim, at("symbolic")).unwrap();
            std::os::unix::fs::symlink(at("nothing"), at("dangling")).unwrap();
        }
        fs::hard_link(&victim, at("hard")).unwrap();
        for name in if cfg!(unix) { &["symbolic", "dangling", "hard"][..] } else { &["hard"] } {
            assert!(matches!(open(&at(name)), Err(SoleError::NotOurs(_))), "{name}");
        }
        let null = Path::new(if cfg!(windows) { "NUL" } else { "/dev/null" });
        assert!(matches!(open(null), Err(SoleError::NotOurs("no regular file"))));
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        assert!(!at("nothing").exists());
    }

    #[test]
    fn one_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        open(&path).unwrap().write_all(b"kept").unwrap();
        let first = open(&path).unwrap();
        assert!(matches!(open(&path), Err(SoleError::Busy)));
        drop(first);
        open(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"kept");
    }

    /// The first process renames or removes the file and releases the lock after the second has opened it.
    #[test]
    fn a_lock_on_a_renamed_file_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let opened = open_unlinked(&path).unwrap();
        assert!(is_still_at(&path, &opened).unwrap());
        fs::rename(&path, dir.path().join("b")).unwrap();
        assert!(!is_still_at(&path, &opened).unwrap());
        let new = open(&path).unwrap();
        assert!(!is_still_at(&path, &opened).unwrap() && is_still_at(&path, &new).unwrap());
    }
}
