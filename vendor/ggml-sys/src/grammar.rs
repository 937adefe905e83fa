//! Declarations of `shim/grammar.cpp`.

use std::ffi::c_char;

use crate::llama::{llama_sampler, llama_token, llama_token_data_array, llama_vocab};

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

    /// Whether it waits for its trigger: it then allows any token.
    pub fn hobbit_grammar_is_asleep(sampler: *const llama_sampler) -> bool;

    /// What `llama_sampler_apply` does: tokens that the grammar does not allow get a logit of minus infinity. False where
    /// it would take more than some `limit` steps; some tokens are then masked and others not.
    pub fn hobbit_grammar_mask(
        sampler: *const llama_sampler,
        candidates: *mut llama_token_data_array,
        limit: usize,
    ) -> bool;

    /// `llama_sampler_accept` of a token that the grammar allows: 0. Nothing is done where llama.cpp would take more than `limit`
    /// steps for one of its characters, or of what it said since it waits for its trigger: 1. 2 where llama.cpp throws.
    pub fn hobbit_grammar_accept(sampler: *mut llama_sampler, token: llama_token, limit: usize) -> i32;
}
