//! 8-bit weights as two planes of 4 bits: the first alone reads as weights of 4 bits, both together are the 8-bit ones,
//! bit for bit.
//!
//! A block of Q8_0 is a scale `d` (f16) and 32 signed bytes `q`; a weight is `d q`. Of `u = q + 128`, which has no
//! sign, the *high plane* keeps `u >> 4`, the *low plane* `u & 15`:
//!
//! ```text
//!   Q8_0        d  q0 .. q31                34 bytes
//!   high plane  d  16 bytes of nibbles      18 bytes      byte j: element j in bits 0..4, element j + 16 in bits 4..8
//!   low plane      16 bytes of nibbles      16 bytes      likewise
//!   Q4_1        16 d  -120.5 d  16 bytes    20 bytes      the high plane, expanded: its nibbles in ggml's own order
//! ```
//!
//! Since `d q = 16 d (u >> 4) + d (u & 15) - 128 d`, and `u & 15` is 7.5 in the middle, the high plane is a Q4_1 block
//! of scale `16 d` and minimum `-120.5 d`: no weight is further from the Q8_0 one than half a step of its own, `8 d`.
//! `16 d` is exact, so that `d` comes back from an expanded block ([`complete()`]); the minimum is rounded to f16. Both
//! are finite for scales up to `SCALE_MAX_BITS`; real ones are below 1.
//!
//! Pure, and plain loops over blocks that the compiler makes vectors of.

pub const Q8_0_BYTES: usize = 34;
pub const Q4_1_BYTES: usize = 20;
/// Bytes of a block of the high plane.
pub const HIGH_BYTES: usize = 18;
/// Bytes of a block of the low plane.
pub const LOW_BYTES: usize = 16;

/// The largest scale of which 16 and 120.5 times are finite, 543.5, as bits.
pub(crate) const SCALE_MAX_BITS: u16 = 0x603f;

/// The largest scale, by bits without the sign; infinite and no numbers are larger than all others.
#[derive(Clone, Copy, Debug, Default)]
struct Largest(u16);

impl Largest {
    #[inline(always)]
    fn see(&mut self, scale: [u8; 2]) {
        self.0 = self.0.max(u16::from_le_bytes(scale) & 0x7fff);
    }

    fn is_sound(self) -> bool {
        self.0 <= SCALE_MAX_BITS
    }
}

/// Takes blocks of Q8_0 apart. Whether every scale is one that [`expand()`] can express; the planes are right in any
/// case.
///
/// # Panics
/// If the lengths are not those of the same number of blocks.
pub fn split(q8_0: &[u8], high: &mut [u8], low: &mut [u8]) -> bool {
    let (blocks, highs, lows) = (blocks(q8_0), blocks_mut(high), blocks_mut(low));
    assert!(blocks.len() == highs.len() && blocks.len() == lows.len(), "planes of another number of blocks");
    let mut largest = Largest::default();
    for ((block, high), low) in blocks.iter().zip(highs).zip(lows) {
        let (scale, weights) = parts::<Q8_0_BYTES, 2, 32>(block);
        let (high_scale, nibbles) = parts_mut::<HIGH_BYTES, 2, 16>(high);
        let low: &mut [u8; LOW_BYTES] = low;
        *high_scale = *scale;
        largest.see(*scale);
        for j in 0..16 {
            let (a, b) = (weights[j] ^ 0x80, weights[j + 16] ^ 0x80);
            nibbles[j] = a >> 4 | b & 0xf0;
            low[j] = a & 0x0f | b << 4;
        }
    }
    largest.is_sound()
}

