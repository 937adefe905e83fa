//! A cold start: nothing of the model in the page cache, where other groups' pages would be free memory.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use anyhow::{Context, Result};

/// What may stay behind (pages on their way between lists), in bytes.
const LEFT_BYTES_MAX: usize = 16 << 20;

/// Takes the file out of the page cache; where that does not suffice, as root, everything.
///
/// # Errors
/// What stays there, mapped by another process.
pub fn drop_file(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    file.sync_all().with_context(|| path.display().to_string())?; // dirty pages cannot be dropped
    // SAFETY: the descriptor is open; the call touches no memory of ours.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    if resident_bytes(&file)? <= LEFT_BYTES_MAX {
        return Ok(());
    }
    std::fs::write("/proc/sys/vm/drop_caches", "1").context("writing /proc/sys/vm/drop_caches")?;
    let left = resident_bytes(&file)?;
    anyhow::ensure!(
        left <= LEFT_BYTES_MAX,
        "{} MiB of {} stay in the page cache: another process has it mapped",
        left >> 20,
        path.display()
    );
    Ok(())
}

/// Bytes of the file that are in the page cache.
fn resident_bytes(file: &File) -> Result<usize> {
    let len = usize::try_from(file.metadata()?.len())?;
    if len == 0 {
        return Ok(0);
    }
    // SAFETY: sysconf has no preconditions.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let mut pages = vec![0u8; len.div_ceil(page_bytes)];
    // SAFETY: a fresh read-only mapping of `len` bytes, unmapped below and never read; `pages` has a byte for each
    // of its pages.
    let code = unsafe {
        let map = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        anyhow::ensure!(map != libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
        let code = libc::mincore(map, len, pages.as_mut_ptr());
        libc::munmap(map, len);
        code
    };
    anyhow::ensure!(code == 0, "mincore: {}", io::Error::last_os_error());
    Ok(pages.iter().filter(|page| **page & 1 == 1).count() * page_bytes)
}
