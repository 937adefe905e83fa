//! A store over several copies of the same files, on different disks: each read, or a part of it, goes to the copy that
//! will answer first (`store::dispatch`).
//!
//! The model's own files have all bytes and the last word: a read that fails on a mirror, or from a mirror that was
//! written to, is repeated there, and the mirror is left out from then on.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::Serialize;

use super::dispatch::Dispatch;
use super::mirror::Mirror;
use super::{BLOCK_BYTES, Completion, Form, ReadDone, ReadRequest, Store, StoreError, lead_of};
use crate::expert::Extent;

/// One copy of a model's files, and what was read from it since the model was opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CopyReport {
    /// The first file, or what the user gave.
    pub path: PathBuf,
    /// Name of its engine.
    pub engine: String,
    /// Bytes that it has.
    pub bytes: u64,
    /// Reads, or parts of them, that it was asked for.
    pub reads: u64,
    /// Bytes that it was asked for, without alignment.
    pub bytes_read: u64,
    /// Share of all copies' `bytes_read`, 0..=1.
    pub share: f64,
    /// As measured while it read, the last 64 MiB or so; `None` before the first answer.
    pub bytes_per_second: Option<f64>,
    /// Why it is not read any more.
    pub left_out: Option<String>,
}

/// See the [module](self).
pub struct Copies {
    // Dropped before the original, on which their failed reads are repeated.
    mirrors: Vec<Copy>,
    original: Arc<dyn Store>,
    n_files: usize,
    shared: Arc<Shared>,
}

/// A mirror and the store that reads it.
struct Copy {
    mirror: Arc<Mirror>,
    store: Arc<dyn Store>,
}

/// Tells the user about a mirror that is left out.
type Tell = Box<dyn Fn(&str) + Send + Sync>;

struct Shared {
    began: Instant,
    state: Mutex<State>,
    tell: Tell,
}

struct State {
    dispatch: Dispatch,
    /// The original first.
    reports: Vec<CopyReport>,
}

impl Copies {
    /// `original` reads the `n_files` files of the model at `path`, `bytes` in all; each store beside a mirror reads
    /// [`Mirror::files`]. `tell` gets a line when a mirror is left out.
    pub fn new(
        (original, path, n_files, bytes): (Arc<dyn Store>, PathBuf, usize, u64),
        mirrors: Vec<(Mirror, Arc<dyn Store>)>,
        tell: impl Fn(&str) + Send + Sync + 'static,
    ) -> Self {
        let report =
            |path, engine: &str, bytes| CopyReport { path, engine: engine.into(), bytes, ..Default::default() };
        let of_mirror =
            |(mirror, store): &(Mirror, Arc<dyn Store>)| report(mirror.path.clone(), store.name(), mirror.bytes());
        let first = report(path, original.name(), bytes);
        let reports: Vec<_> = std::iter::once(first).chain(mirrors.iter().map(of_mirror)).collect();
        let state = Mutex::new(State { dispatch: Dispatch::new(reports.len()), reports });
        let shared = Arc::new(Shared { began: Instant::now(), state, tell: Box::new(tell) });
        let mirrors = mirrors.into_iter().map(|(mirror, store)| Copy { mirror: Arc::new(mirror), store }).collect();
        Self { mirrors, original, n_files, shared }
    }

    /// Divides a checked request among the copies.
    fn start(&self, request: ReadRequest, sink: &Arc<dyn Completion>) {
        let Extent { file, offset, len } = request.extent;
        let place = |copy: usize| self.mirrors[copy - 1].mirror.place(file, offset + len);
        // Parts begin at blocks of file and memory, so that no engine has to copy.
        let is_aligned = request.dst.as_ptr().addr().is_multiple_of(BLOCK_BYTES as usize);
        let divisible = request.form == Form::AsIs && request.lead == lead_of(&request.extent) && is_aligned;
        let asked = self.shared.seconds();
        let shares = {
            let mut state = self.shared.lock();
            let shares = state.dispatch.divide(request.bytes(), divisible, |copy| copy == 0 || place(copy).is_some());
            for (report, share) in state.reports.iter_mut().zip(&shares).filter(|(_, share)| **share > 0) {
                report.reads += 1;
                report.bytes_read += share;
            }
            shares
        };
        let ticket = request.ticket;
        let parts = divided(request, &shares);
        let read = Arc::new(Whole {
            ticket,
            sink: Arc::clone(sink),
            pending: AtomicUsize::new(parts.len()),
            moved: AtomicU64::new(0),
            error: Mutex::new(None),
        });
        for (copy, mut request) in parts {
            let (read, shared, bytes) = (Arc::clone(&read), Arc::clone(&self.shared), shares[copy]);
            let part = |mirrored| Arc::new(Part { read, shared, copy, bytes, asked, mirrored }) as Arc<dyn Completion>;
            let Some(mirror) = copy.checked_sub(1).map(|mirror| &self.mirrors[mirror]) else {
                self.original.submit(vec![request], &part(None));
                continue;
            };
            let (mirror, store) = (Arc::clone(&mirror.mirror), &mirror.store);
            let mirrored = Mirrored { mirror, original: Arc::clone(&self.original), request: request.clone() };
            request.extent.file = place(copy).expect("only copies with the bytes are asked");
            store.submit(vec![request], &part(Some(mirrored)));
        }
    }
}

