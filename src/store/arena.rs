//! Memory for slots: anonymous, page-aligned, on huge pages where the system has them, faulted in before the first
//! read.

use std::io;
use std::ptr::NonNull;

/// A zeroed block of memory that reads may fill. Freed on drop: no read may then be in flight (see
/// [`crate::load::Loader::drain`]).
pub struct Arena {
    base: NonNull<u8>,
    bytes: usize,
    /// Whose memory it is, unless its own.
    owner: Option<Box<dyn Send + Sync>>,
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Arena {{ {} bytes at {:p} }}", self.bytes, self.base)
    }
}

// SAFETY: an `Arena` owns plain bytes; it holds no thread's state.
unsafe impl Send for Arena {}
// SAFETY: `&Arena` gives out addresses only; who writes through them answers for it (`SlotPtr::new`).
unsafe impl Sync for Arena {}

impl Arena {
    /// Takes `bytes` bytes (rounded up to blocks, never zero) and touches all of them.
    ///
    /// # Errors
    /// What the kernel says when it refuses the mapping (`ENOMEM`).
    pub fn new(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(super::BLOCK_BYTES as usize);
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANON,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let arena = Self {
            base: NonNull::new(base.cast()).expect("the kernel never maps address 0 unasked"),
            bytes,
            owner: None,
        };
        #[cfg(target_os = "linux")]
        // SAFETY: the range was just mapped; the advice changes no contents, and refusing it is harmless.
        unsafe {
            libc::madvise(base, bytes, libc::MADV_HUGEPAGE);
        }
        for offset in (0..bytes).step_by(super::BLOCK_BYTES as usize) {
            // SAFETY: inside the mapping; volatile, so that the touch is not optimised away.
            unsafe { arena.base.as_ptr().add(offset).write_volatile(0) };
        }
        Ok(arena)
    }

    /// Memory of `owner`'s, which is dropped with the arena.
    ///
    /// # Safety
    /// `base` is aligned to blocks and valid for reads and writes of `bytes` bytes, by nobody else, until `owner` is
    /// dropped.
    ///
    /// # Panics
    /// If `base` is not aligned to blocks.
    pub unsafe fn borrowed(base: NonNull<u8>, bytes: usize, owner: Box<dyn Send + Sync>) -> Self {
        assert!(base.addr().get().is_multiple_of(super::BLOCK_BYTES as usize), "slots start at blocks");
        Self { base, bytes, owner: Some(owner) }
    }

    /// Gives the pages that lie wholly in `range` (in bytes from the start) back to the system. Their contents are lost,
    /// and they take memory again once they are touched. Says whether it could: not of borrowed memory.
    ///
    /// # Safety
    /// Nobody reads or writes the range during the call.
    pub unsafe fn discard(&self, range: std::ops::Range<usize>) -> bool {
        let page = super::BLOCK_BYTES as usize;
        let (start, end) = (range.start.next_multiple_of(page), range.end.min(self.bytes) / page * page);
        #[cfg(target_os = "linux")]
        if self.owner.is_none() {
            // SAFETY: whole pages of our own private anonymous mapping, which nobody uses now.
            return start >= end
                || unsafe { libc::madvise(self.base.as_ptr().add(start).cast(), end - start, libc::MADV_DONTNEED) }
                    == 0;
        }
        let _ = (start, end);
        false
    }

    /// Whether [`Arena::discard`] can work.
    pub fn is_discardable(&self) -> bool {
        cfg!(target_os = "linux") && self.owner.is_none()
    }

    /// Start of the memory.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes in the arena.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never true: an arena has at least one block.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.owner.is_some() {
            return;
        }
        // SAFETY: mapped in `new` with this length and unmapped only here.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