/// The Q8_0 blocks of both planes. Whether every scale is one that [`expand()`] can express, as those of a sound pack
/// are.
///
/// # Panics
/// If the lengths are not those of the same number of blocks.
pub fn merge(high: &[u8], low: &[u8], q8_0: &mut [u8]) -> bool {
    let (highs, lows, blocks) = (blocks::<HIGH_BYTES>(high), blocks::<LOW_BYTES>(low), blocks_mut(q8_0));
    assert!(blocks.len() == highs.len() && blocks.len() == lows.len(), "planes of another number of blocks");
    let mut largest = Largest::default();
    for ((high, low), block) in highs.iter().zip(lows).zip(blocks) {
        let (scale, nibbles) = parts::<HIGH_BYTES, 2, 16>(high);
        let (out_scale, out) = parts_mut::<Q8_0_BYTES, 2, 32>(block);
        *out_scale = *scale;
        largest.see(*scale);
        join(nibbles, low, out);
    }
    largest.is_sound()
}

/// The high plane as blocks of Q4_1. Whether every scale is finite in them.
///
/// # Panics
/// If the lengths are not those of the same number of blocks.
pub fn expand(high: &[u8], q4_1: &mut [u8]) -> bool {
    let (highs, blocks) = (blocks::<HIGH_BYTES>(high), blocks_mut(q4_1));
    assert!(blocks.len() == highs.len(), "a plane of another number of blocks");
    let mut largest = Largest::default();
    for (highs, blocks) in highs.chunks(SCALES).zip(blocks.chunks_mut(SCALES)) {
        let scales = scales_of(highs, |high| [high[0], high[1]]);
        // Products of 11 and 8 bits: exact until they are rounded to f16.
        let steps = scales.map(|scale| to_f16(16.0 * to_f32(scale)));
        let mins = scales.map(|scale| to_f16(-120.5 * to_f32(scale)));
        for (i, (high, block)) in highs.iter().zip(blocks).enumerate() {
            let (scale, nibbles) = parts::<HIGH_BYTES, 2, 16>(high);
            let (head, out) = parts_mut::<Q4_1_BYTES, 4, 16>(block);
            largest.see(*scale);
            head[..2].copy_from_slice(&steps[i].to_le_bytes());
            head[2..].copy_from_slice(&mins[i].to_le_bytes());
            *out = *nibbles;
        }
    }
    largest.is_sound()
}

/// The Q8_0 blocks of an expanded high plane and a low plane. Whether the scales are those of [`expand()`], and of
/// finite blocks.
///
/// # Panics
/// If the lengths are not those of the same number of blocks.
pub fn complete(q4_1: &[u8], low: &[u8], q8_0: &mut [u8]) -> bool {
    let (highs, lows, blocks) = (blocks::<Q4_1_BYTES>(q4_1), blocks::<LOW_BYTES>(low), blocks_mut(q8_0));
    assert!(blocks.len() == highs.len() && blocks.len() == lows.len(), "planes of another number of blocks");
    let mut largest = Largest::default();
    for ((highs, lows), blocks) in highs.chunks(SCALES).zip(lows.chunks(SCALES)).zip(blocks.chunks_mut(SCALES)) {
        let scales = scales_of(highs, |high| [high[0], high[1]]).map(|step| to_f16(to_f32(step) / 16.0));
        for (i, ((high, low), block)) in highs.iter().zip(lows).zip(blocks).enumerate() {
            let (_, nibbles) = parts::<Q4_1_BYTES, 4, 16>(high);
            let (scale, out) = parts_mut::<Q8_0_BYTES, 2, 32>(block);
            *scale = scales[i].to_le_bytes();
            largest.see(*scale);
            join(nibbles, low, out);
        }
    }
    largest.is_sound()
}

/// Whether every scale of a high plane is one that [`expand()`] can express.
///
/// # Panics
/// If it is no whole number of blocks.
pub fn has_sound_scales(high: &[u8]) -> bool {
    let mut largest = Largest::default();
    blocks::<HIGH_BYTES>(high).iter().for_each(|block| largest.see([block[0], block[1]]));
    largest.is_sound()
}

/// The 32 signed bytes of both nibbles.
#[inline(always)]
fn join(high: &[u8; 16], low: &[u8; 16], q: &mut [u8; 32]) {
    for j in 0..16 {
        q[j] = (high[j] << 4 | low[j] & 0x0f) ^ 0x80;
        q[j + 16] = (high[j] & 0xf0 | low[j] >> 4) ^ 0x80;
    }
}

