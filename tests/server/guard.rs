//! Keys, sizes, clients that go, and requests beside each other.

use std::io::{Read, Write};

use serde_json::{Value, json};

use super::rig::Server;

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
fn a_file_of_keys_has_comments() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, b"# of the house\nsecret\n#old\n").unwrap();
    let server = Server::start(&["--api-key-file", file.path().to_str().unwrap()]).with_key("secret");
    server.post(PATH, &ask("x", 1)).ok();
    for key in ["# of the house", "#old", "old"] {
        server.with_key_now(key).post(PATH, &ask("x", 1)).error(401, "authentication_error");
    }
}

#[test]
fn pages_that_are_not_named_may_not_ask() {
    let server = Server::start(&["--cors-origins", "http://here.example"]);
    assert_eq!(server.ask_from_page("http://here.example", PATH, &ask("x", 1)), 200);
    assert_eq!(server.ask_from_page("http://evil.example", PATH, &ask("x", 1)), 403);
    assert_eq!(server.ask_from_page(&server.url, PATH, &ask("x", 1)), 200, "its own");
    let server = Server::start(&[]);
    assert_eq!(server.ask_from_page("http://here.example", PATH, &ask("x", 1)), 403);
    assert_eq!(server.ask_from_page(&server.url, PATH, &ask("x", 1)), 200);
}

#[test]
fn names_of_others_are_refused_without_a_key() {
    let server = Server::start(&["--allowed-hosts", "box.lan:8080,other.lan."]);
    let body = ask("x", 1);
    for host in ["localhost:8080", "app.localhost", "127.0.0.1:1", "[::1]:8080", "Box.LAN:8080", "other.lan"] {
        assert_eq!(server.ask_as(host, None, PATH, &body).0, 200, "{host}");
    }
    // DNS rebinding: the page's own name leads to this machine.
    for (host, origin) in [
        ("evil.example:8080", Some("http://evil.example:8080")),
        ("evil.example:8080", None),
        ("localhost.evil.example", None),
    ] {
        let (status, text) = server.ask_as(host, origin, PATH, &body);
        assert_eq!(status, 403, "{host}: {text}");
        assert!(text.contains(host) && text.contains("--allowed-hosts"), "{text}");
    }
    // An address in the request's first line counts as in HTTP/2.
    let mut stream = server.connect();
    stream
        .write_all(b"GET http://evil.example/props HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    let server = Server::start(&["--api-key", "secret"]).with_key("secret");
    assert_eq!(server.ask_as("evil.example:8080", None, PATH, &body).0, 200, "a page does not have the key");
}

#[test]
fn images_are_refused_with_a_remedy() {
    let server = Server::start(&[]);
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let body = json!({"messages": [{"role": "user", "content": [image]}], "max_tokens": 1});
    let message = server.post(PATH, &body).error(400, "invalid_request_error");
    assert!(message.contains("image input is not supported") && message.contains("--mmproj"), "{message}");
}

#[test]
fn stop_texts_are_bounded() {
    let server = Server::start(&[]);
    let many: Vec<String> = (0..1000).map(|n| format!("s{n}")).collect();
    for stop in [json!("x".repeat(64 << 10)), json!(many)] {
        let error =
            server.post("/completion", &json!({"prompt": "x", "stop": stop})).error(400, "invalid_request_error");
        assert!(error.contains("stop"), "{error}");
    }
    let error =
        server.post("/completion", &json!({"prompt": "x", "samplers": "eee"})).error(400, "invalid_request_error");
    assert!(error.contains("twice"), "{error}");
}

/// The most probable first token of an answer, and how probable it is.
fn first(server: &Server, body: &Value) -> (i64, f64) {
    let answer = server.post("/completion", body).ok();
    let first = &answer["completion_probabilities"][0];
    (first["id"].as_i64().unwrap(), first["logprob"].as_f64().unwrap())
}

#[test]
fn what_one_slot_moves_stays_for_others() {
    let server = Server::start(&[]);
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo-heldout-prose.txt")).unwrap();
    let words: Vec<&str> = text.split_whitespace().collect();
    let tokens =
        |text: String| server.post("/tokenize", &json!({"content": text})).ok()["tokens"].as_array().unwrap().clone();
    let [start, left_out, kept, question] =
        [0..20, 20..50, 50..90, 90..100].map(|range| tokens(words[range].join(" ")));
    let whole = [&start[..], &left_out, &kept].concat();
    let ask = |prompt: &[Value], slot: u32, reuse: u32| json!({"prompt": prompt, "n_predict": 1, "n_probs": 1, "id_slot": slot, "n_cache_reuse": reuse});
    // One slot holds all of it; another begins alike and goes on with a later part.
    first(&server, &ask(&whole, 0, 0));
    first(&server, &ask(&[&start[..], &kept, &question].concat(), 1, 8));
    let after = [&whole[..], &question].concat();
    let (token, probability) = first(&server, &ask(&after, 0, 0));
    let mut alone = ask(&after, 1, 0);
    alone["cache_prompt"] = json!(false);
    let (expected, of_it) = first(&server, &alone);
    assert!(token == expected && (probability - of_it).abs() < 0.02, "{token} {probability}, not {expected} {of_it}");
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
