//! What every read past the page cache begins with: a file opened so, and the words for a kernel that refuses.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Name of the engine that reads past the page cache.
pub(super) const ENGINE: &str = "direct";

/// Opens for direct reads; fails on file systems that have none.
pub(super) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// Why the kernel made no ring, in words.
pub(super) fn refusal(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => return "this kernel has no io_uring (Linux 5.6 or newer is needed)".to_owned(),
        Some(libc::EPERM | libc::EACCES) => {
            return "io_uring is forbidden here (a container's seccomp profile, or kernel.io_uring_disabled)"
                .to_owned();
        }
        Some(libc::ENOMEM) => return "io_uring may lock no more memory (raise RLIMIT_MEMLOCK: ulimit -l)".to_owned(),
        _ => {}
    }
    format!("io_uring cannot be set up: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_its_cause() {
        for (number, want) in [
            (libc::ENOSYS, "kernel has no io_uring"),
            (libc::EPERM, "seccomp"),
            (libc::ENOMEM, "RLIMIT_MEMLOCK"),
            (libc::EMFILE, "cannot be set up"),
        ] {
            let text = refusal(&io::Error::from_raw_os_error(number));
            assert!(text.contains(want), "{number}: {text}");
        }
    }
}
