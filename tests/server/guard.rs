//! Keys, sizes, clients that go, and requests beside each other.

use serde_json::{Value, json};

use crate::rig::Server;

const PATH: &str = "/v1/chat/completions";

fn ask(text: &str, n: i32) -> Value {
    json!({"messages": [{"role": "user", "content": text}], "max_tokens": n})
}

/// A text to go on with, by a stream.
fn go_on(server: &Server, text: &str) -> String {
    let body = json!({"prompt": text, "max_tokens": 40, "cache_prompt": false});
    let mut whole = String::new();
    for event in server.stream("/v1/completions", &body) {
        assert!(event.data.get("error").is_none(), "{event:?}");
        whole += event.data.pointer("/choices/0/text").and_then(Value::as_str).unwrap_or_default();
    }
    whole
}

#[test]
fn a_key_is_needed() {
    let server = Server::start(&["--api-key", "secret"]);
    for path in [PATH, "/v1/messages", "/v1/responses", "/v1/embeddings", "/apply-template"] {
        assert_eq!(server.post(path, &ask("x", 1)).error(401, "authentication_error"), "Invalid API Key");
    }
    server.get("/health").ok();
    let server = server.with_key("secret");
    server.post(PATH, &ask("x", 1)).ok();
    let server = server.with_key("Secret");
    server.post(PATH, &ask("x", 1)).error(401, "authentication_error");
}

#[test]
fn bodies_are_bounded() {
    let server = Server::start(&["--max-body", "2000"]);
    server.post(PATH, &ask(&"x".repeat(4000), 1)).error(413, "invalid_request_error");
    server.post(PATH, &ask("x", 1)).ok();
}

#[test]
fn who_goes_frees_a_slot() {
    let server = Server::start(&["--ignore-eos"]);
    let mut first = server.stream(PATH, &ask("One", -1));
    let mut second = server.stream("/v1/responses", &json!({"input": "Two", "max_output_tokens": 400}));
    assert!(first.next().is_some() && second.next().is_some());
    drop(first);
    drop(second);
    server.wait_for_busy(0);
    server.post(PATH, &ask("x", 1)).ok();
}

#[test]
fn streams_do_not_mix() {
    let server = Server::start(&["--ignore-eos"]);
    let texts = ["The river", "A letter to", "def main():"];
    let alone: Vec<String> = texts.iter().map(|text| go_on(&server, text)).collect();
    assert!(alone[0] != alone[1] && alone[1] != alone[2]);
    // Three at once for two slots: one waits.
    let beside: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = texts.iter().map(|text| scope.spawn(|| go_on(&server, text))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // Exactness is promised at equal width alone: a batch of two may round otherwise. What is not another's is certain: each begins as
    // it does alone.
    for (alone, beside) in alone.iter().zip(&beside) {
        let same = alone.bytes().zip(beside.bytes()).take_while(|(a, b)| a == b).count();
        println!("{same} of {} bytes as alone", alone.len());
        assert!(same >= 8, "alone: {alone:?}\nbeside: {beside:?}");
    }
}
