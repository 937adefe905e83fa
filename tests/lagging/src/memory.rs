//! The two kinds of memory: the device's, which has addresses but nothing behind them, and pinned host memory.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::Arc;

use ggml_sys::backend as ffi;
use ggml_sys::llama::{self, ggml_backend_buffer_t, ggml_backend_buffer_type_t, ggml_tensor};

use crate::Pinned;
use crate::shared::Shared;

/// Alignment of tensors in device memory, in bytes; CUDA's.
const ALIGNMENT: usize = 128;
/// CUDA kernels read rows of quantised weights in multiples of this many values.
const ROW_PADDING: i64 = 512;
/// Contents of new memory: NaN in every float format, scales of quantised blocks included.
pub(crate) const UNWRITTEN: u8 = 0xFF;

/// A private anonymous mapping.
pub(crate) struct Mapping {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: an address range without an owner thread; the streams order its reads and writes, as on a GPU.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize, protection: i32) -> Option<Mapping> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let base = unsafe { libc::mmap(ptr::null_mut(), bytes.max(1), protection, flags, -1, 0) };
        (base != libc::MAP_FAILED).then_some(Mapping { base: base.cast(), bytes })
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    pub(crate) fn contains(&self, address: *const u8, bytes: usize) -> bool {
        let (base, address) = (self.base as usize, address as usize);
        address >= base && address - base <= self.bytes && bytes <= self.bytes - (address - base)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; readers and writers hold a reference.
        unsafe { libc::munmap(self.base.cast(), self.bytes.max(1)) };
    }
}

/// One buffer of device memory.
pub(crate) struct DeviceMemory {
    /// Tensors point into this: no access.
    shown: Mapping,
    real: Mapping,
    /// The real bytes as the CPU backend sees them.
    cpu_buffer: ggml_backend_buffer_t,
}

// SAFETY: the CPU buffer is a description of `real` that is not written after it was made.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    fn new(bytes: usize) -> Option<DeviceMemory> {
        let shown = Mapping::new(bytes, libc::PROT_NONE)?;
        let real = Mapping::new(bytes, libc::PROT_READ | libc::PROT_WRITE)?;
        // SAFETY: `real` is writable and `bytes` long, and outlives the buffer that wraps it.
        let cpu_buffer = unsafe {
            ptr::write_bytes(real.base, UNWRITTEN, bytes);
            llama::ggml_backend_cpu_buffer_from_ptr(real.base.cast(), bytes)
        };
        Some(DeviceMemory { shown, real, cpu_buffer })
    }

    /// Where the bytes at a device address are, if `bytes` of them are in this buffer.
    pub(crate) fn real(&self, address: *const c_void, bytes: usize) -> Option<*mut u8> {
        let offset = (address as usize).wrapping_sub(self.shown.base as usize);
        self.shown.contains(address.cast(), bytes).then(|| self.real.base.wrapping_add(offset))
    }

    /// Whether `bytes` at a real address are in this buffer.
    pub(crate) fn holds_real(&self, address: *const u8, bytes: usize) -> bool {
        self.real.contains(address, bytes)
    }

    pub(crate) fn cpu_buffer(&self) -> ggml_backend_buffer_t {
        self.cpu_buffer
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: made by `new`, not freed before.
        unsafe { llama::ggml_backend_buffer_free(self.cpu_buffer) };
    }
}

/// The `context` of a device buffer.
struct BufferContext {
    shared: &'static Shared,
    memory: Arc<DeviceMemory>,
}

pub(crate) fn device_buffer_type() -> ffi::ggml_backend_buffer_type_i {
    ffi::ggml_backend_buffer_type_i {
        get_name: Some(device_buffer_type_name),
        alloc_buffer: Some(alloc_device),
        get_alignment: Some(device_alignment),
        get_alloc_size: Some(alloc_size),
        ..ffi::ggml_backend_buffer_type_i::default()
    }
}

