//! A device with experts on it, as seen by the rest of the engine.

use std::ptr;

use ggml_sys::backend as ffi;
use ggml_sys::llama::{self, ggml_backend_buffer_type_t, ggml_backend_dev_t, ggml_tensor};

use crate::engine::graph;

/// Number of rows in queries about batches.
const SOME_ROWS: i64 = 8;

/// A ggml device with experts on it. Leaked: devices live as long as the process.
pub(in crate::engine) struct Wrapper {
    /// The device that llama.cpp gets.
    pub(in crate::engine) raw: ggml_backend_dev_t,
    /// The device itself.
    pub(in crate::engine) inner: ggml_backend_dev_t,
    /// Where expert tensors of the device's layers are placed.
    pub(in crate::engine) buffer_type: ggml_backend_buffer_type_t,
    pub(in crate::engine) name: String,
    /// Whether it belongs to an RPC server.
    pub(in crate::engine) is_remote: bool,
}

// SAFETY: never written after it was made.
unsafe impl Send for Wrapper {}
// SAFETY: as above.
unsafe impl Sync for Wrapper {}

impl Wrapper {
    /// Whether the device multiplies by weights `[ne0, ne1, n_expert]` of this type, for one token and for several, and
    /// gathers and scatters their rows.
    pub(in crate::engine) fn multiplies(&self, type_: llama::ggml_type, ne: [u64; 3]) -> bool {
        let ne = ne.map(|n| n as i64);
        let none = ptr::null_mut();
        let tensor = |type_, ne: [i64; 3]| {
            Box::new(graph::tensor_at(type_, [ne[0], ne[1], ne[2], 1], ptr::null_mut(), none, None))
        };
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

/// # Safety
/// `dev` is a wrapper's.
pub(super) unsafe fn wrapper(dev: ggml_backend_dev_t) -> &'static Wrapper {
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

pub(super) use forward;
