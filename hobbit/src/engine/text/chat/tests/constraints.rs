//! Constraints of a request, and messages, that a template keeps, loses or cannot express.

use super::*;

#[test]
fn a_template_that_drops_the_users_message_is_refused() {
    for template in ["chatlm", "{{ bos_token }}{% for m in messages %}{{ m.role }}{% endfor %}"] {
        let error = ChatTemplates::from_text(template).unwrap_err().to_string();
        assert!(error.contains("does not write the user's message"), "{template}: {error}");
    }
    // It may refuse a message that stands alone.
    assert!(ChatTemplates::from_text("{{ raise_exception('no tools') }}").is_ok());
}

/// Everything that a stream of `text` has shown when it ends.
fn shown(prompt: &ChatPrompt, text: &str) -> ChatReply {
    let mut stream = ChatStream::new(prompt.parser.clone(), String::new).unwrap();
    let mut shown = ChatReply::default();
    let mut show = |changes: Vec<ChatDelta>| {
        for change in changes {
            match change {
                ChatDelta::Reasoning(text) => shown.reasoning_content += &text,
                ChatDelta::Content(text) => shown.content += &text,
                ChatDelta::ToolCall(_) => {}
            }
        }
    };
    for c in text.chars() {
        show(stream.push(c.encode_utf8(&mut [0; 4]), true).unwrap_or_default());
    }
    show(stream.finish("", false));
    let mut whole = ChatStream::new(prompt.parser.clone(), String::new).unwrap();
    whole.finish(text, false);
    let parts = |reply: &ChatReply| (reply.reasoning_content.clone(), reply.content.clone());
    assert_eq!(parts(&shown), parts(whole.reply()), "a stream and a whole answer of {text:?}");
    whole.reply().clone()
}

