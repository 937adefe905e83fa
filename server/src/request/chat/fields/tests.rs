//! Literal requests.

use super::*;
use crate::request::media;

fn read_with(body: Value, change: impl FnOnce(&mut Defaults)) -> Result<Request, ApiError> {
    let reasoning = Reasoning { budget: Some(7), ..Reasoning::default() };
    let mut defaults = Defaults {
        reasoning: &reasoning,
        jinja: true,
        prefills_assistant: true,
        template_reasons: true,
        calls_in_parallel: false,
        marker: None,
    };
    change(&mut defaults);
    let Value::Object(mut fields) = body else { panic!("a body is an object") };
    fields.entry("messages").or_insert_with(|| json!([{"role": "user", "content": "Hi"}]));
    read(fields, &defaults)
}

fn read_one(body: Value) -> Request {
    read_with(body.clone(), |_| {}).unwrap_or_else(|error| panic!("{body}: {}", error.message))
}

fn message(body: Value) -> String {
    let error = read_with(body.clone(), |_| {}).err().unwrap_or_else(|| panic!("{body} was read"));
    assert_eq!(error.status.as_u16(), 400);
    error.message
}

fn tool(name: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {"z": {}, "a": {}}});
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

#[test]
fn a_plain_request() {
    let request = read_one(json!({"max_tokens": 5, "stream": true, "stream_options": {"include_usage": true}}));
    assert_eq!(request.inputs.messages, r#"[{"role":"user","content":"Hi"}]"#);
    assert!(request.inputs.add_generation_prompt && request.inputs.enable_thinking && request.include_usage);
    assert_eq!(request.inputs.continue_final_message, Continuation::None);
    assert_eq!((request.inputs.tools, request.inputs.json_schema), (None, None));
    assert_eq!(request.rest["max_tokens"], 5);
    assert_eq!(request.budget.tokens, Some(7));
}

#[test]
fn tools_keep_their_order() {
    let request = read_one(json!({"tools": [tool("b"), tool("a")], "parallel_tool_calls": true}));
    let tools = request.inputs.tools.unwrap();
    assert!(tools.find(r#""b""#) < tools.find(r#""a","#) && tools.contains(r#"{"z":{},"a":{}}"#), "{tools}");
    assert!(request.inputs.parallel_tool_calls);
    for (choice, expected) in
        [("auto", ToolChoice::Auto), ("required", ToolChoice::Required), ("none", ToolChoice::None)]
    {
        let request = read_one(json!({"tools": [tool("b")], "tool_choice": choice}));
        assert_eq!(request.inputs.tool_choice, expected);
    }
}

#[test]
fn one_tool_by_name() {
    let choice = json!({"type": "function", "function": {"name": "a"}});
    let request = read_one(json!({"tools": [tool("b"), tool("a")], "tool_choice": choice}));
    assert_eq!(request.inputs.tool_choice, ToolChoice::Required);
    assert!(!request.inputs.tools.unwrap().contains(r#""b""#));
    assert!(message(json!({"tools": [tool("b")], "tool_choice": choice})).contains("no tool 'a'"));
    assert_eq!(message(json!({"tool_choice": "always"})), "Invalid tool_choice: always");
}

#[test]
fn allowed_tools() {
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let all = json!([tool("a"), tool("b"), tool("c")]);
    let chat = json!({"type": "allowed_tools", "allowed_tools": {
        "mode": "required", "tools": [named("a"), named("c")],
    }});
    let request = read_one(json!({"tools": all, "tool_choice": chat}));
    let tools = request.inputs.tools.unwrap();
    assert_eq!(request.inputs.tool_choice, ToolChoice::Required);
    assert!(tools.contains(r#""a""#) && !tools.contains(r#""b""#) && tools.contains(r#""c""#), "{tools}");
    let responses = json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]});
    let request = read_one(json!({"tools": all, "tool_choice": responses}));
    assert_eq!(request.inputs.tool_choice, ToolChoice::Auto);
    assert!(!request.inputs.tools.unwrap().contains(r#""a","#));
    for wrong in [
        json!({"type": "allowed_tools"}),
        json!({"type": "allowed_tools", "tools": []}),
        json!({"type": "allowed_tools", "mode": "often", "tools": [named("a")]}),
    ] {
        message(json!({"tools": all, "tool_choice": wrong}));
    }
    let missing = json!({"type": "allowed_tools", "tools": [named("a"), named("z")]});
    assert!(message(json!({"tools": all, "tool_choice": missing})).contains("no tool 'z'"));
}

#[test]
fn without_jinja_there_are_no_tools() {
    let plain = |body: Value| read_with(body, |defaults| defaults.jinja = false).map_err(|error| error.message);
    assert!(plain(json!({})).is_ok());
    assert_eq!(plain(json!({"tools": [tool("a")]})).unwrap_err(), "tools param requires --jinja flag");
    assert_eq!(plain(json!({"tool_choice": "none"})).unwrap_err(), "tool_choice param requires --jinja flag");
}

#[test]
fn schemas() {
    let schema = |body: Value| read_one(body).inputs.json_schema;
    let any = Some(r#"{"type":"object"}"#.to_owned());
    assert_eq!(schema(json!({"response_format": {"type": "text"}})), None);
    assert_eq!(schema(json!({"response_format": {"type": "json_object"}})), any);
    let given = json!({"response_format": {"type": "json_object", "schema": {"const": "42"}}});
    assert_eq!(schema(given), Some(r#"{"const":"42"}"#.to_owned()));
    let wrapped =
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"b": 1, "a": 2}}}});
    assert_eq!(schema(wrapped), Some(r#"{"b":1,"a":2}"#.to_owned()));
    assert_eq!(schema(json!({"json_schema": {}})), any);
    for format in [
        json!("sound"),
        json!({"type": 123}),
        json!({"type": "hiccup"}),
        json!({"type": "json_object", "schema": 123}),
        json!({"type": "json_schema", "json_schema": 123}),
    ] {
        message(json!({"response_format": format}));
    }
    assert_eq!(
        message(json!({"json_schema": {}, "grammar": "root ::= \"a\""})),
        "Cannot use both json_schema and grammar"
    );
    let both = json!({"tools": [tool("a")], "grammar": "root ::= \"a\""});
    assert_eq!(message(both), "Cannot use custom grammar constraints with tools.");
}

#[test]
fn last_messages_are_continued() {
    let chat = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Wh"}]);
    let read = |more: Value, prefills: bool| {
        let mut body = json!({"messages": chat});
        body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        let inputs = read_with(body, |defaults| defaults.prefills_assistant = prefills).unwrap().inputs;
        (inputs.continue_final_message, inputs.add_generation_prompt)
    };
    assert_eq!(read(json!({}), true), (Continuation::Auto, false));
    assert_eq!(read(json!({}), false), (Continuation::None, true));
    let reasoning = json!({"continue_final_message": "reasoning_content"});
    assert_eq!(read(reasoning, true), (Continuation::Reasoning, false));
    let call = json!({"type": "function", "function": {"name": "a", "arguments": "{}"}});
    let two = json!([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]);
    for (body, expected) in [
        (json!({"messages": chat, "continue_final_message": true, "add_generation_prompt": true}), "Cannot set both"),
        (json!({"messages": two}), "2 or more assistant messages"),
        (json!({"messages": [{"role": "assistant", "tool_calls": [call]}]}), "contains tool calls"),
    ] {
        assert!(message(body).contains(expected), "{expected}");
    }
}

#[test]
fn reasoning_fields() {
    let request =
        read_one(json!({"reasoning_effort": "none", "thinking_budget_tokens": 3, "reasoning_budget_message": "So:"}));
    assert!(!request.inputs.enable_thinking);
    assert_eq!((request.budget.tokens, request.budget.message.as_str()), (Some(3), "So:"));
    let request = read_one(json!({"reasoning_effort": "high", "reasoning_budget_tokens": -1}));
    assert_eq!(request.inputs.template_kwargs[REASONING_EFFORT], r#""high""#);
    assert_eq!(request.budget.tokens, Some(7));
    let request =
        read_one(json!({"chat_template_kwargs": {"enable_thinking": false, "x": [1]}, "reasoning_format": "none"}));
    assert!(!request.inputs.enable_thinking);
    assert_eq!(request.inputs.template_kwargs["x"], "[1]");
    assert_eq!(request.inputs.reasoning_format, ReasoningFormat::None);
    message(json!({"chat_template_kwargs": {"enable_thinking": "no"}}));
    message(json!({"reasoning_format": "loud"}));
}

#[test]
fn probabilities_of_tokens() {
    assert_eq!(read_one(json!({"logprobs": true})).rest["n_probs"], 20);
    assert_eq!(read_one(json!({"logprobs": true, "top_logprobs": 3})).rest["n_probs"], 3);
    assert!(!read_one(json!({"logprobs": false})).rest.contains_key("n_probs"));
    assert!(message(json!({"top_logprobs": 3})).contains("requires logprobs"));
    // The chosen tokens only.
    let chosen = read_one(json!({"logprobs": true, "top_logprobs": 0}));
    assert_eq!((&chosen.rest["n_probs"], chosen.n_top), (&json!(1), 0));
    assert!(!read_one(json!({"top_logprobs": 0})).rest.contains_key("n_probs"));
    let streamed = read_one(json!({"logprobs": true, "stream": true, "tools": [tool("a")]}));
    assert_eq!(streamed.rest["n_probs"], 20);
}

#[test]
fn invalid_conversations() {
    for messages in [
        json!("text"),
        json!([123]),
        json!([{}]),
        json!([{"role": 123}]),
        json!([{"role": 123, "content": "x"}]),
        json!([{"content": "x"}]),
        json!([{"role": "system", "content": 123}]),
        json!([{"role": "user", "content": "x"}, {}]),
        json!([{"role": "user"}]),
        json!([{"role": "assistant"}]),
        json!([{"role": "assistant", "tool_calls": null}]),
        json!([{"role": "user", "content": [{"type": "text"}]}]),
        json!([{"role": "user", "content": [{"type": "dream", "text": "x"}]}]),
        json!([{"role": "user", "content": ["x"]}]),
    ] {
        let error = check_messages(&mut messages.clone(), None, &mut Vec::new()).unwrap_err();
        assert_eq!(error.status.as_u16(), 400, "{messages}");
    }
}

#[test]
fn a_conversation() {
    let mut messages = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {"role": "assistant", "content": null, "tool_calls": []},
        {"role": "assistant", "tool_calls": []},
    ]);
    check_messages(&mut messages, None, &mut Vec::new()).unwrap();
    assert_eq!(messages[0], json!({"role": "system", "content": "s"}));
    assert_eq!(messages[2]["content"], Value::Null);
    assert!(check_messages(&mut json!([]), None, &mut Vec::new()).is_ok());
}

fn checked(mut messages: Value) -> Value {
    check_messages(&mut messages, Some("<m>"), &mut Vec::new()).unwrap_or_else(|error| panic!("{}", error.message));
    messages
}

#[test]
fn lists_are_joined_where_templates_do_not_read_them() {
    let text = |text: &str| json!({"type": "text", "text": text});
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}});
    let own = checked(json!([
        {"role": "system", "content": [text("a"), text("b")]},
        {"role": "user", "content": [text("c"), text("d")]},
        {"role": "assistant", "content": [text("e"), text("f")]},
        {"role": "tool", "tool_call_id": "1", "content": [text("g"), image, text("h")]},
        {"role": "tool", "tool_call_id": "2", "content": []},
    ]));
    let contents: Vec<&Value> = own.as_array().unwrap().iter().map(|message| &message["content"]).collect();
    assert_eq!(
        contents,
        [&json!("a\nb"), &json!([text("c"), text("d")]), &json!("e\n\nf"), &json!("g<m>h"), &json!("")]
    );
}

#[test]
fn system_messages_at_the_beginning_are_one() {
    let own = checked(json!([
        {"role": "developer", "content": "a"}, {"role": "system", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"}, {"role": "system", "content": "d"}, {"role": "system", "content": "e"},
    ]));
    let said: Vec<(&str, &str)> = own
        .as_array()
        .unwrap()
        .iter()
        .map(|own| (own["role"].as_str().unwrap(), own["content"].as_str().unwrap()))
        .collect();
    assert_eq!(said, [("developer", "a\n\nb"), ("user", "c"), ("system", "d"), ("system", "e")]);
}

#[test]
fn earlier_answers_are_completed() {
    let call = |function: Value| json!({"id": "1", "type": "function", "function": function});
    let own = checked(json!([
        {"role": "assistant", "tool_calls": [
            call(json!({"name": "a", "arguments": ""})), call(json!({"name": "b", "arguments": " "})),
            call(json!({"name": "c"})), {"function": {"name": "d", "arguments": {"e": 1}}},
        ]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "sunny"},
        {"role": "assistant", "content": null, "refusal": "No."},
        {"role": "assistant", "content": "Well.", "refusal": "No."},
        {"role": "assistant", "reasoning_content": "a", "content": [
            {"type": "thinking", "thinking": "b"}, {"type": "text", "text": "x"},
            {"type": "thinking", "thinking": [{"type": "text", "text": "c"}]}, {"type": "refusal", "refusal": "y"},
        ]},
    ]));
    let arguments: Vec<&Value> =
        own[0]["tool_calls"].as_array().unwrap().iter().map(|call| &call["function"]["arguments"]).collect();
    assert_eq!(arguments, [&json!("{}"), &json!("{}"), &json!("{}"), &json!({"e": 1})]);
    assert_eq!(own[0]["tool_calls"][3]["type"], "function");
    assert_eq!(own[1]["tool_calls"][0]["function"]["name"], "f");
    assert_eq!(own[2], json!({"role": "tool", "name": "f", "content": "sunny"}));
    assert_eq!((&own[3]["content"], &own[4]["content"]), (&json!("No."), &json!("Well.\n\nNo.")));
    assert_eq!(own[5], json!({"role": "assistant", "reasoning_content": "abc", "content": "x\n\ny"}));
}

#[test]
fn unknown_parts_are_refused_by_type() {
    let part = |role: &str, part: Value| {
        let mut messages = json!([{"role": role, "content": [part]}]);
        check_messages(&mut messages, None, &mut Vec::new()).map(|()| messages).map_err(|error| error.message)
    };
    assert!(part("user", json!({"type": "dream", "text": "x"})).unwrap_err().contains("'dream'"));
    assert!(part("user", json!({"type": "thinking", "thinking": "x"})).unwrap_err().contains("'thinking'"));
    assert!(part("assistant", json!({"type": "thinking", "thinking": 7})).unwrap_err().contains("'thinking'"));
    assert!(part("user", json!({"type": "file", "file": {"file_id": "x"}})).unwrap_err().contains("not fetched"));
    let file = json!({"type": "file", "file": {"file_data": "data:text/plain;base64,SGk="}});
    assert!(part("user", file).unwrap()[0]["content"][0]["text"].as_str().unwrap().contains("Hi"));
}

#[test]
fn images_are_refused_without_a_projector() {
    let mut messages = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
    let error = check_messages(&mut messages, None, &mut Vec::new()).unwrap_err();
    assert!(error.message.contains("image input is not supported"), "{}", error.message);
    assert_eq!(error.status.as_u16(), 400);
}

#[test]
fn images_leave_markers() {
    let image =
        |byte: &str| json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{byte}")}});
    let text = json!({"type": "text", "text": "a"});
    let sound = json!({"type": "input_audio", "input_audio": {"data": "Ag==", "format": "wav"}});
    let mut messages = json!([
        {"role": "user", "content": [text, image("AA==")]},
        {"role": "user", "content": [image("AQ=="), sound]},
    ]);
    let mut media = Vec::new();
    check_messages(&mut messages, Some("<m>"), &mut media).unwrap();
    let marker = json!({"type": "media_marker", "text": "<m>"});
    assert_eq!(messages[0]["content"], json!([text, marker]));
    assert_eq!(messages[1]["content"], json!([marker, marker]));
    assert_eq!(media, [[0], [1], [2]]);
    let many = vec![image("AA=="); media::COUNT_MAX + 1];
    let mut messages = json!([{"role": "user", "content": many}]);
    let error = check_messages(&mut messages, Some("<m>"), &mut Vec::new()).unwrap_err();
    assert!(error.message.contains("at most"), "{}", error.message);
}
