// llama.cpp's grammar sampler (llama_sampler_init_grammar), with what it holds in sight: a grammar that could go on in very many
// ways at once is refused before llama.cpp follows it, which nothing could interrupt. Declared in ../src/grammar.rs.

#include "grammar_mask.h"
#include "grammar_stacks.h"
#include "guard.h"

#include "llama-grammar.h"
#include "llama-vocab.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace grammars;

// What llama.cpp takes to find out whether a rule begins with itself (llama_grammar_detect_left_recursion): it goes through the
// rules that a rule may begin with, again for every place where one stands, by calling itself.
struct beginnings {
    const llama_grammar_rules & rules;
    // The calls for each rule and all below it, and how deep they go; 0 while unknown.
    std::vector<size_t> calls = std::vector<size_t>(rules.size());
    std::vector<size_t> depths = std::vector<size_t>(rules.size());

    static constexpr size_t deepest = 2000;

    explicit beginnings(const llama_grammar_rules & rules) : rules(rules) {}

    static bool may_be_empty(const llama_grammar_rule & rule) {
        bool starts = true;
        for (const element & at : rule) {
            if (ends(&at) && starts) {
                return true;
            }
            starts = ends(&at);
        }
        return false;
    }

    std::vector<size_t> first_rules(const llama_grammar_rule & rule) const {
        std::vector<size_t> found;
        bool                is_first = true;
        for (const element & at : rule) {
            if (at.type == LLAMA_GRETYPE_RULE_REF && is_first) {
                found.push_back(at.value);
                is_first = may_be_empty(rules[at.value]);
            } else {
                is_first = ends(&at);
            }
        }
        return found;
    }

    // Whether that is bearable. A rule that begins with itself is not.
    bool are_few(size_t limit) {
        struct visit {
            size_t              rule;
            std::vector<size_t> below;
            size_t              next;
        };
        std::vector<bool> open(rules.size());
        size_t            total = 0;
        for (size_t root = 0; root < rules.size(); ++root) {
            std::vector<visit> path;
            const auto enter = [&](size_t rule) {
                open[rule] = true;
                path.push_back({ rule, first_rules(rules[rule]), 0 });
            };
            if (calls[root] == 0) {
                enter(root);
            }
            while (!path.empty()) {
                visit & at = path.back();
                if (at.next < at.below.size()) {
                    const size_t rule = at.below[at.next++];
                    if (open[rule]) {
                        return false;
                    }
                    if (calls[rule] == 0) {
                        enter(rule);
                    }
                    continue;
                }
                size_t sum = 1 + rules[at.rule].size(), depth = 0;
                for (const size_t rule : at.below) {
                    sum   = std::min(limit + 1, sum + calls[rule]);
                    depth = std::max(depth, depths[rule]);
                }
                calls[at.rule]  = sum;
                depths[at.rule] = depth + 1;
                open[at.rule]   = false;
                if (sum > limit || depth >= deepest) {
                    return false;
                }
                path.pop_back();
            }
            total = std::min(limit + 1, total + calls[root]);
        }
        return total <= limit;
    }
};

// Whether a grammar can go on with a text in at most so many steps for each character.
bool can_follow(const llama_grammar & grammar, const std::string & text, size_t limit) {
    std::vector<uint32_t> characters;
    decode(text, grammar.partial_utf8, characters);
    stacks now(grammar.stacks.begin(), grammar.stacks.end());
    for (const uint32_t character : characters) {
        steps  own = { limit };
        stacks next;
        for (const stack & from : now) {
            if (from.empty() || is_token(from.back()) || !match(from.back(), character).first) {
                continue;
            }
            if (!own.advance(grammar.rules, after(from), next)) {
                return false;
            }
        }
        now = std::move(next);
    }
    return true;
}

// Where what wakes a grammar begins in a text; npos where nothing does.
size_t found_by_patterns(const llama_grammar & grammar, const std::string & text) {
    for (const auto & pattern : grammar.trigger_patterns) {
        if (const size_t start = pattern.find(text); start != std::string::npos) {
            return start;
        }
    }
    return std::string::npos;
}

// The grammar and how it began.
struct grammar_sampler {
    std::unique_ptr<llama_grammar, void (*)(llama_grammar *)> grammar;
    llama_grammar_stacks                                      first;
};

grammar_sampler & of(const llama_sampler * sampler) {
    return *static_cast<grammar_sampler *>(sampler->ctx);
}

const char * name_of(const llama_sampler *) {
    return "grammar";
}

void accept(llama_sampler * sampler, llama_token token) {
    llama_grammar_accept_impl(*of(sampler).grammar, token);
}

void apply(llama_sampler * sampler, llama_token_data_array * candidates) {
    llama_grammar_apply_impl(*of(sampler).grammar, candidates);
}

