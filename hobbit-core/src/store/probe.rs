//! Checks of this machine and file system for [`super::mode`].

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Checks that `io_uring` can be used.
///
/// # Errors
/// A sentence for the user: an old kernel, a sandbox that forbids it, an administrator who switched it off.
pub fn io_uring() -> Result<(), String> {
    super::direct::probe_ring().map_err(|error| refusal(&error))
}

/// Checks that a file can be read past the page cache. Reads its first block.
///
/// # Errors
/// A sentence for the user: a file system that refuses `O_DIRECT`, a file that cannot be opened.
pub fn direct(path: &Path) -> Result<(), String> {
    let read = || {
        let file = open_direct(path)?;
        let block = super::Arena::new(super::BLOCK_BYTES as usize)?;
        // SAFETY: the arena's bytes are initialised and not used by others.
        let bytes = unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), block.len()) };
        file.read_at(bytes, 0).map(drop)
    };
    read().map_err(|error: io::Error| match error.raw_os_error() {
        Some(libc::EINVAL | libc::EOPNOTSUPP) => format!("the file system of {} refuses O_DIRECT", path.display()),
        _ => format!("{} cannot be opened for direct reads: {error}", path.display()),
    })
}

/// Opens a file past the page cache; fails on file systems that cannot.
#[cfg(target_os = "linux")]
pub(super) fn open_direct(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    File::options().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// Fails: direct reads need Linux.
#[cfg(not(target_os = "linux"))]
pub(super) fn open_direct(_: &Path) -> io::Result<File> {
    Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
}

/// Reason why the kernel made no ring.
pub(super) fn refusal(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => "this kernel has no io_uring (Linux 5.6 or newer is needed)".to_owned(),
        Some(libc::EPERM | libc::EACCES) => {
            "io_uring is forbidden here (a container's seccomp profile, or kernel.io_uring_disabled)".to_owned()
        }
        Some(libc::ENOMEM) => "io_uring may lock no more memory (raise RLIMIT_MEMLOCK: ulimit -l)".to_owned(),
        _ => format!("io_uring cannot be set up: {error}"),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_file_and_cause() {
        // procfs has no direct reads.
        for path in ["/nonexistent/model.gguf", "/proc/self/maps"] {
            let error = direct(Path::new(path)).unwrap_err();
            assert!(error.contains(path), "{error}");
        }
        for (number, expected) in [
            (libc::ENOSYS, "kernel has no io_uring"),
            (libc::EPERM, "seccomp"),
            (libc::ENOMEM, "RLIMIT_MEMLOCK"),
            (libc::EMFILE, "cannot be set up"),
        ] {
            let text = refusal(&io::Error::from_raw_os_error(number));
            assert!(text.contains(expected), "{number}: {text}");
        }
    }
}
