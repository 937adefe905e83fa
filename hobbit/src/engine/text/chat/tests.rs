//! Templates, answers and hostile texts, without a model.

mod constraints;

use super::templates::Texts;
use super::*;
use crate::engine::ggml::limits;
use hobbit_core::options::{GrammarKind, GrammarTrigger, ReasoningFormat, SamplingOptions};

fn render_with(template: &str, use_jinja: bool, add_generation_prompt: bool) -> Result<String, ChatError> {
    let messages = r#"[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]"#.to_owned();
    let inputs = ChatInputs { messages, use_jinja, add_generation_prompt, ..ChatInputs::default() };
    Ok(ChatTemplates::from_text(template)?.apply(&inputs)?.prompt)
}

#[test]
fn templates_are_rendered() {
    let chatml = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n";
    let opened = format!("{chatml}<|im_start|>assistant\n");
    let llama3 = "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>\
                  <|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
                  <|start_header_id|>assistant<|end_header_id|>\n\n";
    for jinja in [true, false] {
        assert_eq!(render_with("chatml", jinja, true).unwrap(), opened, "jinja {jinja}");
        assert_eq!(render_with("chatml", jinja, false).unwrap(), chatml, "jinja {jinja}");
        assert_eq!(render_with("llama3", jinja, true).unwrap(), llama3, "jinja {jinja}");
    }
    let template = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}\
                    {% if add_generation_prompt %}[assistant: {% endif %}";
    assert_eq!(render_with(template, true, true).unwrap(), "[system: Be brief.][user: Hi][assistant: ");
    assert_eq!(render_with(template, true, false).unwrap(), "[system: Be brief.][user: Hi]");
    for (template, jinja, reason) in [
        ("{% for m in messages %}", true, ""),
        ("{{ raise_exception('no system messages here') }}", true, "no system messages here"),
        ("a template that llama.cpp does not recognize", false, ""),
        ("nul \0", true, ""),
    ] {
        let error = render_with(template, jinja, true).unwrap_err();
        assert!(matches!(&error, ChatError::Template(found) if found.contains(reason)), "{template:?}: {error}");
    }
}

