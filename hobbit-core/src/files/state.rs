//! Identity of files over time.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Facts that change if a file is replaced or written: another file has another inode, and a write changes the times.
/// `cp -p` sets back the time of the last write, but no program can set the time of the last change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileState {
    pub len: u64,
    /// Time of the last write, in nanoseconds since 1970.
    modified_ns: i128,
    /// Time of the last change of content, name or permissions, in nanoseconds since 1970.
    changed_ns: i128,
    /// Device and inode.
    identity: (u64, u64),
}

impl FileState {
    /// State of an open file.
    pub fn of(file: &File) -> io::Result<Self> {
        Ok(Self::from(&file.metadata()?))
    }

    /// State of the file at this path, behind links.
    pub fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::from(&std::fs::metadata(path)?))
    }

    /// Whether both states are of one file, at different times or under different names.
    pub fn is_same_file(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// Whether length and time of the last write are the same. Unlike `==`, this ignores new names and permissions, and
    /// misses a write after which the time was set back.
    pub fn is_unwritten_since(&self, before: &Self) -> bool {
        (self.len, self.modified_ns) == (before.len, before.modified_ns)
    }
}

impl From<&Metadata> for FileState {
    fn from(metadata: &Metadata) -> Self {
        let time = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        Self {
            len: metadata.len(),
            modified_ns: time(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: time(metadata.ctime(), metadata.ctime_nsec()),
            identity: (metadata.dev(), metadata.ino()),
        }
    }
}
