// What adapters in C++ that are built with a tool's own sources have in common: flags, the clock, the line of JSON at the end.

#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace peer {

// A model, a text, the number of tokens to generate.
struct Task {
    std::string model;
    std::string prompt;
    int predict = 0;
    int threads = 0;
    int context = 0;
};

// The task from the command line; `take` is asked for flags of the tool's own, with their value, and says whether it is one.
inline Task task(int argc, char ** argv, const std::function<bool(const std::string &, const std::string &)> & take) {
    Task task;
    std::string prompt_file;
    for (int i = 1; i < argc; i += 2) {
        const std::string flag = argv[i];
        if (i + 1 == argc) {
            throw std::invalid_argument(flag + " lacks its value");
        }
        const std::string value = argv[i + 1];
        if (flag == "--model") {
            task.model = value;
        } else if (flag == "--prompt-file") {
            prompt_file = value;
        } else if (flag == "--predict") {
            task.predict = std::stoi(value);
        } else if (flag == "--threads") {
            task.threads = std::stoi(value);
        } else if (flag == "--context") {
            task.context = std::stoi(value);
        } else if (!take(flag, value)) {
            throw std::invalid_argument("unknown flag " + flag);
        }
    }
    if (task.model.empty() || prompt_file.empty() || task.predict < 1 || task.threads < 1) {
        throw std::invalid_argument("expected --model, --prompt-file, --predict and --threads, numbers from 1 on");
    }
    std::ifstream file(prompt_file, std::ios::binary);
    if (!file) {
        throw std::runtime_error("cannot read " + prompt_file);
    }
    task.prompt = {std::istreambuf_iterator<char>(file), {}};
    return task;
}

inline int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// What the adapter prints last; see the README. `token_ns` are the evaluations of all generated tokens but the last.
struct Result {
    std::string engine, version, command, text;
    int64_t load_ns = 0;
    int64_t prompt_tokens = 0;
    int64_t prompt_ns = 0;
    std::vector<int64_t> token_ns;
    std::vector<int32_t> tokens;
};

inline void print(const Result & result) {
    int64_t decode_ns = 0;
    for (const int64_t ns : result.token_ns) {
        decode_ns += ns;
    }
    nlohmann::ordered_json line = {
        {"engine", result.engine},
        {"version", result.version},
        {"command", result.command},
        {"load_ns", result.load_ns},
        {"prompt_tokens", result.prompt_tokens},
        {"prompt_ns", result.prompt_ns},
        {"decode_tokens", result.token_ns.size()},
        {"decode_ns", decode_ns},
        {"token_ns", result.token_ns},
        {"text", result.text},
    };
    if (!result.tokens.empty()) {
        line["tokens"] = result.tokens;
    }
    std::cout << line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << std::endl;
}

// Runs an adapter; what it throws becomes one line and an exit status.
inline int guarded(const char * name, const std::function<void()> & run) {
    try {
        run();
        return 0;
    } catch (const std::exception & error) {
        fprintf(stderr, "%s: %s\n", name, error.what());
        return 1;
    }
}

}  // namespace peer
