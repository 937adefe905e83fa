// llama.cpp's drafters (common_speculative).

#include "guard.h"

#include "common.h"
#include "llama-ext.h"
#include "llama.h"
#include "log.h"
#include "speculative.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// The text and the drafts of one sequence, which common_speculative reads and fills in.
struct sequence_text {
    llama_tokens tokens;
    llama_tokens drafts;
};

// What EAGLE3 has of a sequence: the first position of the last batch and its number, and the position that it keeps.
struct last_batch {
    llama_pos first = 0;
    llama_pos n_rows = 0;
    llama_pos pending = -1;
};

} // namespace

struct hobbit_speculative {
    common_params_speculative  params;
    std::vector<sequence_text> sequences;
    common_batch               batch;
    common_speculative_ptr     drafters;
    // As in hobbit_decode, of the draft's context.
    bool                       announces;
    // The draft's context, if it reads the target's hidden states.
    llama_context *            follower = nullptr;
    // EAGLE3 keeps the last position of each sequence until it knows the token after it.
    bool                       is_late = false;
    std::vector<last_batch>    last;

    // Makes `position` the next one of a sequence in that context, which forgets what is in the way: llama.cpp refuses
    // positions that do not follow each other, except in an empty sequence. False if the draft does not know the
    // position before.
    bool follow(llama_seq_id sequence, llama_pos position) const {
        if (follower == nullptr) {
            return true;
        }
        const bool is_known = !is_late || last[sequence].pending == position - 1;
        const llama_pos next = is_late ? position - 1 : position;
        auto * memory = llama_get_memory(follower);
        const bool is_cut = llama_memory_seq_rm(memory, sequence, std::max(next, 0), -1);
        if (!is_known || !is_cut || llama_memory_seq_pos_max(memory, sequence) != next - 1) {
            llama_memory_seq_rm(memory, sequence, -1, -1);
        }
        return is_known;
    }
};

