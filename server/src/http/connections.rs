//! Connections: how many there may be, and how long each may keep the server waiting.
//!
//! A connection waits for its client unless a request of it is being processed: while it is silent, while a request
//! arrives, while the client does not read an answer. A connection that waits longer than the server's patience is
//! closed, in TLS, HTTP/1 and HTTP/2. At the limit, the one that has waited longest makes room for a new one, but not
//! one whose client was handed a part of an answer just now. If none waits, a few more are accepted, which are only
//! told the server's health. All requests of a closed connection are cancelled, so that their slots are free again.

use std::collections::HashMap;
use std::future::{Ready, poll_fn, ready};
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Extension, Request, State};
use axum::http::header::{CONNECTION, EXPECT};
use axum::http::{HeaderValue, Version};
use axum::middleware::{AddExtension, Next};
use axum::response::{IntoResponse, Response};
use axum_server::accept::Accept;
use futures_util::task::AtomicWaker;
use http_body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tower::Layer;

use crate::error::ApiError;
use crate::lock;
use crate::record::{self, Reason, Record};
use hobbit_programs::log::Log;

/// Minimum number of connections, even if few requests may wait.
const CONNECTIONS: usize = 512;

/// Connections beyond those of waiting and running requests.
const SPARE_CONNECTIONS: usize = 192;

/// Connections beyond the limit, for requests of `/health`.
const HEALTH_CONNECTIONS: usize = 16;

/// File descriptors reserved for the model, its cache and logs, and for [`HEALTH_CONNECTIONS`].
const OTHER_DESCRIPTORS: u64 = 128;

/// Time to take a piece of an answer before the connection may make room for another one. Between two tokens a stream
/// waits for microseconds, but its thread can be interrupted there.
const PIECE_PATIENCE: Duration = Duration::from_secs(1);

/// An answer is handed to a connection in pieces of this size, so that a client that does not read is noticed.
const PIECE_BYTES: usize = 64 << 10;

/// Most bytes that are read of a request which is answered before its end, so that its connection can be used again.
const UNREAD_BYTES: usize = 64 << 10;

/// Maximum number of connections, of `n_each` file descriptors, for this many waiting and running requests. Raises the
/// soft limit of file descriptors to the hard limit.
pub fn limit(n_requests: usize, n_each: u64) -> usize {
    let wanted = CONNECTIONS.max(n_requests + SPARE_CONNECTIONS);
    #[cfg(windows)]
    {
        // Windows limits sockets by memory only.
        let _ = (n_each, OTHER_DESCRIPTORS);
        wanted
    }
    #[cfg(unix)]
    fewer(wanted, n_each)
}

/// At most `wanted` connections of `n_each` file descriptors.
#[cfg(unix)]
fn fewer(wanted: usize, n_each: u64) -> usize {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return wanted };
    let descriptors = if setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() { hard } else { soft };
    let left = (descriptors - OTHER_DESCRIPTORS.min(descriptors / 2)) / n_each;
    wanted.min(usize::try_from(left).unwrap_or(usize::MAX))
}

/// All connections.
#[derive(Debug)]
pub struct Connections {
    limit: usize,
    patience: Duration,
    idle_patience: Duration,
    open: Mutex<HashMap<usize, Arc<Connection>>>,
    n_requests: AtomicUsize,
    /// Has a line for each request.
    log: Log,
}

/// One connection.
#[derive(Debug)]
pub struct Connection {
    pub peer: IpAddr,
    turn: Mutex<Turn>,
    is_closed: AtomicBool,
    /// The last write found the socket full: the client has not read all.
    is_blocked: AtomicBool,
    waker: AtomicWaker,
    /// Beyond the limit when it was accepted.
    is_extra: bool,
    all: Weak<Connections>,
}

/// Whether the connection waits for its client, and since when.
#[derive(Debug)]
struct Turn {
    /// Requests being processed; while there are any, the connection does not wait.
    n_working: usize,
    /// Requests that have begun and whose answers have not ended.
    n_exchanges: usize,
    /// A request was answered, and no byte of another one has come.
    is_idle: bool,
    /// The last thing that happened: a piece of an answer was handed over.
    has_piece: bool,
    /// When the client last did its part.
    since: Instant,
}

