//! A file that stays open, so that all reads see the file that was checked first.
//!
//! Between reading a model's header and its last token, a download may put another file in its place. A *replaced* file
//! (renamed over, removed) does no harm: all reads go to the file that was opened. A file *written* in place is
//! detected by its times ([`FileState`]): strictly at each reopening, and after each evaluation by length and time of
//! the last write. The result is an error instead of a mixture of two models.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::StoreError;
use super::direct::ENGINE;
use super::probe::open_direct;
use crate::files::FileState;

/// Name of the engine that reads through the page cache.
pub(super) const BUFFERED: &str = "buffered";

/// A file to read from, and its name for messages.
pub(crate) struct OpenFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
}

impl OpenFile {
    /// A handle on which several threads read at a time: Windows lets them wait for each other on an ordinary one.
    pub(super) fn for_threads(self) -> Self {
        #[cfg(windows)]
        if let Ok(file) = crate::windows::reopen_for_reads(&self.file, crate::windows::Reads::Buffered) {
            return Self { file, ..self };
        }
        self
    }
}

/// A file with its state when it was first checked.
#[derive(Debug)]
pub struct Original {
    /// Name under which it was opened.
    pub path: PathBuf,
    /// Open for reads at any offset.
    pub file: File,
    /// State when it was first checked.
    pub state: FileState,
    /// Changes that [`Original::check_unwritten`] has seen.
    written: Mutex<Written>,
}

/// A file that became shorter may be restored, as read errors advise: that write does not make it another model.
#[derive(Debug, Default)]
struct Written {
    /// It was too short at the last check.
    is_short: bool,
    /// Its state when it had its full length again.
    restored: Option<FileState>,
}

impl Original {
    /// Opens a file that had `state` when it was checked.
    ///
    /// # Errors
    /// [`StoreError::Open`]; [`StoreError::Changed`] if it is now another file or was written to.
    pub fn open(path: &Path, state: FileState) -> Result<Self, StoreError> {
        let opened = File::open(path).map_err(|source| open_error(path, BUFFERED, source))?;
        let original = Self { path: path.to_owned(), file: opened, state, written: Mutex::default() };
        original.check()?;
        Ok(original)
    }

    /// An independent handle on the same file.
    pub fn again(&self) -> Result<File, StoreError> {
        self.check()?;
        self.file.try_clone().map_err(|source| open_error(&self.path, BUFFERED, source))
    }

    /// Opens the file again, past the page cache.
    pub(crate) fn again_direct(&self) -> Result<File, StoreError> {
        self.check()?;
        let opened = self.opened_direct().and_then(|file| Ok((FileState::of(&file)?, file)));
        let (state, file) = opened.map_err(|source| open_error(&self.path, ENGINE, source))?;
        if state.is_same_file(&self.state) { Ok(file) } else { Err(self.changed("another file has its name now")) }
    }

    #[cfg(unix)]
    fn opened_direct(&self) -> io::Result<File> {
        // This name leads to the open file, whatever its path means by now. Without /proc the path may do.
        let name = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&self.file));
        open_direct(Path::new(&name)).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => open_direct(&self.path),
            _ => Err(error),
        })
    }

    #[cfg(windows)]
    fn opened_direct(&self) -> io::Result<File> {
        use crate::windows::{Reads, reopen_for_reads};
        reopen_for_reads(&self.file, Reads::Direct).or_else(|_| open_direct(&self.path))
    }

    /// Checks that the file has not changed, including the time of its last change. New permissions or hard links count
    /// as changes; removal of its name does not.
    pub fn check(&self) -> Result<(), StoreError> {
        let now = self.now()?;
        // Removing a name changes the file's state, too.
        let has_lost_its_name = || !FileState::at(&self.path).is_ok_and(|there| there.is_same_file(&now));
        if now == self.state {
            Ok(())
        } else if !now.is_same_file(&self.state) {
            Err(self.changed("another file has its name now"))
        } else if now.len != self.state.len {
            Err(self.changed("its length is another"))
        } else if now.is_unwritten_since(&self.state) && has_lost_its_name() {
            Ok(())
        } else {
            Err(self.changed("the time of its last change is another"))
        }
    }

    /// Checks that nothing indicates a write. Cheap enough to call often, and a new hard link does not fail it. A file
    /// that was too short and has its length again counts as restored.
    ///
    /// # Errors
    /// [`StoreError::Cut`] if it is too short now, [`StoreError::Changed`] after any other write.
    pub fn check_unwritten(&self) -> Result<(), StoreError> {
        let now = self.now()?;
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut written.is_short, now.len < self.state.len) && now.len == self.state.len {
            written.restored = Some(now);
        }
        if written.is_short {
            return Err(StoreError::Cut { path: self.path.clone() });
        }
        if now.is_unwritten_since(written.restored.as_ref().unwrap_or(&self.state)) {
            Ok(())
        } else {
            Err(self.changed("its length, or the time of its last write, is another"))
        }
    }

    fn now(&self) -> Result<FileState, StoreError> {
        FileState::of(&self.file).map_err(|source| open_error(&self.path, BUFFERED, source))
    }

    fn changed(&self, what: &'static str) -> StoreError {
        StoreError::Changed { path: self.path.clone(), what }
    }
}

