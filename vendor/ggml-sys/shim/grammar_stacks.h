// A grammar's stacks: the places where it can go on, by llama.cpp's own way of finding them (src/llama-grammar.cpp).
#pragma once

#include "llama-grammar.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace grammars {

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

inline bool ends(const element * at) {
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

// Whether a character may stand at a place, and what comes after it.
inline std::pair<bool, const element *> match(const element * at, uint32_t character) {
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

inline bool is_token(const element * at) {
    return at->type == LLAMA_GRETYPE_TOKEN || at->type == LLAMA_GRETYPE_TOKEN_NOT;
}

// What comes after a stack whose last place matches a character.
inline stack after(const stack & own) {
    stack next(own.begin(), own.end() - 1);
    if (const element * at = match(own.back(), 0).second; !ends(at)) {
        next.push_back(at);
    }
    return next;
}

// The characters of a text that goes on after a part of a character, and what is left of its last (decode_utf8). What is no UTF-8
// is a 0 and less than nothing left.
inline llama_partial_utf8 decode(const std::string & text, llama_partial_utf8 before, std::vector<uint32_t> & characters) {
    static const int lengths[] = { 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 3, 4 };
    const char *     at        = text.c_str();
    uint32_t         value     = before.value;
    int              left      = before.n_remain;
    characters.clear();
    const auto more = [&] { value = (value << 6) + (static_cast<uint8_t>(*at++) & 0x3F), --left; };
    while (*at != 0 && left > 0) {
        if (static_cast<uint8_t>(*at) >> 6 != 2) {
            characters.push_back(0);
            return { 0, -1 };
        }
        more();
    }
    if (before.n_remain > 0 && left == 0) {
        characters.push_back(value);
    }
    while (*at != 0) {
        const uint8_t first = static_cast<uint8_t>(*at++);
        left = lengths[first >> 4] - 1;
        if (left < 0) {
            characters.assign(1, 0);
            return { 0, left };
        }
        value = first & ((1 << (7 - left)) - 1);
        while (*at != 0 && left > 0) {
            more();
        }
        if (left == 0) {
            characters.push_back(value);
        }
    }
    return { value, left };
}

} // namespace grammars
