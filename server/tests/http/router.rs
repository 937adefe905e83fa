//! Several models: `--models-dir`. Tests that look for processes in /proc, or send signals, are for Unix.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

#[cfg(unix)]
use super::rig::is_running;
use super::rig::{Server, until};
use crate::fixture::hub::hub;
use crate::fixture::hub::server::{Reply, Server as Hub};
use crate::fixture::no_such_file;
use crate::fixture::process::{demo_model, name_also};

/// A directory with the models `a` and `b`, and other files.
fn directory() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["a.gguf", "b.gguf", "a-draft.gguf", "mmproj-a.gguf"] {
        name_also(&demo_model(), at(name));
    }
    fs::write(at("note.txt"), "no model").unwrap();
    dir
}

fn start(dir: &TempDir, flags: &[&str]) -> Server {
    Server::start_router(dir.path(), &dir.path().join("home"), "http://127.0.0.1:1", flags)
}

fn ask(model: &str) -> Value {
    json!({"model": model, "prompt": "The river", "max_tokens": 4})
}

/// A text without an end.
fn endless(model: &str) -> Value {
    json!({"model": model, "prompt": "The river", "n_predict": -1, "ignore_eos": true})
}

/// Names of the models with this status.
fn with_status(server: &Server, status: &str) -> Vec<String> {
    let listed = server.get("/v1/models").ok();
    let all = listed["data"].as_array().unwrap().iter();
    all.filter(|own| own["status"]["value"] == status).map(|own| own["id"].as_str().unwrap().to_owned()).collect()
}

#[cfg(unix)]
#[test]
fn models_are_loaded_on_demand_and_give_way() {
    let dir = directory();
    let server = start(&dir, &[]);
    assert_eq!(with_status(&server, "unloaded"), ["a", "b"]);
    assert!(server.children().is_empty());
    assert!(server.post("/v1/completions", &json!({"prompt": "x"})).refused().contains("model name is missing"));
    let text = server.post("/v1/completions", &ask("a")).ok();
    assert_eq!(text["model"], "a");
    let first = server.children();
    assert_eq!((with_status(&server, "loaded"), first.len()), (vec!["a".to_owned()], 1));
    // All of the budget was the other's.
    let other = server.post("/v1/completions", &ask("b")).ok();
    assert_eq!((other["model"].as_str(), &other["choices"][0]["text"]), (Some("b"), &text["choices"][0]["text"]));
    assert_eq!((with_status(&server, "loaded"), server.children().len()), (vec!["b".to_owned()], 1));
    assert!(!is_running(first[0]));
    // Requests that name none go to the last one; looking loads none.
    assert_eq!(server.get("/props").ok()["model_alias"], "b");
    assert_eq!(server.get("/props?model=a").ok()["model_alias"], "a");
    assert_eq!(server.get("/v1/models/b").ok()["status"]["value"], "unloaded");
    server.get("/v1/models/c").error(404, "not_found_error");
    // By hand.
    assert_eq!(server.post("/models/unload", &json!({"model": "a"})).ok(), json!({"success": true}));
    until("a leaves", || server.children().is_empty());
    assert!(server.post("/models/unload", &json!({"model": "a"})).refused().contains("not loaded"));
    assert!(server.get("/props").refused().contains("model name is missing"));
    server.post("/models/load", &json!({"model": "b"})).ok();
    until("b is loaded", || with_status(&server, "loaded") == ["b"]);
    // New files are found.
    name_also(&demo_model(), dir.path().join("c.gguf"));
    server.post("/v1/completions", &ask("c")).ok();
}

#[cfg(unix)]
#[test]
fn a_part_of_the_budget_is_each_models() {
    let dir = directory();
    let server = start(&dir, &["--models-max", "2", "--mem-budget", "400M"]);
    for model in ["a", "b", "a"] {
        server.post("/v1/completions", &ask(model)).ok();
    }
    let children = server.children();
    assert_eq!(children.len(), 2);
    for child in children {
        let words = fs::read_to_string(format!("/proc/{child}/cmdline")).unwrap();
        assert!(words.contains("--mem-budget=209715200\0"), "{words}");
        assert!(!words.contains("key"), "{words}");
    }
    // The one that was used least recently gives way.
    name_also(&demo_model(), dir.path().join("c.gguf"));
    server.post("/v1/completions", &ask("c")).ok();
    assert_eq!(with_status(&server, "loaded"), ["a", "c"]);
}

