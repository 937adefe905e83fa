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
        let ask = |key: &str| server.post_with(&[("Authorization", &format!("Bearer {key}"))], PATH, &body());
        ask("secret").ok();
        for key in ["Secret", "# of the house", "#old", "old"] {
            ask(key).error(401, "authentication_error");
        }
        let key = ("Authorization", "Bearer secret");
        let answer = server.post_with(&[("Host", "evil.example:8080"), key], PATH, &body());
        assert_eq!(answer.status, 200, "a foreign page does not have the key");
    }
}

#[test]
fn pages_of_other_origins_are_refused() {
    for (flags, named) in [(&["--cors-origins", "http://here.example"][..], 200), (&[], 403)] {
        let server = Server::start(flags);
        for (origin, status) in [("http://here.example", named), ("http://evil.example", 403), (&server.url, 200)] {
            assert_eq!(server.post_with(&[("Origin", origin)], PATH, &body()).status, status, "{flags:?} {origin}");
        }
    }
}

#[test]
fn foreign_hosts_are_refused_without_a_key() {
    let server = Server::start(&["--allowed-hosts", "box.lan:8080,other.lan."]);
    for host in ["localhost:8080", "app.localhost", "127.0.0.1:1", "[::1]:8080", "Box.LAN:8080", "other.lan"] {
        assert_eq!(server.post_with(&[("Host", host)], PATH, &body()).status, 200, "{host}");
    }
    // DNS rebinding: the page's own name leads to this machine.
    for headers in [
        &[("Host", "evil.example:8080"), ("Origin", "http://evil.example:8080")][..],
        &[("Host", "evil.example:8080")],
        &[("Host", "localhost.evil.example")],
    ] {
        let message = server.post_with(headers, PATH, &body()).error(403, "permission_error");
        assert!(message.contains(headers[0].1) && message.contains("--allowed-hosts"), "{message}");
    }
    // An address in the request's first line counts as in HTTP/2.
    let mut stream = server.connect();
    let request = b"GET http://evil.example/props HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
}
