//! Experts on a device with its own memory.
//!
//! In place of a ggml device, llama.cpp gets a wrapper around it: same name, memory, buffers and operations, plus the
//! products of expert tensors in the expert buffer type. A layer thus stays one split on its device, with nothing
//! copied and a single wait, for the router's choice. The wrapper passes other nodes of each graph on, and computes
//! expert products from device slots (`memory::device_tier`), which are filled from the host's (`memory::tiers`).
//!
//! The wrapper uses the generic backend interface only, so it works with every ggml device.

mod compute;
mod early;
mod helper;
mod launch;

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use ggml_sys::backend as ffi;
use ggml_sys::llama::{
    self, ggml_backend_buffer_t, ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_backend_event_t, ggml_backend_t,
    ggml_tensor,
};

use crate::engine::cpu::expert_device::Device;
use crate::engine::ggml::graph::tensor_at;
use crate::engine::ggml::{self, Stream};
use crate::engine::memory::gates;
use crate::engine::seam::buffer::{is_expert_tensor, tag_of};
use crate::engine::seam::experts::ExpertTag;
use crate::engine::seam::layer_router;
use crate::engine::seam::registration::{Registration, backend, context};
use compute::Offload;

/// Nodes from a layer's first expert product among which the others with its input are looked for.
const LAYER_NODES_MAX: usize = 16;

/// Number of rows in queries about batches.
const SOME_ROWS: i64 = 8;

/// A ggml device with experts on it. Leaked: devices live as long as the process.
#[derive(Debug)]
pub(crate) struct Wrapper {
    /// The device that llama.cpp gets.
    pub(crate) raw: ggml_backend_dev_t,
    /// The device itself.
    pub(crate) inner: ggml_backend_dev_t,
    /// Where expert tensors of the device's layers are placed.
    pub(crate) buffer_type: ggml_backend_buffer_type_t,
    pub(crate) name: String,
    /// Whether it belongs to an RPC server.
    pub(crate) is_remote: bool,
}

// SAFETY: never written after it was made.
unsafe impl Send for Wrapper {}
// SAFETY: as above.
unsafe impl Sync for Wrapper {}

impl Wrapper {
    /// Whether the device multiplies by weights `[ne0, ne1, n_expert]` of this type, for one token and for several, and
    /// gathers and scatters their rows.
    pub(crate) fn multiplies(&self, type_: llama::ggml_type, ne: [u64; 3]) -> bool {
        let ne = ne.map(|n| n as i64);
        let none = ptr::null_mut();
        let tensor =
            |type_, ne: [i64; 3]| Box::new(tensor_at(type_, [ne[0], ne[1], ne[2], 1], ptr::null_mut(), none, None));
        let (f32, i32) = (llama::GGML_TYPE_F32, llama::GGML_TYPE_I32);
        let does = |op, mut node: Box<ggml_tensor>, sources: &mut [Box<ggml_tensor>]| {
            node.op = op;
            node.src.iter_mut().zip(sources).for_each(|(src, source)| *src = &raw mut **source);
            // SAFETY: the node and its sources are live; they have no buffer, so only shapes and types can matter.
            unsafe { llama::ggml_backend_dev_supports_op(self.inner, &*node) }
        };
        [1, SOME_ROWS].into_iter().all(|n| {
            let sources = &mut [tensor(type_, ne), tensor(f32, [ne[0], 1, n]), tensor(i32, [1, n, 1])];
            does(llama::GGML_OP_MUL_MAT_ID, tensor(f32, [ne[1], 1, n]), sources)
        }) && does(
            llama::GGML_OP_GET_ROWS,
            tensor(f32, [ne[0], SOME_ROWS, 1]),
            &mut [tensor(f32, [ne[0], SOME_ROWS, 1]), tensor(i32, [SOME_ROWS, 1, 1])],
        ) && does(
            llama::GGML_OP_SET_ROWS,
            tensor(f32, [ne[1], SOME_ROWS, 1]),
            &mut [tensor(f32, [ne[1], SOME_ROWS, 1]), tensor(llama::GGML_TYPE_I64, [SOME_ROWS, 1, 1])],
        )
    }
}

impl Wrapper {
    /// Where expert tensors are placed that the CPU computes; null before the expert device is registered.
    pub(crate) fn cpu_buffer_type(&self) -> ggml_backend_buffer_type_t {
        Device::get().map_or(ptr::null_mut(), |device| device.buffer_type)
    }

    /// The layer and matrix of an expert product that comes to this device.
    ///
    /// # Safety
    /// As [`tag_of`].
    pub(crate) unsafe fn product<'a>(&self, node: *const ggml_tensor) -> Option<&'a ExpertTag> {
        // SAFETY: by the caller.
        unsafe { tag_of(node, self.buffer_type).or_else(|| tag_of(node, self.cpu_buffer_type())) }
    }

    /// Whether the device asks for products of weights in host memory.
    pub(crate) fn offloads(&self) -> bool {
        // SAFETY: a registered device.
        unsafe { (*self.inner.cast::<ffi::ggml_backend_device>()).iface.offload_op.is_some() }
    }

    /// The wrapper of a registered device; each device has one.
    pub(crate) fn of(inner: ggml_backend_dev_t) -> &'static Wrapper {
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

/// # Safety
/// `dev` is a wrapper's.
unsafe fn wrapper(dev: ggml_backend_dev_t) -> &'static Wrapper {
    // SAFETY: by the caller; `Wrapper::of` put the wrapper there.
    unsafe { &*(*dev.cast::<ffi::ggml_backend_device>()).context.cast::<Wrapper>() }
}

