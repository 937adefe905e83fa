//! Experts in the byte order that ggml multiplies fastest on this CPU, as llama.cpp keeps weights that fit: the buffer
//! type repacks them and provides its own products.
//!
//! A read ends in that order ([`hobbit_core::store::Form::Rows`]): the thread that completes the read has the buffer
//! type set the rows, a few at a time. Products recognise the order by two fields of the weights' tensor, as they would
//! in a buffer of that type.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use ggml_sys::llama::{self, ggml_tensor};

use crate::engine::ggml::graph::tensor_at;
use crate::engine::ggml::{Buffer, Context};
use hobbit_core::gguf::GgmlType;
use hobbit_core::store::Rearrange;

/// Rows that are repacked together: ggml interleaves 4, 8 or 16.
const GROUP_ROWS: u64 = 16;

/// Maximum bytes of a group.
const GROUP_BYTES_MAX: u64 = 1 << 19;

/// How to repack matrices of one type and shape.
pub(crate) struct Interleaving {
    type_: llama::ggml_type,
    /// Elements of a row.
    ne0: i64,
    row_bytes: usize,
    /// A placeholder of the type that repacks; it holds no data.
    buffer: Buffer,
    /// The buffer type's mark on such a tensor.
    extra: *mut c_void,
}

// SAFETY: the buffer only identifies its type, whose functions may be called on any thread; `extra` is a constant of
// ggml's.
unsafe impl Send for Interleaving {}
// SAFETY: as above.
unsafe impl Sync for Interleaving {}

impl Interleaving {
    /// llama.cpp's repacking of experts of this type and shape on this CPU. `None` if it leaves them unchanged, or
    /// cannot repack a group of rows at a time.
    pub(crate) fn of(dtype: GgmlType, ne0: u64, ne1: u64) -> Option<Arc<Interleaving>> {
        type Known = Vec<((u32, u64, u64), Option<Arc<Interleaving>>)>;
        static KNOWN: Mutex<Known> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (dtype.id(), ne0, ne1);
        if let Some((_, interleaving)) = known.iter().find(|(other, _)| *other == key) {
            return interleaving.clone();
        }
        let row_bytes = dtype.row_bytes(ne0).filter(|bytes| *bytes <= GROUP_BYTES_MAX / GROUP_ROWS);
        let interleaving = row_bytes.filter(|_| ne1 > 0 && ne1.is_multiple_of(GROUP_ROWS)).and_then(|row_bytes| {
            let sides = [i64::try_from(ne0).ok()?, i64::try_from(ne1).ok()?];
            extra_buffer_types().into_iter().find_map(|buft| Self::find(buft, dtype, sides, row_bytes as usize))
        });
        let interleaving = interleaving.map(Arc::new);
        known.push((key, interleaving.clone()));
        interleaving
    }

    fn find(
        buft: llama::ggml_backend_buffer_type_t,
        dtype: GgmlType,
        [ne0, ne1]: [i64; 2],
        row_bytes: usize,
    ) -> Option<Self> {
        let type_ = dtype.id() as llama::ggml_type;
        let context = Context::new(5, 0)?;
        // llama.cpp asks in the same way: with weights in an empty buffer.
        let empty = Buffer::new(buft, 0)?;
        // SAFETY: tensors of a live context in live buffers.
        let extra = unsafe {
            let weights = context.tensor(type_, [ne0, ne1, 2]);
            (*weights).buffer = empty.raw();
            let input = context.tensor(llama::GGML_TYPE_F32, [ne0, 1, 1]);
            let ids = context.tensor(llama::GGML_TYPE_I32, [1, 1, 1]);
            let product = llama::ggml_mul_mat_id(context.raw(), weights, input, ids);
            let dev = llama::ggml_backend_buft_get_device(buft);
            let matrix = context.tensor(type_, [ne0, ne1, 1]);
            let is_as_large = llama::ggml_backend_buft_get_alloc_size(buft, matrix) == row_bytes * ne1 as usize;
            if dev.is_null() || !llama::ggml_backend_dev_supports_op(dev, product) || !is_as_large {
                return None;
            }
            let buffer = Buffer::new(buft, 1)?;
            (*matrix).buffer = buffer.raw();
            let status = llama::ggml_backend_buffer_init_tensor(buffer.raw(), matrix);
            let is_known = status == llama::GGML_STATUS_SUCCESS && !(*matrix).extra.is_null();
            is_known.then_some((buffer, (*matrix).extra))
        };
        let (buffer, extra) = extra?;
        let interleaving = Self { type_, ne0, row_bytes, buffer, extra };
        interleaving.is_by_groups((ne1 as usize).min(4 * GROUP_ROWS as usize)).then_some(interleaving)
    }