#[test]
fn a_models_templates_and_tokens_reach_the_interpreter() {
    let texts = |add| Texts {
        source: "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}".to_owned(),
        source_tool_use: "{{ bos_token }}{{ tools[0].function.name }}: {{ messages[0].content }}".to_owned(),
        bos: "<s>".to_owned(),
        eos: "</s>".to_owned(),
        add_bos: add,
        add_eos: add,
    };
    // BOS and EOS that the tokenizer adds are not written twice.
    for (add, plain, with_tools) in [(false, "<s>Hi</s>", "<s>get_time: Hi"), (true, "Hi", "get_time: Hi")] {
        let templates = ChatTemplates::read(texts(add)).unwrap();
        assert!(templates.was_explicit() && templates.source_tool_use().contains("tools[0]"));
        let asked = ChatInputs { tools: Some(GET_TIME.to_owned()), ..one_message() };
        for (inputs, expected) in [(one_message(), plain), (asked, with_tools)] {
            assert_eq!(templates.apply(&inputs).unwrap().prompt, expected, "{add}");
        }
    }
    let none = ChatTemplates::read(Texts::default()).unwrap();
    assert!(!none.was_explicit());
    assert_eq!(none.apply(&one_message()).unwrap().prompt, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
}

/// Like Qwen3's template: reasoning between tags; an empty pair turns thinking off.
const THINKS: &str = "{%- for message in messages -%}\
{{- '<|im_start|>' + message.role + '\n' -}}\
{%- if message.role == 'assistant' and message.reasoning_content -%}\
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}\
{%- endif -%}\
{{- message.content + '<|im_end|>\n' -}}\
{%- endfor -%}\
{%- if add_generation_prompt -%}\
{{- '<|im_start|>assistant\n' -}}\
{%- if enable_thinking is defined and enable_thinking is false -%}\
{{- '<think>\n\n</think>\n\n' -}}\
{%- endif -%}\
{%- endif -%}";

/// Like gpt-oss': channels.
const CHANNELS: &str = "{%- for message in messages -%}\
{%- if message.role == 'assistant' -%}\
{%- if message.thinking -%}\
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' -}}\
{%- endif -%}\
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}\
{%- else -%}\
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}\
{%- endif -%}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}";

fn templates(text: &str) -> ChatTemplates {
    ChatTemplates::from_text(text).unwrap()
}

fn one_message() -> ChatInputs {
    let messages = r#"[{"role": "user", "content": "Hi"}]"#.to_owned();
    ChatInputs { messages, ..ChatInputs::default() }
}

/// Like Hermes' and Qwen's: tool calls as JSON between tags.
const TOOLS: &str = "{%- if tools -%}{{- '<|im_start|>system\n' -}}\
{%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endif -%}\
{%- for message in messages -%}\
{{- '<|im_start|>' + message.role + '\n' -}}\
{%- if message.content -%}{{- message.content -}}{%- endif -%}\
{%- if message.tool_calls -%}\
{%- for call in message.tool_calls -%}\
{{- '<tool_call>\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' -}}\
{%- if call.function.arguments is string -%}\
{{- call.function.arguments -}}\
{%- else -%}\
{{- call.function.arguments | tojson -}}\
{%- endif -%}\
{{- '}\n</tool_call>' -}}\
{%- endfor -%}\
{%- endif -%}\
{{- '<|im_end|>\n' -}}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}";

const GET_TIME: &str = r#"[{"type": "function", "function": {"name": "get_time", "description": "The time.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]"#;

fn with_tools(tool_choice: ToolChoice) -> ChatPrompt {
    let inputs = ChatInputs { tools: Some(GET_TIME.to_owned()), tool_choice, ..one_message() };
    templates(TOOLS).apply(&inputs).unwrap()
}

fn reply(reasoning: &str, content: &str) -> ChatReply {
    ChatReply { content: content.into(), reasoning_content: reasoning.into(), tool_calls: Vec::new() }
}

#[test]
fn reasoning_between_tags() {
    let templates = templates(THINKS);
    assert!(templates.supports_thinking() && templates.was_explicit());
    assert_eq!((templates.source(), templates.source_tool_use()), (THINKS, ""));
    assert_eq!(templates.capabilities().get("supports_tools"), Some(&false));
    let prompt = templates.apply(&one_message()).unwrap();
    assert_eq!(prompt.prompt, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(prompt.generation_prompt, "<|im_start|>assistant\n");
    let tags = ThinkingTags { start: "<think>".into(), ends: vec!["</think>".into()] };
    assert_eq!(prompt.thinking, Some(tags));
    assert!(prompt.grammar.is_none() && prompt.additional_stops.is_empty());
    for (answer, expected) in [
        ("<think>\nhm</think>\n\nJa", reply("hm", "Ja")),
        ("<think>\nhm", reply("hm", "")),
        ("Ja", reply("", "Ja")),
        ("", reply("", "")),
        ("<think>a</think>b<think>c</think>d", reply("a", "b<think>c</think>d")),
    ] {
        assert_eq!(prompt.parser.parse(answer, false).unwrap(), expected, "{answer:?}");
    }
    let off = templates.apply(&ChatInputs { enable_thinking: false, ..one_message() }).unwrap();
    assert!(off.prompt.ends_with("<|im_start|>assistant\n<think>\n\n</think>\n\n"), "{:?}", off.prompt);
    assert_eq!(off.parser.parse("Ja", false).unwrap(), reply("", "Ja"));
    for format in [ReasoningFormat::None, ReasoningFormat::Deepseek, ReasoningFormat::DeepseekLegacy] {
        let prompt = templates.apply(&ChatInputs { reasoning_format: format, ..one_message() }).unwrap();
        let parsed = prompt.parser.parse("<think>\nhm</think>\n\nJa", false).unwrap();
        let apart = format != ReasoningFormat::None;
        let expected = if apart { reply("hm", "Ja") } else { reply("", "<think>\nhm</think>\n\nJa") };
        assert_eq!(parsed, expected, "{format}");
    }
    let pure = templates.apply(&ChatInputs { pure_content: true, ..one_message() }).unwrap();
    assert_eq!(pure.parser.parse("<think>a</think>b", false).unwrap(), reply("", "<think>a</think>b"));
}

#[test]
fn reasoning_in_channels() {
    let prompt = templates(CHANNELS).apply(&one_message()).unwrap();
    assert_eq!(prompt.prompt, "<|start|>user<|message|>Hi<|end|><|start|>assistant");
    let answer = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Ja";
    assert_eq!(prompt.parser.parse(answer, false).unwrap(), reply("hm", "Ja"));
    assert!(prompt.preserved_tokens.iter().any(|token| token == "<|channel|>"), "{prompt:?}");
    // Channel names never appear in the output, wherever the text is split.
    let mut stream = ChatStream::new(prompt.parser.clone(), String::new).unwrap();
    let mut seen = (String::new(), String::new());
    for c in answer.chars() {
        for change in stream.push(c.encode_utf8(&mut [0; 4]), true).unwrap() {
            match change {
                ChatDelta::Reasoning(text) => seen.0 += &text,
                ChatDelta::Content(text) => seen.1 += &text,
                ChatDelta::ToolCall(call) => panic!("{call:?}"),
            }
        }
    }
    assert_eq!((seen.0.as_str(), seen.1.as_str(), stream.text()), ("hm", "Ja", answer));
    let error = prompt.parser.parse("<|channel|>nonsense", false).unwrap_err();
    assert!(matches!(error, ChatError::Reply(_)), "{error}");
}

#[test]
fn a_template_constrains_the_sampler() {
    let plain = SamplingOptions { grammar: Some("root ::= \"a\"".into()), ..SamplingOptions::greedy() };
    let mut options = plain.clone();
    options.reasoning.tokens = Some(7);
    templates(THINKS).apply(&one_message()).unwrap().constrain(&mut options);
    assert_eq!((&options.grammar, options.grammar_kind), (&plain.grammar, GrammarKind::User), "the user's own stays");
    assert_eq!((options.reasoning.tokens, options.reasoning.start.as_str()), (Some(7), "<think>"));
    assert_eq!(options.reasoning.ends, ["</think>"]);
    assert_eq!(options.generation_prompt, "<|im_start|>assistant\n");
    with_tools(ToolChoice::Auto).constrain(&mut options);
    assert_eq!((options.grammar_kind, options.grammar_lazy), (GrammarKind::Template, true));
    assert!(options.reasoning.start.is_empty() && options.reasoning.ends.is_empty(), "{options:?}");
    assert!(options.preserved_tokens.iter().any(|token| token == "<tool_call>"), "{options:?}");
}

#[test]
fn tools_are_called() {
    let prompt = with_tools(ToolChoice::Auto);
    assert!(prompt.prompt.contains("get_time"), "{}", prompt.prompt);
    let grammar = prompt.grammar.as_ref().unwrap();
    assert!(grammar.lazy && grammar.text.contains("get_time"), "{grammar:?}");
    let is_tag =
        |trigger: &GrammarTrigger| matches!(trigger, GrammarTrigger::Word(word) if word.contains("<tool_call>"));
    assert!(grammar.triggers.iter().any(is_tag), "{grammar:?}");
    assert!(!with_tools(ToolChoice::Required).grammar.unwrap().lazy);
    assert_eq!(with_tools(ToolChoice::None).grammar, None);

    let answer =
        "Let me look.<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"city\": \"Zürich\"}}\n</tool_call>";
    let parsed = prompt.parser.parse(answer, false).unwrap();
    let arguments = |call: &ToolCall| serde_json::from_str::<serde_json::Value>(&call.arguments).unwrap();
    assert_eq!(parsed.content, "Let me look.");
    assert_eq!((parsed.tool_calls.len(), parsed.tool_calls[0].name.as_str()), (1, "get_time"));
    assert_eq!(arguments(&parsed.tool_calls[0]), serde_json::json!({"city": "Zürich"}));

    // The result is the same in pieces.
    let mut stream = ChatStream::new(prompt.parser, || "made up".to_owned()).unwrap();
    let (mut content, mut call, mut n_names) = (String::new(), ToolCall::default(), 0);
    let mut observe = |change: ChatDelta| match change {
        ChatDelta::Content(text) => content += &text,
        ChatDelta::Reasoning(text) => panic!("{text}"),
        ChatDelta::ToolCall(piece) => {
            n_names += usize::from(!piece.name.is_empty());
            assert_eq!(piece.index, 0);
            if !piece.name.is_empty() {
                (call.name, call.id) = (piece.name, piece.id);
            }
            call.arguments += &piece.arguments;
        }
    };
    for c in answer.chars() {
        stream.push(c.encode_utf8(&mut [0; 4]), true).unwrap().into_iter().for_each(&mut observe);
    }
    stream.push("", false).unwrap().into_iter().for_each(&mut observe);
    assert_eq!((content.as_str(), call.name.as_str(), call.id.as_str()), ("Let me look.", "get_time", "made up"));
    assert!(n_names >= 1);
    assert_eq!(arguments(&call), serde_json::json!({"city": "Zürich"}));
    assert_eq!(stream.reply().tool_calls, [call]);
}

/// Writes an id behind each call's name.
const WITH_IDS: &str = "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}\
{%- for message in messages -%}\
{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]\
{%- elif message.role == 'tool' %}\
[TOOL_RESULTS]{{ message.tool_call_id }}[TOOL_CONTENT]{{ message.content }}[/TOOL_RESULTS]\
{%- elif message.tool_calls -%}\
{%- for call in message.tool_calls -%}\
[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}\
{%- endfor -%}</s>\
{%- else -%}{{ message.content }}</s>{%- endif -%}\
{%- endfor -%}";

#[test]
fn ids_of_the_model_are_kept() {
    let inputs = ChatInputs { tools: Some(GET_TIME.to_owned()), ..one_message() };
    let prompt = templates(WITH_IDS).apply(&inputs).unwrap();
    let answer = "[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{\"city\": \"Rome\"}";
    let grammar = &prompt.grammar.as_ref().unwrap().text;
    assert_eq!(grammar.matches("\"[ARGS]\"").count(), 1, "{grammar}");
    assert_eq!(prompt.parser.parse(answer, false).unwrap().tool_calls[0].id, "abcdefghi", "{prompt:?}");
    let mut stream = ChatStream::new(prompt.parser, || "made up".to_owned()).unwrap();
    let mut ids = Vec::new();
    for c in answer.chars() {
        for change in stream.push(c.encode_utf8(&mut [0; 4]), true).unwrap() {
            let ChatDelta::ToolCall(call) = change else { panic!("{change:?}") };
            // A call's id comes with its arguments at the latest.
            ids.extend((!call.arguments.is_empty() && !call.id.is_empty()).then_some(call.id));
        }
    }
    stream.push("", false).unwrap();
    assert_eq!(stream.reply().tool_calls[0].id, "abcdefghi");
    assert!(ids.iter().all(|id| id == "abcdefghi"), "{ids:?}");
}

/// A long call is parsed when it has grown by a share of its length, not at each token.
#[test]
fn a_long_call_is_parsed_seldom() {
    let stream = || ChatStream::new(with_tools(ToolChoice::Auto).parser, || "made up".to_owned()).unwrap();
    let n_parsed = |n: usize| {
        let (mut stream, mut n_parsed, mut arguments) = (stream(), 0, String::new());
        let city = "Z".repeat(n);
        let answer =
            format!("<tool_call>\n{{\"name\": \"get_time\", \"arguments\": {{\"city\": \"{city}\"}}}}\n</tool_call>");
        let pieces: Vec<String> = answer.chars().map(String::from).collect();
        for piece in pieces.iter().map(String::as_str).chain([""]) {
            let changes = stream.push(piece, !piece.is_empty()).unwrap();
            n_parsed += usize::from(!changes.is_empty());
            for change in changes {
                let ChatDelta::ToolCall(piece) = change else { panic!("{change:?}") };
                arguments += &piece.arguments;
            }
        }
        assert_eq!(arguments.matches('Z').count(), n);
        n_parsed
    };
    let (short, long) = (n_parsed(1000), n_parsed(8000));
    assert!(short > 900, "a short one is shown at every token");
    assert!(long < 2400, "{long}");
}

/// Reference: the changes of a stream that parses the whole text again at each piece.
fn deltas_of_full_parses(parser: &ChatParser, pieces: &[&str]) -> Vec<Vec<ChatDelta>> {
    let (mut text, mut before) = (String::new(), parser.prefilled().unwrap());
    let mut next = |piece: &&str| {
        text += piece;
        let Ok(reply) = parser.parse(&text, true) else { return Vec::new() };
        if reply.is_empty() {
            return Vec::new();
        }
        let Ok(changes) = reply.changes_since(&before) else { return Vec::new() };
        before = reply;
        changes
    };
    pieces.iter().map(&mut next).collect()
}

#[test]
fn shortcuts_change_no_delta() {
    let inputs = |reasoning_format| ChatInputs { reasoning_format, ..one_message() };
    let prompts = [
        templates(THINKS).apply(&inputs(ReasoningFormat::Deepseek)).unwrap(),
        templates(THINKS).apply(&inputs(ReasoningFormat::None)).unwrap(),
        templates(THINKS).apply(&ChatInputs { enable_thinking: false, ..one_message() }).unwrap(),
        templates(THINKS).apply(&ChatInputs { pure_content: true, ..one_message() }).unwrap(),
        templates(CHANNELS).apply(&one_message()).unwrap(),
        templates(TOOLS).apply(&one_message()).unwrap(),
        with_tools(ToolChoice::Auto),
        with_tools(ToolChoice::Required),
    ];
    let special = "<think>~</think>~<thi~nk>~</~<~>~<tool_call>~\
                   </tool_call>~\n~ ~ä~{\"name\": \"get_time\"~, \"arguments\": {\"city\": \"Rome\"}}~\
                   <|channel|>analysis<|message|>~<|channel|>final<|message|>~<|end|>~<|start|>assistant";
    let special: Vec<&str> = special.split('~').collect();
    let words = ["word", " and", " more", " words", " which", " go on.", "{", "[1]"];
    let mut random = 1_u32;
    let mut below = |n: usize| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 16) as usize % n
    };
    let mut n_growing = vec![0; prompts.len()];
    for round in 0..400 {
        for (prompt, n_growing) in prompts.iter().zip(&mut n_growing) {
            // More words than special pieces.
            let piece = |_| match below(3) {
                0 => special[below(special.len())],
                _ => words[below(words.len())],
            };
            let mut pieces: Vec<&str> = (0..20).map(piece).collect();
            match below(4) {
                0 => pieces.insert(0, "<think>"),
                1 => pieces.insert(0, "<|channel|>analysis<|message|>"),
                2 => pieces.insert(0, "<|channel|>final<|message|>"),
                _ => {}
            }
            let expected = deltas_of_full_parses(&prompt.parser, &pieces);
            let mut stream = ChatStream::new(prompt.parser.clone(), String::new).unwrap();
            for (at, (piece, expected)) in pieces.iter().zip(expected).enumerate() {
                let mut deltas = stream.push(piece, true).unwrap_or_default();
                // Generated ids are arbitrary.
                for change in &mut deltas {
                    if let ChatDelta::ToolCall(call) = change {
                        call.id.clear();
                    }
                }
                assert_eq!(deltas, expected, "round {round}, piece {at} of {pieces:?} ({})", prompt.format);
                *n_growing += usize::from(stream.is_growing());
            }
            assert_eq!(stream.text(), pieces.concat());
        }
    }
    assert!(n_growing.iter().all(|n| *n > 400), "{n_growing:?}");
}

