//! Chooses the ggml kernel for the rows of one expert in a batch: llama.cpp's `MUL_MAT_ID`, or a plain `MUL_MAT` on the
//! same rows, which has tiled kernels for types that `MUL_MAT_ID` multiplies row by row.
//!
//! The plain one is used if it is faster and gives the same bits (or any bits, if the caller allows that). Both are
//! measured on this machine with random weights, once per process for each type and shape, when a batch first has
//! enough rows.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::*;
use crate::engine::ggml::quantise::{self, Aligned, Ggml};
use crate::engine::ggml::repack::Interleaving;
use hobbit_core::gguf::{GgmlType, Recode};
use hobbit_core::options::KernelChoice;
use hobbit_core::stats::{KernelSpeed, KernelTrial};
use hobbit_core::store::Rearrange;

/// Row counts that are timed. Fewer rows wait for the weights, which a trial finds in the processor's caches, and
/// gained nothing in measurements.
const ROWS: [usize; 3] = [8, 16, 64];

/// The smallest of them.
pub(crate) const ROWS_MIN: usize = ROWS[0];

/// Row counts that must give the same bits where the plain kernel is used: kernels handle rows that fill no tile
/// separately.
const COMPARED: [usize; 16] = [8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 23, 24, 31, 33, 63, 64];

/// Maximum elements of a trial's weights, and a multiple of the row count of any kernel's tile.
const ELEMENTS_MAX: i64 = 1 << 20;
const TILE_ROWS: i64 = 64;

/// Weight rows that are generated and then repeated: quantising may take longer than all products.
const ROWS_MADE: i64 = 32;

/// Minimum speed of the plain product, in percent of the other's: its rows must be gathered first.
const PERCENT_MIN: u32 = 110;

/// Number of timings of each kernel; the best counts.
const TRIES: usize = 3;

/// Properties of weights on which the choice depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    type_: llama::ggml_type,
    /// Row length, and rows.
    shape: [i64; 2],
    /// Their bytes are in the order of llama.cpp's kernels for this CPU.
    is_rearranged: bool,
    threads: c_int,
}

/// The trials of this process, in order; `None` if no trial is possible.
static TRIED: Mutex<Vec<(Key, Option<KernelTrial>)>> = Mutex::new(Vec::new());

fn tried() -> MutexGuard<'static, Vec<(Key, Option<KernelTrial>)>> {
    // Results from before a panic are valid.
    TRIED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The trials of this process so far, in order.
pub(crate) fn trials() -> Vec<KernelTrial> {
    tried().iter().filter_map(|(_, trial)| trial.clone()).collect()
}

/// The kernels of one context.
pub(super) struct Kernels {
    choice: KernelChoice,
    n_threads: c_int,
}

impl Kernels {
    pub(super) fn new(choice: KernelChoice) -> Self {
        Self { choice, n_threads: 0 }
    }

    /// As [`Inner::set_n_threads`].
    pub(super) fn set_n_threads(&mut self, n_threads: c_int) {
        self.n_threads = n_threads;
    }

    /// The smallest number of rows of one expert for which the plain product is as good and faster; `usize::MAX` if
    /// there is none.
    ///
    /// # Safety
    /// `product` is a live product; nothing waits in `inner`.
    pub(super) unsafe fn plain_from(
        &self,
        inner: &mut Inner,
        product: &ggml_tensor,
        type_: llama::ggml_type,
        interleaving: Option<&Interleaving>,
    ) -> usize {
        // SAFETY: by the caller.
        let [ne0, ne1, ..] = unsafe { (*product.src[0]).ne };
        let is_rearranged = interleaving.is_some();
        let key = Key { type_, shape: [ne0, ne1], is_rearranged, threads: self.n_threads };
        // Held during the trial: a second trial at the same time would spoil its times.
        let mut tried = tried();
        let known = tried.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
            let started = Instant::now();
            let mut found = TrialProduct::new(inner, product, key, interleaving).map(|mut trial| trial.outcome());
            if let Some(found) = &mut found {
                found.took_ns = started.elapsed().as_nanos() as u64;
            }
            tried.push((key, found));
            tried.len() - 1
        });
        tried[known].1.as_ref().and_then(|trial| trial.plain_from(self.choice)).unwrap_or(usize::MAX)
    }
}

