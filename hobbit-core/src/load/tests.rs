use std::collections::HashMap;

use super::*;
use crate::expert::Extent;
use crate::store::MemoryStore;
use crate::store::faulty::{Faults, FaultyStore, Hold};
use crate::store::{Arena, Form, SlotPtr, StoreError};

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
        sink.complete(ReadDone { ticket, result });
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
            Arc::clone(sink).complete(ReadDone { ticket: request.ticket, result: Ok(1) });
        }
    }
}

/// A request that no test store writes for.
fn request(ticket: u64, len: u64) -> ReadRequest {
    let extent = Extent { file: 0, offset: 0, len };
    // SAFETY: the stores above never touch the memory.
    let dst = unsafe { SlotPtr::new(std::ptr::null_mut()) };
    ReadRequest { ticket, extent, dst, capacity: 0, lead: 0, form: Form::AsIs }
}

fn requests(tickets: impl IntoIterator<Item = u64>) -> Vec<ReadRequest> {
    tickets.into_iter().map(|ticket| request(ticket, 100)).collect()
}

/// A loader and its store. The store comes last, so that it is dropped first: a failing test leaves nothing in flight
/// for the loader to wait for.
fn manual_with(options: LoaderOptions) -> (Loader, AnswersAtLast) {
    let store = AnswersAtLast::default();
    (Loader::new(store.0.clone(), options), store)
}

fn manual(max_in_flight_requests: usize, max_in_flight_bytes: u64) -> (Loader, AnswersAtLast) {
    manual_with(options(max_in_flight_requests, max_in_flight_bytes))
}

#[derive(Default)]
struct AnswersAtLast(Arc<ManualStore>);

impl std::ops::Deref for AnswersAtLast {
    type Target = ManualStore;

    fn deref(&self) -> &ManualStore {
        &self.0
    }
}

impl Drop for AnswersAtLast {
    fn drop(&mut self) {
        answer_all(self);
    }
}

fn options(max_in_flight_requests: usize, max_in_flight_bytes: u64) -> LoaderOptions {
    LoaderOptions { max_in_flight_requests, max_in_flight_bytes, ..LoaderOptions::default() }
}

/// Submits reads of which none may be refused.
fn submit(loader: &Loader, class: LoadClass, requests: impl IntoIterator<Item = ReadRequest>) {
    assert!(loader.submit(class, requests).is_empty(), "within the bounds");
}

/// Answers one read after the other, until none is in flight; the order in which they started.
fn answer_all(store: &ManualStore) -> Vec<u64> {
    let mut order = Vec::new();
    while let Some(&ticket) = store.started().first() {
        order.push(ticket);
        store.answer(ticket, Ok(100));
    }
    order
}

fn tickets(done: Vec<ReadDone>) -> Vec<u64> {
    done.iter().map(|done| done.ticket).collect()
}

#[test]
fn classes_start_by_urgency_and_each_in_order() {
    let (loader, store) = manual(1, u64::MAX);
    submit(&loader, LoadClass::ReadAhead, requests([30, 31, 32]));
    submit(&loader, LoadClass::Upgrade, requests([20, 21]));
    submit(&loader, LoadClass::OnDemandLow, requests([10, 11]));
    submit(&loader, LoadClass::OnDemandHigh, requests([0, 1]));
    submit(&loader, LoadClass::ReadAhead, requests([33]));
    submit(&loader, LoadClass::OnDemandLow, requests([12]));
    submit(&loader, LoadClass::OnDemandHigh, requests([2]));
    assert!(loader.outstanding() > 0);
    let order = answer_all(&store);
    assert_eq!(loader.outstanding(), 0);
    assert_eq!(order, [30, 0, 1, 2, 10, 11, 12, 20, 21, 31, 32, 33]);
    assert_eq!(tickets(loader.wait().unwrap()), order);
    let stats = loader.stats();
    assert_eq!((stats.reads, stats.bytes, stats.failures), (12, 1200, 0));
    assert_eq!(stats.by_class, [3, 3, 2, 4, 0, 0]);
    assert_eq!((stats.queue_peak, stats.in_flight_peak), (11, 1));
}

#[test]
fn few_upgrades_are_in_flight_and_prefetches_fill_the_rest() {
    let (loader, store) = manual(5, u64::MAX);
    submit(&loader, LoadClass::Upgrade, requests(20..24));
    assert_eq!(store.started(), [20, 21]);
    submit(&loader, LoadClass::ReadAhead, requests(30..34));
    assert_eq!(store.started(), [20, 21, 30, 31, 32]);
    // An upgrade's answer starts the next upgrade, a prefetch's the next prefetch.
    store.answer(20, Ok(100));
    assert_eq!(store.started(), [21, 30, 31, 32, 22]);
    store.answer(30, Ok(100));
    assert_eq!(store.started(), [21, 31, 32, 22, 33]);
    answer_all(&store);
    assert_eq!(loader.drain().len(), 8);
    assert_eq!(loader.stats().in_flight_peak, 5);
}

