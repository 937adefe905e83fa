//! Models that think, through all endpoints that talk.

use serde_json::{Value, json};

use super::rig::{Event, Server, with};

/// Opens a thought for the model.
const TEMPLATE: &str = "{%- for message in messages -%}\
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

const PATH: &str = "/v1/chat/completions";

fn ask(n: i32) -> Value {
    json!({"messages": [{"role": "user", "content": "Well?"}], "max_tokens": n, "cache_prompt": false})
}

fn start() -> Server {
    Server::start(&["--chat-template", TEMPLATE, "--ignore-eos"])
}

fn texts(events: &[Event], path: &str) -> String {
    events.iter().filter_map(|event| event.data.pointer(path)?.as_str()).collect()
}

#[test]
fn a_budget_ends_a_thought() {
    let server = start();
    let body = with(ask(24), json!({"reasoning_budget_tokens": 6, "reasoning_budget_message": " So:"}));
    let whole = server.post(PATH, &body).ok();
    let message = &whole["choices"][0]["message"];
    let thought = message["reasoning_content"].as_str().unwrap();
    assert!(thought.trim_end().ends_with(" So:"), "{message}");
    assert!(!message["content"].as_str().unwrap().is_empty(), "{message}");
    let events: Vec<Event> = server.stream(PATH, &body).collect();
    assert_eq!(texts(&events, "/choices/0/delta/reasoning_content"), thought);
    assert_eq!(texts(&events, "/choices/0/delta/content"), message["content"].as_str().unwrap());
}

#[test]
fn who_is_not_to_think_does_not() {
    let server = start();
    for more in [json!({"reasoning_effort": "none"}), json!({"chat_template_kwargs": {"enable_thinking": false}})] {
        let whole = server.post(PATH, &with(ask(8), with(more, json!({"verbose": true})))).ok();
        assert!(whole["choices"][0]["message"]["reasoning_content"].is_null(), "{whole}");
        assert!(whole["__verbose"]["prompt"].as_str().unwrap().ends_with("<think>\n\n</think>\n\n"), "{whole}");
    }
    let kept = with(ask(24), json!({"reasoning_format": "none", "reasoning_budget_tokens": 6}));
    let whole = server.post(PATH, &kept).ok();
    assert!(whole["choices"][0]["message"]["content"].as_str().unwrap().contains("</think>"), "{whole}");
}

#[test]
fn a_thought_is_a_block_and_an_item() {
    let server = start();
    let thinking = json!({"thinking": {"type": "enabled", "budget_tokens": 6}});
    let whole = server.post("/v1/messages", &with(ask(24), thinking.clone())).ok();
    let kinds: Vec<&Value> = whole["content"].as_array().unwrap().iter().map(|block| &block["type"]).collect();
    assert_eq!(kinds, ["thinking", "text"]);
    let events: Vec<Event> = server.stream("/v1/messages", &with(ask(24), thinking)).collect();
    assert_eq!(texts(&events, "/delta/thinking"), whole["content"][0]["thinking"].as_str().unwrap());
    assert_eq!(texts(&events, "/delta/text"), whole["content"][1]["text"].as_str().unwrap());
    assert!(events.iter().any(|event| event.data["delta"]["type"] == "signature_delta"));
    let body = json!({"input": "Well?", "max_output_tokens": 24, "reasoning_budget_tokens": 6});
    let whole = server.post("/v1/responses", &body).ok();
    let kinds: Vec<&Value> = whole["output"].as_array().unwrap().iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message"]);
}

#[test]
fn a_thought_can_be_ended_from_outside() {
    let server = start();
    let wish = |id: &Value| {
        server.post(&format!("{PATH}/control"), &json!({"id": id, "action": "reasoning_end"})).ok()["success"].clone()
    };
    let body = with(ask(300), json!({"reasoning_control": true}));
    let mut events = server.stream(PATH, &body);
    let first = events.next().unwrap();
    assert_eq!(wish(&first.data["id"]), true);
    let rest: Vec<Event> = events.collect();
    assert!(!texts(&rest, "/choices/0/delta/content").is_empty());
    assert_eq!(wish(&first.data["id"]), false, "it has ended");
    let mut deaf = server.stream(PATH, &ask(300));
    assert_eq!(wish(&deaf.next().unwrap().data["id"]), false);
}
