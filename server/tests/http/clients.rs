//! Requests as clients send them: null fields, wide numbers, histories, documents, stop texts amid calls.

use serde_json::{Value, json};

use super::rig::{Event, Server, TEMPLATE, pushed, with};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

fn user(content: Value) -> Value {
    json!({"role": "user", "content": content})
}

/// The prompt that a template makes of a conversation.
fn prompt(server: &Server, messages: Value) -> String {
    server.post("/apply-template", &json!({"messages": messages})).ok()["prompt"].as_str().unwrap().to_owned()
}

/// Refuses second system messages, and reads lists in a user's message only.
const STRICT: &str = "{%- for m in messages -%}\
{%- if m.role == 'system' and not loop.first -%}\
{{ raise_exception('System message must be at the beginning.') }}\
{%- endif -%}\
[{{ m.role }}]\
{%- if m.content is string -%}{{ m.content }}\
{%- elif m.role == 'user' -%}{%- for part in m.content -%}{{ part.text }}{%- endfor -%}{%- endif -%}\
{%- for call in m.tool_calls or [] -%}\
<{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}>\
{%- endfor -%}\
{%- endfor -%}";

#[test]
fn every_template_sees_every_text() {
    let server = Server::start(&["--chat-template", STRICT]);
    let text = |text: &str| json!({"type": "text", "text": text});
    let call = json!({"id": null, "type": "function", "function": {"name": "w", "arguments": ""}});
    let said = prompt(
        &server,
        json!([
            {"role": "system", "content": [text("A"), text("B")]},
            {"role": "system", "content": "C"},
            user(json!([text("D"), text("E")])),
            {"role": "assistant", "content": [text("F"), text("G")], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": [text("H"), text("I")]},
        ]),
    );
    assert!(said.starts_with("[system]A\nB\n\nC[user]DE[assistant]F\n\nG<"), "{said}");
    assert!(said.ends_with(" w {}>[tool]H\nI"), "{said}");
    // The same by Messages and Responses, which show a prompt only here.
    let shown = |path: &str, body: Value| {
        let body = with(body, json!({"max_tokens": 1, "max_output_tokens": 1, "verbose": true}));
        server.post(path, &body).ok()["__verbose"]["prompt"].as_str().unwrap().to_owned()
    };
    let source = json!({"type": "text", "media_type": "text/plain", "data": "Sun."});
    let blocks = json!([
        {"type": "tool_result", "tool_use_id": "t1", "content": [text("J"), text("K")]},
        text("L"),
        {"type": "document", "source": source, "title": "News"},
    ]);
    let use_tool =
        json!({"role": "assistant", "content": [{"type": "tool_use", "id": "abcdefghi", "name": "w", "input": {}}]});
    let said = shown(MESSAGES, json!({"messages": [user(json!("X")), use_tool, user(blocks)]}));
    assert!(said.contains("[user]X[assistant]<abcdefghi w {}>[tool]J\nK[user]L<document>"), "{said}");
    assert!(said.contains("<title>News</title>\nSun."), "{said}");
    let output = json!([{"type": "input_text", "text": "M"}, {"type": "input_text", "text": "N"}]);
    let input = json!([
        {"role": "developer", "content": "O"},
        user(json!("X")),
        {"type": "function_call", "call_id": "abcdefghi", "name": "w", "arguments": ""},
        {"type": "function_call_output", "call_id": "abcdefghi", "output": output},
    ]);
    let said = shown(RESPONSES, json!({"input": input, "instructions": "P"}));
    assert!(said.contains("[system]P\n\nO[user]X[assistant]<abcdefghi w {}>[tool]M\nN"), "{said}");
}

#[test]
fn unknown_content_is_refused_by_its_type() {
    let server = Server::start(&[]);
    let pdf = json!({"type": "base64", "media_type": "application/pdf", "data": "AAAA"});
    for (path, body, part) in [
        (CHAT, json!({"messages": [user(json!([{"type": "dream"}]))]}), "'dream'"),
        (MESSAGES, json!({"messages": [user(json!([{"type": "container_upload"}]))]}), "'container_upload'"),
        (MESSAGES, json!({"messages": [user(json!([{"type": "document", "source": pdf}]))]}), "'base64'"),
        (MESSAGES, json!({"system": [{"type": "dream"}], "messages": []}), "'dream'"),
        (RESPONSES, json!({"input": [{"type": "web_search_call", "id": "x"}]}), "web_search_call"),
        (RESPONSES, json!({"input": [user(json!([{"type": "input_dream"}]))]}), "input_dream"),
    ] {
        let answer = server.post(path, &body);
        // Anthropic's clients read the type on top.
        assert_eq!(answer.body["type"], "error");
        let message = answer.refused();
        assert!(message.contains(part), "{path} {body}: {message}");
    }
}

#[test]
fn null_and_wide_numbers_are_accepted() {
    let server = Server::start(&["--chat-template-file", TEMPLATE]);
    let function =
        json!({"name": "w", "description": null, "parameters": {"type": "object", "properties": {}}, "strict": null});
    let body = json!({
        "messages": [user(json!("Well?"))], "max_tokens": 4.0, "temperature": 1.5, "seed": 9_007_199_254_740_993_u64,
        "logit_bias": {"262": null}, "tools": [{"type": "function", "function": function}], "tool_choice": null,
        "stop": null, "response_format": null, "stream_options": null, "cache_prompt": false,
    });
    let content = |body: &Value| server.post(CHAT, body).ok()["choices"][0]["message"]["content"].clone();
    let first = content(&body);
    assert_eq!(content(&body), first, "a seed of 64 bits is a seed");
    let narrow = content(&with(body.clone(), json!({"seed": 9_007_199_254_740_993_u64 as u32})));
    assert_eq!(narrow, first, "of which the last 32 count");
    for seed in [json!(-1), json!(i64::MIN), json!(u64::MAX), json!(3.0)] {
        server.post(CHAT, &with(body.clone(), json!({"seed": seed}))).ok();
    }
    assert!(server.post(CHAT, &with(body.clone(), json!({"seed": 1.5}))).refused().contains("'seed'"));
    let native = json!({"prompt": "The river", "n_predict": 2.0, "n_probs": 3.0});
    let native = server.post("/completion", &native).ok();
    let top = &native["completion_probabilities"][0]["top_logprobs"];
    assert_eq!(top.as_array().map(Vec::len), Some(3), "{native}");
}

#[test]
fn probabilities_of_the_chosen_tokens_alone() {
    let server = Server::start(&["--chat-template-file", TEMPLATE]);
    let body = json!({"messages": [user(json!("Well?"))], "max_tokens": 3, "logprobs": true, "top_logprobs": 0});
    let is_alone = |entries: &Value| {
        entries
            .as_array()
            .unwrap()
            .iter()
            .all(|entry| entry["logprob"].is_number() && entry["top_logprobs"] == json!([]))
    };
    let whole = server.post(CHAT, &body).ok();
    let entries = &whole["choices"][0]["logprobs"]["content"];
    assert_eq!(entries.as_array().map(Vec::len), Some(3), "{whole}");
    assert!(is_alone(entries), "{entries}");
    // With tools in a stream, too.
    let tools = json!([{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]);
    let events: Vec<Event> = server.stream(CHAT, &with(body, json!({"tools": tools, "tool_choice": "none"}))).collect();
    let entries: Vec<&Value> =
        events.iter().filter_map(|event| event.data.pointer("/choices/0/logprobs/content")).collect();
    assert!(!entries.is_empty() && entries.iter().all(|entries| is_alone(entries)), "{events:?}");
}

/// A request whose answer is a call with a long argument.
fn calling(stop: Value) -> Value {
    let long = "Paris or Rome or Oslo or Bern";
    let parameters = json!({"type": "object", "properties": {"city": {"enum": [long]}}, "required": ["city"]});
    let function =
        json!({"type": "function", "function": {"name": "weather", "description": "d", "parameters": parameters}});
    let body = json!({
        "messages": [user(json!("The weather?"))], "max_tokens": 200, "tools": [function], "tool_choice": "required",
        "stop": stop, "cache_prompt": false,
    });
    with(body, pushed())
}

#[test]
fn a_call_within_which_a_stop_text_comes_is_none() {
    let server = Server::start(&["--chat-template-file", TEMPLATE]);
    let whole = server.post(CHAT, &calling(json!([]))).ok();
    let calls = &whole["choices"][0]["message"]["tool_calls"];
    let id = calls[0]["id"].as_str().unwrap();
    assert!(id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");

    let body = calling(json!("Oslo"));
    let choice = &server.post(CHAT, &body).ok()["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["tool_calls"]),
        (&json!("stop"), &Value::Null),
        "{choice}"
    );
    let reasons = |events: &[Event]| -> Vec<Value> {
        let all = events.iter().filter_map(|event| event.data.pointer("/choices/0/finish_reason").cloned());
        all.filter(|reason| !reason.is_null()).collect()
    };
    assert_eq!(reasons(&server.stream(CHAT, &body).collect::<Vec<_>>()), ["stop"]);

    let function = &body["tools"][0]["function"];
    let tool = json!({"name": "weather", "description": "d", "input_schema": function["parameters"]});
    let more = json!({"tools": [tool], "tool_choice": {"type": "any"}, "stop_sequences": ["Oslo"]});
    let message = server.post(MESSAGES, &with(body.clone(), more.clone())).ok();
    assert_eq!((&message["stop_reason"], &message["content"]), (&json!("stop_sequence"), &json!([])), "{message}");
    let events: Vec<Event> = server.stream(MESSAGES, &with(body.clone(), more)).collect();
    let end = events.iter().find(|event| event.data["type"] == "message_delta").unwrap();
    assert_eq!(end.data["delta"]["stop_reason"], "stop_sequence");

    let tool = json!({"type": "function", "name": "weather", "description": "d", "parameters": function["parameters"]});
    let more = json!({"input": "The weather?", "tools": [tool]});
    let response = server.post(RESPONSES, &with(body.clone(), more.clone())).ok();
    assert_eq!(response["output"], json!([]), "{response}");
    let events: Vec<Event> = server.stream(RESPONSES, &with(body, more)).collect();
    let done = events.iter().find(|event| event.data["type"] == "response.output_item.done").unwrap();
    assert_eq!(done.data["item"]["status"], "incomplete");
}

#[test]
fn responses_that_are_cut_are_incomplete() {
    let server = Server::start(&["--ignore-eos"]);
    let body = json!({"input": "Well?", "max_output_tokens": 8});
    let whole = server.post(RESPONSES, &body).ok();
    assert_eq!((&whole["status"], &whole["output"][0]["status"]), (&json!("incomplete"), &json!("incomplete")));
    assert_eq!(whole["incomplete_details"], json!({"reason": "max_output_tokens"}));
    let events: Vec<Event> = server.stream(RESPONSES, &body).collect();
    let last = events.last().unwrap();
    assert_eq!(last.data["type"], "response.incomplete");
    assert_eq!(last.data["response"]["status"], "incomplete");
    // It can be continued.
    let next = json!({"input": "And?", "max_output_tokens": 2, "previous_response_id": whole["id"]});
    server.post(RESPONSES, &next).ok();
    let stopped = with(body, json!({"stop": whole["output"][0]["content"][0]["text"].as_str().unwrap()[2..]}));
    let stopped = server.post(RESPONSES, &stopped).ok();
    assert_eq!((&stopped["status"], &stopped["incomplete_details"]), (&json!("completed"), &Value::Null), "{stopped}");
}

#[test]
fn ollamas_embeddings() {
    let server = Server::start(&["--embeddings", "--pooling", "mean"]);
    let embedded = |body: Value| server.post("/api/embed", &body);
    let long = "word ".repeat(2000);
    let cut = embedded(json!({"input": [long, "short"]})).ok();
    assert_eq!(cut["embeddings"].as_array().map(Vec::len), Some(2));
    assert_eq!(embedded(json!({"input": long, "truncate": true})).ok()["prompt_eval_count"], 512);
    assert!(embedded(json!({"input": long, "truncate": false})).body["error"].as_str().unwrap().contains("exceeds"));
    let one = server.post("/api/embeddings", &json!({"model": "x", "prompt": "The river"})).ok();
    let one: Vec<f64> = one["embedding"].as_array().unwrap().iter().map(|own| own.as_f64().unwrap()).collect();
    let scaled = embedded(json!({"input": "The river"})).ok();
    let scaled = scaled["embeddings"][0].as_array().unwrap();
    let length = one.iter().map(|own| own * own).sum::<f64>().sqrt();
    assert!(one.iter().zip(scaled).all(|(own, scaled)| (own / length - scaled.as_f64().unwrap()).abs() < 1e-4));
}

#[test]
fn the_demo_answers_a_second_message() {
    let server = Server::demo(&[]);
    let mut messages = vec![user(json!("What is the best book?"))];
    for _ in 0..3 {
        let answer = server.post(CHAT, &json!({"messages": messages, "ignore_eos": true})).ok();
        assert_eq!(answer["usage"]["completion_tokens"], 96);
        messages.extend([answer["choices"][0]["message"].clone(), user(json!("And then?"))]);
    }
    let long = json!({"messages": [user(json!("word ".repeat(600)))]});
    let message = server.post(CHAT, &long).error(400, "exceed_context_size_error");
    assert!(message.contains("trained on 512") && !message.contains("-c "), "{message}");
}