void reset(llama_sampler * sampler) {
    auto & own     = of(sampler);
    auto & grammar = *own.grammar;
    grammar.stacks           = own.first;
    grammar.partial_utf8     = {};
    grammar.awaiting_trigger = grammar.lazy;
    grammar.trigger_buffer.clear();
    grammar.trigger_buffer_positions.clear();
}

void release(llama_sampler * sampler) {
    delete &of(sampler);
}

llama_sampler_i interface() {
    llama_sampler_i own = {};
    own.name   = name_of;
    own.accept = accept;
    own.apply  = apply;
    own.reset  = reset;
    own.free   = release;
    return own;
}

} // namespace

extern "C" {

llama_sampler * hobbit_grammar_init(const llama_vocab * vocab, const char * text, bool lazy, const char ** patterns,
                                    size_t n_patterns, const llama_token * tokens, size_t n_tokens, size_t limit,
                                    char * error, size_t error_capacity) {
    static llama_sampler_i own_interface = interface();
    put_error(error, error_capacity, "");
    try {
        throwing_guard       guard;
        llama_grammar_parser parser(vocab);
        if (!parser.parse(text) || parser.rules.empty()) {
            put_error(error, error_capacity, "failed to parse grammar");
            return nullptr;
        }
        const auto root = parser.symbol_ids.find("root");
        if (root == parser.symbol_ids.end()) {
            put_error(error, error_capacity, "grammar does not contain a 'root' symbol");
            return nullptr;
        }
        // It begins where a stack with nothing but a reference to its root can go on.
        const element begin[2] = { { LLAMA_GRETYPE_RULE_REF, root->second }, { LLAMA_GRETYPE_END, 0 } };
        steps  own = { limit };
        stacks first;
        if (!own.advance(parser.rules, { begin }, first) || !beginnings(parser.rules).are_few(limit)) {
            put_error(error, error_capacity, "it begins in too many ways at once, or with itself");
            return nullptr;
        }
        auto rules = parser.c_rules();
        auto made  = std::make_unique<grammar_sampler>(grammar_sampler{
            { llama_grammar_init_impl(vocab, rules.data(), rules.size(), root->second), llama_grammar_free_impl }, {} });
        llama_grammar * grammar = made->grammar.get();
        if (grammar == nullptr) {
            return nullptr;
        }
        grammar->lazy = grammar->awaiting_trigger = lazy;
        grammar->trigger_tokens.assign(tokens, tokens + n_tokens);
        for (size_t i = 0; i < n_patterns; ++i) {
            grammar->trigger_patterns.push_back({ patterns[i], std::regex(patterns[i]) });
        }
        made->first = grammar->stacks;
        return llama_sampler_init(&own_interface, made.release());
    } catch (const std::exception &) {
        return nullptr;
    }
}

bool hobbit_grammar_is_asleep(const llama_sampler * sampler) {
    return of(sampler).grammar->awaiting_trigger;
}

bool hobbit_grammar_mask(const llama_sampler * sampler, llama_token_data_array * candidates, size_t limit) {
    try {
        const llama_grammar & grammar = *of(sampler).grammar;
        if (grammar.awaiting_trigger) {
            return true;
        }
        const auto & now     = grammar.stacks;
        const bool   may_end = std::any_of(now.begin(), now.end(), [](const stack & own) { return own.empty(); });
        automaton    all(grammar, limit);
        for (size_t i = 0; i < candidates->size; ++i) {
            llama_token_data & candidate = candidates->data[i];
            const bool         is_end    = grammar.vocab->is_eog(candidate.id);
            if (!(is_end ? may_end : all.allows(candidate.id, grammar.vocab->token_to_piece(candidate.id)))) {
                candidate.logit = -INFINITY;
            }
            if (all.is_exhausted()) {
                return false;
            }
        }
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

int hobbit_grammar_accept(llama_sampler * sampler, llama_token token, size_t limit) {
    try {
        throwing_guard      guard;
        llama_grammar &     grammar  = *of(sampler).grammar;
        const std::string & piece    = grammar.vocab->token_to_piece(token);
        const auto &        wakers   = grammar.trigger_tokens;
        const bool          is_asleep = grammar.awaiting_trigger;
        std::string         followed = piece;
        if (is_asleep && std::find(wakers.begin(), wakers.end(), token) == wakers.end()) {
            const size_t before = grammar.trigger_buffer.size();
            followed.insert(0, grammar.trigger_buffer);
            const size_t start = found_by_patterns(grammar, followed);
            if (start == std::string::npos) {
                grammar.trigger_buffer_positions.push_back({ token, { before, followed.size() } });
                grammar.trigger_buffer = std::move(followed);
                return 0;
            }
            followed.erase(0, start);
        }
        if ((is_asleep || !grammar.vocab->is_eog(token)) && !can_follow(grammar, followed, limit)) {
            return 1;
        }
        llama_grammar_accept_impl(grammar, token);
        return 0;
    } catch (const std::exception &) {
        return 2;
    }
}

} // extern "C"
