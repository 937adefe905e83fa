//! Connections that do nothing, and clients that do not read.

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
    assert_eq!((&last.data["stop"], &last.data["tokens_predicted"]), (&json!(true), &json!(400)), "work goes on");
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
