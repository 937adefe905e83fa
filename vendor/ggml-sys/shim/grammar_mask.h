// Which tokens a grammar allows. llama.cpp (llama_grammar_reject_candidates) asks each stack for what the others did not allow, and
// then each stack that those lead to: where a grammar can be read in two ways, a token of n characters takes 2^n steps. Here a set
// of stacks is a state that is met once, as in an automaton made of a regular expression.
#pragma once

#include "grammar_stacks.h"

#include <algorithm>
#include <deque>
#include <map>
#include <unordered_map>

namespace grammars {

class automaton {
public:
    // Takes no more than `limit` steps for all stacks that it makes, and some more to compare characters.
    automaton(const llama_grammar & grammar, size_t limit) :
        grammar(grammar), making{ limit }, comparing{ 8 * limit } {
        begin = state_of(stacks(grammar.stacks.begin(), grammar.stacks.end()));
    }

    bool is_exhausted() const {
        return making.left == 0 || comparing.left == 0;
    }

    // Whether the grammar can go on with a token that does not end the text. Without meaning where it is exhausted.
    bool allows(llama_token token, const std::string & piece) {
        if (piece.empty() || piece[0] == 0) {
            return false;
        }
        const llama_partial_utf8 rest = decode(piece, grammar.partial_utf8, characters);
        size_t                   at   = begin;
        for (const uint32_t character : characters) {
            if (at == nowhere || character == 0) {
                break;
            }
            for (const element * wanted : states[at].tokens) {
                if ((wanted->value == static_cast<uint32_t>(token)) == (wanted->type == LLAMA_GRETYPE_TOKEN)) {
                    return true;
                }
            }
            at = follow(at, character);
        }
        return at != nowhere && (rest.n_remain == 0 || goes_on_with_part(at, rest));
    }

private:
    static constexpr size_t nowhere = SIZE_MAX;

    struct state {
        const std::vector<stack> *           own;
        std::vector<const element *>         tokens;
        std::unordered_map<uint32_t, size_t> by_character;
        // By which of the stacks match it.
        std::map<std::vector<bool>, size_t> by_matches;
    };

    const llama_grammar &                grammar;
    steps                                making;
    steps                                comparing;
    std::map<std::vector<stack>, size_t> known;
    std::deque<state>                    states;
    std::vector<uint32_t>                characters;
    size_t                               begin;

    static bool is_of_characters(const stack & own) {
        return !own.empty() && !is_token(own.back());
    }

    size_t state_of(const stacks & found) {
        if (found.empty()) {
            return nowhere;
        }
        std::vector<stack> sorted(found.begin(), found.end());
        std::sort(sorted.begin(), sorted.end());
        const auto [at, is_new] = known.try_emplace(std::move(sorted), states.size());
        if (is_new) {
            states.push_back({ &at->first, {}, {}, {} });
            for (const stack & own : at->first) {
                if (!own.empty() && is_token(own.back())) {
                    states.back().tokens.push_back(own.back());
                }
            }
        }
        return at->second;
    }

    size_t follow(size_t from, uint32_t character) {
        state & now = states[from];
        if (const auto at = now.by_character.find(character); at != now.by_character.end()) {
            return at->second;
        }
        std::vector<bool> matches(now.own->size());
        for (size_t i = 0; i < matches.size(); ++i) {
            const stack & own = (*now.own)[i];
            if (!is_of_characters(own)) {
                continue;
            }
            const auto [is_match, end] = match(own.back(), character);
            if (!comparing.take(end - own.back())) {
                return nowhere;
            }
            matches[i] = is_match;
        }
        const auto [at, is_new] = now.by_matches.try_emplace(std::move(matches), nowhere);
        if (is_new) {
            at->second = state_after(*now.own, at->first);
        }
        return now.by_character[character] = at->second;
    }

    size_t state_after(const std::vector<stack> & all, const std::vector<bool> & matches) {
        stacks next;
        for (size_t i = 0; i < all.size(); ++i) {
            if (matches[i] && !making.advance(grammar.rules, after(all[i]), next)) {
                making.left = 0;
                return nowhere;
            }
        }
        return state_of(next);
    }

    // Whether any character that begins so may come next (llama_grammar_match_partial_char).
    bool goes_on_with_part(size_t from, llama_partial_utf8 part) {
        const auto [value, left] = part;
        // No UTF-8, or a character of 7 bits in two bytes.
        if (left < 0 || (left == 1 && value < 2)) {
            return false;
        }
        uint32_t       low  = value << (left * 6);
        const uint32_t high = low | ((1 << (left * 6)) - 1);
        if (low == 0 && left >= 2) {
            low = left == 2 ? 1 << 11 : 1 << 16;
        }
        const auto goes_on = [&](const stack & own) {
            return is_of_characters(own) && comparing.take(1) && may_be_within(own.back(), low, high);
        };
        return std::any_of(states[from].own->begin(), states[from].own->end(), goes_on);
    }

    // As llama.cpp has it: of characters that must not stand there, none may be within.
    static bool may_be_within(const element * at, uint32_t low, uint32_t high) {
        const bool negated = at->type == LLAMA_GRETYPE_CHAR_NOT;
        do {
            if (at->type == LLAMA_GRETYPE_CHAR_ANY) {
                return true;
            }
            const bool is_range = at[1].type == LLAMA_GRETYPE_CHAR_RNG_UPPER;
            if (at->value <= high && low <= (is_range ? at[1].value : at->value)) {
                return !negated;
            }
            at += is_range ? 2 : 1;
        } while (at->type == LLAMA_GRETYPE_CHAR_ALT);
        return negated;
    }
};

} // namespace grammars
