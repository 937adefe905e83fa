//! A backend instance: one stream, as ggml sees it.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};

use ggml_sys::backend as ffi;
use ggml_sys::llama::{self, ggml_backend_dev_t, ggml_backend_event_t, ggml_backend_t, ggml_tensor};

use crate::graph::Captured;
use crate::memory::memory_of;
use crate::queue::{DeviceAddress, Source, Ticket, Work};
use crate::shared::Shared;

static GUID: [u8; 16] = *b"lagging-device-1";

/// The `context` of a backend.
struct Stream {
    shared: &'static Shared,
    id: usize,
}

/// `ggml_backend_event` of ggml-backend-impl.h, which the bindings leave out.
#[repr(C)]
struct Event {
    device: ggml_backend_dev_t,
    context: *mut Mutex<Recorded>,
}

/// The last record of an event.
#[derive(Default)]
struct Recorded {
    last: Option<Arc<Ticket>>,
    /// Records since the host last waited for the event.
    n: u64,
}

/// A new stream of a device; null where ggml has no CPU backend to compute with.
pub(crate) fn open(device: ggml_backend_dev_t, shared: &'static Shared) -> ggml_backend_t {
    let Some(id) = shared.open_stream() else { return ptr::null_mut() };
    Box::into_raw(Box::new(ffi::ggml_backend {
        guid: (&raw const GUID).cast_mut().cast(),
        iface: ffi::ggml_backend_i {
            get_name: Some(name),
            free: Some(free),
            set_tensor_async: Some(set_tensor_async),
            get_tensor_async: Some(get_tensor_async),
            synchronize: Some(synchronize),
            graph_compute: Some(graph_compute),
            event_record: Some(event_record),
            event_wait: Some(event_wait),
            ..ffi::ggml_backend_i::default()
        },
        device,
        context: Box::into_raw(Box::new(Stream { shared, id })).cast(),
    }))
    .cast()
}

/// # Safety
/// `backend` was made by `open` and not freed.
unsafe fn stream<'a>(backend: ggml_backend_t) -> &'a Stream {
    // SAFETY: by the caller.
    unsafe { &*(*backend.cast::<ffi::ggml_backend>()).context.cast::<Stream>() }
}

unsafe extern "C" fn name(backend: ggml_backend_t) -> *const c_char {
    // SAFETY: ggml passes a live backend of ours.
    unsafe { stream(backend) }.shared.name.as_ptr()
}

unsafe extern "C" fn free(backend: ggml_backend_t) {
    // SAFETY: called once, last; takes back what `open` made.
    unsafe {
        let backend = Box::from_raw(backend.cast::<ffi::ggml_backend>());
        let stream = Box::from_raw(backend.context.cast::<Stream>());
        stream.shared.close_stream(stream.id);
    }
}

/// Where a byte range of a tensor is; records a fault where it is none of the device's.
///
/// # Safety
/// `tensor` is live, and so is its buffer.
unsafe fn address_of(
    shared: &Shared,
    tensor: *const ggml_tensor,
    offset: usize,
    bytes: usize,
) -> Option<DeviceAddress> {
    // SAFETY: by the caller.
    let (memory, data) = unsafe { (memory_of(&*tensor, shared.buffer_type()), (*tensor).data) };
    let found = memory.and_then(|memory| {
        let address = memory.real(data.wrapping_byte_add(offset), bytes)?;
        Some(DeviceAddress { _memory: Arc::clone(memory), address })
    });
    if found.is_none() {
        shared.fault(format!("an asynchronous copy of {bytes} bytes at offset {offset} is outside of device memory"));
    }
    found
}

unsafe extern "C" fn set_tensor_async(
    backend: ggml_backend_t,
    tensor: *mut ggml_tensor,
    data: *const c_void,
    offset: usize,
    bytes: usize,
) {
    // SAFETY: ggml passes a live backend of ours, a live tensor and `bytes` readable bytes.
    unsafe {
        let Stream { shared, id } = stream(backend);
        let Some(target) = address_of(shared, tensor, offset, bytes) else { return };
        let source = match shared.host_mapping(data.cast(), bytes) {
            Some(_mapping) => Source::Pinned { _mapping, address: data.cast() },
            None => Source::Copied(std::slice::from_raw_parts(data.cast(), bytes).to_vec()),
        };
        shared.submit_copy(*id, Work::Upload { source, target, bytes }, bytes);
    }
}

