//! Weights in bit planes.

use super::*;
use crate::planes::{self, HIGH_BYTES, LOW_BYTES, Q4_1_BYTES, Q8_0_BYTES};

/// Two experts' matrices, the first of more than one unit; the second file has the small one alone.
const BLOCKS: [usize; 2] = [60_000, 100];

/// Blocks of Q8_0 with sound scales.
fn weights(n_blocks: usize, seed: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..n_blocks * Q8_0_BYTES).map(|at| byte_at(seed, at)).collect();
    bytes.chunks_exact_mut(Q8_0_BYTES).for_each(|block| block[1] &= 0x1f);
    bytes
}

struct Planes {
    weights: Vec<Vec<u8>>,
    /// First bytes of its planes.
    high: Vec<u64>,
    low: Vec<u64>,
    bytes: Vec<u8>,
}

impl Planes {
    /// A block of noise, all high planes, all low ones.
    fn of(blocks: &[usize]) -> Self {
        let weights: Vec<Vec<u8>> = blocks.iter().enumerate().map(|(i, &n)| weights(n, i)).collect();
        let mut file = Self { weights, high: Vec::new(), low: Vec::new(), bytes: vec![9; 4096] };
        let mut lows = Vec::new();
        for q8_0 in &file.weights {
            let n = q8_0.len() / Q8_0_BYTES;
            let (mut high, mut low) = (vec![0; n * HIGH_BYTES], vec![0; n * LOW_BYTES]);
            assert!(planes::split(q8_0, &mut high, &mut low));
            file.high.push(file.bytes.len() as u64);
            file.bytes.extend(high);
            file.bytes.resize(file.bytes.len().next_multiple_of(4096), 0);
            lows.push(low);
        }
        for low in lows {
            file.low.push(file.bytes.len() as u64);
            file.bytes.extend(low);
            file.bytes.resize(file.bytes.len().next_multiple_of(4096), 0);
        }
        file
    }

    fn n_blocks(&self, matrix: usize) -> u64 {
        (self.weights[matrix].len() / Q8_0_BYTES) as u64
    }

    fn part(&self, matrix: usize, has_low: bool, to: usize) -> Part {
        let low = has_low.then_some(self.low[matrix]);
        Part { n_blocks: self.n_blocks(matrix), high: HighPlane::File(self.high[matrix]), low, to }
    }

    fn high_plane(&self, matrix: usize) -> &[u8] {
        &self.bytes[self.high[matrix] as usize..][..self.n_blocks(matrix) as usize * HIGH_BYTES]
    }

    fn expanded(&self, matrix: usize) -> Vec<u8> {
        let mut q4_1 = vec![0; self.n_blocks(matrix) as usize * Q4_1_BYTES];
        assert!(planes::expand(self.high_plane(matrix), &mut q4_1));
        q4_1
    }
}

/// From the first plane to the end of the last.
fn extent(file: u32, planes: &Planes, parts: &[Part]) -> Extent {
    let ends = parts.iter().flat_map(|part| {
        let high = match part.high {
            HighPlane::File(at) => Some((at, at + part.n_blocks * HIGH_BYTES as u64)),
            HighPlane::Held(_) => None,
        };
        high.into_iter().chain(part.low.map(|at| (at, at + part.n_blocks * LOW_BYTES as u64)))
    });
    let (start, end) = ends.fold((u64::MAX, 0), |(start, end), (from, to)| (start.min(from), end.max(to)));
    assert!(end <= planes.bytes.len() as u64);
    Extent { file, offset: start, len: end - start }
}

#[test]
fn every_engine_puts_planes_together() {
    let (large, small) = (Planes::of(&BLOCKS), Planes::of(&BLOCKS[1..]));
    let files = Files::of(vec![large.bytes.clone(), small.bytes.clone()]);
    let memory = SlotMemory::new(2, 3 << 20);
    let apart = 2_100_000;
    let both = [large.part(0, true, 0), large.part(1, true, apart)];
    let lows = [large.part(0, false, 0), large.part(1, false, apart)];
    let q8 = |file: &Planes, matrix: usize| file.weights[matrix].clone();
    // File, parts, and the weights expected at offsets.
    type Found = Vec<(usize, Vec<u8>)>;
    let cases: Vec<(u32, Vec<Part>, Found)> = vec![
        (0, both.to_vec(), vec![(0, q8(&large, 0)), (apart, q8(&large, 1))]),
        (0, lows.to_vec(), vec![(0, large.expanded(0)), (apart, large.expanded(1))]),
        (0, vec![large.part(1, true, 7)], vec![(7, q8(&large, 1))]),
        (0, vec![large.part(0, true, 1)], vec![(1, q8(&large, 0))]),
        (0, vec![large.part(0, false, 0)], vec![(0, large.expanded(0))]),
        (1, vec![small.part(0, true, 0)], vec![(0, q8(&small, 0))]),
        (1, vec![small.part(0, false, 4096)], vec![(4096, small.expanded(0))]),
    ];
    for (name, store) in files.stores() {
        for (i, (file, parts, expected)) in cases.iter().enumerate() {
            let planes = if *file == 0 { &large } else { &small };
            let extent = extent(*file, planes, parts);
            let request = ReadRequest { form: Form::Planes(parts.clone()), ..memory.request(1, extent, i % 2, 0) };
            let bytes = request.bytes();
            let done = read_one(&*store, request);
            let moved = done.result.unwrap_or_else(|error| panic!("{name} {i}: {error}"));
            assert!(moved >= bytes && moved < bytes + 6 * 4096, "{name} {i}: {moved} of {bytes}");
            for (at, weights) in expected {
                assert!(memory.bytes(i % 2, *at, weights.len()) == weights, "{name} {i}");
            }
        }
    }
}

