//! Quantising and decoding tensor data with ggml, row by row as llama-quantize does, with the same bits.

use ggml_sys::llama;

use hobbit_core::gguf::GgmlType;
use hobbit_core::gguf::recode::{Recode, RecodeError, check_importance, count_rows};

/// Elements recoded at a time, unless a row is longer. A call's scratch memory is a few times this.
const BATCH_ELEMENTS: u64 = 1 << 16;

/// Types that `ggml_quantize_chunk` supports; any other would end the process.
const ENCODABLE: [&str; 28] = [
    "f32", "f16", "bf16", "q1_0", "q2_0", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "nvfp4", "q2_K", "q3_K",
    "q4_K", "q5_K", "q6_K", "tq1_0", "tq2_0", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq3_s", "iq2_s", "iq1_s", "iq1_m",
    "iq4_nl", "iq4_xs",
];

/// Largest weight that is quantised, because block scales are f16. Far larger values overflow sums in ggml's searches,
/// and a search without a result fails an assertion. Real weights are below 1000.
const QUANTISED_MAX: f32 = 65504.0;

/// ggml's quantisers and decoders. Calls may run on many threads at once.
///
/// ggml builds the tables of its codebook types at the first quantisation to them: once per process, taking seconds of
/// one core for iq2_s, iq1_s and iq1_m.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ggml;

impl Recode for Ggml {
    /// Memory: `out`, and scratch for one batch of rows (a few times 64 Ki floats, or one row if longer).
    fn recode(
        &self,
        from: GgmlType,
        to: GgmlType,
        n_per_row: u64,
        bytes: &[u8],
        importance: Option<&[f32]>,
        out: &mut Vec<u8>,
    ) -> Result<(), RecodeError> {
        let (n_rows, from_row) = count_rows(from, n_per_row, bytes.len())?;
        out.clear();
        if from == to {
            out.extend_from_slice(bytes);
            return Ok(());
        }
        self.supports(to)?;
        let to_row = to.row_bytes(n_per_row).ok_or(RecodeError::RowLength { dtype: to, n_per_row })?;
        match importance {
            Some(importance) => check_importance(importance, n_per_row)?,
            None if self.needs_importance(to) => return Err(RecodeError::ImportanceMissing { dtype: to }),
            None => {}
        }
        let too_large = RecodeError::TooLarge { dtype: to, n_per_row, rows: n_rows };
        let len = n_rows.checked_mul(to_row).and_then(|len| usize::try_from(len).ok()).ok_or(too_large)?;
        out.reserve(len);

        let batch = batch_rows(n_per_row, n_rows);
        let mut decode = decoder(from)?;
        let mut floats = vec![0.0; (batch * n_per_row) as usize];
        let mut encoded = Aligned::default();
        for (i, rows) in bytes.chunks((batch * from_row) as usize).enumerate() {
            let n = rows.len() as u64 / from_row;
            let floats = &mut floats[..(n * n_per_row) as usize];
            let first = i as u64 * batch;
            decode(rows, floats);
            check_values(floats, to, n_per_row, first)?;
            let encoded = encoded.bytes((n * to_row) as usize);
            if !encode(to, floats, n_per_row, importance, encoded) {
                return Err(RecodeError::Invalid { dtype: to, row: first, rows: n });
            }
            out.extend_from_slice(encoded);
        }
        Ok(())
    }

    fn dequantise(&self, from: GgmlType, n_per_row: u64, bytes: &[u8], out: &mut Vec<f32>) -> Result<(), RecodeError> {
        let (n_rows, from_row) = count_rows(from, n_per_row, bytes.len())?;
        let mut decode = decoder(from)?;
        let too_large = RecodeError::TooLarge { dtype: GgmlType::F32, n_per_row, rows: n_rows };
        let len = n_rows.checked_mul(n_per_row).filter(|len| *len <= isize::MAX as u64 / 4).ok_or(too_large)?;
        out.clear();
        out.resize(len as usize, 0.0);
        let batch = batch_rows(n_per_row, n_rows);
        let batches = bytes.chunks((batch * from_row) as usize).zip(out.chunks_mut((batch * n_per_row) as usize));
        for (rows, floats) in batches {
            decode(rows, floats);
        }
        Ok(())
    }

    fn supports(&self, to: GgmlType) -> Result<(), RecodeError> {
        match ENCODABLE.contains(&to.name()) {
            true => Ok(()),
            false => Err(RecodeError::NotEncodable { dtype: to }),
        }
    }

