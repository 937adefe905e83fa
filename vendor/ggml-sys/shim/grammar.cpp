// llama.cpp's grammar sampler (llama_sampler_init_grammar), with what it holds in sight: a grammar that could go on in very many
// ways at once is refused before llama.cpp follows it, which nothing could interrupt. Declared in ../src/grammar.rs.

#include "guard.h"

#include "llama-grammar.h"
#include "llama-vocab.h"
#include "llama.h"
#include "unicode.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using element = llama_grammar_element;
using stack   = llama_grammar_stack;

struct hash {
    size_t operator()(const stack & own) const {
        size_t sum = own.size();
        for (const element * at : own) {
            sum = (sum ^ reinterpret_cast<size_t>(at) / sizeof(element)) * 0x9e3779b97f4a7c15u;
        }
        return sum ^ sum >> 32;
    }
};

using stacks = std::unordered_set<stack, hash>;

bool ends(const element * at) {
    return at->type == LLAMA_GRETYPE_END || at->type == LLAMA_GRETYPE_ALT;
}

// What a stack costs besides its entries.
constexpr size_t stack_steps = 64;

// What llama.cpp will do for one character, by its own way of doing it, counted until it is too much.
struct steps {
    size_t left;

    bool take(size_t n) {
        const bool enough = n <= left;
        left -= enough ? n : left;
        return enough;
    }

    // Adds the places where a stack can go on, as llama_grammar_advance_stack finds them: each stack that it makes is copied, each
    // that it keeps is looked for among those it has. False where it is too much.
    bool advance(const llama_grammar_rules & rules, stack first, stacks & found) {
        // A rule that is deeper within others than there are rules begins with itself.
        const size_t       deepest = first.size() + rules.size();
        stacks             seen;
        std::vector<stack> todo = { std::move(first) };
        // Counted before it is there: a rule has as many ways as its grammar likes, and each is a stack of its own.
        const auto enough_for = [this](const stack & own) { return take(own.size() + stack_steps); };
        if (!enough_for(todo.back())) {
            return false;
        }
        while (!todo.empty()) {
            stack own = std::move(todo.back());
            todo.pop_back();
            if (own.size() > deepest) {
                return false;
            }
            if (!seen.insert(own).second) {
                continue;
            }
            const element * at = own.empty() ? nullptr : own.back();
            if (at == nullptr || at->type != LLAMA_GRETYPE_RULE_REF) {
                if (!take(found.size())) {
                    return false;
                }
                found.insert(std::move(own));
                continue;
            }
            own.pop_back();
            if (!ends(at + 1)) {
                own.push_back(at + 1);
            }
            for (const element * way = rules[at->value].data();; ++way) {
                todo.push_back(own);
                if (!ends(way)) {
                    todo.back().push_back(way);
                }
                if (!enough_for(todo.back())) {
                    return false;
                }
                while (!ends(way)) {
                    ++way;
                }
                if (way->type == LLAMA_GRETYPE_END) {
                    break;
                }
            }
        }
        return true;
    }
};

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

// Whether a character may stand at a place, and what comes after it.
std::pair<bool, const element *> match(const element * at, uint32_t character) {
    const bool negated = at->type == LLAMA_GRETYPE_CHAR_NOT;
    bool       found   = false;
    do {
        const bool is_range = at[1].type == LLAMA_GRETYPE_CHAR_RNG_UPPER;
        if (at->type == LLAMA_GRETYPE_CHAR_ANY) {
            found = true;
        } else {
            found |= is_range ? at->value <= character && character <= at[1].value : at->value == character;
        }
        at += is_range ? 2 : 1;
    } while (at->type == LLAMA_GRETYPE_CHAR_ALT);
    return { found != negated, at };
}

bool is_token(const element * at) {
    return at->type == LLAMA_GRETYPE_TOKEN || at->type == LLAMA_GRETYPE_TOKEN_NOT;
}

// Whether a grammar can go on with a text in at most so many steps for each character.
bool can_follow(const llama_grammar & grammar, const std::string & text, size_t limit) {
    stacks now(grammar.stacks.begin(), grammar.stacks.end());
    for (const uint32_t character : unicode_cpts_from_utf8(text)) {
        steps  own = { limit };
        stacks next;
        for (const stack & from : now) {
            if (from.empty() || is_token(from.back())) {
                continue;
            }
            const auto [matches, after] = match(from.back(), character);
            if (!matches) {
                continue;
            }
            stack to(from.begin(), from.end() - 1);
            if (!ends(after)) {
                to.push_back(after);
            }
            if (!own.advance(grammar.rules, std::move(to), next)) {
                return false;
            }
        }
        now = std::move(next);
    }
    return true;
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

bool hobbit_grammar_can_follow(const llama_sampler * sampler, llama_token token, size_t limit) {
    try {
        const llama_grammar & grammar = *of(sampler).grammar;
        if (grammar.awaiting_trigger || grammar.vocab->is_eog(token)) {
            return true;
        }
        return can_follow(grammar, grammar.vocab->token_to_piece(token), limit);
    } catch (const std::exception &) {
        // A part of a character: few stacks can come of it.
        return true;
    }
}

} // extern "C"
