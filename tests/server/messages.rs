//! `/v1/messages`.

use serde_json::{Value, json};

use super::rig::{Event, Server, TEMPLATE, pushed, with};

const PATH: &str = "/v1/messages";

fn body() -> Value {
    let messages = json!([{"role": "user", "content": "Say hello"}]);
    json!({"model": "x", "max_tokens": 16, "system": "Book", "messages": messages, "cache_prompt": false})
}

#[test]
fn a_stream_says_what_an_answer_says() {
    let server = Server::start(&[]);
    let whole = server.post(PATH, &body()).ok();
    assert_eq!((&whole["type"], &whole["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!("max_tokens"), &Value::Null));
    assert_eq!(whole["usage"]["output_tokens"], 16);
    assert!(whole["timings"].is_null());
    let events: Vec<Event> = server.stream(PATH, &body()).collect();
    assert!(events.iter().all(|event| event.name.as_deref() == event.data["type"].as_str()));
    let mut order: Vec<&str> = events.iter().filter_map(|event| event.data["type"].as_str()).collect();
    order.dedup();
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(order, expected);
    let text: String = events.iter().filter_map(|event| event.data.pointer("/delta/text")?.as_str()).collect();
    assert_eq!(whole["content"], json!([{"type": "text", "text": text}]));
    let start = &events[0].data["message"];
    let usage = &start["usage"];
    let n = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    let count = server.post(&format!("{PATH}/count_tokens"), &body()).ok();
    assert_eq!(count, json!({"input_tokens": n}));
}

#[test]
fn tools_are_called() {
    let server = Server::start(&["--chat-template-file", TEMPLATE]);
    let mut body = with(body(), pushed());
    body["max_tokens"] = json!(200);
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]});
    body["tools"] = json!([{"name": "weather", "description": "d", "input_schema": schema}]);
    body["tool_choice"] = json!({"type": "tool", "name": "weather"});
    let whole = server.post(PATH, &body).ok();
    assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
    let block = whole["content"].as_array().unwrap().last().unwrap();
    assert_eq!((&block["type"], &block["input"]), (&json!("tool_use"), &json!({"city": "Paris"})));
    let events: Vec<Event> = server.stream(PATH, &body).collect();
    let json: String = events.iter().filter_map(|event| event.data.pointer("/delta/partial_json")?.as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), json!({"city": "Paris"}));
    let of = |kind: &str| -> Vec<u64> {
        let own = events.iter().filter(|event| event.data["type"] == kind);
        own.map(|event| event.data["index"].as_u64().unwrap()).collect()
    };
    assert_eq!(of("content_block_start"), of("content_block_stop"));
}

#[test]
fn what_cannot_be_answered_is_said() {
    let server = Server::start(&[]);
    server.post(PATH, &json!({"max_tokens": 1})).error(400, "invalid_request_error");
    let image = json!([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]);
    let error = server.post(PATH, &json!({"max_tokens": 1, "messages": [{"role": "user", "content": image}]}));
    assert!(error.error(400, "invalid_request_error").contains("image input is not supported"));
}
