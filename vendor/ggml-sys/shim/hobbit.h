// The shim's functions, for C++ and, through bindgen, for Rust. Strings are UTF-8, NUL-terminated unless their length
// is given.
//
// A guarded function neither throws nor lets a failed assertion end the process: it returns its value for failure, and
// puts a message into the `error` buffer, if it has one. The buffer stays as it was if llama.cpp gives no reason.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ggml-backend.h"
#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// Called with text that the other side owns; `context` is the caller's.
typedef void (*hobbit_text_callback)(void * context, const char * text, size_t len);

// shim.cpp

// Writes up to `capacity` struct sizes and returns how many there are.
size_t hobbit_abi_sizes(size_t * sizes, size_t capacity);

// From now on a failed ggml assertion becomes an error of the guarded call in which it happens. On a thread without
// such a call it is a message on stderr and exit code 1, never a core dump.
void hobbit_guard_aborts(void);

// From now until the end of the guarded call on this thread, a failed assertion cannot become an error: llama.cpp has
// handed its graph to the backends.
void hobbit_computing(void);

// Guarded `llama_model_load_from_file_ptr`: null on failure.
struct llama_model * hobbit_model_load(void * file, struct llama_model_params params, char * error,
                                       size_t error_capacity);

// Guarded `llama_model_load_from_file`: null on failure.
struct llama_model * hobbit_model_load_path(const char * path, struct llama_model_params params, char * error,
                                            size_t error_capacity);

// Guarded `llama_adapter_lora_init`: null on failure; memory reserved by then is lost.
struct llama_adapter_lora * hobbit_adapter_load(struct llama_model * model, const char * path, char * error,
                                                size_t error_capacity);

// Guarded `llama_set_adapter_cvec`: -1 on failure.
int32_t hobbit_set_control_vector(struct llama_context * ctx, const float * data, size_t len, int32_t n_embd,
                                  int32_t first, int32_t last);

// Guarded `llama_init_from_model`: null on failure.
struct llama_context * hobbit_context_init(struct llama_model * model, struct llama_context_params params, char * error,
                                           size_t error_capacity);

// Guarded `llama_decode`: -100 on failure. `announces`: a backend of the context calls hobbit_computing before each
// graph, so that until then failed assertions may become errors.
int hobbit_decode(struct llama_context * ctx, struct llama_batch batch, bool announces, char * error,
                  size_t error_capacity);

// Guarded `llama_memory_seq_rm`: 1 if the positions are forgotten, 0 if the model cannot forget a part, -1 on failure.
int hobbit_memory_remove(struct llama_context * ctx, int32_t sequence, int32_t from, int32_t to, char * error,
                         size_t error_capacity);

// Guarded `llama_memory_seq_cp` of all positions: false on failure.
bool hobbit_memory_copy(struct llama_context * ctx, int32_t from, int32_t to, char * error, size_t error_capacity);

// Guarded `llama_memory_seq_add`: false on failure.
bool hobbit_memory_move(struct llama_context * ctx, int32_t sequence, int32_t from, int32_t to, int32_t by,
                        char * error, size_t error_capacity);

// Guarded `llama_memory_seq_pos_min` and `_max`: -1 on failure, as for an empty sequence.
int32_t hobbit_memory_first(struct llama_context * ctx, int32_t sequence);
int32_t hobbit_memory_last(struct llama_context * ctx, int32_t sequence);

// Guarded `llama_state_seq_get_size_ext`, `_get_data_ext` and `_set_data_ext`: 0 on failure. `partial`: of the memory
// that cannot be rewound alone.
size_t hobbit_state_size(struct llama_context * ctx, int32_t sequence, bool partial, char * error,
                         size_t error_capacity);
size_t hobbit_state_get(struct llama_context * ctx, int32_t sequence, bool partial, uint8_t * bytes, size_t n,
                        char * error, size_t error_capacity);
size_t hobbit_state_set(struct llama_context * ctx, int32_t sequence, bool partial, const uint8_t * bytes, size_t n,
                        char * error, size_t error_capacity);

// Guarded `llama_tokenize`: INT32_MIN on failure.
int32_t hobbit_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, int32_t * tokens,
                        int32_t n_tokens_max, bool add_special, bool parse_special, char * error,
                        size_t error_capacity);

