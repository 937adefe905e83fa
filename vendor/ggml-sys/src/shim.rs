//! Declarations of `shim/shim.cpp`. Strings are NUL-terminated UTF-8; `error` buffers receive a message.

use std::ffi::{c_char, c_int, c_void};

use crate::llama::{
    ggml_backend_buffer_type_t, ggml_backend_t, ggml_cgraph, ggml_status, llama_adapter_lora, llama_batch,
    llama_context, llama_context_params, llama_model, llama_model_params, llama_sampler, llama_token, llama_vocab,
};

/// Called with text that the other side owns; `context` is what the caller passed in.
pub type TextCallback = unsafe extern "C" fn(context: *mut c_void, text: *const c_char, len: usize);

/// Called with a buffer type and bytes of weights, of KV cache and state, and of compute buffers.
pub type MemoryCallback = unsafe extern "C" fn(
    context: *mut c_void,
    buft: ggml_backend_buffer_type_t,
    model: usize,
    kv: usize,
    compute: usize,
);

unsafe extern "C" {
    /// Writes up to `capacity` struct sizes and returns how many there are.
    pub fn hobbit_abi_sizes(sizes: *mut usize, capacity: usize) -> usize;

    /// From now on a failed ggml assertion becomes an error of the guarded call it happened in, or, where there is
    /// none on that thread, a message on stderr and exit code 1. Never a core dump.
    pub fn hobbit_guard_aborts();

    /// `llama_model_load_from_file_ptr` that does not throw. Null and a message in `error` on failure.
    pub fn hobbit_model_load(
        file: *mut c_void,
        params: llama_model_params,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut llama_model;

    /// `llama_model_load_from_file` that does not throw. Null and a message in `error` on failure.
    pub fn hobbit_model_load_path(
        path: *const c_char,
        params: llama_model_params,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut llama_model;

    /// `llama_adapter_lora_init` that does not throw. Null and a message in `error` on failure; what was reserved by then is lost.
    pub fn hobbit_adapter_load(
        model: *mut llama_model,
        path: *const c_char,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut llama_adapter_lora;

    /// `llama_set_adapter_cvec` that does not throw: -1 then.
    pub fn hobbit_set_control_vector(
        ctx: *mut llama_context,
        data: *const f32,
        len: usize,
        n_embd: i32,
        first: i32,
        last: i32,
    ) -> i32;

    /// `llama_init_from_model` that does not throw. Null and a message in `error` on failure.
    pub fn hobbit_context_init(
        model: *mut llama_model,
        params: llama_context_params,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut llama_context;

    /// From now until the end of the guarded call on this thread, a failed assertion cannot become an error: llama.cpp
    /// has handed its graph to the backends.
    pub fn hobbit_computing();

    /// `llama_decode` that does not throw: -100 and a message in `error` where it would have. `tells`: a backend of the
    /// context calls [`hobbit_computing`] before each graph, so that until then failed assertions may become errors.
    pub fn hobbit_decode(
        ctx: *mut llama_context,
        batch: llama_batch,
        tells: bool,
        error: *mut c_char,
        error_capacity: usize,
    ) -> c_int;

    /// `llama_tokenize` that does not throw: `i32::MIN` and a message in `error` where it would have.
    pub fn hobbit_tokenize(
        vocab: *const llama_vocab,
        text: *const c_char,
        text_len: i32,
        tokens: *mut llama_token,
        n_tokens_max: i32,
        add_special: bool,
        parse_special: bool,
        error: *mut c_char,
        error_capacity: usize,
    ) -> i32;

    /// `llama_sampler_init_dry` that does not throw (it tokenises the breakers): null where it would have.
    pub fn hobbit_sampler_init_dry(
        vocab: *const llama_vocab,
        multiplier: f32,
        base: f32,
        allowed_length: i32,
        penalty_last_n: i32,
        breakers: *mut *const c_char,
        n_breakers: usize,
    ) -> *mut llama_sampler;

    /// `llama_sampler_accept` that neither throws nor aborts: false where it would have.
    pub fn hobbit_sampler_accept(sampler: *mut llama_sampler, token: llama_token) -> bool;

    /// Calls `output` for every buffer type in which llama.cpp holds memory for a context, with the bytes of weights,
    /// of KV cache and state, and of compute buffers.
    pub fn hobbit_memory_breakdown(
        ctx: *const llama_context,
        output: MemoryCallback,
        output_context: *mut c_void,
    ) -> bool;

    /// Starts computing the nodes `from..to` of a graph, which the scheduler has allocated. `cut`: the backend is shown
    /// nothing of the nodes before them but their results.
    pub fn hobbit_compute_nodes(
        backend: ggml_backend_t,
        graph: *mut ggml_cgraph,
        from: c_int,
        to: c_int,
        cut: bool,
    ) -> ggml_status;
}
