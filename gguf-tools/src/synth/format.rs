//! Tensor formats that can be filled with random weights without quantising: the quants are random bits, and the
//! scales give the decoded weights the wanted spread.
//!
//! Layouts and decoding rules: llama.cpp `ggml-common.h` and `ggml-quants.c` (`dequantize_row_*`).

use std::{fmt, str::FromStr};

use anyhow::Context;
use half::{bf16, f16};
use hobbit_core::gguf::GgmlType;

use super::random::Random;

/// A tensor format that [`Format::fill`] can produce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, missing_docs)]
pub enum Format {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
}

/// The layout of a block, and the spread of its random bits once decoded.
struct Layout {
    format: Format,
    name: &'static str,
    /// `enum ggml_type`.
    id: u32,
    /// `enum llama_ftype` of a model that is mostly of this format.
    file_type: u32,
    /// Weights per block.
    weights: usize,
    /// Bytes per block.
    bytes: usize,
    scale: Scale,
}

/// The place of a block's scale, and the standard deviation of its weights when the scale is 1 and all other bits are
/// uniformly random.
enum Scale {
    /// Plain floats: no blocks.
    Float,
    /// `f16` scale at byte `at`; the quants are centred on (almost) zero.
    Centred { at: usize, deviation: f32 },
    /// As `Centred`, but the quants are asymmetric (-8 to 7) and the quantiser gives scales of either sign.
    Signed { at: usize, deviation: f32 },
    /// `f16` scale at `at`, and at `offset_at` an `f16` offset, which centres the weights if it is `offset` times the
    /// scale.
    Offset { at: usize, offset_at: usize, offset: f32, deviation: f32 },
    /// Exponent byte at 0: the scale is `2^(e - 128)`.
    Exponent { deviation: f32 },
}

use Scale::{Centred, Exponent, Float, Offset, Signed};

#[rustfmt::skip]
const LAYOUTS: [Layout; 16] = [
    Layout { format: Format::F32,   name: "f32",    id: 0,  file_type: 0,  weights: 1,   bytes: 4,   scale: Float },
    Layout { format: Format::F16,   name: "f16",    id: 1,  file_type: 1,  weights: 1,   bytes: 2,   scale: Float },
    Layout { format: Format::Bf16,  name: "bf16",   id: 30, file_type: 32, weights: 1,   bytes: 2,   scale: Float },
    Layout { format: Format::Q4_0,  name: "q4_0",   id: 2,  file_type: 2,  weights: 32,  bytes: 18,  scale: Signed { at: 0, deviation: 4.64 } },
    Layout { format: Format::Q4_1,  name: "q4_1",   id: 3,  file_type: 3,  weights: 32,  bytes: 20,  scale: Offset { at: 0, offset_at: 2, offset: -7.5, deviation: 4.61 } },
    Layout { format: Format::Q5_0,  name: "q5_0",   id: 6,  file_type: 8,  weights: 32,  bytes: 22,  scale: Signed { at: 0, deviation: 9.25 } },
    Layout { format: Format::Q5_1,  name: "q5_1",   id: 7,  file_type: 9,  weights: 32,  bytes: 24,  scale: Offset { at: 0, offset_at: 2, offset: -15.5, deviation: 9.23 } },
    Layout { format: Format::Q8_0,  name: "q8_0",   id: 8,  file_type: 7,  weights: 32,  bytes: 34,  scale: Centred { at: 0, deviation: 73.9 } },
    Layout { format: Format::Q2_K,  name: "q2_k",   id: 10, file_type: 10, weights: 256, bytes: 84,  scale: Offset { at: 80, offset_at: 82, offset: 1.5, deviation: 13.9 } },
    Layout { format: Format::Q3_K,  name: "q3_k",   id: 11, file_type: 12, weights: 256, bytes: 110, scale: Signed { at: 108, deviation: 43.3 } },
    Layout { format: Format::Q4_K,  name: "q4_k",   id: 12, file_type: 15, weights: 256, bytes: 144, scale: Offset { at: 0, offset_at: 2, offset: 7.5, deviation: 258.0 } },
    Layout { format: Format::Q5_K,  name: "q5_k",   id: 13, file_type: 17, weights: 256, bytes: 176, scale: Offset { at: 0, offset_at: 2, offset: 15.5, deviation: 527.0 } },
    Layout { format: Format::Q6_K,  name: "q6_k",   id: 14, file_type: 18, weights: 256, bytes: 210, scale: Signed { at: 208, deviation: 1366.0 } },
    Layout { format: Format::Iq4Nl, name: "iq4_nl", id: 20, file_type: 25, weights: 32,  bytes: 18,  scale: Signed { at: 0, deviation: 67.4 } },
    Layout { format: Format::Iq4Xs, name: "iq4_xs", id: 23, file_type: 30, weights: 256, bytes: 136, scale: Signed { at: 0, deviation: 1246.0 } },
    Layout { format: Format::Mxfp4, name: "mxfp4",  id: 39, file_type: 38, weights: 32,  bytes: 17,  scale: Exponent { deviation: 5.85 } },
];