impl Connection {
    /// Since when the connection has waited, if another one may take its place.
    fn waiting_since(&self) -> Option<Instant> {
        let turn = lock(&self.turn);
        let takes_piece = turn.has_piece && turn.since.elapsed() < PIECE_PATIENCE;
        (turn.n_working == 0 && !takes_piece).then_some(turn.since)
    }

    /// Whether the client has kept the server waiting longer than `idle` between requests, or longer than `patience`
    /// otherwise.
    fn is_late(&self, patience: Duration, idle: Duration) -> bool {
        let turn = lock(&self.turn);
        let is_idle = turn.is_idle && !self.is_blocked.load(Ordering::Relaxed);
        turn.n_working == 0 && turn.since.elapsed() > if is_idle { idle } else { patience }
    }

    /// Bytes have arrived.
    fn received(&self) {
        let mut turn = lock(&self.turn);
        if turn.is_idle {
            (turn.is_idle, turn.since) = (false, Instant::now());
        }
    }

    /// Bytes were written, unless the socket is full.
    fn wrote<T>(&self, result: Poll<T>) -> Poll<T> {
        self.is_blocked.store(result.is_pending(), Ordering::Relaxed);
        result
    }

    /// Makes the connection's task fail at its next read or write.
    fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl Connections {
    /// At most `limit` at once, none of which may keep the server waiting for longer than `patience`, or between two
    /// requests than `idle_patience`.
    pub fn new(limit: usize, patience: Duration, idle_patience: Duration, log: Log) -> Arc<Self> {
        Arc::new(Self { limit, patience, idle_patience, open: Mutex::default(), n_requests: AtomicUsize::new(0), log })
    }

    /// Closes connections that keep the server waiting. Never returns.
    pub async fn watch(self: Arc<Self>) {
        let mut ticks =
            tokio::time::interval((self.patience / 8).clamp(Duration::from_millis(10), Duration::from_secs(1)));
        loop {
            ticks.tick().await;
            lock(&self.open)
                .values()
                .filter(|connection| connection.is_late(self.patience, self.idle_patience))
                .for_each(|connection| connection.close());
        }
    }

    /// Registers a new connection.
    ///
    /// # Errors
    /// The limit and the connections for `/health` are used up, and every one has a request being processed.
    fn take_in(self: &Arc<Self>, stream: TcpStream) -> io::Result<Tracked> {
        let peer = stream.peer_addr()?.ip();
        let mut open = lock(&self.open);
        let oldest = || {
            let waiting = open.iter().filter_map(|(id, connection)| Some((connection.waiting_since()?, *id)));
            waiting.min().map(|(_, id)| id)
        };
        let oldest = if open.len() >= self.limit { oldest() } else { None };
        if let Some(connection) = oldest.and_then(|oldest| open.remove(&oldest)) {
            connection.close();
        }
        if open.len() >= self.limit + HEALTH_CONNECTIONS {
            return Err(io::Error::other("too many connections"));
        }
        let connection = Arc::new(Connection {
            peer,
            turn: Mutex::new(Turn {
                n_working: 0,
                n_exchanges: 0,
                is_idle: false,
                has_piece: false,
                since: Instant::now(),
            }),
            is_closed: AtomicBool::new(false),
            is_blocked: AtomicBool::new(false),
            waker: AtomicWaker::new(),
            is_extra: open.len() >= self.limit,
            all: Arc::downgrade(self),
        });
        // The Arc's address: unique while the connection is open.
        let id = Arc::as_ptr(&connection) as usize;
        open.insert(id, Arc::clone(&connection));
        Ok(Tracked { stream, connection, id })
    }
}

/// Registers every connection, and attaches it to its requests.
#[derive(Clone, Debug)]
pub struct Acceptor(pub Arc<Connections>);

impl<S> Accept<TcpStream, S> for Acceptor {
    type Stream = Tracked;
    type Service = AddExtension<S, Arc<Connection>>;
    type Future = Ready<io::Result<(Tracked, Self::Service)>>;

