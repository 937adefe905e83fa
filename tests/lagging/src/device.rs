//! The device: the handle of tests, and the interface for ggml's registry.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use ggml_sys::backend as ffi;
use ggml_sys::llama::{
    self, ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_backend_reg_t, ggml_backend_t, ggml_status, ggml_tensor,
};

use crate::memory::{buffer_of, device_buffer_type, host_buffer_type};
use crate::schedule::Sharing;
use crate::shared::{Pointers, Shared};
use crate::{Options, Pinned, stream};

/// How many devices a process can have.
pub const DEVICES_MAX: usize = 136;
/// From this many tokens on, CUDA asks for products of weights that are not on the device.
const OFFLOAD_TOKENS_MIN: i64 = 32;

/// A registered device. Lives as long as the process; handles are copies.
#[derive(Clone, Copy)]
pub struct Device {
    shared: &'static Shared,
}

/// Work of a device since [`Device::reset`], in virtual seconds, bytes and calls.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// The host's virtual time: its work and its waits.
    pub host_time: f64,
    /// Seconds the link was busy.
    pub copy_busy: f64,
    /// Seconds of graphs, all streams added up.
    pub compute_busy: f64,
    /// Bytes copied, up and down, synchronous copies included.
    pub copied_bytes: u64,
    /// Graphs submitted.
    pub graph_computes: u64,
    /// Times the host waited: for a stream, an event that was to come, a synchronous copy, or a result in memory that
    /// is not pinned, where drivers block until it is there.
    pub waits: u64,
    /// Most records of one event since the host last waited for it: Vulkan keeps an object for each of them.
    pub event_records: u64,
    /// Real CPU seconds of the host's thread from each wait for a stream to the next graph, if no copy of more than 16
    /// KiB was submitted between them: the host's work where everything is on the device.
    pub host_work: Vec<f64>,
}

/// Registers a device with ggml, under a name of its own (`LAG0`, `LAG1`, …).
///
/// # Panics
/// Where a process asks for more than [`DEVICES_MAX`].
pub fn register(options: Options) -> Device {
    static POOL: LazyLock<Vec<&'static Shared>> = LazyLock::new(register_all);
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let pool = &*POOL;
    let index = NEXT.fetch_add(1, Ordering::Relaxed);
    let shared = pool.get(index).unwrap_or_else(|| panic!("at most {DEVICES_MAX} lagging devices in a process"));
    shared.state().schedule.sharing = Sharing::of(&options);
    assert!(shared.options.set(options).is_ok(), "a device is handed out once");
    Device { shared }
}

impl Device {
    /// The device's name in ggml, for `-dev`.
    pub fn name(&self) -> &str {
        self.shared.name.to_str().expect("LAG and a number")
    }

    /// The device as ggml knows it.
    pub fn raw(&self) -> ggml_backend_dev_t {
        self.shared.pointers().device
    }

    /// Work since the last [`Device::reset`]. Times lack graphs that have not run.
    pub fn report(&self) -> Report {
        let state = self.shared.state();
        Report {
            host_time: state.schedule.host,
            copy_busy: state.schedule.copy_busy,
            compute_busy: state.schedule.compute_busy,
            ..state.report.clone()
        }
    }

    /// Runs all queued operations, then sets all times and counts to zero. Faults injected and found stay.
    pub fn reset(&self) {
        self.shared.finish_all();
        let mut state = self.shared.state();
        state.schedule.reset();
        state.report = Report::default();
    }

    /// Misuse found so far; after the first, every graph fails.
    pub fn faults(&self) -> Vec<String> {
        self.shared.state().faults.clone()
    }

    /// Refuses buffers of more than this many bytes; `u64::MAX` ends that.
    pub fn fail_allocations_above(&self, bytes: u64) {
        self.shared.state().allocation_bytes_max = bytes;
    }

    /// After `after` more graphs, `n` graphs are refused with this status. Replaces earlier calls.
    pub fn fail_graphs(&self, after: usize, n: usize, status: ggml_status) {
        let mut state = self.shared.state();
        state.graphs_until_failure = after;
        state.fail_graphs = vec![status; n];
    }

    /// From now on every graph fails.
    pub fn lose(&self) {
        self.shared.state().lost = true;
    }
}

