// What neither llama.h nor ggml-backend-impl.h offers to C: exceptions turned into codes, failed assertions turned
// into errors, memory sizes.

#include "guard.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "llama-ext.h"
#include "llama.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>
#include <unistd.h>

// The interface the Rust side was written against: a bump that changes it must not compile.
static_assert(GGML_BACKEND_API_VERSION == 3, "see UPGRADE.md: the backend interface changed");
static_assert(GGML_MAX_DIMS == 4 && GGML_MAX_SRC >= 10, "see UPGRADE.md: the tensor struct changed");

namespace {

// Depth of guarded calls on this thread in which a failed assertion may be thrown as an exception. Zero on worker
// threads.
thread_local int throwing_guards = 0;
// The guarded call has handed a graph to the backends: throwing through a parallel region is not defined.
thread_local bool computing = false;

struct failed_assertion : std::exception {
    std::string message;
    explicit failed_assertion(const char * text) : message(text) {}
    const char * what() const noexcept override { return message.c_str(); }
};

void on_abort(const char * message) {
    if (throwing_guards > 0 && !computing) {
        throw failed_assertion(message);
    }
    // Without the directories of the machine that compiled it.
    const char * known = "/llama.cpp/";
    const char * file  = strstr(message, known);
    fprintf(stderr, "error: llama.cpp gave up: %s\n", file == nullptr ? message : file + strlen(known));
    if (strstr(message, "ggml-rpc") != nullptr) {
        fputs("An RPC server is gone, or does not answer as this version expects. Look at what it says, start it again "
              "(hobbit-rpc, or a ggml-rpc-server of the same version of llama.cpp), or leave it out of --rpc.\n", stderr);
    }
    if (strstr(message, "CUDA error") != nullptr) {
        fputs("A CUDA device failed or is out of memory. Look at its driver's log; give a larger --device-headroom or a "
              "smaller -ub, or leave it out with --device.\n", stderr);
    }
    fflush(stderr);
    fflush(stdout);
    _exit(1);
}

} // namespace

throwing_guard::throwing_guard() : before(computing) {
    ++throwing_guards;
    computing = false;
}

throwing_guard::~throwing_guard() {
    --throwing_guards;
    computing = before;
}

void may_compute(bool announces) {
    computing = !announces;
}

// Of llama-sampler.h, which is not public; llama.cpp's tests link to it.
llama_sampler * llama_sampler_init_dry_testing(float multiplier, float base, int32_t allowed_length,
                                               int32_t penalty_last_n,
                                               const std::vector<std::vector<llama_token>> & breakers);

extern "C" {

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
    return guarded<llama_model *>(error, error_capacity, nullptr, [&] {
        return llama_model_load_from_file_ptr(static_cast<FILE *>(file), params);
    });
}

llama_model * hobbit_model_load_path(const char * path, llama_model_params params, char * error, size_t error_capacity) {
    return guarded<llama_model *>(error, error_capacity, nullptr, [&] {
        return llama_model_load_from_file(path, params);
    });
}

llama_context * hobbit_context_init(llama_model * model, llama_context_params params, char * error, size_t error_capacity) {
    return guarded<llama_context *>(error, error_capacity, nullptr, [&] {
        return llama_init_from_model(model, params);
    });
}

llama_adapter_lora * hobbit_adapter_load(llama_model * model, const char * path, char * error, size_t error_capacity) {
    return guarded<llama_adapter_lora *>(error, error_capacity, nullptr, [&] {
        return llama_adapter_lora_init(model, path);
    });
}

int32_t hobbit_set_control_vector(llama_context * ctx, const float * data, size_t len, int32_t n_embd, int32_t first,
                                  int32_t last) {
    return guarded(nullptr, 0, -1, [&] { return llama_set_adapter_cvec(ctx, data, len, n_embd, first, last); });
}

void hobbit_computing() {
    computing = true;
}

int hobbit_decode(llama_context * ctx, llama_batch batch, bool announces, char * error, size_t error_capacity) {
    return guarded(error, error_capacity, -100, [&] {
        may_compute(announces);
        return llama_decode(ctx, batch);
    });
}

int hobbit_memory_remove(llama_context * ctx, llama_seq_id sequence, llama_pos from, llama_pos to, char * error,
                         size_t error_capacity) {
    return guarded(error, error_capacity, -1, [&] {
        return int(llama_memory_seq_rm(llama_get_memory(ctx), sequence, from, to));
    });
}

bool hobbit_memory_copy(llama_context * ctx, llama_seq_id from, llama_seq_id to, char * error, size_t error_capacity) {
    return guarded(error, error_capacity, false, [&] {
        llama_memory_seq_cp(llama_get_memory(ctx), from, to, -1, -1);
        return true;
    });
}

bool hobbit_memory_move(llama_context * ctx, llama_seq_id sequence, llama_pos from, llama_pos to, llama_pos by,
                        char * error, size_t error_capacity) {
    return guarded(error, error_capacity, false, [&] {
        llama_memory_seq_add(llama_get_memory(ctx), sequence, from, to, by);
        return true;
    });
}

llama_pos hobbit_memory_first(llama_context * ctx, llama_seq_id sequence) {
    return guarded(nullptr, 0, -1, [&] { return llama_memory_seq_pos_min(llama_get_memory(ctx), sequence); });
}

llama_pos hobbit_memory_last(llama_context * ctx, llama_seq_id sequence) {
    return guarded(nullptr, 0, -1, [&] { return llama_memory_seq_pos_max(llama_get_memory(ctx), sequence); });
}

static llama_state_seq_flags state_flags(bool partial) {
    return partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;
}

size_t hobbit_state_size(llama_context * ctx, llama_seq_id sequence, bool partial, char * error,
                         size_t error_capacity) {
    return guarded(error, error_capacity, size_t(0), [&] {
        return llama_state_seq_get_size_ext(ctx, sequence, state_flags(partial));
    });
}

