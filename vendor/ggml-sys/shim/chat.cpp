// Chat templates, what models say in their formats, and reasoning budgets: llama.cpp's `common`, with JSON texts in place
// of its structs. Nothing here throws.

#include "guard.h"

#include "chat.h"
#include "common.h"
#include "json.h"
#include "llama.h"
#include "log.h"
#include "reasoning-budget.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

// Word for word as in llama.cpp's chat.cpp: nothing else fills it without a model.
struct common_chat_templates {
    bool add_bos;
    bool add_eos;
    bool has_explicit_template;  // Model had builtin template or template overridden was specified.
    std::unique_ptr<common_chat_template> template_default;  // always set (defaults to chatml)
    std::unique_ptr<common_chat_template> template_tool_use;
};

namespace {

using json = common_json;

// Runs `call`; false and a message where it throws.
template <typename F> bool guarded(char * error, size_t capacity, F && call) {
    // `common` would write warnings to stderr by itself.
    static std::once_flag silent;
    try {
        std::call_once(silent, [] { common_log_set_verbosity_thold(-1); });
        throwing_guard guard;
        call();
        return true;
    } catch (const std::exception & e) {
        put_error(error, capacity, e.what());
    } catch (...) {
        put_error(error, capacity, "an exception without a message");
    }
    return false;
}

void put(hobbit_text_callback output, void * context, const std::string & text) {
    output(context, text.data(), text.size());
}

std::string text_of(const json & inputs, const char * key) {
    return inputs.contains(key) && inputs.at(key).is_string() ? inputs.at(key).get<std::string>() : std::string();
}

bool flag_of(const json & inputs, const char * key, bool otherwise) {
    return inputs.contains(key) ? inputs.at(key).get<bool>() : otherwise;
}

// The texts of a model that may be in another process, as `common_chat_templates_init` makes templates of a model.
common_chat_templates_ptr templates_of(const json & from) {
    const std::string tool_use = text_of(from, "source_tool_use");
    const std::string bos      = text_of(from, "bos");
    const std::string eos      = text_of(from, "eos");
    std::string source         = text_of(from, "source");
    if (source.empty() || source == "chatml") {
        source = tool_use.empty() ? "chatml" : tool_use;
    }
    common_chat_templates_ptr made;
    try {
        made = common_chat_templates_init(nullptr, source, bos, eos);
    } catch (const std::exception &) {
        // It throws a copy that has lost its message.
        common_chat_template(source, bos, eos);
        throw;
    }
    made->add_bos = flag_of(from, "add_bos", false);
    made->add_eos = flag_of(from, "add_eos", false);
    if (!tool_use.empty()) {
        try {
            made->template_tool_use = std::make_unique<common_chat_template>(tool_use, bos, eos);
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception &) {
            // llama.cpp ignores it too.
        }
    }
    return made;
}

// Whether answers may begin with a thought. False, too, for a template that refuses a single message of the user; one
// that takes all memory is an error.
bool supports_thinking(const common_chat_templates * templates) {
    try {
        return common_chat_templates_support_enable_thinking(templates);
    } catch (const std::exception & e) {
        // The interpreter throws messages of its own, which quote this one.
        if (strstr(e.what(), std::bad_alloc().what()) != nullptr) {
            throw;
        }
        return false;
    }
}

common_chat_templates_inputs inputs_of(const json & from) {
    common_chat_templates_inputs inputs;
    inputs.messages = common_chat_msgs_parse_oaicompat(json::parse(text_of(from, "messages")));
    const std::string tools = text_of(from, "tools");
    if (!tools.empty()) {
        inputs.tools = common_chat_tools_parse_oaicompat(json::parse(tools));
    }
    inputs.tool_choice            = common_chat_tool_choice_parse_oaicompat(text_of(from, "tool_choice"));
    inputs.parallel_tool_calls    = flag_of(from, "parallel_tool_calls", false);
    inputs.json_schema            = text_of(from, "json_schema");
    inputs.grammar                = text_of(from, "grammar");
    inputs.use_jinja              = flag_of(from, "use_jinja", true);
    inputs.add_generation_prompt  = flag_of(from, "add_generation_prompt", true);
    const std::string continued   = text_of(from, "continue_final_message");
    inputs.continue_final_message = continued == "auto" ? COMMON_CHAT_CONTINUATION_AUTO
                                                        : common_chat_continuation_parse(json(continued));
    inputs.reasoning_format       = common_reasoning_format_from_name(text_of(from, "reasoning_format"));
    inputs.enable_thinking        = flag_of(from, "enable_thinking", true);
    inputs.force_pure_content     = flag_of(from, "force_pure_content", false);
    if (from.contains("template_kwargs")) {
        for (const auto & item : from.at("template_kwargs").items()) {
            inputs.chat_template_kwargs[item.key()] = item.value().get<std::string>();
        }
    }
    return inputs;
}

std::string params_to_json(const common_chat_params & params) {
    json triggers = json::array();
    for (const auto & trigger : params.grammar_triggers) {
        json one = json::object();
        one["type"]  = (int) trigger.type;
        one["value"] = trigger.value;
        one["token"] = (int) trigger.token;
        triggers.push_back(one);
    }
    json out = json::object();
    out["prompt"]              = params.prompt;
    out["generation_prompt"]   = params.generation_prompt;
    out["grammar"]             = params.grammar;
    out["grammar_lazy"]        = params.grammar_lazy;
    out["grammar_triggers"]    = triggers;
    out["preserved_tokens"]    = params.preserved_tokens;
    out["additional_stops"]    = params.additional_stops;
    out["thinking_start_tag"]  = params.thinking_start_tag;
    out["thinking_end_tags"]   = params.thinking_end_tags;
    out["format"]              = (int) params.format;
    out["format_name"]         = std::string(common_chat_format_name(params.format));
    out["parser"]              = params.parser;
    return out.dump_safe();
}

std::string reply_to_json(const common_chat_msg & msg) {
    json calls = json::array();
    for (const auto & call : msg.tool_calls) {
        json one = json::object();
        one["id"]        = call.id;
        one["name"]      = call.name;
        one["arguments"] = call.arguments;
        calls.push_back(one);
    }
    json out = json::object();
    out["content"]           = msg.render_content();
    out["reasoning_content"] = msg.reasoning_content;
    out["tool_calls"]        = calls;
    return out.dump_safe();
}

} // namespace

