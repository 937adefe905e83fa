//! Reads and writes at a place of a file, from several threads at once.

use std::fs::File;
use std::io;

/// Fills `out` from `offset` on.
pub(super) fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    #[cfg(unix)]
    {
        std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
    }
    #[cfg(windows)]
    {
        let (mut rest, mut at) = (out, offset);
        while !rest.is_empty() {
            match std::os::windows::fs::FileExt::seek_read(file, rest, at)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => (rest, at) = (&mut rest[n..], at + n as u64),
            }
        }
        Ok(())
    }
}

/// Writes all of `bytes` at `offset`; the file grows as needed.
pub(super) fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    #[cfg(unix)]
    {
        std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
    }
    #[cfg(windows)]
    {
        let (mut rest, mut at) = (bytes, offset);
        while !rest.is_empty() {
            match std::os::windows::fs::FileExt::seek_write(file, rest, at)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                n => (rest, at) = (&rest[n..], at + n as u64),
            }
        }
        Ok(())
    }
}
