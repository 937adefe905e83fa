//! Keys, hosts and origins.

use std::io::{Read, Write};

use serde_json::{Value, json};

use super::rig::Server;

const PATH: &str = "/v1/chat/completions";

fn body() -> Value {
    json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
}

#[test]
fn keys_are_required() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"# of the house\nsecret\n#old\n").unwrap();
    for flags in [["--api-key", "secret"], ["--api-key-file", file.path().to_str().unwrap()]] {
        let server = Server::start(&flags);
        for path in [PATH, "/v1/messages", "/v1/responses", "/v1/embeddings", "/apply-template"] {
            assert_eq!(server.post(path, &body()).error(401, "authentication_error"), "Invalid API Key");
        }
        server.get("/health").ok();
        for key in ["Secret", "# of the house", "#old", "old"] {
            let header = ("Authorization", &*format!("Bearer {key}"));
            server.post_with(&[header], PATH, &body()).error(401, "authentication_error");
        }
        // A foreign page does not have the key.
        let headers = [("Host", "evil.example:8080"), ("Authorization", "Bearer secret")];
        server.post_with(&headers, PATH, &body()).ok();
    }
}

#[test]
fn foreign_hosts_and_origins_are_refused_without_a_key() {
    let server = Server::start(&["--cors-origins", "http://here.example", "--allowed-hosts", "box.lan:8080"]);
    let evil = ("Host", "evil.example:8080");
    for (headers, status) in [
        (&[("Origin", "http://here.example")][..], 200),
        (&[("Origin", &server.url)], 200),
        (&[("Origin", "http://evil.example")], 403),
        (&[("Host", "Box.LAN:8080")], 200),
        (&[("Host", "app.localhost")], 200),
        (&[evil], 403),
        (&[("Host", "localhost.evil.example")], 403),
        // DNS rebinding: the page's own name leads to this machine.
        (&[evil, ("Origin", "http://evil.example:8080")], 403),
    ] {
        assert_eq!(server.post_with(headers, PATH, &body()).status, status, "{headers:?}");
    }
    let message = server.post_with(&[evil], PATH, &body()).error(403, "permission_error");
    assert!(message.contains(evil.1) && message.contains("--allowed-hosts"), "{message}");
    // An address in the request's first line counts as in HTTP/2.
    let mut stream = server.connect();
    let request = b"GET http://evil.example/props HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
}