#[test]
fn prefetches_start_when_nothing_is_waited_for_and_few_at_a_time() {
    let (loader, store) = manual_with(LoaderOptions { max_in_flight_prefetch_bytes: 150, ..LoaderOptions::default() });
    submit(&loader, LoadClass::OnDemandHigh, requests([0, 1]));
    submit(&loader, LoadClass::Prefetch, requests(40..44));
    submit(&loader, LoadClass::ReadAhead, requests([30]));
    assert_eq!(store.started(), [0, 1, 30]);
    store.answer(0, Ok(100));
    assert_eq!(store.started(), [1, 30], "one is still waited for");
    store.answer(1, Ok(100));
    assert_eq!(store.started(), [30, 40, 41], "the bound is met with the second");
    submit(&loader, LoadClass::OnDemandLow, requests([10]));
    store.answer(40, Ok(100));
    assert_eq!(store.started(), [30, 41, 10]);
    assert_eq!(loader.withdraw(LoadClass::Prefetch, |_| true), [42, 43]);
    answer_all(&store);
    assert_eq!((loader.drain().len(), loader.stats().by_class), (6, [2, 1, 0, 1, 2, 0]));
}

#[test]
fn the_queue_is_bounded_and_refuses_further_reads() {
    let options = LoaderOptions {
        max_in_flight_requests: 1,
        max_waiting_on_demand: 3,
        max_waiting_upgrades: 2,
        max_waiting_prefetches: 1,
        max_waiting_fills: 1,
        ..LoaderOptions::default()
    };
    let (loader, store) = manual_with(options);
    submit(&loader, LoadClass::OnDemandHigh, requests([0]));
    for (class, n_waiting) in LoadClass::ALL.into_iter().zip([3, 3, 2, 1, 1]) {
        let first = 10 * (class.index() as u64 + 1);
        let refused = loader.submit(class, requests(first..first + 5));
        let refused: Vec<u64> = refused.iter().map(|request| request.ticket).collect();
        assert_eq!(refused, (first + n_waiting..first + 5).collect::<Vec<_>>(), "{class:?}");
    }
    assert_eq!(loader.stats().refused, 2 + 2 + 3 + 4 + 4);
    assert_eq!(loader.outstanding(), 11);
    // A promotion does not go beyond the bound either: what has no room keeps its place.
    assert_eq!(loader.promote(|_| true, LoadClass::OnDemandHigh), 0);
    store.answer(0, Ok(100));
    assert_eq!(loader.promote(|_| true, LoadClass::OnDemandHigh), 1);
    assert_eq!(answer_all(&store), [10, 11, 12, 30, 20, 21, 22, 31, 40, 50]);
    // Refused reads may come again.
    submit(&loader, LoadClass::ReadAhead, requests([41]));
    assert_eq!(answer_all(&store), [41]);
    loader.drain();
}