pub(crate) fn host_buffer_type() -> ffi::ggml_backend_buffer_type_i {
    ffi::ggml_backend_buffer_type_i {
        get_name: Some(host_buffer_type_name),
        alloc_buffer: Some(alloc_host),
        get_alignment: Some(host_alignment),
        is_host: Some(yes),
        ..ffi::ggml_backend_buffer_type_i::default()
    }
}

/// The device memory a tensor lies in, `None` if it lies elsewhere or nowhere.
///
/// # Safety
/// `tensor` is live, and so are its view source and their buffers.
pub(crate) unsafe fn memory_of<'a>(
    tensor: &ggml_tensor,
    buft: ggml_backend_buffer_type_t,
) -> Option<&'a Arc<DeviceMemory>> {
    // SAFETY: by the caller; the context of a buffer of our type is a `BufferContext`.
    unsafe {
        let buffer = buffer_of(tensor).cast::<ffi::ggml_backend_buffer>().as_ref()?;
        (buffer.buft == buft && !buffer.context.is_null()).then(|| &(*buffer.context.cast::<BufferContext>()).memory)
    }
}

/// The buffer a tensor lies in, as ggml finds it; null if none.
///
/// # Safety
/// `tensor` is live, and so is its view source.
pub(crate) unsafe fn buffer_of(tensor: &ggml_tensor) -> ggml_backend_buffer_t {
    // SAFETY: by the caller.
    unsafe { tensor.view_src.as_ref().map_or(tensor.buffer, |root| root.buffer) }
}

/// Bytes behind a quantised row that CUDA kernels may read.
pub(crate) fn row_padding(tensor: &ggml_tensor) -> usize {
    // SAFETY: pure functions of a type and a length.
    unsafe {
        match tensor.ne[0] % ROW_PADDING {
            rest if rest != 0 && llama::ggml_is_quantized(tensor.type_) => {
                llama::ggml_row_size(tensor.type_, ROW_PADDING - rest)
            }
            _ => 0,
        }
    }
}

/// # Safety
/// `buft` is one of our buffer types.
unsafe fn shared_of(buft: ggml_backend_buffer_type_t) -> &'static Shared {
    // SAFETY: by the caller; the device put itself there.
    unsafe { &*(*buft.cast::<ffi::ggml_backend_buffer_type>()).context.cast::<Shared>() }
}

unsafe extern "C" fn device_buffer_type_name(buft: ggml_backend_buffer_type_t) -> *const c_char {
    // SAFETY: ggml passes our buffer type.
    unsafe { shared_of(buft) }.name.as_ptr()
}

unsafe extern "C" fn host_buffer_type_name(_: ggml_backend_buffer_type_t) -> *const c_char {
    c"LAG_Host".as_ptr()
}

unsafe extern "C" fn device_alignment(_: ggml_backend_buffer_type_t) -> usize {
    ALIGNMENT
}

unsafe extern "C" fn host_alignment(_: ggml_backend_buffer_type_t) -> usize {
    // SAFETY: no arguments, no state.
    unsafe { llama::ggml_backend_buft_get_alignment(llama::ggml_backend_cpu_buffer_type()) }
}

unsafe extern "C" fn yes(_: ggml_backend_buffer_type_t) -> bool {
    true
}

/// ggml allows more than `ggml_nbytes` for quantised tensors only; its allocators round up to the alignment.
unsafe extern "C" fn alloc_size(_: ggml_backend_buffer_type_t, tensor: *const ggml_tensor) -> usize {
    // SAFETY: ggml passes a live tensor.
    unsafe { llama::ggml_nbytes(tensor) + row_padding(&*tensor) }
}

