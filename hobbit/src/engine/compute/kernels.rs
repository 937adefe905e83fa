//! Which of ggml's kernels multiplies the rows of one expert in a batch: `MUL_MAT_ID`, as llama.cpp has it, or a plain `MUL_MAT`
//! on the same rows, which reaches tiled kernels for types that the other multiplies row by row.
//!
//! The plain one is taken where it gives the same bits and is faster, both as seen on this machine: of random weights, once
//! for each type and shape, when a batch first has enough rows.

use std::time::{Duration, Instant};

use super::*;
use crate::engine::quantise::{self, Aligned, Ggml};
use crate::engine::repack::Interleaving;
use crate::gguf::{GgmlType, Recode};
use crate::store::Rearrange;

/// Rows that are timed. Fewer are not worth a gather.
const ROWS: [usize; 3] = [16, 32, 64];

/// The least of them.
pub(super) const ROWS_MIN: usize = ROWS[0];

/// Rows that have to give the same bits: kernels handle the rows that fill no tile apart.
const COMPARED: [usize; 14] = [16, 17, 18, 19, 20, 21, 22, 23, 24, 31, 33, 47, 63, 64];

/// Elements of the weights that are tried; and a tile of any kernel divides so many rows of theirs.
const ELEMENTS_MAX: i64 = 1 << 20;
const TILE_ROWS: i64 = 64;

/// Of the time of `MUL_MAT_ID`, what the plain product may take at most: rows are gathered for it.
const TIME_MAX: f64 = 0.9;

/// How often each is timed; the best counts.
const TRIES: usize = 3;

/// Type, row length and rows of weights, and whether their bytes are in an order of their own.
type Key = (llama::ggml_type, i64, i64, bool);

/// From how many rows on the plain product is taken.
#[derive(Default)]
pub(super) struct Kernels(Vec<(Key, usize)>);

impl Kernels {
    /// The least number of rows of one expert that a plain product multiplies as well and faster; `usize::MAX` where it
    /// never does.
    ///
    /// # Safety
    /// `product` is a live product of ours; nothing waits in `inner`.
    pub(super) unsafe fn plain_from(&mut self, inner: &mut Inner, product: &ggml_tensor, view: ShareView<'_>) -> usize {
        // SAFETY: by the caller.
        let [ne0, ne1, ..] = unsafe { (*product.src[0]).ne };
        let type_ = view.type_id as llama::ggml_type;
        let key = (type_, ne0, ne1, view.interleaving.is_some());
        if let Some((_, rows)) = self.0.iter().find(|(known, _)| *known == key) {
            return *rows;
        }
        let rows = Trial::new(inner, product, (type_, ne0, ne1), view.interleaving)
            .map_or(usize::MAX, |mut trial| trial.plain_from());
        self.0.push((key, rows));
        rows
    }
}

/// Random weights and rows.
struct Trial<'a> {
    inner: &'a mut Inner,
    /// Gives the parameters of the operation, and host memory's buffer.
    neighbour: &'a ggml_tensor,
    type_: llama::ggml_type,
    interleaving: Option<&'a Interleaving>,
    ne: [i64; 2],
    weights: Aligned,
    bytes: usize,
    input: Vec<f32>,
    ids: Vec<i32>,
    results: [Vec<f32>; 2],
}

impl<'a> Trial<'a> {
    /// `None` where such weights cannot be made, or the product is to be made in a way of its own.
    fn new(
        inner: &'a mut Inner,
        neighbour: &'a ggml_tensor,
        (type_, ne0, ne1): (llama::ggml_type, i64, i64),
        interleaving: Option<&'a Interleaving>,
    ) -> Option<Self> {
        let dtype = GgmlType::from_id(type_)?;
        // Rows so long that a trial would take memory that no budget knows of.
        let is_long = ne0 > ELEMENTS_MAX / ROWS_MIN as i64;
        if is_long || Ggml.supports(dtype).is_err() || neighbour.op_params.iter().any(|&param| param != 0) {
            return None;
        }
        // As many rows modulo a tile as the experts have.
        let n_rows = (ELEMENTS_MAX / ne0 / TILE_ROWS * TILE_ROWS).max(TILE_ROWS) + ne1 % TILE_ROWS;
        let n_rows = n_rows.min(ne1);
        let mut random = rand_mt::Mt::new(1);
        let mut floats =
            |n: usize| -> Vec<f32> { (0..n).map(|_| random.next_u32() as f32 / u32::MAX as f32 - 0.5).collect() };
        let bytes = dtype.row_bytes(ne0 as u64)?.checked_mul(n_rows as u64)? as usize;
        let (values, ones) = (floats((ne0 * n_rows) as usize), vec![1.0; ne0 as usize]);
        let mut weights = Aligned::default();
        if !quantise::encode(dtype, &values, ne0 as u64, Some(&ones), weights.bytes(bytes)) {
            return None;
        }
        if let Some(interleaving) = interleaving {
            let as_in_files = weights.bytes(bytes).to_vec();
            interleaving.rearrange(&as_in_files, weights.bytes(bytes));
        }
        let n = ROWS[ROWS.len() - 1];
        let results = [(); 2].map(|()| vec![0.0; n * n_rows as usize]);
        let input = floats(n * ne0 as usize);
        Some(Self {
            inner,
            neighbour,
            type_,
            interleaving,
            ne: [ne0, n_rows],
            weights,
            bytes,
            input,
            ids: vec![0; n],
            results,
        })
    }