#[test]
fn answers_in_another_form_than_the_templates_are_kept() {
    let channels = templates(CHANNELS).apply(&one_message()).unwrap();
    assert_eq!(shown(&channels, "Hello there").content, "Hello there");
    let tools = with_tools(ToolChoice::Auto);
    for text in ["Hello <", "Hello <tool_", "a < b", "Hello"] {
        assert_eq!(shown(&tools, text).content, text);
    }
    let schema = ChatInputs { json_schema: Some(r#"{"type": "integer"}"#.to_owned()), ..one_message() };
    assert_eq!(shown(&templates(THINKS).apply(&schema).unwrap(), "not JSON").content, "not JSON");
}

/// Like Kimi-K2's, for whose format llama.cpp follows no schema.
const SECTIONS: &str = "{%- if tools -%}{{- tools | tojson -}}{%- endif -%}\
{%- for message in messages -%}\
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + message.content + '<|im_end|>' -}}\
{%- endfor -%}\
{%- if false -%}<|tool_calls_section_begin|><|tool_call_begin|>{%- endif -%}\
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}";

/// Like Qwen3-Coder's.
const FUNCTIONS: &str = "{%- if tools -%}{{- tools | tojson -}}{%- endif -%}\
{%- for message in messages -%}\
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}\
{%- endfor -%}\
{%- if false -%}<tool_call><function=x><parameter=y>{%- endif -%}\
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}";

const SCHEMA: &str = r#"{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}"#;

#[test]
fn a_schema_is_followed_with_every_format() {
    for template in [THINKS, TOOLS, CHANNELS, SECTIONS, FUNCTIONS] {
        for tool_choice in [ToolChoice::None, ToolChoice::Auto] {
            for tools in [None, Some(GET_TIME.to_owned())] {
                let writes_tools = ![THINKS, CHANNELS].contains(&template);
                if tools.is_some() && tool_choice == ToolChoice::Auto && !writes_tools {
                    continue;
                }
                let schema = Some(SCHEMA.to_owned());
                let inputs = ChatInputs { json_schema: schema, tools, tool_choice, ..one_message() };
                let prompt = templates(template).apply(&inputs).unwrap();
                let grammar = prompt.grammar.as_ref().unwrap_or_else(|| panic!("no grammar: {template}"));
                assert!(!grammar.lazy && grammar.text.contains("root ::="), "{grammar:?}");
                assert!(grammar.text.contains("response-format"), "{}", grammar.text);
                let answer = if template == CHANNELS { "<|channel|>final<|message|>{\"n\": 1}" } else { "{\"n\": 1}" };
                assert_eq!(prompt.parser.parse(answer, false).unwrap().content, "{\"n\": 1}", "{template}");
            }
        }
    }
}

#[test]
fn answers_by_a_schema_and_calls_exclude_each_other() {
    let inputs = ChatInputs { json_schema: Some(SCHEMA.to_owned()), tools: Some(GET_TIME.to_owned()), ..one_message() };
    for (template, call) in [
        (TOOLS, "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>"),
        (
            FUNCTIONS,
            "<tool_call>\n<function=get_time>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        ),
    ] {
        let prompt = templates(template).apply(&inputs).unwrap();
        let reply = shown(&prompt, call);
        assert_eq!((reply.tool_calls.len(), reply.content.as_str()), (1, ""), "{reply:?}");
        assert_eq!(reply.tool_calls[0].name, "get_time");
        let reply = shown(&prompt, "{\"n\": 7}");
        assert_eq!((reply.tool_calls.len(), reply.content.as_str()), (0, "{\"n\": 7}"), "{reply:?}");
        let required = ChatInputs { tool_choice: ToolChoice::Required, ..inputs.clone() };
        let grammar = templates(template).apply(&required).unwrap().grammar.unwrap();
        assert!(!grammar.lazy && grammar.text.contains("get-time"), "{}", grammar.text);
    }
}

/// Like Llama 3's: a call has no mark of its own.
const BARE: &str = "{%- if tools -%}{{- tools | tojson -}}{%- endif -%}\
{%- for message in messages -%}\
{{- '<|im_start|>' + message.role + '\n' -}}\
{%- if message.tool_calls -%}\
{%- set call = message.tool_calls[0].function -%}\
{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' -}}\
{%- else -%}{{- message.content -}}{%- endif -%}\
{{- '<|im_end|>\n' -}}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}";

#[test]
fn a_call_beside_a_schema_is_no_content() {
    let inputs = ChatInputs { json_schema: Some(SCHEMA.to_owned()), tools: Some(GET_TIME.to_owned()), ..one_message() };
    let prompt = templates(BARE).apply(&inputs).unwrap();
    let reply = shown(&prompt, "{\"name\": \"get_time\", \"parameters\": {\"city\": \"Rome\"}}");
    assert_eq!((reply.tool_calls.len(), reply.content.as_str()), (1, ""), "{reply:?}");
    assert_eq!(shown(&prompt, "{\"n\": 7}"), self::reply("", "{\"n\": 7}"));
}

#[test]
fn trials_tell_what_calls_lose() {
    let can = |template: &str, name: &str| templates(template).capabilities().get(name).copied();
    let (schemas, content) = (ChatTemplates::ARGUMENT_SCHEMAS, ChatTemplates::CONTENT_WITH_CALLS);
    assert_eq!((can(TOOLS, schemas), can(TOOLS, content)), (Some(true), Some(true)));
    // Texts between tags are free, and so is this template's text beside calls.
    assert_eq!(can(FUNCTIONS, schemas), Some(false));
    assert_eq!((can(BARE, schemas), can(BARE, content)), (Some(true), Some(false)));
    assert_eq!(can(THINKS, schemas), None);
}

#[test]
fn a_message_that_would_be_dropped_is_refused() {
    let roles = |roles: &str| {
        templates(&format!("{{% for m in messages if m.role in {roles} %}}{{{{ m.content | tojson }}}}{{% endfor %}}"))
    };
    let conversation = |result: &str| {
        let call = r#"{"role": "assistant", "content": null, "tool_calls": [{"id": "0", "type": "function",
                      "function": {"name": "get_time", "arguments": "{}"}}]}"#;
        let messages = format!(
            r#"[{{"role": "user", "content": "say \"when\""}}, {call},
                {{"role": "tool", "tool_call_id": "0", "content": "{result}"}}]"#
        );
        ChatInputs { messages, ..ChatInputs::default() }
    };
    // A short result may be in the prompt by chance.
    for result in ["It is seven o'clock.", "when"] {
        let error = roles("['user']").apply(&conversation(result)).unwrap_err();
        assert!(
            matches!(&error, ChatError::Input(reason) if reason.contains("messages[2], of the role 'tool'")),
            "{error}"
        );
        let prompt = roles("['user', 'tool']").apply(&conversation(result)).unwrap().prompt;
        assert!(prompt.contains(result), "{prompt}");
    }
    assert!(roles("['user']").apply(&conversation("")).is_ok());
    // It may forget earlier messages.
    let messages = r#"[{"role": "user", "content": "Hello."}, {"role": "user", "content": "Go on."}]"#.to_owned();
    let inputs = ChatInputs { messages, ..ChatInputs::default() };
    assert_eq!(templates("{{ messages[-1].content }}").apply(&inputs).unwrap().prompt, "Go on.");
}

