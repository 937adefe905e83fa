//! The queue between the engine and a store: what is needed now goes before what may be needed soon.
//!
//! The engine's thread is the only consumer. It submits reads, computes, and takes answers with [`Loader::poll`] or
//! [`Loader::wait`]. The next read is started wherever an answer arrives, on the store's own thread, so that the
//! disk stays busy while the engine computes.

pub mod balance;
pub mod prefetch;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use smart_default::SmartDefault;

use crate::expert::{Extent, Precision};
use crate::store::{Completion, CopyReport, ReadDone, ReadRequest, Store, StoreError};

/// Why something is read, most urgent first. A read starts when none of a more urgent class can; within a class reads
/// start in order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LoadClass {
    /// A product waits for a high-precision slice.
    OnDemandHigh,
    /// A product waits for a low-precision slice.
    OnDemandLow,
    /// The high version of an expert that is resident in low precision.
    Upgrade,
    /// The next layer of a batch, which uses nearly all experts.
    ReadAhead,
    /// A guess. It starts only while no demand read is in flight, and few bytes at a time, so that a wrong one delays
    /// little.
    Prefetch,
    /// For a free slot, after all guesses.
    Fill,
}

impl LoadClass {
    pub const COUNT: usize = 6;
    pub const ALL: [LoadClass; Self::COUNT] =
        [Self::OnDemandHigh, Self::OnDemandLow, Self::Upgrade, Self::ReadAhead, Self::Prefetch, Self::Fill];

    /// The class of a read for a product in this precision.
    pub const fn on_demand(precision: Precision) -> Self {
        match precision {
            Precision::High => Self::OnDemandHigh,
            Precision::Low => Self::OnDemandLow,
        }
    }

    pub const fn index(self) -> usize {
        self as usize
    }

    /// No product waits for such reads: they may be withdrawn.
    pub(crate) const fn is_background(self) -> bool {
        matches!(self, Self::Upgrade | Self::ReadAhead | Self::Prefetch | Self::Fill)
    }
}

/// Bounds of what the store holds at a time, and of what waits for it.
///
/// Reads in flight can no longer be overtaken or withdrawn, so more than the disk needs for full speed only adds
/// latency. Reads that would wait beyond their bound are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, SmartDefault)]
pub struct LoaderOptions {
    /// Reads in flight; at least 1.
    #[default(16)]
    pub max_in_flight_requests: usize,
    /// No further read starts while this many bytes are in flight; at least 1.
    #[default(16 << 20)]
    pub max_in_flight_bytes: u64,
    /// Upgrades among the reads in flight; at least 1. They come while the engine computes: a full queue of them would
    /// stand before the next miss.
    #[default(2)]
    pub max_in_flight_upgrades: usize,
    /// No further prefetch starts while this many bytes of prefetches are in flight; at least 1.
    #[default(Self::PREFETCH_BYTES)]
    pub max_in_flight_prefetch_bytes: u64,
    /// Reads of either on-demand class that wait; at least 1. The slots behind them are fewer: reaching it is a bug.
    #[default(1 << 16)]
    pub max_waiting_on_demand: usize,
    /// Upgrades that wait; at least 1. Further ones are refused: by their turn others would be used more often.
    #[default(64)]
    pub max_waiting_upgrades: usize,
    /// Reads ahead, and prefetches, that wait; at least 1.
    #[default(4096)]
    pub max_waiting_prefetches: usize,
    /// Reads for free slots that wait; at least 1.
    #[default(1 << 16)]
    pub max_waiting_fills: usize,
}

impl LoaderOptions {
    /// Bounds for a store over this many disks: each has as much in flight as one alone.
    pub fn over(n_disks: usize) -> Self {
        let one = Self::default();
        Self {
            max_in_flight_requests: one.max_in_flight_requests * n_disks,
            max_in_flight_bytes: one.max_in_flight_bytes * n_disks as u64,
            max_in_flight_prefetch_bytes: one.max_in_flight_prefetch_bytes * n_disks as u64,
            ..one
        }
    }

    fn max_waiting(&self, class: LoadClass) -> usize {
        match class {
            LoadClass::OnDemandHigh | LoadClass::OnDemandLow => self.max_waiting_on_demand,
            LoadClass::Upgrade => self.max_waiting_upgrades,
            LoadClass::ReadAhead | LoadClass::Prefetch => self.max_waiting_prefetches,
            LoadClass::Fill => self.max_waiting_fills,
        }
    }

