//! Times of products and of rearranging, of matrices that come from memory.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use super::ggml::{Cpu, Matrices, Operation, Shape, name, quantised};

/// Products of one run, as many as a layer of 8 experts has: what starting threads costs is divided by it.
const PRODUCTS: usize = 24;
/// The fewest, with many rows.
const PRODUCTS_MIN: usize = 4;
/// Rows from which on a run has fewer products.
const ROWS_FEW: usize = 8;

/// Median by best of what nobody else's work disturbs. Else everything is timed again, so often at the most; the fastest round
/// counts.
const SPREAD_MAX: f64 = 1.25;
const ROUNDS_MAX: usize = 5;

/// A type of weights.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    #[serde(rename = "type")]
    pub dtype: String,
    pub n_per_row: usize,
    pub n_rows: usize,
    pub matrix_bytes: usize,
    /// Name of the buffer type; absent where llama.cpp leaves these weights as they are.
    pub buffer_type: Option<String>,
    /// On one thread, bytes as files have them; from memory to memory.
    pub repack_bytes_per_second: Option<f64>,
    /// As [`Measured::repack_bytes_per_second`], of copying.
    pub copy_bytes_per_second: Option<f64>,
    pub products: Vec<Product>,
}

/// Medians, in seconds, of one matrix by so many rows.
#[derive(Clone, Debug, Serialize)]
pub struct Product {
    pub rows: usize,
    /// `MUL_MAT`, weights as files have them.
    pub raw: f64,
    /// `MUL_MAT_ID`.
    pub raw_by_id: f64,
    /// `MUL_MAT`, rearranged weights; absent where there is none.
    pub repacked: Option<f64>,
    /// `MUL_MAT_ID`.
    pub repacked_by_id: Option<f64>,
    /// The greatest difference that rearranging makes, of the greatest value; 0: the same bits.
    pub difference: Option<f64>,
    /// As [`Product::difference`], of `MUL_MAT_ID`.
    pub difference_by_id: Option<f64>,
    /// As [`Product::difference`], between the two operations on rearranged weights.
    pub difference_of_operations: Option<f64>,
}

/// What is measured of each type and shape.
pub struct Settings {
    pub rows: Vec<usize>,
    /// Matrices of one kind take at least so much memory, and are used in turn.
    pub bytes: usize,
    pub tries: usize,
}

