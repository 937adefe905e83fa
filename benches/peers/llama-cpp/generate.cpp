// One prompt, greedily, through llama.cpp's library, as llama-completion does it:
//
//     llama-completion -m MODEL -bf PROMPT -n N -c CONTEXT -t THREADS --temp 0 --ignore-eos -no-cnv --no-warmup and
//     --no-escape
//
// It exists because llama-completion tells no token ids and no time of a single token, and may end before its output is
// written (common/log.cpp: "may cause logs to be lost if not flushed before the program exits").
//
// Flags beside an adapter's: --name NAME, --no-repack (no copies of weights in other layouts).

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama.h"
#include "nlohmann/json.hpp"

namespace {

struct Flags {
    std::string name = "llama-cpp";
    std::string model;
    std::string prompt_file;
    int predict = 0;
    int threads = 0;
    int context = 0;
    bool repack = true;
};

Flags parse(int argc, char ** argv) {
    Flags flags;
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        if (flag == "--no-repack") {
            flags.repack = false;
            continue;
        }
        if (++i == argc) {
            throw std::invalid_argument(flag + " lacks its value");
        }
        const std::string value = argv[i];
        if (flag == "--name") {
            flags.name = value;
        } else if (flag == "--model") {
            flags.model = value;
        } else if (flag == "--prompt-file") {
            flags.prompt_file = value;
        } else if (flag == "--predict") {
            flags.predict = std::stoi(value);
        } else if (flag == "--threads") {
            flags.threads = std::stoi(value);
        } else if (flag == "--context") {
            flags.context = std::stoi(value);
        } else {
            throw std::invalid_argument("unknown flag " + flag);
        }
    }
    if (flags.model.empty() || flags.prompt_file.empty() || flags.predict < 1 || flags.threads < 1) {
        throw std::invalid_argument("expected --model, --prompt-file, --predict and --threads, numbers from 1 on");
    }
    return flags;
}

std::string describe(const Flags & flags) {
    std::ostringstream words;
    words << "-t " << flags.threads << " -lm mmap --temp 0 --ignore-eos --no-warmup";
    words << (flags.repack ? "" : " --no-repack");
    return words.str();
}

int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void only_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

std::vector<llama_token> tokenize(const llama_vocab * vocab, const std::string & text) {
    std::vector<llama_token> tokens(text.size() + 8);
    const int n = llama_tokenize(vocab, text.data(), text.size(), tokens.data(), tokens.size(), true, true);
    if (n < 1) {
        throw std::runtime_error("the prompt has no tokens");
    }
    tokens.resize(n);
    return tokens;
}

std::string piece(const llama_vocab * vocab, llama_token token) {
    std::string text(256, '\0');
    text.resize(std::max(0, llama_token_to_piece(vocab, token, text.data(), text.size(), 0, false)));
    return text;
}

// Tokens that end generating get no chance, as with --ignore-eos.
llama_token likeliest(const llama_vocab * vocab, const float * logits) {
    llama_token best = LLAMA_TOKEN_NULL;
    for (llama_token token = 0; token < llama_vocab_n_tokens(vocab); ++token) {
        if (!llama_vocab_is_eog(vocab, token) && (best == LLAMA_TOKEN_NULL || logits[token] > logits[best])) {
            best = token;
        }
    }
    return best;
}

void run(const Flags & flags) {
    std::ifstream file(flags.prompt_file, std::ios::binary);
    if (!file) {
        throw std::runtime_error("cannot read " + flags.prompt_file);
    }
    const std::string text{std::istreambuf_iterator<char>(file), {}};

    const int64_t begun = now_ns();
    llama_log_set(only_errors, nullptr);
    llama_backend_init();

    llama_model_params model_params = llama_model_default_params();
    model_params.load_mode = LLAMA_LOAD_MODE_MMAP;
    model_params.use_extra_bufts = flags.repack;
    model_params.n_gpu_layers = 0;
    llama_model * model = llama_model_load_from_file(flags.model.c_str(), model_params);
    if (model == nullptr) {
        throw std::runtime_error("llama.cpp does not load " + flags.model);
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    std::vector<llama_token> prompt = tokenize(vocab, text);

    llama_context_params params = llama_context_default_params();
    params.n_ctx = flags.context > 0 ? flags.context : prompt.size() + flags.predict + 8;
    params.n_threads = flags.threads;
    params.n_threads_batch = flags.threads;
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) {
        throw std::runtime_error("llama.cpp makes no context");
    }
    const int64_t loaded = now_ns();

    const auto evaluate = [&](llama_token * tokens, int n) {
        const int step = llama_n_batch(context);
        for (int i = 0; i < n; i += step) {
            if (const int code = llama_decode(context, llama_batch_get_one(tokens + i, std::min(step, n - i)))) {
                throw std::runtime_error("llama_decode answers " + std::to_string(code));
            }
        }
        return likeliest(vocab, llama_get_logits_ith(context, -1));
    };

    // The first token comes out of the prompt's evaluation; the last one is never evaluated.
    std::vector<llama_token> tokens = {evaluate(prompt.data(), prompt.size())};
    std::string generated = piece(vocab, tokens.back());
    const int64_t prompted = now_ns();
    int64_t last = prompted;
    std::vector<int64_t> token_ns;
    while (int(tokens.size()) < flags.predict) {
        llama_token token = tokens.back();
        tokens.push_back(evaluate(&token, 1));
        generated += piece(vocab, tokens.back());
        const int64_t at = now_ns();
        token_ns.push_back(at - last);
        last = at;
    }

    const nlohmann::ordered_json result = {
        {"engine", flags.name},
        {"version", PEER_VERSION},
        {"command", describe(flags)},
        {"load_ns", loaded - begun},
        {"prompt_tokens", prompt.size()},
        {"prompt_ns", prompted - loaded},
        {"decode_tokens", token_ns.size()},
        {"decode_ns", last - prompted},
        {"token_ns", token_ns},
        {"tokens", tokens},
        {"text", generated},
    };
    std::cout << result.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << std::endl;
    llama_free(context);
    llama_model_free(model);
}

}  // namespace

int main(int argc, char ** argv) {
    try {
        run(parse(argc, argv));
    } catch (const std::exception & error) {
        fprintf(stderr, "llama-cpp: %s\n", error.what());
        return 1;
    }
}