fn register_all() -> Vec<&'static Shared> {
    if let Err(difference) = ggml_sys::check_abi() {
        panic!("{difference}");
    }
    let pool: &'static Vec<&'static Shared> =
        Box::leak(Box::new((0..DEVICES_MAX).map(|index| &*Box::leak(Box::new(Shared::new(index)))).collect()));
    let reg: *mut ffi::ggml_backend_reg = Box::leak(Box::new(ffi::ggml_backend_reg {
        api_version: ffi::GGML_BACKEND_API_VERSION as c_int,
        iface: ffi::ggml_backend_reg_i {
            get_name: Some(reg_name),
            get_device_count: Some(reg_device_count),
            get_device: Some(reg_device),
            get_proc_address: Some(reg_proc_address),
        },
        context: ptr::from_ref(pool).cast_mut().cast(),
    }));
    for shared in pool {
        let context: *mut c_void = ptr::from_ref::<Shared>(shared).cast_mut().cast();
        let device: ggml_backend_dev_t = ptr::from_mut(Box::leak(Box::new(ffi::ggml_backend_device {
            iface: device_interface(),
            reg: reg.cast(),
            context,
        })))
        .cast();
        let buffer_type = |iface| -> ggml_backend_buffer_type_t {
            ptr::from_mut(Box::leak(Box::new(ffi::ggml_backend_buffer_type { iface, device, context }))).cast()
        };
        let pointers = Pointers {
            device,
            buffer_type: buffer_type(device_buffer_type()),
            host_buffer_type: buffer_type(host_buffer_type()),
        };
        assert!(shared.pointers.set(pointers).is_ok(), "the pool is made once");
    }
    // SAFETY: everything is leaked, initialised and linked before ggml sees it.
    unsafe { llama::ggml_backend_register(reg.cast()) };
    pool.clone()
}

fn device_interface() -> ffi::ggml_backend_device_i {
    ffi::ggml_backend_device_i {
        get_name: Some(device_name),
        get_description: Some(device_description),
        get_memory: Some(device_memory),
        get_type: Some(device_type),
        get_props: Some(device_props),
        init_backend: Some(init_backend),
        get_buffer_type: Some(get_buffer_type),
        get_host_buffer_type: Some(get_host_buffer_type),
        supports_op: Some(supports_op),
        supports_buft: Some(supports_buft),
        offload_op: Some(offload_op),
        event_new: Some(stream::event_new),
        event_free: Some(stream::event_free),
        event_synchronize: Some(stream::event_synchronize),
        ..ffi::ggml_backend_device_i::default()
    }
}

/// # Safety
/// `dev` is one of our devices.
pub(crate) unsafe fn shared_of(dev: ggml_backend_dev_t) -> &'static Shared {
    // SAFETY: by the caller; `register_all` put it there.
    unsafe { &*(*dev.cast::<ffi::ggml_backend_device>()).context.cast::<Shared>() }
}

unsafe extern "C" fn reg_name(_: ggml_backend_reg_t) -> *const c_char {
    c"LAG".as_ptr()
}

unsafe extern "C" fn reg_device_count(_: ggml_backend_reg_t) -> usize {
    DEVICES_MAX
}

unsafe extern "C" fn reg_device(reg: ggml_backend_reg_t, index: usize) -> ggml_backend_dev_t {
    // SAFETY: `register_all` put the pool there.
    let pool = unsafe { &*(*reg.cast::<ffi::ggml_backend_reg>()).context.cast::<Vec<&'static Shared>>() };
    pool.get(index).map_or(ptr::null_mut(), |shared| shared.pointers().device)
}

/// `hobbit_device_seconds`: the host's virtual time, so that decisions that are a matter of time depend on nothing
/// else. `hobbit_device_host_work`: the host's CPU has multiplied by some bytes of weights, at `host_bandwidth`.
/// `hobbit_device_host_wait`: the host waits until a moment. `hobbit_device_disk`: `disk_bandwidth`.
unsafe extern "C" fn reg_proc_address(_: ggml_backend_reg_t, name: *const c_char) -> *mut c_void {
    // SAFETY: ggml passes a NUL-terminated name.
    match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"hobbit_device_seconds" => device_seconds as *mut c_void,
        b"hobbit_device_host_work" => host_work as *mut c_void,
        b"hobbit_device_host_wait" => host_wait as *mut c_void,
        b"hobbit_device_disk" => disk as *mut c_void,
        _ => ptr::null_mut(),
    }
}

unsafe extern "C" fn device_seconds(dev: ggml_backend_dev_t) -> f64 {
    // SAFETY: the caller passes our device.
    unsafe { shared_of(dev) }.state().schedule.host
}

unsafe extern "C" fn host_work(dev: ggml_backend_dev_t, bytes: u64) {
    // SAFETY: the caller passes our device.
    let shared = unsafe { shared_of(dev) };
    shared.state().schedule.host_work(bytes as f64 / shared.options().host_bandwidth);
}

unsafe extern "C" fn host_wait(dev: ggml_backend_dev_t, until: f64) {
    // SAFETY: the caller passes our device.
    let mut state = unsafe { shared_of(dev) }.state();
    state.schedule.host = state.schedule.host.max(until);
}

unsafe extern "C" fn disk(dev: ggml_backend_dev_t) -> f64 {
    // SAFETY: the caller passes our device.
    unsafe { shared_of(dev) }.options().disk_bandwidth
}

