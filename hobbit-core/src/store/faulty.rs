//! Any store, with faults: for tests of a failing disk. Deterministic, no sleeping.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Store;
use super::StoreError;
use super::{Completion, ReadDone, ReadRequest};
use crate::expert::Extent;
use crate::random::SplitMix64;

/// Faults by request. Requests are counted from 0 in order of submission.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// These requests fail with `EIO` and read nothing.
    pub io_error: Vec<u64>,
    /// These requests read half of their bytes and then meet the end of the file.
    pub short_read: Vec<u64>,
    /// The length that each file has shrunk to, in bytes: reads past it fill the slot up to there and fail.
    pub shrunk: HashMap<u32, u64>,
    /// Answers are held back until this many are there or no other is in flight, then given out of order.
    pub hold: Option<Hold>,
}

/// Reordering of answers.
#[derive(Clone, Copy, Debug)]
pub struct Hold {
    /// Answers held back at most.
    pub answers_max: usize,
    /// Picks the permutation.
    pub seed: u64,
}

pub struct FaultyStore {
    inner: Arc<dyn Store>,
    faults: Faults,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    submitted: u64,
    /// Requests without an answer of the inner store.
    in_flight: usize,
    held: Vec<(Arc<dyn Completion>, ReadDone)>,
    random: Option<SplitMix64>,
}

impl FaultyStore {
    /// Puts `faults` over `inner`.
    pub fn new(inner: Arc<dyn Store>, faults: Faults) -> Self {
        let random = faults.hold.map(|hold| SplitMix64::new(hold.seed));
        Self { inner, faults, state: Arc::new(Mutex::new(State { random, ..State::default() })) }
    }

    /// Bytes that a request may read, and the error in place of its answer.
    fn verdict(&self, number: u64, request: &ReadRequest) -> Option<(u64, StoreError)> {
        let Extent { file, offset, len } = request.extent;
        let path = || PathBuf::from(format!("(file {file})"));
        if self.faults.io_error.contains(&number) {
            let source = io::Error::from_raw_os_error(EIO);
            return Some((0, StoreError::Read { path: path(), offset, len, source }));
        }
        let file_len = if self.faults.short_read.contains(&number) {
            offset + len / 2
        } else {
            *self.faults.shrunk.get(&file).filter(|&&file_len| file_len < offset + len)?
        };
        Some((file_len.saturating_sub(offset), StoreError::Shrank { path: path(), offset, len, file_len }))
    }
}

/// "Input/output error" on every Unix.
const EIO: i32 = 5;

impl Store for FaultyStore {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>) {
        // All of the batch counts as in flight before the first answer can come.
        let first = {
            let mut state = lock(&self.state);
            state.in_flight += requests.len();
            let first = state.submitted;
            state.submitted += requests.len() as u64;
            first
        };
        for (mut request, number) in requests.into_iter().zip(first..) {
            let verdict = self.verdict(number, &request);
            let error = verdict.map(|(len, error)| {
                request.extent.len = len;
                error
            });
            let hold = self.faults.hold;
            let filter: Arc<dyn Completion> = Arc::new(Filter {
                sink: Arc::clone(sink),
                error: Mutex::new(error),
                hold,
                state: Arc::clone(&self.state),
            });
            self.inner.submit(vec![request], &filter);
        }
    }
}

/// Stands between the inner store and the real sink, for one request.
struct Filter {
    sink: Arc<dyn Completion>,
    error: Mutex<Option<StoreError>>,
    hold: Option<Hold>,
    state: Arc<Mutex<State>>,
}

impl Completion for Filter {
    fn complete(self: Arc<Self>, mut done: ReadDone) {
        if let Some(error) = self.error.lock().unwrap_or_else(PoisonError::into_inner).take() {
            done.result = Err(error);
        }
        let released = {
            let mut state = lock(&self.state);
            state.in_flight -= 1;
            state.held.push((Arc::clone(&self.sink), done));
            let held_max = self.hold.map_or(0, |hold| hold.answers_max);
            if state.held.len() < held_max && state.in_flight > 0 { Vec::new() } else { state.release() }
        };
        // Outside the lock: an answer may submit the next request.
        for (sink, done) in released {
            sink.complete(done);
        }
    }
}

impl State {
    /// Everything held, permuted.
    fn release(&mut self) -> Vec<(Arc<dyn Completion>, ReadDone)> {
        let mut released = std::mem::take(&mut self.held);
        if let Some(random) = &mut self.random {
            random.shuffle(&mut released);
        }
        released
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
