//! The generator behind every weight: xoshiro256++ (Blackman and Vigna, 2019), four streams side by side so
//! that filling a buffer keeps up with a disk.

use hobbit_core::random::SplitMix64;

/// Reproducible random bytes; the same seed and stream give the same bytes on every machine.
#[derive(Clone, Debug)]
pub(super) struct Random {
    state: [[u64; LANES]; 4],
    spare: [u64; LANES],
    used: usize,
}

const LANES: usize = 4;

impl Random {
    /// `stream` separates the tensors of one model, so that each can be produced on its own.
    pub(super) fn new(seed: u64, stream: &str) -> Self {
        // FNV-1a of the name, then SplitMix64 as the authors of xoshiro recommend for seeding.
        let name = stream.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut split = SplitMix64::new(seed ^ name.rotate_left(17));
        let state = std::array::from_fn(|_| std::array::from_fn(|_| split.bits()));
        Self { state, spare: [0; LANES], used: LANES }
    }

    fn step(&mut self) -> [u64; LANES] {
        let [s0, s1, s2, s3] = &mut self.state;
        std::array::from_fn(|lane| {
            let out = s0[lane].wrapping_add(s3[lane]).rotate_left(23).wrapping_add(s0[lane]);
            let shifted = s1[lane] << 17;
            s2[lane] ^= s0[lane];
            s3[lane] ^= s1[lane];
            s1[lane] ^= s2[lane];
            s0[lane] ^= s3[lane];
            s2[lane] ^= shifted;
            s3[lane] = s3[lane].rotate_left(45);
            out
        })
    }

    /// Fair random bits.
    pub(super) fn fill(&mut self, out: &mut [u8]) {
        let mut chunks = out.chunks_exact_mut(8 * LANES);
        for chunk in &mut chunks {
            for (word, value) in chunk.chunks_exact_mut(8).zip(self.step()) {
                word.copy_from_slice(&value.to_le_bytes());
            }
        }
        for (word, value) in chunks.into_remainder().chunks_mut(8).zip(self.step()) {
            word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
        }
    }

    pub(super) fn next_u64(&mut self) -> u64 {
        if self.used == LANES {
            self.spare = self.step();
            self.used = 0;
        }
        self.used += 1;
        self.spare[self.used - 1]
    }

    /// Uniform in `[0, 1)`.
    pub(super) fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 24) as f32
    }
}
