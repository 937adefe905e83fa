//! The expert buffer type: llama.cpp places the expert tensors in it, and tables that are read by row.
//!
//! A buffer of this type is reserved address space without memory. llama.cpp gets distinct tensor addresses,
//! `set_tensor` drops its data, and `init_tensor` tags each tensor with its layer and kind so that the expert backend
//! recognises it in a graph.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use ggml_sys::backend as ffi;
use ggml_sys::llama::{
    GGML_OP_GET_ROWS, GGML_OP_MUL_MAT_ID, GGML_STATUS_FAILED, GGML_STATUS_SUCCESS, ggml_backend_buffer_t,
    ggml_backend_buffer_type_t, ggml_op, ggml_status, ggml_tensor,
};

use crate::engine::seam::calling;
use crate::engine::seam::experts::{ExpertTag, Experts, TableTag, Tag};
use crate::engine::source::cookie_stream::{release, reserve};

/// The `context` of an expert buffer, shared by all callbacks.
struct ExpertBuffer {
    experts: Arc<Experts>,
    base: *mut c_void,
    bytes: usize,
    /// `ggml_tensor::extra` points to them. Not in a `Box`: moving one invalidates every other pointer to its contents.
    tags: Mutex<Vec<Arc<Tag>>>,
}

impl Drop for ExpertBuffer {
    fn drop(&mut self) {
        // SAFETY: mapped by `alloc_buffer`, unmapped only here; the buffer's tensors are gone.
        unsafe { release(self.base, self.bytes) };
    }
}

pub(crate) fn buffer_type_interface() -> ffi::ggml_backend_buffer_type_i {
    ffi::ggml_backend_buffer_type_i {
        get_name: Some(get_name),
        alloc_buffer: Some(alloc_buffer),
        get_alignment: Some(get_alignment),
        is_host: Some(is_host),
        ..ffi::ggml_backend_buffer_type_i::default()
    }
}

/// The layer and kind of the expert tensor that a node multiplies by, if it is an expert product.
///
/// # Safety
/// `node` and its sources are live; `buft` is the expert buffer type.
pub(crate) unsafe fn tag_of<'a>(node: *const ggml_tensor, buft: ggml_backend_buffer_type_t) -> Option<&'a ExpertTag> {
    // SAFETY: by the caller.
    unsafe {
        match tag_of_weights(node, GGML_OP_MUL_MAT_ID, buft)? {
            Tag::Expert(tag) => Some(tag),
            Tag::Table(_) | Tag::Idle => None,
        }
    }
}

/// The table whose rows a node reads.
///
/// # Safety
/// As [`tag_of`].
pub(crate) unsafe fn table_of<'a>(node: *const ggml_tensor, buft: ggml_backend_buffer_type_t) -> Option<&'a TableTag> {
    // SAFETY: by the caller.
    match unsafe { tag_of_weights(node, GGML_OP_GET_ROWS, buft)? } {
        Tag::Table(tag) => Some(tag),
        Tag::Expert(_) | Tag::Idle => None,
    }
}

/// # Safety
/// As [`tag_of`].
unsafe fn tag_of_weights<'a>(
    node: *const ggml_tensor,
    op: ggml_op,
    buft: ggml_backend_buffer_type_t,
) -> Option<&'a Tag> {
    // SAFETY: by the caller; buffers of our type hold only tensors that `init_tensor` tagged, and tags live as long
    // as the buffer, which lives as long as its tensors.
    unsafe {
        if (*node).op != op || !is_expert_tensor((*node).src[0], buft) {
            return None;
        }
        (*(*node).src[0]).extra.cast::<Tag>().as_ref()
    }
}

/// Whether `tensor` lies in a buffer of the expert buffer type.
///
/// # Safety
/// `tensor` is null or a live tensor; `buft` is the expert buffer type.
pub(crate) unsafe fn is_expert_tensor(tensor: *const ggml_tensor, buft: ggml_backend_buffer_type_t) -> bool {
    // SAFETY: by the caller; a tensor's buffer is null or live.
    let buffer = unsafe { tensor.as_ref().and_then(|t| t.buffer.cast::<ffi::ggml_backend_buffer>().as_ref()) };
    buffer.is_some_and(|buffer| buffer.buft == buft)
}

unsafe extern "C" fn get_name(buft: ggml_backend_buffer_type_t) -> *const c_char {
    // SAFETY: ggml passes a buffer type of ours; its registration put the name there, for as long as the process.
    unsafe { (*buft.cast::<ffi::ggml_backend_buffer_type>()).context.cast() }
}

unsafe extern "C" fn get_alignment(_: ggml_backend_buffer_type_t) -> usize {
    64
}

/// Reports host memory only while a model loads: llama.cpp then reads a tensor in place, and the seek trick of
/// `source::cookie_stream` leaves nothing to read. As device memory it would be staged through a zeroed buffer of the
/// tensor's size, page fault by page fault. In graphs it must not count as host memory: the CPU backend would take it.
unsafe extern "C" fn is_host(_: ggml_backend_buffer_type_t) -> bool {
    calling::loading().is_some()
}

