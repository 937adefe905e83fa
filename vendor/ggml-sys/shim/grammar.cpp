// llama.cpp's parser of grammars (llama_grammar_parser) and the patterns that wake them (llama_grammar_trigger_pattern). What a grammar
// allows is found elsewhere: llama.cpp's way of it has no end that it could be held to. Declared in ../src/grammar.rs.

#include "guard.h"

#include "llama-grammar.h"
#include "llama.h"

#include <climits>
#include <regex>
#include <string>

typedef void (*hobbit_rule_callback)(void * context, const llama_grammar_element * elements, size_t n);

extern "C" {

int hobbit_grammar_parse(const llama_vocab * vocab, const char * text, hobbit_rule_callback output, void * context) {
    return guarded(nullptr, 0, -1, [&] {
        llama_grammar_parser parser(vocab);
        if (!parser.parse(text) || parser.rules.empty()) {
            return -1;
        }
        const auto root = parser.symbol_ids.find("root");
        if (root == parser.symbol_ids.end() || root->second > INT_MAX) {
            return -2;
        }
        for (const auto & rule : parser.rules) {
            output(context, rule.data(), rule.size());
        }
        return static_cast<int>(root->second);
    });
}

llama_grammar_trigger_pattern * hobbit_pattern_init(const char * pattern) {
    return guarded<llama_grammar_trigger_pattern *>(nullptr, 0, nullptr, [&] {
        return new llama_grammar_trigger_pattern{ pattern, std::regex(pattern) };
    });
}

size_t hobbit_pattern_find(const llama_grammar_trigger_pattern * pattern, const char * text, size_t len) {
    return guarded(nullptr, 0, std::string::npos, [&] { return pattern->find(std::string(text, len)); });
}

void hobbit_pattern_free(llama_grammar_trigger_pattern * pattern) {
    delete pattern;
}

} // extern "C"
