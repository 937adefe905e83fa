//! A hobbit-server of its own for each test, on loopback with the demo model, and its client.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::net::TcpSocket;
use ureq::{Agent, Body};

use crate::fixture::process::program;

/// Tool calls are JSON and nothing else. [`pushed`] makes the demo model call one.
pub const TEMPLATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/http/tools.jinja");

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
    pub url: String,
    /// Its lines before it was ready.
    pub log: String,
    agent: Agent,
    /// Lines on stderr after the server was ready.
    lines: Mutex<Receiver<String>>,
}

/// An answer: JSON, or a text.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Value,
}

impl Answer {
    fn of(mut response: ureq::http::Response<Body>) -> Answer {
        let text = response.body_mut().read_to_string().unwrap();
        let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
        Answer { status: response.status().as_u16(), body }
    }

    /// The body of a successful answer.
    #[track_caller]
    pub fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.body
    }

    /// The message of an error.
    #[track_caller]
    pub fn error(self, status: u16, kind: &str) -> String {
        let error = &self.body["error"];
        assert_eq!((self.status, error["type"].as_str()), (status, Some(kind)), "{}", self.body);
        assert_eq!(error["code"], status, "{}", self.body);
        error["message"].as_str().expect("an error has a message").to_owned()
    }

    /// The message of a request refused with 400.
    #[track_caller]
    pub fn refused(self) -> String {
        self.error(400, "invalid_request_error")
    }
}

/// A server-sent event.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub name: Option<String>,
    /// Null for `[DONE]`.
    pub data: Value,
}

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo.gguf");

/// Slots and context of most tests.
const SMALL: [&str; 4] = ["-np", "2", "-c", "1024"];

impl Server {
    /// Two slots with 512 tokens each, unless `flags` differ.
    pub fn start(flags: &[&str]) -> Server {
        Server::demo(&[&["-m", DEMO], flags].concat())
    }

    /// With the demo model unless `flags` name another.
    pub fn demo(flags: &[&str]) -> Server {
        Server::start_as(Command::new(env!("CARGO_BIN_EXE_hobbit-server")), flags)
    }