    fn accept(&self, stream: TcpStream, service: S) -> Self::Future {
        // Events are small writes; Nagle's algorithm would delay them by 40 ms.
        let tracked = stream.set_nodelay(true).and_then(|()| self.0.take_in(stream));
        ready(tracked.map(|tracked| {
            let service = Extension(Arc::clone(&tracked.connection)).layer(service);
            (tracked, service)
        }))
    }
}

/// The stream of a connection, until it ends or is closed.
#[derive(Debug)]
pub struct Tracked {
    stream: TcpStream,
    connection: Arc<Connection>,
    id: usize,
}

impl Tracked {
    /// The stream, unless the connection was closed.
    fn open(&mut self, context: &Context<'_>) -> io::Result<Pin<&mut TcpStream>> {
        self.connection.waker.register(context.waker());
        if self.connection.is_closed.load(Ordering::Acquire) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Pin::new(&mut self.stream))
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        if let Some(all) = self.connection.all.upgrade() {
            lock(&all.open).remove(&self.id);
        }
    }
}

impl AsyncRead for Tracked {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = self.open(cx)?.poll_read(cx, buf);
        if buf.filled().len() > before {
            self.connection.received();
        }
        result
    }
}

impl AsyncWrite for Tracked {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = self.open(cx)?.poll_write(cx, buf);
        self.connection.wrote(result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.open(cx)?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.open(cx)?.poll_shutdown(cx)
    }
}

/// A request and its answer. Dropping it ends both.
#[derive(Debug)]
pub struct Exchange {
    connection: Arc<Connection>,
    is_worked_on: AtomicBool,
}

impl Exchange {
    fn new(connection: Arc<Connection>) -> Self {
        let exchange = Self { connection, is_worked_on: AtomicBool::new(false) };
        exchange.count(|n| n.fetch_add(1, Ordering::Relaxed));
        let mut turn = lock(&exchange.connection.turn);
        turn.n_exchanges += 1;
        (turn.is_idle, turn.has_piece, turn.since) = (false, false, Instant::now());
        drop(turn);
        exchange
    }

    /// Requests of all connections.
    fn count(&self, count: impl FnOnce(&AtomicUsize) -> usize) -> usize {
        self.connection.all.upgrade().map_or(0, |all| count(&all.n_requests))
    }

    /// The client has sent its part: the server works.
    pub fn work(&self) {
        if !self.is_worked_on.swap(true, Ordering::Relaxed) {
            lock(&self.connection.turn).n_working += 1;
        }
    }

    /// The server waits for the client.
    pub fn wait(&self) {
        self.wait_after(false);
    }

    fn wait_after(&self, piece: bool) {
        let mut turn = lock(&self.connection.turn);
        turn.n_working -= usize::from(self.is_worked_on.swap(false, Ordering::Relaxed));
        (turn.has_piece, turn.since) = (piece, Instant::now());
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.wait();
        let mut turn = lock(&self.connection.turn);
        turn.n_exchanges -= 1;
        turn.is_idle = turn.n_exchanges == 0;
        drop(turn);
        self.count(|n| n.fetch_sub(1, Ordering::Relaxed));
    }
}

