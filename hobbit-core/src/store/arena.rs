//! Memory that reads fill: anonymous, page-aligned, on huge pages if the system has them. Pages are faulted in before
//! the first read or, in large arenas, by threads beside the reads.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::threads;

/// Bytes faulted in at once: a huge page. Other memory mappings wait for it, so it is no larger.
const FAULT_BYTES: usize = 2 << 20;
/// On machines with slow page faults several threads help, up to a point.
const FAULT_THREADS_MAX: usize = 4;

/// A zeroed block of memory that reads may fill. Freed on drop: no read may then be in flight (see
/// [`crate::load::Loader::drain`]).
pub struct Arena {
    base: NonNull<u8>,
    bytes: usize,
    /// Owner of borrowed memory; `None` if the arena mapped its own.
    owner: Option<Box<dyn Send + Sync>>,
    faults: Faults,
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Arena {{ {} bytes at {:p} }}", self.bytes, self.base)
    }
}

// SAFETY: an `Arena` owns plain bytes; it holds no thread's state.
unsafe impl Send for Arena {}
// SAFETY: `&Arena` gives out addresses only; writing through them is the writer's responsibility (`SlotPtr::new`).
unsafe impl Sync for Arena {}

impl Arena {
    /// Takes `bytes` bytes (rounded up to blocks, never zero) and touches all of them.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let arena = Self::untouched(bytes)?;
        for offset in (0..arena.bytes).step_by(super::BLOCK_BYTES as usize) {
            // SAFETY: inside the mapping; volatile, so that the touch is not optimised away.
            unsafe { arena.base.as_ptr().add(offset).write_volatile(0) };
        }
        Ok(arena)
    }

    /// As [`Arena::new`], but pages are touched only when [`Arena::need`] names them: on a machine that has not used
    /// its memory for long, page faults take seconds per GiB, which would delay the first token.
    pub fn touched_as_needed(bytes: usize) -> io::Result<Self> {
        let mut arena = Self::untouched(bytes)?;
        arena.faults = Faults::begin(arena.base, arena.bytes);
        Ok(arena)
    }

    /// Announces reads of `bytes` bytes at `start`: threads touch the range, the latest announcement first and each
    /// from its start, where reads begin. Ranges outside the arena are ignored.
    pub fn need(&self, start: *const u8, bytes: usize) {
        let offset = start.addr().wrapping_sub(self.base.addr().get());
        if offset < self.bytes {
            self.faults.need(offset..offset.saturating_add(bytes).min(self.bytes));
        }
    }

    /// Drops the ranges announced by [`Arena::need`] that no thread has begun; they may be announced again.
    pub fn need_nothing(&self) {
        self.faults.need_nothing();
    }

    fn untouched(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(super::BLOCK_BYTES as usize);
        let arena = Self { base: map(bytes)?, bytes, owner: None, faults: Faults::default() };
        arena.advise_huge(&(0..bytes), true);
        Ok(arena)
    }

    /// Wraps memory of `owner`, which is dropped with the arena.
    ///
    /// # Safety
    /// `base` is aligned to blocks and valid for reads and writes of `bytes` bytes, exclusively, until `owner` is
    /// dropped.
    ///
    /// # Panics
    /// If `base` is not aligned to blocks.
    pub unsafe fn borrowed(base: NonNull<u8>, bytes: usize, owner: Box<dyn Send + Sync>) -> Self {
        assert!(base.addr().get().is_multiple_of(super::BLOCK_BYTES as usize), "slots start at blocks");
        Self { base, bytes, owner: Some(owner), faults: Faults::default() }
    }

    /// Gives the pages that lie wholly in `range` (in bytes from the start) back to the system. Their contents are
    /// lost; they take memory again when touched. Neither fault threads nor huge pages of the memory around them touch
    /// them until [`Arena::restore`]. Returns whether it succeeded: false for borrowed memory.
    ///
    /// # Safety
    /// Nothing reads or writes the range during the call.
    pub unsafe fn discard(&self, range: Range<usize>) -> bool {
        let pages = self.whole_pages(range);
        if !self.is_discardable() || pages.is_empty() {
            return self.is_discardable();
        }
        self.faults.keep_off(&pages);
        self.advise_huge(&pages, false);
        // SAFETY: whole pages of our own private anonymous mapping, unused during the call.
        unsafe { empty(self.base.as_ptr().add(pages.start), pages.len()) }
    }

    /// Discarded memory in the range is about to be used again.
    pub fn restore(&self, range: Range<usize>) {
        let pages = self.whole_pages(range);
        if self.is_discardable() && self.faults.return_to(&pages) {
            self.advise_huge(&pages, true);
        }
    }

    fn whole_pages(&self, range: Range<usize>) -> Range<usize> {
        let page = super::BLOCK_BYTES as usize;
        range.start.next_multiple_of(page)..range.end.min(self.bytes) / page * page
    }

    /// Whether the system may use huge pages for a range of our own memory; it need not obey.
    fn advise_huge(&self, pages: &Range<usize>, is_allowed: bool) {
        #[cfg(target_os = "linux")]
        // SAFETY: whole pages of our own mapping; the advice changes no contents, and refusing it is harmless.
        unsafe {
            let advice = if is_allowed { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
            libc::madvise(self.base.as_ptr().add(pages.start).cast(), pages.len(), advice);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (pages, is_allowed);
    }

    /// Whether [`Arena::discard`] can work.
    pub fn is_discardable(&self) -> bool {
        cfg!(any(target_os = "linux", windows)) && self.owner.is_none()
    }

    /// Start of the memory.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

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
        self.faults.end();
        if self.owner.is_some() {
            return;
        }
        // SAFETY: mapped in `new` with this length and unmapped only here.
        unsafe { unmap(self.base, self.bytes) };
    }
}