/// Whether the plain product may be used for weights of `type_` and shape `[ne0, ne1]` in the files' byte order, as far
/// as is known.
pub(crate) fn may_be_plain(choice: KernelChoice, type_: llama::ggml_type, ne0: i64, ne1: i64) -> bool {
    let tried = tried();
    let is_such = |key: &Key| (key.type_, key.shape, key.is_rearranged) == (type_, [ne0, ne1], false);
    let mut known = tried.iter().filter(|(key, _)| is_such(key)).peekable();
    let is_taken = |trial: &KernelTrial| trial.plain_from(choice).is_some();
    known.peek().is_none() || known.any(|(_, trial)| trial.as_ref().is_some_and(is_taken))
}

/// Whether quantising to a type searches a codebook, whose tables alone may take seconds; no kernel tiles such a type.
fn is_slow(dtype: GgmlType) -> bool {
    ["iq1", "iq2", "iq3"].iter().any(|family| dtype.name().starts_with(family))
}

/// A trial with random weights and rows.
struct TrialProduct<'a> {
    inner: &'a mut Inner,
    /// Provides the operation's parameters and host memory's buffer.
    neighbour: &'a ggml_tensor,
    type_: GgmlType,
    key: Key,
    interleaving: Option<&'a Interleaving>,
    /// Row length and number of rows of the trial's weights.
    ne: [i64; 2],
    weights: Aligned,
    bytes: usize,
    input: Vec<f32>,
    ids: Vec<i32>,
    results: [Vec<f32>; 2],
}

impl<'a> TrialProduct<'a> {
    /// `None` if such weights cannot be made, or if the product needs special parameters.
    fn new(
        inner: &'a mut Inner,
        neighbour: &'a ggml_tensor,
        key: Key,
        interleaving: Option<&'a Interleaving>,
    ) -> Option<Self> {
        let (dtype, [ne0, ne1]) = (GgmlType::from_id(key.type_)?, key.shape);
        // Such long rows would take memory that no budget includes.
        let is_long = ne0 > ELEMENTS_MAX / ROWS_MIN as i64;
        if is_long
            || is_slow(dtype)
            || Ggml.supports(dtype).is_err()
            || neighbour.op_params.iter().any(|&param| param != 0)
        {
            return None;
        }
        // The row count equals the experts' modulo a tile.
        let n_rows = (ELEMENTS_MAX / ne0 / TILE_ROWS * TILE_ROWS).max(TILE_ROWS) + ne1 % TILE_ROWS;
        let n_rows = n_rows.min(ne1);
        let mut random = rand_mt::Mt::new(1);
        let mut floats =
            |n: usize| -> Vec<f32> { (0..n).map(|_| random.next_u32() as f32 / u32::MAX as f32 - 0.5).collect() };
        let row = dtype.row_bytes(ne0 as u64)? as usize;
        let (bytes, n_made) = (row.checked_mul(n_rows as usize)?, n_rows.min(ROWS_MADE));
        let (values, ones) = (floats((ne0 * n_made) as usize), vec![1.0; ne0 as usize]);
        let mut weights = Aligned::default();
        let (made, again) = weights.bytes(bytes).split_at_mut(row * n_made as usize);
        if !quantise::encode(dtype, &values, ne0 as u64, Some(&ones), made) {
            return None;
        }
        again.chunks_mut(made.len()).for_each(|rows| rows.copy_from_slice(&made[..rows.len()]));
        if let Some(interleaving) = interleaving {
            let as_in_files = weights.bytes(bytes).to_vec();
            interleaving.rearrange(&as_in_files, weights.bytes(bytes));
        }
        let n = ROWS[ROWS.len() - 1];
        let results = [(); 2].map(|()| vec![0.0; n * n_rows as usize]);
        let input = floats(n * ne0 as usize);
        let (ne, ids) = ([ne0, n_rows], vec![0; n]);
        Some(Self { inner, neighbour, type_: dtype, key, interleaving, ne, weights, bytes, input, ids, results })
    }