unsafe extern "C" fn get_tensor_async(
    backend: ggml_backend_t,
    tensor: *const ggml_tensor,
    data: *mut c_void,
    offset: usize,
    bytes: usize,
) {
    // SAFETY: ggml passes a live backend of ours, a live tensor and room that stays until the next synchronisation.
    unsafe {
        let Stream { shared, id } = stream(backend);
        let Some(source) = address_of(shared, tensor, offset, bytes) else { return };
        let is_pinned = shared.host_mapping(data.cast::<u8>(), bytes).is_some();
        shared.state().report.waits += u64::from(!is_pinned);
        shared.submit_copy(*id, Work::Download { source, target: data.cast(), bytes }, bytes);
    }
}

unsafe extern "C" fn synchronize(backend: ggml_backend_t) {
    // SAFETY: ggml passes a live backend of ours.
    let Stream { shared, id } = unsafe { stream(backend) };
    shared.synchronize(*id);
}

unsafe extern "C" fn graph_compute(backend: ggml_backend_t, graph: *mut llama::ggml_cgraph) -> llama::ggml_status {
    // SAFETY: ggml passes a live backend of ours and a live graph, allocated.
    unsafe {
        let Stream { shared, id } = stream(backend);
        shared.host_worked();
        if let Some(status) = shared.graph_refused() {
            return status;
        }
        match Captured::new(graph, shared) {
            Ok(graph) => {
                shared.submit_graph(*id, graph);
                llama::GGML_STATUS_SUCCESS
            }
            Err(fault) => {
                shared.fault(fault);
                llama::GGML_STATUS_FAILED
            }
        }
    }
}

/// # Safety
/// `event` was made by `event_new` and not freed.
unsafe fn recorded<'a>(event: ggml_backend_event_t) -> std::sync::MutexGuard<'a, Recorded> {
    // SAFETY: by the caller.
    unsafe { &*(*event.cast::<Event>()).context }.lock().unwrap_or_else(|poison| poison.into_inner())
}

unsafe extern "C" fn event_record(backend: ggml_backend_t, event: ggml_backend_event_t) {
    // SAFETY: ggml passes a live backend and a live event of ours.
    unsafe {
        let Stream { shared, id } = stream(backend);
        let ticket = shared.submit_record(*id);
        let mut recorded = recorded(event);
        recorded.last = Some(ticket);
        recorded.n += 1;
        let mut state = shared.state();
        state.report.event_records = state.report.event_records.max(recorded.n);
    }
}

/// Waits for what the event was last recorded at; an event never recorded is no reason to wait, as on CUDA.
unsafe extern "C" fn event_wait(backend: ggml_backend_t, event: ggml_backend_event_t) {
    // SAFETY: ggml passes a live backend and a live event of ours.
    unsafe {
        let Stream { shared, id } = stream(backend);
        let last = recorded(event).last.clone();
        if let Some(last) = last {
            shared.submit_wait(*id, last);
        }
    }
}

pub(crate) unsafe extern "C" fn event_new(device: ggml_backend_dev_t) -> ggml_backend_event_t {
    Box::into_raw(Box::new(Event { device, context: Box::into_raw(Box::default()) })).cast()
}

pub(crate) unsafe extern "C" fn event_free(_: ggml_backend_dev_t, event: ggml_backend_event_t) {
    // SAFETY: called once, last; takes back what `event_new` made.
    unsafe {
        let event = Box::from_raw(event.cast::<Event>());
        drop(Box::from_raw(event.context));
    }
}

pub(crate) unsafe extern "C" fn event_synchronize(device: ggml_backend_dev_t, event: ggml_backend_event_t) {
    // SAFETY: ggml passes our device and a live event of it.
    unsafe {
        let last = {
            let mut recorded = recorded(event);
            recorded.n = 0;
            recorded.last.clone()
        };
        if let Some(last) = last {
            crate::device::shared_of(device).synchronize_ticket(&last);
        }
    }
}
