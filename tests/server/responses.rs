//! `/v1/responses`.

use serde_json::{Value, json};

use super::rig::{Event, Server, TEMPLATE, pushed, with};

const PATH: &str = "/v1/responses";

#[test]
fn a_stream_says_what_an_answer_says() {
    let server = Server::start(&[]);
    let body = json!({"input": "Say hello", "instructions": "Book", "max_output_tokens": 16, "timings_per_token": true, "cache_prompt": false});
    let whole = server.post(PATH, &body).ok();
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("completed")));
    assert!(whole["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!(whole["usage"]["output_tokens"], 16);
    let events: Vec<Event> = server.stream(PATH, &body).collect();
    assert!(events.iter().all(|event| event.name.as_deref() == event.data["type"].as_str()));
    assert!(events.iter().enumerate().all(|(at, event)| event.data["sequence_number"] == at));
    let mut order: Vec<&str> = events.iter().filter_map(|event| event.data["type"].as_str()).collect();
    order.dedup();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(order, expected);
    let deltas: Vec<&Value> = events.iter().map(|event| &event.data).filter(|data| data["delta"].is_string()).collect();
    assert!(deltas.iter().all(|delta| delta["timings"].is_object()));
    let text: String = deltas.iter().filter_map(|delta| delta["delta"].as_str()).collect();
    let last = &events.last().unwrap().data;
    assert!(last["timings"].is_object());
    for output in [&whole["output"], &last["response"]["output"]] {
        assert_eq!(output[0]["content"][0]["text"], text);
        assert!(output[0]["id"].as_str().unwrap().starts_with("msg_"));
    }
    assert_eq!(last["response"]["id"], events[0].data["response"]["id"]);
    let count = server.post(&format!("{PATH}/input_tokens"), &body).ok();
    assert_eq!(count["input_tokens"], whole["usage"]["input_tokens"]);
}

#[test]
fn tools_are_called() {
    let server = Server::start(&["--chat-template-file", TEMPLATE]);
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]});
    let body = json!({
        "input": "The weather?", "max_output_tokens": 200, "cache_prompt": false, "tool_choice": "required",
        "tools": [{"type": "web_search"}, {"type": "function", "name": "weather", "description": "d", "parameters": parameters}],
    });
    let body = with(body, pushed());
    let whole = server.post(PATH, &body).ok();
    let call = whole["output"].as_array().unwrap().last().unwrap();
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("weather")), "{whole}");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"city": "Paris"}));
    let events: Vec<Event> = server.stream(PATH, &body).collect();
    let streamed: String = events
        .iter()
        .filter(|event| event.data["type"] == "response.function_call_arguments.delta")
        .filter_map(|event| event.data["delta"].as_str())
        .collect();
    assert_eq!(streamed, call["arguments"].as_str().unwrap());
    // The call and what came of it go back.
    let mut input = vec![json!({"role": "user", "content": "The weather?"}), call.clone()];
    input.push(json!({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}));
    server.post(PATH, &json!({"input": input, "max_output_tokens": 4})).ok();
}

#[test]
fn what_cannot_be_answered_is_said() {
    let server = Server::start(&[]);
    assert_eq!(server.post(PATH, &json!({"model": "x"})).error(400, "invalid_request_error"), "'input' is required");
}
