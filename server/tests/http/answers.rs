//! Answers of the text endpoints: a stream has the same text, tool calls and reasoning as a complete answer.

use serde_json::{Value, json};

use super::rig::{Event, Server, TEMPLATE, pushed, with};

const CHAT: &str = "/v1/chat/completions";

/// A request that every endpoint for conversations and texts understands.
fn ask(n: i32) -> Value {
    json!({
        "messages": [{"role": "user", "content": "Well?"}], "input": "Well?", "prompt": "The river runs",
        "max_tokens": n, "max_output_tokens": n, "cache_prompt": false,
    })
}

fn texts(events: &[Event], path: &str) -> String {
    events.iter().filter_map(|event| event.data.pointer(path)?.as_str()).collect()
}

/// The types of named events, each once in a row.
fn order(events: &[Event]) -> String {
    assert!(events.iter().all(|event| event.name.as_deref() == event.data["type"].as_str()));
    let mut order: Vec<&str> = events.iter().filter_map(|event| event.data["type"].as_str()).collect();
    order.dedup();
    order.join(" ")
}

#[test]
fn completions_are_streamed() {
    let server = Server::start(&[]);
    let path = "/v1/completions";
    let body = with(ask(24), json!({"logprobs": 2}));
    let whole = server.post(path, &body).ok();
    let choice = &whole["choices"][0];
    assert_eq!((&whole["object"], &choice["finish_reason"]), (&json!("text_completion"), &json!("length")));
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), 24);
    let events: Vec<Event> = server.stream(path, &body).collect();
    assert_eq!(texts(&events, "/choices/0/text"), choice["text"].as_str().unwrap());
    let [.., last, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!(done.data, Value::Null);
    assert_eq!(last.data["usage"]["completion_tokens"], 24);

    let whole = server.post(path, &json!({"prompt": ["One", "Two", "One"], "max_tokens": 8})).ok();
    let texts: Vec<&str> = (0..3).map(|at| whole["choices"][at]["text"].as_str().unwrap()).collect();
    assert_eq!(texts[0], texts[2]);
    assert_eq!(whole["usage"]["completion_tokens"], 24);
    let stopped = server.post(path, &json!({"prompt": "One", "max_tokens": 8, "stop": texts[0].split_at(3).1})).ok();
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["choices"][0]["text"], texts[0][..3]);
}

#[test]
fn messages_are_streamed() {
    let server = Server::start(&[]);
    let body = with(ask(16), json!({"system": "Book"}));
    let whole = server.post("/v1/messages", &body).ok();
    assert_eq!((&whole["type"], &whole["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!("max_tokens"), &Value::Null));
    assert_eq!(whole["usage"]["output_tokens"], 16);
    let events: Vec<Event> = server.stream("/v1/messages", &body).collect();
    let expected =
        "message_start content_block_start content_block_delta content_block_stop message_delta message_stop";
    assert_eq!(order(&events), expected);
    assert_eq!(whole["content"], json!([{"type": "text", "text": texts(&events, "/delta/text")}]));
    let usage = &events[0].data["message"]["usage"];
    let n = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(server.post("/v1/messages/count_tokens", &body).ok(), json!({"input_tokens": n}));
}

#[test]
fn responses_are_streamed() {
    let server = Server::start(&[]);
    let body = with(ask(16), json!({"instructions": "Book"}));
    let whole = server.post("/v1/responses", &body).ok();
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("incomplete")));
    assert_eq!(whole["usage"]["output_tokens"], 16);
    let events: Vec<Event> = server.stream("/v1/responses", &body).collect();
    assert!(events.iter().enumerate().all(|(at, event)| event.data["sequence_number"] == at));
    let expected = "created in_progress output_item.added content_part.added output_text.delta output_text.done \
                    content_part.done output_item.done incomplete";
    assert_eq!(order(&events).replace("response.", ""), expected);
    let last = &events.last().unwrap().data;
    for output in [&whole["output"], &last["response"]["output"]] {
        assert_eq!(output[0]["content"][0]["text"], texts(&events, "/delta"));
    }
    assert_eq!(last["response"]["id"], events[0].data["response"]["id"]);
    let count = server.post("/v1/responses/input_tokens", &body).ok();
    assert_eq!(count["input_tokens"], whole["usage"]["input_tokens"]);
}

#[test]
fn tools_are_called() {
    let server = Server::start(&["--chat-template-file", TEMPLATE]);
    let city = json!({"city": "Paris"});
    let parsed = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]});

    let tools = json!([{"name": "weather", "description": "d", "input_schema": schema}]);
    let choice = json!({"type": "tool", "name": "weather"});
    let body = with(with(ask(200), pushed()), json!({"tools": tools, "tool_choice": choice}));
    let whole = server.post("/v1/messages", &body).ok();
    assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
    let block = whole["content"].as_array().unwrap().last().unwrap();
    assert_eq!((&block["type"], &block["input"]), (&json!("tool_use"), &city));
    let events: Vec<Event> = server.stream("/v1/messages", &body).collect();
    assert_eq!(parsed(&texts(&events, "/delta/partial_json")), city);
    let indices = |kind: &str| -> Vec<&Value> {
        events.iter().filter(|event| event.data["type"] == kind).map(|event| &event.data["index"]).collect()
    };
    assert_eq!(indices("content_block_start"), indices("content_block_stop"));

    let function = json!({"type": "function", "name": "weather", "description": "d", "parameters": schema});
    let tools = json!({"tools": [{"type": "web_search"}, function], "tool_choice": "required"});
    let body = with(with(ask(200), pushed()), tools);
    let whole = server.post("/v1/responses", &body).ok();
    let call = whole["output"].as_array().unwrap().last().unwrap();
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("weather")), "{whole}");
    let arguments = call["arguments"].as_str().unwrap();
    assert_eq!(parsed(arguments), city);
    let events: Vec<Event> = server.stream("/v1/responses", &body).collect();
    assert!(texts(&events, "/delta").ends_with(arguments), "{events:?}");
    // The call and its result go back.
    let result = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"});
    let input = json!([{"role": "user", "content": "The weather?"}, call, result]);
    server.post("/v1/responses", &json!({"input": input, "max_output_tokens": 4})).ok();
}

