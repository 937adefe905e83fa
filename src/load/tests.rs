use std::collections::HashMap;

use super::*;
use crate::expert::Extent;
use crate::store::faulty::{Faults, FaultyStore, Hold};
use crate::store::memory::MemoryStore;
use crate::store::{Arena, SlotPtr, StoreError};

/// Holds every request until told to answer it.
#[derive(Default)]
struct ManualStore {
    held: Mutex<Vec<(ReadRequest, Arc<dyn Completion>)>>,
}

impl ManualStore {
    /// Tickets in the order in which they were started.
    fn started(&self) -> Vec<u64> {
        self.held.lock().unwrap().iter().map(|(request, _)| request.ticket).collect()
    }

    fn answer(&self, ticket: u64, result: Result<u64, StoreError>) {
        let mut held = self.held.lock().unwrap();
        let place = held.iter().position(|(request, _)| request.ticket == ticket).unwrap();
        let (_, sink) = held.remove(place);
        drop(held);
        sink.complete(ReadDone { ticket, result, elapsed_us: 1 });
    }
}

impl Store for ManualStore {
    fn name(&self) -> &'static str {
        "manual"
    }

    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>) {
        let requests = requests.into_iter().map(|request| (request, Arc::clone(sink)));
        self.held.lock().unwrap().extend(requests);
    }
}

/// Answers inside `submit`.
struct ImmediateStore;

impl Store for ImmediateStore {
    fn name(&self) -> &'static str {
        "immediate"
    }

    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>) {
        for request in requests {
            Arc::clone(sink).complete(ReadDone { ticket: request.ticket, result: Ok(1), elapsed_us: 0 });
        }
    }
}

/// A request that no test store writes for.
fn request(ticket: u64, len: u64) -> ReadRequest {
    let extent = Extent { file: 0, offset: 0, len };
    // SAFETY: the stores above never touch the memory.
    let dst = unsafe { SlotPtr::new(std::ptr::null_mut()) };
    ReadRequest { ticket, extent, dst, capacity: 0, lead: 0 }
}

fn requests(tickets: impl IntoIterator<Item = u64>) -> Vec<ReadRequest> {
    tickets.into_iter().map(|ticket| request(ticket, 100)).collect()
}

fn manual(max_in_flight_requests: usize, max_in_flight_bytes: u64) -> (Arc<ManualStore>, Loader) {
    let store = Arc::new(ManualStore::default());
    let loader = Loader::new(store.clone(), LoaderOptions { max_in_flight_requests, max_in_flight_bytes });
    (store, loader)
}

fn tickets(done: Vec<ReadDone>) -> Vec<u64> {
    done.iter().map(|done| done.ticket).collect()
}

#[test]
fn on_demand_goes_before_prefetch_and_each_class_in_order() {
    let (store, loader) = manual(1, u64::MAX);
    loader.submit(LoadClass::Prefetch, requests([10, 11, 12]));
    loader.submit(LoadClass::OnDemand, requests([20, 21]));
    loader.submit(LoadClass::Prefetch, requests([13]));
    loader.submit(LoadClass::OnDemand, requests([22]));
    let mut order = Vec::new();
    while let [ticket] = store.started()[..] {
        order.push(ticket);
        store.answer(ticket, Ok(100));
    }
    assert_eq!(order, [10, 20, 21, 22, 11, 12, 13]);
    assert_eq!(tickets(loader.wait().unwrap()), order);
    let stats = loader.stats();
    assert_eq!((stats.reads, stats.prefetches, stats.bytes, stats.failures), (7, 4, 700, 0));
    assert_eq!((stats.queue_peak, stats.in_flight_peak), (6, 1));
}

#[test]
fn requests_and_bytes_in_flight_are_bounded() {
    let (store, loader) = manual(3, u64::MAX);
    loader.submit(LoadClass::OnDemand, requests(0..5));
    assert_eq!(store.started(), [0, 1, 2]);
    store.answer(1, Ok(100));
    assert_eq!(store.started(), [0, 2, 3]);
    loader.shared.lock().queue.withdraw(LoadClass::OnDemand, |_| true);
    store.started().into_iter().for_each(|ticket| store.answer(ticket, Ok(100)));

    // A further read starts below the bound, and one that is larger than the bound still starts.
    let (store, loader) = manual(9, 150);
    loader.submit(LoadClass::OnDemand, [request(0, 100), request(1, 1000), request(2, 1), request(3, 1)]);
    assert_eq!(store.started(), [0, 1]);
    store.answer(0, Ok(100));
    assert_eq!(store.started(), [1]);
    store.answer(1, Ok(1000));
    assert_eq!(store.started(), [2, 3]);
    store.answer(2, Ok(1));
    store.answer(3, Ok(1));
    assert_eq!(tickets(loader.drain()), [0, 1, 2, 3]);
}

#[test]
fn prefetches_that_have_not_started_can_be_withdrawn_or_promoted() {
    let (store, loader) = manual(1, u64::MAX);
    loader.submit(LoadClass::Prefetch, requests(0..8));
    loader.submit(LoadClass::OnDemand, requests([100]));
    // 0 is in flight: too late for it. 100 is no prefetch.
    assert_eq!(loader.cancel_prefetch(|ticket| ticket.is_multiple_of(2) || ticket == 100), [2, 4, 6]);
    assert_eq!(loader.promote(|ticket| ticket == 5 || ticket == 7), 2);
    assert_eq!(loader.outstanding(), 6);
    let mut order = Vec::new();
    while let [ticket] = store.started()[..] {
        order.push(ticket);
        store.answer(ticket, Ok(1));
    }
    assert_eq!(order, [0, 100, 5, 7, 1, 3]);
    assert_eq!(loader.stats().withdrawn, 3);
    assert_eq!(loader.drain().len(), 6);
}

