// Chat templates, and what models say in their formats: llama.cpp's `common`, with JSON texts in place of its structs.
// Nothing here throws.

#include "guard.h"

#include "chat-peg-parser.h"
#include "chat.h"
#include "common.h"
#include "json-schema-to-grammar.h"
#include "json.h"
#include "llama.h"
#include "log.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
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

// Grammar and parser of answers that follow the schema: for formats whose handler has none.
void follow_schema(common_chat_params & params, const common_chat_templates_inputs & inputs) {
    const json schema         = json::parse(inputs.json_schema);
    const bool extracts       = inputs.reasoning_format != COMMON_REASONING_FORMAT_NONE;
    const std::string & start = params.thinking_start_tag;
    const std::string & whole = params.generation_prompt;
    // The generation prompt may have opened the reasoning.
    const size_t opened       = start.empty() ? std::string::npos : whole.find(start);
    const auto parser = build_chat_peg_parser([&](common_chat_peg_builder & p) {
        auto reasoning = p.eps();
        if (!params.thinking_end_tags.empty()) {
            const std::string & end = params.thinking_end_tags.front();
            auto thought = extracts ? p.literal(start) + p.reasoning(p.until(end)) + p.literal(end)
                                    : p.content(p.literal(start) + p.until(end) + p.literal(end));
            reasoning = p.optional(thought) + p.space();
        }
        // Functionary names the recipient first.
        const bool is_addressed = string_ends_with(whole, ">>>");
        auto recipient          = is_addressed ? p.optional(p.literal("all\n")) : p.eps();
        auto answer             = p.content(p.schema(p.json(), "response-format-schema", schema));
        return p.literal(whole.substr(0, opened)) + reasoning + recipient + answer + p.space() + p.end();
    });
    params.format       = COMMON_CHAT_FORMAT_PEG_NATIVE;
    params.parser       = parser.save();
    params.grammar_lazy = false;
    params.grammar      = build_grammar([&](const common_grammar_builder & builder) {
        parser.build_grammar(builder, false);
    });
}

// Separates calls in tags by white space, as their templates do: llama.cpp's handler wants a comma.
void separate_calls(common_chat_params & params) {
    string_replace_all(params.grammar, "(\", \" (", "(space (");
    if (params.parser.find("\", \"") == std::string::npos) {
        return;
    }
    json arena  = json::parse(params.parser);
    json others = json::array();
    for (const auto & node : arena.at("parsers")) {
        const bool is_comma = text_of(node, "type") == "literal" && text_of(node, "literal") == ", ";
        json space          = json::object();
        space["type"]       = "space";
        others.push_back(is_comma ? space : node);
    }
    arena["parsers"] = others;
    params.parser    = arena.dump();
}

// The last node of a parser: a literal that ends it, if there is one.
size_t last_of(const json & parsers, size_t at) {
    static const int DEPTH_MAX = 16;
    for (int depth = 0; depth < DEPTH_MAX; depth++) {
        const json & node = parsers.at(at);
        if (node.contains("children") && !node.at("children").empty()) {
            at = node.at("children").at(node.at("children").size() - 1).get<size_t>();
        } else if (node.contains("child")) {
            at = node.at("child").get<size_t>();
        } else {
            break;
        }
    }
    return at;
}

// Templates like Mistral's write `name[CALL_ID]id[ARGS]`. llama.cpp takes [ARGS] for the end of the name, too, and
// wants it twice.
void end_names_once(common_chat_params & params) {
    const size_t found = params.grammar.find("\") (\"");
    if (found == std::string::npos || found == 0 || params.parser.empty()) {
        return;
    }
    const std::string & grammar = params.grammar;
    const size_t begin          = grammar.rfind('"', found - 1);
    const size_t end            = grammar.find('"', found + 5);
    if (begin == std::string::npos || end == std::string::npos) {
        return;
    }
    const std::string twice = grammar.substr(begin + 1, found - begin - 1);
    const std::string id    = grammar.substr(found + 5, end - found - 5);
    const size_t next       = grammar.find(")? ", end);
    if (twice.empty() || next == std::string::npos || grammar.compare(end, 8, "\" until-") != 0 ||
        grammar.compare(next + 3, twice.size() + 2, "\"" + twice + "\"") != 0) {
        return;
    }
    json arena    = json::parse(params.parser);
    json & parsers = arena["parsers"];
    const auto is_literal = [&](size_t at) {
        return text_of(parsers.at(at), "type") == "literal" && text_of(parsers.at(at), "literal") == twice;
    };
    std::vector<size_t> ends;
    for (size_t at = 0; at < parsers.size(); at++) {
        if (text_of(parsers.at(at), "type") != "sequence") {
            continue;
        }
        const json & children = parsers.at(at).at("children");
        for (size_t i = 0; i + 2 < children.size(); i++) {
            const size_t name_end = last_of(parsers, children.at(i).get<size_t>());
            const bool is_optional = text_of(parsers.at(children.at(i + 1).get<size_t>()), "type") == "repetition";
            if (is_optional && is_literal(name_end) && is_literal(children.at(i + 2).get<size_t>())) {
                ends.push_back(name_end);
            }
        }
    }
    for (const size_t at : ends) {
        parsers[at]["literal"] = "";
    }
    if (!ends.empty()) {
        params.parser = arena.dump();
        const std::string rest = ") (\"" + id + "\"";
        string_replace_all(params.grammar, "\"" + twice + "\"" + rest, "\"\"" + rest);
    }
}

