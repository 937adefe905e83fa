//! Texts that pass between llama.cpp and us.

use std::ffi::{CStr, CString, c_char};
use std::path::Path;
use std::ptr::NonNull;

use super::error::Error;

/// Room for a message from the shim, in bytes.
pub(super) const MESSAGE_BYTES: usize = 1024;

/// Calls a function of the shim that fills a message buffer when it returns null.
pub(super) fn with_message<T>(call: impl FnOnce(*mut c_char, usize) -> *mut T) -> Result<NonNull<T>, String> {
    let mut message = [0u8; MESSAGE_BYTES];
    NonNull::new(call(message.as_mut_ptr().cast(), message.len())).ok_or_else(|| text_of(&message))
}

/// The text of a NUL-terminated message buffer.
pub(super) fn text_of(message: &[u8]) -> String {
    CStr::from_bytes_until_nul(message).map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
}

/// A path for C.
///
/// # Errors
/// A NUL byte in it.
pub(super) fn path_to_c(path: &Path) -> Result<CString, Error> {
    use std::os::unix::ffi::OsStrExt;
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::Load { path: path.to_owned(), reason: "its name contains a NUL byte".into() })
}
