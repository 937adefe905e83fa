// What neither llama.h nor ggml-backend-impl.h offers to C: exceptions turned into codes, failed assertions turned
// into errors, chat templates, memory sizes. Every function here is declared in ../src/shim.rs.

#include "chat.h"
#include "ggml-backend-impl.h"
#include "llama-ext.h"
#include "llama.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <unistd.h>

// The interface the Rust side was written against: a bump that changes it must not compile.
static_assert(GGML_BACKEND_API_VERSION == 3, "see UPGRADE.md: the backend interface changed");
static_assert(GGML_MAX_DIMS == 4 && GGML_MAX_SRC >= 10, "see UPGRADE.md: the tensor struct changed");

namespace {

// Depth of guarded calls on this thread in which a failed assertion may be thrown as an exception. Zero on worker
// threads and while a graph is computed: throwing through a parallel region is not defined.
thread_local int throwing_guards = 0;

struct throwing_guard {
    throwing_guard() { ++throwing_guards; }
    ~throwing_guard() { --throwing_guards; }
};

struct failed_assertion : std::exception {
    std::string message;
    explicit failed_assertion(const char * text) : message(text) {}
    const char * what() const noexcept override { return message.c_str(); }
};

void on_abort(const char * message) {
    if (throwing_guards > 0) {
        throw failed_assertion(message);
    }
    fprintf(stderr, "error: llama.cpp gave up: %s\n", message);
    fflush(stderr);
    fflush(stdout);
    _exit(1);
}

void put_error(char * error, size_t capacity, const char * message) {
    if (capacity > 0) {
        snprintf(error, capacity, "%s", message);
    }
}

} // namespace

extern "C" {

typedef void (*hobbit_text_callback)(void * context, const char * text, size_t len);

size_t hobbit_abi_sizes(size_t * sizes, size_t capacity) {
    const size_t known[] = {
        sizeof(ggml_tensor),
        sizeof(ggml_backend_buffer_type),
        sizeof(ggml_backend_buffer),
        sizeof(ggml_backend),
        sizeof(ggml_backend_device),
        sizeof(ggml_backend_reg),
        sizeof(llama_model_params),
        sizeof(llama_context_params),
        sizeof(llama_batch),
    };
    const size_t n = sizeof(known) / sizeof(known[0]);
    std::copy_n(known, std::min(n, capacity), sizes);
    return n;
}

void hobbit_guard_aborts() {
    ggml_set_abort_callback(on_abort);
}

llama_model * hobbit_model_load(void * file, llama_model_params params, char * error, size_t error_capacity) {
    try {
        throwing_guard guard;
        llama_model * model = llama_model_load_from_file_ptr(static_cast<FILE *>(file), params);
        if (model == nullptr) {
            put_error(error, error_capacity, "");
        }
        return model;
    } catch (const std::exception & e) {
        put_error(error, error_capacity, e.what());
        return nullptr;
    }
}

llama_model * hobbit_model_load_path(const char * path, llama_model_params params, char * error, size_t error_capacity) {
    try {
        throwing_guard guard;
        llama_model * model = llama_model_load_from_file(path, params);
        if (model == nullptr) {
            put_error(error, error_capacity, "");
        }
        return model;
    } catch (const std::exception & e) {
        put_error(error, error_capacity, e.what());
        return nullptr;
    }
}

llama_context * hobbit_context_init(llama_model * model, llama_context_params params, char * error, size_t error_capacity) {
    try {
        throwing_guard guard;
        llama_context * ctx = llama_init_from_model(model, params);
        if (ctx == nullptr) {
            put_error(error, error_capacity, "");
        }
        return ctx;
    } catch (const std::exception & e) {
        put_error(error, error_capacity, e.what());
        return nullptr;
    }
}

int hobbit_decode(llama_context * ctx, llama_batch batch, char * error, size_t error_capacity) {
    try {
        return llama_decode(ctx, batch);
    } catch (const std::exception & e) {
        put_error(error, error_capacity, e.what());
        return -100;
    }
}

int32_t hobbit_tokenize(const llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens,
                        int32_t n_tokens_max, bool add_special, bool parse_special, char * error, size_t error_capacity) {
    try {
        throwing_guard guard;
        return llama_tokenize(vocab, text, text_len, tokens, n_tokens_max, add_special, parse_special);
    } catch (const std::exception & e) {
        put_error(error, error_capacity, e.what());
        return INT32_MIN;
    }
}

llama_sampler * hobbit_sampler_init_dry(const llama_vocab * vocab, float multiplier, float base, int32_t allowed_length,
                                        int32_t penalty_last_n, const char ** breakers, size_t n_breakers) {
    try {
        throwing_guard guard;
        return llama_sampler_init_dry(vocab, multiplier, base, allowed_length, penalty_last_n, breakers, n_breakers);
    } catch (const std::exception &) {
        return nullptr;
    }
}

bool hobbit_memory_breakdown(const llama_context * ctx, ggml_backend_buffer_type_t excluded, size_t * model_bytes,
                             size_t * context_bytes, size_t * compute_bytes) {
    *model_bytes = *context_bytes = *compute_bytes = 0;
    try {
        for (const auto & [buft, data] : llama_get_memory_breakdown(ctx)) {
            if (buft == excluded) {
                continue;
            }
            *model_bytes   += data.model;
            *context_bytes += data.context;
            *compute_bytes += data.compute;
        }
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

bool hobbit_chat_render(const llama_model * model, const char * template_override, bool use_jinja,
                        bool add_generation_prompt, const char * const * roles, const char * const * contents,
                        size_t n_messages, hobbit_text_callback output, void * output_context, char * error,
                        size_t error_capacity) {
    try {
        throwing_guard guard;
        auto templates = common_chat_templates_init(model, template_override);
        common_chat_templates_inputs inputs;
        inputs.use_jinja             = use_jinja;
        inputs.add_generation_prompt = add_generation_prompt;
        for (size_t i = 0; i < n_messages; ++i) {
            common_chat_msg message;
            message.role    = roles[i];
            message.content = contents[i];
            inputs.messages.push_back(std::move(message));
        }
        const std::string prompt = common_chat_templates_apply(templates.get(), inputs).prompt;
        output(output_context, prompt.data(), prompt.size());
        return true;
    } catch (const std::exception & e) {
        put_error(error, error_capacity, e.what());
        return false;
    }
}

} // extern "C"