// The conversation as the template writes it; `calls` has the grammar and the parser of answers with tool calls, if
// they are not those of the result.
//
// llama.cpp's handlers follow either a schema or tools. Some drop a schema, or make a grammar that has no root.
common_chat_params apply(const common_chat_templates * templates, const common_chat_templates_inputs & inputs,
                         std::optional<common_chat_params> & calls) {
    const bool may_call = !inputs.tools.empty() && inputs.tool_choice != COMMON_CHAT_TOOL_CHOICE_NONE;
    common_chat_templates_inputs without_schema = inputs;
    without_schema.json_schema.clear();
    // The schema describes answers without calls.
    if (inputs.json_schema.empty() || (may_call && inputs.tool_choice == COMMON_CHAT_TOOL_CHOICE_REQUIRED)) {
        return common_chat_templates_apply(templates, without_schema);
    }
    common_chat_params params = common_chat_templates_apply(templates, inputs);
    if (inputs.tools.empty() || !inputs.use_jinja) {
        if (params.grammar.empty()) {
            follow_schema(params, inputs);
        }
        return params;
    }
    common_chat_templates_inputs without_tools = inputs;
    without_tools.tools.clear();
    without_tools.tool_choice = COMMON_CHAT_TOOL_CHOICE_AUTO;
    common_chat_params answer = common_chat_templates_apply(templates, without_tools);
    if (answer.grammar.empty() || answer.generation_prompt != params.generation_prompt) {
        follow_schema(params, inputs);
    } else {
        params.format       = answer.format;
        params.parser       = answer.parser;
        params.grammar      = answer.grammar;
        params.grammar_lazy = false;
    }
    params.grammar_triggers.clear();
    if (may_call) {
        without_schema.tool_choice = COMMON_CHAT_TOOL_CHOICE_REQUIRED;
        calls = common_chat_templates_apply(templates, without_schema);
        if (calls->grammar.empty()) {
            throw std::invalid_argument("its format of calls has no grammar, which a schema beside tools needs: leave "
                                        "out the schema or the tools");
        }
        if (calls->generation_prompt != params.generation_prompt) {
            throw std::invalid_argument("it begins answers with calls in another way than answers by a schema: leave "
                                        "out the schema or the tools, or set tool_choice");
        }
        params.preserved_tokens.insert(params.preserved_tokens.end(), calls->preserved_tokens.begin(),
                                       calls->preserved_tokens.end());
        params.additional_stops.insert(params.additional_stops.end(), calls->additional_stops.begin(),
                                       calls->additional_stops.end());
    }
    return params;
}

std::string params_to_json(const common_chat_params & params, const std::optional<common_chat_params> & calls) {
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
    out["calls_grammar"]       = calls ? calls->grammar : "";
    out["calls_format"]        = (int) (calls ? calls->format : params.format);
    out["calls_parser"]        = calls ? calls->parser : "";
    return out.dump_safe();
}