#[inline(always)]
fn to_f32(half: u16) -> f32 {
    // 2^112 brings the exponent from f16's bias to f32's, and makes a subnormal number normal.
    let magnitude = f32::from_bits(u32::from(half & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    f32::from_bits(magnitude.to_bits() | u32::from(half & 0x8000) << 16)
}

/// The nearest f16, ties to even, of a number below 65520 in magnitude.
#[inline(always)]
fn to_f16(value: f32) -> u16 {
    let bits = value.to_bits() & 0x7fff_ffff;
    // Ties go to even as 1 is added only to odd ones; then the exponent gets f16's bias.
    let normal = (bits + 0xfff + (bits >> 13 & 1)).wrapping_sub(112 << 23) >> 13;
    // Beside 0.5 the last bit is worth 2^-24, as in a subnormal f16: the sum is rounded to that.
    let subnormal = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let magnitude = if bits < 113 << 23 { subnormal } else { normal };
    magnitude as u16 | (value.to_bits() >> 16) as u16 & 0x8000
}

/// Blocks of which scales are converted together.
const SCALES: usize = 16;

/// Scales of at most [`SCALES`] blocks; zeros if there are fewer.
#[inline(always)]
fn scales_of<const N: usize>(blocks: &[[u8; N]], scale: impl Fn(&[u8; N]) -> [u8; 2]) -> [u16; SCALES] {
    let mut scales = [0; SCALES];
    for (bits, block) in scales.iter_mut().zip(blocks) {
        *bits = u16::from_le_bytes(scale(block));
    }
    scales
}

fn blocks<const N: usize>(bytes: &[u8]) -> &[[u8; N]] {
    let (blocks, rest) = bytes.as_chunks();
    assert!(rest.is_empty(), "{} bytes are no whole blocks of {N}", bytes.len());
    blocks
}

fn blocks_mut<const N: usize>(bytes: &mut [u8]) -> &mut [[u8; N]] {
    let (blocks, rest) = bytes.as_chunks_mut();
    assert!(rest.is_empty(), "bytes are no whole blocks of {N}");
    blocks
}

/// The first `A` bytes of a block, and the other `B`.
#[inline(always)]
fn parts<const N: usize, const A: usize, const B: usize>(block: &[u8; N]) -> (&[u8; A], &[u8; B]) {
    const { assert!(A + B == N) };
    let (first, rest) = block.split_at(A);
    (first.try_into().expect("as long as asked for"), rest.try_into().expect("as long as asked for"))
}

#[inline(always)]
fn parts_mut<const N: usize, const A: usize, const B: usize>(block: &mut [u8; N]) -> (&mut [u8; A], &mut [u8; B]) {
    const { assert!(A + B == N) };
    let (first, rest) = block.split_at_mut(A);
    (first.try_into().expect("as long as asked for"), rest.try_into().expect("as long as asked for"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use proptest::prelude::*;

    /// Planes of Q8_0 blocks, and whether their scales are sound.
    fn planes(q8_0: &[u8]) -> (Vec<u8>, Vec<u8>, bool) {
        let n = q8_0.len() / Q8_0_BYTES;
        let (mut high, mut low) = (vec![0; n * HIGH_BYTES], vec![0; n * LOW_BYTES]);
        let is_sound = split(q8_0, &mut high, &mut low);
        (high, low, is_sound)
    }

    fn merged(high: &[u8], low: &[u8]) -> (Vec<u8>, bool) {
        let mut q8_0 = vec![0xee; low.len() / LOW_BYTES * Q8_0_BYTES];
        let is_sound = merge(high, low, &mut q8_0);
        (q8_0, is_sound)
    }

    fn expanded(high: &[u8]) -> (Vec<u8>, bool) {
        let mut q4_1 = vec![0xee; high.len() / HIGH_BYTES * Q4_1_BYTES];
        let is_sound = expand(high, &mut q4_1);
        (q4_1, is_sound)
    }

    fn completed(q4_1: &[u8], low: &[u8]) -> (Vec<u8>, bool) {
        let mut q8_0 = vec![0xee; low.len() / LOW_BYTES * Q8_0_BYTES];
        let is_sound = complete(q4_1, low, &mut q8_0);
        (q8_0, is_sound)
    }

    /// A block of this scale with all 256 bytes over 8 blocks.
    fn blocks_of(scale: u16) -> Vec<u8> {
        let block = |i: u8| scale.to_le_bytes().into_iter().chain((0..32).map(move |j| i * 32 + j));
        (0..8).flat_map(block).collect()
    }

    fn half(bytes: &[u8]) -> f64 {
        f16::from_le_bytes([bytes[0], bytes[1]]).to_f64()
    }

    /// Every scale that there is, with every byte: what was taken apart comes together again, by both ways; what Q4_1
    /// says is within half of its step.
    #[test]
    fn every_scale() {
        for scale in 0..=u16::MAX {
            let q8_0 = blocks_of(scale);
            let (high, low, is_sound) = planes(&q8_0);
            let value = f16::from_bits(scale);
            let fits =
                f16::from_f64(16.0 * value.to_f64()).is_finite() && f16::from_f64(-120.5 * value.to_f64()).is_finite();
            assert_eq!(is_sound, fits, "{scale:#x}");
            assert_eq!(merged(&high, &low), (q8_0.clone(), fits), "{scale:#x}");
            assert_eq!(has_sound_scales(&high), fits);
            let (q4_1, is_sound) = expanded(&high);
            assert_eq!(is_sound, fits, "{scale:#x}");
            if !fits {
                continue;
            }
            assert_eq!(completed(&q4_1, &low), (q8_0.clone(), true), "{scale:#x}");
            for (own, exact) in q4_1.as_chunks::<Q4_1_BYTES>().0.iter().zip(q8_0.as_chunks::<Q8_0_BYTES>().0) {
                let (d, step, min) = (half(exact), half(own), half(&own[2..]));
                assert_eq!((step, min), (16.0 * d, f16::from_f64(-120.5 * d).to_f64()));
                for j in 0..32 {
                    let nibble = if j < 16 { own[4 + j] & 15 } else { own[4 + j - 16] >> 4 };
                    let (found, expected) = (step * f64::from(nibble) + min, d * f64::from(exact[2 + j] as i8));
                    assert!((found - expected).abs() <= 8.0 * d.abs(), "{scale:#x}: {found}, expected {expected}");
                }
            }
        }
    }

    #[test]
    fn halves_are_read_exactly_and_written_to_the_nearest() {
        for bits in 0..=u16::MAX {
            let value = f16::from_bits(bits);
            if !value.is_finite() {
                continue;
            }
            let exact = to_f32(bits);
            assert_eq!(exact.to_bits(), value.to_f32().to_bits(), "{bits:#x}");
            assert_eq!(to_f16(exact), bits, "{bits:#x}");
            // Between two of them, in the middle and beside it.
            let next = f16::from_bits(bits + 1).to_f32();
            if next.is_finite() {
                let middle = (exact + next) / 2.0;
                for between in [middle, middle.next_up(), middle.next_down(), exact.next_up()] {
                    assert_eq!(to_f16(between), f16::from_f32(between).to_bits(), "{bits:#x} {between}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "another number of blocks")]
    fn planes_of_different_lengths_are_refused() {
        merge(&[0; 36], &[0; 16], &mut [0; 68]);
    }

    proptest! {
        #[test]
        fn any_bytes(n in 0usize..9, seed in any::<u64>()) {
            let mut state = seed | 1;
            let q8_0: Vec<u8> = (0..n * Q8_0_BYTES)
                .map(|_| {
                    state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                    (state >> 56) as u8
                })
                .collect();
            let (high, low, is_sound) = planes(&q8_0);
            prop_assert_eq!(merged(&high, &low), (q8_0.clone(), is_sound));
            if is_sound {
                prop_assert_eq!(completed(&expanded(&high).0, &low), (q8_0, true));
            }
        }
    }
}