/// A schema that leaves the model one answer.
#[test]
fn messages_follow_a_schema() {
    let server = Server::start(&[]);
    let schema = json!({"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"],
        "additionalProperties": false});
    let format = json!({"format": {"type": "json_schema", "schema": schema}});
    let answer = server.post("/v1/messages", &with(ask(64), json!({"output_config": format}))).ok();
    let text: Value = serde_json::from_str(answer["content"][0]["text"].as_str().unwrap()).unwrap();
    assert_eq!(text, json!({"city": "Rome"}));
}

#[test]
fn responses_go_on_from_earlier_ones() {
    let server = Server::start(&[]);
    let path = "/v1/responses";
    let first = server.post(path, &with(ask(8), json!({"instructions": "Be brief."}))).ok();
    let said = &first["output"][0]["content"][0]["text"];
    let next = json!({"input": "And then?", "max_output_tokens": 8, "previous_response_id": first["id"]});
    let second = server.post(path, &next).ok();
    // Instructions are not carried over.
    let whole = json!({"max_output_tokens": 8, "input": [
        {"role": "user", "content": "Well?"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]},
        {"role": "user", "content": "And then?"},
    ]});
    let expected = server.post(path, &whole).ok();
    assert_eq!(second["usage"]["input_tokens"], expected["usage"]["input_tokens"]);
    assert_eq!(second["output"][0]["content"], expected["output"][0]["content"]);
    let events: Vec<Event> = server.stream(path, &next).collect();
    let id = &events.last().unwrap().data["response"]["id"];
    let third = json!({"input": "So?", "previous_response_id": id, "max_output_tokens": 4, "store": false});
    let third = server.post(path, &third).ok();
    let count = server.post("/v1/responses/input_tokens", &json!({"input": "So?", "previous_response_id": id})).ok();
    assert_eq!(count["input_tokens"], third["usage"]["input_tokens"]);
    assert!(third["usage"]["input_tokens"].as_u64() > second["usage"]["input_tokens"].as_u64());
    let lost = with(next, json!({"previous_response_id": third["id"]}));
    assert!(server.post(path, &lost).refused().contains("\"store\""));
}

#[test]
fn wrong_requests_are_refused() {
    let server = Server::start(&[]);
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    let chat = |more: Value| with(json!({"messages": user(json!("x"))}), more);
    let image = json!([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]);
    let source = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}});
    for (path, body, part) in [
        (CHAT, json!({}), "'messages' is required"),
        (CHAT, chat(json!({"response_format": {"type": "hiccup"}})), "hiccup"),
        (CHAT, chat(json!({"grammar": "root ::= nothing"})), "grammar"),
        (CHAT, chat(json!({"temperature": "hot"})), "'temperature'"),
        (CHAT, chat(json!({"tools": [{"type": "dream"}]})), ""),
        (CHAT, json!({"messages": user(image)}), "start it with --mmproj"),
        ("/v1/messages", json!({"max_tokens": 1}), "'messages' is required"),
        ("/v1/messages", json!({"messages": user(json!([source]))}), "start it with --mmproj"),
        ("/v1/messages", json!({"messages": user(json!("x")), "output_config": {"format": {"type": "y"}}}), "'format'"),
        ("/v1/responses", json!({"input": "x", "previous_response_id": "resp_1"}), "'previous_response_id'"),
        ("/v1/responses", json!({"model": "x"}), "'input' is required"),
        ("/v1/completions", json!({}), "\"prompt\" is required"),
        ("/v1/completions", json!({"prompt": "x", "suffix": "y"}), "'suffix'"),
        ("/completion", json!({"prompt": "x", "samplers": "eee"}), "twice"),
    ] {
        let message = server.post(path, &body).refused();
        assert!(message.contains(part) && !message.is_empty(), "{path} {body}: {message}");
    }
    server.post_text(CHAT, "{\"messages\":").refused();
    // A prompt that is too long is refused before a stream begins.
    let long = json!({"messages": user(json!("word ".repeat(2000))), "stream": true});
    let answer = server.post(CHAT, &long);
    assert!(answer.body["error"]["n_prompt_tokens"].as_u64().unwrap() > 512, "{}", answer.body);
    answer.error(400, "exceed_context_size_error");
}