#[test]
fn a_schema_becomes_a_grammar() {
    let schema = r#"{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}"#;
    for template in [THINKS, TOOLS] {
        let inputs = ChatInputs { json_schema: Some(schema.to_owned()), ..one_message() };
        let grammar = templates(template).apply(&inputs).unwrap().grammar.unwrap();
        assert!(!grammar.lazy && grammar.text.contains("root ::="), "{grammar:?}");
    }
}

#[test]
fn a_message_is_continued() {
    let messages = r#"[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ja, "}]"#.to_owned();
    let inputs = ChatInputs {
        messages,
        add_generation_prompt: false,
        continue_final_message: Continuation::Auto,
        ..ChatInputs::default()
    };
    let prompt = templates(TOOLS).apply(&inputs).unwrap();
    assert!(prompt.prompt.ends_with("<|im_start|>assistant\nJa, "), "{:?}", prompt.prompt);
    assert_eq!(prompt.parser.prefilled().unwrap().content, "Ja, ");
    let mut stream = ChatStream::new(prompt.parser, String::new).unwrap();
    assert_eq!(stream.push("gut.", true).unwrap(), [ChatDelta::Content("gut.".into())]);
    assert_eq!(stream.reply().content, "Ja, gut.");
    let both = ChatInputs { add_generation_prompt: true, ..inputs };
    assert!(matches!(templates(TOOLS).apply(&both), Err(ChatError::Input(_))));
}

