//! Files that are written whole or not at all.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use tempfile::NamedTempFile;

/// Puts a file of these bytes in `path`'s place: readers see the old file or the new one. A link to a file is replaced,
/// not followed. A pipe or `/dev/null` is written to.
///
/// # Errors
/// The system's error; nothing is left behind.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_in_parts(path, &[bytes])
}

/// As [`replace`], with bytes that are in several places.
pub(crate) fn replace_in_parts(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    if is_written_to(path) {
        let mut file = OpenOptions::new().write(true).open(path)?;
        return parts.iter().try_for_each(|part| file.write_all(part));
    }
    let mut file = new_beside(path)?;
    parts.iter().try_for_each(|part| file.write_all(part))?;
    file.as_file().sync_all()?;
    persist(file, path)
}

/// Whether bytes are written to what is at `path`, which stays: a pipe or a device.
fn is_written_to(path: &Path) -> bool {
    super::outputs::is_device(path) || fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir())
}

/// Gives a file its name.
#[cfg(unix)]
fn persist(file: NamedTempFile, path: &Path) -> io::Result<()> {
    file.persist(path).map(drop).map_err(|error| error.error)
}

/// Gives a file its name. `rename` replaces a file that is open, `persist` does not.
#[cfg(windows)]
fn persist(file: NamedTempFile, path: &Path) -> io::Result<()> {
    let temporary = file.into_temp_path();
    fs::rename(&temporary, path)?;
    temporary.keep().map(drop).or(Ok(()))
}

/// Checks that a file can be put in `path`'s place. Changes nothing.
pub(crate) fn try_replacing(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        // A pipe may be opened only once.
        Ok(found) if !found.is_file() => Ok(()),
        _ if super::outputs::is_device(path) => Ok(()),
        _ => new_beside(path).and_then(NamedTempFile::close),
    }
}

/// A new file beside `path` under a random name, removed when dropped. Existing files and links are not opened.
pub fn new_beside(path: &Path) -> io::Result<NamedTempFile> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&name).suffix(".tmp");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666)); // less the umask, as any file
    builder.tempfile_in(super::directory_of(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_file_or_the_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        try_replacing(&path).unwrap();
        assert!(!path.exists());
        for text in ["one", "two"] {
            replace(&path, text.as_bytes()).unwrap();
            try_replacing(&path).unwrap();
            assert_eq!(fs::read(&path).unwrap(), text.as_bytes());
        }
        replace_in_parts(&path, &[b"th", b"", b"ree"]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"three");
        for wrong in [&dir.path().join("absent/a.json"), dir.path()] {
            assert!(replace(wrong, b"").is_err() && try_replacing(wrong).is_err());
        }
        try_replacing(Path::new(if cfg!(windows) { "NUL" } else { "/dev/null" })).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[cfg(unix)]
    #[test]
    fn a_device_is_written_to_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("null");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        replace(&link, b"bytes").unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("/dev/null"));
    }

    /// Readers go on with the file that they have opened.
    #[test]
    fn an_open_file_is_replaced() {
        use std::io::Read;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        replace(&path, b"one").unwrap();
        let mut reader = fs::File::open(&path).unwrap();
        match replace(&path, b"two") {
            // Wine refuses what Windows does since version 1607.
            Err(error) if cfg!(windows) && error.kind() == io::ErrorKind::PermissionDenied => return,
            replaced => replaced.unwrap(),
        }
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), fs::read(&path).unwrap().as_slice()), ("one", b"two".as_slice()));
    }

    #[cfg(unix)]
    #[test]
    fn a_new_file_has_the_usual_permissions() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let (path, usual) = (dir.path().join("a.json"), dir.path().join("usual"));
        replace(&path, b"bytes").unwrap();
        fs::write(&usual, "bytes").unwrap();
        let [found, expected] = [&path, &usual].map(|path| fs::metadata(path).unwrap().permissions().mode());
        assert_eq!(found, expected);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_replaced_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, victim) = (dir.path().join("a.json"), dir.path().join("victim"));
        fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        replace(&path, b"bytes").unwrap();
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
        assert_eq!((fs::read(&path).unwrap(), fs::read(&victim).unwrap()), (b"bytes".to_vec(), b"precious".to_vec()));
    }
}