#[cfg(unix)]
#[test]
fn a_model_leaves_after_a_time_without_requests() {
    let dir = directory();
    let server = start(&dir, &["--sleep-idle-seconds", "1", "--no-models-autoload"]);
    assert!(server.post("/v1/completions", &ask("a")).refused().contains("/models/load"));
    server.post("/v1/completions?autoload=true", &ask("a")).ok();
    // To look at the list is no use of a model.
    until("a leaves", || with_status(&server, "unloaded") == ["a", "b"]);
    assert!(server.children().is_empty());
}

#[test]
fn streams_and_leaving_clients_reach_the_model() {
    let dir = directory();
    let server = start(&dir, &["--context-shift"]);
    let mut events = server.stream("/completion", &endless("a"));
    assert!(events.next().unwrap().data["content"].is_string());
    server.wait_for_busy(1);
    // The other model waits for the stream, which its client then leaves.
    std::thread::scope(|scope| {
        let other = scope.spawn(|| server.post("/v1/completions", &ask("b")).ok());
        until("the stream goes on", || events.next().is_some());
        assert!(!other.is_finished());
        drop(events);
        assert_eq!(other.join().unwrap()["model"], "b");
    });
    // A client that leaves before the answer began.
    let body = endless("b").to_string();
    let mut stream = server.connect();
    let head = format!("POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).unwrap();
    server.wait_for_busy(1);
    drop(stream);
    server.wait_for_busy(0);
}

#[cfg(unix)]
#[test]
fn clients_hear_which_models_are_loaded() {
    let dir = directory();
    fs::write(dir.path().join("broken.gguf"), "GGUF").unwrap();
    let mut server = start(&dir, &[]);
    let mut events = server.events("/models/sse");
    let mut heard = |model: &str, status: Value| {
        assert_eq!(events.next().unwrap().data, json!({"model": model, "event": "model_status", "data": status}));
    };
    server.post("/v1/completions", &ask("a")).ok();
    heard("a", json!({"status": "loading"}));
    heard("a", json!({"status": "loaded"}));
    server.post("/v1/completions", &ask("broken")).error(503, "unavailable_error");
    heard("a", json!({"status": "unloaded", "exit_code": 0}));
    heard("broken", json!({"status": "loading"}));
    heard("broken", json!({"status": "unloaded", "exit_code": 1}));
    // The stream ends with the server.
    server.signal("TERM", server.id());
    assert_eq!((events.next(), server.wait()), (None, Some(0)));
}

#[cfg(unix)]
#[test]
fn a_killed_model_is_an_error_with_its_reason() {
    let dir = directory();
    let server = start(&dir, &["--context-shift"]);
    let mut events = server.stream("/completion", &endless("a"));
    events.next().unwrap();
    server.signal("KILL", server.children()[0]);
    let last = events.last().unwrap();
    let message = last.data["error"]["message"].as_str().unwrap();
    assert!(last.data["error"]["code"] == 502 && message.contains("signal 9"), "{message}");
    // An answer that has not begun.
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| server.post("/completion", &endless("a")));
        until("a runs", || with_status(&server, "loaded") == ["a"]);
        server.wait_for_busy(1);
        server.signal("KILL", server.children()[0]);
        let message = waits.join().unwrap().error(502, "unavailable_error");
        assert!(message.contains("'a' ended") && message.contains("signal 9"), "{message}");
    });
    server.post("/v1/completions", &ask("a")).ok();
    // A file that is no model.
    fs::write(dir.path().join("broken.gguf"), "GGUF").unwrap();
    let message = server.post("/v1/completions", &ask("broken")).error(503, "unavailable_error");
    assert!(message.contains("exit status 1: error: ") && message.contains("broken.gguf"), "{message}");
    let status = server.get("/v1/models/broken").ok()["status"].clone();
    assert_eq!(status, json!({"value": "unloaded", "failed": true, "exit_code": 1}));
    let plain = server.post("/api/chat", &json!({"model": "broken", "messages": []}));
    assert!(plain.status == 503 && plain.body["error"].as_str().unwrap().contains("exit status 1"), "{plain:?}");
}

