//! `/v1/chat/completions`.

use serde_json::{Value, json};

use super::rig::{Event, Server, TEMPLATE, pushed, with};

const PATH: &str = "/v1/chat/completions";

fn ask(text: &str, n: u32) -> Value {
    json!({
        "messages": [{"role": "system", "content": "Book"}, {"role": "user", "content": text}],
        "max_tokens": n,
        // Prompts evaluated in the same pieces give the same text.
        "cache_prompt": false,
    })
}

/// Choices of a stream put together: content, calls (without their ids) and the reason of the end.
fn together(events: &[Event]) -> (String, Vec<Value>, String) {
    let (mut content, mut calls, mut reason) = (String::new(), Vec::<Value>::new(), String::new());
    for choice in events.iter().filter_map(|event| event.data.pointer("/choices/0")) {
        let delta = &choice["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if calls.len() <= index {
                assert!(call["id"].as_str().is_some_and(|id| !id.is_empty()), "{call}");
                calls.push(json!({"name": call["function"]["name"], "arguments": ""}));
            }
            let arguments = calls[index]["arguments"].as_str().unwrap().to_owned();
            calls[index]["arguments"] = json!(arguments + call["function"]["arguments"].as_str().unwrap_or_default());
        }
        reason += choice["finish_reason"].as_str().unwrap_or_default();
    }
    (content, calls, reason)
}