fn open_error(path: &Path, engine: &'static str, source: io::Error) -> StoreError {
    StoreError::Open { path: path.to_owned(), engine, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Read;

    fn file(dir: &Path) -> (PathBuf, FileState) {
        let path = dir.join("model");
        fs::write(&path, "first").unwrap();
        let state = FileState::at(&path).unwrap();
        (path, state)
    }

    fn text(mut file: File) -> String {
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_file_that_is_replaced_is_read_on() {
        let dir = tempfile::tempdir().unwrap();
        let (path, state) = file(dir.path());
        let original = Original::open(&path, state).unwrap();
        fs::write(dir.path().join("new"), "second").unwrap();
        match fs::rename(dir.path().join("new"), &path) {
            // Wine refuses what Windows does since version 1607.
            Err(error) if cfg!(windows) && error.kind() == io::ErrorKind::PermissionDenied => return,
            renamed => renamed.unwrap(),
        }
        assert_eq!(fs::read(&path).unwrap(), b"second");
        original.check_unwritten().unwrap();
        assert_eq!(text(original.again().unwrap()), "first");
        fs::remove_file(&path).unwrap();
        original.again().unwrap();
        fs::write(&path, "third").unwrap();
        let error = Original::open(&path, state).unwrap_err().to_string();
        assert!(error.contains(&path.display().to_string()) && error.contains("another file has its name"), "{error}");
    }

    #[test]
    fn a_file_that_was_cut_may_be_restored() {
        let dir = tempfile::tempdir().unwrap();
        let (path, state) = file(dir.path());
        let original = Original::open(&path, state).unwrap();
        fs::write(&path, "fir").unwrap();
        for _ in 0..2 {
            let error = original.check_unwritten().unwrap_err().to_string();
            assert!(error.contains("model: a part of this file cannot be read any more"), "{error}");
        }
        fs::write(&path, "first").unwrap();
        original.check_unwritten().unwrap();
        original.check_unwritten().unwrap();
        fs::write(&path, "first and last").unwrap();
        original.check_unwritten().unwrap_err();
    }

    /// `cp -p other model`: the same inode, length and time of the last write.
    #[test]
    fn a_time_that_was_set_back_does_not_hide_a_write() {
        let dir = tempfile::tempdir().unwrap();
        let (path, state) = file(dir.path());
        let original = Original::open(&path, state).unwrap();
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        // The file system's clock counts in ticks: write until its time differs from that of the first write.
        while FileState::at(&path).unwrap() == state {
            fs::write(&path, "other").unwrap();
            File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        }
        assert!(FileState::at(&path).unwrap().is_unwritten_since(&state));
        for error in [original.check(), original.again().map(drop), Original::open(&path, state).map(drop)] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("model: this file was replaced or written to") && error.contains("start again"));
        }
    }

    #[test]
    fn a_write_is_noticed_and_a_new_name_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let (path, state) = file(dir.path());
        let original = Original::open(&path, state).unwrap();
        fs::hard_link(&path, dir.path().join("second name")).unwrap();
        original.check_unwritten().unwrap();
        fs::write(&path, "longer than before").unwrap();
        assert!(matches!(original.check_unwritten(), Err(StoreError::Changed { .. })));
        assert!(matches!(original.check(), Err(StoreError::Changed { what: "its length is another", .. })));
    }
}
