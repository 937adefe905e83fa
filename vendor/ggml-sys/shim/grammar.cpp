// llama.cpp's parser of grammars (llama_grammar_parser), and the patterns that activate them
// (llama_grammar_trigger_pattern). hobbit_core::grammar follows the rules: llama.cpp's own steps are not bounded.

#include "guard.h"

#include "llama-grammar.h"
#include "llama.h"

#include <climits>
#include <regex>
#include <string>

static_assert(sizeof(llama_grammar_element) == sizeof(hobbit_grammar_element) &&
                  offsetof(llama_grammar_element, value) == offsetof(hobbit_grammar_element, value),
              "see UPGRADE.md: elements of grammars changed");

struct hobbit_pattern : llama_grammar_trigger_pattern {};

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
            output(context, reinterpret_cast<const hobbit_grammar_element *>(rule.data()), rule.size());
        }
        return static_cast<int>(root->second);
    });
}

hobbit_pattern * hobbit_pattern_init(const char * pattern) {
    return guarded<hobbit_pattern *>(nullptr, 0, nullptr, [&] {
        return new hobbit_pattern{ { pattern, std::regex(pattern) } };
    });
}

size_t hobbit_pattern_find(const hobbit_pattern * pattern, const char * text, size_t len) {
    return guarded(nullptr, 0, std::string::npos, [&] { return pattern->find(std::string(text, len)); });
}

void hobbit_pattern_free(hobbit_pattern * pattern) {
    delete pattern;
}

} // extern "C"
