//! The virtual GGUF as a C stream: llama.cpp reads headers and ordinary weights, never an expert or a table that stays
//! in the file.
//!
//! llama.cpp loads from a `FILE*` (`llama_model_load_from_file_ptr`). We pass it a cookie stream over [`VirtualGguf`].
//! A seek to an expert tensor returns the end of the file; llama.cpp clips every read to the rest of the file, so it
//! reads nothing there. This needs exact seeks, but glibc rounds a seek down to a multiple of the buffer size. The
//! buffer is therefore one byte larger than a power of two that exceeds the file. It takes only address space: stdio
//! fills it from its beginning, so only the part that one read can fill ([`READ_BYTES_MAX`]) is writable. The rest is
//! not committed memory, which a system without overcommit would refuse.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::engine::error::OpenError;
use crate::engine::source::virtual_bytes::{READ_BYTES_MAX, VirtualBytes};
use hobbit_core::gguf::{Piece, VirtualGguf};
use hobbit_core::store::Original;

/// A `FILE*` over a virtual GGUF, closed on drop.
pub(crate) struct CookieStream {
    file: *mut libc::FILE,
    buffer: *mut c_void,
    buffer_bytes: usize,
    /// The callbacks hold its address.
    state: Arc<Shared>,
}

type Shared = Mutex<State>;

struct State {
    bytes: VirtualBytes,
    position: u64,
    error: Option<String>,
}

