//! Limits of one request, and of the memory of all.

use std::io::Write;
use std::net::TcpStream;

use serde_json::{Value, json};

use super::rig::Server;

const MIB: u64 = 1 << 20;

/// `[[token, bias], …]`
fn biases(n: usize) -> Value {
    (0..n).map(|token| json!([token % 1000, 1])).collect()
}

#[test]
fn as_many_texts_as_may_wait_are_asked_for_at_once() {
    let server = Server::start(&["--max-waiting", "4"]);
    let ask = |path, body| server.post(path, &body);
    ask("/completion", json!({"prompt": ["a", "b", "c", "d"], "n_predict": 1})).ok();
    for (path, body) in [
        ("/completion", json!({"prompt": vec!["a"; 5], "n_predict": 1})),
        ("/completion", json!({"prompt": ["a", "b", "c"], "n_cmpl": 2, "n_predict": 1})),
        ("/v1/completions", json!({"prompt": vec!["a"; 5], "max_tokens": 1})),
    ] {
        let message = ask(path, body).error(400, "invalid_request_error");
        assert!(message.contains("and 4 may wait") && message.contains("--max-waiting"), "{message}");
    }
}

#[test]
fn embeddings_of_many_inputs_are_computed_in_turn() {
    let server = Server::start(&["--max-waiting", "4", "--embeddings", "--pooling", "mean"]);
    let answer = server.post("/v1/embeddings", &json!({"input": vec!["a"; 12]})).ok();
    assert_eq!(answer["data"].as_array().unwrap().len(), 12, "more than may wait");
    for path in ["/v1/embeddings", "/embedding"] {
        let message = server.post(path, &json!({"input": vec!["a"; 2049]})).error(400, "invalid_request_error");
        assert!(message.contains("2049") && message.contains("2048"), "{message}");
    }
}

#[test]
fn there_are_no_more_biases_than_tokens() {
    let server = Server::start(&[]);
    let models = server.get("/v1/models").ok();
    let n_vocab = models["data"][0]["meta"]["n_vocab"].as_u64().unwrap() as usize;
    let ask = |bias: Value| server.post("/completion", &json!({"prompt": "a", "n_predict": 1, "logit_bias": bias}));
    ask(biases(n_vocab)).ok();
    // Many pairs, and few whose texts are of many tokens.
    for bias in [biases(n_vocab + 1), json!([["one two three four ".repeat(n_vocab), 1]])] {
        let message = ask(bias).error(400, "invalid_request_error");
        assert!(message.contains("logit_bias") && message.contains(&n_vocab.to_string()), "{message}");
    }
}

#[test]
fn answers_repeat_what_is_short() {
    let server = Server::start(&[]);
    let ask = |prompt: &str, n_biases, grammar: &str| {
        let body = json!({"prompt": prompt, "n_predict": 1, "logit_bias": biases(n_biases), "grammar": grammar});
        server.post("/completion", &body).ok()
    };
    let grammar = "root ::= [a-z ]+";
    let answer = ask("The river", 300, grammar);
    let settings = &answer["generation_settings"];
    assert!(answer["prompt"].as_str().unwrap().ends_with("The river"), "{}", answer["prompt"]);
    assert_eq!((settings["logit_bias"].as_array().unwrap().len(), settings["grammar"].as_str()), (300, Some(grammar)));
    assert_eq!(settings.get("truncated"), None);
    let long = format!("{grammar}{}", " ".repeat(100_000));
    let answer = ask("The river", 1000, &long);
    let settings = &answer["generation_settings"];
    assert_eq!(settings["truncated"], json!(["logit_bias", "grammar"]));
    assert!(settings["logit_bias"].as_array().unwrap().len() <= 512);
    assert!(settings["grammar"].as_str().unwrap().ends_with("[truncated, 100016 bytes]"));
    assert!(answer.to_string().len() < 100_000);
}

/// 38 KiB that once took 300 MiB.
#[test]
fn a_request_of_many_prompts_and_biases_takes_little_memory() {
    let server = Server::start(&[]);
    server.post("/completion", &json!({"prompt": "a", "n_predict": 1})).ok();
    let before = server.peak_bytes();
    let body = json!({"prompt": vec!["a"; 256], "n_predict": 1, "logit_bias": biases(3000)});
    let answers = server.post("/completion", &body).ok();
    assert_eq!(answers.as_array().unwrap().len(), 256);
    let more = server.peak_bytes() - before;
    println!("{} KiB", more >> 10);
    assert!(more < 48 * MIB, "{} MiB", more / MIB);
}

#[test]
fn values_of_json_count_by_what_they_take() {
    let server = Server::start(&["--max-body", "1M"]);
    server.post("/completion", &json!({"prompt": "a", "n_predict": 1})).ok();
    let before = server.peak_bytes();
    // 115 times as much in memory.
    let body = format!("{{\"prompt\": [{}]}}", vec!["[1]"; 200_000].join(","));
    let message = server.post_text("/completion", &body).error(413, "invalid_request_error");
    assert!(message.contains("--max-body"), "{message}");
    let more = server.peak_bytes() - before;
    println!("{} KiB", more >> 10);
    assert!(more < 24 * MIB, "{} MiB", more / MIB);
    // A text takes less.
    server.post("/tokenize", &json!({"content": "and so ".repeat(20_000)})).ok();
}

/// Begins a body of which the rest never comes.
fn begin_body(mut stream: TcpStream, n_bytes: usize) -> TcpStream {
    let head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{\"prompt\": \"";
    // The server may leave bytes unread: then this ends with the server.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&vec![b'a'; n_bytes]));
    stream
}

#[test]
fn bodies_that_arrive_leave_memory_to_others() {
    let server = Server::start(&["--max-body", "1M"]);
    // Together more than all requests may hold.
    let begin = |stream: TcpStream| std::thread::spawn(move || begin_body(stream, 768 << 10));
    let bodies: Vec<_> = (0..18).map(|_| begin(server.connect())).collect();
    for _ in 0..50 {
        server.post("/tokenize", &json!({"content": "and so ".repeat(4000)})).ok();
    }
    drop(bodies);
}
