//! Experts on a device whose memory is not the host's.
//!
//! llama.cpp is given, in place of a ggml device, a wrapper around it: same name, memory, buffers and operations, and one
//! more, the products of expert tensors in the expert buffer type. So a layer stays one split on its device, with
//! nothing copied and nobody waited for but the router's choice. Of each graph the wrapper passes on what is not ours,
//! and computes the rest from device slots ([`super::tier`]), which are filled from the host's ([`super::hierarchy`]).
//!
//! Only the generic backend interface is used: what it can do, every device of ggml can.

mod backend;
mod compute;
pub(super) mod failure;
mod graph;
mod helper;
mod indices;
mod launch;
mod wrapper;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use ggml_sys::backend as ffi;
use ggml_sys::llama::{
    self, ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_backend_event_t, ggml_backend_reg_t, ggml_tensor,
};

use super::buffer::{buffer_type_interface, is_expert_tensor};
use super::tier::is_remote;
use wrapper::wrapper;

pub(super) use wrapper::Wrapper;

static WRAPPERS: Mutex<Vec<&'static Wrapper>> = Mutex::new(Vec::new());

impl Wrapper {
    /// The wrapper of a registered device: always the same.
    pub(super) fn of(inner: ggml_backend_dev_t) -> &'static Wrapper {
        let mut known = WRAPPERS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(wrapper) = known.iter().find(|wrapper| wrapper.inner == inner) {
            return wrapper;
        }
        let wrapper = make(inner);
        known.push(wrapper);
        wrapper
    }
}

fn make(inner: ggml_backend_dev_t) -> &'static Wrapper {
    // SAFETY: a registered device.
    let name = unsafe { CStr::from_ptr(llama::ggml_backend_dev_name(inner)) }.to_owned();
    let reg: *mut ffi::ggml_backend_reg = Box::leak(Box::new(ffi::ggml_backend_reg {
        api_version: ffi::GGML_BACKEND_API_VERSION as c_int,
        iface: ffi::ggml_backend_reg_i {
            get_name: Some(reg_name),
            get_device_count: Some(reg_device_count),
            get_device: Some(reg_device),
            get_proc_address: Some(reg_proc_address),
        },
        context: ptr::null_mut(),
    }));
    let device: *mut ffi::ggml_backend_device = Box::leak(Box::new(ffi::ggml_backend_device {
        iface: interface(inner),
        reg: reg.cast(),
        context: ptr::null_mut(),
    }));
    let buffer_type: *mut ffi::ggml_backend_buffer_type = Box::leak(Box::new(ffi::ggml_backend_buffer_type {
        iface: buffer_type_interface(),
        device: device.cast(),
        context: ptr::null_mut(),
    }));
    let wrapper: &'static Wrapper = Box::leak(Box::new(Wrapper {
        raw: device.cast(),
        inner,
        buffer_type: buffer_type.cast(),
        name,
        is_remote: is_remote(inner),
    }));
    // SAFETY: leaked, and nobody else has seen them yet.
    unsafe {
        (*device).context = ptr::from_ref(wrapper).cast_mut().cast();
        (*reg).context = device.cast();
    }
    wrapper
}