unsafe extern "C" fn alloc_buffer(buft: ggml_backend_buffer_type_t, size: usize) -> ggml_backend_buffer_t {
    let Some(experts) = calling::loading() else { return std::ptr::null_mut() };
    let bytes = size.max(1);
    let Some(base) = reserve(bytes) else { return std::ptr::null_mut() };
    let interface = ffi::ggml_backend_buffer_i {
        free_buffer: Some(free_buffer),
        get_base: Some(get_base),
        init_tensor: Some(init_tensor),
        memset_tensor: Some(memset_tensor),
        set_tensor: Some(set_tensor),
        get_tensor: Some(get_tensor),
        clear: Some(clear),
        ..ffi::ggml_backend_buffer_i::default()
    };
    let context = Box::into_raw(Box::new(ExpertBuffer { experts, base, bytes, tags: Mutex::default() }));
    // SAFETY: the interface's functions take the context that is passed here; `free_buffer` takes it back.
    unsafe { ffi::ggml_backend_buffer_init(buft, interface, context.cast(), size) }
}

/// # Safety
/// `buffer` was made by `alloc_buffer` and not freed.
unsafe fn context<'a>(buffer: ggml_backend_buffer_t) -> &'a ExpertBuffer {
    // SAFETY: `alloc_buffer` put an `ExpertBuffer` there, all references to it are shared ones.
    unsafe { &*(*buffer.cast::<ffi::ggml_backend_buffer>()).context.cast::<ExpertBuffer>() }
}

unsafe extern "C" fn free_buffer(buffer: ggml_backend_buffer_t) {
    // SAFETY: called once, last, by ggml; takes back what `alloc_buffer` made.
    unsafe { drop(Box::from_raw((*buffer.cast::<ffi::ggml_backend_buffer>()).context.cast::<ExpertBuffer>())) };
}

unsafe extern "C" fn get_base(buffer: ggml_backend_buffer_t) -> *mut c_void {
    // SAFETY: ggml passes a live buffer of ours.
    unsafe { context(buffer).base }
}

unsafe extern "C" fn init_tensor(buffer: ggml_backend_buffer_t, tensor: *mut ggml_tensor) -> ggml_status {
    // SAFETY: ggml passes a live buffer of ours and a live tensor in it, whose name is NUL-terminated.
    let (context, tensor, name) =
        unsafe { (context(buffer), &mut *tensor, CStr::from_ptr((*tensor).name.as_ptr()).to_string_lossy()) };
    if !tensor.view_src.is_null() {
        return GGML_STATUS_SUCCESS;
    }
    match context.experts.tag(&name) {
        Some(tag) => {
            let tag = Arc::new(tag);
            tensor.extra = Arc::as_ptr(&tag).cast_mut().cast();
            context.tags.lock().unwrap_or_else(PoisonError::into_inner).push(tag);
            GGML_STATUS_SUCCESS
        }
        None => {
            calling::fail(format!("tensor {name} was placed among the experts but is not known"));
            GGML_STATUS_FAILED
        }
    }
}

/// Drops the data: expert bytes stay in the file.
unsafe extern "C" fn set_tensor(
    _: ggml_backend_buffer_t,
    _: *mut ggml_tensor,
    _: *const c_void,
    _offset: usize,
    _size: usize,
) {
}

unsafe extern "C" fn memset_tensor(
    _: ggml_backend_buffer_t,
    _: *mut ggml_tensor,
    _value: u8,
    _offset: usize,
    _size: usize,
) {
}

unsafe extern "C" fn clear(_: ggml_backend_buffer_t, _value: u8) {}

/// Only the expert backend may use these tensors. Any other reader gets zeros, and the batch fails with a message.
unsafe extern "C" fn get_tensor(
    _: ggml_backend_buffer_t,
    tensor: *const ggml_tensor,
    data: *mut c_void,
    _offset: usize,
    size: usize,
) {
    // SAFETY: ggml passes a live tensor and room for `size` bytes.
    unsafe {
        let name = CStr::from_ptr((*tensor).name.as_ptr()).to_string_lossy().into_owned();
        let reason = match (*tensor).extra.cast::<Tag>().as_ref() {
            Some(Tag::Table(_)) => format!(
                "{name} stays in the file, where only single rows are read, and this architecture uses it in another \
                 way; a tensor override for {name} to the CPU keeps it in memory"
            ),
            Some(Tag::Idle) => {
                format!("{name} was asked for: its layer is for multi-token prediction and is not loaded")
            }
            _ => format!(
                "expert tensor {name} was asked for outside of an expert product: this architecture or option \
                 (a LoRA merge, say) uses experts in a way hobbit does not know"
            ),
        };
        calling::fail(reason);
        data.cast::<u8>().write_bytes(0, size);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::collections::BTreeMap;

    use ggml_sys::llama;

    use super::*;
    use crate::engine::source::cookie_stream::tests::permissions;
    use crate::engine::source::tables::Tables;
    use hobbit_core::gguf::ExpertMap;

    /// More address space than any machine has memory: none of it may be committed, as writable memory is if
    /// `vm.overcommit_memory` is 2.
    #[test]
    fn experts_that_are_not_read_take_addresses_only() {
        let experts = Arc::new(Experts::new(ExpertMap::default(), Tables::default(), BTreeMap::new()));
        let bytes = 1usize << 40;
        // SAFETY: the type is only kept; the buffer is freed once.
        unsafe {
            let buffer = calling::while_loading(&experts, || alloc_buffer(std::ptr::null_mut(), bytes));
            assert!(!buffer.is_null());
            assert_eq!(permissions(get_base(buffer).addr() + bytes / 2), "---p");
            llama::ggml_backend_buffer_free(buffer);
        }
    }
}