// Guarded `llama_sampler_init_dry` with breakers as sequences of tokens, which lie one after another: null on failure.
struct llama_sampler * hobbit_sampler_init_dry(float multiplier, float base, int32_t allowed_length,
                                               int32_t penalty_last_n, const int32_t * tokens, const size_t * lens,
                                               size_t n_sequences);

// Guarded `llama_sampler_init_penalties`: null on failure.
struct llama_sampler * hobbit_sampler_init_penalties(int32_t n_vocab, int32_t last_n, float repeat, float frequency,
                                                     float presence);

// Guarded `llama_sampler_init_logit_bias`: null on failure.
struct llama_sampler * hobbit_sampler_init_logit_bias(int32_t n_vocab, int32_t n, const llama_logit_bias * biases);

// Guarded `llama_sampler_accept`, `_apply` and `_reset`: false on failure.
bool hobbit_sampler_accept(struct llama_sampler * sampler, int32_t token);
bool hobbit_sampler_apply(struct llama_sampler * sampler, llama_token_data_array * candidates, char * error,
                          size_t error_capacity);
bool hobbit_sampler_reset(struct llama_sampler * sampler);

// Called with a buffer type and bytes of weights, of KV cache and state, and of compute buffers.
typedef void (*hobbit_memory_callback)(void * context, ggml_backend_buffer_type_t buft, size_t model, size_t kv,
                                       size_t compute);

// Calls `output` for every buffer type in which llama.cpp holds memory for a context.
bool hobbit_memory_breakdown(const struct llama_context * ctx, hobbit_memory_callback output, void * output_context);

// Starts computing the nodes `from..to` of a graph, which the scheduler has allocated. `cut`: of the nodes before them
// the backend sees only the results.
enum ggml_status hobbit_compute_nodes(ggml_backend_t backend, struct ggml_cgraph * graph, int from, int to, bool cut);

// Times that nodes read a tensor of a graph; if the graph is a part of another, nodes of the whole. -1 if unknown.
int32_t hobbit_n_uses(const struct ggml_cgraph * graph, const struct ggml_tensor * tensor);

// chat.cpp. Structs go in and out as JSON texts; each result comes in one call of `output`.

// Templates, and what llama.cpp finds out by running them. In: {source, source_tool_use, bos, eos, add_bos, add_eos},
// the texts of a model's templates and its BOS and EOS. Out: {source, source_tool_use, supports_thinking, capabilities:
// {name: bool}}.
bool hobbit_chat_describe(const char * templates, size_t templates_len, hobbit_text_callback output,
                          void * output_context, char * error, size_t error_capacity);

// `common_chat_templates_apply` with templates as above. In: the fields of `common_chat_templates_inputs`, of which
// `messages`, `tools` and `json_schema` are JSON texts within strings, and `template_kwargs` maps names to such texts.
// Out: the fields of `common_chat_params`, and `format_name`; `calls_grammar`, `calls_format` and `calls_parser` are
// for answers with tool calls, where the others are for answers by the schema. JSON must not be nested deeply: some of
// this recurses.
//
// 0, or 1 if the inputs cannot be read, 2 if the template fails on them.
int hobbit_chat_apply(const char * templates, size_t templates_len, const char * inputs, size_t inputs_len,
                      hobbit_text_callback output, void * output_context, char * error, size_t error_capacity);

// `json_schema_to_grammar` of a JSON text, as GBNF. JSON must not be nested deeply: this recurses.
bool hobbit_schema_grammar(const char * schema, size_t schema_len, hobbit_text_callback output, void * output_context,
                           char * error, size_t error_capacity);

// `common_chat_parser_params` from {format, parser, generation_prompt, reasoning_format, reasoning_in_content,
// parse_tool_calls, is_continuation, calls_format, calls_parser}. Null on failure.
struct hobbit_chat_parser;
struct hobbit_chat_parser * hobbit_chat_parser_init(const char * params, size_t params_len, char * error,
                                                    size_t error_capacity);
void hobbit_chat_parser_free(struct hobbit_chat_parser * parser);

// `common_chat_parse`, but the end of a text that is not partial is not held back: {content, reasoning_content,
// tool_calls: [{id, name, arguments}]}. Several threads may call it at once.
bool hobbit_chat_parse(const struct hobbit_chat_parser * parser, const char * text, size_t text_len, bool is_partial,
                       hobbit_text_callback output, void * output_context, char * error, size_t error_capacity);

