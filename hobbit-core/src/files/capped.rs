//! Bounded reads of whole files, because a path may name `/dev/zero`, a pipe or the wrong file.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Maximum bytes of JSON that hobbit's programs write for each other (profiles, policies). Those of the largest models
/// have a few MiB.
pub const JSON_BYTES_MAX: u64 = 64 << 20;

/// A file's bytes.
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
///
/// # Errors
/// As [`read`]; [`io::ErrorKind::InvalidData`] if it is not UTF-8.
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
        let error = read_text(Path::new("/dev/zero"), JSON_BYTES_MAX).unwrap_err();
        assert!(error.to_string().contains("longer than 64 MiB"), "{error}");
    }
}
