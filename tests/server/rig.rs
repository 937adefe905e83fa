//! A hobbit-server of its own for each test, on loopback with the demo model, and a client of it.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::{Agent, Body};

/// Calls of tools are JSON and nothing else. The model of the tests has to be pushed to call one: it may talk before.
pub const TEMPLATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/server/tools.jinja");

/// Fields of a request with which the model begins with a call.
pub fn pushed() -> Value {
    json!({"logit_bias": [["{", 100]], "parallel_tool_calls": false})
}

/// A request, and further fields of it.
pub fn with(mut body: Value, more: Value) -> Value {
    let (Value::Object(fields), Value::Object(more)) = (&mut body, more) else { panic!("a request is an object") };
    fields.extend(more);
    body
}

/// Killed when dropped.
pub struct Server {
    child: Child,
    /// Where it answers.
    pub url: String,
    agent: Agent,
    key: Option<&'static str>,
}

/// An answer: JSON.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Value,
}

impl Answer {
    /// The body of an answer that must be one.
    #[track_caller]
    pub fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.body
    }

    /// The message of an error that must be one.
    #[track_caller]
    pub fn error(self, status: u16, kind: &str) -> String {
        let error = &self.body["error"];
        assert_eq!((self.status, error["type"].as_str()), (status, Some(kind)), "{}", self.body);
        assert_eq!(error["code"], status, "{}", self.body);
        error["message"].as_str().expect("an error has a message").to_owned()
    }
}

/// A server-sent event.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub name: Option<String>,
    /// Null for `[DONE]`.
    pub data: Value,
}

impl Server {
    /// Of two slots with 512 tokens each, unless `flags` say otherwise.
    pub fn start(flags: &[&str]) -> Server {
        Server::start_as(Command::new(env!("CARGO_BIN_EXE_hobbit-server")), flags)
    }

    /// With so many descriptors at the most.
    pub fn start_with_descriptors(n: usize, flags: &[&str]) -> Server {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {n} && exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_hobbit-server")]);
        Server::start_as(command, flags)
    }

    fn start_as(mut command: Command, flags: &[&str]) -> Server {
        let mut child = command
            .args(["--port", "0", "-t", "1", "-np", "2", "-c", "1024", "--temp", "0"])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = String::new();
        let url = loop {
            let Some(Ok(line)) = lines.next() else { panic!("the server ended: {said}") };
            if let Some(addresses) = line.strip_prefix("hobbit: ready; ") {
                break addresses.split(", ").next().unwrap().to_owned();
            }
            said += &(line + "\n");
        };
        std::thread::spawn(move || lines.for_each(drop));
        let config = Agent::config_builder().http_status_as_error(false).timeout_global(Some(Duration::from_secs(120)));
        Server { child, url, agent: config.build().into(), key: None }
    }

    /// A connection of its own, which waits for an answer for a minute.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.url.trim_start_matches("http://")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// The most memory that it has had, in bytes.
    pub fn peak_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the kernel tells");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// The status of an answer to a request by another name of the server, and its text.
    pub fn ask_as(&self, host: &str, origin: Option<&str>, path: &str, body: &Value) -> (u16, String) {
        let mut request = self.agent.post(format!("{}{path}", self.url)).header("Host", host);
        if let Some(origin) = origin {
            request = request.header("Origin", origin);
        }
        if let Some(key) = self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let mut response = request.send(body.to_string()).unwrap();
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    }

    /// Requests bring this key.
    pub fn with_key(mut self, key: &'static str) -> Server {
        self.key = Some(key);
        self
    }

    /// As [`Server::with_key`], for what is asked next.
    pub fn with_key_now(&self, key: &str) -> Keyed<'_> {
        Keyed { server: self, key: key.to_owned() }
    }

    /// The status of what a page of an origin asks.
    pub fn ask_from_page(&self, origin: &str, path: &str, body: &Value) -> u16 {
        let request = self.agent.post(format!("{}{path}", self.url)).header("Origin", origin);
        request.send(body.to_string()).unwrap().status().as_u16()
    }

    fn send(&self, path: &str, body: &str) -> ureq::http::Response<Body> {
        let mut request = self.agent.post(format!("{}{path}", self.url)).content_type("application/json");
        if let Some(key) = self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        request.send(body).unwrap()
    }

    /// Asks with whatever is given.
    pub fn post_text(&self, path: &str, body: &str) -> Answer {
        let mut response = self.send(path, body);
        let text = response.body_mut().read_to_string().unwrap();
        let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
        Answer { status: response.status().as_u16(), body }
    }

    /// Asks.
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_text(path, &body.to_string())
    }

    /// Looks.
    pub fn get(&self, path: &str) -> Answer {
        let mut response = self.agent.get(format!("{}{path}", self.url)).call().unwrap();
        let text = response.body_mut().read_to_string().unwrap();
        let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
        Answer { status: response.status().as_u16(), body }
    }

    /// Asks for a stream; its events come as they are read. Dropped, it is given up.
    pub fn stream(&self, path: &str, body: &Value) -> impl Iterator<Item = Event> + use<> {
        let mut body = body.clone();
        body["stream"] = Value::Bool(true);
        let response = self.send(path, &body.to_string());
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        events(response.into_body().into_reader())
    }

    /// Slots that do something.
    pub fn n_busy(&self) -> usize {
        let slots = self.get("/slots").ok();
        slots.as_array().unwrap().iter().filter(|slot| slot["is_processing"] == true).count()
    }

    /// Waits until so many slots do something.
    pub fn wait_for_busy(&self, n: usize) {
        let began = Instant::now();
        while self.n_busy() != n {
            assert!(began.elapsed() < Duration::from_secs(60), "{} slots do something, not {n}", self.n_busy());
        }
    }
}

/// A server, asked with a key.
pub struct Keyed<'a> {
    server: &'a Server,
    key: String,
}

impl Keyed<'_> {
    /// Asks.
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        let request = self.server.agent.post(format!("{}{path}", self.server.url)).content_type("application/json");
        let mut response =
            request.header("Authorization", format!("Bearer {}", self.key)).send(body.to_string()).unwrap();
        let text = response.body_mut().read_to_string().unwrap();
        Answer { status: response.status().as_u16(), body: serde_json::from_str(&text).unwrap_or(Value::String(text)) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The events in a stream, without what only keeps it alive.
fn events(reader: impl Read) -> impl Iterator<Item = Event> {
    let (mut name, mut data) = (None, None);
    BufReader::new(reader).lines().map_while(Result::ok).filter_map(move |line| {
        if let Some(own) = line.strip_prefix("event: ") {
            name = Some(own.to_owned());
        } else if let Some(own) = line.strip_prefix("data: ") {
            assert!(data.is_none(), "an event has one line of data");
            data = Some(if own == "[DONE]" { Value::Null } else { serde_json::from_str(own).expect("data is JSON") });
        }
        // An empty line ends an event.
        let data = data.take_if(|_| line.is_empty())?;
        Some(Event { name: name.take(), data })
    })
}