struct hobbit_chat_parser : common_chat_parser_params {};

static_assert(HOBBIT_REASONING_IDLE == REASONING_BUDGET_IDLE && HOBBIT_REASONING_DONE == REASONING_BUDGET_DONE);

extern "C" {

bool hobbit_chat_describe(const char * templates, size_t templates_len, hobbit_text_callback output,
                          void * output_context, char * error, size_t error_capacity) {
    return guarded(error, error_capacity, [&] {
        const auto made   = templates_of(json::parse(std::string(templates, templates_len)));
        json capabilities = json::object();
        for (const auto & [name, has] : common_chat_templates_get_caps(made.get())) {
            capabilities[name] = has;
        }
        json out = json::object();
        out["source"]            = common_chat_templates_source(made.get());
        out["source_tool_use"]   = common_chat_templates_source(made.get(), "tool_use");
        out["supports_thinking"] = supports_thinking(made.get());
        out["capabilities"]      = capabilities;
        put(output, output_context, out.dump_safe());
    });
}

int hobbit_chat_apply(const char * templates, size_t templates_len, const char * inputs, size_t inputs_len,
                      hobbit_text_callback output, void * output_context, char * error, size_t error_capacity) {
    common_chat_templates_inputs read;
    if (!guarded(error, error_capacity, [&] { read = inputs_of(json::parse(std::string(inputs, inputs_len))); })) {
        return 1;
    }
    const bool done = guarded(error, error_capacity, [&] {
        const auto made = templates_of(json::parse(std::string(templates, templates_len)));
        put(output, output_context, params_to_json(common_chat_templates_apply(made.get(), read)));
    });
    return done ? 0 : 2;
}

hobbit_chat_parser * hobbit_chat_parser_init(const char * params, size_t params_len, char * error,
                                             size_t error_capacity) {
    std::unique_ptr<hobbit_chat_parser> made;
    const bool done = guarded(error, error_capacity, [&] {
        const json from = json::parse(std::string(params, params_len));
        made = std::make_unique<hobbit_chat_parser>();
        const int format = from.at("format").get<int>();
        if (format < 0 || format >= (int) COMMON_CHAT_FORMAT_COUNT) {
            throw std::invalid_argument("an unknown chat format");
        }
        made->format               = (common_chat_format) format;
        made->reasoning_format     = common_reasoning_format_from_name(text_of(from, "reasoning_format"));
        made->reasoning_in_content = flag_of(from, "reasoning_in_content", false);
        made->generation_prompt    = text_of(from, "generation_prompt");
        made->parse_tool_calls     = flag_of(from, "parse_tool_calls", true);
        made->is_continuation      = flag_of(from, "is_continuation", false);
        const std::string parser   = text_of(from, "parser");
        if (!parser.empty()) {
            made->parser.load(parser);
        }
    });
    return done ? made.release() : nullptr;
}

void hobbit_chat_parser_free(hobbit_chat_parser * parser) {
    delete parser;
}

bool hobbit_chat_parse(const hobbit_chat_parser * parser, const char * text, size_t text_len, bool is_partial,
                       hobbit_text_callback output, void * output_context, char * error, size_t error_capacity) {
    return guarded(error, error_capacity, [&] {
        put(output, output_context, reply_to_json(common_chat_parse(std::string(text, text_len), is_partial, *parser)));
    });
}

llama_sampler * hobbit_reasoning_budget_init(const llama_vocab * vocab, const llama_token * start, size_t n_start,
                                             const llama_token * ends, const size_t * end_lens, size_t n_ends,
                                             const llama_token * forced, size_t n_forced, int32_t budget) {
    llama_sampler * made = nullptr;
    guarded(nullptr, 0, [&] {
        std::vector<llama_tokens> end_seqs;
        for (size_t i = 0; i < n_ends; ++i) {
            end_seqs.emplace_back(ends, ends + end_lens[i]);
            ends += end_lens[i];
        }
        made = common_reasoning_budget_init(vocab, { llama_tokens(start, start + n_start) }, end_seqs,
                                            llama_tokens(forced, forced + n_forced), budget);
    });
    return made;
}

int hobbit_reasoning_budget_state(const llama_sampler * sampler) {
    return (int) common_reasoning_budget_get_state(sampler);
}

size_t hobbit_reasoning_budget_end_match(const llama_sampler * sampler, llama_token * tokens, size_t capacity) {
    const llama_tokens * match = common_reasoning_budget_get_end_match(sampler);
    if (match == nullptr) {
        return 0;
    }
    std::copy_n(match->begin(), std::min(match->size(), capacity), tokens);
    return match->size();
}

bool hobbit_reasoning_budget_force(llama_sampler * sampler) {
    return common_reasoning_budget_force(sampler);
}

} // extern "C"