    fn outcome(&mut self) -> KernelTrial {
        let mut found = KernelTrial {
            dtype: self.type_.name().to_owned(),
            n_in: self.key.shape[0] as u64,
            n_out: self.key.shape[1] as u64,
            rearranged: self.key.is_rearranged,
            threads: self.key.threads,
            ..KernelTrial::default()
        };
        for rows in ROWS.into_iter().rev() {
            let Some(percent) = self.percent(rows) else { break };
            found.speeds.push(KernelSpeed { rows, percent });
            if percent < PERCENT_MIN {
                break;
            }
            found.from_rows = Some(rows);
        }
        found.identical =
            found.from_rows.map(|from| COMPARED.into_iter().filter(|&n| n >= from).all(|n| self.is_equal(n)));
        found
    }

    /// The plain product's speed at `n` rows, in percent of the other's; `None` where ggml fails.
    fn percent(&mut self, n: usize) -> Option<u32> {
        let mut best = [Duration::MAX; 2];
        for _ in 0..TRIES {
            for (is_plain, best) in best.iter_mut().enumerate() {
                *best = self.run(n, is_plain == 1)?.min(*best);
            }
        }
        let [by_id, plain] = best.map(|time| time.as_nanos().max(1));
        u32::try_from(by_id * 100 / plain).ok()
    }

    fn is_equal(&mut self, n: usize) -> bool {
        let both = self.run(n, false).is_some() && self.run(n, true).is_some();
        let [by_id, plain] = &self.results;
        let bits = |result: &[f32]| result.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let len = n * self.ne[1] as usize;
        both && bits(&by_id[..len]) == bits(&plain[..len])
    }

