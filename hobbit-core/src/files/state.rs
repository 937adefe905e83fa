//! By which a file is known again.

use std::fs::{File, Metadata};
use std::io;
use std::path::Path;

/// What the system says of a file. Whoever replaces a file, or writes to it, changes some of this: another file has another
/// inode, and a write the times. `cp -p` sets back the time of the last write, but no program can set that of the last change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileState {
    /// Length in bytes.
    pub len: u64,
    /// Time of the last write, in nanoseconds since 1970.
    modified_ns: i128,
    /// Time of the last change of content, name or rights; 0 where the system has none.
    changed_ns: i128,
    /// Device and inode; 0 where the system has none.
    identity: (u64, u64),
}

impl FileState {
    /// Of an open file.
    ///
    /// # Errors
    /// What the system says.
    pub fn of(file: &File) -> io::Result<Self> {
        Ok(Self::from(&file.metadata()?))
    }

    /// Of the file that has this name now, behind links.
    ///
    /// # Errors
    /// What the system says.
    pub fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::from(&std::fs::metadata(path)?))
    }

    /// Time of the last write, in nanoseconds since 1970.
    pub fn modified_ns(&self) -> i128 {
        self.modified_ns
    }

    /// Whether the two are of one file, at different times or under different names.
    pub fn is_same_file(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// Whether nothing tells of a write in between. Other names and rights are no write, so that a time that was set back
    /// after a write passes here, and only here: `==` sees it.
    pub fn is_unwritten_since(&self, before: &Self) -> bool {
        (self.len, self.modified_ns) == (before.len, before.modified_ns)
    }
}

impl From<&Metadata> for FileState {
    fn from(metadata: &Metadata) -> Self {
        let since_1970 = |time: std::time::SystemTime| match time.duration_since(std::time::UNIX_EPOCH) {
            Ok(after) => after.as_nanos() as i128,
            Err(before) => -(before.duration().as_nanos() as i128),
        };
        #[cfg(unix)]
        let (changed_ns, identity) = {
            use std::os::unix::fs::MetadataExt;
            let changed_ns = i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec());
            (changed_ns, (metadata.dev(), metadata.ino()))
        };
        #[cfg(not(unix))]
        let (changed_ns, identity) = (0, (0, 0));
        Self { len: metadata.len(), modified_ns: metadata.modified().map_or(0, since_1970), changed_ns, identity }
    }
}