extern "C" {

hobbit_speculative * hobbit_speculative_init(llama_context * target, llama_context * draft, const char * types,
                                             int32_t n_max, int32_t n_min, float p_min, const char * lookup_static,
                                             const char * lookup_dynamic, uint32_t n_sequences, bool announces,
                                             char * error, size_t error_capacity) {
    return guarded<hobbit_speculative *>(error, error_capacity, nullptr, [&] {
        // `common` would write warnings to stderr by itself.
        common_log_set_verbosity_thold(-1);
        auto made = std::make_unique<hobbit_speculative>();
        // A lookup computes nothing.
        made->announces = announces || draft == nullptr;
        auto & params                           = made->params;
        params.types                            = common_speculative_types_from_names(string_split<std::string>(types, ','));
        params.draft.ctx_tgt                    = target;
        params.draft.ctx_dft                    = draft;
        params.draft.n_max                      = n_max;
        params.draft.n_min                      = n_min;
        params.draft.p_min                      = p_min;
        params.draft.backend_sampling           = false;
        params.ngram_cache.lookup_cache_static  = lookup_static;
        params.ngram_cache.lookup_cache_dynamic = lookup_dynamic;
        const auto has = [&](common_speculative_type type) {
            return std::count(params.types.begin(), params.types.end(), type) > 0;
        };
        made->is_late = has(COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3);
        if (made->is_late || has(COMMON_SPECULATIVE_TYPE_DRAFT_MTP) || has(COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH) ||
            has(COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK)) {
            made->follower = draft;
            made->batch    = common_batch(target);
        }
        made->last.resize(n_sequences);
        made->sequences.resize(n_sequences);
        made->drafters.reset(common_speculative_init(params, n_sequences));
        if (!made->drafters) {
            throw std::invalid_argument("no source of drafts");
        }
        if (has(COMMON_SPECULATIVE_TYPE_DRAFT_MTP)) {
            // The drafter has said which hidden states it wants, after the context reserved its buffers: qwen4exp's
            // graph differs then in a way that ggml's allocator does not see. This changes nothing, but makes the
            // context reserve them again.
            llama_set_embeddings_layer_inp(draft, 0, false);
        }
        return made.release();
    });
}

void hobbit_speculative_free(hobbit_speculative * speculative) {
    guarded(nullptr, 0, false, [&] {
        delete speculative;
        return true;
    });
}

bool hobbit_speculative_begin(hobbit_speculative * speculative, int32_t sequence, const llama_token * tokens,
                              size_t n_tokens, char * error, size_t error_capacity) {
    return guarded(error, error_capacity, false, [&] {
        auto & text = speculative->sequences.at(sequence);
        text.tokens.assign(tokens, tokens + n_tokens);
        common_speculative_begin(speculative->drafters.get(), sequence, text.tokens);
        return true;
    });
}

bool hobbit_speculative_process(hobbit_speculative * speculative, const llama_batch * batch, char * error,
                                size_t error_capacity) {
    return guarded(error, error_capacity, false, [&] {
        may_compute(speculative->announces);
        auto & own = speculative->batch;
        own.clear();
        std::vector<bool> seen(speculative->sequences.size());
        for (int32_t i = 0; i < batch->n_tokens; ++i) {
            const llama_seq_id sequence = batch->seq_id != nullptr ? batch->seq_id[i][0] : 0;
            auto & last = speculative->last.at(sequence);
            if (!seen.at(sequence)) {
                seen[sequence] = true;
                speculative->follow(sequence, batch->pos[i]);
                last.first  = batch->pos[i];
                last.n_rows = 0;
            }
            last.n_rows += 1;
            last.pending = batch->pos[i];
            own.add(batch->token[i], batch->pos[i], sequence, false);
        }
        if (!common_speculative_process(speculative->drafters.get(), own)) {
            throw std::runtime_error("the drafter cannot read the batch");
        }
        return true;
    });
}

bool hobbit_speculative_draft(hobbit_speculative * speculative, hobbit_draft_request * requests, size_t n_requests,
                              char * error, size_t error_capacity) {
    auto * drafters = speculative->drafters.get();
    const bool done = guarded(error, error_capacity, false, [&] {
        for (size_t i = 0; i < n_requests; ++i) {
            auto & request = requests[i];
            auto & text    = speculative->sequences.at(request.sequence);
            text.tokens.assign(request.tokens, request.tokens + request.n_tokens);
            text.drafts.clear();
            const bool is_known = speculative->follow(request.sequence, request.position);
            auto & params       = common_speculative_get_draft_params(drafters, request.sequence);
            params.drafting     = is_known;
            params.n_max    = request.n_max;
            params.pos0     = request.position;
            params.id_last  = request.last;
            params.prompt   = &text.tokens;
            params.result   = &text.drafts;
        }
        may_compute(speculative->announces);
        common_speculative_draft(drafters);
        for (size_t i = 0; i < n_requests; ++i) {
            auto & request   = requests[i];
            auto & drafts    = speculative->sequences[request.sequence].drafts;
            request.n_drafts = std::min(drafts.size(), (size_t) std::max(request.n_max, 0));
            std::copy_n(drafts.begin(), request.n_drafts, request.drafts);
        }
        return true;
    });
    if (!done) {
        for (size_t sequence = 0; sequence < speculative->sequences.size(); ++sequence) {
            common_speculative_get_draft_params(drafters, (llama_seq_id) sequence).drafting = false;
        }
    }
    return done;
}

bool hobbit_speculative_accept(hobbit_speculative * speculative, int32_t sequence, uint16_t n_accepted, char * error,
                               size_t error_capacity) {
    return guarded(error, error_capacity, false, [&] {
        auto & last = speculative->last.at(sequence);
        if (last.n_rows > 0) {
            last.pending = last.first + std::min<llama_pos>(n_accepted, last.n_rows - 1);
        }
        common_speculative_accept(speculative->drafters.get(), sequence, n_accepted);
        return true;
    });
}

bool hobbit_vocabularies_agree(const llama_model * target, const llama_model * draft) {
    return guarded(nullptr, 0, false, [&] { return common_speculative_are_compatible(target, draft); });
}

} // extern "C"