impl Format {
    /// Every format, in the order of the help text.
    pub fn all() -> impl Iterator<Item = Format> {
        LAYOUTS.iter().map(|layout| layout.format)
    }

    fn layout(self) -> &'static Layout {
        LAYOUTS.iter().find(|layout| layout.format == self).expect("every format has a layout")
    }

    /// llama.cpp's name in lower case: `q8_0`.
    pub fn name(self) -> &'static str {
        self.layout().name
    }

    /// The type as a GGUF header states it.
    pub fn ggml_type(self) -> GgmlType {
        GgmlType::from_id(self.layout().id).expect("every layout carries a known type id")
    }

    /// `general.file_type`, which llama.cpp shows to the user.
    pub(super) fn file_type(self) -> u32 {
        self.layout().file_type
    }

    /// Weights per block; a row has to be a multiple of this.
    pub fn block_weights(self) -> u64 {
        self.layout().weights as u64
    }

    /// Bytes of `weights` weights (whole blocks), or `None` on overflow.
    pub fn bytes_of(self, weights: u64) -> Option<u64> {
        (weights / self.block_weights()).checked_mul(self.layout().bytes as u64)
    }

    /// Bytes per block: the granularity of [`Format::fill`].
    pub(super) fn block_bytes(self) -> usize {
        self.layout().bytes
    }

    /// Fills `out` (whole blocks) with weights of mean `mean` and standard deviation `deviation`. Quantised formats
    /// ignore `mean` and have mean zero.
    pub(super) fn fill(self, out: &mut [u8], random: &mut Random, mean: f32, deviation: f32) {
        let layout = self.layout();
        debug_assert_eq!(out.len() % layout.bytes, 0);
        match layout.scale {
            Float => self.fill_floats(out, random, mean, deviation),
            Centred { at, deviation: unit } | Signed { at, deviation: unit } => {
                random.fill(out);
                if self == Format::Q8_0 {
                    // The quantiser never writes -128, so kernels need not handle it.
                    for byte in out.iter_mut() {
                        *byte = (*byte as i8).max(-127) as u8;
                    }
                }
                let scales = Scales::new(deviation / unit, 0.0, matches!(layout.scale, Signed { .. }));
                for (index, block) in out.chunks_exact_mut(layout.bytes).enumerate() {
                    let (scale, _) = scales.pick(block[layout.bytes / 2], index);
                    block[at..at + 2].copy_from_slice(&scale);
                }
            }
            Offset { at, offset_at, offset, deviation: unit } => {
                random.fill(out);
                let scales = Scales::new(deviation / unit, offset, false);
                for (index, block) in out.chunks_exact_mut(layout.bytes).enumerate() {
                    let (scale, shift) = scales.pick(block[layout.bytes / 2], index);
                    block[at..at + 2].copy_from_slice(&scale);
                    block[offset_at..offset_at + 2].copy_from_slice(&shift);
                }
            }
            Exponent { deviation: unit } => {
                random.fill(out);
                // Scales are powers of two: mix the two nearest so that the mean square is right.
                let scale = deviation / unit;
                let low = scale.log2().floor();
                let share = ((scale / low.exp2()).powi(2) - 1.0) / 3.0;
                let exponent = (128.0 + low).clamp(1.0, 253.0) as u8;
                for block in out.chunks_exact_mut(layout.bytes) {
                    block[0] = exponent + u8::from(f32::from(block[0]) < share * 256.0);
                }
            }
        }
    }

    fn fill_floats(self, out: &mut [u8], random: &mut Random, mean: f32, deviation: f32) {
        let width = deviation * 12f32.sqrt();
        let mut next = || mean + width * (random.unit() - 0.5);
        match self {
            Format::F32 => out.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&next().to_le_bytes())),
            Format::F16 => {
                out.chunks_exact_mut(2).for_each(|b| b.copy_from_slice(&f16::from_f32(next()).to_le_bytes()));
            }
            _ => out.chunks_exact_mut(2).for_each(|b| b.copy_from_slice(&bf16::from_f32(next()).to_le_bytes())),
        }
    }
}

/// Sixteen block scales around the wanted one, because blocks of real models differ.
struct Scales([([u8; 2], [u8; 2]); 16]);

impl Scales {
    fn new(scale: f32, offset: f32, signed: bool) -> Self {
        Self(std::array::from_fn(|step| {
            let sign = if signed && step % 2 == 1 { -1.0 } else { 1.0 };
            let scale = scale * sign * (0.75 + step as f32 / 32.0);
            (f16::from_f32(scale).to_le_bytes(), f16::from_f32(scale * offset).to_le_bytes())
        }))
    }

    fn pick(&self, noise: u8, index: usize) -> ([u8; 2], [u8; 2]) {
        self.0[(noise as usize ^ index) % 16]
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Format {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let wanted = text.to_ascii_lowercase();
        Format::all().find(|format| format.name() == wanted).with_context(|| {
            let known: Vec<_> = Format::all().map(Format::name).collect();
            format!("type '{text}': expected one of {}", known.join(", "))
        })
    }
}