    /// Whether rows set in groups have the same bytes as rows set together: tested with random bytes.
    fn is_by_groups(&self, n_rows: usize) -> bool {
        let mut random = rand_mt::Mt::new(1);
        let rows: Vec<u8> = (0..n_rows * self.row_bytes).map(|_| random.next_u32() as u8).collect();
        let (mut together, mut apart) = (vec![0; rows.len()], vec![0; rows.len()]);
        self.rearrange(&rows, &mut together);
        let group = self.group_bytes() as usize;
        rows.chunks(group).zip(apart.chunks_mut(group)).for_each(|(rows, out)| self.rearrange(rows, out));
        together == apart
    }

    /// Bytes of rows that are repacked together.
    pub(crate) fn group_bytes(&self) -> u64 {
        GROUP_ROWS * self.row_bytes as u64
    }

    /// Marks `tensor`, of this type and shape, as repacked, for products.
    pub(crate) fn mark(&self, tensor: &mut ggml_tensor) {
        tensor.buffer = self.buffer.raw();
        tensor.extra = self.extra;
    }
}

impl Rearrange for Interleaving {
    fn rearrange(&self, rows: &[u8], out: &mut [u8]) {
        assert!(rows.len() == out.len() && rows.len().is_multiple_of(self.group_bytes() as usize), "whole groups");
        let n_rows = (rows.len() / self.row_bytes) as i64;
        let mut tensor = tensor_at(self.type_, [self.ne0, n_rows, 1, 1], out.as_mut_ptr(), self.buffer.raw(), None);
        tensor.extra = self.extra;
        // SAFETY: the tensor has as many bytes as both slices; `out` is borrowed exclusively.
        unsafe { llama::ggml_backend_tensor_set(&raw mut tensor, rows.as_ptr().cast(), 0, rows.len()) };
    }
}

/// Buffer types that llama.cpp tries for weights on the CPU before ordinary memory, in its order.
fn extra_buffer_types() -> Vec<llama::ggml_backend_buffer_type_t> {
    let mut found = Vec::new();
    // SAFETY: each result is checked before it is used. ggml fixes the type of the procedure that has this name
    // (ggml-backend.h), and null is `None`. The list ends with null.
    unsafe {
        let dev = llama::ggml_backend_dev_by_type(llama::GGML_BACKEND_DEVICE_TYPE_CPU);
        if dev.is_null() {
            return found;
        }
        let reg = llama::ggml_backend_dev_backend_reg(dev);
        let address = llama::ggml_backend_reg_get_proc_address(reg, c"ggml_backend_dev_get_extra_bufts".as_ptr());
        let extra: llama::ggml_backend_dev_get_extra_bufts_t = std::mem::transmute(address);
        let mut next = extra.map_or(std::ptr::null_mut(), |extra| extra(dev));
        while !next.is_null() && !(*next).is_null() {
            found.push(*next);
            next = next.add(1);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_rearranged_and_nothing_is_lost() {
        for (name, ne0) in [("q4_0", 64), ("iq4_nl", 64), ("mxfp4", 64), ("q4_K", 256)] {
            let dtype = GgmlType::from_name(name).unwrap();
            // ggml chooses these types by the CPU.
            let Some(interleaving) = Interleaving::of(dtype, ne0, 48) else { continue };
            assert!(Arc::ptr_eq(&interleaving, &Interleaving::of(dtype, ne0, 48).unwrap()));
            let rows: Vec<u8> = (0..48 * interleaving.row_bytes).map(|at| (at % 251) as u8).collect();
            let mut out = vec![0; rows.len()];
            interleaving.rearrange(&rows, &mut out);
            assert_ne!(rows, out, "{name}");
            assert!(Interleaving::of(dtype, ne0, 47).is_none(), "{name}: rows that fill no group");
        }
        assert!(Interleaving::of(GgmlType::from_name("f32").unwrap(), 64, 48).is_none());
        assert!(Interleaving::of(GgmlType::from_name("q4_0").unwrap(), 33, 48).is_none(), "no whole blocks");
        assert!(Interleaving::of(GgmlType::from_name("q4_0").unwrap(), 1 << 40, 48).is_none(), "rows too long");
    }
}