// grammar.cpp

// `llama_grammar_element`: kind and value (a character, a rule or a token).
struct hobbit_grammar_element {
    uint32_t kind;
    uint32_t value;
};

typedef void (*hobbit_rule_callback)(void * context, const struct hobbit_grammar_element * elements, size_t n);

// Parses a grammar as llama.cpp does and shows each of its rules, in order of their numbers. Returns the number of the
// rule `root`; -1 if the text cannot be parsed, -2 if it has no such rule.
int hobbit_grammar_parse(const struct llama_vocab * vocab, const char * text, hobbit_rule_callback output,
                         void * context);

// `llama_grammar_trigger_pattern`.
struct hobbit_pattern;

// A regular expression (ECMAScript) that may activate a grammar; null if it is invalid.
struct hobbit_pattern * hobbit_pattern_init(const char * pattern);

// Start of the text that the grammar must match: the first group that is not empty, or the whole match. SIZE_MAX if
// nothing is found.
size_t hobbit_pattern_find(const struct hobbit_pattern * pattern, const char * text, size_t len);
void hobbit_pattern_free(struct hobbit_pattern * pattern);

// media.cpp: llama.cpp's mtmd, guarded. If a call fails without a message, mtmd has logged the reason.

struct mtmd_bitmap;
struct mtmd_context;
struct mtmd_input_chunk;
struct mtmd_input_chunks;

// Memory of an encoder's buffers.
struct hobbit_media_memory {
    // Bytes of buffers for which there is memory.
    uint64_t seen;
    // Called before a larger buffer is touched, with its bytes. False refuses the medium.
    bool (*lend)(void * lender, uint64_t bytes);
    void * lender;
};

// Reads a projector's header: bytes of its weights, and of the buffers for llama.cpp's warm-up; the largest number of
// tokens of an image (-1: of one size, or no images), and whether an image's tokens see each other.
bool hobbit_media_needs(const char * path, int image_min_tokens, int image_max_tokens, uint64_t * weights,
                        uint64_t * compute, int32_t * max_tokens, bool * non_causal, char * error,
                        size_t error_capacity);

// Guarded `mtmd_init_from_file`, on the CPU: null on failure. The context uses `memory` as long as it lives.
struct mtmd_context * hobbit_media_open(const char * path, const struct llama_model * model, int n_threads,
                                        int image_min_tokens, int image_max_tokens,
                                        struct hobbit_media_memory * memory, char * error, size_t error_capacity);

// Called before a medium is decoded, with the bytes that decoding and dividing it take at once. False refuses it.
struct hobbit_media_room {
    bool (*take)(void * taker, uint64_t bytes);
    void * taker;
};

// Limits of an image: all pixels, one side, and the longer side divided by the shorter one.
struct hobbit_image_limits {
    uint64_t pixels;
    uint32_t side;
    uint32_t aspect;
};

// Decodes an image: null on failure.
struct mtmd_bitmap * hobbit_media_image(const struct mtmd_context * ctx, const uint8_t * bytes, size_t len,
                                        struct hobbit_image_limits limits, struct hobbit_media_room room, char * error,
                                        size_t error_capacity);

// Decodes sound, WAV, MP3 or FLAC, of at most `seconds_max`: null on failure.
struct mtmd_bitmap * hobbit_media_audio(const struct mtmd_context * ctx, const uint8_t * bytes, size_t len,
                                        double seconds_max, struct hobbit_media_room room, char * error,
                                        size_t error_capacity);

// Bytes of an image's or sound's numbers in a chunk, as long as it waits to be encoded; 0 for a text or on failure.
uint64_t hobbit_media_chunk_bytes(const struct mtmd_input_chunk * chunk);

// Divides a medium into chunks: null on failure.
struct mtmd_input_chunks * hobbit_media_chunks(const struct mtmd_context * ctx, const struct mtmd_bitmap * bitmap,
                                               char * error, size_t error_capacity);

// Guarded `mtmd_encode_chunk`; writes the chunk's `n` numbers. False on failure.
bool hobbit_media_encode(struct mtmd_context * ctx, const struct mtmd_input_chunk * chunk, float * embeddings, size_t n,
                         char * error, size_t error_capacity);

