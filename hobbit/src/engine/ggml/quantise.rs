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
        if ENCODABLE.contains(&to.name()) { Ok(()) } else { Err(RecodeError::NotEncodable { dtype: to }) }
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
    Err(if value.is_finite() {
        RecodeError::OutOfRange { dtype: to, row, column, value, limit }
    } else {
        RecodeError::NotFinite { row, column, value }
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
pub(crate) fn encode(
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
pub(crate) struct Aligned(Vec<u64>);

impl Aligned {
    /// The first `len` bytes, of unspecified content.
    pub(crate) fn bytes(&mut self, len: usize) -> &mut [u8] {
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
mod tests {
    use super::*;

    fn dtype(name: &str) -> GgmlType {
        GgmlType::from_name(name).unwrap_or_else(|| panic!("{name}"))
    }

    /// Reproducible, roughly normal values with a spread of about 1: sums of uniform numbers.
    fn values(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut unit = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 24) as f32
        };
        (0..n).map(|_| (0..12).map(|_| unit()).sum::<f32>() - 6.0).collect()
    }

    fn f32_bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    /// Encodes floats as `to` and decodes them again.
    fn there_and_back(values: &[f32], to: GgmlType, n_per_row: u64, importance: Option<&[f32]>) -> Vec<f32> {
        let (mut encoded, mut decoded) = (Vec::new(), Vec::new());
        Ggml.recode(GgmlType::F32, to, n_per_row, &f32_bytes(values), importance, &mut encoded).unwrap();
        Ggml.dequantise(to, n_per_row, &encoded, &mut decoded).unwrap();
        decoded
    }

    fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
        assert_eq!(found.len(), expected.len());
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
        let error = square(&mut found.iter().zip(expected).map(|(a, b)| a - b));
        (error / square(&mut expected.iter().copied())).sqrt() as f32
    }

    /// ggml owns the table: a type missing here could not be chosen, an extra one would make ggml abort.
    #[test]
    fn every_type_is_encoded_as_well_as_its_bits_allow() {
        let ggml = Ggml;
        let weights = values(512 * 4, 2);
        let importance = vec![1.0; 512];
        for to in GgmlType::all() {
            if ggml.supports(to).is_err() {
                let refused = ggml.recode(GgmlType::F32, to, 512, &f32_bytes(&weights), None, &mut Vec::new());
                assert_eq!(refused, Err(RecodeError::NotEncodable { dtype: to }));
                assert!(["q8_1", "q8_K", "i8", "i16", "i32", "i64", "f64"].contains(&to.name()), "{to}");
                continue;
            }
            let error = relative_error(&there_and_back(&weights, to, 512, Some(&importance)), &weights);
            let bits = to.type_size() as f32 * 8.0 / to.block_size() as f32;
            let bound = match to.name() {
                // For weights that are ternary or binary already: the scale is the largest weight.
                "tq1_0" | "tq2_0" | "q1_0" | "q2_0" => 0.9,
                _ if bits >= 16.0 => 4e-3,
                // Halves with every bit.
                _ => (1.4 * (1.0 - bits).exp2()).clamp(0.01, 0.8),
            };
            assert!(error < bound, "{to} with {bits} bits: relative error {error}, bound {bound}");
        }
    }

    /// llama.cpp's quantisers assert that their searches succeed. Weights that pass our check must not fail them.
    #[test]
    fn odd_weights_and_importances_never_end_the_process() {
        let n = 256;
        let spread = |scale: f32| values(n, 4).iter().map(|v| v * scale).collect::<Vec<f32>>();
        let mut rows: Vec<Vec<f32>> =
            [0.0, 1e-40, 1e-30, 1e-20, 1e-15, 1e-10, 1e-8, 1e-5, 1.0, 1e3, 1e4].map(spread).into();
        rows.push(vec![1.0; n]);
        rows.push(vec![-65504.0; n]);
        rows.push(vec![-0.0; n]);
        rows.push((0..n).map(|i| if i % 37 == 0 { 65504.0 } else { 0.0 }).collect());
        rows.push((0..n).map(|i| 10f32.powi(i as i32 % 42 - 38) * if i % 3 == 0 { -1.0 } else { 1.0 }).collect());
        let mut importances: Vec<Vec<f32>> =
            [0.0, 1e-40, 1e-30, 1e-10, 1.0, 1e6, 1e12, 1e18].map(|v| vec![v; n]).into();
        importances.push((0..n).map(|i| if i % 64 < 32 { 0.0 } else { 1.0 }).collect());
        importances.push((0..n).map(|i| 10f32.powi(i as i32 % 50 - 32)).collect());
        let ggml = Ggml;
        let mut out = Vec::new();
        for to in GgmlType::all().filter(|to| ggml.supports(*to).is_ok()) {
            for row in &rows {
                let bytes = f32_bytes(row);
                for importance in importances.iter().map(Some).chain([None]) {
                    let importance = importance.map(Vec::as_slice);
                    let result = ggml.recode(GgmlType::F32, to, n as u64, &bytes, importance, &mut out);
                    match result {
                        Ok(()) => assert_eq!(Some(out.len() as u64), to.row_bytes(n as u64)),
                        Err(RecodeError::ImportanceMissing { .. }) => assert!(ggml.needs_importance(to)),
                        Err(other) => panic!("{to}: {other}"),
                    }
                }
            }
        }
    }

    #[test]
    fn batches_and_unaligned_sources_change_nothing() {
        let ggml = Ggml;
        let n_rows = 3 * BATCH_ELEMENTS as usize / 256 + 1;
        let weights = values(256 * n_rows, 5);
        let mut shifted = vec![0; 1];
        let mut f16 = Vec::new();
        ggml.recode(GgmlType::F32, GgmlType::F16, 256, &f32_bytes(&weights), None, &mut f16).unwrap();
        shifted.extend_from_slice(&f16);
        for to in ["q4_0", "q2_K", "q6_K", "f32"].map(dtype) {
            let (mut whole, mut one) = (Vec::new(), Vec::new());
            ggml.recode(GgmlType::F16, to, 256, &shifted[1..], None, &mut whole).unwrap();
            let row = to.row_bytes(256).unwrap() as usize;
            assert_eq!(whole.len(), row * n_rows);
            for i in [0, 1, 255, 256, n_rows - 1] {
                ggml.recode(GgmlType::F16, to, 256, &f16[i * 512..(i + 1) * 512], None, &mut one).unwrap();
                assert!(one == whole[i * row..(i + 1) * row], "{to}, row {i}");
            }
        }
    }

    #[test]
    fn threads_get_the_same_bits() {
        let weights = f32_bytes(&values(512 * 8, 6));
        let importance = values(512, 7).iter().map(|v| v * v).collect::<Vec<_>>();
        let quantise = |name| {
            let mut out = Vec::new();
            Ggml.recode(GgmlType::F32, dtype(name), 512, &weights, Some(&importance), &mut out).unwrap();
            out
        };
        std::thread::scope(|scope| {
            let names = ["iq2_xxs", "iq2_xs", "iq3_xxs", "iq3_s"];
            let threads: Vec<_> = names.iter().map(|name| scope.spawn(|| quantise(name))).collect();
            for (thread, name) in threads.into_iter().zip(names) {
                assert!(thread.join().unwrap() == quantise(name), "{name}");
            }
        });
    }

    #[test]
    fn bad_input_is_an_error_with_its_place() {
        let ggml = Ggml;
        let (q4_k, iq2_xxs, i32) = (dtype("q4_K"), dtype("iq2_xxs"), dtype("i32"));
        let recode = |from, to, n_per_row, bytes: &[u8], importance: Option<&[f32]>| {
            ggml.recode(from, to, n_per_row, bytes, importance, &mut Vec::new())
        };
        let (zeros, f32) = (vec![0; 4 * 256], GgmlType::F32);
        let mut importance = vec![1.0; 256];
        importance[9] = -1.0;
        for (from, to, n_per_row, bytes, importance, expected) in [
            (f32, q4_k, 128, &zeros[..], None, RecodeError::RowLength { dtype: q4_k, n_per_row: 128 }),
            (f32, q4_k, 0, &zeros, None, RecodeError::RowLength { dtype: f32, n_per_row: 0 }),
            (i32, q4_k, 256, &zeros, None, RecodeError::NotDecodable { dtype: i32 }),
            (f32, iq2_xxs, 256, &zeros, None, RecodeError::ImportanceMissing { dtype: iq2_xxs }),
            (f32, q4_k, 256, &zeros, Some(&[1.0][..]), RecodeError::ImportanceLength { found: 1, expected: 256 }),
            (f32, q4_k, 256, &zeros, Some(&importance), RecodeError::ImportanceValue { column: 9, value: -1.0 }),
        ] {
            assert_eq!(recode(from, to, n_per_row, bytes, importance), Err(expected));
        }
        let odd = recode(f32, q4_k, 256, &zeros[1..], None);
        assert!(matches!(odd, Err(RecodeError::DataLength { found: 1023, .. })));
        let short = recode(q4_k, q4_k, 256, &zeros, None);
        assert!(matches!(short, Err(RecodeError::DataLength { row_bytes: 144, .. })));

        let with = |at: usize, value: f32| {
            let mut weights = values(256 * 300, 8);
            weights[at] = value;
            f32_bytes(&weights)
        };
        let inf = f32::INFINITY;
        assert_eq!(
            recode(GgmlType::F32, q4_k, 256, &with(256 * 299 + 7, inf), None),
            Err(RecodeError::NotFinite { row: 299, column: 7, value: inf })
        );
        assert!(matches!(
            recode(GgmlType::F32, GgmlType::F16, 256, &with(3, f32::NAN), None),
            Err(RecodeError::NotFinite { row: 0, column: 3, value }) if value.is_nan()
        ));
        let limit = QUANTISED_MAX;
        assert_eq!(
            recode(GgmlType::F32, q4_k, 256, &with(256, -2e6), None),
            Err(RecodeError::OutOfRange { dtype: q4_k, row: 1, column: 0, value: -2e6, limit })
        );
        assert!(matches!(
            recode(GgmlType::F32, GgmlType::F16, 256, &with(0, 65505.0), None),
            Err(RecodeError::OutOfRange { limit: 65504.0, .. })
        ));
        // A quantised type can hold infinity in its scales.
        let mut q8_0 = vec![0u8; 34];
        q8_0[..2].copy_from_slice(&[0, 0x7c]);
        q8_0[2] = 1;
        assert_eq!(
            recode(GgmlType::Q8_0, GgmlType::F32, 32, &q8_0, None),
            Err(RecodeError::NotFinite { row: 0, column: 0, value: inf })
        );
    }

    #[test]
    fn equal_types_are_copied() {
        let bytes: Vec<u8> = (0..=255).cycle().take(292 * 2).collect();
        let mut out = Vec::new();
        Ggml.recode(dtype("q8_K"), dtype("q8_K"), 512, &bytes, None, &mut out).unwrap();
        assert_eq!(out, bytes);
        Ggml.recode(GgmlType::F16, GgmlType::Q8_0, 64, &[], None, &mut out).unwrap();
        assert!(out.is_empty());
    }
}