unsafe extern "C" fn device_name(dev: ggml_backend_dev_t) -> *const c_char {
    // SAFETY: ggml passes our device.
    unsafe { shared_of(dev) }.name.as_ptr()
}

unsafe extern "C" fn device_description(_: ggml_backend_dev_t) -> *const c_char {
    c"lagging test device".as_ptr()
}

unsafe extern "C" fn device_memory(dev: ggml_backend_dev_t, free: *mut usize, total: *mut usize) {
    // SAFETY: ggml passes our device and valid places.
    unsafe {
        let shared = shared_of(dev);
        *total = shared.options().memory as usize;
        *free = shared.options().memory.saturating_sub(shared.state().used) as usize;
    }
}

unsafe extern "C" fn device_type(dev: ggml_backend_dev_t) -> llama::ggml_backend_dev_type {
    // SAFETY: ggml passes our device.
    let shared = unsafe { shared_of(dev) };
    match shared.options().unified {
        _ if shared.is_spare() => llama::GGML_BACKEND_DEVICE_TYPE_CPU,
        true => llama::GGML_BACKEND_DEVICE_TYPE_IGPU,
        false => llama::GGML_BACKEND_DEVICE_TYPE_GPU,
    }
}

unsafe extern "C" fn device_props(dev: ggml_backend_dev_t, props: *mut llama::ggml_backend_dev_props) {
    // SAFETY: ggml passes our device and a valid place; zero is a valid value of every field.
    unsafe {
        ptr::write_bytes(props, 0, 1);
        (*props).name = device_name(dev);
        (*props).description = device_description(dev);
        (*props).type_ = device_type(dev);
        device_memory(dev, &raw mut (*props).memory_free, &raw mut (*props).memory_total);
        (*props).caps.async_ = true;
        (*props).caps.events = true;
        (*props).caps.mmap_support = !shared_of(dev).options().unified;
        (*props).caps.host_buffer = shared_of(dev).options().pinned != Pinned::None;
    }
}

unsafe extern "C" fn init_backend(dev: ggml_backend_dev_t, _params: *const c_char) -> ggml_backend_t {
    // SAFETY: ggml passes our device.
    let shared = unsafe { shared_of(dev) };
    if shared.is_spare() { ptr::null_mut() } else { stream::open(dev, shared) }
}

unsafe extern "C" fn get_buffer_type(dev: ggml_backend_dev_t) -> ggml_backend_buffer_type_t {
    // SAFETY: ggml passes our device.
    unsafe { shared_of(dev) }.buffer_type()
}

unsafe extern "C" fn get_host_buffer_type(dev: ggml_backend_dev_t) -> ggml_backend_buffer_type_t {
    // SAFETY: ggml passes our device.
    let shared = unsafe { shared_of(dev) };
    match shared.options().pinned {
        Pinned::None => ptr::null_mut(),
        Pinned::Offered | Pinned::Refused => shared.pointers().host_buffer_type,
    }
}

unsafe extern "C" fn supports_buft(dev: ggml_backend_dev_t, buft: ggml_backend_buffer_type_t) -> bool {
    // SAFETY: ggml passes our device.
    let shared = unsafe { shared_of(dev) };
    let (pointers, options) = (shared.pointers(), shared.options());
    let declares = options.unified && !options.undeclared;
    !shared.is_spare() && (buft == pointers.buffer_type || (declares && buft == pointers.host_buffer_type))
}

/// The CPU's operations, unless a source is in the memory of another device. Host memory does not matter here, as with
/// CUDA: ggml's scheduler copies such sources, and `offload_op` decides about them.
unsafe extern "C" fn supports_op(dev: ggml_backend_dev_t, op: *const ggml_tensor) -> bool {
    // SAFETY: ggml passes our device and a live node with live sources.
    unsafe {
        let shared = shared_of(dev);
        let is_foreign = |src: &*mut ggml_tensor| {
            src.as_ref().map(|src| buffer_of(src)).filter(|buffer| !buffer.is_null()).is_some_and(|buffer| {
                llama::ggml_backend_buffer_get_type(buffer) != shared.buffer_type()
                    && !llama::ggml_backend_buffer_is_host(buffer)
            })
        };
        let cpu = llama::ggml_backend_dev_by_type(llama::GGML_BACKEND_DEVICE_TYPE_CPU);
        !shared.is_spare()
            && !(*op).src.iter().any(is_foreign)
            && !shared.options().without.contains(&(*op).op)
            && !cpu.is_null()
            && llama::ggml_backend_dev_supports_op(cpu, op)
    }
}

unsafe extern "C" fn offload_op(_: ggml_backend_dev_t, op: *const ggml_tensor) -> bool {
    // SAFETY: ggml passes a live node.
    let op = unsafe { &*op };
    op.op == llama::GGML_OP_MUL_MAT_ID && op.ne[2] >= OFFLOAD_TOKENS_MIN
}
