//! Keys, hosts and origins; connections that do nothing, and clients that do not read. A process's limit of descriptors
//! is Unix's.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

use super::rig::Server;

/// Reads until the server closes the connection; what it has sent.
#[track_caller]
fn read_to_end(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the connection stays open: {error}"),
    }
    bytes
}

#[test]
fn silent_connections_are_closed() {
    let server = Server::start(&["--timeout", "1"]);
    let begin = |bytes: &[u8]| {
        let mut stream = server.connect();
        stream.write_all(bytes).unwrap();
        stream
    };
    // One says nothing, one a part of a head, one asks and is silent then, one sends a part of a body.
    let silent = [
        begin(b""),
        begin(b"GET /health HTTP/1.1\r\nHost: localhost\r\n"),
        begin(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        begin(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{\"prompt\""),
        // HTTP/2, and no request.
        begin(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"),
    ];
    let [nothing, _, answered, _, http2] = silent.map(read_to_end);
    assert!(nothing.is_empty());
    assert!(answered.starts_with(b"HTTP/1.1 200"));
    assert!(!http2.is_empty(), "the server speaks HTTP/2");
}

#[test]
fn long_work_is_no_silence() {
    let server = Server::start(&["--timeout", "1", "--ignore-eos", "--context-shift"]);
    // No byte comes or goes while a text is generated, for longer than a client may be silent.
    let mut n = 500;
    loop {
        let answer = server.post("/completion", &json!({"prompt": "The river", "n_predict": n})).ok();
        assert_eq!(answer["tokens_predicted"], n);
        if answer["timings"]["predicted_ms"].as_f64().unwrap() > 1500.0 {
            break;
        }
        n *= 2;
    }
}

#[cfg(unix)]
#[test]
fn new_connections_take_the_place_of_the_oldest_silent_ones() {
    // Half of the descriptors are for connections.
    let server = Server::start_with_descriptors(128, &["--ignore-eos"]);
    let mut stream = server.stream("/completion", &json!({"prompt": "The river", "n_predict": 400}));
    assert!(stream.next().is_some());
    let mut silent: Vec<TcpStream> = (0..300).map(|_| server.connect()).collect();
    server.get("/health").ok();
    let newest = silent.pop().unwrap();
    assert!(read_to_end(silent.swap_remove(0)).is_empty(), "the oldest is closed");
    newest.set_nonblocking(true).unwrap();
    let kind = (&newest).read(&mut [0]).unwrap_err().kind();
    assert_eq!(kind, std::io::ErrorKind::WouldBlock, "the newest is open");
    let last = stream.last().unwrap();
    let ended = (&last.data["stop"], &last.data["tokens_predicted"]);
    assert_eq!(ended, (&json!(true), &json!(400)), "work goes on: {}", server.rest_of_log());
}

#[cfg(unix)]
#[test]
fn health_answers_when_all_connections_work() {
    use std::io::ErrorKind;

    use super::rig::until;

    let server = Server::start_with_descriptors(128, &["--ignore-eos", "--context-shift"]);
    let body = json!({"prompt": "The river", "n_predict": -1}).to_string();
    let head = format!("POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
    // Half of the descriptors are for connections. All of their requests run or wait for slots.
    let send = || {
        let mut stream = server.connect();
        stream.write_all((head.clone() + &body).as_bytes()).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    };
    let waits = |stream: &TcpStream| stream.peek(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
    let mut busy: Vec<TcpStream> = Vec::new();
    let ask = |path: &str| {
        let mut stream = server.connect();
        stream
            .write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes())
            .unwrap();
        String::from_utf8(read_to_end(stream)).unwrap()
    };
    // A connection whose request has not been read yet is silent: the next one may take its place.
    until("all are at work", || {
        busy.retain(waits);
        busy.resize_with(64, send);
        ask("/props").starts_with("HTTP/1.1 503")
    });
    for _ in 0..40 {
        assert!(ask("/health").starts_with("HTTP/1.1 200"));
    }
    drop(busy);
    until("there is room again", || ask("/props").starts_with("HTTP/1.1 200"));
}

#[test]
fn a_client_that_does_not_read_frees_its_slot() {
    let server = Server::start(&["--timeout", "1", "--ignore-eos", "--context-shift"]);
    // Every event has many candidates, so that buffers are soon full; and there is no end.
    let body: Value = json!({"prompt": "The river", "n_predict": -1, "n_probs": 500, "stream": true});
    let body = body.to_string();
    let mut stream = server.connect();
    let head = format!("POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).unwrap();
    server.wait_for_busy(1);
    server.wait_for_busy(0);
    // Whatever was on its way comes, then nothing more.
    read_to_end(stream);
}

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
fn a_refused_request_takes_no_other_one_with_it() {
    let server = Server::start(&["--api-key", "secret"]);
    let answer = |stream: &mut TcpStream| {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).unwrap();
        let n_bytes = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap();
        stream.read_exact(&mut vec![0; n_bytes.parse().unwrap()]).unwrap();
        head
    };
    let head = |n_bytes: usize| format!("POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {n_bytes}\r\n\r\n");
    let mut stream = server.connect();
    for _ in 0..3 {
        stream.write_all(head(3).as_bytes()).unwrap();
        // The head has arrived when a later request is answered.
        server.get("/health").ok();
        stream.write_all(b"{} ").unwrap();
        let answer = answer(&mut stream);
        assert!(answer.starts_with("HTTP/1.1 401") && !answer.contains("Connection: "), "{answer}");
    }
    // A long body is not read; the client hears that the connection ends.
    stream.write_all(head(1 << 20).as_bytes()).unwrap();
    let answer = answer(&mut stream);
    assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("Connection: close\r\n"), "{answer}");
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
    // A page asks before it sends a key: `*` would not allow that header.
    for (asked, allowed) in [
        ("", "authorization, content-type, x-api-key"),
        ("authorization,x-stainless-os", "authorization,x-stainless-os"),
    ] {
        let mut stream = server.connect();
        let asked =
            if asked.is_empty() { String::new() } else { format!("Access-Control-Request-Headers: {asked}\r\n") };
        let head = "Host: localhost\r\nOrigin: http://here.example\r\nAccess-Control-Request-Method: POST";
        write!(stream, "OPTIONS {PATH} HTTP/1.1\r\n{head}\r\n{asked}Connection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let headers = format!("access-control-allow-headers: {allowed}\r\n");
        assert!(answer.to_lowercase().contains(&headers), "{answer}");
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