    /// A chunk or two of the direct store: enough for most of a disk's bandwidth, and less than a millisecond of it.
    pub(crate) const PREFETCH_BYTES: u64 = 2 << 20;
}

/// Counters since the loader was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadStats {
    /// Reads answered, failed ones included.
    pub reads: u64,
    /// Reads answered by class, in the order of [`LoadClass::ALL`]. A promoted read counts in its new class.
    pub by_class: [u64; LoadClass::COUNT],
    pub failures: u64,
    pub withdrawn: u64,
    /// Reads refused because too many of their class were waiting.
    pub refused: u64,
    /// Bytes moved, whole blocks included.
    pub bytes: u64,
    /// Wall time with at least one read in flight.
    pub busy: Duration,
    /// Wall time that the consumer spent inside [`Loader::wait`] and [`Loader::drain`].
    pub waited: Duration,
    pub queue_peak: usize,
    pub in_flight_peak: usize,
}

/// Schedules reads on one store.
///
/// Dropping it withdraws what has not started and waits for what has, so the slots' memory may be freed after it.
pub struct Loader {
    shared: Arc<Shared>,
}

struct Shared {
    store: Arc<dyn Store>,
    options: LoaderOptions,
    state: Mutex<State>,
    landed: Condvar,
}

#[derive(Default)]
struct State {
    queue: Queue,
    done: Vec<ReadDone>,
    stats: LoadStats,
    busy_since: Option<Instant>,
    /// A thread is inside [`Shared::pump`]: it will see whatever is queued or landed meanwhile.
    pumping: bool,
}

impl Loader {
    /// A loader with nothing queued.
    ///
    /// # Panics
    /// When a bound is 0.
    pub fn new(store: Arc<dyn Store>, options: LoaderOptions) -> Self {
        assert!(options.max_in_flight_requests > 0 && options.max_in_flight_bytes > 0);
        assert!(options.max_in_flight_upgrades > 0 && options.max_in_flight_prefetch_bytes > 0);
        assert!(LoadClass::ALL.into_iter().all(|class| options.max_waiting(class) > 0));
        Self { shared: Arc::new(Shared { store, options, state: Mutex::default(), landed: Condvar::new() }) }
    }

    /// Queues reads. Tickets must differ from those of every read whose answer has not been taken yet.
    ///
    /// Returns the answers of those that were refused because too many of the class wait: their slots are the caller's
    /// again. Nothing is refused below the bound.
    #[must_use = "the slots of refused reads must be freed"]
    pub fn submit(&self, class: LoadClass, requests: impl IntoIterator<Item = ReadRequest>) -> Vec<ReadDone> {
        let mut state = self.shared.lock();
        let max_waiting = self.shared.options.max_waiting(class);
        let refused: Vec<_> =
            requests.into_iter().filter_map(|request| state.queue.push(class, request, max_waiting).err()).collect();
        state.stats.refused += refused.len() as u64;
        // Reads that the pump starts at once never waited.
        self.shared.pump(state);
        let mut state = self.shared.lock();
        state.stats.queue_peak = state.stats.queue_peak.max(state.queue.waiting());
        refused
    }

    pub fn poll(&self) -> Vec<ReadDone> {
        std::mem::take(&mut self.shared.lock().done)
    }

    /// Waits for at least one answer and takes all that have come. `None` without a read to wait for; reads for free
    /// slots do not count.
    pub fn wait(&self) -> Option<Vec<ReadDone>> {
        let state = self.shared.lock();
        if state.done.is_empty() && state.queue.expected() == 0 {
            return None;
        }
        let is_expected = |state: &State| state.done.is_empty() && state.queue.expected() > 0;
        let mut state = self.shared.wait_while(state, is_expected);
        Some(std::mem::take(&mut state.done))
    }

    pub fn drain(&self) -> Vec<ReadDone> {
        let state = self.shared.lock();
        let mut state = self.shared.wait_while(state, |state| state.queue.outstanding() > 0);
        std::mem::take(&mut state.done)
    }

