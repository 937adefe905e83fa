//! Experts on a device with its own memory.
//!
//! In place of a ggml device, llama.cpp gets a wrapper around it: same name, memory, buffers and operations, plus the
//! products of expert tensors in the expert buffer type. A layer thus stays one split on its device, with nothing
//! copied and a single wait, for the router's choice. The wrapper passes other nodes of each graph on, and computes
//! expert products from device slots ([`super::tier`]), which are filled from the host's ([`super::tiers`]).
//!
//! The wrapper uses the generic backend interface only, so it works with every ggml device.

mod backend;
mod compute;
mod helper;
mod indices;
mod launch;
mod wrapper;

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use ggml_sys::backend as ffi;
use ggml_sys::llama::{
    self, ggml_backend_buffer_t, ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_backend_event_t, ggml_tensor,
};

use super::buffer::is_expert_tensor;
use super::ggml;
use super::registration::Registration;
use compute::Offload;
use wrapper::{forward, wrapper};

pub(super) use wrapper::Wrapper;

impl Wrapper {
    /// The wrapper of a registered device; each device has one.
    pub(super) fn of(inner: ggml_backend_dev_t) -> &'static Wrapper {
        static WRAPPERS: Mutex<Vec<&'static Wrapper>> = Mutex::new(Vec::new());
        let mut known = WRAPPERS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(wrapper) = known.iter().find(|wrapper| wrapper.inner == inner) {
            return wrapper;
        }
        let Registration { device, buffer_type, .. } = Registration::new::<Offload>(interface(inner));
        let wrapper: &'static Wrapper = Box::leak(Box::new(Wrapper {
            raw: device.cast(),
            inner,
            buffer_type: buffer_type.cast(),
            name: ggml::name(inner),
            is_remote: ggml::is_remote(inner),
        }));
        // SAFETY: leaked, and not shared yet.
        unsafe { (*device).context = ptr::from_ref(wrapper).cast_mut().cast() };
        known.push(wrapper);
        wrapper
    }
}

fn interface(inner: ggml_backend_dev_t) -> ffi::ggml_backend_device_i {
    // SAFETY: a registered device.
    let has = unsafe { &(*inner.cast::<ffi::ggml_backend_device>()).iface };
    ffi::ggml_backend_device_i {
        get_name: Some(get_name),
        get_description: Some(get_description),
        get_memory: Some(get_memory),
        get_type: Some(get_type),
        get_props: Some(get_props),
        init_backend: Some(backend::init),
        get_buffer_type: Some(get_buffer_type),
        get_host_buffer_type: has.get_host_buffer_type.map(|_| get_host_buffer_type as _),
        buffer_from_host_ptr: has.buffer_from_host_ptr.map(|_| buffer_from_host_ptr as _),
        supports_op: Some(supports_op),
        supports_buft: Some(supports_buft),
        offload_op: has.offload_op.map(|_| offload_op as _),
        event_new: has.event_new.map(|_| event_new as _),
        event_free: has.event_free.map(|_| event_free as _),
        event_synchronize: has.event_synchronize.map(|_| event_synchronize as _),
    }
}

/// # Safety
/// As `wrapper`.
unsafe fn inner(dev: ggml_backend_dev_t) -> ggml_backend_dev_t {
    // SAFETY: by the caller.
    unsafe { wrapper(dev).inner }
}

forward! { ggml_backend_dev_t => inner;
    get_name() -> *const c_char = ggml_backend_dev_name;
    get_description() -> *const c_char = ggml_backend_dev_description;
    get_memory(free: *mut usize, total: *mut usize) = ggml_backend_dev_memory;
    get_type() -> llama::ggml_backend_dev_type = ggml_backend_dev_type;
    get_props(props: *mut llama::ggml_backend_dev_props) = ggml_backend_dev_get_props;
    get_buffer_type() -> ggml_backend_buffer_type_t = ggml_backend_dev_buffer_type;
    get_host_buffer_type() -> ggml_backend_buffer_type_t = ggml_backend_dev_host_buffer_type;
    buffer_from_host_ptr(data: *mut c_void, bytes: usize, tensor_bytes_max: usize) -> ggml_backend_buffer_t
        = ggml_backend_dev_buffer_from_host_ptr;
    offload_op(op: *const ggml_tensor) -> bool = ggml_backend_dev_offload_op;
    event_new() -> ggml_backend_event_t = ggml_backend_event_new;
}

// SAFETY of the functions below: ggml passes a wrapper's device, and what the inner device's function takes.

unsafe extern "C" fn supports_op(dev: ggml_backend_dev_t, op: *const ggml_tensor) -> bool {
    // SAFETY: see above; nodes and their sources are live.
    unsafe {
        let wrapper = wrapper(dev);
        let node = &*op;
        let src = node.src[0];
        if node.op != llama::GGML_OP_MUL_MAT_ID || !is_expert_tensor(src, wrapper.buffer_type) {
            return llama::ggml_backend_dev_supports_op(wrapper.inner, op);
        }
        // The inner device does not know the buffer, so the query has weights without one.
        let mut weights = *src;
        weights.buffer = ptr::null_mut();
        weights.extra = ptr::null_mut();
        let mut product = *node;
        product.src[0] = &raw mut weights;
        llama::ggml_backend_dev_supports_op(wrapper.inner, &product)
    }
}

unsafe extern "C" fn supports_buft(dev: ggml_backend_dev_t, buft: ggml_backend_buffer_type_t) -> bool {
    // SAFETY: see above.
    unsafe {
        let wrapper = wrapper(dev);
        buft == wrapper.buffer_type || llama::ggml_backend_dev_supports_buft(wrapper.inner, buft)
    }
}

/// Events are the inner device's, and ggml calls that device for them.
unsafe extern "C" fn event_free(_: ggml_backend_dev_t, event: ggml_backend_event_t) {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_event_free(event) };
}

unsafe extern "C" fn event_synchronize(_: ggml_backend_dev_t, event: ggml_backend_event_t) {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_event_synchronize(event) };
}
