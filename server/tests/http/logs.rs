//! The log of requests.

use std::io::{Read, Write};

use hobbit_synth::Spec;
use serde_json::{Value, json};

use super::rig::Server;
use crate::fixture;
use crate::fixture::process::{demo_model, name_also};

/// Pages and monitors ask for these again and again.
const LOOKS: [&str; 10] = [
    "/",
    "/page/main.js",
    "/health",
    "/v1/models",
    "/v1/models/demo.gguf",
    "/props",
    "/slots",
    "/metrics",
    "/experts",
    "/api/tags",
];

fn looks(server: &Server) {
    for path in LOOKS {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    assert_eq!(server.post("/markdown", &json!({"text": "a"})).status, 200);
}

#[test]
fn each_request_is_one_line_without_its_text() {
    let server = Server::start(&["--metrics"]);
    let said = json!({"messages": [{"role": "user", "content": "confidential"}], "max_tokens": 4, "ignore_eos": true});
    let completed = json!({"prompt": "confidential", "n_predict": 4, "ignore_eos": true});
    // Requests that only look are not logged: the first line is the chat's.
    looks(&server);
    server.post("/v1/chat/completions", &said).ok();
    let line = server.logged("hobbit: ");
    assert!(line.starts_with("hobbit: POST /v1/chat/completions 200: prompt "), "{line}");
    assert!(line.contains(" tokens (0 cached) in ") && line.contains(", generated 4 in "), "{line}");
    assert!(line.ends_with(" in total") && !line.contains("confidential"), "{line}");
    assert_eq!(server.stream("/completion", &completed).filter(|event| event.data["stop"] == true).count(), 1);
    let line = server.logged("hobbit: ");
    assert!(line.starts_with("hobbit: POST /completion 200: prompt ") && line.contains("generated 4 in"), "{line}");
    server.post("/completion", &json!({"prompt": "x", "n_predict": "many"}));
    let line = server.logged("hobbit: ");
    assert!(line.starts_with("hobbit: POST /completion 400; ") && line.contains("'n_predict'"), "{line}");
    // A client that leaves.
    let mut stream = server.stream("/completion", &json!({"prompt": "x", "n_predict": -1, "ignore_eos": true}));
    stream.next().unwrap();
    drop(stream);
    let line = server.logged("hobbit: ");
    assert!(line.contains("generated ") && line.ends_with("; the client left"), "{line}");

    let mut connection = server.connect();
    let path = format!("/\u{9b}31m{}", "x".repeat(1000));
    write!(connection, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    connection.read_to_end(&mut Vec::new()).unwrap();
    server.get("/absent").error(404, "not_found_error");
    let line = server.logged(" 404; ");
    assert!(line.len() < 500 && line.chars().all(|letter| (' '..='~').contains(&letter)), "{line:?}");
}

#[test]
fn requests_that_only_look_are_logged_on_demand() {
    let server = Server::start(&["-v", "--metrics"]);
    looks(&server);
    for path in LOOKS {
        server.logged(&format!("hobbit: GET {path} 200; "));
    }
    server.logged("hobbit: POST /markdown 200; ");
    // So it is with several models.
    let dir = tempfile::tempdir().unwrap();
    name_also(&demo_model(), dir.path().join("demo.gguf"));
    let server = Server::start_router(dir.path(), &dir.path().join("home"), "http://127.0.0.1:1", &[]);
    let completed = json!({"model": "demo", "prompt": "x", "n_predict": 2});
    for path in ["/v1/models", "/props?model=demo&autoload=true", "/slots", "/experts", "/health"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    server.post("/completion", &completed).ok();
    let line = server.logged(" 200");
    assert!(line.contains("hobbit: POST /completion 200"), "{line}");
}

#[test]
fn log_lines_can_be_json() {
    let server = Server::start(&["--log-format", "json"]);
    server.post("/v1/completions", &json!({"prompt": "confidential", "max_tokens": 2, "ignore_eos": true})).ok();
    server.post("/v1/completions", &json!({"prompt": 5.5})).refused();
    for (status, is_refused) in [(200, false), (400, true)] {
        let line = server.logged("/v1/completions");
        let object: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            (&object["method"], &object["status"], &object["level"]),
            (&"POST".into(), &json!(status), &"info".into())
        );
        assert_eq!((object["error"].is_string(), object["timings"]["predicted_n"].is_u64()), (is_refused, !is_refused));
        assert!(object["time"].as_f64().unwrap() > 0.0 && object["complete"] == true && !line.contains("confidential"));
    }
}

#[test]
fn warnings_of_long_contexts_and_prompts() {
    let server = Server::start(&["-c", "4096"]);
    let warning = "warning: the context holds 2048 tokens, but the model was trained on 512: beyond them it may talk \
                   nonsense; give -c 1024 or less";
    let log = &server.log;
    assert!(log.contains(warning) && log.contains(", 2 slots of at most 2048 tokens"), "{log}");
    let long = server.post("/v1/completions", &json!({"prompt": "a ".repeat(3000)}));
    let message = long.error(400, "exceed_context_size_error");
    assert!(message.contains("start the server with -c 4096 or more for each slot"), "{message}");
}

#[test]
fn a_short_context_comes_with_what_to_give() {
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec { layers: 8, embd: 256, ctx: 1 << 17, ..Spec::tiny("qwen3moe") };
    let path = fixture::write(dir.path(), &spec);
    let start = |n_ctx| Server::start(&["-m", path.to_str().unwrap(), "--mem-budget", "400M", "-np", "1", "-c", n_ctx]);
    let log = &start("0").log;
    assert!(log.contains("; coding agents need 7,000 to 88,000: give -c 90112 -np 1"), "{log}");
    assert!(!start("8192").log.contains("agents"));
}