    /// Withdraws upgrades or prefetches that have not started and whose ticket `unwanted` accepts. Their tickets are
    /// returned, in order; they get no answer.
    ///
    /// # Panics
    /// When `class` is an on-demand class: a product waits for its reads.
    pub fn withdraw(&self, class: LoadClass, unwanted: impl FnMut(u64) -> bool) -> Vec<u64> {
        assert!(class.is_background(), "a product waits for reads of class {class:?}");
        let mut state = self.shared.lock();
        let tickets = state.queue.withdraw(class, unwanted);
        state.stats.withdrawn += tickets.len() as u64;
        tickets
    }

    /// Makes upgrades and prefetches that have not started more urgent: those whose ticket `needed` accepts go behind
    /// the reads of class `to` already queued, upgrades first. What is of class `to` or more urgent stays, and so does
    /// what would exceed the bound of `to`. Returns how many moved.
    pub fn promote(&self, needed: impl FnMut(u64) -> bool, to: LoadClass) -> usize {
        let mut state = self.shared.lock();
        let n_moved = state.queue.promote(needed, to, self.shared.options.max_waiting(to));
        // An upgrade may have waited for other upgrades only.
        self.shared.pump(state);
        n_moved
    }

    pub fn outstanding(&self) -> usize {
        self.shared.lock().queue.outstanding()
    }

    /// [`Store::copies`].
    pub fn copies(&self) -> Vec<CopyReport> {
        self.shared.store.copies()
    }

    /// Counts so far; `busy` includes the present busy spell.
    pub fn stats(&self) -> LoadStats {
        let state = self.shared.lock();
        let mut stats = state.stats;
        stats.busy += state.busy_since.map_or(Duration::ZERO, |since| since.elapsed());
        stats
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        for class in LoadClass::ALL {
            state.queue.withdraw(class, |_| true);
        }
        drop(self.shared.wait_while(state, |state| state.queue.outstanding() > 0));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps while `condition` holds; the time counts as waited.
    fn wait_while<'a>(
        &self,
        state: MutexGuard<'a, State>,
        mut condition: impl FnMut(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let started = Instant::now();
        let mut state = self.landed.wait_while(state, |state| condition(state)).unwrap_or_else(PoisonError::into_inner);
        state.stats.waited += started.elapsed();
        state
    }

    /// Starts as many reads as the bounds allow. The store is called without the lock, since it may answer at once;
    /// only one thread pumps, so reads start in the queue's order and an immediate answer does not recurse.
    fn pump<'a>(self: &'a Arc<Self>, mut state: MutexGuard<'a, State>) {
        if state.pumping {
            return;
        }
        state.pumping = true;
        loop {
            let requests = state.queue.start(&self.options);
            if requests.is_empty() {
                break;
            }
            state.busy_since.get_or_insert_with(Instant::now);
            state.stats.in_flight_peak = state.stats.in_flight_peak.max(state.queue.in_flight());
            drop(state);
            let sink: Arc<dyn Completion> = self.clone();
            self.store.submit(requests, &sink);
            state = self.lock();
        }
        state.pumping = false;
    }
}

impl Completion for Shared {
    fn complete(self: Arc<Self>, done: ReadDone) {
        let mut state = self.lock();
        let class = state.queue.finish(done.ticket);
        state.stats.reads += 1;
        state.stats.by_class[class.index()] += 1;
        match &done.result {
            Ok(bytes) => state.stats.bytes += bytes,
            Err(_) => state.stats.failures += 1,
        }
        state.done.push(done);
        if state.queue.in_flight() == 0
            && let Some(since) = state.busy_since.take()
        {
            state.stats.busy += since.elapsed();
        }
        // The disk first, then the consumer.
        self.pump(state);
        self.landed.notify_all();
    }
}

// Which read starts next: pure bookkeeping, no store and no clock.

/// Reads waiting by class, and what is in flight.
#[derive(Debug, Default)]
struct Queue {
    waiting: [VecDeque<ReadRequest>; LoadClass::COUNT],
    in_flight: Vec<Started>,
    bytes_in_flight: u64,
}

#[derive(Clone, Copy, Debug)]
struct Started {
    ticket: u64,
    class: LoadClass,
    bytes: u64,
}