fn nested(n: usize) -> String {
    "[".repeat(n) + &"]".repeat(n)
}

#[test]
fn hostile_inputs_are_errors() {
    let templates = templates(TOOLS);
    let refusal = |change: &dyn Fn(&mut ChatInputs)| {
        let mut inputs = one_message();
        change(&mut inputs);
        let error = templates.apply(&inputs).unwrap_err();
        assert!(matches!(error, ChatError::Input(_)), "{error}");
        error.to_string()
    };
    let deep = nested(1_000_000);
    assert!(refusal(&|inputs| inputs.messages.clone_from(&deep)).contains("nested"));
    assert!(refusal(&|inputs| inputs.tools = Some(deep.clone())).contains("nested"));
    assert!(refusal(&|inputs| inputs.json_schema = Some(deep.clone())).contains("nested"));
    assert!(refusal(&|inputs| drop(inputs.template_kwargs.insert("x".into(), deep.clone()))).contains("'x'"));
    let calls = |arguments: &str| {
        let call = serde_json::json!({"type": "function", "function": {"name": "get_time", "arguments": arguments}});
        serde_json::json!([{"role": "assistant", "tool_calls": [call]}]).to_string()
    };
    assert!(refusal(&|inputs| inputs.messages = calls(&deep)).contains("arguments of a tool call"));
    for messages in [
        "",
        "{}",
        "null",
        "[1]",
        "[{}]",
        r#"[{"role": "user"}]"#,
        r#"[{"role": 1, "content": "x"}]"#,
        r#"[{"role": "user", "content": 1}]"#,
        r#"[{"role": "user", "content": [{"type": "image_url"}]}]"#,
        r#"[{"role": "user", "content": "#,
        r#"[{"role": "assistant", "tool_calls": [{"type": "function"}]}]"#,
        "[{\"role\": \"user\", \"content\": \"\\ud800\"}]",
    ] {
        refusal(&|inputs| inputs.messages = messages.to_owned());
    }
    for tools in ["{}", "[1]", "[{}]", r#"[{"type": "function"}]"#, r#"[{"type": "function", "function": {}}]"#] {
        refusal(&|inputs| inputs.tools = Some(tools.to_owned()));
    }
    let legacy = r#"[{"role": "user", "content": "a\u0000b"}]"#;
    refusal(&|inputs| (inputs.messages, inputs.use_jinja) = (legacy.to_owned(), false));
}

