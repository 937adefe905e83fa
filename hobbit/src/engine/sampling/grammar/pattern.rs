//! Regular expressions that trigger a grammar.

use std::ffi::c_char;
use std::ptr::NonNull;

use ggml_sys::grammar as sys;

use super::c_text;
use crate::engine::error::Error;
use crate::engine::stack;

/// Stack per byte of an expression: the C++ library parses it recursively.
const STACK_PER_BYTE: usize = 1 << 10;

pub(super) struct Pattern(NonNull<sys::Pattern>);

// SAFETY: memory without ties to a thread, immutable after its construction.
unsafe impl Send for Pattern {}

impl Pattern {
    /// # Errors
    /// [`Error::Grammar`] for an invalid expression (ECMAScript).
    pub(super) fn new(text: &str) -> Result<Self, Error> {
        let pattern = c_text(text)?;
        // SAFETY: the text is NUL-terminated and outlives the call, which copies.
        let made = || NonNull::new(unsafe { sys::hobbit_pattern_init(pattern.as_ptr()) }).map(Self);
        stack::with_bytes(text.len() * STACK_PER_BYTE, made)
            .map_err(Error::Grammar)?
            .ok_or_else(|| Error::Grammar(format!("llama.cpp cannot parse the pattern that wakes it: {text}")))
    }

    /// Start of the text that the grammar must match, if `text` contains the trigger.
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
