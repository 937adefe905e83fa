//! Streams of queued operations, and the waits that run them.

use std::collections::{BTreeMap, VecDeque};
use std::ptr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use crate::Order;
use crate::graph::{Captured, Engine};
use crate::memory::{DeviceMemory, Mapping};
use crate::schedule::{GraphId, Moment};
use crate::shared::{Shared, State};

/// An address in device memory.
pub(crate) struct DeviceAddress {
    pub(crate) _memory: Arc<DeviceMemory>,
    pub(crate) address: *mut u8,
}

/// Where an upload reads.
pub(crate) enum Source {
    /// Pinned host memory: read when the upload runs.
    Pinned { _mapping: Arc<Mapping>, address: *const u8 },
    /// Anything else: a copy from submission.
    Copied(Vec<u8>),
}

pub(crate) enum Work {
    Upload { source: Source, target: DeviceAddress, bytes: usize },
    Download { source: DeviceAddress, target: *mut u8, bytes: usize },
    Graph(Captured, GraphId),
    Record(Arc<Ticket>),
    Wait(Arc<Ticket>),
}

// SAFETY: addresses that the submitter keeps valid until the operation has run, as a GPU's driver demands.
unsafe impl Send for Work {}

/// An event as recorded once: a position in a stream.
pub(crate) struct Ticket {
    pub(crate) stream: usize,
    /// How many operations had been submitted to the stream, this one included.
    pub(crate) position: u64,
    pub(crate) moment: Moment,
    done: Mutex<bool>,
    told: Condvar,
}

impl Ticket {
    fn new(stream: usize, position: u64, moment: Moment) -> Arc<Ticket> {
        Arc::new(Ticket { stream, position, moment, done: Mutex::new(false), told: Condvar::new() })
    }

    fn tell(&self) {
        *self.done.lock().unwrap_or_else(|poison| poison.into_inner()) = true;
        self.told.notify_all();
    }

    fn block(&self) {
        let mut done = self.done.lock().unwrap_or_else(|poison| poison.into_inner());
        while !*done {
            done = self.told.wait(done).unwrap_or_else(|poison| poison.into_inner());
        }
    }
}

/// The queues of a device.
#[derive(Default)]
pub(crate) struct Queues {
    by_stream: BTreeMap<usize, Queue>,
}

struct Queue {
    submitted: u64,
    runner: Runner,
}

enum Runner {
    /// Run by a waiter, under the device's lock.
    Lazy { done: u64, waiting: VecDeque<Work>, engine: Arc<Mutex<Engine>> },
    /// Run by a thread as they come.
    Worker { sender: Sender<Work>, thread: JoinHandle<()> },
}

impl Shared {
    /// A new stream; `None` where there is no CPU backend to compute with.
    pub(crate) fn open_stream(&'static self) -> Option<usize> {
        let engine = Engine::new(self.options().n_threads)?;
        let mut state = self.state();
        let stream = state.schedule.stream();
        let runner = if self.options().real_time {
            let (sender, receiver) = channel();
            Runner::Worker { sender, thread: std::thread::spawn(move || self.work(engine, &receiver)) }
        } else {
            Runner::Lazy { done: 0, waiting: VecDeque::new(), engine: Arc::new(Mutex::new(engine)) }
        };
        state.queues.by_stream.insert(stream, Queue { submitted: 0, runner });
        Some(stream)
    }

    /// Runs all operations and ends the stream.
    pub(crate) fn close_stream(&self, stream: usize) {
        let mut state = self.state();
        self.run_until(&mut state, stream, u64::MAX);
        let queue = state.queues.by_stream.remove(&stream);
        drop(state);
        if let Some(Queue { runner: Runner::Worker { sender, thread }, .. }) = queue {
            drop(sender);
            // A worker that panicked has told the test already.
            let _ = thread.join();
        }
    }

    /// Queues an upload or download on a stream.
    pub(crate) fn submit_copy(&self, stream: usize, work: Work, bytes: usize) {
        let mut state = self.state();
        state.report.copied_bytes += bytes as u64;
        state.schedule.copy(stream, self.copy_seconds(bytes));
        let position = self.submit(&mut state, stream, work);
        if self.options().order == Order::CopiesEarly {
            self.run_until(&mut state, stream, position);
        }
    }

    pub(crate) fn submit_graph(&self, stream: usize, graph: Captured) {
        let mut state = self.state();
        let id = state.schedule.graph(stream);
        state.report.graph_computes += 1;
        self.submit(&mut state, stream, Work::Graph(graph, id));
    }

    pub(crate) fn submit_record(&self, stream: usize) -> Arc<Ticket> {
        let mut state = self.state();
        let ticket = self.ticket(&mut state, stream);
        self.submit(&mut state, stream, Work::Record(Arc::clone(&ticket)));
        ticket
    }