/// Tracks a request from its head to the end of its answer. An HTTP/2 connection may have many requests at once:
/// their total is limited to the number of connections, except for health requests.
pub async fn follow(
    State(all): State<Arc<Connections>>,
    Extension(connection): Extension<Arc<Connection>>,
    mut request: Request,
    next: Next,
) -> Response {
    let is_extra = connection.is_extra;
    let exchange = Arc::new(Exchange::new(connection));
    let record = Record::new(&all.log, request.method(), request.uri().path());
    let unread = Arc::new(Mutex::new(Body::empty()));
    // A client that asks first sends no body after a refusal.
    let n_unread = if request.headers().contains_key(EXPECT) { 0 } else { UNREAD_BYTES };
    if request.body().is_end_stream() {
        exchange.work();
    } else if request.version() < Version::HTTP_2 {
        request = request.map(|body| Body::new(Returned { body, to: Arc::clone(&unread) }));
    }
    let asks_for_health = matches!(request.uri().path(), "/health" | "/v1/health");
    request.extensions_mut().insert(Arc::clone(&exchange));
    let is_over = is_extra && lock(&all.open).len() > all.limit || all.n_requests.load(Ordering::Relaxed) > all.limit;
    let mut response = if is_over && !asks_for_health {
        drop(request);
        ApiError::busy("too many requests at once").into_response()
    } else {
        record::CURRENT.scope(Arc::clone(&record), next.run(request)).await
    };
    let unread = std::mem::take(&mut *lock(&unread));
    if !read_rest(unread, n_unread).await {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    record.answered(response.status().as_u16(), response.extensions().get::<Reason>());
    response.map(|body| Body::new(Followed { body, rest: Bytes::new(), has_ended: false, record, exchange }))
}

/// A request's body that is given back, unless it was read to its end.
struct Returned {
    body: Body,
    to: Arc<Mutex<Body>>,
}

impl Drop for Returned {
    fn drop(&mut self) {
        *lock(&self.to) = std::mem::take(&mut self.body);
    }
}

impl HttpBody for Returned {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(cx));
        if frame.is_none() {
            self.body = Body::empty();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Reads at most `n_bytes` that a request's handler has not read; whether that was all. HTTP/1 closes a connection that
/// has unread bytes, and a client that was not told would lose its next request.
async fn read_rest(mut body: Body, mut n_bytes: usize) -> bool {
    while !body.is_end_stream() {
        if n_bytes == 0 || body.size_hint().lower() > n_bytes as u64 {
            return false;
        }
        match poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            None => return true,
            Some(Err(_)) => return false,
            Some(Ok(frame)) => n_bytes = n_bytes.saturating_sub(frame.data_ref().map_or(0, Bytes::len).max(1)),
        }
    }
    true
}

/// The body of an answer, in pieces. After each piece the client has to read; once the connection asks for the next
/// piece, the server works again.
struct Followed {
    body: Body,
    /// The part of the current frame that was not sent yet.
    rest: Bytes,
    has_ended: bool,
    record: Arc<Record>,
    exchange: Arc<Exchange>,
}

impl Drop for Followed {
    fn drop(&mut self) {
        // A body of known length is not asked for its end.
        if self.has_ended || self.is_end_stream() {
            self.record.completed();
        }
    }
}

impl HttpBody for Followed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.exchange.work();
        if self.rest.is_empty() {
            match std::task::ready!(Pin::new(&mut self.body).poll_frame(cx)).map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => self.rest = data,
                Some(Ok(Err(other))) => return Poll::Ready(Some(Ok(other))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {
                    self.has_ended = true;
                    return Poll::Ready(None);
                }
            }
        }
        self.exchange.wait_after(true);
        let n = self.rest.len().min(PIECE_BYTES);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(n)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (inner, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower() + rest);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use hobbit_programs::args::Verbosity;

    #[tokio::test]
    async fn a_connection_keeps_its_place_between_two_pieces_of_an_answer() {
        let minute = Duration::from_secs(60);
        let all = Connections::new(2, minute, minute, Log::new(Verbosity { shown: 0, logged: 0 }, None).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let take_in = || {
            let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            client.set_nonblocking(true).unwrap();
            all.take_in(TcpStream::from_std(client).unwrap()).unwrap()
        };
        let is_closed = |tracked: &Tracked| tracked.connection.is_closed.load(Ordering::Acquire);
        let stream = take_in();
        let exchange = Exchange::new(Arc::clone(&stream.connection));
        exchange.work();
        exchange.wait_after(true);
        let silent = take_in();
        let newest = take_in();
        assert_eq!((is_closed(&stream), is_closed(&silent)), (false, true));
        // A request whose rest does not come gives way.
        exchange.work();
        exchange.wait();
        let third = take_in();
        assert!(is_closed(&newest), "it has waited longer");
        let _fourth = take_in();
        assert_eq!((is_closed(&stream), is_closed(&third)), (true, false));
    }
}