/// `name(arguments) -> result = function;` for each function of the interface whose first argument is `$outer`: ggml's
/// `function`, asked about what `$inner` makes of it.
macro_rules! forward {
    ($outer:ty => $inner:expr; $($name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? = $function:ident;)*) => {$(
        unsafe extern "C" fn $name(outer: $outer, $($arg: $type),*) $(-> $result)? {
            // SAFETY: ggml passes a live wrapper, and arguments that the function takes.
            unsafe { llama::$function($inner(outer), $($arg),*) }
        }
    )*};
}

// The device.

fn interface(inner: ggml_backend_dev_t) -> ffi::ggml_backend_device_i {
    // SAFETY: a registered device.
    let has = unsafe { &(*inner.cast::<ffi::ggml_backend_device>()).iface };
    ffi::ggml_backend_device_i {
        get_name: Some(get_name),
        get_description: Some(get_description),
        get_memory: Some(get_memory),
        get_type: Some(get_type),
        get_props: Some(get_props),
        init_backend: Some(init_backend),
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
        let on_cpu = |tensor: *const ggml_tensor| is_expert_tensor(tensor, wrapper.cpu_buffer_type());
        if on_cpu(op) || node.src.iter().any(|&src| on_cpu(src)) {
            let layer = tag_of(op, wrapper.cpu_buffer_type())
                .filter(|tag| tag.experts.is_offloaded(tag.layer, ggml::Device(dev)));
            if layer.is_none() || !llama::ggml_backend_dev_offload_op(wrapper.inner, op) {
                return false;
            }
        } else if node.op != llama::GGML_OP_MUL_MAT_ID || !is_expert_tensor(src, wrapper.buffer_type) {
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
        [wrapper.buffer_type, wrapper.cpu_buffer_type()].contains(&buft)
            || llama::ggml_backend_dev_supports_buft(wrapper.inner, buft)
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

// The backend: the inner device's, except for the products of experts.

static GUID: [u8; 16] = *b"hobbit-offload-1";

unsafe extern "C" fn init_backend(dev: ggml_backend_dev_t, _params: *const c_char) -> ggml_backend_t {
    // SAFETY: ggml passes a wrapper's device.
    let wrapper = unsafe { wrapper(dev) };
    let Some(offload) = Stream::new(wrapper.inner).and_then(|stream| Offload::new(wrapper, stream)) else {
        return ptr::null_mut();
    };
    let has = offload.stream().interface();
    let iface = ffi::ggml_backend_i {
        get_name: Some(backend_name),
        set_tensor_async: has.set_tensor_async.map(|_| set_tensor_async as _),
        get_tensor_async: has.get_tensor_async.map(|_| get_tensor_async as _),
        set_tensor_2d_async: has.set_tensor_2d_async.map(|_| set_tensor_2d_async as _),
        get_tensor_2d_async: has.get_tensor_2d_async.map(|_| get_tensor_2d_async as _),
        cpy_tensor_async: has.cpy_tensor_async.map(|_| cpy_tensor_async as _),
        synchronize: has.synchronize.map(|_| synchronize as _),
        event_record: has.event_record.map(|_| event_record as _),
        event_wait: has.event_wait.map(|_| event_wait as _),
        graph_optimize: Some(graph_optimize),
        ..ffi::ggml_backend_i::default()
    };
    backend(&GUID, dev, offload, iface)
}

/// # Safety
/// `backend` was made by [`init_backend`] and not freed.
unsafe fn inner_backend(backend: ggml_backend_t) -> ggml_backend_t {
    // SAFETY: by the caller.
    unsafe { (&*context::<Offload>(backend)).stream().raw() }
}

// Those that the inner backend lacks are not offered.
forward! { ggml_backend_t => inner_backend;
    backend_name() -> *const c_char = ggml_backend_name;
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
        if ptr::eq(guid.cast_const().cast(), &raw const GUID) { inner_backend(backend) } else { backend }
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

/// Keeps a router's logits while the host may read them: until the last of the layer's expert products that have the
/// first one's input. It reorders no nodes, so that a layer's products stay together.
unsafe extern "C" fn graph_optimize(
    backend: ggml_backend_t,
    graph: *mut llama::ggml_cgraph,
    params: *mut ffi::ggml_backend_graph_optimize_params,
) {
    // SAFETY: see above; the graph's nodes are live, and the parameters' function takes nodes of the graph.
    unsafe {
        let params = &*params;
        let (Some(keep), nodes) = (params.add_alloc_dep, layer_router::nodes_of(graph)) else { return };
        let wrapper = (&*context::<Offload>(backend)).wrapper();
        let mut last = None;
        for (position, &node) in nodes.iter().enumerate() {
            let Some(tag) = wrapper.product(node).filter(|tag| last != Some(tag.layer)) else { continue };
            last = Some(tag.layer);
            if let Some(logits) = gates::logits_of(&nodes[..position], tag.layer) {
                let has_same_input = |&&other: &&*mut ggml_tensor| {
                    wrapper.product(other).is_some_and(|own| own.layer == tag.layer)
                        && (*other).src[1] == (*node).src[1]
                };
                let behind = &nodes[position..nodes.len().min(position + LAYER_NODES_MAX)];
                let reader = behind.iter().rfind(has_same_input).copied().unwrap_or(node);
                keep(params.user_data, nodes[logits], reader);
            }
        }
    }
}

unsafe extern "C" fn event_record(backend: ggml_backend_t, event: ggml_backend_event_t) {
    // SAFETY: see above.
    unsafe { llama::ggml_backend_event_record(event, inner_backend(backend)) };
}