/// # Safety
/// As `wrapper`.
unsafe fn inner_interface(dev: ggml_backend_dev_t) -> (ggml_backend_dev_t, &'static ffi::ggml_backend_device_i) {
    // SAFETY: by the caller; registered devices live as long as the process.
    unsafe {
        let inner = wrapper(dev).inner;
        (inner, &(*inner.cast::<ffi::ggml_backend_device>()).iface)
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

unsafe extern "C" fn reg_name(_: ggml_backend_reg_t) -> *const c_char {
    c"HOBBIT".as_ptr()
}

unsafe extern "C" fn reg_device_count(_: ggml_backend_reg_t) -> usize {
    1
}

unsafe extern "C" fn reg_device(reg: ggml_backend_reg_t, _index: usize) -> ggml_backend_dev_t {
    // SAFETY: `make` put the device there.
    unsafe { (*reg.cast::<ffi::ggml_backend_reg>()).context.cast() }
}

/// The inner device's own functions take its own backends, which nobody but us has.
unsafe extern "C" fn reg_proc_address(_: ggml_backend_reg_t, name: *const c_char) -> *mut c_void {
    // SAFETY: ggml passes a NUL-terminated name.
    match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"ggml_backend_set_n_threads" => backend::set_n_threads as *mut c_void,
        b"ggml_backend_set_abort_callback" => backend::set_abort_callback as *mut c_void,
        _ => ptr::null_mut(),
    }
}

// SAFETY of the functions below: ggml passes a wrapper's device, and arguments that the inner device's function takes.

unsafe extern "C" fn get_name(dev: ggml_backend_dev_t) -> *const c_char {
    // SAFETY: see above.
    unsafe { wrapper(dev).name.as_ptr() }
}

unsafe extern "C" fn get_description(dev: ggml_backend_dev_t) -> *const c_char {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_dev_description(wrapper(dev).inner) }
}

unsafe extern "C" fn get_memory(dev: ggml_backend_dev_t, free: *mut usize, total: *mut usize) {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_dev_memory(wrapper(dev).inner, free, total) }
}

unsafe extern "C" fn get_type(dev: ggml_backend_dev_t) -> llama::ggml_backend_dev_type {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_dev_type(wrapper(dev).inner) }
}

unsafe extern "C" fn get_props(dev: ggml_backend_dev_t, props: *mut llama::ggml_backend_dev_props) {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_dev_get_props(wrapper(dev).inner, props) }
}

unsafe extern "C" fn get_buffer_type(dev: ggml_backend_dev_t) -> ggml_backend_buffer_type_t {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_dev_buffer_type(wrapper(dev).inner) }
}

unsafe extern "C" fn get_host_buffer_type(dev: ggml_backend_dev_t) -> ggml_backend_buffer_type_t {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_dev_host_buffer_type(wrapper(dev).inner) }
}

unsafe extern "C" fn buffer_from_host_ptr(
    dev: ggml_backend_dev_t,
    ptr: *mut c_void,
    size: usize,
    max_tensor_size: usize,
) -> llama::ggml_backend_buffer_t {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_dev_buffer_from_host_ptr(wrapper(dev).inner, ptr, size, max_tensor_size) }
}

unsafe extern "C" fn supports_op(dev: ggml_backend_dev_t, op: *const ggml_tensor) -> bool {
    // SAFETY: see above; nodes and their sources are live.
    unsafe {
        let wrapper = wrapper(dev);
        let node = &*op;
        let src = node.src[0];
        if node.op != llama::GGML_OP_MUL_MAT_ID || !is_expert_tensor(src, wrapper.buffer_type) {
            return llama::ggml_backend_dev_supports_op(wrapper.inner, op);
        }
        // The inner device knows nothing of the buffer: it is asked about weights of its own.
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

unsafe extern "C" fn offload_op(dev: ggml_backend_dev_t, op: *const ggml_tensor) -> bool {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_dev_offload_op(wrapper(dev).inner, op) }
}

unsafe extern "C" fn event_new(dev: ggml_backend_dev_t) -> ggml_backend_event_t {
    // SAFETY: see above.
    unsafe {
        let (inner, iface) = inner_interface(dev);
        iface.event_new.map_or(ptr::null_mut(), |new| new(inner))
    }
}

unsafe extern "C" fn event_free(dev: ggml_backend_dev_t, event: ggml_backend_event_t) {
    // SAFETY: see above.
    unsafe {
        let (inner, iface) = inner_interface(dev);
        if let Some(free) = iface.event_free {
            free(inner, event);
        }
    }
}

unsafe extern "C" fn event_synchronize(dev: ggml_backend_dev_t, event: ggml_backend_event_t) {
    // SAFETY: see above.
    unsafe {
        let (inner, iface) = inner_interface(dev);
        if let Some(synchronize) = iface.event_synchronize {
            synchronize(inner, event);
        }
    }
}
