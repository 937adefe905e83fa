//! Registration of our devices and backends with ggml: fills in the structs of `ggml-backend-impl.h`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use ggml_sys::backend as ffi;
use ggml_sys::llama::{self, ggml_backend_dev_t, ggml_backend_reg_t, ggml_backend_t};

use crate::engine::seam::buffer::buffer_type_interface;
use crate::engine::seam::layer_router::Failed;

/// ggml's name for our devices without a name of their own, and for their backends.
pub(crate) const NAME: &CStr = c"HOBBIT";

/// Operations of a backend of ours.
pub(crate) trait Computes {
    fn set_n_threads(&mut self, n_threads: c_int);

    fn set_abort_callback(&mut self, callback: llama::ggml_abort_callback, data: *mut c_void);

    /// Computes a split.
    ///
    /// # Safety
    /// The graph's nodes and their sources are live and allocated where the backend computes, expert tensors excepted.
    unsafe fn graph_compute(&mut self, graph: *mut llama::ggml_cgraph) -> Result<(), Failed>;
}

/// A device with its own registration and a buffer type for expert tensors. It is leaked, because devices live as long
/// as the process. ggml does not know it yet.
pub(crate) struct Registration {
    pub(crate) reg: *mut ffi::ggml_backend_reg,
    pub(crate) device: *mut ffi::ggml_backend_device,
    pub(crate) buffer_type: *mut ffi::ggml_backend_buffer_type,
}

impl Registration {
    /// A device whose backends are `B`s.
    pub(crate) fn new<B: Computes>(iface: ffi::ggml_backend_device_i) -> Self {
        let reg = ptr::from_mut(Box::leak(Box::new(ffi::ggml_backend_reg {
            api_version: ffi::GGML_BACKEND_API_VERSION as c_int,
            iface: ffi::ggml_backend_reg_i {
                get_name: Some(reg_name),
                get_device_count: Some(reg_device_count),
                get_device: Some(reg_device),
                get_proc_address: Some(reg_proc_address::<B>),
            },
            context: ptr::null_mut(),
        })));
        let device = ffi::ggml_backend_device { iface, reg: reg.cast(), context: ptr::null_mut() };
        let device = ptr::from_mut(Box::leak(Box::new(device)));
        let buffer_type = ptr::from_mut(Box::leak(Box::new(ffi::ggml_backend_buffer_type {
            iface: buffer_type_interface(),
            device: device.cast(),
            context: buffer_type_name().into_raw().cast(),
        })));
        // SAFETY: leaked just above, and not used by any other code yet.
        unsafe { (*reg).context = device.cast() };
        Self { reg, device, buffer_type }
    }
}

/// A name of its own for each buffer type: llama.cpp puts tensors whose buffer types have equal names into one buffer.
fn buffer_type_name() -> CString {
    static N: AtomicUsize = AtomicUsize::new(0);
    let name = format!("{}{}", NAME.to_string_lossy(), N.fetch_add(1, Ordering::Relaxed));
    CString::new(name).expect("a constant and digits")
}

/// Hands `computes` to ggml as a backend of `dev`; `iface` holds the callbacks that [`Computes`] does not cover.
pub(crate) fn backend<B: Computes>(
    guid: &'static [u8; 16],
    dev: ggml_backend_dev_t,
    computes: B,
    iface: ffi::ggml_backend_i,
) -> ggml_backend_t {
    Box::into_raw(Box::new(ffi::ggml_backend {
        guid: ptr::from_ref(guid).cast_mut().cast(),
        iface: ffi::ggml_backend_i { free: Some(free::<B>), graph_compute: Some(graph_compute::<B>), ..iface },
        device: dev,
        context: Box::into_raw(Box::new(computes)).cast(),
    }))
    .cast()
}

/// The `B` of a backend, as a pointer, because some callbacks may only read it. One thread uses a backend at a time.
///
/// # Safety
/// `backend` was made by [`backend`] of a `B` and not freed.
pub(crate) unsafe fn context<B>(backend: ggml_backend_t) -> *mut B {
    // SAFETY: by the caller.
    unsafe { (*backend.cast::<ffi::ggml_backend>()).context.cast() }
}

unsafe extern "C" fn reg_name(_: ggml_backend_reg_t) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn reg_device_count(_: ggml_backend_reg_t) -> usize {
    1
}

unsafe extern "C" fn reg_device(reg: ggml_backend_reg_t, _index: usize) -> ggml_backend_dev_t {
    // SAFETY: `Registration::new` put the device there.
    unsafe { (*reg.cast::<ffi::ggml_backend_reg>()).context.cast() }
}

unsafe extern "C" fn reg_proc_address<B: Computes>(_: ggml_backend_reg_t, name: *const c_char) -> *mut c_void {
    // SAFETY: ggml passes a NUL-terminated name.
    match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"ggml_backend_set_n_threads" => set_n_threads::<B> as *mut c_void,
        b"ggml_backend_set_abort_callback" => set_abort_callback::<B> as *mut c_void,
        _ => ptr::null_mut(),
    }
}

// SAFETY of the functions below: ggml and llama.cpp pass a live backend that `backend` made from a `B`, and make no
// other call on it meanwhile.

unsafe extern "C" fn free<B>(backend: ggml_backend_t) {
    // SAFETY: called once, last; takes back what `backend` made.
    unsafe {
        let backend = Box::from_raw(backend.cast::<ffi::ggml_backend>());
        drop(Box::from_raw(backend.context.cast::<B>()));
    }
}

unsafe extern "C" fn set_n_threads<B: Computes>(backend: ggml_backend_t, n_threads: c_int) {
    // SAFETY: see above.
    unsafe { &mut *context::<B>(backend) }.set_n_threads(n_threads);
}

unsafe extern "C" fn set_abort_callback<B: Computes>(
    backend: ggml_backend_t,
    callback: llama::ggml_abort_callback,
    data: *mut c_void,
) {
    // SAFETY: see above; callback and data stay valid as long as the context.
    unsafe { &mut *context::<B>(backend) }.set_abort_callback(callback, data);
}

unsafe extern "C" fn graph_compute<B: Computes>(
    backend: ggml_backend_t,
    graph: *mut llama::ggml_cgraph,
) -> llama::ggml_status {
    // SAFETY: see above; ggml passes a graph whose nodes are live and allocated.
    catch_unwind(AssertUnwindSafe(|| unsafe { (&mut *context::<B>(backend)).graph_compute(graph) }))
        .map_or(llama::GGML_STATUS_FAILED, |computed| computed.err().unwrap_or(llama::GGML_STATUS_SUCCESS))
}
