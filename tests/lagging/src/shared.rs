//! The state of a device: memory accounts, faults, and the state behind its lock.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock};

use ggml_sys::llama::{self, ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_status};

use crate::device::Report;
use crate::graph::Ran;
use crate::memory::Mapping;
use crate::queue::Queues;
use crate::schedule::{GraphId, Schedule};
use crate::{Options, Pinned};

/// A device's inside, leaked at registration.
pub(crate) struct Shared {
    pub(crate) name: CString,
    pub(crate) pointers: OnceLock<Pointers>,
    /// Set when the device is handed out.
    pub(crate) options: OnceLock<Options>,
    state: Mutex<State>,
}

pub(crate) struct Pointers {
    pub(crate) device: ggml_backend_dev_t,
    pub(crate) buffer_type: ggml_backend_buffer_type_t,
    pub(crate) host_buffer_type: ggml_backend_buffer_type_t,
}

// SAFETY: all three are leaked and not written after registration.
unsafe impl Send for Pointers {}
// SAFETY: as above.
unsafe impl Sync for Pointers {}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) schedule: Schedule,
    pub(crate) queues: Queues,
    /// Without its times, which `schedule` has.
    pub(crate) report: Report,
    /// CPU time of the host's thread at its last wait for a stream, if no large copy was submitted since then.
    pub(crate) waited: Option<f64>,
    pub(crate) used: u64,
    pub(crate) allocation_bytes_max: u64,
    /// Pinned host memory by address.
    host: BTreeMap<usize, Arc<Mapping>>,
    pub(crate) faults: Vec<String>,
    /// Graphs that are let through, and how those after them end.
    pub(crate) graphs_until_failure: usize,
    pub(crate) fail_graphs: Vec<ggml_status>,
    pub(crate) lost: bool,
}

/// CPU time of this thread, in seconds: the one clock here that is real.
pub(crate) fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the place is valid.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

impl State {
    pub(crate) fn graph_ran(&mut self, graph: GraphId, ran: Ran) {
        self.faults.extend(ran.faults);
        self.schedule.graph_done(graph, ran.seconds);
    }
}

impl Shared {
    pub(crate) fn new(index: usize) -> Shared {
        Shared {
            name: CString::new(format!("LAG{index}")).expect("LAG and a number"),
            pointers: OnceLock::new(),
            options: OnceLock::new(),
            state: Mutex::new(State { allocation_bytes_max: u64::MAX, ..State::default() }),
        }
    }

    /// A test that panicked under the lock has failed; the others go on.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    /// The options, of a device without memory if it was not handed out.
    pub(crate) fn options(&self) -> &Options {
        static SPARE: LazyLock<Options> =
            LazyLock::new(|| Options { memory: 0, pinned: Pinned::None, ..Options::default() });
        self.options.get().unwrap_or(&SPARE)
    }

    pub(crate) fn is_spare(&self) -> bool {
        self.options.get().is_none()
    }

    pub(crate) fn pointers(&self) -> &Pointers {
        self.pointers.get().expect("set before ggml sees the device")
    }

    pub(crate) fn buffer_type(&self) -> ggml_backend_buffer_type_t {
        self.pointers().buffer_type
    }

    /// The host submits a graph.
    pub(crate) fn host_worked(&self) {
        let now = thread_seconds();
        let mut state = self.state();
        if let Some(waited) = state.waited.take() {
            state.report.host_work.push(now - waited);
        }
    }

    pub(crate) fn fault(&self, fault: String) {
        self.state().faults.push(fault);
    }

    /// The status to refuse a graph with.
    pub(crate) fn graph_refused(&self) -> Option<ggml_status> {
        let mut state = self.state();
        let broken = state.lost || !state.faults.is_empty();
        if broken || state.fail_graphs.is_empty() {
            return broken.then_some(llama::GGML_STATUS_FAILED);
        }
        if state.graphs_until_failure > 0 {
            state.graphs_until_failure -= 1;
            return None;
        }
        state.fail_graphs.pop()
    }

    pub(crate) fn take_memory(&self, bytes: usize) -> bool {
        let mut state = self.state();
        let fits = bytes as u64 <= self.options().memory.saturating_sub(state.used);
        let taken = fits && bytes as u64 <= state.allocation_bytes_max;
        state.used += if taken { bytes as u64 } else { 0 };
        taken
    }

    pub(crate) fn return_memory(&self, bytes: usize) {
        self.state().used -= bytes as u64;
    }

    pub(crate) fn add_host(&self, mapping: Arc<Mapping>) {
        self.state().host.insert(mapping.base() as usize, mapping);
    }

    pub(crate) fn remove_host(&self, base: *const u8) {
        self.state().host.remove(&(base as usize));
    }

    /// The pinned host memory a range lies in.
    pub(crate) fn host_mapping(&self, address: *const u8, bytes: usize) -> Option<Arc<Mapping>> {
        let state = self.state();
        let (_, mapping) = state.host.range(..=address as usize).next_back()?;
        mapping.contains(address, bytes).then(|| Arc::clone(mapping))
    }

    pub(crate) fn is_host_memory(&self, address: *const u8) -> bool {
        self.host_mapping(address, 1).is_some()
    }

    pub(crate) fn copy_seconds(&self, bytes: usize, is_pinned: bool) -> f64 {
        let &Options { link_latency, link_bandwidth, pageable_bandwidth, small_copy_bytes, .. } = self.options();
        let bandwidth = if is_pinned { link_bandwidth } else { link_bandwidth.min(pageable_bandwidth) };
        link_latency + if bytes > small_copy_bytes { bytes as f64 / bandwidth } else { 0.0 }
    }

    /// A synchronous copy between the device and `host`: acts at once and makes nothing else run.
    pub(crate) fn host_copy(&self, host: *const u8, bytes: usize, copy: impl FnOnce()) {
        let is_pinned = self.host_mapping(host, bytes).is_some();
        let seconds = self.copy_seconds(bytes, is_pinned);
        let mut state = self.state();
        state.report.copied_bytes += bytes as u64;
        state.report.waits += 1;
        state.schedule.host_copy(seconds, self.options().wait_latency);
        copy();
    }
}