/// Opens the model's reasoning.
const REASONING: &str = "{%- for message in messages -%}\
{{- '<|im_start|>' + message.role + '\n' -}}\
{%- if message.role == 'assistant' and message.reasoning_content -%}\
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}\
{%- endif -%}\
{{- message.content + '<|im_end|>\n' -}}\
{%- endfor -%}\
{%- if add_generation_prompt -%}\
{{- '<|im_start|>assistant\n' -}}\
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}\
{%- else -%}{{- '<think>\n' -}}\
{%- endif -%}\
{%- endif -%}";

#[test]
fn reasoning_is_bounded_and_can_be_turned_off() {
    let server = Server::start(&["--chat-template", REASONING, "--ignore-eos"]);
    let body = with(ask(24), json!({"reasoning_budget_tokens": 6, "reasoning_budget_message": " So:"}));
    let message = &server.post(CHAT, &body).ok()["choices"][0]["message"];
    let reasoning = message["reasoning_content"].as_str().unwrap();
    assert!(reasoning.trim_end().ends_with(" So:"), "{message}");
    assert!(!message["content"].as_str().unwrap().is_empty(), "{message}");
    let events: Vec<Event> = server.stream(CHAT, &body).collect();
    assert_eq!(texts(&events, "/choices/0/delta/reasoning_content"), reasoning);
    assert_eq!(texts(&events, "/choices/0/delta/content"), message["content"].as_str().unwrap());

    for more in [json!({"reasoning_effort": "none"}), json!({"chat_template_kwargs": {"enable_thinking": false}})] {
        let whole = server.post(CHAT, &with(ask(8), with(more, json!({"verbose": true})))).ok();
        assert!(whole["choices"][0]["message"]["reasoning_content"].is_null(), "{whole}");
        assert!(whole["__verbose"]["prompt"].as_str().unwrap().ends_with("<think>\n\n</think>\n\n"), "{whole}");
    }
    let raw = with(ask(24), json!({"reasoning_format": "none", "reasoning_budget_tokens": 6}));
    let whole = server.post(CHAT, &raw).ok();
    assert!(whole["choices"][0]["message"]["content"].as_str().unwrap().contains("</think>"), "{whole}");

    // Reasoning is a block of Messages and an item of Responses.
    let body = with(ask(24), json!({"thinking": {"type": "enabled", "budget_tokens": 6}}));
    let whole = server.post("/v1/messages", &body).ok();
    let events: Vec<Event> = server.stream("/v1/messages", &body).collect();
    assert_eq!(texts(&events, "/delta/thinking"), whole["content"][0]["thinking"].as_str().unwrap());
    assert_eq!(texts(&events, "/delta/text"), whole["content"][1]["text"].as_str().unwrap());
    assert!(events.iter().any(|event| event.data["delta"]["type"] == "signature_delta"));
    let whole = server.post("/v1/responses", &with(ask(24), json!({"reasoning_budget_tokens": 6}))).ok();
    let kinds: Vec<&Value> = whole["output"].as_array().unwrap().iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message"]);
}

#[test]
fn another_request_ends_reasoning() {
    let server = Server::start(&["--chat-template", REASONING, "--ignore-eos"]);
    let end = |id: &Value| {
        server.post(&format!("{CHAT}/control"), &json!({"id": id, "action": "reasoning_end"})).ok()["success"].clone()
    };
    let mut events = server.stream(CHAT, &with(ask(300), json!({"reasoning_control": true})));
    let first = events.next().unwrap();
    assert_eq!(end(&first.data["id"]), true);
    let rest: Vec<Event> = events.collect();
    assert!(!texts(&rest, "/choices/0/delta/content").is_empty());
    assert_eq!(end(&first.data["id"]), false, "the answer has ended");
    let mut without = server.stream(CHAT, &ask(300));
    assert_eq!(end(&without.next().unwrap().data["id"]), false);
}
