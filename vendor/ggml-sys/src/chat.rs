//! Declarations of `shim/chat.cpp`. Strings are UTF-8; `error` buffers receive a message. Texts that go in and out in
//! place of structs are JSON; what comes out is given to `output` in one call.

use std::ffi::{c_char, c_int, c_void};

use crate::llama::{llama_sampler, llama_token, llama_vocab};
use crate::shim::TextCallback;

/// `REASONING_BUDGET_IDLE`: no reasoning yet.
pub const HOBBIT_REASONING_IDLE: c_int = 0;
/// `REASONING_BUDGET_DONE`: the reasoning has ended.
pub const HOBBIT_REASONING_DONE: c_int = 4;

unsafe extern "C" {
    /// Templates and what llama.cpp finds out by running them. In: `{source, source_tool_use, bos, eos, add_bos,
    /// add_eos}`, the texts of a model's templates (or one in their place, and none for tools) and what it says of BOS
    /// and EOS. Out: `{source, source_tool_use, supports_thinking, capabilities: {name: bool}}`.
    pub fn hobbit_chat_describe(
        templates: *const c_char,
        templates_len: usize,
        output: TextCallback,
        output_context: *mut c_void,
        error: *mut c_char,
        error_capacity: usize,
    ) -> bool;

    /// `common_chat_templates_apply` with templates as above. In: the fields of `common_chat_templates_inputs`, of
    /// which `messages`, `tools` and `json_schema` are JSON texts within strings, and `template_kwargs` maps names to
    /// such texts. Out: the fields of `common_chat_params`, and `format_name`. JSON must not be nested deeply: some of
    /// this is recursive.
    ///
    /// 0, or 1 where the inputs are none, 2 where the template fails on them.
    pub fn hobbit_chat_apply(
        templates: *const c_char,
        templates_len: usize,
        inputs: *const c_char,
        inputs_len: usize,
        output: TextCallback,
        output_context: *mut c_void,
        error: *mut c_char,
        error_capacity: usize,
    ) -> c_int;

    /// `common_chat_parser_params` from `{format, parser, generation_prompt, reasoning_format, reasoning_in_content,
    /// parse_tool_calls, is_continuation}`. Null and a message in `error` on failure.
    pub fn hobbit_chat_parser_init(
        params: *const c_char,
        params_len: usize,
        error: *mut c_char,
        error_capacity: usize,
    ) -> *mut c_void;

    /// Frees what [`hobbit_chat_parser_init`] made.
    pub fn hobbit_chat_parser_free(parser: *mut c_void);

    /// `common_chat_parse`: `{content, reasoning_content, tool_calls: [{id, name, arguments}]}`. May be called from
    /// several threads at once.
    pub fn hobbit_chat_parse(
        parser: *const c_void,
        text: *const c_char,
        text_len: usize,
        is_partial: bool,
        output: TextCallback,
        output_context: *mut c_void,
        error: *mut c_char,
        error_capacity: usize,
    ) -> bool;

    /// `common_reasoning_budget_init` with one start sequence, and `n_ends` ends that lie in `ends` one after the
    /// other. Null on failure. Freed as other samplers are.
    pub fn hobbit_reasoning_budget_init(
        vocab: *const llama_vocab,
        start: *const llama_token,
        n_start: usize,
        ends: *const llama_token,
        end_lens: *const usize,
        n_ends: usize,
        forced: *const llama_token,
        n_forced: usize,
        budget: i32,
    ) -> *mut llama_sampler;

    /// One of the states above.
    pub fn hobbit_reasoning_budget_state(sampler: *const llama_sampler) -> c_int;

    /// Writes at most `capacity` tokens of the sequence that ended the reasoning, and returns how many it has (0:
    /// none).
    pub fn hobbit_reasoning_budget_end_match(
        sampler: *const llama_sampler,
        tokens: *mut llama_token,
        capacity: usize,
    ) -> usize;

    /// Ends the reasoning now; false if there is none.
    pub fn hobbit_reasoning_budget_force(sampler: *mut llama_sampler) -> bool;
}
