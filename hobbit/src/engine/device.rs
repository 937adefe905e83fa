//! The expert backend as ggml sees it: one device of type ACCEL, registered once per process.
//!
//! llama.cpp gives every context one backend of each ACCEL device, and ggml's scheduler runs a node where its weights
//! are: every `MUL_MAT_ID` on an expert tensor comes to us, and the element-wise nodes fed by it come along, so that
//! an expert FFN arrives as one split. The device's own buffer type is the CPU's: ordinary weights stay away, and
//! what we compute is host memory that the CPU backend reads without a copy.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::OnceLock;

use ggml_sys::backend as ffi;
use ggml_sys::llama::{self, ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_backend_reg_t, ggml_backend_t};

use super::buffer::{buffer_type_interface, is_expert_tensor};
use super::compute::ExpertBackend;
use super::error::Error;

/// How far `supports_op` looks back through element-wise nodes for an expert product.
const CHAIN_DEPTH_MAX: usize = 12;

/// The registered device.
pub(super) struct Device {
    buffer_type: ggml_backend_buffer_type_t,
}

// SAFETY: leaked for the life of the process and never written after registration.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

static DEVICE: OnceLock<Result<Device, String>> = OnceLock::new();

impl Device {
    /// Registers the expert device with ggml, once.
    ///
    /// # Errors
    /// [`Error::Seam`] when C and Rust disagree about the structs they share.
    pub(super) fn get() -> Result<&'static Device, Error> {
        DEVICE.get_or_init(register).as_ref().map_err(|message| Error::Seam(message.clone()))
    }

    /// The buffer type that expert tensors are placed in.
    pub(super) fn buffer_type(&self) -> ggml_backend_buffer_type_t {
        self.buffer_type
    }
}

fn register() -> Result<Device, String> {
    ggml_sys::check_abi()?;
    // SAFETY: no ggml call of ours is running yet that could abort.
    unsafe { ggml_sys::shim::hobbit_guard_aborts() };
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
        iface: device_interface(),
        reg: reg.cast(),
        context: ptr::null_mut(),
    }));
    let buffer_type: *mut ffi::ggml_backend_buffer_type = Box::leak(Box::new(ffi::ggml_backend_buffer_type {
        iface: buffer_type_interface(),
        device: device.cast(),
        context: ptr::null_mut(),
    }));
    // SAFETY: all three are leaked, fully initialised, and point at each other before ggml sees them.
    unsafe {
        (*reg).context = device.cast();
        (*device).context = buffer_type.cast();
        llama::ggml_backend_register(reg.cast());
    }
    Ok(Device { buffer_type: buffer_type.cast() })
}

fn device_interface() -> ffi::ggml_backend_device_i {
    ffi::ggml_backend_device_i {
        get_name: Some(device_name),
        get_description: Some(device_description),
        get_memory: Some(device_memory),
        get_type: Some(device_type),
        get_props: Some(device_props),
        init_backend: Some(init_backend),
        get_buffer_type: Some(device_buffer_type),
        get_host_buffer_type: None,
        buffer_from_host_ptr: None,
        supports_op: Some(supports_op),
        supports_buft: Some(supports_buft),
        offload_op: None,
        event_new: None,
        event_free: None,
        event_synchronize: None,
    }
}

/// # Safety
/// `dev` is our device.
unsafe fn expert_buffer_type(dev: ggml_backend_dev_t) -> ggml_backend_buffer_type_t {
    // SAFETY: `register` put the buffer type there.
    unsafe { (*dev.cast::<ffi::ggml_backend_device>()).context.cast() }
}

unsafe extern "C" fn reg_name(_: ggml_backend_reg_t) -> *const c_char {
    c"HOBBIT".as_ptr()
}

unsafe extern "C" fn reg_device_count(_: ggml_backend_reg_t) -> usize {
    1
}

unsafe extern "C" fn reg_device(reg: ggml_backend_reg_t, _index: usize) -> ggml_backend_dev_t {
    // SAFETY: `register` put the device there.
    unsafe { (*reg.cast::<ffi::ggml_backend_reg>()).context.cast() }
}