/// The parts of a request, by copy: ranges in the order of the copies that have a share, which begin at blocks. A
/// request without bytes goes to the first copy.
fn divided(request: ReadRequest, shares: &[u64]) -> Vec<(usize, ReadRequest)> {
    let with_bytes: Vec<usize> = (0..shares.len()).filter(|copy| shares[*copy] > 0).collect();
    if with_bytes.len() < 2 {
        return vec![(with_bytes.first().copied().unwrap_or(0), request)];
    }
    let Extent { file, offset, len } = request.extent;
    let (start, end) = (offset - request.lead as u64, offset + len);
    let mut from = offset;
    let mut of_copy = |copy: usize| {
        let to = if Some(&copy) == with_bytes.last() { end } else { (from + shares[copy]) / BLOCK_BYTES * BLOCK_BYTES };
        let extent = Extent { file, offset: from, len: to - from };
        let at = from - from % BLOCK_BYTES - start;
        // Up to the next part, which begins at a block.
        let capacity = if to == end { request.capacity - at as usize } else { (to - start - at) as usize };
        let (dst, lead) = (request.dst.at(at as usize), lead_of(&extent));
        from = to;
        ReadRequest { ticket: request.ticket, extent, dst, capacity, lead, form: Form::AsIs }
    };
    with_bytes.iter().map(|&copy| (copy, of_copy(copy))).collect()
}

impl Store for Copies {
    fn name(&self) -> &'static str {
        self.original.name()
    }

    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>) {
        for request in requests {
            match request.check(self.n_files) {
                Ok(()) => self.start(request, sink),
                Err(error) => Arc::clone(sink).complete(ReadDone { ticket: request.ticket, result: Err(error) }),
            }
        }
    }

    fn copies(&self) -> Vec<CopyReport> {
        let state = self.shared.lock();
        let all: u64 = state.reports.iter().map(|report| report.bytes_read).sum();
        let of = |(place, report): (usize, &CopyReport)| CopyReport {
            share: report.bytes_read as f64 / all.max(1) as f64,
            bytes_per_second: state.dispatch.speed(place),
            ..report.clone()
        };
        state.reports.iter().enumerate().map(of).collect()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// A copy answered for `bytes` that were asked for at `asked`.
    fn answered(&self, copy: usize, bytes: u64, asked: f64) {
        let now = self.seconds();
        self.lock().dispatch.answered(copy, bytes, asked, now);
    }

    /// Asks a mirror for nothing any more; the first reason is told.
    fn leave_out(&self, copy: usize, error: &StoreError) {
        let mut state = self.lock();
        if state.dispatch.leave_out(copy) {
            let report = &mut state.reports[copy];
            report.left_out = Some(error.to_string());
            let path = report.path.display().to_string();
            drop(state);
            (self.tell)(&format!("{path}: this mirror is not read any more: {error}"));
        }
    }
}

/// A read, until all of its parts have been answered.
struct Whole {
    ticket: u64,
    sink: Arc<dyn Completion>,
    pending: AtomicUsize,
    moved: AtomicU64,
    /// The first one.
    error: Mutex<Option<StoreError>>,
}

impl Whole {
    fn end_part(&self, result: Result<u64, StoreError>) {
        let error = || self.error.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(bytes) => _ = self.moved.fetch_add(bytes, Ordering::Relaxed),
            Err(failed) => _ = error().get_or_insert(failed),
        }
        // AcqRel: the last one must see what the others wrote.
        if self.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            let result = error().take().map_or_else(|| Ok(self.moved.load(Ordering::Relaxed)), Err);
            Arc::clone(&self.sink).complete(ReadDone { ticket: self.ticket, result });
        }
    }
}

/// A part of a read, asked of one copy.
struct Part {
    read: Arc<Whole>,
    shared: Arc<Shared>,
    copy: usize,
    bytes: u64,
    /// When, in seconds.
    asked: f64,
    /// `None`: the original was asked.
    mirrored: Option<Mirrored>,
}

/// What is needed to repeat a part on the original.
struct Mirrored {
    mirror: Arc<Mirror>,
    original: Arc<dyn Store>,
    /// For the original.
    request: ReadRequest,
}

impl Mirrored {
    /// The bytes count only if the file has not been written to until now.
    fn checked(&self, result: Result<u64, StoreError>) -> Result<u64, StoreError> {
        let moved = result?;
        self.mirror.check_unwritten(self.request.extent.file)?;
        Ok(moved)
    }
}

impl Completion for Part {
    fn complete(self: Arc<Self>, done: ReadDone) {
        let Self { shared, copy, bytes, .. } = &*self;
        shared.answered(*copy, *bytes, self.asked);
        let Some(mirrored) = &self.mirrored else { return self.read.end_part(done.result) };
        match mirrored.checked(done.result) {
            Ok(moved) => self.read.end_part(Ok(moved)),
            Err(error) => {
                shared.leave_out(*copy, &error);
                {
                    let mut state = shared.lock();
                    state.dispatch.add(0, *bytes);
                    state.reports[0].reads += 1;
                    state.reports[0].bytes_read += bytes;
                }
                let (read, shared) = (Arc::clone(&self.read), Arc::clone(shared));
                let asked = shared.seconds();
                let again: Arc<dyn Completion> =
                    Arc::new(Self { read, shared, copy: 0, bytes: *bytes, asked, mirrored: None });
                mirrored.original.submit(vec![mirrored.request.clone()], &again);
            }
        }
    }
}