#[test]
fn calls_that_a_template_cannot_make_are_refused() {
    let tools = Some(GET_TIME.to_owned());
    for tool_choice in [ToolChoice::Required, ToolChoice::Auto] {
        let inputs = ChatInputs { tools: tools.clone(), tool_choice, ..one_message() };
        let error = templates(THINKS).apply(&inputs).unwrap_err();
        assert!(matches!(&error, ChatError::Input(reason) if reason.contains("does not write tools")), "{error}");
    }
    for tools in [None, Some("[]".to_owned())] {
        let inputs = ChatInputs { tools, tool_choice: ToolChoice::Required, ..one_message() };
        let error = templates(TOOLS).apply(&inputs).unwrap_err();
        assert!(matches!(&error, ChatError::Input(reason) if reason.contains("there are no tools")), "{error}");
    }
}

#[test]
fn one_call_is_one_call() {
    let call = "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>\n";
    for parallel_tool_calls in [false, true] {
        let inputs = ChatInputs { tools: Some(GET_TIME.to_owned()), parallel_tool_calls, ..one_message() };
        let reply = shown(&templates(TOOLS).apply(&inputs).unwrap(), &call.repeat(2));
        assert_eq!(reply.tool_calls.len(), 1 + usize::from(parallel_tool_calls));
    }
}

#[test]
fn a_second_system_message_is_not_dropped() {
    let messages = r#"[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                       {"role": "system", "content": "Be kind."}]"#;
    let inputs = ChatInputs { messages: messages.to_owned(), ..ChatInputs::default() };
    let first = "{{ messages[0].content }};{% for m in messages[1:] %}{% if m.role == 'system' %}";
    let last = "{% endif %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}";
    for other in ["", "{{ raise_exception('the first only') }}"] {
        let prompt = templates(&format!("{first}{other}{last}")).apply(&inputs).unwrap().prompt;
        assert_eq!(prompt, "Be brief.\n\nBe kind.;Hi", "{other}");
    }
    let every = templates("{% for m in messages %}{{ m.content }};{% endfor %}");
    assert_eq!(every.apply(&inputs).unwrap().prompt, "Be brief.;Hi;Be kind.;");
}

/// Like LFM2's: calls as in Python between tags.
const PYTHON: &str = "{%- if tools -%}\
{{- '<|im_start|>system\nList of tools: <|tool_list_start|>' + (tools | tojson) + '<|tool_list_end|><|im_end|>\n' -}}\
{%- endif -%}\
{%- for message in messages -%}\
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}";

#[test]
fn calls_as_in_python_may_be_several() {
    let text = "<|tool_call_start|>[get_time(city=\"Rome\"), get_time(city=\"Oslo\")]<|tool_call_end|>";
    let with = |parallel_tool_calls| {
        let inputs = ChatInputs { tools: Some(GET_TIME.to_owned()), parallel_tool_calls, ..one_message() };
        templates(PYTHON).apply(&inputs).unwrap()
    };
    let calls = shown(&with(true), text).tool_calls;
    let said: Vec<(&str, &str)> = calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect();
    assert_eq!(said, [("get_time", r#"{"city":"Rome"}"#), ("get_time", r#"{"city":"Oslo"}"#)]);
    let grammar = |parallel| with(parallel).grammar.unwrap().text;
    assert_ne!(grammar(true), grammar(false), "only one of them allows a second call");
}