    /// Multiplies `n` rows by one kernel or the other; `None` if ggml fails.
    fn run(&mut self, n: usize, is_plain: bool) -> Option<Duration> {
        let [ne0, ne1] = self.ne;
        let result = self.results[usize::from(is_plain)].as_mut_ptr();
        let f32s = |ne, data: *mut f32| plain_tensor(llama::GGML_TYPE_F32, ne, data.cast(), self.neighbour);
        let mut weights = plain_tensor(
            self.type_.id() as llama::ggml_type,
            [ne0, ne1, 1, 1],
            self.weights.bytes(self.bytes).as_mut_ptr().cast(),
            self.neighbour,
        );
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
        self.inner.run().is_ok().then(|| started.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id_of(name: &str) -> llama::ggml_type {
        GgmlType::from_name(name).unwrap().id() as llama::ggml_type
    }

    fn inner() -> Inner {
        let mut inner = Inner::new().expect("ggml has a CPU");
        inner.set_n_threads(2);
        inner
    }

    fn neighbour() -> ggml_tensor {
        // SAFETY: all-zero is a valid `ggml_tensor`.
        unsafe { std::mem::zeroed() }
    }

    const CASES: [(&str, i64, i64, bool); 9] = [
        ("q8_0", 256, 96, false),
        ("q4_0", 512, 72, false),
        ("f16", 256, 64, false),
        ("bf16", 512, 96, false),
        ("iq4_nl", 256, 64, false),
        ("q4_K", 256, 128, false),
        ("q4_0", 512, 80, true),
        ("q4_K", 256, 128, true),
        ("mxfp4", 256, 128, true),
    ];

    fn key(name: &str, [ne0, ne1]: [i64; 2], is_rearranged: bool, threads: c_int) -> Key {
        Key { type_: id_of(name), shape: [ne0, ne1], is_rearranged, threads }
    }

    /// Kernels found identical give the same bits, the others nearly the same.
    #[test]
    fn adopted_kernels_give_equal_or_nearly_equal_bits() {
        let (mut inner, neighbour) = (inner(), neighbour());
        for (name, ne0, ne1, is_rearranged) in CASES {
            let dtype = GgmlType::from_name(name).unwrap();
            let interleaving = if is_rearranged { Interleaving::of(dtype, ne0 as u64, ne1 as u64) } else { None };
            if interleaving.is_none() && is_rearranged {
                // Which types these are, ggml decides by the CPU.
                continue;
            }
            let key = key(name, [ne0, ne1], is_rearranged, 2);
            let mut trial =
                TrialProduct::new(&mut inner, &neighbour, key, interleaving.as_deref()).expect("weights can be made");
            assert_eq!(trial.ne, [ne0, ne1]);
            let found = trial.outcome();
            assert_eq!((&*found.dtype, found.n_in, found.n_out), (name, ne0 as u64, ne1 as u64));
            assert!(found.from_rows.is_none_or(|from| ROWS.contains(&from)), "{found:?}");
            assert_eq!(found.identical.is_some(), found.from_rows.is_some(), "{found:?}");
            for n in [8, 14, 40, 64] {
                let is_equal = trial.is_equal(n);
                let is_taken = found.plain_from(KernelChoice::Identical).is_some_and(|from| n >= from);
                assert!(is_equal || !is_taken, "{name}: {n} rows");
                let len = n * ne1 as usize;
                let [by_id, plain] = trial.results.each_ref().map(|result| &result[..len]);
                let largest = by_id.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                assert!(largest > 0.0, "{name}: something was multiplied");
                let off = by_id.iter().zip(plain).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
                assert!(off <= 1e-3 * largest, "{name}: {n} rows are off by {off} of {largest}");
            }
        }
    }

    #[test]
    fn products_that_cannot_be_tried_are_left_to_ggml() {
        let (mut inner, neighbour) = (inner(), neighbour());
        let long = key("q8_0", [(1 << 20) + 256, 64], false, 2);
        assert!(TrialProduct::new(&mut inner, &neighbour, long, None).is_none(), "too long to be tried");
        for name in ["iq1_s", "iq2_xs", "iq3_xxs"] {
            let slow = TrialProduct::new(&mut inner, &neighbour, key(name, [256, 64], false, 2), None);
            assert!(slow.is_none(), "{name} would be searched for");
        }
        let with_params = ggml_tensor { op_params: [1; 16], ..neighbour };
        let short = key("q8_0", [256, 96], false, 2);
        assert!(TrialProduct::new(&mut inner, &with_params, short, None).is_none(), "a precision was asked for");
    }

    /// A shape that no model of another test has.
    #[test]
    fn contexts_share_what_was_tried() {
        let (type_, ne0, ne1) = (id_of("q8_0"), 32 * 37, 41);
        let count = || trials().iter().filter(|trial| (trial.n_in, trial.n_out) == (ne0 as u64, ne1 as u64)).count();
        let mut weights = ggml_tensor { ne: [ne0, ne1, 8, 1], ..neighbour() };
        let mut product = neighbour();
        product.src[0] = &raw mut weights;
        assert!(may_be_plain(KernelChoice::Identical, type_, ne0, ne1), "nothing is known yet");
        let from = |threads: c_int| {
            let mut kernels = Kernels::new(KernelChoice::Identical);
            kernels.set_n_threads(threads);
            // SAFETY: the product and its weights' struct are live.
            unsafe { kernels.plain_from(&mut inner(), &product, type_, None) }
        };
        assert_eq!((from(2), count()), (from(2), 1));
        let known = may_be_plain(KernelChoice::Identical, type_, ne0, ne1);
        assert_eq!(known, from(2) < usize::MAX);
        from(1);
        assert_eq!(count(), 2, "fewer threads are another machine");
    }
}