unsafe extern "C" fn alloc_device(buft: ggml_backend_buffer_type_t, bytes: usize) -> ggml_backend_buffer_t {
    // SAFETY: ggml passes our buffer type.
    let shared = unsafe { shared_of(buft) };
    if !shared.take_memory(bytes) {
        return ptr::null_mut();
    }
    let Some(memory) = DeviceMemory::new(bytes) else {
        shared.return_memory(bytes);
        return ptr::null_mut();
    };
    let interface = ffi::ggml_backend_buffer_i {
        free_buffer: Some(free_device),
        get_base: Some(get_base),
        init_tensor: Some(init_tensor),
        memset_tensor: Some(memset_tensor),
        set_tensor: Some(set_tensor),
        get_tensor: Some(get_tensor),
        cpy_tensor: Some(cpy_tensor),
        clear: Some(clear),
        ..ffi::ggml_backend_buffer_i::default()
    };
    let context = Box::into_raw(Box::new(BufferContext { shared, memory: Arc::new(memory) }));
    // SAFETY: the interface's functions take the context that is passed here; `free_device` takes it back.
    unsafe { ffi::ggml_backend_buffer_init(buft, interface, context.cast(), bytes) }
}

/// # Safety
/// `buffer` was made by `alloc_device` and not freed.
unsafe fn context<'a>(buffer: ggml_backend_buffer_t) -> &'a BufferContext {
    // SAFETY: by the caller.
    unsafe { &*(*buffer.cast::<ffi::ggml_backend_buffer>()).context.cast::<BufferContext>() }
}

/// Operations that are still queued on the buffer keep its memory: they run, unseen.
unsafe extern "C" fn free_device(buffer: ggml_backend_buffer_t) {
    // SAFETY: called once, last, by ggml; takes back what `alloc_device` made.
    unsafe {
        let context = Box::from_raw((*buffer.cast::<ffi::ggml_backend_buffer>()).context.cast::<BufferContext>());
        context.shared.return_memory((*buffer.cast::<ffi::ggml_backend_buffer>()).size);
    }
}

unsafe extern "C" fn get_base(buffer: ggml_backend_buffer_t) -> *mut c_void {
    // SAFETY: ggml passes a live buffer of ours.
    unsafe { context(buffer) }.memory.shown.base.cast()
}

unsafe extern "C" fn init_tensor(buffer: ggml_backend_buffer_t, tensor: *mut ggml_tensor) -> llama::ggml_status {
    // SAFETY: ggml passes a live buffer of ours and a live tensor in it.
    unsafe {
        let padding = row_padding(&*tensor);
        let usage = (*buffer.cast::<ffi::ggml_backend_buffer>()).usage;
        if padding > 0 && (*tensor).view_src.is_null() && usage != llama::GGML_BACKEND_BUFFER_USAGE_COMPUTE {
            let bytes = llama::ggml_nbytes(tensor);
            match context(buffer).memory.real((*tensor).data, bytes + padding) {
                Some(real) => ptr::write_bytes(real.add(bytes), 0, padding),
                None => return llama::GGML_STATUS_FAILED,
            }
        }
    }
    llama::GGML_STATUS_SUCCESS
}

/// The real address of a byte range of a tensor; records a fault where there is none.
///
/// # Safety
/// `buffer` is a live buffer of ours, `tensor` is live.
unsafe fn range(
    buffer: ggml_backend_buffer_t,
    tensor: *const ggml_tensor,
    offset: usize,
    bytes: usize,
) -> Option<*mut u8> {
    // SAFETY: by the caller.
    let context = unsafe { context(buffer) };
    // SAFETY: by the caller.
    let real = context.memory.real(unsafe { (*tensor).data }.wrapping_byte_add(offset), bytes);
    if real.is_none() {
        context.shared.fault(format!("an access of {bytes} bytes at offset {offset} of a tensor leaves its buffer"));
    }
    real
}

unsafe extern "C" fn memset_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *mut ggml_tensor,
    value: u8,
    offset: usize,
    bytes: usize,
) {
    // SAFETY: ggml passes a live buffer of ours and a live tensor in it.
    if let Some(real) = unsafe { range(buffer, tensor, offset, bytes) } {
        // SAFETY: `range` checked it.
        unsafe { ptr::write_bytes(real, value, bytes) };
    }
}