/// Measures one type and shape. `None` where rows are no whole blocks; without products where nothing is rearranged.
pub fn measure(cpu: &Cpu, settings: &Settings, shape: Shape) -> Result<Option<Measured>> {
    let Some(matrix_bytes) = shape.bytes() else { return Ok(None) };
    let mut measured = Measured {
        dtype: shape.dtype.to_string(),
        n_per_row: shape.n_per_row,
        n_rows: shape.n_rows,
        matrix_bytes,
        buffer_type: None,
        repack_bytes_per_second: None,
        copy_bytes_per_second: None,
        products: Vec::new(),
    };
    let Some((buft, can)) = cpu.repacking(shape)? else { return Ok(Some(measured)) };
    measured.buffer_type = Some(name(buft));

    let mut random = rand_mt::Mt::new(1);
    let weights = quantised(shape, &floats(&mut random, shape.n_per_row * shape.n_rows))?;
    let n = settings.bytes.div_ceil(matrix_bytes).max(PRODUCTS);
    let raw = Matrices::new(shape, n, cpu.plain())?;
    let repacked = Matrices::new(shape, n, buft)?;
    (0..n).try_for_each(|index| raw.set(index, &weights))?;
    // Twice: what is written first is memory that nothing has touched yet.
    let mut repack = Vec::new();
    for _ in 0..2 {
        repack = (0..n).map(|index| timed(|| repacked.set(index, raw.bytes(index)))).collect::<Result<_>>()?;
    }
    let half = n / 2;
    let copy = (0..half).map(|index| timed(|| raw.set(half + index, raw.bytes(index)))).collect::<Result<_>>()?;
    measured.repack_bytes_per_second = Some(matrix_bytes as f64 / median(repack));
    measured.copy_bytes_per_second = Some(matrix_bytes as f64 / median(copy));

    let mut ways = [
        Some(Way::new(&raw, Operation::Plain)),
        Some(Way::new(&raw, Operation::ById)),
        can[0].then(|| Way::new(&repacked, Operation::Plain)),
        can[1].then(|| Way::new(&repacked, Operation::ById)),
    ];
    for &rows in &settings.rows {
        let mut input = floats(&mut random, rows * shape.n_per_row);
        let mut results = [(); 4].map(|()| vec![0.0; rows * shape.n_rows]);
        let mut calmest: Option<[Option<f64>; 4]> = None;
        for _ in 0..ROUNDS_MAX {
            let mut times = [(); 4].map(|()| Vec::new());
            // The first time pays for ggml's scratch memory.
            for is_warm in std::iter::once(false).chain(std::iter::repeat_n(true, settings.tries)) {
                for ((way, times), result) in ways.iter_mut().zip(&mut times).zip(&mut results) {
                    let Some(way) = way else { continue };
                    let time = way.run(cpu, &mut input, result)?;
                    if is_warm {
                        times.push(time);
                    }
                }
            }
            let is_calm = times.iter().all(|times| {
                let best = times.iter().min().map_or(0.0, Duration::as_secs_f64);
                times.is_empty() || median(times.clone()) <= SPREAD_MAX * best
            });
            let medians = times.map(|times| (!times.is_empty()).then(|| median(times)));
            let sum = |medians: &[Option<f64>; 4]| medians.iter().flatten().sum::<f64>();
            if calmest.as_ref().is_none_or(|calmest| sum(&medians) < sum(calmest)) {
                calmest = Some(medians);
            }
            if is_calm {
                break;
            }
        }
        let [raw, raw_by_id, repacked, repacked_by_id] = calmest.unwrap_or_default();
        let both = |a: usize, b: usize| ways[b].is_some().then(|| difference(&results[a], &results[b]));
        measured.products.push(Product {
            rows,
            raw: raw.unwrap_or_default(),
            raw_by_id: raw_by_id.unwrap_or_default(),
            repacked,
            repacked_by_id,
            difference: both(0, 2),
            difference_by_id: both(1, 3),
            difference_of_operations: both(2, 3).filter(|_| can[0]),
        });
    }
    Ok(Some(measured))
}

/// One of the ways to multiply, and where among its matrices it is.
struct Way<'a> {
    matrices: &'a Matrices,
    operation: Operation,
    next: usize,
}

impl<'a> Way<'a> {
    fn new(matrices: &'a Matrices, operation: Operation) -> Self {
        Self { matrices, operation, next: 0 }
    }

    /// The time of one product.
    fn run(&mut self, cpu: &Cpu, input: &mut [f32], result: &mut [f32]) -> Result<Duration> {
        let all = &self.matrices.tensors;
        // SAFETY: a live tensor.
        let rows = input.len() / unsafe { (*all[0]).ne[0] } as usize;
        let n = (PRODUCTS * ROWS_FEW / rows.max(ROWS_FEW)).max(PRODUCTS_MIN);
        if self.next + n > all.len() {
            self.next = 0;
        }
        let matrices = &all[self.next..][..n];
        self.next += n;
        Ok(cpu.multiply(self.operation, matrices, input, result)? / n as u32)
    }
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let started = Instant::now();
    work()?;
    Ok(started.elapsed())
}

/// From -0.5 to 0.5.
pub fn floats(random: &mut rand_mt::Mt, n: usize) -> Vec<f32> {
    (0..n).map(|_| (f64::from(random.next_u32()) / f64::from(u32::MAX) - 0.5) as f32).collect()
}

pub fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

/// The greatest difference, of the greatest value.
pub fn difference(a: &[f32], b: &[f32]) -> f64 {
    let greatest =
        |values: &mut dyn Iterator<Item = f32>| f64::from(values.fold(0f32, |max, value| max.max(value.abs())));
    let of = greatest(&mut a.iter().copied());
    let by = greatest(&mut a.iter().zip(b).map(|(a, b)| a - b));
    if by == 0.0 { 0.0 } else { by / of }
}