impl CookieStream {
    /// Opens a stream over the virtual union of the source files.
    ///
    /// # Errors
    /// A source file that has changed since, or no address space for the buffer.
    pub(crate) fn open(virtual_file: VirtualGguf, files: &[Original]) -> Result<CookieStream, OpenError> {
        let bytes = VirtualBytes::new(virtual_file, files)?;
        let buffer_bytes = (bytes.virtual_file.len + 1).next_power_of_two() as usize + 1;
        let buffer = reserve(buffer_bytes).ok_or(OpenError::AddressSpace { bytes: buffer_bytes as u64 })?;
        let writable = buffer_bytes.min(READ_BYTES_MAX);
        // SAFETY: the beginning of the mapping just made.
        if unsafe { libc::mprotect(buffer, writable, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
            // SAFETY: as above; unused so far.
            unsafe { libc::munmap(buffer, buffer_bytes) };
            return Err(OpenError::AddressSpace { bytes: writable as u64 });
        }
        let state = State { bytes, position: 0, error: None };
        let state = Arc::new(Mutex::new(state));
        let callbacks = cookie_io_functions_t { read: Some(read), write: None, seek: Some(seek), close: None };
        let cookie = Arc::as_ptr(&state).cast_mut().cast();
        // SAFETY: `state` outlives the stream: `Drop` closes the stream first.
        let file = unsafe { fopencookie(cookie, c"rb".as_ptr(), callbacks) };
        if file.is_null() {
            // SAFETY: the mapping made above, unused so far.
            unsafe { libc::munmap(buffer, buffer_bytes) };
            return Err(OpenError::Io {
                path: files[0].path.clone(),
                action: "open a stream on",
                source: std::io::Error::last_os_error(),
            });
        }
        // SAFETY: the stream was just opened and no I/O happened on it; the buffer outlives it.
        unsafe { libc::setvbuf(file, buffer.cast::<c_char>(), libc::_IOFBF, buffer_bytes) };
        Ok(CookieStream { file, buffer, buffer_bytes, state })
    }

    /// The `FILE*` to hand to llama.cpp, valid as long as `self`.
    pub(crate) fn as_file(&mut self) -> *mut c_void {
        self.file.cast()
    }

    /// Whether the seek trick works with this system's stdio: after a seek to an expert nothing is read. Must be called
    /// before any read.
    pub(crate) fn skips_experts(&mut self) -> bool {
        let Some(start) = self.state().bytes.first_in_file() else { return true };
        let Ok(start) = libc::off_t::try_from(start) else { return false };
        let mut byte = 0u8;
        // SAFETY: the stream is open, and reads at most one byte into `byte`.
        unsafe {
            let is_there = libc::fseeko(self.file, start, libc::SEEK_SET) == 0;
            let n = libc::fread((&raw mut byte).cast(), 1, 1, self.file);
            libc::rewind(self.file);
            is_there && n == 0 && self.expert_bytes_read() == 0
        }
    }

    /// Bytes of expert tensors that were read: zero where the seek trick works.
    pub(crate) fn expert_bytes_read(&self) -> u64 {
        self.state().bytes.in_file_read
    }

    /// The first error in a callback, if any.
    pub(crate) fn error(&self) -> Option<String> {
        self.state().error.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reserves inaccessible address space: it takes no memory, and the system commits none. [`release`] frees it.
pub(crate) fn reserve(bytes: usize) -> Option<*mut c_void> {
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches nothing of ours.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    (base != libc::MAP_FAILED).then_some(base)
}

/// Frees address space.
///
/// # Safety
/// `base` is from [`reserve`] with this length, and nothing uses the range any more.
pub(crate) unsafe fn release(base: *mut c_void, bytes: usize) {
    // SAFETY: by the caller.
    unsafe { libc::munmap(base, bytes) };
}

impl Drop for CookieStream {
    fn drop(&mut self) {
        // SAFETY: opened by us, closed once; the buffer is unmapped after the stream is closed.
        unsafe {
            libc::fclose(self.file);
            libc::munmap(self.buffer, self.buffer_bytes);
        }
    }
}

impl State {
    fn read(&mut self, out: &mut [u8]) -> Result<usize, String> {
        let n = self.bytes.read_at(self.position, out)?;
        self.position += n as u64;
        Ok(n)
    }

    fn seek(&mut self, offset: i64, whence: c_int) -> Option<u64> {
        let len = self.bytes.virtual_file.len;
        let base = match whence {
            libc::SEEK_SET => 0,
            libc::SEEK_CUR => self.position as i64,
            libc::SEEK_END => len as i64,
            _ => return None,
        };
        let target = u64::try_from(base.checked_add(offset)?).ok()?;
        let on_expert = matches!(
            self.bytes.virtual_file.segment_at(target),
            Piece::Source { segment, .. } | Piece::Absent { segment, .. }
                if segment.in_file && segment.start == target
        );
        self.position = if on_expert { len } else { target };
        Some(self.position)
    }
}

unsafe extern "C" fn read(cookie: *mut c_void, buf: *mut c_char, size: usize) -> isize {
    // SAFETY: the cookie is the state of the open stream, and stdio passes a buffer of at least `size` bytes. Only the
    // delivered part is viewed as a slice.
    let (state, out) = unsafe {
        let n = size.min(READ_BYTES_MAX);
        (&*cookie.cast::<Shared>(), std::slice::from_raw_parts_mut(buf.cast::<u8>(), n))
    };
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    match catch_unwind(AssertUnwindSafe(|| state.read(out))) {
        Ok(Ok(n)) => n as isize,
        Ok(Err(message)) => {
            state.error.get_or_insert(message);
            -1
        }
        Err(_) => -1,
    }
}

unsafe extern "C" fn seek(cookie: *mut c_void, offset: *mut i64, whence: c_int) -> c_int {
    // SAFETY: the cookie is the state of the open stream; stdio passes a valid offset.
    let (state, offset) = unsafe { (&*cookie.cast::<Shared>(), &mut *offset) };
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    match catch_unwind(AssertUnwindSafe(|| state.seek(*offset, whence))) {
        Ok(Some(position)) => {
            *offset = position as i64;
            0
        }
        _ => -1,
    }
}

#[repr(C)]
#[allow(non_camel_case_types)]
struct cookie_io_functions_t {
    read: Option<unsafe extern "C" fn(*mut c_void, *mut c_char, usize) -> isize>,
    write: Option<unsafe extern "C" fn(*mut c_void, *const c_char, usize) -> isize>,
    seek: Option<unsafe extern "C" fn(*mut c_void, *mut i64, c_int) -> c_int>,
    close: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: cookie_io_functions_t) -> *mut libc::FILE;
}

#[cfg(all(test, target_os = "linux"))]
pub(crate) mod tests {
    use std::path::Path;

    use super::*;
    use hobbit_core::gguf::Gguf;

    /// Permissions of the mapping at an address, in the kernel's notation: `rw-p`.
    pub(crate) fn permissions(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let at = |line: &&str| {
            let (range, _) = line.split_once(' ').unwrap();
            let (start, end) = range.split_once('-').unwrap();
            (usize::from_str_radix(start, 16).unwrap()..usize::from_str_radix(end, 16).unwrap()).contains(&address)
        };
        let line = maps.lines().find(at).expect("the address is mapped");
        line.split(' ').nth(1).unwrap().to_owned()
    }

    /// With `vm.overcommit_memory` 2, all writable private memory is committed.
    #[test]
    fn only_the_filled_part_of_the_buffer_is_committed() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo.gguf");
        let gguf = Gguf::open(&path).unwrap();
        let original = Original::open(&path, gguf.files[0].state).unwrap();
        let mut stream = CookieStream::open(gguf.virtual_file(), &[original]).unwrap();
        let buffer = stream.buffer.addr();
        assert!(stream.buffer_bytes > 8 * READ_BYTES_MAX);
        assert_eq!(permissions(buffer), "rw-p");
        assert_eq!(permissions(buffer + READ_BYTES_MAX - 1), "rw-p");
        assert_eq!(permissions(buffer + READ_BYTES_MAX), "---p");
        assert_eq!(permissions(buffer + stream.buffer_bytes - 1), "---p");
        assert!(stream.skips_experts());
        // The stream still reads as before.
        let mut magic = [0u8; 4];
        // SAFETY: the stream is open; four bytes have room.
        let n = unsafe { libc::fread(magic.as_mut_ptr().cast(), 1, 4, stream.file) };
        assert_eq!((n, &magic), (4, b"GGUF"));
    }
}
