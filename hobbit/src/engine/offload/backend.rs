//! The wrapper's backend as ggml sees it: the inner device's, except for the products of experts.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use ggml_sys::backend as ffi;
use ggml_sys::llama::{self, ggml_backend_dev_t, ggml_backend_event_t, ggml_backend_t, ggml_tensor};

use super::compute::Offload;
use super::wrapper::wrapper;
use crate::engine::tier::stream::Stream;

static GUID: [u8; 16] = *b"hobbit-offload-1";

pub(super) unsafe extern "C" fn init(dev: ggml_backend_dev_t, _params: *const c_char) -> ggml_backend_t {
    // SAFETY: ggml passes a wrapper's device.
    let wrapper = unsafe { wrapper(dev) };
    let Some(offload) = Stream::new(wrapper.inner()).and_then(|stream| Offload::new(wrapper, stream)) else {
        return ptr::null_mut();
    };
    let has = offload.stream().interface();
    let iface = ffi::ggml_backend_i {
        get_name: Some(get_name),
        free: Some(free),
        set_tensor_async: has.set_tensor_async.map(|_| set_tensor_async as _),
        get_tensor_async: has.get_tensor_async.map(|_| get_tensor_async as _),
        set_tensor_2d_async: has.set_tensor_2d_async.map(|_| set_tensor_2d_async as _),
        get_tensor_2d_async: has.get_tensor_2d_async.map(|_| get_tensor_2d_async as _),
        cpy_tensor_async: has.cpy_tensor_async.map(|_| cpy_tensor_async as _),
        synchronize: has.synchronize.map(|_| synchronize as _),
        graph_plan_create: None,
        graph_plan_free: None,
        graph_plan_update: None,
        graph_plan_compute: None,
        graph_compute: Some(graph_compute),
        event_record: has.event_record.map(|_| event_record as _),
        event_wait: has.event_wait.map(|_| event_wait as _),
        // Reordered nodes would tear a layer's products apart.
        graph_optimize: None,
    };
    Box::into_raw(Box::new(ffi::ggml_backend {
        guid: (&raw const GUID).cast_mut().cast(),
        iface,
        device: dev,
        context: Box::into_raw(Box::new(offload)).cast(),
    }))
    .cast()
}

/// # Safety
/// `backend` was made by [`init`] and not freed; one thread uses a backend at a time.
unsafe fn context<'a>(backend: ggml_backend_t) -> &'a mut Offload {
    // SAFETY: by the caller.
    unsafe { &mut *(*backend.cast::<ffi::ggml_backend>()).context.cast::<Offload>() }
}

/// The backend that a wrapper's stands for; any other backend is itself.
///
/// # Safety
/// `backend` is live.
unsafe fn unwrapped(backend: ggml_backend_t) -> ggml_backend_t {
    // SAFETY: by the caller.
    unsafe {
        let guid = (*backend.cast::<ffi::ggml_backend>()).guid;
        match ptr::eq(guid.cast_const().cast(), &raw const GUID) {
            true => context(backend).stream().raw(),
            false => backend,
        }
    }
}

// SAFETY of the functions below: ggml passes a live backend of ours and arguments that the inner backend's function
// takes; those that the inner backend lacks are not offered.

unsafe extern "C" fn get_name(backend: ggml_backend_t) -> *const c_char {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_name(context(backend).stream().raw()) }
}

unsafe extern "C" fn free(backend: ggml_backend_t) {
    // SAFETY: called once, last; takes back what `init` made.
    unsafe {
        let backend = Box::from_raw(backend.cast::<ffi::ggml_backend>());
        drop(Box::from_raw(backend.context.cast::<Offload>()));
    }
}

unsafe extern "C" fn set_tensor_async(
    backend: ggml_backend_t,
    tensor: *mut ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: see above.
    unsafe {
        let stream = context(backend).stream();
        if let Some(set) = stream.interface().set_tensor_async {
            set(stream.raw(), tensor, data, offset, size);
        }
    }
}

unsafe extern "C" fn get_tensor_async(
    backend: ggml_backend_t,
    tensor: *const ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: see above.
    unsafe {
        let stream = context(backend).stream();
        if let Some(get) = stream.interface().get_tensor_async {
            get(stream.raw(), tensor, data, offset, size);
        }
    }
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn set_tensor_2d_async(
    backend: ggml_backend_t,
    tensor: *mut ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
    n_copies: usize,
    stride_tensor: usize,
    stride_data: usize,
) {
    // SAFETY: see above.
    unsafe {
        let stream = context(backend).stream();
        if let Some(set) = stream.interface().set_tensor_2d_async {
            set(stream.raw(), tensor, data, offset, size, n_copies, stride_tensor, stride_data);
        }
    }
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn get_tensor_2d_async(
    backend: ggml_backend_t,
    tensor: *const ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
    n_copies: usize,
    stride_tensor: usize,
    stride_data: usize,
) {
    // SAFETY: see above.
    unsafe {
        let stream = context(backend).stream();
        if let Some(get) = stream.interface().get_tensor_2d_async {
            get(stream.raw(), tensor, data, offset, size, n_copies, stride_tensor, stride_data);
        }
    }
}

unsafe extern "C" fn cpy_tensor_async(
    from: ggml_backend_t,
    to: ggml_backend_t,
    src: *const ggml_tensor,
    dst: *mut ggml_tensor,
) -> bool {
    // SAFETY: see above.
    unsafe {
        let (from, to) = (unwrapped(from), unwrapped(to));
        let copy = (*to.cast::<ffi::ggml_backend>()).iface.cpy_tensor_async;
        copy.is_some_and(|copy| copy(from, to, src, dst))
    }
}

unsafe extern "C" fn synchronize(backend: ggml_backend_t) {
    // SAFETY: see above.
    unsafe { context(backend).stream().synchronize() };
}

unsafe extern "C" fn event_record(backend: ggml_backend_t, event: ggml_backend_event_t) {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_event_record(event, context(backend).stream().raw()) };
}

unsafe extern "C" fn event_wait(backend: ggml_backend_t, event: ggml_backend_event_t) {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_event_wait(context(backend).stream().raw(), event) };
}

pub(super) unsafe extern "C" fn set_n_threads(backend: ggml_backend_t, n_threads: c_int) {
    // SAFETY: llama.cpp passes a backend of ours.
    unsafe { context(backend).set_n_threads(n_threads) };
}

pub(super) unsafe extern "C" fn set_abort_callback(
    backend: ggml_backend_t,
    callback: llama::ggml_abort_callback,
    data: *mut c_void,
) {
    // SAFETY: llama.cpp passes a backend of ours; callback and data stay valid as long as the context.
    unsafe { context(backend).set_abort_callback(callback, data) };
}

unsafe extern "C" fn graph_compute(backend: ggml_backend_t, graph: *mut llama::ggml_cgraph) -> llama::ggml_status {
    catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: ggml passes a backend of ours and a graph whose nodes are live and allocated.
        unsafe { context(backend).graph_compute(graph) }
    }))
    .unwrap_or(llama::GGML_STATUS_FAILED)
}