common_chat_format format_of(int format) {
    if (format < 0 || format >= (int) COMMON_CHAT_FORMAT_COUNT) {
        throw std::invalid_argument("an unknown chat format");
    }
    return (common_chat_format) format;
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

// The answer of a complete text. llama.cpp holds back an end in which a delimiter may begin; it does not where another
// character follows.
common_chat_msg read_whole(const common_chat_parser_params & params, const std::string & text) {
    static const std::string FOLLOWING = "\x01";
    common_chat_msg msg = common_chat_parse(text, false, params);
    if (!msg.tool_calls.empty()) {
        return msg;
    }
    try {
        common_chat_msg longer       = common_chat_parse(text + FOLLOWING, true, params);
        std::string & last           = longer.content.empty() ? longer.reasoning_content : longer.content;
        const std::string & held     = longer.content.empty() ? msg.reasoning_content : msg.content;
        if (longer.tool_calls.empty() && string_ends_with(last, FOLLOWING)) {
            last.pop_back();
            const bool is_same = string_starts_with(last, held) &&
                                 (longer.content.empty() || longer.reasoning_content == msg.reasoning_content);
            if (is_same && last.find_first_not_of(" \t\r\n", held.size()) != std::string::npos) {
                return longer;
            }
        }
    } catch (const std::exception &) {
        // Nothing may follow.
    }
    return msg;
}

bool may_begin_with(const common_chat_parser_params & params, const std::string & text) {
    common_peg_parse_context context(params.generation_prompt + text, COMMON_PEG_PARSE_FLAG_LENIENT);
    return !params.parser.parse(context).fail();
}

// An answer that may be read as one by a schema, and as a call that has no mark of its own (as Llama 3's). A whole one
// is a call where it can be; of one that grows, content is shown as far as both have it.
common_chat_msg read_either(const common_chat_parser_params & answer, const common_chat_parser_params & calls,
                            const std::string & text, bool is_partial) {
    common_chat_msg other;
    try {
        other = is_partial ? common_chat_parse(text, true, calls) : read_whole(calls, text);
    } catch (const std::exception &) {
        return is_partial ? common_chat_parse(text, true, answer) : read_whole(answer, text);
    }
    if (!is_partial) {
        return other.tool_calls.empty() ? read_whole(answer, text) : other;
    }
    common_chat_msg msg = common_chat_parse(text, true, answer);
    const auto end = std::mismatch(msg.content.begin(), msg.content.end(), other.content.begin(), other.content.end());
    msg.content.erase(end.first, msg.content.end());
    return msg;
}

} // namespace

struct hobbit_chat_parser : common_chat_parser_params {
    // Reads what the first parser does not: answers with calls, where a schema describes the others.
    std::optional<common_chat_parser_params> calls;
};

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
        std::optional<common_chat_params> calls;
        auto params = apply(made.get(), read, calls);
        if (!read.tools.empty()) {
            end_names_once(calls ? *calls : params);
            if (read.parallel_tool_calls) {
                separate_calls(calls ? *calls : params);
            }
        }
        put(output, output_context, params_to_json(params, calls));
    });
    return done ? 0 : 2;
}

bool hobbit_schema_grammar(const char * schema, size_t schema_len, hobbit_text_callback output, void * output_context,
                           char * error, size_t error_capacity) {
    return guarded(error, error_capacity, [&] {
        const auto read = json::parse(std::string(schema, schema_len));
        put(output, output_context, json_schema_to_grammar(read, /*force_gbnf=*/true));
    });
}

hobbit_chat_parser * hobbit_chat_parser_init(const char * params, size_t params_len, char * error,
                                             size_t error_capacity) {
    std::unique_ptr<hobbit_chat_parser> made;
    const bool done = guarded(error, error_capacity, [&] {
        const json from = json::parse(std::string(params, params_len));
        made = std::make_unique<hobbit_chat_parser>();
        made->format               = format_of(from.at("format").get<int>());
        made->reasoning_format     = common_reasoning_format_from_name(text_of(from, "reasoning_format"));
        made->reasoning_in_content = flag_of(from, "reasoning_in_content", false);
        made->generation_prompt    = text_of(from, "generation_prompt");
        made->parse_tool_calls     = flag_of(from, "parse_tool_calls", true);
        made->is_continuation      = flag_of(from, "is_continuation", false);
        const std::string parser   = text_of(from, "parser");
        if (!parser.empty()) {
            made->parser.load(parser);
        }
        const std::string calls_parser = text_of(from, "calls_parser");
        if (!calls_parser.empty()) {
            common_chat_parser_params calls = *made;
            calls.format = format_of(from.at("calls_format").get<int>());
            calls.parser = common_peg_arena();
            calls.parser.load(calls_parser);
            made->calls = std::move(calls);
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
        const std::string answer(text, text_len);
        const bool may_answer = !parser->calls || may_begin_with(*parser, answer);
        const common_chat_parser_params & chosen = may_answer ? *parser : *parser->calls;
        const common_chat_msg msg = parser->calls && may_answer && may_begin_with(*parser->calls, answer)
                                        ? read_either(*parser, *parser->calls, answer, is_partial)
                                    : is_partial ? common_chat_parse(answer, true, chosen)
                                                 : read_whole(chosen, answer);
        put(output, output_context, reply_to_json(msg));
    });
}

} // extern "C"
