//! Declarations of `shim/grammar.cpp`.

use std::ffi::c_char;

use crate::llama::{llama_sampler, llama_token, llama_vocab};

unsafe extern "C" {
    /// `llama_sampler_init_grammar`, or `_lazy_patterns` where it is `lazy`, from the rule `root` on, that neither throws nor aborts and
    /// cannot be cloned. Null where llama.cpp refuses it, and where it could begin in so many ways that llama.cpp would take more
    /// than `limit` steps to find them; a message in `error` where it is known.
    pub fn hobbit_grammar_init(
        vocab: *const llama_vocab,
        text: *const c_char,
        lazy: bool,
        patterns: *const *const c_char,
        n_patterns: usize,
        tokens: *const llama_token,
        n_tokens: usize,
        limit: usize,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut llama_sampler;

    /// Whether llama.cpp takes at most `limit` steps for each character of a token to go on with it. Of a grammar that waits for its
    /// trigger it does.
    pub fn hobbit_grammar_can_follow(sampler: *const llama_sampler, token: llama_token, limit: usize) -> bool;
}
