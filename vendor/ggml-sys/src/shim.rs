//! Declarations of `shim/shim.cpp`. Strings are NUL-terminated UTF-8.
//!
//! A guarded function neither throws nor lets a failed assertion end the process: it returns what it returns on
//! failure, and puts a message into the `error` buffer, if it has one. A buffer that was empty stays so where llama.cpp
//! gives no reason.

use std::ffi::{c_char, c_int, c_void};

use crate::llama::{
    ggml_backend_buffer_type_t, ggml_backend_t, ggml_cgraph, ggml_status, llama_adapter_lora, llama_batch,
    llama_context, llama_context_params, llama_logit_bias, llama_model, llama_model_params, llama_sampler, llama_token,
    llama_token_data_array, llama_vocab,
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

    /// Guarded `llama_model_load_from_file_ptr`: null on failure.
    pub fn hobbit_model_load(
        file: *mut c_void,
        params: llama_model_params,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut llama_model;

    /// Guarded `llama_model_load_from_file`: null on failure.
    pub fn hobbit_model_load_path(
        path: *const c_char,
        params: llama_model_params,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut llama_model;

    /// Guarded `llama_adapter_lora_init`: null on failure; what was reserved by then is lost.
    pub fn hobbit_adapter_load(
        model: *mut llama_model,
        path: *const c_char,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut llama_adapter_lora;

    /// Guarded `llama_set_adapter_cvec`: -1 on failure.
    pub fn hobbit_set_control_vector(
        ctx: *mut llama_context,
        data: *const f32,
        len: usize,
        n_embd: i32,
        first: i32,
        last: i32,
    ) -> i32;

    /// Guarded `llama_init_from_model`: null on failure.
    pub fn hobbit_context_init(
        model: *mut llama_model,
        params: llama_context_params,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut llama_context;

    /// From now until the end of the guarded call on this thread, a failed assertion cannot become an error: llama.cpp
    /// has handed its graph to the backends.
    pub fn hobbit_computing();

    /// Guarded `llama_decode`: -100 on failure. `announces`: a backend of the context calls [`hobbit_computing`] before
    /// each graph, so that until then failed assertions may become errors.
    pub fn hobbit_decode(
        ctx: *mut llama_context,
        batch: llama_batch,
        announces: bool,
        error: *mut c_char,
        error_capacity: usize,
    ) -> c_int;

    /// Guarded `llama_memory_seq_rm`: 1 where the positions are forgotten, 0 where the model cannot forget a part, -1
    /// on failure.
    pub fn hobbit_memory_remove(
        ctx: *mut llama_context,
        sequence: i32,
        from: i32,
        to: i32,
        error: *mut c_char,
        error_capacity: usize,
    ) -> c_int;

    /// Guarded `llama_memory_seq_cp` of all positions: false on failure.
    pub fn hobbit_memory_copy(
        ctx: *mut llama_context,
        from: i32,
        to: i32,
        error: *mut c_char,
        error_capacity: usize,
    ) -> bool;

    /// Guarded `llama_memory_seq_add`: false on failure.
    pub fn hobbit_memory_move(
        ctx: *mut llama_context,
        sequence: i32,
        from: i32,
        to: i32,
        by: i32,
        error: *mut c_char,
        error_capacity: usize,
    ) -> bool;

    /// Guarded `llama_memory_seq_pos_min`: -1 on failure, as for an empty sequence.
    pub fn hobbit_memory_first(ctx: *mut llama_context, sequence: i32) -> i32;

    /// Guarded `llama_memory_seq_pos_max`: -1 on failure, as for an empty sequence.
    pub fn hobbit_memory_last(ctx: *mut llama_context, sequence: i32) -> i32;

    /// Guarded `llama_state_seq_get_size_ext`: 0 on failure. `partial`: of the memory that cannot be rewound alone.
    pub fn hobbit_state_size(
        ctx: *mut llama_context,
        sequence: i32,
        partial: bool,
        error: *mut c_char,
        error_capacity: usize,
    ) -> usize;

    /// Guarded `llama_state_seq_get_data_ext`: 0 on failure.
    pub fn hobbit_state_get(
        ctx: *mut llama_context,
        sequence: i32,
        partial: bool,
        bytes: *mut u8,
        n: usize,
        error: *mut c_char,
        error_capacity: usize,
    ) -> usize;

    /// Guarded `llama_state_seq_set_data_ext`: 0 on failure.
    pub fn hobbit_state_set(
        ctx: *mut llama_context,
        sequence: i32,
        partial: bool,
        bytes: *const u8,
        n: usize,
        error: *mut c_char,
        error_capacity: usize,
    ) -> usize;

    /// Guarded `llama_tokenize`: `i32::MIN` on failure.
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

    /// Guarded `llama_sampler_init_dry`, which tokenises the breakers: null on failure.
    pub fn hobbit_sampler_init_dry(
        vocab: *const llama_vocab,
        multiplier: f32,
        base: f32,
        allowed_length: i32,
        penalty_last_n: i32,
        breakers: *mut *const c_char,
        n_breakers: usize,
    ) -> *mut llama_sampler;

    /// Guarded `llama_sampler_init_penalties`: null on failure.
    pub fn hobbit_sampler_init_penalties(
        n_vocab: i32,
        last_n: i32,
        repeat: f32,
        frequency: f32,
        presence: f32,
    ) -> *mut llama_sampler;

    /// Guarded `llama_sampler_init_logit_bias`: null on failure.
    pub fn hobbit_sampler_init_logit_bias(n_vocab: i32, n: i32, biases: *const llama_logit_bias) -> *mut llama_sampler;

    /// Guarded `llama_sampler_accept`: false on failure.
    pub fn hobbit_sampler_accept(sampler: *mut llama_sampler, token: llama_token) -> bool;

    /// Guarded `llama_sampler_apply`: false on failure.
    pub fn hobbit_sampler_apply(
        sampler: *mut llama_sampler,
        candidates: *mut llama_token_data_array,
        error: *mut c_char,
        error_capacity: usize,
    ) -> bool;

    /// Guarded `llama_sampler_reset`: false on failure.
    pub fn hobbit_sampler_reset(sampler: *mut llama_sampler) -> bool;

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
