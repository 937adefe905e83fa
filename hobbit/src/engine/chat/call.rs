//! Calls of the shim that return a text or a message.

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use ggml_sys::shim::TextCallback;

use crate::engine::raw::text_of;

/// Room for a message from the shim, in bytes. Jinja errors quote the template around them.
const MESSAGE_BYTES: usize = 4096;

/// Calls a function that fills a message buffer on failure.
fn with_message<T>(call: impl FnOnce(*mut c_char, usize) -> Option<T>) -> Result<T, String> {
    let mut message = [0u8; MESSAGE_BYTES];
    call(message.as_mut_ptr().cast(), message.len()).ok_or_else(|| {
        let reason = text_of(&message);
        if reason.is_empty() { "llama.cpp gave no reason".to_owned() } else { reason }
    })
}

/// Calls a constructor of the shim.
pub(super) fn made(call: impl FnOnce(*mut c_char, usize) -> *mut c_void) -> Result<NonNull<c_void>, String> {
    with_message(|message, capacity| NonNull::new(call(message, capacity)))
}

/// Returns the text that the shim passes to a callback, or an error if `call` does not return `done`.
pub(super) fn text<T: PartialEq>(
    done: T,
    call: impl FnOnce(TextCallback, *mut c_void, *mut c_char, usize) -> T,
) -> Result<String, (T, String)> {
    let mut bytes: Vec<u8> = Vec::new();
    let mut returned = None;
    let ran = with_message(|message, capacity| {
        let code = call(on_text, (&raw mut bytes).cast(), message, capacity);
        let is_done = code == done;
        returned = Some(code);
        is_done.then_some(())
    });
    let returned = returned.unwrap_or(done);
    match ran {
        Ok(()) => String::from_utf8(bytes).map_err(|_| (returned, "llama.cpp's text is not UTF-8".to_owned())),
        Err(reason) => Err((returned, reason)),
    }
}

unsafe extern "C" fn on_text(bytes: *mut c_void, text: *const c_char, len: usize) {
    // SAFETY: `text` passes its vector; the shim passes `len` readable bytes.
    let (bytes, text) = unsafe { (&mut *bytes.cast::<Vec<u8>>(), std::slice::from_raw_parts(text.cast::<u8>(), len)) };
    // No panic may cross into C++.
    let _ = catch_unwind(AssertUnwindSafe(|| bytes.extend_from_slice(text)));
}