#[test]
fn requests_and_bytes_in_flight_are_bounded() {
    let (loader, store) = manual(3, u64::MAX);
    submit(&loader, LoadClass::OnDemandHigh, requests(0..5));
    assert_eq!(store.started(), [0, 1, 2]);
    store.answer(1, Ok(100));
    assert_eq!(store.started(), [0, 2, 3]);
    loader.shared.lock().queue.withdraw(LoadClass::OnDemandHigh, |_| true);
    store.started().into_iter().for_each(|ticket| store.answer(ticket, Ok(100)));

    // A further read starts below the bound, and one that is larger than the bound still starts.
    let (loader, store) = manual(9, 150);
    submit(&loader, LoadClass::OnDemandHigh, [request(0, 100), request(1, 1000), request(2, 1), request(3, 1)]);
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
fn a_waiting_read_can_be_withdrawn() {
    let (loader, store) = manual(1, u64::MAX);
    submit(&loader, LoadClass::ReadAhead, requests(0..8));
    submit(&loader, LoadClass::Upgrade, requests(20..24));
    submit(&loader, LoadClass::OnDemandHigh, requests([100]));
    // 0 is in flight: too late for it. 20 and 100 are no prefetches.
    assert_eq!(loader.withdraw(LoadClass::ReadAhead, |ticket| ticket.is_multiple_of(2)), [2, 4, 6]);
    assert_eq!(loader.withdraw(LoadClass::Upgrade, |ticket| ticket != 21), [20, 22, 23]);
    assert_eq!(loader.outstanding(), 7);
    assert_eq!(loader.stats().withdrawn, 6);
    assert_eq!(answer_all(&store), [0, 100, 21, 1, 3, 5, 7]);
    assert_eq!(loader.drain().len(), 7);
}

#[test]
#[should_panic = "a product waits"]
fn a_read_that_a_product_waits_for_cannot_be_withdrawn() {
    let (loader, _store) = manual(1, u64::MAX);
    loader.withdraw(LoadClass::OnDemandLow, |_| true);
}

#[test]
fn a_waiting_read_can_become_urgent() {
    let (loader, store) = manual(1, u64::MAX);
    submit(&loader, LoadClass::ReadAhead, requests(0..8));
    submit(&loader, LoadClass::Upgrade, requests(20..24));
    submit(&loader, LoadClass::OnDemandLow, requests([110]));
    submit(&loader, LoadClass::OnDemandHigh, requests([100]));
    assert_eq!(loader.promote(|ticket| matches!(ticket, 5 | 7 | 22), LoadClass::OnDemandHigh), 3);
    // 110 is on demand already, and 0 in flight.
    assert_eq!(loader.promote(|ticket| matches!(ticket, 0 | 3 | 110), LoadClass::OnDemandLow), 1);
    assert_eq!(loader.promote(|ticket| ticket == 1 || ticket == 23, LoadClass::Upgrade), 1);
    assert_eq!(loader.promote(|_| true, LoadClass::ReadAhead), 0);
    assert_eq!(answer_all(&store), [0, 100, 22, 5, 7, 110, 3, 20, 21, 23, 1, 2, 4, 6]);
    // They count as what they became.
    assert_eq!(loader.stats().by_class, [4, 2, 4, 4, 0, 0]);
    assert_eq!(loader.drain().len(), 14);
}

#[test]
fn a_promoted_upgrade_starts_at_once_where_there_is_room() {
    let (loader, store) = manual(4, u64::MAX);
    submit(&loader, LoadClass::Upgrade, requests(20..24));
    assert_eq!(store.started(), [20, 21]);
    assert_eq!(loader.promote(|ticket| ticket == 23, LoadClass::OnDemandHigh), 1);
    assert_eq!(store.started(), [20, 21, 23]);
    answer_all(&store);
    loader.drain();
}

#[test]
fn a_store_that_answers_at_once_does_not_recurse() {
    /// As many as may wait: enough to exhaust a stack.
    const LOTS: u64 = 1 << 16;
    let loader = Loader::new(Arc::new(ImmediateStore), options(1, u64::MAX));
    submit(&loader, LoadClass::OnDemandHigh, requests(0..LOTS));
    assert_eq!(loader.poll().len() as u64, LOTS);
    assert_eq!(loader.outstanding(), 0);
}

#[test]
fn waiting_without_a_read_is_an_error() {
    let (loader, store) = manual(1, u64::MAX);
    assert!(loader.wait().is_none());
    submit(&loader, LoadClass::OnDemandHigh, requests([1]));
    assert!(loader.poll().is_empty());
    store.answer(1, Ok(1));
    assert_eq!(tickets(loader.poll()), [1]);
    assert!(loader.wait().is_none());
    assert!(loader.drain().is_empty());
}

#[test]
fn busy_time_runs_only_while_reads_are_in_flight() {
    let (loader, store) = manual(2, u64::MAX);
    let runs = || loader.shared.lock().busy_since.is_some();
    assert_eq!((runs(), loader.stats().busy), (false, Duration::ZERO));
    submit(&loader, LoadClass::OnDemandHigh, requests([1, 2]));
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
    let loader = Loader::new(Arc::new(FaultyStore::new(memory, faults)), options(4, u64::MAX));
    let arena = Arena::new(64_000).unwrap();
    let requests = (0..64).map(|ticket| {
        let extent = Extent { file: 0, offset: ticket * 1000, len: 1000 };
        // SAFETY: inside the arena, which outlives the loop below.
        let dst = unsafe { SlotPtr::new(arena.as_ptr().add(ticket as usize * 1000)) };
        ReadRequest { ticket, extent, dst, capacity: 1000, lead: 0, form: Form::AsIs }
    });
    submit(&loader, LoadClass::OnDemandHigh, requests);
    let mut failed = Vec::new();
    let mut seen = 0;
    while let Some(answers) = loader.wait() {
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
            ReadRequest { ticket, extent, dst, capacity: 1 << 20, lead: 0, form: Form::AsIs }
        });
        submit(&loader, LoadClass::ReadAhead, requests);
        drop(loader);
        drop(arena);
    }
}

#[test]
fn fills_come_last_and_are_not_waited_for() {
    let (loader, store) = manual(1, u64::MAX);
    submit(&loader, LoadClass::Fill, requests([50, 51]));
    assert!(loader.wait().is_none());
    assert!(loader.outstanding() > 0);
    submit(&loader, LoadClass::Prefetch, requests([40]));
    submit(&loader, LoadClass::OnDemandHigh, requests([0]));
    assert_eq!(answer_all(&store), [50, 0, 40, 51]);
    assert_eq!(loader.drain().len(), 4);
}

#[test]
fn a_fill_that_is_needed_is_waited_for() {
    let (loader, store) = manual(1, u64::MAX);
    submit(&loader, LoadClass::Fill, requests([50, 51, 52]));
    assert!(loader.wait().is_none());
    // One is on its way, one waits.
    assert_eq!(loader.promote(|ticket| ticket != 52, LoadClass::OnDemandHigh), 1);
    assert_eq!(loader.withdraw(LoadClass::Fill, |_| true), [52]);
    store.answer(50, Ok(100));
    assert_eq!(tickets(loader.wait().unwrap()), [50]);
    store.answer(51, Ok(100));
    assert_eq!(tickets(loader.wait().unwrap()), [51]);
    assert_eq!(loader.stats().by_class[LoadClass::OnDemandHigh.index()], 2);
}
