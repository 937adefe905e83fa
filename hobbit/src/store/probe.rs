//! What this machine and file system allow: the impure half of [`super::mode`].

#[cfg(target_os = "linux")]
use std::io;
use std::path::Path;

/// Whether `io_uring` can be used; `Err` says why not.
///
/// # Errors
/// A sentence for the user: an old kernel, a sandbox that forbids it, an administrator who switched it off.
pub fn io_uring() -> Result<(), String> {
    #[cfg(target_os = "linux")]
    return super::direct::probe_ring().map_err(|error| refusal(&error));
    #[cfg(not(target_os = "linux"))]
    Err("io_uring needs Linux".to_owned())
}

/// Whether the file can be read past the page cache; `Err` says why not. Reads its first block.
///
/// # Errors
/// A sentence for the user: a file system that refuses `O_DIRECT`, a file that cannot be opened.
pub fn direct(path: &Path) -> Result<(), String> {
    #[cfg(target_os = "linux")]
    return probe_direct(path).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL | libc::EOPNOTSUPP) => {
            format!("the file system of {} refuses O_DIRECT", path.display())
        }
        _ => format!("{} cannot be opened for direct reads: {error}", path.display()),
    });
    #[cfg(not(target_os = "linux"))]
    Err(format!("O_DIRECT needs Linux ({})", path.display()))
}

#[cfg(target_os = "linux")]
fn probe_direct(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let file = super::direct::open_direct(path)?;
    let block = super::Arena::new(super::BLOCK_BYTES as usize)?;
    // SAFETY: the arena's bytes are initialised and used by nobody else.
    let bytes = unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), block.len()) };
    file.read_at(bytes, 0).map(drop)
}

/// Why the kernel made no ring, in words.
#[cfg(target_os = "linux")]
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

#[cfg(all(test, target_os = "linux"))]
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

    #[test]
    fn a_file_that_does_not_exist_cannot_be_read_directly() {
        let error = direct(Path::new("/nonexistent/model.gguf")).unwrap_err();
        assert!(error.contains("/nonexistent/model.gguf"), "{error}");
    }

    #[test]
    fn what_the_kernel_does_not_serve_is_refused_by_name() {
        // procfs has no direct reads.
        let error = direct(Path::new("/proc/self/maps")).unwrap_err();
        assert!(error.contains("/proc/self/maps"), "{error}");
    }
}