unsafe extern "C" fn reg_proc_address(_: ggml_backend_reg_t, name: *const c_char) -> *mut c_void {
    // SAFETY: ggml passes a NUL-terminated name.
    match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"ggml_backend_set_n_threads" => set_n_threads as *mut c_void,
        b"ggml_backend_set_abort_callback" => set_abort_callback as *mut c_void,
        _ => ptr::null_mut(),
    }
}

unsafe extern "C" fn device_name(_: ggml_backend_dev_t) -> *const c_char {
    c"HOBBIT".as_ptr()
}

unsafe extern "C" fn device_description(_: ggml_backend_dev_t) -> *const c_char {
    c"hobbit expert offloading".as_ptr()
}

unsafe extern "C" fn device_memory(_: ggml_backend_dev_t, free: *mut usize, total: *mut usize) {
    // SAFETY: ggml passes valid places.
    unsafe {
        *free = 0;
        *total = 0;
    }
}

unsafe extern "C" fn device_type(_: ggml_backend_dev_t) -> llama::ggml_backend_dev_type {
    llama::GGML_BACKEND_DEVICE_TYPE_ACCEL
}

unsafe extern "C" fn device_props(dev: ggml_backend_dev_t, props: *mut llama::ggml_backend_dev_props) {
    // SAFETY: ggml passes a valid place; zero is a valid value of every field.
    unsafe {
        ptr::write_bytes(props, 0, 1);
        (*props).name = device_name(dev);
        (*props).description = device_description(dev);
        (*props).type_ = llama::GGML_BACKEND_DEVICE_TYPE_ACCEL;
    }
}

unsafe extern "C" fn device_buffer_type(_: ggml_backend_dev_t) -> ggml_backend_buffer_type_t {
    // SAFETY: no arguments, no state.
    unsafe { llama::ggml_backend_cpu_buffer_type() }
}

unsafe extern "C" fn supports_buft(dev: ggml_backend_dev_t, buft: ggml_backend_buffer_type_t) -> bool {
    // SAFETY: ggml passes our device and a live buffer type.
    unsafe { buft == expert_buffer_type(dev) || llama::ggml_backend_buft_is_host(buft) }
}

unsafe extern "C" fn supports_op(dev: ggml_backend_dev_t, op: *const llama::ggml_tensor) -> bool {
    // SAFETY: ggml passes our device and a node of a live graph, whose sources are live.
    unsafe { is_ours(op, expert_buffer_type(dev), CHAIN_DEPTH_MAX) }
}

/// Whether a node is an expert product, or an element-wise node fed by one.
///
/// # Safety
/// `op` is null or a live tensor with live sources.
unsafe fn is_ours(op: *const llama::ggml_tensor, buft: ggml_backend_buffer_type_t, depth: usize) -> bool {
    // SAFETY: by the caller.
    let Some(node) = (unsafe { op.as_ref() }) else { return false };
    match node.op {
        // A weight of ours, or a view: nothing to compute.
        llama::GGML_OP_NONE
        | llama::GGML_OP_VIEW
        | llama::GGML_OP_RESHAPE
        | llama::GGML_OP_PERMUTE
        | llama::GGML_OP_TRANSPOSE => true,
        // SAFETY: sources of a live node are live.
        llama::GGML_OP_MUL_MAT_ID => unsafe { is_expert_tensor(node.src[0], buft) },
        _ if is_elementwise(node.op) => {
            // SAFETY: sources of a live node are live.
            node.src.iter().take(2).any(|src| unsafe { is_fed_by_expert(*src, buft, depth) })
        }
        _ => false,
    }
}

/// # Safety
/// `tensor` is null or a live tensor with live sources.
unsafe fn is_fed_by_expert(tensor: *const llama::ggml_tensor, buft: ggml_backend_buffer_type_t, depth: usize) -> bool {
    // SAFETY: by the caller.
    let Some(node) = (unsafe { tensor.as_ref() }) else { return false };
    if depth == 0 {
        return false;
    }
    // SAFETY: sources of a live node are live.
    unsafe {
        match node.op {
            llama::GGML_OP_MUL_MAT_ID => is_expert_tensor(node.src[0], buft),
            llama::GGML_OP_VIEW | llama::GGML_OP_RESHAPE => is_fed_by_expert(node.src[0], buft, depth - 1),
            op if is_elementwise(op) => node.src.iter().take(2).any(|src| is_fed_by_expert(*src, buft, depth - 1)),
            _ => false,
        }
    }
}