    /// With at most `n` descriptors.
    #[cfg(unix)]
    pub fn start_with_descriptors(n: usize, flags: &[&str]) -> Server {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            &format!("ulimit -n {n} && exec \"$0\" \"$@\""),
            env!("CARGO_BIN_EXE_hobbit-server"),
            "-m",
            DEMO,
        ]);
        Server::start_as(command, flags)
    }

    /// A server of several models with the Hub's cache at `home` and the Hub at `endpoint`.
    pub fn start_router(models: &Path, home: &Path, endpoint: &str, flags: &[&str]) -> Server {
        Server::router(models, home, endpoint, &[&SMALL, flags].concat())
    }

    /// As [`Self::start_router`], without the slots and the context of tests.
    pub fn router(models: &Path, home: &Path, endpoint: &str, flags: &[&str]) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hobbit-server"));
        for name in ["MODEL_ENDPOINT", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LLAMA_CACHE", "HF_HUB_OFFLINE"] {
            command.env_remove(name);
        }
        command.env("HF_HOME", home).env("HF_ENDPOINT", endpoint).arg("--models-dir").arg(models);
        Server::start_plainly(command, flags)
    }

    pub fn start_as(command: Command, flags: &[&str]) -> Server {
        Server::start_plainly(command, &[&SMALL, flags].concat())
    }

    fn start_plainly(mut command: Command, flags: &[&str]) -> Server {
        let mut child = command
            .args(["--port", "0", "-t", "1", "--temp", "0"])
            .args(flags)
            .env("HOBBIT_ARG_CACHE_STATE", "off")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut log = String::new();
        let url = loop {
            let Some(Ok(line)) = lines.next() else { panic!("the server ended: {log}") };
            log += &format!("{line}\n");
            if let Some((_, addresses)) = line.split_once("ready; ") {
                break addresses.split(", ").next().unwrap().to_owned();
            }
        };
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
        let config = Agent::config_builder().http_status_as_error(false).timeout_global(Some(Duration::from_secs(120)));
        Server { child, url, log, agent: config.build().into(), lines: Mutex::new(receiver) }
    }

    /// The next line on stderr that contains `part`.
    pub fn logged(&self, part: &str) -> String {
        let lines = self.lines.lock().unwrap();
        let next = || lines.recv_timeout(Duration::from_secs(60)).expect("another line is logged");
        std::iter::repeat_with(next).find(|line| line.contains(part)).unwrap()
    }

    /// The lines on stderr that no call has returned yet.
    #[cfg(unix)]
    pub fn rest_of_log(&self) -> String {
        self.lines.lock().unwrap().try_iter().collect::<Vec<_>>().join("\n")
    }

    /// A new connection, whose reads wait for a minute.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.url.trim_start_matches("http://")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// A request on a connection of its own from this address: its answer, and whether that asks for another try.
    pub fn post_from(&self, address: IpAddr, path: &str, body: &Value) -> (Answer, bool) {
        let to = self.url.trim_start_matches("http://");
        let connect = async {
            let socket = TcpSocket::new_v4()?;
            socket.bind((address, 0).into())?;
            socket.connect(to.parse().unwrap()).await?.into_std()
        };
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let mut stream = runtime.enable_io().build().unwrap().block_on(connect).unwrap();
        stream.set_nonblocking(false).unwrap();
        let (body, headers) = (body.to_string(), "Connection: close\r\nContent-Type: application/json");
        write!(stream, "POST {path} HTTP/1.1\r\nHost: {to}\r\n{headers}\r\n").unwrap();
        write!(stream, "Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let answer = std::io::read_to_string(stream).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (Answer { status, body: serde_json::from_str(body).unwrap() }, head.contains("Retry-After: "))
    }

    /// The processes of models that this one has started and that have not ended.
    #[cfg(unix)]
    pub fn children(&self) -> Vec<u32> {
        self.processes("cmdline", "--model=")
    }

    /// The processes that this one has started, that have not ended, and whose `file` in /proc has `part`.
    #[cfg(unix)]
    pub fn processes(&self, file: &str, part: &str) -> Vec<u32> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().flatten();
        let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
        let all: Vec<u32> = lists.collect::<String>().split_whitespace().map(|id| id.parse().unwrap()).collect();
        let has = |id: &u32| std::fs::read_to_string(format!("/proc/{id}/{file}")).is_ok_and(|it| it.contains(part));
        all.into_iter().filter(|id| is_running(*id) && has(id)).collect()
    }

    /// Sends SIGTERM or SIGKILL to a process.
    #[cfg(unix)]
    pub fn signal(&self, name: &str, process: u32) {
        assert!(Command::new("kill").args(["-s", name, &process.to_string()]).status().unwrap().success());
    }

    #[cfg(unix)]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end of the process; its exit status.
    #[cfg(unix)]
    pub fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }

    /// Peak memory of the process, in bytes.
    #[cfg(windows)]
    pub fn peak_bytes(&self) -> u64 {
        hobbit_core::windows::memory_of(&self.child).expect("the process runs").resident_peak
    }

    /// Peak memory of the process, in bytes.
    #[cfg(not(windows))]
    pub fn peak_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux has the figure");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    fn send(&self, headers: &[(&str, &str)], path: &str, body: &str) -> ureq::http::Response<Body> {
        let request = self.agent.post(format!("{}{path}", self.url)).content_type("application/json");
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).send(body).unwrap()
    }

    /// Posts a text, which need not be JSON.
    pub fn post_text(&self, path: &str, body: &str) -> Answer {
        Answer::of(self.send(&[], path, body))
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_text(path, &body.to_string())
    }

    /// Posts with further headers.
    pub fn post_with(&self, headers: &[(&str, &str)], path: &str, body: &Value) -> Answer {
        Answer::of(self.send(headers, path, &body.to_string()))
    }

    pub fn get(&self, path: &str) -> Answer {
        Answer::of(self.agent.get(format!("{}{path}", self.url)).call().unwrap())
    }

    /// Posts for a stream; its events arrive as they are read. Dropping it closes the connection.
    pub fn stream(&self, path: &str, body: &Value) -> impl Iterator<Item = Event> + use<> {
        let body = with(body.clone(), json!({"stream": true}));
        let response = self.send(&[], path, &body.to_string());
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        events(response.into_body().into_reader())
    }

    /// The events of a stream that a GET begins.
    pub fn events(&self, path: &str) -> impl Iterator<Item = Event> + use<> {
        let response = self.agent.get(format!("{}{path}", self.url)).call().unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        events(response.into_body().into_reader())
    }

    /// Number of busy slots.
    pub fn n_busy(&self) -> usize {
        let slots = self.get("/slots").ok();
        slots.as_array().unwrap().iter().filter(|slot| slot["is_processing"] == true).count()
    }

    /// Waits until `n` slots are busy.
    pub fn wait_for_busy(&self, n: usize) {
        let began = Instant::now();
        while self.n_busy() != n {
            assert!(began.elapsed() < Duration::from_secs(60), "{} slots are busy, not {n}", self.n_busy());
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// MiB of the smallest memory budget that a server accepts with these flags.
pub fn least_mib(flags: &[&str]) -> u64 {
    let mut server = program(env!("CARGO_BIN_EXE_hobbit-server"));
    let refused = server.args(flags).args(["--port", "0", "--mem-budget", "1M"]).output().unwrap();
    let message = String::from_utf8(refused.stderr).unwrap();
    let (_, advised) = message.split_once("give --mem-budget ").unwrap_or_else(|| panic!("{message}"));
    advised.split("MiB").next().unwrap().parse().unwrap()
}

/// Whether the process has not ended.
#[cfg(unix)]
pub fn is_running(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}

/// Waits until something holds.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::yield_now();
    }
}

/// The events in a stream, without pings.
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
