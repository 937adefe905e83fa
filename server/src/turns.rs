//! Turns of clients: each client has at most one request in the queue for a place, and the queue is served in order. So
//! a client delays another by one turn at most.

use std::any::Any;
use std::cell::Cell;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, Weak};

use axum::http::header::HeaderName;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::lock;

/// Requests processed at once: the engine needs the cores, too.
const WORKERS: usize = 2;

/// Slow schemas and templates that may wait, of one client and of all: each blocks a thread.
const SLOW_EACH: usize = 8;
const SLOW_MAX: usize = 128;

/// Names the client to a model's process, which is connected with the server of several models only.
pub const CLIENT_HEADER: HeaderName = HeaderName::from_static("x-hobbit-client");

tokio::task_local! {
    /// The client of the current task's request.
    static CLIENT: Arc<Client>;
}

thread_local! {
    /// The place of the thread's work. A slow schema or template gives it up, because another process works on it.
    static PLACE: Cell<Option<OwnedSemaphorePermit>> = const { Cell::new(None) };
}

/// The places for work.
#[derive(Debug)]
pub struct Turns {
    places: Arc<Semaphore>,
    /// One process works on slow schemas and templates.
    slow: Arc<Semaphore>,
    n_slow: Arc<Semaphore>,
    /// Clients with requests.
    clients: Mutex<HashMap<IpAddr, Weak<Client>>>,
}

/// A client: an address, or a network of IPv6.
#[derive(Debug)]
struct Client {
    address: IpAddr,
    turns: Arc<Turns>,
    /// Held by the request that waits for a place.
    next: tokio::sync::Mutex<()>,
    /// As `next`, for slow schemas and templates.
    next_slow: tokio::sync::Mutex<()>,
    n_slow: Arc<Semaphore>,
}

impl Turns {
    pub fn new() -> Arc<Self> {
        hobbit::engine::when_templates_are_slow(slow_turn);
        Arc::new(Self {
            places: Arc::new(Semaphore::new(WORKERS)),
            slow: Arc::new(Semaphore::new(1)),
            n_slow: Arc::new(Semaphore::new(SLOW_MAX)),
            clients: Mutex::default(),
        })
    }

    fn client(self: &Arc<Self>, address: IpAddr) -> Arc<Client> {
        // A customer of a provider has a network of 64 bits.
        let address = match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
            address => address,
        };
        let mut clients = lock(&self.clients);
        if let Some(known) = clients.get(&address).and_then(Weak::upgrade) {
            return known;
        }
        clients.retain(|_, client| client.strong_count() > 0);
        let client = Arc::new(Client {
            address,
            turns: Arc::clone(self),
            next: tokio::sync::Mutex::default(),
            next_slow: tokio::sync::Mutex::default(),
            n_slow: Arc::new(Semaphore::new(SLOW_EACH)),
        });
        clients.insert(address, Arc::downgrade(&client));
        client
    }

    /// Answers a request of the client at `address`.
    pub async fn follow<T>(self: &Arc<Self>, address: IpAddr, answer: impl Future<Output = T>) -> T {
        CLIENT.scope(self.client(address), answer).await
    }

    /// Runs work in its client's turn, while another thread serves connections.
    pub async fn work<T>(self: &Arc<Self>, work: impl FnOnce() -> T) -> T {
        // The parts of a stream are made after its request's task: they are one client's.
        let client = CLIENT.try_with(Arc::clone).unwrap_or_else(|_| self.client(Ipv4Addr::UNSPECIFIED.into()));
        let place = client.place().await;
        tokio::task::block_in_place(|| {
            PLACE.set(Some(place));
            // Also after a panic.
            let _taken = Taken;
            work()
        })
    }
}

impl Client {
    async fn place(&self) -> OwnedSemaphorePermit {
        let _next = self.next.lock().await;
        Arc::clone(&self.turns.places).acquire_owned().await.expect("it is never closed")
    }

    async fn slow_place(&self) -> OwnedSemaphorePermit {
        let _next = self.next_slow.lock().await;
        Arc::clone(&self.turns.slow).acquire_owned().await.expect("it is never closed")
    }