/// New memory that reads as zeros.
#[cfg(unix)]
fn map(bytes: usize) -> io::Result<NonNull<u8>> {
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANON);
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches nothing of ours.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(NonNull::new(base.cast()).expect("the kernel never maps address 0 unasked"))
}

#[cfg(windows)]
fn map(bytes: usize) -> io::Result<NonNull<u8>> {
    crate::windows::reserve(bytes, true)
}

/// Frees what [`map`] returned.
///
/// # Safety
/// Nothing uses the memory any more.
unsafe fn unmap(base: NonNull<u8>, bytes: usize) {
    #[cfg(unix)]
    // SAFETY: by the caller.
    unsafe {
        libc::munmap(base.as_ptr().cast(), bytes);
    }
    #[cfg(windows)]
    // SAFETY: by the caller.
    unsafe {
        let _ = bytes; // known to the system
        crate::windows::release(base);
    }
}

/// Gives pages back, whose contents are lost. Returns whether it succeeded.
///
/// # Safety
/// Whole pages of what [`map`] returned, unused during the call.
unsafe fn empty(start: *mut u8, bytes: usize) -> bool {
    #[cfg(unix)]
    // SAFETY: by the caller.
    return unsafe { libc::madvise(start.cast(), bytes, libc::MADV_DONTNEED) == 0 };
    #[cfg(windows)]
    // SAFETY: by the caller.
    unsafe {
        crate::windows::empty(start, bytes)
    }
}

/// Fault threads running now, over all arenas.
static N_FAULTING: AtomicUsize = AtomicUsize::new(0);

/// Whether our threads use CPU time to fault memory in.
pub fn is_faulting() -> bool {
    N_FAULTING.load(Ordering::Relaxed) > 0
}

/// Threads that fault pages in.
#[derive(Default)]
struct Faults {
    shared: Arc<Shared>,
    threads: Mutex<Vec<thread::JoinHandle<()>>>,
}

/// State shared by the threads.
#[derive(Default)]
struct Shared {
    wanted: Mutex<Wanted>,
    woken: Condvar,
    /// Pieces of [`FAULT_BYTES`] that no thread has begun.
    n_left: AtomicUsize,
}

#[derive(Default)]
struct Wanted {
    /// Pieces, the next one last.
    queue: Vec<usize>,
    /// By piece: whether a thread has begun it.
    is_begun: Vec<bool>,
    /// Ranges that stay untouched.
    kept_off: Vec<Range<usize>>,
    /// Threads that fault a piece in now.
    n_busy: usize,
    is_over: bool,
}

impl Wanted {
    /// The parts of a range that may be touched.
    fn allowed(&self, range: Range<usize>) -> Vec<Range<usize>> {
        self.kept_off.iter().fold(vec![range], |parts, kept| without(&parts, kept))
    }
}

/// `parts` without `hole`.
fn without(parts: &[Range<usize>], hole: &Range<usize>) -> Vec<Range<usize>> {
    let around = |part: &Range<usize>| [part.start..part.end.min(hole.start), part.start.max(hole.end)..part.end];
    parts.iter().flat_map(around).filter(|part| !part.is_empty()).collect()
}