fn is_elementwise(op: llama::ggml_op) -> bool {
    matches!(
        op,
        llama::GGML_OP_GLU
            | llama::GGML_OP_ADD_ID
            | llama::GGML_OP_MUL
            | llama::GGML_OP_CLAMP
            | llama::GGML_OP_UNARY
            | llama::GGML_OP_SQR
            | llama::GGML_OP_SCALE
    )
}

thread_local! {
    static N_BACKENDS: Cell<usize> = const { Cell::new(0) };
}

/// Backends of the device that were made on this thread: one more by a context that has one.
pub(super) fn n_backends_made() -> usize {
    N_BACKENDS.get()
}

static GUID: [u8; 16] = *b"hobbit-experts-1";

unsafe extern "C" fn init_backend(dev: ggml_backend_dev_t, _params: *const c_char) -> ggml_backend_t {
    // SAFETY: ggml passes our device.
    let buft = unsafe { expert_buffer_type(dev) };
    let Some(backend) = ExpertBackend::new(buft) else { return ptr::null_mut() };
    N_BACKENDS.set(N_BACKENDS.get() + 1);
    let context = Box::into_raw(Box::new(backend));
    Box::into_raw(Box::new(ffi::ggml_backend {
        guid: (&raw const GUID).cast_mut().cast(),
        iface: ffi::ggml_backend_i {
            get_name: Some(backend_name),
            free: Some(backend_free),
            set_tensor_async: None,
            get_tensor_async: None,
            set_tensor_2d_async: None,
            get_tensor_2d_async: None,
            cpy_tensor_async: None,
            synchronize: None,
            graph_plan_create: None,
            graph_plan_free: None,
            graph_plan_update: None,
            graph_plan_compute: None,
            graph_compute: Some(graph_compute),
            event_record: None,
            event_wait: None,
            graph_optimize: None,
        },
        device: dev,
        context: context.cast(),
    }))
    .cast()
}

/// # Safety
/// `backend` was made by `init_backend` and not freed; one thread uses a backend at a time.
unsafe fn backend_context<'a>(backend: ggml_backend_t) -> &'a mut ExpertBackend {
    // SAFETY: by the caller.
    unsafe { &mut *(*backend.cast::<ffi::ggml_backend>()).context.cast::<ExpertBackend>() }
}

unsafe extern "C" fn backend_name(_: ggml_backend_t) -> *const c_char {
    c"HOBBIT".as_ptr()
}

unsafe extern "C" fn backend_free(backend: ggml_backend_t) {
    // SAFETY: called once, last; takes back what `init_backend` made.
    unsafe {
        let backend = Box::from_raw(backend.cast::<ffi::ggml_backend>());
        drop(Box::from_raw(backend.context.cast::<ExpertBackend>()));
    }
}

/// llama.cpp calls this last before it computes a graph, for every context.
unsafe extern "C" fn set_n_threads(backend: ggml_backend_t, n_threads: c_int) {
    // SAFETY: llama.cpp passes a backend of ours.
    unsafe {
        backend_context(backend).set_n_threads(n_threads);
        ggml_sys::shim::hobbit_computing();
    }
}

unsafe extern "C" fn set_abort_callback(
    backend: ggml_backend_t,
    callback: llama::ggml_abort_callback,
    data: *mut c_void,
) {
    // SAFETY: llama.cpp passes a backend of ours; callback and data stay valid as long as the context.
    unsafe { backend_context(backend).set_abort_callback(callback, data) };
}

unsafe extern "C" fn graph_compute(backend: ggml_backend_t, graph: *mut llama::ggml_cgraph) -> llama::ggml_status {
    catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: ggml passes a backend of ours and a graph whose nodes are live and allocated.
        unsafe { backend_context(backend).graph_compute(graph) }
    }))
    .unwrap_or(llama::GGML_STATUS_FAILED)
}
