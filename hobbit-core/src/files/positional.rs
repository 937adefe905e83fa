//! Reads and writes at an offset of a file. They are Unix's calls, which any number of threads may use on one file;
//! Windows has them under other names, and there they move the position of ordinary reads.

#[cfg(unix)]
pub use std::os::unix::fs::FileExt;

#[cfg(windows)]
pub use windows::FileExt;

#[cfg(windows)]
mod windows {
    use std::fs::File;
    use std::io;

    /// The methods of Unix's trait of this name.
    pub trait FileExt {
        /// Reads up to `buf.len()` bytes at `offset`; 0 only at the end of the file.
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

        /// Writes up to `buf.len()` bytes at `offset`.
        fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize>;

        /// Fills `buf` from `offset` on.
        fn read_exact_at(&self, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
            while !buf.is_empty() {
                match self.read_at(buf, offset) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(got) => {
                        buf = &mut buf[got..];
                        offset += got as u64;
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        }

        /// Writes all of `buf` from `offset` on.
        fn write_all_at(&self, mut buf: &[u8], mut offset: u64) -> io::Result<()> {
            while !buf.is_empty() {
                match self.write_at(buf, offset) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(got) => {
                        buf = &buf[got..];
                        offset += got as u64;
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        }
    }

    impl FileExt for File {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
            crate::windows::read_at(self, buf, offset)
        }

        fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
            crate::windows::write_at(self, buf, offset)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io;

    #[test]
    fn places_are_independent_and_the_end_is_an_end() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"world", 6).unwrap();
        file.write_all_at(b"hello ", 0).unwrap();
        let read = |file: &File, at, len| {
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, at).map(|()| bytes)
        };
        assert_eq!(read(&file, 0, 11).unwrap(), b"hello world");
        assert_eq!(read(&file, 6, 5).unwrap(), b"world");
        assert_eq!(read(&file, 6, 6).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(file.read_at(&mut [0; 4], 100).unwrap(), 0);
        assert_eq!(file.read_at(&mut [0; 4], 9).unwrap(), 2);
    }
}
