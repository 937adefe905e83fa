//! Declarations of `shim/speculative.cpp`. `error` buffers receive a message where a call returns false or null.

use std::ffi::c_char;

use crate::llama::{llama_batch, llama_context, llama_model, llama_token};

/// llama.cpp's drafters (`common_speculative`) of one context.
#[repr(C)]
pub struct Speculative {
    _opaque: [u8; 0],
}

/// A request for drafts, and the answer.
#[repr(C)]
#[derive(Debug)]
pub struct DraftRequest {
    pub sequence: i32,
    /// Where `last` goes.
    pub position: i32,
    /// Most drafts, above 0.
    pub n_max: i32,
    /// The token that is evaluated next.
    pub last: llama_token,
    /// The text before it.
    pub tokens: *const llama_token,
    pub n_tokens: usize,
    /// Room for `n_max` drafts.
    pub drafts: *mut llama_token,
    /// Drafts that were written.
    pub n_drafts: usize,
}

unsafe extern "C" {
    /// `types` are llama.cpp's names, with commas between them; paths may be empty. Both contexts must outlive the
    /// result; `draft` may be null where no type needs it, and is the context for multi-token prediction with
    /// `draft-mtp`. `tells` as in [`crate::shim::hobbit_decode`], of the draft's context.
    pub fn hobbit_speculative_init(
        target: *mut llama_context,
        draft: *mut llama_context,
        types: *const c_char,
        n_max: i32,
        n_min: i32,
        p_min: f32,
        lookup_static: *const c_char,
        lookup_dynamic: *const c_char,
        n_sequences: u32,
        tells: bool,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut Speculative;

    pub fn hobbit_speculative_free(speculative: *mut Speculative);

    /// A text begins, or one that is not the last one continued.
    pub fn hobbit_speculative_begin(
        speculative: *mut Speculative,
        sequence: i32,
        tokens: *const llama_token,
        n_tokens: usize,
        error: *mut c_char,
        error_capacity: usize,
    ) -> bool;

    /// The target has evaluated a batch of tokens with positions, those of each sequence together. Only for
    /// `draft-mtp`.
    pub fn hobbit_speculative_process(
        speculative: *mut Speculative,
        batch: *const llama_batch,
        error: *mut c_char,
        error_capacity: usize,
    ) -> bool;

    /// Drafts for several sequences at once, each of which is asked for at most once.
    pub fn hobbit_speculative_draft(
        speculative: *mut Speculative,
        requests: *mut DraftRequest,
        n_requests: usize,
        error: *mut c_char,
        error_capacity: usize,
    ) -> bool;

    /// The first `n_accepted` of the last drafts of a sequence, which got some, are part of the text.
    pub fn hobbit_speculative_accept(
        speculative: *mut Speculative,
        sequence: i32,
        n_accepted: u16,
        error: *mut c_char,
        error_capacity: usize,
    ) -> bool;

    /// Whether the tokens of one model mean the same to the other (`common_speculative_are_compatible`).
    pub fn hobbit_vocabularies_agree(target: *const llama_model, draft: *const llama_model) -> bool;
}
