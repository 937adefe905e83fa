//! Weights of 8 bits in planes, as they are put together when a read of a nested pack lands.

use std::hint::black_box;

use gungraun::{library_benchmark, library_benchmark_group};
use hobbit_core::planes::{HIGH_BYTES, LOW_BYTES, Q4_1_BYTES, Q8_0_BYTES};
use hobbit_guard::inputs;

/// Planes, and room for what is made of them.
struct Planes {
    high: Vec<u8>,
    low: Vec<u8>,
    q4_1: Vec<u8>,
    q8_0: Vec<u8>,
}

fn planes_of(n_blocks: usize) -> Planes {
    let (mut high, mut low) = (vec![0; n_blocks * HIGH_BYTES], vec![0; n_blocks * LOW_BYTES]);
    assert!(hobbit_core::planes::split(&inputs::q8_0(n_blocks), &mut high, &mut low));
    let mut q4_1 = vec![0; n_blocks * Q4_1_BYTES];
    assert!(hobbit_core::planes::expand(&high, &mut q4_1));
    Planes { high, low, q4_1, q8_0: vec![0; n_blocks * Q8_0_BYTES] }
}

#[library_benchmark(setup = planes_of)]
#[bench::blocks(4096)]
fn merge(mut planes: Planes) -> Planes {
    hobbit_core::planes::merge(black_box(&planes.high), &planes.low, &mut planes.q8_0);
    planes
}

#[library_benchmark(setup = planes_of)]
#[bench::blocks(4096)]
fn expand(mut planes: Planes) -> Planes {
    hobbit_core::planes::expand(black_box(&planes.high), &mut planes.q4_1);
    planes
}

#[library_benchmark(setup = planes_of)]
#[bench::blocks(4096)]
fn complete(mut planes: Planes) -> Planes {
    hobbit_core::planes::complete(black_box(&planes.q4_1), &planes.low, &mut planes.q8_0);
    planes
}

library_benchmark_group!(name = planes, benchmarks = [merge, expand, complete]);
