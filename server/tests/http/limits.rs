//! Limits of one request, and of the memory of all: prompts, biases, long runs of characters, grammars, bodies.

use std::io::Write;
use std::net::TcpStream;

use hobbit_synth::Spec;
use serde_json::{Value, json};

use super::rig::{Event, Server, least_mib, with};
use crate::fixture::write;

const MIB: u64 = 1 << 20;

/// `[[token, bias], …]`
fn biases(n: usize) -> Value {
    (0..n).map(|token| json!([token % 1000, 1])).collect()
}

#[test]
fn texts_biases_candidates_and_stop_texts_are_bounded() {
    let server = Server::start(&["--max-waiting", "4"]);
    let n_vocab = server.get("/v1/models").ok()["data"][0]["meta"]["n_vocab"].as_u64().unwrap() as usize;
    let bound = n_vocab.to_string();
    let native = |more: Value| ("/completion", with(json!({"prompt": "a", "n_predict": 1}), more));
    let openai = |more: Value| ("/v1/completions", with(json!({"prompt": "a", "max_tokens": 1}), more));
    for (path, body) in [
        native(json!({"prompt": ["a", "b", "c", "d"]})),
        native(json!({"logit_bias": biases(n_vocab)})),
        openai(json!({"logprobs": 5})),
    ] {
        server.post(path, &body).ok();
    }
    let all = server.post("/completion", &native(json!({"n_probs": 1 << 30})).1).ok();
    assert!(all["completion_probabilities"][0]["top_logprobs"].as_array().unwrap().len() > 1000);
    let many: Vec<String> = (0..1000).map(|n| format!("s{n}")).collect();
    for ((path, body), part) in [
        (native(json!({"prompt": vec!["a"; 5]})), "and 4 may wait"),
        (native(json!({"prompt": ["a", "b", "c"], "n_cmpl": 2})), "and 4 may wait"),
        (openai(json!({"prompt": vec!["a"; 5]})), "and 4 may wait"),
        // Many pairs, and few whose texts are of many tokens.
        (native(json!({"logit_bias": biases(n_vocab + 1)})), &bound),
        (native(json!({"logit_bias": [["one two three four ".repeat(n_vocab), 1]]})), &bound),
        (openai(json!({"logprobs": 1 << 30, "max_tokens": 400})), "ask for fewer"),
        (native(json!({"stop": "x".repeat(64 << 10)})), "stop"),
        (native(json!({"stop": many})), "stop"),
    ] {
        let message = server.post(path, &body).refused();
        assert!(message.contains(part), "{part}: {message}");
    }

    let server = Server::start(&["--max-waiting", "4", "--embeddings", "--pooling", "mean"]);
    let answer = server.post("/v1/embeddings", &json!({"input": vec!["a"; 12]})).ok();
    assert_eq!(answer["data"].as_array().unwrap().len(), 12, "more than may wait");
    for path in ["/v1/embeddings", "/embedding"] {
        let message = server.post(path, &json!({"input": vec!["a"; 2049]})).refused();
        assert!(message.contains("2049") && message.contains("2048"), "{message}");
    }
}

#[test]
fn answers_shorten_long_values() {
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
    assert!(more < 48 * MIB, "{} MiB", more / MIB);
}

#[test]
fn values_of_json_count_by_their_memory() {
    let server = Server::start(&["--max-body", "1M"]);
    server.post("/completion", &json!({"prompt": "a", "n_predict": 1})).ok();
    let before = server.peak_bytes();
    // 115 times as much in memory.
    let body = format!("{{\"prompt\": [{}]}}", vec!["[1]"; 200_000].join(","));
    let message = server.post_text("/completion", &body).error(413, "invalid_request_error");
    assert!(message.contains("--max-body"), "{message}");
    let more = server.peak_bytes() - before;
    assert!(more < 24 * MIB, "{} MiB", more / MIB);
    // A text takes less.
    server.post("/tokenize", &json!({"content": "and so ".repeat(20_000)})).ok();
}

#[test]
fn bodies_are_bounded() {
    let server = Server::start(&["--max-body", "2000"]);
    server.post("/tokenize", &json!({"content": "x".repeat(4000)})).error(413, "invalid_request_error");
    server.post("/tokenize", &json!({"content": "x"})).ok();
}

