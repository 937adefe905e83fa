//! The wrapper's backend as ggml sees it: the inner device's, except for the products of experts.

use std::ffi::{c_char, c_void};
use std::ptr;

use ggml_sys::backend as ffi;
use ggml_sys::llama::{self, ggml_backend_dev_t, ggml_backend_event_t, ggml_backend_t, ggml_tensor};

use super::compute::Offload;
use super::wrapper::{forward, wrapper};
use crate::engine::ggml::Stream;
use crate::engine::registration::{backend, context};

static GUID: [u8; 16] = *b"hobbit-offload-1";

pub(super) unsafe extern "C" fn init(dev: ggml_backend_dev_t, _params: *const c_char) -> ggml_backend_t {
    // SAFETY: ggml passes a wrapper's device.
    let wrapper = unsafe { wrapper(dev) };
    let Some(offload) = Stream::new(wrapper.inner).and_then(|stream| Offload::new(wrapper, stream)) else {
        return ptr::null_mut();
    };
    let has = offload.stream().interface();
    // Nodes are not to be reordered (`graph_optimize`): that would tear a layer's products apart.
    let iface = ffi::ggml_backend_i {
        get_name: Some(get_name),
        set_tensor_async: has.set_tensor_async.map(|_| set_tensor_async as _),
        get_tensor_async: has.get_tensor_async.map(|_| get_tensor_async as _),
        set_tensor_2d_async: has.set_tensor_2d_async.map(|_| set_tensor_2d_async as _),
        get_tensor_2d_async: has.get_tensor_2d_async.map(|_| get_tensor_2d_async as _),
        cpy_tensor_async: has.cpy_tensor_async.map(|_| cpy_tensor_async as _),
        synchronize: has.synchronize.map(|_| synchronize as _),
        event_record: has.event_record.map(|_| event_record as _),
        event_wait: has.event_wait.map(|_| event_wait as _),
        ..ffi::ggml_backend_i::default()
    };
    backend(&GUID, dev, offload, iface)
}

/// # Safety
/// `backend` was made by [`init`] and not freed.
unsafe fn inner(backend: ggml_backend_t) -> ggml_backend_t {
    // SAFETY: by the caller.
    unsafe { (&*context::<Offload>(backend)).stream().raw() }
}

// Those that the inner backend lacks are not offered.
forward! { ggml_backend_t => inner;
    get_name() -> *const c_char = ggml_backend_name;
    set_tensor_async(tensor: *mut ggml_tensor, data: *const c_void, offset: usize, size: usize)
        = ggml_backend_tensor_set_async;
    get_tensor_async(tensor: *const ggml_tensor, data: *mut c_void, offset: usize, size: usize)
        = ggml_backend_tensor_get_async;
    set_tensor_2d_async(tensor: *mut ggml_tensor, data: *const c_void, offset: usize, size: usize, n_copies: usize,
        stride_tensor: usize, stride_data: usize) = ggml_backend_tensor_set_2d_async;
    get_tensor_2d_async(tensor: *const ggml_tensor, data: *mut c_void, offset: usize, size: usize, n_copies: usize,
        stride_tensor: usize, stride_data: usize) = ggml_backend_tensor_get_2d_async;
    synchronize() = ggml_backend_synchronize;
    event_wait(event: ggml_backend_event_t) = ggml_backend_event_wait;
}

/// The backend that a wrapper's stands for; any other backend is itself.
///
/// # Safety
/// `backend` is live.
unsafe fn unwrapped(backend: ggml_backend_t) -> ggml_backend_t {
    // SAFETY: by the caller.
    unsafe {
        let guid = (*backend.cast::<ffi::ggml_backend>()).guid;
        if ptr::eq(guid.cast_const().cast(), &raw const GUID) { inner(backend) } else { backend }
    }
}

// SAFETY of the functions below: ggml passes a live backend of ours and what the inner backend's function takes.

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

unsafe extern "C" fn event_record(backend: ggml_backend_t, event: ggml_backend_event_t) {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_event_record(event, inner(backend)) };
}