    fn needs_importance(&self, to: GgmlType) -> bool {
        // SAFETY: a pure function of a type id that ggml knows.
        unsafe { llama::ggml_quantize_requires_imatrix(to.id()) }
    }
}

/// Rows of a batch, at least one.
fn batch_rows(n_per_row: u64, n_rows: u64) -> u64 {
    (BATCH_ELEMENTS / n_per_row).clamp(1, n_rows.max(1))
}

fn check_values(floats: &[f32], to: GgmlType, n_per_row: u64, first: u64) -> Result<(), RecodeError> {
    let limit = match to {
        GgmlType::F32 | GgmlType::BF16 => f32::MAX,
        _ => QUANTISED_MAX,
    };
    // A comparison with NaN is false, so NaN fails the check.
    let Some(at) = floats.iter().position(|value| !(-limit..=limit).contains(value)) else { return Ok(()) };
    let (row, column, value) = (first + at as u64 / n_per_row, at as u64 % n_per_row, floats[at]);
    Err(match value.is_finite() {
        true => RecodeError::OutOfRange { dtype: to, row, column, value, limit },
        false => RecodeError::NotFinite { row, column, value },
    })
}

/// Decodes rows of one type: as many whole blocks as `floats` has room for.
fn decoder(from: GgmlType) -> Result<impl FnMut(&[u8], &mut [f32]), RecodeError> {
    // SAFETY: returns the address of an entry of a static table; the id is one of current llama.cpp.
    let to_float = unsafe { (*llama::ggml_get_type_traits(from.id())).to_float };
    if to_float.is_none() && from != GgmlType::F32 {
        return Err(RecodeError::NotDecodable { dtype: from });
    }
    let mut aligned = Aligned::default();
    Ok(move |rows: &[u8], floats: &mut [f32]| {
        let Some(to_float) = to_float.filter(|_| from != GgmlType::F32) else {
            for (value, le) in floats.iter_mut().zip(rows.as_chunks().0) {
                *value = f32::from_le_bytes(*le);
            }
            return;
        };
        let aligned = aligned.bytes(rows.len());
        aligned.copy_from_slice(rows);
        // SAFETY: the source is aligned for every block type and holds `floats.len()` elements in whole blocks (the
        // callers derive both lengths from one number of rows); the destination is exclusively ours.
        unsafe { to_float(aligned.as_ptr().cast(), floats.as_mut_ptr(), floats.len() as i64) }
    })
}

/// Quantises whole rows into `encoded`, which has exactly their size. False if the result is not finite.
pub(super) fn encode(
    to: GgmlType,
    floats: &[f32],
    n_per_row: u64,
    importance: Option<&[f32]>,
    encoded: &mut [u8],
) -> bool {
    let n_rows = floats.len() as u64 / n_per_row;
    debug_assert_eq!(to.row_bytes(n_per_row).map(|bytes| bytes * n_rows), Some(encoded.len() as u64));
    let importance = importance.map_or(std::ptr::null(), <[f32]>::as_ptr);
    // SAFETY: `to` is encodable, rows are whole blocks of it, floats are finite and within range, `importance` is null
    // or has `n_per_row` values and is given where it is needed, and `encoded` (aligned for every block type) has room
    // for `n_rows` rows. ggml guards its codebook tables with a lock of its own.
    unsafe {
        let dst = encoded.as_mut_ptr().cast();
        llama::ggml_quantize_chunk(to.id(), floats.as_ptr(), dst, 0, n_rows as i64, n_per_row as i64, importance);
        llama::ggml_validate_row_data(to.id(), encoded.as_ptr().cast(), encoded.len())
    }
}

/// Bytes at an address that suits every block type: ggml's blocks contain f16 pairs and f32.
#[derive(Default)]
pub(super) struct Aligned(Vec<u64>);

impl Aligned {
    /// The first `len` bytes, of unspecified content.
    pub(super) fn bytes(&mut self, len: usize) -> &mut [u8] {
        let words = len.div_ceil(size_of::<u64>());
        if self.0.len() < words {
            self.0.resize(words, 0);
        }
        // SAFETY: the vector owns at least `len` initialised bytes, any of which may be any `u8`; the borrow is
        // exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }
}

#[cfg(test)]
mod tests;
