//! Declarations of `shim/grammar.cpp`.

use std::ffi::{c_char, c_int, c_void};

use crate::llama::llama_vocab;

/// `llama_grammar_trigger_pattern`.
#[repr(C)]
pub struct Pattern {
    _opaque: [u8; 0],
}

/// `llama_grammar_element`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Element {
    /// `llama_gretype`.
    pub kind: u32,
    /// A character, a rule or a token.
    pub value: u32,
}

unsafe extern "C" {
    /// Parses a grammar as llama.cpp does and shows each of its rules, in order of their numbers. The number of the
    /// rule `root`; -1 where it cannot be parsed, -2 where it has no such rule.
    pub fn hobbit_grammar_parse(
        vocab: *const llama_vocab,
        text: *const c_char,
        output: unsafe extern "C" fn(context: *mut c_void, elements: *const Element, n: usize),
        context: *mut c_void,
    ) -> c_int;

    /// A regular expression (ECMAScript) that may wake a grammar. Null where it is none.
    pub fn hobbit_pattern_init(pattern: *const c_char) -> *mut Pattern;

    /// Where what a grammar has to go on with begins in a text: the first group that is not empty, or all that is
    /// found. `usize::MAX` where nothing is found.
    pub fn hobbit_pattern_find(pattern: *const Pattern, text: *const c_char, len: usize) -> usize;

    pub fn hobbit_pattern_free(pattern: *mut Pattern);
}