#[test]
fn chats_are_streamed() {
    let server = Server::start(&["--alias", "demo"]);
    let body = ask("What is the best book?", 32);
    let whole = server.post(PATH, &body).ok();
    assert_eq!((&whole["object"], &whole["model"]), (&json!("chat.completion"), &json!("demo")));
    let choice = &whole["choices"][0];
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], 32);
    let options = json!({"stream_options": {"include_usage": true}});
    let events: Vec<Event> = server.stream(PATH, &with(body.clone(), options)).collect();
    assert_eq!(events[0].data["choices"][0]["delta"], json!({"role": "assistant", "content": null}));
    let ids: Vec<&Value> = events.iter().filter(|event| !event.data.is_null()).map(|event| &event.data["id"]).collect();
    assert!(ids.iter().all(|id| *id == ids[0]));
    let (content, calls, reason) = together(&events);
    assert_eq!(content, choice["message"]["content"].as_str().unwrap());
    assert!(!content.is_empty() && calls.is_empty());
    assert_eq!(reason, choice["finish_reason"].as_str().unwrap());
    let [.., last, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!(done.data, Value::Null);
    assert_eq!(last.data["choices"], json!([]));
    assert_eq!(last.data["usage"], *usage);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    // The same prompt once more: all but the last token are cached.
    let whole = server.post(PATH, &with(body, json!({"cache_prompt": true}))).ok();
    let cached = &whole["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert_eq!(cached.as_u64().unwrap() + 1, usage["prompt_tokens"].as_u64().unwrap());
}

#[test]
fn a_tool_that_must_be_called_is_called() {
    let server = Server::start(&["--chat-template-file", TEMPLATE]);
    let parameters =
        json!({"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]});
    let tools = json!({
        "tools": [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": parameters}}],
        "tool_choice": "required",
    });
    let body = with(with(ask("The weather?", 200), tools), pushed());
    let whole = server.post(PATH, &body).ok();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let function = &calls[0]["function"];
    assert_eq!((&calls[0]["type"], &function["name"]), (&json!("function"), &json!("weather")));
    let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
    assert!(["Paris", "Rome"].iter().any(|city| arguments == json!({"city": city})), "{arguments}");
    let events: Vec<Event> = server.stream(PATH, &body).collect();
    let (content, streamed, reason) = together(&events);
    assert_eq!(content, choice["message"]["content"].as_str().unwrap());
    let plain: Vec<Value> = calls.iter().map(|call| call["function"].clone()).collect();
    assert_eq!(streamed, plain);
    assert_eq!(reason, "tool_calls");
    // The tool's result goes back to the model.
    let mut messages = body["messages"].as_array().unwrap().clone();
    messages.push(choice["message"].clone());
    messages.push(json!({"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"}));
    server
        .post(PATH, &json!({"messages": messages, "tools": body["tools"], "max_tokens": 4, "tool_choice": "none"}))
        .ok();
}

#[test]
fn schemas_and_grammars_are_obeyed() {
    let server = Server::start(&[]);
    let content = |more: Value| {
        let whole = server.post(PATH, &with(ask("A thing?", 100), more)).ok();
        whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    let schema = json!({"type": "object", "properties": {"b": {"enum": ["x", "y"]}, "a": {"type": "boolean"}},
        "required": ["b", "a"], "additionalProperties": false});
    let formats = [
        json!({"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}),
        json!({"type": "json_object", "schema": schema}),
    ];
    for format in formats {
        let text = content(json!({"response_format": format}));
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let fields: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert_eq!(fields, ["b", "a"], "{text}");
    }
    assert_eq!(content(json!({"json_schema": {"const": "42"}})).trim(), "\"42\"");
    assert_eq!(content(json!({"grammar": "root ::= \"a\"{5,5}"})), "aaaaa");
}

#[test]
fn probabilities_are_of_the_text() {
    let server = Server::start(&[]);
    let body = with(ask("Well?", 12), json!({"logprobs": true, "top_logprobs": 3}));
    let whole = server.post(PATH, &body).ok();
    let choice = &whole["choices"][0];
    let spelled =
        |entries: &[Value]| -> String { entries.iter().map(|entry| entry["token"].as_str().unwrap()).collect() };
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(spelled(entries), choice["message"]["content"].as_str().unwrap());
    let is_sound =
        |entry: &Value| entry["logprob"].as_f64() <= Some(0.0) && entry["top_logprobs"].as_array().unwrap().len() == 3;
    assert!(entries.iter().all(is_sound), "{entries:?}");
    let events: Vec<Event> = server.stream(PATH, &body).collect();
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|event| event.data.pointer("/choices/0/logprobs/content")?.as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(spelled(&streamed), spelled(entries));
}

#[test]
fn several_answers_and_seeds() {
    let server = Server::start(&[]);
    let body = with(ask("Well?", 24), json!({"n": 2, "temperature": 1.5, "seed": 7}));
    let whole = server.post(PATH, &body).ok();
    let contents = |whole: &Value| -> Vec<String> {
        let choices = whole["choices"].as_array().unwrap();
        assert!(choices.iter().enumerate().all(|(at, choice)| choice["index"] == at));
        choices.iter().map(|choice| choice["message"]["content"].as_str().unwrap().to_owned()).collect()
    };
    let both = contents(&whole);
    assert_eq!(both.len(), 2);
    assert_ne!(both[0], both[1]);
    assert!(whole["usage"]["completion_tokens"].as_u64().unwrap() > 24);
    let is_end = |event: &Event| event.data.pointer("/choices/0/finish_reason").is_some_and(Value::is_string);
    assert_eq!(server.stream(PATH, &body).filter(is_end).count(), 2);
    server.post(PATH, &with(ask("Well?", 1), json!({"n": 3}))).refused();
}

#[test]
fn a_last_assistant_message_is_continued() {
    let server = Server::start(&[]);
    let mut body = ask("Well?", 8);
    body["messages"].as_array_mut().unwrap().push(json!({"role": "assistant", "content": "Once upon"}));
    body["verbose"] = json!(true);
    let whole = server.post(PATH, &body).ok();
    let prompt = whole["__verbose"]["prompt"].as_str().unwrap();
    assert!(prompt.ends_with("<|im_start|>assistant\nOnce upon"), "{prompt}");
    let events: Vec<Event> = server.stream(PATH, &body).collect();
    assert_eq!(together(&events).0, whole["choices"][0]["message"]["content"].as_str().unwrap());
    let template = server.post("/apply-template", &json!({"messages": body["messages"]})).ok();
    // The prompt may begin with the vocabulary's BOS token.
    assert!(prompt.ends_with(template["prompt"].as_str().unwrap()), "{template}");
    let count = server.post(&format!("{PATH}/input_tokens"), &json!({"messages": body["messages"]})).ok();
    assert_eq!(count["input_tokens"], whole["usage"]["prompt_tokens"]);
}

#[test]
fn progress_is_streamed() {
    let server = Server::start(&["-b", "32", "-ub", "32"]);
    let body =
        with(ask(&"This is a test. ".repeat(12), 4), json!({"return_progress": true, "timings_per_token": true}));
    let events: Vec<Event> = server.stream(PATH, &body).collect();
    let progress: Vec<&Value> =
        events.iter().map(|event| &event.data["prompt_progress"]).filter(|own| own.is_object()).collect();
    assert!(progress.len() > 2);
    assert_eq!(progress[0]["processed"], progress[0]["cache"]);
    assert_eq!(progress.last().unwrap()["processed"], progress[0]["total"]);
}