// Writes the positions of a chunk that begins at position `first`: [n_tokens], or [4][n_tokens] for a model with
// M-RoPE. False on failure.
bool hobbit_media_positions(const struct mtmd_context * ctx, const struct mtmd_input_chunk * chunk, int32_t first,
                            int32_t * positions, char * error, size_t error_capacity);

// speculative.cpp

// llama.cpp's drafters (`common_speculative`) of one context.
struct hobbit_speculative;

// A request for drafts, and the answer.
struct hobbit_draft_request {
    int32_t sequence;
    // Position of `last`.
    int32_t position;
    // Maximum number of drafts, above 0.
    int32_t n_max;
    // The token that is evaluated next.
    int32_t last;
    // The text before it.
    const int32_t * tokens;
    size_t n_tokens;
    // Room for `n_max` drafts, and the number written.
    int32_t * drafts;
    size_t n_drafts;
};

// `types` are llama.cpp's names, separated by commas; paths may be empty. Both contexts outlive the result. `draft` may
// be null if no type needs it; for `draft-mtp` it is the context for multi-token prediction. `announces` as in
// hobbit_decode, of the draft's context.
struct hobbit_speculative * hobbit_speculative_init(struct llama_context * target, struct llama_context * draft,
                                                    const char * types, int32_t n_max, int32_t n_min, float p_min,
                                                    const char * lookup_static, const char * lookup_dynamic,
                                                    uint32_t n_sequences, bool announces, char * error,
                                                    size_t error_capacity);
void hobbit_speculative_free(struct hobbit_speculative * speculative);

// A text begins, or one that does not continue the last one.
bool hobbit_speculative_begin(struct hobbit_speculative * speculative, int32_t sequence, const int32_t * tokens,
                              size_t n_tokens, char * error, size_t error_capacity);

// The target has evaluated a batch of tokens with positions, those of each sequence together. Only for `draft-mtp`.
bool hobbit_speculative_process(struct hobbit_speculative * speculative, const struct llama_batch * batch, char * error,
                                size_t error_capacity);

// Drafts for several sequences at once, with at most one request for each.
bool hobbit_speculative_draft(struct hobbit_speculative * speculative, struct hobbit_draft_request * requests,
                              size_t n_requests, char * error, size_t error_capacity);

// The first `n_accepted` of the last drafts of a sequence, which got some, are part of the text.
bool hobbit_speculative_accept(struct hobbit_speculative * speculative, int32_t sequence, uint16_t n_accepted,
                               char * error, size_t error_capacity);

// Whether the tokens of one model mean the same to the other (`common_speculative_are_compatible`).
bool hobbit_vocabularies_agree(const struct llama_model * target, const struct llama_model * draft);

#ifdef _WIN32
// windows.cpp

// Bytes of a model's file. `out` may be left as it is where nothing uses the bytes. False ends loading.
typedef bool (*hobbit_stream_read)(void * cookie, uint64_t position, void * out, uint32_t bytes);

// A FILE* for llama_model_load_from_file_ptr: its header is in a file of this name (UTF-16), and `read` has all of its
// `length` bytes. Null if the file cannot be opened. The functions are for one thread at a time.
struct hobbit_stream * hobbit_stream_open(const uint16_t * header, uint64_t length, hobbit_stream_read read,
                                          void * cookie);
void * hobbit_stream_file(struct hobbit_stream * stream);
void hobbit_stream_close(struct hobbit_stream * stream);
#endif

// rpc.cpp (feature `rpc`)

// Clients may connect; a client has connected; it has disconnected.
enum hobbit_rpc_event { HOBBIT_RPC_LISTENING, HOBBIT_RPC_CONNECTED, HOBBIT_RPC_DISCONNECTED };
typedef void (*hobbit_rpc_callback)(void * context, enum hobbit_rpc_event event);

// Serves clients, one after the other, and calls `on_event` on the serving thread. `host` is an IPv4 address,
// `cache_dir` null or a directory that exists. Returns only on failure: an error code of the system, or 0 if there is
// none.
int hobbit_rpc_serve(const char * host, int port, const char * cache_dir, int n_threads, size_t n_devices,
                     ggml_backend_dev_t * devices, hobbit_rpc_callback on_event, void * context, char * error,
                     size_t error_capacity);

#ifdef __cplusplus
}
#endif