/// Begins a body of which the rest never comes.
fn begin_body(mut stream: TcpStream, n_bytes: usize) -> TcpStream {
    let head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{\"prompt\": \"";
    // The server may leave bytes unread: then this ends with the server.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&vec![b'a'; n_bytes]));
    stream
}

#[test]
fn unfinished_bodies_leave_memory_to_other_requests() {
    let server = Server::start(&["--max-body", "1M"]);
    // Together more than all requests may hold.
    let begin = |stream: TcpStream| std::thread::spawn(move || begin_body(stream, 768 << 10));
    let bodies: Vec<_> = (0..18).map(|_| begin(server.connect())).collect();
    for _ in 0..50 {
        server.post("/tokenize", &json!({"content": "and so ".repeat(4000)})).ok();
    }
    drop(bodies);
}

/// llama.cpp follows the first for ever, visits 2^40 parts of the second, and makes 2^30 parts of the third.
#[test]
fn endless_schemas_end_their_own_request() {
    let server = Server::start(&[]);
    let own = json!({
        "$defs": {"a": {"properties": {"p": {"allOf": [{"$ref": "#/$defs/a"}]}}}},
        "$ref": "#/$defs/a",
    });
    let twice = |n: usize| json!({"$ref": format!("#/$defs/a{}", n + 1)});
    let part = |n: usize| json!({"properties": {"p": {"allOf": [twice(n), twice(n)]}}});
    let parts: serde_json::Map<String, Value> = (0..40).map(|n| (format!("a{n}"), part(n))).collect();
    let mut wide = json!({"$defs": parts, "$ref": "#/$defs/a0"});
    wide["$defs"]["a40"] = json!({"type": "null"});
    let object = |inner| json!({"type": ["object", "object"], "properties": {"a": inner}});
    let deep = (0..30).fold(json!({"type": "null"}), |inner, _| object(inner));
    for schema in [own, wide, deep] {
        let message = server.post("/completion", &json!({"prompt": "a", "json_schema": schema})).refused();
        assert!(message.contains("json_schema") && message.contains("the schema: it"), "{message}");
    }
    server.post("/completion", &json!({"prompt": "a", "n_predict": 1})).ok();
}

#[test]
fn texts_are_counted_before_they_are_tokenized() {
    let server = Server::start(&[]);
    let many = |n: usize| vec!["a"; n];
    let mixed = |n: usize| [vec![json!(1)], many(n).into_iter().map(Value::from).collect()].concat();
    let biases = |n: usize| (0..n).map(|_| json!(["a", 1])).collect::<Vec<_>>();
    let half = mixed(1500);
    for (path, body, n) in [
        ("/tokenize", json!({"content": many(2049)}), "2049"),
        ("/completion", json!({"prompt": mixed(2049)}), "2049"),
        ("/completion", json!({"prompt": [half, half]}), "3000"),
        ("/completion", json!({"prompt": "a", "logit_bias": biases(2049)}), "2049"),
    ] {
        let message = server.post(path, &body).refused();
        assert!(message.contains(n) && message.contains("2048"), "{path}: {message}");
    }
    server.post("/tokenize", &json!({"content": many(2048)})).ok();
}

#[test]
fn samplers_are_counted() {
    let server = Server::start(&["-np", "4"]);
    let ask = |more: Value| server.post("/completion", &with(json!({"prompt": "a", "n_predict": 1, "n": 4}), more));
    let before = server.peak_bytes();
    for more in [
        json!({"repeat_last_n": 1 << 24}),
        json!({"dry_multiplier": 1, "dry_penalty_last_n": 1 << 24}),
        json!({"grammar": format!("root ::= \"{}\"{{2000}}", "a".repeat(2000))}),
    ] {
        ask(more).error(413, "invalid_request_error");
    }
    assert!(server.peak_bytes() - before < 48 * MIB);
    ask(json!({"repeat_last_n": 4096, "dry_multiplier": 1, "dry_penalty_last_n": 4096})).ok();
    let message = "and so ".repeat(10_000);
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "reasoning_budget_tokens": 1});
    let error =
        server.post("/v1/chat/completions", &with(chat, json!({"reasoning_budget_message": message}))).refused();
    assert!(error.contains("reasoning_budget_message must be at most 16384 bytes"), "{error}");
}