/// Its process refuses before it loads anything.
#[test]
fn a_model_beyond_its_budget_is_an_error_that_names_what_is_needed() {
    let dir = directory();
    let server = start(&dir, &["--mem-budget", "40M"]);
    let message = server.post("/v1/completions", &ask("a")).error(503, "unavailable_error");
    for part in ["a memory budget of 40 MiB (as given) is too small", "needs at least ", "give --mem-budget "] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn models_have_flags_of_their_own() {
    let (dir, other) = (directory(), tempfile::tempdir().unwrap());
    let (file, elsewhere) = (dir.path().join("models.ini"), other.path().join("elsewhere.gguf"));
    name_also(&demo_model(), &elsewhere);
    // Names of files have capitals.
    name_also(&demo_model(), dir.path().join("Large-A3B.gguf"));
    let text = format!(
        "version = 1\n[*]\nc = 768 ; every model's\nno-warmup = true\n\n# one model's\n[b]\nnp = 1\nkvu\nctx_size = 512\n\
         [other]\nmodel = {}\nno-slots = false\n[later]\nc = 128\n[Large-A3B]\nnp = 3\n",
        elsewhere.display()
    );
    fs::write(&file, text).unwrap();
    let start = |flags: &[&str]| {
        let flags = [&["--models-preset", file.to_str().unwrap()], flags].concat();
        Server::router(dir.path(), &dir.path().join("home"), "http://127.0.0.1:1", &flags)
    };
    let server = start(&[]);
    assert!(server.log.contains("warning: --models-preset: [later] names no model here"), "{}", server.log);
    assert_eq!(server.log.matches("--models-preset").count(), 1, "{}", server.log);
    assert_eq!(with_status(&server, "unloaded"), ["Large-A3B", "a", "b", "other"]);
    let size = |server: &Server, model: &str| {
        let props = server.get(&format!("/props?model={model}")).ok();
        (props["default_generation_settings"]["n_ctx"].as_u64().unwrap(), props["total_slots"].as_u64().unwrap())
    };
    assert_eq!((size(&server, "a"), size(&server, "b"), size(&server, "other")), ((768, 4), (512, 1), (768, 4)));
    assert_eq!(size(&server, "Large-A3B"), (256, 3));
    // The command line wins.
    assert_eq!(size(&start(&["-c", "256"]), "b"), (256, 1));
    // A section's own file has precedence over one of the directory.
    fs::write(&file, format!("[a]\nmodel = {}\n", elsewhere.display())).unwrap();
    let path = start(&[]).get("/props?model=a").ok()["model_path"].clone();
    assert!(path.as_str().unwrap().ends_with("elsewhere.gguf"), "{path}");
    // A mistake ends the server at once.
    for (text, parts) in [
        ("[a]\nx\n[b", &["line 3: Found opening bracket"][..]),
        ("[a]\nctx-size = many", &["section [a]", "'many'", "--ctx-size", "expected a whole number"]),
        ("[b]\nctx-sise = 5", &["section [b]", "--ctx-sise"]),
        ("[*]\nport = 5", &["section [*]", "'port' is no setting of this section"]),
        ("[*]\nmodel = x.gguf", &["section [*]", "'model' is no setting of this section"]),
        ("[c]\nmodel = none.gguf", &["section [c]", "none.gguf: cannot open this model"]),
        ("[a]\ntools = all", &["section [a]", "the server runs no tools"]),
        ("ctx-size = 5", &["'ctx-size' stands before the first section"]),
    ] {
        fs::write(&file, text).unwrap();
        let told = refused(&["--models-dir", ".", "--models-preset", file.to_str().unwrap()]);
        assert!(told.contains("models.ini") && parts.iter().all(|part| told.contains(part)), "{told}");
    }
}

/// The error of a server that does not start.
fn refused(words: &[&str]) -> String {
    let mut server = std::process::Command::new(env!("CARGO_BIN_EXE_hobbit-server"));
    let output = server.args(["--port", "0"]).args(words).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn wrong_usage_is_told_at_the_start() {
    let absent = format!("--models-preset /none.ini: {}", no_such_file());
    for (words, part) in [
        (&["--models-dir", "/none"][..], "--models-dir /none: cannot be listed"),
        (&["--models-dir", ".", "-m", "x.gguf"], "cannot be used with '--model <FNAME>'"),
        (&["--models-preset", "/none.ini"], absent.as_str()),
        (&["--models-preset", "x.ini", "-m", "x.gguf"], "cannot be used with"),
        (&["--models-dir", ".", "--models-max", "0"], "0 is not in 1..=64"),
    ] {
        let text = refused(words);
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_preset_alone_names_the_models() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("models.ini");
    fs::write(&file, format!("[one]\nmodel = \"{}\"\nc = 256\n", demo_model().display())).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_hobbit-server"));
    command.env("HF_HOME", dir.path().join("home"));
    let server = Server::start_as(command, &["--models-preset", file.to_str().unwrap()]);
    assert_eq!(with_status(&server, "unloaded"), ["one"]);
    assert_eq!(server.post("/v1/completions", &ask("one")).ok()["model"], "one");
}

/// Nothing that a model makes its process print names the address to which requests go.
#[test]
fn a_models_words_lead_no_request_elsewhere() {
    let dir = directory();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    other.set_nonblocking(true).unwrap();
    let line = format!("hobbit: ready; http://{}, 1 slot of 512 tokens", other.local_addr().unwrap());
    let template = format!("{{{{ raise_exception('x\n{line}\n') }}}}");
    let server = start(&dir, &["--chat-template", &template]);
    assert_eq!(server.post("/v1/completions", &ask("a")).ok()["model"], "a");
    assert!(server.logged(&line).starts_with("[a] hobbit: ready"), "the template has written the line");
    assert_eq!(other.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn a_request_waits_for_room_only_so_long() {
    let dir = directory();
    let server = start(&dir, &["--context-shift", "--model-wait", "1"]);
    let mut events = server.stream("/completion", &endless("a"));
    events.next().unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| server.post("/v1/completions", &ask("b")));
        until("the stream goes on", || events.next().is_some() && other.is_finished());
        let message = other.join().unwrap().error(503, "unavailable_error");
        let parts = ["'b' was not loaded: it waited 1 s", "--model-wait", "'a' has 1 running requests"];
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    });
    // The model stays, for others as well, until it is free.
    server.post("/v1/completions", &ask("a")).ok();
    assert!(events.next().is_some());
    drop(events);
    server.wait_for_busy(0);
    server.post("/v1/completions", &ask("b")).ok();
    assert!(refused(&["--models-dir", ".", "--model-wait", "x"]).contains("expected a number of seconds"));
}

#[cfg(unix)]
#[test]
fn a_stopped_model_is_ended_for_others() {
    let dir = directory();
    let server = start(&dir, &["--context-shift", "--timeout", "5"]);
    let mut events = server.stream("/completion", &endless("a"));
    events.next().unwrap();
    server.signal("STOP", server.children()[0]);
    assert_eq!(server.post("/v1/completions", &ask("b")).ok()["model"], "b");
    let last = events.last().unwrap();
    let message = last.data["error"]["message"].as_str().unwrap();
    assert!(message.contains("gave no answer for 5 s and was killed"), "{message}");
}

#[test]
fn health_answers_beside_idle_streams_and_waiting_requests() {
    let dir = directory();
    let server = start(&dir, &["--context-shift", "--max-waiting", "8"]);
    // Streams of events are bounded: the first ones end for the last ones.
    let mut streams: Vec<_> = (0..65).map(|_| server.events("/models/sse")).collect();
    assert_eq!(streams.remove(0).next(), None);
    server.get("/health").ok();
    // As are requests that wait for a model.
    let mut events = server.stream("/completion", &endless("a"));
    events.next().unwrap();
    let waiting: Vec<_> = (0..9)
        .map(|_| {
            let (mut stream, body) = (server.connect(), ask("b").to_string());
            let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length:";
            stream.write_all(format!("{head} {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
            stream
        })
        .collect();
    server.logged("POST /v1/completions 503");
    server.get("/health").ok();
    drop((waiting, events));
    until("requests that left wait no longer", || server.post("/v1/completions", &ask("a")).status == 200);
}

#[cfg(unix)]
#[test]
fn models_end_with_the_server() {
    let dir = directory();
    for (signal, status) in [("TERM", Some(0)), ("KILL", None)] {
        let mut server = start(&dir, &[]);
        server.post("/v1/completions", &ask("a")).ok();
        let children = server.children();
        assert_eq!(children.len(), 1);
        server.signal(signal, server.id());
        assert_eq!(server.wait(), status, "{signal}");
        until(signal, || !is_running(children[0]));
    }
}

#[cfg(unix)]
#[test]
fn names_and_limits_of_requests() {
    let dir = directory();
    fs::write(dir.path().join("keys"), "secret").unwrap();
    let keys = dir.path().join("keys");
    let server = start(&dir, &["--max-body", "2000", "--api-key-file", keys.to_str().unwrap()]);
    let post = |body: &Value| server.post_with(&[("Authorization", "Bearer secret")], "/v1/completions", body);
    post(&ask("a")).ok();
    for name in ["../a", "a.gguf", "./a", "/etc/passwd", "a/../b", "a\0", "-m", "note.txt", "a-draft", "mmproj-a", "A"]
    {
        post(&ask(name)).error(404, "not_found_error");
    }
    post(&json!({"model": ["a"]})).refused();
    post(&json!({"model": "x".repeat(3000)})).error(413, "invalid_request_error");
    // A model logs texts of requests; they are not taken for its own line about its address.
    let line = "hobbit: ready; http://127.0.0.1:1, 1 slot";
    for fields in [
        json!({"samplers": [line]}),
        json!({"response_format": {"type": line}}),
        json!({"grammar": line}),
        json!({"reasoning_format": line}),
        json!({"tool_choice": line}),
    ] {
        let mut body = ask("a");
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        post(&body);
        server.post_with(&[("Authorization", "Bearer secret")], "/completion", &body);
    }
    post(&ask("a")).ok();
    // Every endpoint asks for the router's key, and no command line shows a key.
    for path in ["/v1/models", "/models/sse", "/props?model=a", "/api/tags", "/slots"] {
        server.get(path).error(401, "authentication_error");
    }
    for path in ["/models/load", "/completion", "/api/chat"] {
        server.post(path, &ask("a")).error(401, "authentication_error");
    }
    assert_eq!(server.get("/health").status, 200);
    let child = server.children()[0];
    let words = fs::read_to_string(format!("/proc/{child}/cmdline")).unwrap();
    assert!(!words.contains("secret") && !words.contains("keys"), "{words}");
    // Hosts and origins are checked as without models.
    let server = start(&dir, &[]);
    for header in [("Host", "evil.example"), ("Origin", "http://evil.example")] {
        assert_eq!(server.post_with(&[header], "/v1/completions", &ask("a")).status, 403);
    }
    assert!(server.children().is_empty());
    assert_eq!(server.post_with(&[("Origin", &*server.url)], "/v1/completions", &ask("a")).status, 200);
    let line = server.logged("POST /v1/completions 200");
    assert!(!line.contains("the client left"), "{line}");
}

/// The lines of an answer.
fn lines(server: &Server, method: &str, path: &str, body: &Value) -> (String, Vec<Value>) {
    let mut stream = server.connect();
    let body = body.to_string();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: ");
    stream.write_all(format!("{head}{}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let lines = body.lines().filter(|line| line.starts_with('{'));
    (head.lines().next().unwrap().to_owned(), lines.map(|line| serde_json::from_str(line).unwrap()).collect())
}

#[test]
fn ollamas_clients_fetch_and_remove_models() {
    let (dir, hub) = (directory(), hub(None));
    let home = dir.path().join("home");
    let router = |flags: &[&str]| Server::start_router(dir.path(), &home, &hub.url(""), flags);
    let server = router(&[]);
    let refused = server.post("/api/pull", &json!({"model": "a/b"}));
    assert!(refused.status == 403 && refused.body["error"].as_str().unwrap().contains("--models-pull"), "{refused:?}");
    assert!(hub.seen().is_empty() && !home.exists());
    drop(server);
    let server = router(&["--models-pull"]);
    let (_, steps) = lines(&server, "POST", "/api/pull", &json!({"model": "hf.co/a/b:Q8_0"}));
    assert_eq!(steps[0], json!({"status": "pulling manifest"}));
    assert_eq!(steps.last().unwrap(), &json!({"status": "success"}));
    let size = fs::metadata(demo_model()).unwrap().len();
    let whole = json!({"status": "pulling a/b/demo-Q8_0.gguf", "digest": "a/b/demo-Q8_0.gguf", "completed": size,
                       "total": size});
    assert!(steps.contains(&whole), "{steps:?}");
    let tags = server.get("/api/tags").ok();
    let names: Vec<_> = tags["models"].as_array().unwrap().iter().map(|own| own["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a", "a/b:Q8_0", "b"]);
    let chat = json!({"model": "a/b:Q8_0", "stream": false, "options": {"num_predict": 2},
                      "messages": [{"role": "user", "content": "x"}]});
    assert_eq!(server.post("/api/chat", &chat).ok()["done"], true);
    let loaded = server.get("/api/ps").ok();
    assert_eq!(loaded["models"][0]["name"], "a/b:Q8_0");
    // Without time to stay, a model leaves after the answer, or at once.
    let mut last = chat.clone();
    last["keep_alive"] = json!(0);
    assert_eq!(server.post("/api/chat", &last).ok()["done_reason"], "length");
    until("the model has left", || server.get("/api/ps").ok()["models"] == json!([]));
    server.post("/api/chat", &chat).ok();
    let left = server.post("/api/generate", &json!({"model": "a/b:Q8_0", "keep_alive": "0s"})).ok();
    assert_eq!((&left["done_reason"], &left["response"]), (&json!("unload"), &json!("")));
    until("the model has left", || server.get("/api/ps").ok()["models"] == json!([]));
    // Absent models, and files that no client may remove.
    let missing = server.post("/api/pull", &json!({"model": "a/none", "stream": false}));
    assert!(missing.status == 500 && missing.body["error"].as_str().unwrap().contains("404"), "{missing:?}");
    assert!(server.post("/api/pull", &json!({"model": "../../x"})).status == 400);
    let remove = |name: &str| lines(&server, "DELETE", "/api/delete", &json!({"model": name})).0;
    assert!(remove("a").contains("403") && remove("../a").contains("404"));
    assert!(remove("a/b:Q8_0").contains("200"));
    assert_eq!(with_status(&server, "unloaded"), ["a", "b"]);
    assert!(files(&home).iter().all(|(_, bytes)| *bytes < size) && dir.path().join("a.gguf").exists());
}

/// Listings of `slow/…` begin and do not end; others do not exist.
#[test]
fn downloads_that_hang_leave_room_for_others() {
    let dir = directory();
    let hub = Hub::new(|request| {
        if request.path.starts_with("/api/models/slow/") {
            Reply::new(200, "{}").hanging_after(1)
        } else {
            Reply::new(404, "no")
        }
    });
    let server = Server::start_router(dir.path(), &dir.path().join("home"), &hub.url(""), &["--models-pull"]);
    let hang = |n: usize| -> Vec<TcpStream> {
        let pull = |at: usize| {
            let body = json!({"model": format!("slow/{at}")}).to_string();
            let mut stream = server.connect();
            let head = "POST /api/pull HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";
            write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
            stream
        };
        let (streams, mut n_asked) = ((0..n).map(pull).collect(), 0);
        until("the downloads hang", || {
            n_asked += hub.seen().len();
            n_asked == n
        });
        streams
    };
    let _three = hang(3);
    let absent = server.post("/api/pull", &json!({"model": "a/none", "stream": false}));
    assert!(absent.status == 500 && absent.body["error"].as_str().unwrap().contains("404"), "{absent:?}");
    hub.seen();
    let _fourth = hang(1);
    let busy = server.post("/api/pull", &json!({"model": "a/none", "stream": false}));
    assert!(busy.status == 503 && busy.body["error"].as_str().unwrap().contains("downloaded"), "{busy:?}");
    server.get("/health").ok();
    server.post("/v1/completions", &ask("a")).ok();
}

/// Files below a directory, and their sizes.
fn files(directory: &Path) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap().flatten() {
        if entry.path().is_dir() {
            found.extend(files(&entry.path()))
        } else {
            found.push((entry.path().display().to_string(), entry.metadata().unwrap().len()))
        }
    }
    found
}