impl Shared {
    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next piece, and returns the parts of it to fault in before [`Shared::done`]. `None`: there are no
    /// more.
    fn next(&self, bytes: usize) -> Option<Vec<Range<usize>>> {
        let mut wanted = self.wanted();
        loop {
            if wanted.is_over || self.n_left.load(Ordering::Relaxed) == 0 {
                return None;
            }
            while let Some(piece) = wanted.queue.pop() {
                if !std::mem::replace(&mut wanted.is_begun[piece], true) {
                    if self.n_left.fetch_sub(1, Ordering::Relaxed) == 1 {
                        self.woken.notify_all();
                    }
                    wanted.n_busy += 1;
                    let offset = piece * FAULT_BYTES;
                    return Some(wanted.allowed(offset..bytes.min(offset + FAULT_BYTES)));
                }
            }
            wanted = self.woken.wait(wanted).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn done(&self) {
        self.wanted().n_busy -= 1;
        self.woken.notify_all();
    }

    fn end(&self) {
        self.wanted().is_over = true;
        self.n_left.store(0, Ordering::Relaxed);
        self.woken.notify_all();
    }
}

impl Faults {
    /// Starts threads for the mapping at `base`, which stays mapped until [`Faults::end`] has returned.
    fn begin(base: NonNull<u8>, bytes: usize) -> Self {
        let n_pieces = bytes.div_ceil(FAULT_BYTES);
        let wanted = Wanted { is_begun: vec![false; n_pieces], ..Wanted::default() };
        let n_left = AtomicUsize::new(n_pieces);
        let shared = Arc::new(Shared { wanted: Mutex::new(wanted), woken: Condvar::new(), n_left });
        let base = base.expose_provenance().get();
        let work = || {
            let shared = Arc::clone(&shared);
            move || {
                while let Some(parts) = shared.next(bytes) {
                    N_FAULTING.fetch_add(1, Ordering::Relaxed);
                    let can = parts.into_iter().all(|part| populate(base + part.start, part.len()));
                    N_FAULTING.fetch_sub(1, Ordering::Relaxed);
                    shared.done();
                    if !can {
                        shared.end();
                    }
                }
            }
        };
        let n_threads = thread::available_parallelism().map_or(1, |n| n.get().min(FAULT_THREADS_MAX));
        // Without threads, reads fault the pages in.
        let start = |_| threads::spawn("hobbit-faults".into(), work()).ok();
        let threads: Vec<_> = (0..n_threads).filter_map(start).collect();
        if threads.is_empty() {
            // No thread would ever take the announced pieces.
            shared.end();
        }
        Self { shared, threads: Mutex::new(threads) }
    }

    fn need(&self, range: Range<usize>) {
        if range.is_empty() || self.shared.n_left.load(Ordering::Relaxed) == 0 {
            return;
        }
        let pieces = range.start / FAULT_BYTES..range.end.div_ceil(FAULT_BYTES);
        let mut wanted = self.shared.wanted();
        let Wanted { queue, is_begun, .. } = &mut *wanted;
        queue.extend(pieces.filter(|&piece| !is_begun[piece]));
        drop(wanted);
        self.shared.woken.notify_all();
    }

    fn need_nothing(&self) {
        if self.shared.n_left.load(Ordering::Relaxed) > 0 {
            self.shared.wanted().queue.clear();
        }
    }

    /// No thread touches a range from now on. Waits for the pieces in progress.
    fn keep_off(&self, range: &Range<usize>) {
        let mut wanted = self.shared.wanted();
        wanted.kept_off.push(range.clone());
        while wanted.n_busy > 0 {
            wanted = self.shared.woken.wait(wanted).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A range may be touched again. Returns whether a part of it was not.
    fn return_to(&self, range: &Range<usize>) -> bool {
        let mut wanted = self.shared.wanted();
        let before = std::mem::take(&mut wanted.kept_off);
        wanted.kept_off = without(&before, range);
        wanted.kept_off != before
    }

    /// Stops the threads and waits for the pieces in progress.
    fn end(&self) {
        self.shared.end();
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        for thread in threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Faults in a mapped range without changing its contents, even while others write there. Returns whether the system
/// supports that.
#[cfg(target_os = "linux")]
fn populate(address: usize, bytes: usize) -> bool {
    // SAFETY: the range is mapped until `Faults::end` has returned; the advice changes no contents.
    unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(address), bytes, libc::MADV_POPULATE_WRITE) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn populate(_: usize, _: usize) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_threads_keep_off_discarded_memory_until_it_is_restored() {
        let faults = Faults::default();
        let allowed = |range| faults.shared.wanted().allowed(range);
        faults.keep_off(&(10..20));
        faults.keep_off(&(15..30));
        faults.keep_off(&(40..50));
        assert_eq!(allowed(0..60), [0..10, 30..40, 50..60]);
        assert!(allowed(12..18).is_empty());
        assert!(faults.return_to(&(0..25)));
        assert_eq!(allowed(0..60), [0..25, 30..40, 50..60]);
        assert!(faults.return_to(&(0..60)) && !faults.return_to(&(0..60)));
        assert_eq!(allowed(0..60).first(), Some(&(0..60)));
    }
}
