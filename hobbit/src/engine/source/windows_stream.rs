//! The virtual GGUF as a C stream on Windows: llama.cpp reads headers and ordinary weights, never an expert or a table
//! that stays in the file.
//!
//! llama.cpp reads the header from a `FILE*`, here a temporary file, and tensors from the handle under it. The shim
//! sends the calls on this handle to [`VirtualBytes`]. Bytes of an expert are neither read nor written into llama.cpp's
//! buffer, which the expert buffer type drops unseen. The buffer has the size of one tensor of a layer and takes no
//! pages, only committed memory.

use std::ffi::c_void;
use std::io::Write;
use std::os::windows::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ggml_sys::shim;

use crate::engine::error::OpenError;
use crate::engine::source::virtual_bytes::VirtualBytes;
use hobbit_core::gguf::{Piece, VirtualGguf};
use hobbit_core::store::Original;
use hobbit_core::windows::openable;

/// A `FILE*` over a virtual GGUF, closed on drop.
pub(crate) struct CookieStream {
    stream: NonNull<shim::hobbit_stream>,
    /// The callback holds its address.
    state: Arc<Shared>,
    /// Has the header. Removed after the stream is closed.
    _header: tempfile::TempPath,
}

type Shared = Mutex<State>;

struct State {
    bytes: VirtualBytes,
    error: Option<String>,
}

impl CookieStream {
    /// Opens a stream over the virtual union of the source files.
    ///
    /// # Errors
    /// A source file that has changed since, or no room for a temporary file.
    pub(crate) fn open(virtual_file: VirtualGguf, files: &[Original]) -> Result<CookieStream, OpenError> {
        let failed = |action| {
            let path = files[0].path.clone();
            move |source| OpenError::Io { path, action, source }
        };
        let mut header = tempfile::NamedTempFile::new().map_err(failed("make a temporary file for the header of"))?;
        // llama.cpp looks for the padding before the first tensor.
        let first = virtual_file.segments.iter().find(|segment| segment.tensor.is_some());
        let padded = first.map_or(virtual_file.len, |segment| segment.start);
        let written = header.write_all(&virtual_file.header).and_then(|()| header.as_file().set_len(padded));
        written.map_err(failed("write the header of"))?;
        let header = header.into_temp_path();
        let name: Vec<u16> = openable(&header).as_os_str().encode_wide().chain([0]).collect();
        let length = virtual_file.len;
        let bytes = VirtualBytes::new(virtual_file, files)?;
        let state = Arc::new(Mutex::new(State { bytes, error: None }));
        let cookie = Arc::as_ptr(&state).cast_mut().cast();
        // SAFETY: the name ends with a zero; `state` outlives the stream, which `Drop` closes first.
        let stream = unsafe { shim::hobbit_stream_open(name.as_ptr(), length, Some(read), cookie) };
        let stream = NonNull::new(stream).ok_or_else(|| failed("open a stream on")(std::io::Error::last_os_error()))?;
        Ok(CookieStream { stream, state, _header: header })
    }

    /// The `FILE*` to hand to llama.cpp, valid as long as `self`.
    pub(crate) fn as_file(&mut self) -> *mut c_void {
        // SAFETY: the stream is open.
        unsafe { shim::hobbit_stream_file(self.stream.as_ptr()) }
    }

    /// Always: [`read`] skips them.
    pub(crate) fn skips_experts(&mut self) -> bool {
        true
    }

    /// Bytes of expert tensors that were read.
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

impl Drop for CookieStream {
    fn drop(&mut self) {
        // SAFETY: opened by us, closed once.
        unsafe { shim::hobbit_stream_close(self.stream.as_ptr()) };
    }
}

impl State {
    /// Fills `out`, except with what stays in the file.
    fn read(&mut self, mut position: u64, mut out: &mut [u8]) -> Result<(), String> {
        while !out.is_empty() {
            let skipped = match self.bytes.virtual_file.segment_at(position) {
                Piece::Source { segment, source } if segment.in_file => source.len,
                Piece::Absent { len, .. } => len,
                _ => 0,
            };
            let n = match skipped.min(out.len() as u64) as usize {
                0 => self.bytes.read_at(position, out)?,
                n => n,
            };
            if n == 0 {
                return Err(format!("a read at {position}, beyond the end"));
            }
            position += n as u64;
            out = &mut out[n..];
        }
        Ok(())
    }
}

unsafe extern "C" fn read(cookie: *mut c_void, position: u64, out: *mut c_void, bytes: u32) -> bool {
    // SAFETY: the cookie is the state of the open stream, and llama.cpp passes room for as many bytes. They may not be
    // initialised: they are only written.
    let (state, out) =
        unsafe { (&*cookie.cast::<Shared>(), std::slice::from_raw_parts_mut(out.cast::<u8>(), bytes as usize)) };
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    match catch_unwind(AssertUnwindSafe(|| state.read(position, out))) {
        Ok(Ok(())) => true,
        Ok(Err(message)) => {
            state.error.get_or_insert(message);
            false
        }
        Err(_) => false,
    }
}

/// Reserves inaccessible address space: it takes no memory, and the system commits none. [`release`] frees it.
pub(crate) fn reserve(bytes: usize) -> Option<*mut c_void> {
    hobbit_core::windows::reserve(bytes, false).ok().map(|base| base.as_ptr().cast())
}

/// Frees address space.
///
/// # Safety
/// `base` is from [`reserve`], and nothing uses the range any more.
pub(crate) unsafe fn release(base: *mut c_void, _bytes: usize) {
    if let Some(base) = NonNull::new(base) {
        // SAFETY: by the caller.
        unsafe { hobbit_core::windows::release(base.cast()) };
    }
}
