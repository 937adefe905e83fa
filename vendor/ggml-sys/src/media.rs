//! Declarations of `shim/media.cpp`: llama.cpp's mtmd, guarded as in [`crate::shim`]. Where a call fails without a
//! message, mtmd has logged the reason.

use std::ffi::{c_char, c_int, c_void};

use crate::llama::{llama_model, llama_pos, mtmd_bitmap, mtmd_context, mtmd_input_chunk, mtmd_input_chunks};

/// Memory of an encoder's buffers.
#[repr(C)]
pub struct Memory {
    /// Bytes of buffers for which there is memory.
    pub seen: u64,
    /// Called before a larger buffer is touched, with its bytes. False refuses the medium.
    pub lend: unsafe extern "C" fn(lender: *mut c_void, bytes: u64) -> bool,
    /// The first argument of `lend`.
    pub lender: *mut c_void,
}

unsafe extern "C" {
    /// Reads a projector's header: bytes of its weights, and of the buffers for llama.cpp's warm-up; the largest number
    /// of tokens of an image (-1: of one size, or no images), and whether an image's tokens see each other.
    pub fn hobbit_media_needs(
        path: *const c_char,
        image_min_tokens: c_int,
        image_max_tokens: c_int,
        weights: *mut u64,
        compute: *mut u64,
        max_tokens: *mut i32,
        non_causal: *mut bool,
        error: *mut c_char,
        error_capacity: usize,
    ) -> bool;

    /// Guarded `mtmd_init_from_file`, on the CPU: null on failure. The context uses `memory` as long as it lives.
    pub fn hobbit_media_open(
        path: *const c_char,
        model: *const llama_model,
        n_threads: c_int,
        image_min_tokens: c_int,
        image_max_tokens: c_int,
        memory: *mut Memory,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut mtmd_context;

    /// Decodes an image of at most `pixels_max` pixels: null on failure.
    pub fn hobbit_media_image(
        bytes: *const u8,
        len: usize,
        pixels_max: u64,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut mtmd_bitmap;

    /// Decodes sound, WAV, MP3 or FLAC, of at most `seconds_max`: null on failure.
    pub fn hobbit_media_audio(
        ctx: *const mtmd_context,
        bytes: *const u8,
        len: usize,
        seconds_max: f64,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut mtmd_bitmap;

    /// Guarded `mtmd_tokenize_from_parts` of one bitmap: null on failure.
    pub fn hobbit_media_chunks(
        ctx: *const mtmd_context,
        bitmap: *const mtmd_bitmap,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut mtmd_input_chunks;

    /// Guarded `mtmd_encode_chunk`; writes the chunk's `n` numbers. False on failure.
    pub fn hobbit_media_encode(
        ctx: *mut mtmd_context,
        chunk: *const mtmd_input_chunk,
        embeddings: *mut f32,
        n: usize,
        error: *mut c_char,
        error_capacity: usize,
    ) -> bool;

    /// Writes the positions of a chunk that begins at position `first`: `[n_tokens]`, or `[4][n_tokens]` for a model
    /// with M-RoPE. False on failure.
    pub fn hobbit_media_positions(
        ctx: *const mtmd_context,
        chunk: *const mtmd_input_chunk,
        first: llama_pos,
        positions: *mut llama_pos,
        error: *mut c_char,
        error_capacity: usize,
    ) -> bool;
}
