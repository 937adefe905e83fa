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
    return super::direct::probe_ring().map_err(|error| super::past_cache::refusal(&error));
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
    let file = super::past_cache::open(path)?;
    let block = super::Arena::new(super::BLOCK_BYTES as usize)?;
    // SAFETY: the arena's bytes are initialised and used by nobody else.
    let bytes = unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), block.len()) };
    file.read_at(bytes, 0).map(drop)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

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
