//! The expert backend as ggml sees it: one device of type ACCEL, registered once per process.
//!
//! llama.cpp gives every context one backend of each ACCEL device, and ggml's scheduler runs a node where its weights
//! are: every `MUL_MAT_ID` on an expert tensor comes to us, and the element-wise nodes fed by it come along, so that an
//! expert FFN arrives as one split. So does every `GET_ROWS` on a table that stays in the file. The device's own buffer
//! type is the CPU backend's: ordinary weights stay away, and our results are in host memory that the CPU backend reads
//! without a copy.
//!
//! From a model that llama.cpp runs alone, the device takes products that llama.cpp would multiply by slower kernels:
//! batches with enough rows per expert, on weights in its mapped file. llama.cpp's graphs for single tokens have no
//! nodes for the device.

use std::ffi::c_char;
use std::ptr;
use std::sync::OnceLock;

use ggml_sys::backend as ffi;
use ggml_sys::llama::{self, ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_backend_t};

use crate::engine::cpu::backend::{ExpertBackend, ROWS_MIN, may_be_plain};
use crate::engine::error::DeviceError;
use crate::engine::ggml::graph::is_view;
use crate::engine::seam::buffer::{is_expert_tensor, table_of};
use crate::engine::seam::calling::{self, Purpose};
use crate::engine::seam::registration::{NAME, Registration, backend};
use hobbit_core::route::DECODE_TOKENS_MAX;

/// Maximum number of nodes that `supports_op` follows back to an expert product.
const CHAIN_DEPTH_MAX: usize = 13;

/// The registered device.
pub(crate) struct Device {
    /// Buffer type of expert tensors.
    pub(crate) buffer_type: ggml_backend_buffer_type_t,
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
    /// [`DeviceError::Abi`] when C and Rust disagree about the structs they share.
    pub(crate) fn get() -> Result<&'static Device, DeviceError> {
        DEVICE.get_or_init(register).as_ref().map_err(|message| DeviceError::Abi(message.clone()))
    }
}

fn register() -> Result<Device, String> {
    ggml_sys::check_abi()?;
    // SAFETY: no ggml call of ours is running yet that could abort.
    unsafe { ggml_sys::shim::hobbit_guard_aborts() };
    let Registration { reg, device, buffer_type } = Registration::new::<ExpertBackend>(ffi::ggml_backend_device_i {
        get_name: Some(device_name),
        get_description: Some(device_description),
        get_memory: Some(device_memory),
        get_type: Some(device_type),
        get_props: Some(device_props),
        init_backend: Some(init_backend),
        get_buffer_type: Some(device_buffer_type),
        supports_op: Some(supports_op),
        supports_buft: Some(supports_buft),
        ..ffi::ggml_backend_device_i::default()
    });
    // SAFETY: all three are leaked, fully initialised, and point at each other before ggml sees them.
    unsafe {
        (*device).context = buffer_type.cast();
        llama::ggml_backend_register(reg.cast());
    }
    Ok(Device { buffer_type: buffer_type.cast() })
}

/// # Safety
/// `dev` is our device.
unsafe fn expert_buffer_type(dev: ggml_backend_dev_t) -> ggml_backend_buffer_type_t {
    // SAFETY: `register` put the buffer type there.
    unsafe { (*dev.cast::<ffi::ggml_backend_device>()).context.cast() }
}

unsafe extern "C" fn device_name(_: ggml_backend_dev_t) -> *const c_char {
    NAME.as_ptr()
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

/// The CPU's, or the pinned one that llama.cpp gives the CPU backend of a context with devices: ggml's scheduler copies
/// our results to them, a prompt's embeddings among others.
unsafe extern "C" fn device_buffer_type(_: ggml_backend_dev_t) -> ggml_backend_buffer_type_t {
    let device = Purpose::current().and_then(|purpose| purpose.pinned_by);
    // SAFETY: a registered device, and its buffer type.
    unsafe {
        let pinned = device.map(|device| llama::ggml_backend_dev_host_buffer_type(device.0));
        let pinned = pinned.filter(|&buft| !buft.is_null() && llama::ggml_backend_buft_is_host(buft));
        pinned.unwrap_or_else(|| llama::ggml_backend_cpu_buffer_type())
    }
}

unsafe extern "C" fn supports_buft(dev: ggml_backend_dev_t, buft: ggml_backend_buffer_type_t) -> bool {
    // SAFETY: ggml passes our device and a live buffer type.
    unsafe { buft == expert_buffer_type(dev) || llama::ggml_backend_buft_is_host(buft) }
}

/// Whether a node is a product of llama.cpp's own expert tensor with enough rows that plain kernels may be faster, or
/// of a batch that we must see.
///
/// # Safety
/// A node of a live graph.
unsafe fn is_batch(node: &llama::ggml_tensor) -> bool {
    let Some(Purpose { kernels, takes_batches: true, gives_back, .. }) = Purpose::current() else { return false };
    // SAFETY: sources of a live node are live, and so are their buffers.
    unsafe {
        let [Some(weights), Some(input), Some(ids)] = [node.src[0], node.src[1], node.src[2]].map(|src| src.as_ref())
        else {
            return false;
        };
        let [ne0, ne1, n_expert, _] = weights.ne;
        let rows = ids.ne[0].saturating_mul(ids.ne[1]);
        let pays =
            || rows >= n_expert.saturating_mul(ROWS_MIN as i64) && may_be_plain(kernels, weights.type_, ne0, ne1);
        (gives_back && ids.ne[1] > DECODE_TOKENS_MAX as i64 || pays())
            && (input.type_, input.nb[0]) == (llama::GGML_TYPE_F32, size_of::<f32>())
            // Weights that llama.cpp has rearranged are not in host memory.
            && weights.view_src.is_null()
            && !weights.buffer.is_null()
            && llama::ggml_backend_buft_is_host(llama::ggml_backend_buffer_get_type(weights.buffer))
    }
}

/// Whether a node is an expert product, an element-wise node fed by one, reads rows of a table, or is a weight or view:
/// nothing to compute.
unsafe extern "C" fn supports_op(dev: ggml_backend_dev_t, op: *const llama::ggml_tensor) -> bool {
    // SAFETY: ggml passes our device and a node of a live graph, whose sources are live.
    unsafe {
        let buft = expert_buffer_type(dev);
        is_view((*op).op) || is_fed_by_expert(op, buft, CHAIN_DEPTH_MAX) || table_of(op, buft).is_some()
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
            llama::GGML_OP_MUL_MAT_ID => is_expert_tensor(node.src[0], buft) || is_batch(node),
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

static GUID: [u8; 16] = *b"hobbit-experts-1";

unsafe extern "C" fn init_backend(dev: ggml_backend_dev_t, _params: *const c_char) -> ggml_backend_t {
    // SAFETY: ggml passes our device.
    let buft = unsafe { expert_buffer_type(dev) };
    let kernels = Purpose::current().unwrap_or_default().kernels;
    let Some(experts) = ExpertBackend::new(buft, kernels) else { return ptr::null_mut() };
    calling::count_backend();
    backend(&GUID, dev, experts, ffi::ggml_backend_i { get_name: Some(backend_name), ..ffi::ggml_backend_i::default() })
}

unsafe extern "C" fn backend_name(_: ggml_backend_t) -> *const c_char {
    NAME.as_ptr()
}