/// llama.cpp's pre-tokenizers read these texts by recursion.
#[test]
fn long_runs_end_no_server() {
    let server = Server::start(&["--override-kv", "tokenizer.ggml.pre=str:gpt-4o"]);
    for unit in [" ", "\n", "-", "汉"] {
        // These are tokenized, but do not fit the context.
        let text = unit.repeat(20_000);
        let chat = json!({"messages": [{"role": "user", "content": format!("{text}.")}]});
        server.post("/v1/chat/completions", &chat).error(400, "exceed_context_size_error");
        server.post("/tokenize", &json!({"content": text})).ok();
    }
    let text = "a".repeat(100_000);
    for (path, body) in [
        ("/tokenize", json!({"content": text})),
        ("/completion", json!({"prompt": text})),
        ("/completion", json!({"prompt": "x", "logit_bias": [[text, 1]]})),
        ("/v1/messages", json!({"max_tokens": 1, "messages": [{"role": "user", "content": text}]})),
    ] {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 400, "{path}: {}", answer.body);
        assert!(answer.body.to_string().contains("divide them"), "{path}: {}", answer.body);
    }
    let tool = json!({"type": "function", "function": {"name": " ".repeat(100_000), "parameters": {}}});
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "tools": [tool]});
    let error = server.post("/v1/chat/completions", &chat).refused();
    assert!(error.contains("longer than 512 bytes"), "{error}");
    server.post("/completion", &json!({"prompt": "x", "n_predict": 1})).ok();
}

/// Each further x doubles the number of parses.
const DOUBLING: &str = "root ::= s\ns ::= \"x\" s \"b\"? | \"x\" s \"c\"? | \"x\"";

#[test]
fn a_grammar_that_grows_ambiguous_ends_its_own_request() {
    let server = Server::start(&["--ignore-eos"]);
    let plain = json!({"prompt": "The river runs", "n_predict": 200, "cache_prompt": false});
    let mut other = server.stream("/completion", &plain);
    let first = other.next().unwrap();
    let body = json!({"prompt": "x", "n_predict": 100, "grammar": DOUBLING, "logit_bias": [["x", 100]]});
    let message = server.post("/completion", &body).refused();
    assert!(message.contains("too ambiguous to be followed"), "{message}");
    let events: Vec<Event> = server.stream("/completion", &body).collect();
    let error = &events.last().unwrap().data["error"];
    assert_eq!((&error["code"], &error["message"]), (&json!(400), &json!(message)));
    assert!(events.len() > 4, "{events:?}");
    let rest: Vec<Event> = other.collect();
    let done = &rest.last().unwrap().data;
    assert_eq!((&done["stop"], &done["tokens_predicted"]), (&json!(true), &json!(200)));
    let n_streamed = [first].iter().chain(&rest).filter(|event| event.data["stop"] == Value::Bool(false)).count();
    assert_eq!(n_streamed, 200);
    // A grammar that begins in too many ways is refused at once.
    let rules: String = (0..40).map(|n| format!("r{n} ::= r{m} \"a\"? | r{m} \"b\"?\n", m = n + 1)).collect();
    let grammar = json!({"grammar": format!("root ::= r0\n{rules}r40 ::= \"x\"")});
    let message = server.post("/completion", &with(plain, grammar)).refused();
    assert!(message.contains("begins in too many ways at once"), "{message}");
}

/// Each slot's sampler keeps numbers for the whole vocabulary, and so do the scored tokens of a prompt.
#[test]
fn samplers_of_all_slots_keep_to_the_memory_budget() {
    let dir = tempfile::tempdir().unwrap();
    let model = write(dir.path(), &Spec { vocab: 160_000, ..Spec::tiny("qwen3moe") });
    let flags = ["-m", model.to_str().unwrap(), "-np", "16", "-c", "1024", "--kv-unified", "--max-body", "100K"];
    let mib = least_mib(&flags) + 4;
    let server = Server::start(&[&flags[..], &["--mem-budget", &format!("{mib}M")]].concat());
    let body = json!({"prompt": [5, 6, 7], "n_predict": 48, "ignore_eos": true, "n_probs": 1});
    let scored: Vec<usize> = (0..200).map(|at| 5 + at).collect();
    let scored = json!({"prompt": scored, "max_tokens": 8, "echo": true, "logprobs": 1});
    let ask = &|at: usize| match at {
        0 => server.post("/v1/completions", &scored).status,
        _ => server.post("/completion", &body).status,
    };
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..16).map(|at| scope.spawn(move || ask(at))).collect();
        assert!(asked.into_iter().all(|own| own.join().unwrap() == 200));
    });
    let peak = server.peak_bytes();
    assert!(peak <= mib << 20, "{peak} bytes resident, {mib} MiB allowed");
}