#[test]
fn the_store_pumps_the_queue_while_the_consumer_is_away() {
    // Nobody polls, and still everything is read: the answer of one starts the next.
    let memory = Arc::new(MemoryStore::new(vec![vec![5; 1000].into()]).unwrap());
    let loader = Loader::new(memory, LoaderOptions { max_in_flight_requests: 1, max_in_flight_bytes: 1 });
    let arena = Arena::new(1000).unwrap();
    let extent = Extent { file: 0, offset: 0, len: 1000 };
    for ticket in 0..100 {
        // SAFETY: the arena outlives the drain below, and reads follow one another.
        let dst = unsafe { SlotPtr::new(arena.as_ptr()) };
        loader.submit(LoadClass::OnDemand, [ReadRequest { ticket, extent, dst, capacity: 1000, lead: 0 }]);
    }
    assert_eq!(tickets(loader.drain()), (0..100).collect::<Vec<_>>());
    assert_eq!(loader.stats().in_flight_peak, 1);
}

#[test]
fn a_store_that_answers_at_once_does_not_recurse() {
    let loader = Loader::new(
        Arc::new(ImmediateStore),
        LoaderOptions { max_in_flight_requests: 1, max_in_flight_bytes: u64::MAX },
    );
    loader.submit(LoadClass::Prefetch, requests(0..200_000));
    assert_eq!(loader.poll().len(), 200_000);
    assert_eq!(loader.outstanding(), 0);
}

#[test]
fn waiting_for_nothing_is_an_error_not_a_hang() {
    let (store, loader) = manual(1, u64::MAX);
    assert_eq!(loader.wait().unwrap_err(), NothingOutstanding);
    loader.submit(LoadClass::OnDemand, requests([1]));
    assert!(loader.poll().is_empty());
    store.answer(1, Ok(1));
    assert_eq!(tickets(loader.poll()), [1]);
    assert_eq!(loader.wait().unwrap_err(), NothingOutstanding);
    assert!(loader.drain().is_empty());
}

#[test]
fn busy_time_runs_only_while_reads_are_in_flight() {
    let (store, loader) = manual(2, u64::MAX);
    let runs = || loader.shared.lock().busy_since.is_some();
    assert_eq!((runs(), loader.stats().busy), (false, Duration::ZERO));
    loader.submit(LoadClass::OnDemand, requests([1, 2]));
    store.answer(1, Ok(1));
    assert!(runs(), "one read is in flight");
    store.answer(2, Ok(1));
    assert!(!runs());
    assert_eq!(loader.stats().busy, loader.stats().busy);
    loader.poll();
}

#[test]
fn failing_reads_are_answered_and_the_rest_goes_on() {
    let bytes: Vec<u8> = (0..64_000u32).map(|at| (at % 253) as u8).collect();
    let memory = Arc::new(MemoryStore::new(vec![bytes.as_slice().into()]).unwrap());
    let faults = Faults {
        io_error: vec![0, 7, 8],
        short_read: vec![20],
        shrunk: HashMap::from([(0, 60_500)]),
        hold: Some(Hold { answers_max: 3, seed: 9 }),
    };
    let loader = Loader::new(
        Arc::new(FaultyStore::new(memory, faults)),
        LoaderOptions { max_in_flight_requests: 4, max_in_flight_bytes: u64::MAX },
    );
    let arena = Arena::new(64_000).unwrap();
    let requests = (0..64).map(|ticket| {
        let extent = Extent { file: 0, offset: ticket * 1000, len: 1000 };
        // SAFETY: inside the arena, which outlives the loop below.
        let dst = unsafe { SlotPtr::new(arena.as_ptr().add(ticket as usize * 1000)) };
        ReadRequest { ticket, extent, dst, capacity: 1000, lead: 0 }
    });
    loader.submit(LoadClass::OnDemand, requests);
    let mut failed = Vec::new();
    let mut seen = 0;
    while let Ok(answers) = loader.wait() {
        seen += answers.len();
        failed.extend(answers.iter().filter(|done| done.result.is_err()).map(|done| done.ticket));
    }
    failed.sort_unstable();
    assert_eq!((seen, failed), (64, vec![0, 7, 8, 20, 60, 61, 62, 63]));
    assert_eq!(loader.stats().failures, 8);
    // SAFETY: nothing is in flight.
    let got = unsafe { std::slice::from_raw_parts(arena.as_ptr(), 64_000) };
    assert!(got[21_000..60_000] == bytes[21_000..60_000]);
}

#[test]
fn dropping_a_loader_withdraws_the_queue_and_waits_for_the_rest() {
    let memory = Arc::new(MemoryStore::new(vec![vec![5; 1 << 20].into()]).unwrap());
    for _ in 0..20 {
        let arena = Arena::new(4 << 20).unwrap();
        let loader = Loader::new(memory.clone(), LoaderOptions { max_in_flight_requests: 2, ..Default::default() });
        let extent = Extent { file: 0, offset: 0, len: 1 << 20 };
        let requests = (0..4).map(|ticket| {
            // SAFETY: inside the arena, which is dropped after the loader.
            let dst = unsafe { SlotPtr::new(arena.as_ptr().add(ticket as usize * (1 << 20))) };
            ReadRequest { ticket, extent, dst, capacity: 1 << 20, lead: 0 }
        });
        loader.submit(LoadClass::Prefetch, requests);
        drop(loader);
        drop(arena);
    }
}