unsafe extern "C" fn set_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *mut ggml_tensor,
    data: *const c_void,
    offset: usize,
    bytes: usize,
) {
    // SAFETY: ggml passes a live buffer of ours, a live tensor in it and `bytes` readable bytes.
    if let Some(real) = unsafe { range(buffer, tensor, offset, bytes) } {
        // SAFETY: `range` checked the target.
        unsafe { context(buffer) }
            .shared
            .host_copy(data.cast(), bytes, || unsafe { ptr::copy(data.cast(), real, bytes) });
    }
}

unsafe extern "C" fn get_tensor(
    buffer: ggml_backend_buffer_t,
    tensor: *const ggml_tensor,
    data: *mut c_void,
    offset: usize,
    bytes: usize,
) {
    // SAFETY: ggml passes a live buffer of ours, a live tensor in it and room for `bytes` bytes.
    if let Some(real) = unsafe { range(buffer, tensor, offset, bytes) } {
        // SAFETY: `range` checked the source.
        unsafe { context(buffer) }
            .shared
            .host_copy(data.cast(), bytes, || unsafe { ptr::copy(real, data.cast(), bytes) });
    }
}

unsafe extern "C" fn cpy_tensor(buffer: ggml_backend_buffer_t, src: *const ggml_tensor, dst: *mut ggml_tensor) -> bool {
    // SAFETY: ggml passes a live buffer of ours, `dst` in it, and a live source of the same size.
    unsafe {
        let bytes = llama::ggml_nbytes(src);
        let buft = (*buffer.cast::<ffi::ggml_backend_buffer>()).buft;
        if let Some(memory) = memory_of(&*src, buft) {
            let (Some(from), Some(to)) = (memory.real((*src).data, bytes), range(buffer, dst, 0, bytes)) else {
                return false;
            };
            ptr::copy(from, to, bytes);
            return true;
        }
        let source = buffer_of(&*src);
        if source.is_null() || !llama::ggml_backend_buffer_is_host(source) {
            return false;
        }
        set_tensor(buffer, dst, (*src).data, 0, bytes);
        true
    }
}

unsafe extern "C" fn clear(buffer: ggml_backend_buffer_t, value: u8) {
    // SAFETY: ggml passes a live buffer of ours.
    unsafe {
        let real = &context(buffer).memory.real;
        ptr::write_bytes(real.base, value, real.bytes);
    }
}

unsafe extern "C" fn alloc_host(buft: ggml_backend_buffer_type_t, bytes: usize) -> ggml_backend_buffer_t {
    // SAFETY: ggml passes our buffer type.
    let shared = unsafe { shared_of(buft) };
    if shared.options().pinned != Pinned::Offered {
        // SAFETY: the CPU's buffer type lives for ever.
        return unsafe { llama::ggml_backend_buft_alloc_buffer(llama::ggml_backend_cpu_buffer_type(), bytes) };
    }
    let Some(mapping) = Mapping::new(bytes, libc::PROT_READ | libc::PROT_WRITE) else { return ptr::null_mut() };
    let base = mapping.base();
    // SAFETY: the mapping is writable and lives until `free_host`; the CPU's interface works on any host memory. Type
    // and `free_buffer` are replaced before anyone else sees the buffer, as CUDA's host buffer type does.
    unsafe {
        let buffer = llama::ggml_backend_cpu_buffer_from_ptr(base.cast(), bytes);
        let fields = buffer.cast::<ffi::ggml_backend_buffer>();
        (*fields).buft = buft;
        (*fields).iface.free_buffer = Some(free_host);
        shared.add_host(Arc::new(mapping));
        buffer
    }
}

unsafe extern "C" fn free_host(buffer: ggml_backend_buffer_t) {
    // SAFETY: called once, last, by ggml, on a buffer of `alloc_host`, whose context is its base.
    unsafe {
        let fields = &*buffer.cast::<ffi::ggml_backend_buffer>();
        shared_of(fields.buft).remove_host(fields.context.cast());
    }
}