    /// Waits for the turn of a slow schema or template.
    ///
    /// # Errors
    /// Too many wait.
    fn slow_turn(&self) -> Result<[OwnedSemaphorePermit; 3], String> {
        let too_many = |n: usize, whose: &str| format!("it takes long, and {n} such schemas and templates{whose} wait");
        let of_client = Arc::clone(&self.n_slow).try_acquire_owned();
        let of_client = of_client.map_err(|_| too_many(SLOW_EACH, " of this client"))?;
        let all = Arc::clone(&self.turns.n_slow).try_acquire_owned();
        let all = all.map_err(|_| too_many(SLOW_MAX, ""))?;
        Ok([tokio::runtime::Handle::current().block_on(self.slow_place()), of_client, all])
    }
}

/// Waits on the thread of a slow schema or template for its client's turn, which lasts as long as the result.
fn slow_turn() -> Result<Box<dyn Any>, String> {
    drop(PLACE.take());
    match CLIENT.try_with(Arc::clone) {
        Ok(client) => Ok(Box::new(client.slow_turn()?)),
        // At the start of the server.
        Err(_) => Ok(Box::new(())),
    }
}

struct Taken;

impl Drop for Taken {
    fn drop(&mut self) {
        drop(PLACE.take());
    }
}

/// The address of the current task's client.
pub fn address() -> Option<IpAddr> {
    CLIENT.try_with(|client| client.address).ok()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// The first waits for the second, and the runtime has one thread.
    #[test]
    fn work_leaves_the_thread_to_others() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let turns = Turns::new();
        let (sender, receiver) = mpsc::channel();
        let own = Arc::clone(&turns);
        let receive = move || receiver.recv_timeout(Duration::from_secs(60)).is_ok();
        let waits = runtime.spawn(async move { own.work(receive).await });
        let sends = runtime.spawn(async move { turns.work(move || sender.send(()).is_ok()).await });
        assert_eq!(runtime.block_on(async { (waits.await.unwrap(), sends.await.unwrap()) }), (true, true));
    }

    /// Clients of requests in the order in which they arrive, and the order in which they get a place.
    #[tokio::test(flavor = "current_thread")]
    async fn clients_are_served_by_turns() {
        let turns = Turns::new();
        let served = Arc::new(Mutex::new(Vec::new()));
        for is_slow in [false, true] {
            let all = if is_slow { &turns.slow } else { &turns.places };
            let n = all.available_permits();
            let mut taken = Arc::clone(all).acquire_many_owned(n as u32).await.unwrap();
            // One place is left, so that tasks run in the order in which they get it.
            let _others = taken.split(n - 1);
            let mut tasks = Vec::new();
            for n in [1, 1, 1, 1, 2, 2, 3] {
                let client = turns.client(Ipv4Addr::new(127, 0, 0, n).into());
                let served = Arc::clone(&served);
                tasks.push(tokio::spawn(async move {
                    let _place = if is_slow { client.slow_place().await } else { client.place().await };
                    lock(&served).push(n);
                }));
            }
            for _ in &tasks {
                tokio::task::yield_now().await;
            }
            drop(taken);
            for task in tasks {
                task.await.unwrap();
            }
            assert_eq!(std::mem::take(&mut *lock(&served)), [1, 2, 3, 1, 2, 1, 1]);
        }
        turns.client(Ipv4Addr::LOCALHOST.into());
        assert_eq!(lock(&turns.clients).len(), 1, "clients without requests are forgotten");
    }

    #[test]
    fn a_network_of_ipv6_is_one_client() {
        let turns = Turns::new();
        let client = |text: &str| turns.client(text.parse().unwrap()).address;
        assert_eq!(client("2001:db8::1"), client("2001:db8::ffff:1"));
        assert_ne!(client("2001:db8::1"), client("2001:db8:0:1::1"));
        assert_eq!(client("::ffff:127.0.0.1"), client("127.0.0.1"));
        assert_ne!(client("127.0.0.1"), client("127.0.0.2"));
    }
}