size_t hobbit_state_get(llama_context * ctx, llama_seq_id sequence, bool partial, uint8_t * bytes, size_t n,
                        char * error, size_t error_capacity) {
    return guarded(error, error_capacity, size_t(0), [&] {
        return llama_state_seq_get_data_ext(ctx, bytes, n, sequence, state_flags(partial));
    });
}

size_t hobbit_state_set(llama_context * ctx, llama_seq_id sequence, bool partial, const uint8_t * bytes, size_t n,
                        char * error, size_t error_capacity) {
    return guarded(error, error_capacity, size_t(0), [&] {
        return llama_state_seq_set_data_ext(ctx, bytes, n, sequence, state_flags(partial));
    });
}

int32_t hobbit_tokenize(const llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens,
                        int32_t n_tokens_max, bool add_special, bool parse_special, char * error, size_t error_capacity) {
    return guarded(error, error_capacity, INT32_MIN, [&] {
        return llama_tokenize(vocab, text, text_len, tokens, n_tokens_max, add_special, parse_special);
    });
}

llama_sampler * hobbit_sampler_init_dry(float multiplier, float base, int32_t allowed_length, int32_t penalty_last_n,
                                        const llama_token * tokens, const size_t * lens, size_t n_sequences) {
    return guarded<llama_sampler *>(nullptr, 0, nullptr, [&] {
        if (n_sequences == 0) {
            return llama_sampler_init_dry(nullptr, multiplier, base, allowed_length, penalty_last_n, nullptr, 0);
        }
        std::vector<std::vector<llama_token>> breakers;
        breakers.reserve(n_sequences);
        for (size_t i = 0; i < n_sequences; ++i) {
            breakers.emplace_back(tokens, tokens + lens[i]);
            tokens += lens[i];
        }
        return llama_sampler_init_dry_testing(multiplier, base, allowed_length, penalty_last_n, breakers);
    });
}

llama_sampler * hobbit_sampler_init_penalties(int32_t n_vocab, int32_t last_n, float repeat, float frequency,
                                              float presence) {
    return guarded<llama_sampler *>(nullptr, 0, nullptr, [&] {
        return llama_sampler_init_penalties(n_vocab, last_n, repeat, frequency, presence);
    });
}

llama_sampler * hobbit_sampler_init_logit_bias(int32_t n_vocab, int32_t n, const llama_logit_bias * biases) {
    return guarded<llama_sampler *>(nullptr, 0, nullptr, [&] { return llama_sampler_init_logit_bias(n_vocab, n, biases); });
}

bool hobbit_sampler_accept(llama_sampler * sampler, llama_token token) {
    return guarded(nullptr, 0, false, [&] {
        llama_sampler_accept(sampler, token);
        return true;
    });
}

bool hobbit_sampler_apply(llama_sampler * sampler, llama_token_data_array * candidates, char * error,
                          size_t error_capacity) {
    return guarded(error, error_capacity, false, [&] {
        llama_sampler_apply(sampler, candidates);
        return true;
    });
}

bool hobbit_sampler_reset(llama_sampler * sampler) {
    return guarded(nullptr, 0, false, [&] {
        llama_sampler_reset(sampler);
        return true;
    });
}

bool hobbit_memory_breakdown(const llama_context * ctx, hobbit_memory_callback output, void * output_context) {
    return guarded(nullptr, 0, false, [&] {
        for (const auto & [buft, data] : llama_get_memory_breakdown(ctx)) {
            output(output_context, buft, data.model, data.context, data.compute);
        }
        return true;
    });
}

ggml_status hobbit_compute_nodes(ggml_backend_t backend, ggml_cgraph * graph, int from, int to, bool cut) {
    ggml_cgraph nodes = ggml_graph_view(graph, from, to);
    if (!cut) {
        return ggml_backend_graph_compute_async(backend, &nodes);
    }
    // A backend that sends graphs elsewhere follows sources to the graph's beginning: they are hidden while it looks.
    std::unordered_set<const ggml_tensor *> seen(nodes.nodes, nodes.nodes + nodes.n_nodes);
    std::vector<std::pair<ggml_tensor *, std::array<ggml_tensor *, GGML_MAX_SRC>>> hidden;
    const auto hide = [&](ggml_tensor * tensor) {
        for (; tensor != nullptr && seen.insert(tensor).second; tensor = tensor->view_src) {
            std::array<ggml_tensor *, GGML_MAX_SRC> sources;
            std::copy_n(tensor->src, GGML_MAX_SRC, sources.begin());
            hidden.emplace_back(tensor, sources);
            std::fill_n(tensor->src, GGML_MAX_SRC, nullptr);
        }
    };
    for (int i = 0; i < nodes.n_nodes; ++i) {
        hide(nodes.nodes[i]->view_src);
        for (ggml_tensor * source : nodes.nodes[i]->src) {
            hide(source);
        }
    }
    const ggml_status status = ggml_backend_graph_compute_async(backend, &nodes);
    for (auto & [tensor, sources] : hidden) {
        std::copy_n(sources.begin(), GGML_MAX_SRC, tensor->src);
    }
    return status;
}

int32_t hobbit_n_uses(const ggml_cgraph * graph, const ggml_tensor * tensor) {
    const ggml_hash_set & seen = graph->visited_hash_set;
    if (seen.size == 0 || graph->use_counts == nullptr) {
        return -1;
    }
    const size_t place = ggml_hash_find(&seen, tensor);
    const bool is_known = place != GGML_HASHSET_FULL && ggml_bitset_get(seen.used, place);
    return is_known ? graph->use_counts[place] : -1;
}

} // extern "C"
