// One prompt, greedily, through ik_llama.cpp's library, as its llama-cli does it with --prefetch-experts --defer-experts:
// which tells no time of a single token.
//
// A flag beside an adapter's: --prefetch N, threads that read ahead; 0: as many as the tool likes, -1: none.

#include <algorithm>
#include <sstream>

#include "llama.h"
#include "peer.hpp"

namespace {

void only_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

std::vector<llama_token> tokenize(const llama_model * model, const std::string & text) {
    std::vector<llama_token> tokens(text.size() + 8);
    const int n = llama_tokenize(model, text.data(), text.size(), tokens.data(), tokens.size(), true, true);
    if (n < 1) {
        throw std::runtime_error("the prompt has no tokens");
    }
    tokens.resize(n);
    return tokens;
}

std::string piece(const llama_model * model, llama_token token) {
    std::string text(256, '\0');
    text.resize(std::max(0, llama_token_to_piece(model, token, text.data(), text.size(), 0, false)));
    return text;
}

// Tokens that end generating get no chance.
llama_token likeliest(const llama_model * model, const float * logits) {
    llama_token best = -1;
    for (llama_token token = 0; token < llama_n_vocab(model); ++token) {
        if (!llama_token_is_eog(model, token) && (best < 0 || logits[token] > logits[best])) {
            best = token;
        }
    }
    return best;
}

void run(int argc, char ** argv) {
    int prefetch = 0;
    const peer::Task task = peer::task(argc, argv, [&](const std::string & flag, const std::string & value) {
        if (flag == "--prefetch") {
            prefetch = std::stoi(value);
        }
        return flag == "--prefetch";
    });
    const int64_t begun = peer::now_ns();
    llama_log_set(only_errors, nullptr);
    llama_backend_init();

    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    model_params.use_mmap = true;
    model_params.defer_experts = true;
    llama_model * model = llama_model_load_from_file(task.model.c_str(), model_params);
    if (model == nullptr) {
        throw std::runtime_error("ik_llama.cpp does not load " + task.model);
    }
    std::vector<llama_token> prompt = tokenize(model, task.prompt);

    llama_context_params params = llama_context_default_params();
    params.n_ctx = task.context > 0 ? task.context : prompt.size() + task.predict + 8;
    params.n_threads = task.threads;
    params.n_threads_batch = task.threads;
    params.prefetch_experts = prefetch >= 0;
    params.prefetch_experts_threads = std::max(prefetch, 0);
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) {
        throw std::runtime_error("ik_llama.cpp makes no context");
    }
    peer::Result result;
    const int64_t loaded = peer::now_ns();
    result.load_ns = loaded - begun;

    int position = 0;
    const auto evaluate = [&](llama_token * tokens, int n) {
        const int step = llama_n_batch(context);
        for (int i = 0; i < n; i += step) {
            const int now = std::min(step, n - i);
            if (const int code = llama_decode(context, llama_batch_get_one(tokens + i, now, position, 0))) {
                throw std::runtime_error("llama_decode answers " + std::to_string(code));
            }
            position += now;
        }
        return likeliest(model, llama_get_logits_ith(context, -1));
    };

    // The first token comes out of the prompt's evaluation; the last one is never evaluated.
    result.tokens = {evaluate(prompt.data(), prompt.size())};
    result.text = piece(model, result.tokens.back());
    int64_t last = peer::now_ns();
    result.prompt_ns = last - loaded;
    while (int(result.tokens.size()) < task.predict) {
        llama_token token = result.tokens.back();
        result.tokens.push_back(evaluate(&token, 1));
        result.text += piece(model, result.tokens.back());
        const int64_t at = peer::now_ns();
        result.token_ns.push_back(at - last);
        last = at;
    }
    result.prompt_tokens = prompt.size();
    result.engine = "ik-llama-cpp-prefetch";
    result.version = PEER_VERSION;
    std::ostringstream words;
    words << "-t " << task.threads << " --temp 0 --ignore-eos --no-warmup --defer-experts";
    if (prefetch >= 0) {
        words << " --prefetch-experts --prefetch-experts-threads " << prefetch;
    }
    result.command = words.str();
    peer::print(result);
    llama_free(context);
    llama_free_model(model);
}

}  // namespace

int main(int argc, char ** argv) {
    return peer::guarded("ik-llama-cpp-prefetch", [&] { run(argc, argv); });
}
