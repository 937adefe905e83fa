//! Checks of this machine and file system for [`super::mode`].

use std::fs::File;
use std::io;
use std::path::Path;

use super::Arena;
use crate::files::FileExt;

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
    let block = Arena::new(super::BLOCK_BYTES as usize);
    direct_into(path, &mut block.map_err(|error| error.to_string())?)
}

/// Checks that direct reads reach a device's memory: the kernel cannot reach all memory that drivers map.
///
/// # Errors
/// As [`direct`]; memory that direct reads cannot reach.
pub fn direct_into(path: &Path, memory: &mut Arena) -> Result<(), String> {
    // SAFETY: an arena has at least one block, which nothing else uses during this call; a byte has no invalid value.
    let block = unsafe { std::slice::from_raw_parts_mut(memory.as_ptr(), super::BLOCK_BYTES as usize) };
    let read = open_direct(path).and_then(|file| file.read_at(block, 0));
    read.map(drop).map_err(|error: io::Error| match error.raw_os_error() {
        #[cfg(unix)]
        Some(libc::EINVAL | libc::EOPNOTSUPP) => format!("the file system of {} refuses O_DIRECT", path.display()),
        #[cfg(unix)]
        Some(libc::EFAULT) => "they cannot reach the memory that the device shares".to_owned(),
        _ => format!("{} cannot be opened for direct reads: {error}", path.display()),
    })
}

/// Opens a file past the page cache; fails on file systems that cannot.
#[cfg(target_os = "linux")]
pub(super) fn open_direct(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    File::options().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// Opens a file past the system's cache.
#[cfg(windows)]
pub(super) fn open_direct(path: &Path) -> io::Result<File> {
    crate::windows::open_for_reads(path, crate::windows::Reads::Direct)
}

/// Fails: direct reads need Linux or Windows.
#[cfg(not(any(target_os = "linux", windows)))]
pub(super) fn open_direct(_: &Path) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Reason why the kernel made no ring.
pub(super) fn refusal(error: &io::Error) -> String {
    match error.raw_os_error() {
        _ if error.kind() == io::ErrorKind::Unsupported && !cfg!(target_os = "linux") => "it needs Linux".to_owned(),
        #[cfg(unix)]
        Some(libc::ENOSYS) => "this kernel has no io_uring (Linux 5.6 or newer is needed)".to_owned(),
        #[cfg(unix)]
        Some(libc::EPERM | libc::EACCES) => {
            "io_uring is forbidden here (a container's seccomp profile, or kernel.io_uring_disabled)".to_owned()
        }
        #[cfg(unix)]
        Some(libc::ENOMEM) => "io_uring may lock no more memory (raise RLIMIT_MEMLOCK: ulimit -l)".to_owned(),
        _ => format!("io_uring cannot be set up: {error}"),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn memory_that_direct_reads_cannot_reach() {
        let file = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
        let (bytes, flags) = (super::super::BLOCK_BYTES as usize, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, which stays mapped. Only the kernel looks at its bytes, and reports what it finds.
        let mut memory = unsafe {
            let base = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0);
            Arena::borrowed(std::ptr::NonNull::new(base.cast()).unwrap(), bytes, Box::new(()))
        };
        if direct(file).is_ok() {
            assert!(direct_into(file, &mut memory).unwrap_err().contains("cannot reach the memory"));
        }
    }

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