    fn plain_from(&mut self) -> usize {
        let is_faster = |own: &mut Self, n: usize| {
            let mut best = [f64::INFINITY; 2];
            for _ in 0..TRIES {
                for (is_plain, best) in best.iter_mut().enumerate() {
                    let Some(time) = own.run(n, is_plain == 1) else { return false };
                    *best = best.min(time.as_secs_f64());
                }
            }
            best[1] <= TIME_MAX * best[0]
        };
        let mut from = usize::MAX;
        for n in ROWS.into_iter().rev() {
            if !is_faster(self, n) {
                break;
            }
            from = n;
        }
        let is_equal = |own: &mut Self, n: usize| {
            let both = own.run(n, false).is_some() && own.run(n, true).is_some();
            let len = n * own.ne[1] as usize;
            let bits = |result: &[f32]| result[..len].iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            both && bits(&own.results[0]) == bits(&own.results[1])
        };
        if from < usize::MAX && COMPARED.into_iter().all(|n| is_equal(self, n)) { from } else { usize::MAX }
    }

    /// Multiplies `n` rows one way or the other; `None` where ggml fails.
    fn run(&mut self, n: usize, is_plain: bool) -> Option<Duration> {
        let [ne0, ne1] = self.ne;
        let result = self.results[usize::from(is_plain)].as_mut_ptr();
        let f32s = |ne, data: *mut f32| plain_tensor(llama::GGML_TYPE_F32, ne, data.cast(), self.neighbour);
        let mut weights =
            blank(self.type_, [ne0, ne1, 1, 1], self.weights.bytes(self.bytes).as_mut_ptr().cast(), self.neighbour);
        let row = self.bytes / ne1 as usize;
        // SAFETY: a pure function of a type that ggml knows.
        weights.nb = [unsafe { llama::ggml_type_size(self.type_) }, row, self.bytes, self.bytes];
        self.interleaving.iter().for_each(|interleaving| interleaving.mark(&mut weights));
        let rows = if is_plain { [ne0, n as i64, 1, 1] } else { [ne0, 1, n as i64, 1] };
        let input = f32s(rows, self.input.as_mut_ptr());
        let ids = plain_tensor(llama::GGML_TYPE_I32, [1, n as i64, 1, 1], self.ids.as_mut_ptr().cast(), self.neighbour);
        let mut product = f32s([ne1, rows[1], rows[2], 1], result);
        product.op = if is_plain { llama::GGML_OP_MUL_MAT } else { llama::GGML_OP_MUL_MAT_ID };
        product.flags = llama::GGML_TENSOR_FLAG_COMPUTE as i32;
        product.src[0] = self.inner.tensor(weights);
        product.src[1] = self.inner.tensor(input);
        product.src[2] = if is_plain { std::ptr::null_mut() } else { self.inner.tensor(ids) };
        let product = self.inner.tensor(product);
        // SAFETY: the node's memory is ours until the run is over.
        unsafe { self.inner.add(product) };
        let started = Instant::now();
        (self.inner.run() == GGML_STATUS_SUCCESS).then(|| started.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was found on this machine is exact wherever it is taken; the types that ggml tiles by themselves gain nothing.
    #[test]
    fn what_is_taken_gives_the_same_bits() {
        let mut inner = Inner::new().expect("ggml has a CPU");
        inner.set_n_threads(2);
        // SAFETY: all-zero is a valid `ggml_tensor`.
        let neighbour: ggml_tensor = unsafe { std::mem::zeroed() };
        let cases = [
            ("q8_0", 256, 96, false),
            ("q4_0", 512, 72, false),
            ("f16", 256, 64, false),
            ("q4_K", 256, 128, false),
            ("q4_0", 512, 80, true),
            ("q4_K", 256, 128, true),
            ("mxfp4", 256, 128, true),
        ];
        for (name, ne0, ne1, is_rearranged) in cases {
            let dtype = GgmlType::from_name(name).unwrap();
            let type_ = dtype.id() as llama::ggml_type;
            let interleaving = if is_rearranged { Interleaving::of(dtype, ne0 as u64, ne1 as u64) } else { None };
            if interleaving.is_none() && is_rearranged {
                continue;
            }
            let shape = (type_, ne0, ne1);
            let mut trial =
                Trial::new(&mut inner, &neighbour, shape, interleaving.as_deref()).expect("weights can be made");
            assert_eq!(trial.ne, [ne0, ne1]);
            let from = trial.plain_from();
            assert!(ROWS.contains(&from) || from == usize::MAX, "{name}: {from}");
            for n in [16, 40, 64].into_iter().filter(|&n| n >= from) {
                assert!(trial.run(n, false).is_some() && trial.run(n, true).is_some());
                let len = n * ne1 as usize;
                assert_eq!(trial.results[0][..len], trial.results[1][..len], "{name}: {n} rows");
            }
            assert!(trial.results[0].iter().any(|value| *value != 0.0), "{name}: something was multiplied");
        }
        let long = ((1 << 20) + 256, 64);
        let type_ = GgmlType::from_name("q8_0").unwrap().id() as llama::ggml_type;
        assert!(Trial::new(&mut inner, &neighbour, (type_, long.0, long.1), None).is_none(), "too long to be tried");
        let with_params = ggml_tensor { op_params: [1; 16], ..neighbour };
        assert!(Trial::new(&mut inner, &with_params, (type_, 256, 96), None).is_none(), "a precision was asked for");
    }
}