/// More requests at once than buffers.
#[test]
fn buffers_are_used_again() {
    let large = Planes::of(&BLOCKS);
    let files = Files::of(vec![large.bytes.clone()]);
    let memory = SlotMemory::new(12, 3 << 20);
    for (name, store) in files.stores() {
        let parts = vec![large.part(0, true, 0)];
        let extent = extent(0, &large, &parts);
        let requests = (0..12).map(|slot| {
            let form = Form::Planes(parts.clone());
            ReadRequest { form, ..memory.request(slot as u64, extent, slot, 0) }
        });
        let answers = read_all(&*store, requests.collect());
        assert!(answers.iter().all(|done| done.result.is_ok()), "{name}");
        for slot in 0..12 {
            assert!(memory.bytes(slot, 0, large.weights[0].len()) == large.weights[0], "{name} {slot}");
        }
    }
}

/// The high plane is in memory: only the low one is read.
#[test]
fn a_held_plane_is_completed() {
    let large = Planes::of(&BLOCKS);
    let files = Files::of(vec![large.bytes.clone()]);
    let memory = SlotMemory::new(1, 3 << 20);
    for (name, store) in files.stores() {
        for matrix in 0..2 {
            let mut held = large.expanded(matrix);
            // SAFETY: `held` has no other user before the answer.
            let high = HighPlane::Held(unsafe { SlotPtr::new(held.as_mut_ptr()) });
            let parts = vec![Part { high, ..large.part(matrix, true, 32) }];
            let extent = extent(0, &large, &parts);
            let request = ReadRequest { form: Form::Planes(parts), ..memory.request(1, extent, 0, 0) };
            assert_eq!(request.bytes(), large.n_blocks(matrix) * LOW_BYTES as u64);
            let done = read_one(&*store, request);
            assert!(done.result.is_ok(), "{name}: {done:?}");
            let weights = &large.weights[matrix];
            assert!(memory.bytes(0, 32, weights.len()) == weights, "{name} {matrix}");
        }
    }
}

#[test]
fn planes_that_cannot_be_right_are_refused() {
    let small = Planes::of(&BLOCKS[1..]);
    let files = Files::of(vec![small.bytes.clone()]);
    let memory = SlotMemory::new(1, 8192);
    let sound = small.part(0, true, 0);
    let whole = extent(0, &small, &[sound]);
    assert_refused(&files, || {
        [
            Part { to: 8192 - 3399, ..sound },
            Part { to: usize::MAX, ..sound },
            Part { n_blocks: u64::MAX, ..sound },
            Part { n_blocks: 101, ..sound },
            Part { high: HighPlane::File(4097), ..sound },
            Part { low: Some(u64::MAX - 4095), ..sound },
            Part { low: Some(0), ..sound },
        ]
        .map(|part| ReadRequest { form: Form::Planes(vec![part]), ..memory.request(1, whole, 0, 0) })
        .into()
    });
}

/// Nibbles in place of scales.
#[test]
fn exchanged_planes_are_named() {
    let mut small = Planes::of(&BLOCKS[1..]);
    let (high, low) = (small.high[0] as usize, small.low[0] as usize);
    small.bytes.copy_within(low..low + 1600, high);
    let files = Files::of(vec![small.bytes.clone()]);
    let memory = SlotMemory::new(1, 8192);
    for (name, store) in files.stores() {
        for has_low in [false, true] {
            let parts = vec![small.part(0, has_low, 0)];
            let extent = extent(0, &small, &parts);
            let request = ReadRequest { form: Form::Planes(parts), ..memory.request(1, extent, 0, 0) };
            let done = read_one(&*store, request);
            let error = done.result.unwrap_err();
            assert!(matches!(error, StoreError::Planes { offset: 4096, .. }), "{name}: {error}");
            assert!(error.to_string().contains("gguf-tools verify"));
        }
    }
}