impl Queue {
    /// Lets a read wait; refuses it when `max_waiting` of its class do already.
    fn push(&mut self, class: LoadClass, request: ReadRequest, max_waiting: usize) -> Result<(), ReadDone> {
        let waiting = &mut self.waiting[class.index()];
        if waiting.len() >= max_waiting {
            let Extent { offset, len, .. } = request.extent;
            return Err(ReadDone { ticket: request.ticket, result: Err(StoreError::TooManyReads { offset, len }) });
        }
        waiting.push_back(request);
        Ok(())
    }

    /// Moves the reads that may start now from waiting to in flight: at least one when nothing is in flight, so that an
    /// answer always follows and starts the next.
    fn start(&mut self, options: &LoaderOptions) -> Vec<ReadRequest> {
        let mut started = Vec::new();
        while self.in_flight.len() < options.max_in_flight_requests
            && self.bytes_in_flight < options.max_in_flight_bytes
        {
            let may_start =
                |class: &LoadClass| !self.waiting[class.index()].is_empty() && self.may_start(*class, options);
            let Some(class) = LoadClass::ALL.into_iter().find(may_start) else { break };
            let Some(request) = self.waiting[class.index()].pop_front() else { break };
            let bytes = request.bytes();
            self.in_flight.push(Started { ticket: request.ticket, class, bytes });
            self.bytes_in_flight += bytes;
            started.push(request);
        }
        started
    }

    fn may_start(&self, class: LoadClass, options: &LoaderOptions) -> bool {
        let of_class = self.in_flight.iter().filter(|read| read.class == class);
        match class {
            LoadClass::Upgrade => of_class.count() < options.max_in_flight_upgrades,
            LoadClass::Prefetch | LoadClass::Fill => {
                let is_waited_for = self.in_flight.iter().any(|read| !read.class.is_background());
                !is_waited_for && of_class.map(|read| read.bytes).sum::<u64>() < options.max_in_flight_prefetch_bytes
            }
            LoadClass::OnDemandHigh | LoadClass::OnDemandLow | LoadClass::ReadAhead => true,
        }
    }

    /// Notes an answer; tells the class of the read.
    ///
    /// # Panics
    /// When the ticket is not in flight: the store has broken its contract.
    fn finish(&mut self, ticket: u64) -> LoadClass {
        let place = self.in_flight.iter().position(|read| read.ticket == ticket);
        let read = self.in_flight.swap_remove(place.expect("a store answers each request once"));
        self.bytes_in_flight -= read.bytes;
        read.class
    }

    /// Takes out waiting reads of a class; returns their tickets in order.
    fn withdraw(&mut self, class: LoadClass, mut unwanted: impl FnMut(u64) -> bool) -> Vec<u64> {
        let mut tickets = Vec::new();
        self.waiting[class.index()].retain(|request| {
            let withdraw = unwanted(request.ticket);
            if withdraw {
                tickets.push(request.ticket);
            }
            !withdraw
        });
        tickets
    }

    /// Moves waiting background reads that are less urgent than `to` behind its own, in order, as long as fewer than
    /// `max_waiting` wait there; returns how many. A read for a free slot that has started changes its class, too.
    fn promote(&mut self, mut needed: impl FnMut(u64) -> bool, to: LoadClass, max_waiting: usize) -> usize {
        let mut moved = Vec::new();
        let mut room = max_waiting.saturating_sub(self.waiting[to.index()].len());
        for from in LoadClass::ALL.into_iter().filter(|from| from.is_background() && *from > to) {
            for request in std::mem::take(&mut self.waiting[from.index()]) {
                if room > 0 && needed(request.ticket) {
                    room -= 1;
                    moved.push(request);
                } else {
                    self.waiting[from.index()].push_back(request);
                }
            }
        }
        for read in self.in_flight.iter_mut().filter(|read| read.class == LoadClass::Fill) {
            if needed(read.ticket) {
                read.class = to;
            }
        }
        let n_moved = moved.len();
        self.waiting[to.index()].extend(moved);
        n_moved
    }

    fn waiting(&self) -> usize {
        self.waiting.iter().map(VecDeque::len).sum()
    }

    fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Reads that the consumer may wait for: not those for free slots.
    fn expected(&self) -> usize {
        let fills = self.in_flight.iter().filter(|read| read.class == LoadClass::Fill).count();
        self.outstanding() - self.waiting[LoadClass::Fill.index()].len() - fills
    }

    fn outstanding(&self) -> usize {
        self.waiting() + self.in_flight()
    }
}