    pub(crate) fn submit_wait(&self, stream: usize, ticket: Arc<Ticket>) {
        let mut state = self.state();
        state.schedule.wait(stream, ticket.moment);
        self.submit(&mut state, stream, Work::Wait(ticket));
    }

    /// The host waits for a stream.
    pub(crate) fn synchronize(&self, stream: usize) {
        self.finish(stream);
        let mut state = self.state();
        state.report.waits += 1;
        state.schedule.synchronize(stream);
    }

    /// The host waits for a recorded event.
    pub(crate) fn synchronize_ticket(&self, ticket: &Ticket) {
        let mut state = self.state();
        self.run_until(&mut state, ticket.stream, ticket.position);
        drop(state);
        if self.options().real_time {
            ticket.block();
        }
        let mut state = self.state();
        state.report.waits += 1;
        state.schedule.synchronize_moment(ticket.moment);
    }

    /// Runs everything on every stream, without any virtual waiting.
    pub(crate) fn finish_all(&self) {
        let streams: Vec<usize> = self.state().queues.by_stream.keys().copied().collect();
        for stream in streams {
            self.finish(stream);
        }
    }

    fn finish(&self, stream: usize) {
        let mut state = self.state();
        self.run_until(&mut state, stream, u64::MAX);
        if self.options().real_time && state.queues.by_stream.contains_key(&stream) {
            let ticket = self.ticket(&mut state, stream);
            self.submit(&mut state, stream, Work::Record(Arc::clone(&ticket)));
            drop(state);
            ticket.block();
        }
    }

    fn ticket(&self, state: &mut State, stream: usize) -> Arc<Ticket> {
        let position = state.queues.by_stream.get(&stream).map_or(0, |queue| queue.submitted + 1);
        Ticket::new(stream, position, state.schedule.record(stream))
    }

    /// Returns the operation's position in its stream.
    fn submit(&self, state: &mut State, stream: usize, work: Work) -> u64 {
        let queue =
            state.queues.by_stream.get_mut(&stream).expect("ggml uses a backend between its making and its end");
        queue.submitted += 1;
        match &mut queue.runner {
            Runner::Lazy { waiting, .. } => waiting.push_back(work),
            // A worker that panicked receives no more; the test has failed already.
            Runner::Worker { sender, .. } => drop(sender.send(work)),
        }
        queue.submitted
    }

    /// Runs a stream's operations up to a position, and the operations of other streams that these wait for. Waits
    /// point backwards in time of submission, so this ends. Does nothing where workers run.
    fn run_until(&self, state: &mut State, stream: usize, position: u64) {
        loop {
            let Some(Queue { runner: Runner::Lazy { done, waiting, engine }, .. }) =
                state.queues.by_stream.get_mut(&stream)
            else {
                return;
            };
            if *done >= position {
                return;
            }
            let Some(work) = waiting.pop_front() else { return };
            *done += 1;
            let engine = Arc::clone(engine);
            match work {
                Work::Wait(ticket) => self.run_until(state, ticket.stream, ticket.position),
                Work::Graph(mut graph, id) => {
                    let engine = engine.lock().unwrap_or_else(|poison| poison.into_inner());
                    let ran = engine.run(&mut graph, self.options());
                    state.graph_ran(id, ran);
                }
                Work::Record(ticket) => ticket.tell(),
                // SAFETY: the submitter keeps host memory valid until the copy has run; device memory is held.
                copy => unsafe { copy.copy() },
            }
        }
    }

    /// A stream's own thread, with `real_time`.
    fn work(&self, engine: Engine, receiver: &Receiver<Work>) {
        for work in receiver {
            match work {
                Work::Wait(ticket) => ticket.block(),
                Work::Graph(mut graph, id) => {
                    let ran = engine.run(&mut graph, self.options());
                    self.state().graph_ran(id, ran);
                }
                Work::Record(ticket) => ticket.tell(),
                Work::Upload { bytes, .. } | Work::Download { bytes, .. } => {
                    // SAFETY: as in `run_until`.
                    self.throttled(bytes, || unsafe { work.copy() });
                }
            }
        }
    }
}

impl Work {
    /// # Safety
    /// The host memory a copy was submitted with is still valid.
    unsafe fn copy(&self) {
        // SAFETY: by the caller; places were checked at submission and are held.
        unsafe {
            match self {
                Work::Upload { source, target, bytes } => {
                    let source = match source {
                        Source::Pinned { address, .. } => *address,
                        Source::Copied(copy) => copy.as_ptr(),
                    };
                    ptr::copy(source, target.address, *bytes);
                }
                Work::Download { source, target, bytes } => ptr::copy(source.address, *target, *bytes),
                Work::Graph(..) | Work::Record(_) | Work::Wait(_) => {}
            }
        }
    }
}
