//! Regular expressions that wake a grammar.

use std::ffi::c_char;
use std::ptr::NonNull;

use ggml_sys::grammar as sys;

use super::c_text;
use crate::engine::error::Error;
use crate::engine::stack;

/// Stack for each byte of an expression: the C++ library reads it by calling itself.
const STACK_PER_BYTE: usize = 1 << 10;

pub(super) struct Pattern(NonNull<sys::Pattern>);

// SAFETY: it is memory without ties to a thread, and is not changed.
unsafe impl Send for Pattern {}

impl Pattern {
    /// # Errors
    /// [`Error::Grammar`] for what is no expression (ECMAScript).
    pub(super) fn new(text: &str) -> Result<Self, Error> {
        let pattern = c_text(text)?;
        // SAFETY: the text is NUL-terminated and outlives the call, which copies.
        let made = || NonNull::new(unsafe { sys::hobbit_pattern_init(pattern.as_ptr()) }).map(Self);
        stack::with_bytes(text.len() * STACK_PER_BYTE, made)
            .map_err(Error::Grammar)?
            .ok_or_else(|| Error::Grammar(format!("llama.cpp cannot parse the pattern that wakes it: {text}")))
    }

    /// Where what the grammar has to go on with begins, if the text wakes it.
    pub(super) fn find(&self, text: &[u8]) -> Option<usize> {
        // SAFETY: the pattern is live, the text valid for its length.
        let start = unsafe { sys::hobbit_pattern_find(self.0.as_ptr(), text.as_ptr().cast::<c_char>(), text.len()) };
        (start <= text.len()).then_some(start)
    }
}

impl Drop for Pattern {
    fn drop(&mut self) {
        // SAFETY: owned by us, freed once.
        unsafe { sys::hobbit_pattern_free(self.0.as_ptr()) };
    }
}
