//! Streams of queued operations, and the waits that run them.

use std::collections::{BTreeMap, VecDeque};
use std::ptr;
use std::sync::{Arc, Mutex};

use crate::Order;
use crate::graph::{Captured, Engine};
use crate::memory::{DeviceMemory, Mapping};
use crate::schedule::{GraphId, Moment};
use crate::shared::{Shared, State, thread_seconds};

/// Router choices, weights and indices have at most this many bytes, experts more.
const HOST_WORK_COPY_MAX: usize = 16 << 10;

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
    Record,
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
}

/// The queues of a device.
#[derive(Default)]
pub(crate) struct Queues {
    by_stream: BTreeMap<usize, Queue>,
}

/// A thread that waits for operations runs them, under the device's lock.
struct Queue {
    submitted: u64,
    done: u64,
    waiting: VecDeque<Work>,
    engine: Arc<Mutex<Engine>>,
}

impl Shared {
    /// A new stream; `None` where there is no CPU backend to compute with.
    pub(crate) fn open_stream(&self) -> Option<usize> {
        let engine = Arc::new(Mutex::new(Engine::new()?));
        let mut state = self.state();
        let stream = state.schedule.stream();
        state.queues.by_stream.insert(stream, Queue { submitted: 0, done: 0, waiting: VecDeque::new(), engine });
        Some(stream)
    }

    /// Runs all operations and ends the stream.
    pub(crate) fn close_stream(&self, stream: usize) {
        let mut state = self.state();
        self.run_until(&mut state, stream, u64::MAX);
        state.queues.by_stream.remove(&stream);
    }

    /// Queues an upload or download on a stream.
    pub(crate) fn submit_copy(&self, stream: usize, work: Work, bytes: usize) {
        let (is_pinned, is_blocking) = match &work {
            Work::Upload { source, .. } => (matches!(source, Source::Pinned { .. }), false),
            Work::Download { target, .. } => {
                let is_pinned = self.host_mapping(*target, bytes).is_some();
                (is_pinned, !is_pinned)
            }
            Work::Graph(..) | Work::Record | Work::Wait(_) => (true, false),
        };
        let seconds = self.copy_seconds(bytes, is_pinned);
        let mut state = self.state();
        state.report.copied_bytes += bytes as u64;
        if bytes > HOST_WORK_COPY_MAX {
            state.waited = None;
        }
        if is_blocking {
            state.schedule.blocking_copy(stream, seconds)
        } else {
            state.schedule.copy(stream, seconds)
        }
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
        let position = state.queues.by_stream.get(&stream).map_or(0, |queue| queue.submitted + 1);
        let ticket = Arc::new(Ticket { stream, position, moment: state.schedule.record(stream) });
        self.submit(&mut state, stream, Work::Record);
        ticket
    }

    pub(crate) fn submit_wait(&self, stream: usize, ticket: Arc<Ticket>) {
        let mut state = self.state();
        state.schedule.wait(stream, ticket.moment);
        self.submit(&mut state, stream, Work::Wait(ticket));
    }

    /// The host waits for a stream.
    pub(crate) fn synchronize(&self, stream: usize) {
        let mut state = self.state();
        self.run_until(&mut state, stream, u64::MAX);
        state.report.waits += 1;
        state.schedule.synchronize(stream, self.options().wait_latency);
        state.waited = Some(thread_seconds());
    }

    /// The host waits for a recorded event.
    pub(crate) fn synchronize_ticket(&self, ticket: &Ticket) {
        let mut state = self.state();
        self.run_until(&mut state, ticket.stream, ticket.position);
        let waited = state.schedule.synchronize_moment(ticket.stream, ticket.moment, self.options().wait_latency);
        state.report.waits += u64::from(waited);
    }

    /// Runs everything on every stream, without any virtual waiting.
    pub(crate) fn finish_all(&self) {
        let mut state = self.state();
        let streams: Vec<usize> = state.queues.by_stream.keys().copied().collect();
        for stream in streams {
            self.run_until(&mut state, stream, u64::MAX);
        }
    }

    /// Returns the operation's position in its stream.
    fn submit(&self, state: &mut State, stream: usize, work: Work) -> u64 {
        let queue =
            state.queues.by_stream.get_mut(&stream).expect("ggml uses a backend between its making and its end");
        queue.submitted += 1;
        queue.waiting.push_back(work);
        queue.submitted
    }

    /// Runs a stream's operations up to a position, and the operations of other streams that these wait for. Waits
    /// point backwards in time of submission, so this ends.
    fn run_until(&self, state: &mut State, stream: usize, position: u64) {
        loop {
            let Some(queue) = state.queues.by_stream.get_mut(&stream).filter(|queue| queue.done < position) else {
                return;
            };
            let Some(work) = queue.waiting.pop_front() else { return };
            queue.done += 1;
            let engine = Arc::clone(&queue.engine);
            match work {
                Work::Wait(ticket) => self.run_until(state, ticket.stream, ticket.position),
                Work::Graph(mut graph, id) => {
                    let engine = engine.lock().unwrap_or_else(|poison| poison.into_inner());
                    let ran = engine.run(&mut graph, self.options());
                    state.graph_ran(id, ran);
                }
                Work::Record => {}
                // SAFETY: the submitter keeps host memory valid until the copy has run; device memory is held.
                copy => unsafe { copy.copy() },
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
                Work::Graph(..) | Work::Record | Work::Wait(_) => {}
            }
        }
    }
}
