//! A web server that answers as a test decides, mostly with faults.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// A client's request.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    /// Path and query.
    pub path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| &**value)
    }

    /// First byte of a range to the end.
    pub fn from(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// The server's answer.
#[derive(Clone, Debug)]
pub struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Bytes of the body that are sent before the connection breaks off.
    sent: usize,
    has_length: bool,
    /// Waits for the client to go instead of ending.
    hangs: bool,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), body: body.into(), sent: usize::MAX, has_length: true, hangs: false }
    }

    /// A file as servers send it: a range if one is asked for, and the etag still is this.
    pub fn file(request: &Request, bytes: &[u8], etag: &str) -> Self {
        let is_same = request.header("if-range").is_none_or(|known| known == etag);
        let reply = match request.from().filter(|_| is_same) {
            Some(from) if from >= bytes.len() => {
                Self::new(416, "").with("content-range", &format!("bytes */{}", bytes.len()))
            }
            Some(from) => {
                let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
                Self::new(206, &bytes[from..]).with("content-range", &range)
            }
            None => Self::new(200, bytes),
        };
        reply.with("etag", etag)
    }

    pub fn redirect(to: &str) -> Self {
        Self::new(302, "").with("location", to)
    }

    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn breaking_off_after(mut self, sent: usize) -> Self {
        self.sent = sent;
        self
    }

    /// Sends no more than that, and does not end.
    #[allow(dead_code, reason = "for the tests of the programs, which share this")]
    pub fn hanging_after(self, sent: usize) -> Self {
        Self { sent, hangs: true, ..self }
    }

    /// The body ends where the connection does.
    pub fn without_length(mut self) -> Self {
        self.has_length = false;
        self
    }

    fn write(&self, mut stream: &TcpStream, is_head: bool) -> std::io::Result<()> {
        write!(stream, "HTTP/1.1 {} .\r\nconnection: close\r\n", self.status)?;
        if self.has_length {
            write!(stream, "content-length: {}\r\n", self.body.len())?;
        }
        for (name, value) in &self.headers {
            write!(stream, "{name}: {value}\r\n")?;
        }
        stream.write_all(b"\r\n")?;
        if !is_head {
            stream.write_all(&self.body[..self.sent.min(self.body.len())])?;
        }
        stream.flush()?;
        while self.hangs && !is_head && stream.read(&mut [0])? > 0 {}
        Ok(())
    }
}

pub struct Server {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Request>>>,
    ended: Arc<AtomicBool>,
}

impl Server {
    pub fn new(answer: impl Fn(&Request) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, ended) = (Arc::<Mutex<Vec<Request>>>::default(), Arc::<AtomicBool>::default());
        std::thread::spawn({
            let (seen, ended) = (Arc::clone(&seen), Arc::clone(&ended));
            move || {
                for stream in listener.incoming().flatten() {
                    if ended.load(Ordering::SeqCst) {
                        return;
                    }
                    let Some(request) = read(&stream) else { continue };
                    seen.lock().unwrap().push(request.clone());
                    let (reply, is_head) = (answer(&request), request.method == "HEAD");
                    // A reply that hangs keeps no other request waiting.
                    if reply.hangs {
                        std::thread::spawn(move || reply.write(&stream, is_head));
                    } else {
                        let _ = reply.write(&stream, is_head);
                    }
                }
            }
        });
        Self { address, seen, ended }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Requests since the last call.
    pub fn seen(&self) -> Vec<Request> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let headers = lines.map_while(Result::ok).take_while(|line| !line.is_empty());
    let headers =
        headers.filter_map(|line| line.split_once(": ").map(|(name, value)| (name.to_owned(), value.to_owned())));
    Some(Request { method, path, headers: headers.collect() })
}