/// Runs `call` on a thread with a default stack: accepted input must not overflow it.
fn on_a_small_stack(call: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().stack_size(STACK_BYTES).spawn(call).unwrap().join().unwrap();
}

/// Stack that the standard library gives a thread.
const STACK_BYTES: usize = 2 << 20;

#[test]
fn deep_inputs_within_the_limits_are_read() {
    on_a_small_stack(|| {
        let deep = nested(limits::DEPTH_MAX - 6);
        let call = serde_json::json!({"type": "function", "function": {"name": "get_time", "arguments": deep}});
        let messages = serde_json::json!([{"role": "assistant", "tool_calls": [call]}]).to_string();
        let mut schema = r#"{"type": "string"}"#.to_owned();
        for _ in 0..limits::DEPTH_MAX / 2 - 4 {
            schema = format!(r#"{{"type": "object", "properties": {{"x": {schema}}}}}"#);
        }
        let tools = GET_TIME.replace(r#"{"type": "string"}"#, &schema[..]);
        let kwargs = [("deep".to_owned(), deep)].into();
        let parameters = ChatInputs { messages, template_kwargs: kwargs, ..ChatInputs::default() };
        let _ = templates(TOOLS).apply(&parameters);
        let _ = templates(TOOLS).apply(&ChatInputs { tools: Some(tools), ..one_message() });
        let schema = ChatInputs { json_schema: Some(schema), ..one_message() };
        assert!(templates(TOOLS).apply(&schema).unwrap().grammar.is_some());
    });
}

#[test]
fn deep_answers() {
    on_a_small_stack(|| {
        let parser = with_tools(ToolChoice::Auto).parser;
        let answer = |arguments: &str| {
            format!("<tool_call>\n{{\"name\": \"get_time\", \"arguments\": {{\"city\": {arguments}}}}}\n</tool_call>")
        };
        for (text, is_partial) in
            [(answer(&nested(limits::ANSWER_DEPTH_MAX - 2)), false), (answer(&"[".repeat(4990)), true)]
        {
            let _ = parser.parse(&text, is_partial);
        }
        let error = parser.parse(&answer(&nested(1_000_000)), false).unwrap_err();
        assert!(error.to_string().contains("nested"), "{error}");
    });
}

#[test]
fn a_continued_message_may_be_deep() {
    let messages = serde_json::json!([
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "{\"a\": ".to_owned() + &"[".repeat(2000)},
    ]);
    let inputs = ChatInputs {
        messages: messages.to_string(),
        json_schema: Some("{}".to_owned()),
        add_generation_prompt: false,
        continue_final_message: Continuation::Auto,
        ..ChatInputs::default()
    };
    let read = move || {
        let prompt = templates(THINKS).apply(&inputs).unwrap();
        // Any result is fine as long as the call returns.
        let _ = (prompt.parser.prefilled(), prompt.parser.parse("[", true));
    };
    on_a_small_stack(read);
}

#[test]
fn schemas_without_end_are_refused() {
    let endless = r##"{"$defs": {"a": {"$ref": "#/$defs/a"}}, "allOf": [{"$ref": "#/$defs/a"}]}"##;
    let tool = format!(r#"[{{"type": "function", "function": {{"name": "f", "parameters": {endless}}}}}]"#);
    for inputs in [
        ChatInputs { json_schema: Some(endless.to_owned()), ..one_message() },
        ChatInputs { tools: Some(tool), ..one_message() },
    ] {
        let error = templates(THINKS).apply(&inputs).unwrap_err();
        assert!(matches!(&error, ChatError::Input(reason) if reason.contains("leads to itself")), "{error}");
    }
}

#[test]
fn templates_that_are_too_deep_are_refused() {
    for hostile in [
        format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000)),
        "{{ ".to_owned() + &"not ".repeat(60_000) + "x }}",
    ] {
        let error = ChatTemplates::from_text(&hostile).unwrap_err();
        assert!(
            matches!(&error, ChatError::Template(reason) if reason.contains("the template has more than")),
            "{error}"
        );
    }
    let deep = format!("{{{{ {}1{} }}}}{{{{ messages[0].content }}}}", "(".repeat(900), ")".repeat(900));
    let templates = ChatTemplates::from_text(&deep).unwrap();
    assert_eq!(templates.apply(&one_message()).unwrap().prompt, "1Hi");
}
