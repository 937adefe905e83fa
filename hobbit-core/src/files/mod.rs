//! Rules for the user's files.
//!
//! * [`outputs`]: no file that the run reads, and none of another kind, is overwritten;
//! * [`mod@replace`]: files are written whole or not at all;
//! * `sole`: one process writes a partial file;
//! * [`read`]: files are read up to a limit;
//! * [`FileState`]: a replaced or changed file is noticed.
//!
//! Links under names that we make up are not followed.

pub mod outputs;
mod positional;
pub mod replace;
pub(crate) mod sole;

pub(crate) use outputs::{BASE_MAGIC, PATH_TABLE_MAGIC, TRACE_MAGIC};
pub use outputs::{Input, Kind, Output, OutputError, SEQUENCE_MAGIC};
pub use outputs::{check, create, destination, overwrite, overwrite_in_parts};
pub use positional::FileExt;
pub use replace::{new_beside, replace};
pub(crate) use replace::{replace_in_parts, try_replacing};

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// `path` with `suffix` after its whole name.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Directory of the file at `path`, which need not exist.
pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Facts that change if a file is replaced or written: another file has another inode, and a write changes the times.
/// `cp -p` sets back the time of the last write, but no program can set the time of the last change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileState {
    pub len: u64,
    /// Time of the last write, in nanoseconds since 1970.
    modified_ns: i128,
    /// Time of the last change of content, name or permissions, in nanoseconds since 1970.
    changed_ns: i128,
    /// Device and inode; on Windows volume and number of the file.
    identity: (u64, u64),
}

impl FileState {
    /// State of an open file.
    #[cfg(unix)]
    pub fn of(file: &File) -> io::Result<Self> {
        Ok(Self::from(&file.metadata()?))
    }

    /// State of an open file.
    #[cfg(windows)]
    pub fn of(file: &File) -> io::Result<Self> {
        let facts = crate::windows::file_facts(file)?;
        let crate::windows::FileFacts { len, modified_ns, changed_ns, identity, .. } = facts;
        Ok(Self { len, modified_ns, changed_ns, identity })
    }

    /// State of the file at this path, behind links.
    pub fn at(path: &Path) -> io::Result<Self> {
        #[cfg(unix)]
        return Ok(Self::from(&std::fs::metadata(path)?));
        #[cfg(windows)]
        Self::of(&crate::windows::open_for_facts(path, true)?)
    }

    /// State of what is at this path, which may be a link.
    pub(crate) fn of_link(path: &Path) -> io::Result<Self> {
        #[cfg(unix)]
        return Ok(Self::from(&std::fs::symlink_metadata(path)?));
        #[cfg(windows)]
        Self::of(&crate::windows::open_for_facts(path, false)?)
    }

    /// Identity of the file: equal for all names of one file.
    pub(crate) fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// Whether both states are of one file, at different times or under different names.
    pub(crate) fn is_same_file(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// Whether length and time of the last write are the same. Unlike `==`, this ignores new names and permissions, and
    /// misses a write after which the time was set back.
    pub(crate) fn is_unwritten_since(&self, before: &Self) -> bool {
        (self.len, self.modified_ns) == (before.len, before.modified_ns)
    }
}

#[cfg(unix)]
impl From<&std::fs::Metadata> for FileState {
    fn from(metadata: &std::fs::Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        let time = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        Self {
            len: metadata.len(),
            modified_ns: time(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: time(metadata.ctime(), metadata.ctime_nsec()),
            identity: (metadata.dev(), metadata.ino()),
        }
    }
}

/// Maximum bytes of JSON that hobbit's programs write for each other (profiles, policies). Files of the largest
/// models have a few MiB.
pub(crate) const JSON_BYTES_MAX: u64 = 64 << 20;

/// A file's bytes, bounded because a path may name `/dev/zero`, a pipe or the wrong file.
///
/// # Errors
/// The system's error; [`io::ErrorKind::FileTooLarge`] for more than `bytes_max` bytes, of which no more are read.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let message = format!("it is longer than {} MiB, more than any such file has", bytes_max >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// A file's text.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    String::from_utf8(read(path, bytes_max)?).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        std::fs::write(&path, "four").unwrap();
        assert_eq!(read_text(&path, 4).unwrap(), "four");
        assert_eq!(read_text(&path, 3).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(read_text(&path, 4).unwrap_err().kind(), io::ErrorKind::InvalidData);
        // Zeros without space on the disk.
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(read(&path, 1 << 20).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        if cfg!(unix) {
            let error = read_text(Path::new("/dev/zero"), JSON_BYTES_MAX).unwrap_err();
            assert!(error.to_string().contains("longer than 64 MiB"), "{error}");
        }
    }
}
