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
    Iq1S,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
    Nvfp4,
    /// Whole numbers: for tables, not for weights.
    I32,
}

/// A format's type, and the spread of its random bits once decoded.
struct Layout {
    format: Format,
    /// `enum ggml_type`.
    id: u32,
    /// `enum llama_ftype` of a model that is mostly of this format.
    file_type: u32,
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
    /// Four scales at 0, each a byte of 4 bits of exponent and 3 of mantissa (UE4M3).
    SmallFloats { deviation: f32 },
}

use Scale::{Centred, Exponent, Float, Offset, Signed, SmallFloats};

#[rustfmt::skip]
const LAYOUTS: [Layout; 24] = [
    Layout { format: Format::F32,   id: 0,  file_type: 0,  scale: Float },
    Layout { format: Format::F16,   id: 1,  file_type: 1,  scale: Float },
    Layout { format: Format::Bf16,  id: 30, file_type: 32, scale: Float },
    Layout { format: Format::Q4_0,  id: 2,  file_type: 2,  scale: Signed { at: 0, deviation: 4.64 } },
    Layout { format: Format::Q4_1,  id: 3,  file_type: 3,
        scale: Offset { at: 0, offset_at: 2, offset: -7.5, deviation: 4.61 } },
    Layout { format: Format::Q5_0,  id: 6,  file_type: 8,  scale: Signed { at: 0, deviation: 9.25 } },
    Layout { format: Format::Q5_1,  id: 7,  file_type: 9,
        scale: Offset { at: 0, offset_at: 2, offset: -15.5, deviation: 9.23 } },
    Layout { format: Format::Q8_0,  id: 8,  file_type: 7,  scale: Centred { at: 0, deviation: 73.9 } },
    Layout { format: Format::Q2_K,  id: 10, file_type: 10,
        scale: Offset { at: 80, offset_at: 82, offset: 1.5, deviation: 13.9 } },
    Layout { format: Format::Q3_K,  id: 11, file_type: 12, scale: Signed { at: 108, deviation: 43.3 } },
    Layout { format: Format::Q4_K,  id: 12, file_type: 15,
        scale: Offset { at: 0, offset_at: 2, offset: 7.5, deviation: 258.0 } },
    Layout { format: Format::Q5_K,  id: 13, file_type: 17,
        scale: Offset { at: 0, offset_at: 2, offset: 15.5, deviation: 527.0 } },
    Layout { format: Format::Q6_K,  id: 14, file_type: 18, scale: Signed { at: 208, deviation: 1366.0 } },
    Layout { format: Format::Iq1S,  id: 19, file_type: 24, scale: Centred { at: 0, deviation: 7.21 } },
    Layout { format: Format::Iq2Xxs, id: 16, file_type: 19, scale: Centred { at: 0, deviation: 53.4 } },
    Layout { format: Format::Iq2Xs, id: 17, file_type: 20, scale: Centred { at: 0, deviation: 55.9 } },
    Layout { format: Format::Iq2S,  id: 22, file_type: 28, scale: Centred { at: 0, deviation: 56.5 } },
    Layout { format: Format::Iq3Xxs, id: 18, file_type: 23, scale: Centred { at: 0, deviation: 142.5 } },
    Layout { format: Format::Iq3S,  id: 21, file_type: 26, scale: Centred { at: 0, deviation: 140.2 } },
    Layout { format: Format::Iq4Nl, id: 20, file_type: 25, scale: Signed { at: 0, deviation: 67.4 } },
    Layout { format: Format::Iq4Xs, id: 23, file_type: 30, scale: Signed { at: 0, deviation: 1246.0 } },
    Layout { format: Format::Mxfp4, id: 39, file_type: 38, scale: Exponent { deviation: 5.85 } },
    Layout { format: Format::Nvfp4, id: 40, file_type: 39, scale: SmallFloats { deviation: 5.85 } },
    Layout { format: Format::I32,   id: 26, file_type: 0,  scale: Float },
];

impl Format {
    /// Every format of weights, in the order of the help text.
    pub fn all() -> impl Iterator<Item = Format> {
        LAYOUTS.iter().map(|layout| layout.format).filter(|format| *format != Format::I32)
    }

    fn layout(self) -> &'static Layout {
        LAYOUTS.iter().find(|layout| layout.format == self).expect("every format has a layout")
    }

    /// llama.cpp's name in lower case: `q8_0`.
    pub fn name(self) -> String {
        self.ggml_type().name().to_ascii_lowercase()
    }

    pub fn ggml_type(self) -> GgmlType {
        GgmlType::from_id(self.layout().id).expect("every layout has a known type")
    }

    /// `general.file_type`, which llama.cpp shows to the user.
    pub(super) fn file_type(self) -> u32 {
        self.layout().file_type
    }

    /// Weights per block; a row has to be a multiple of this.
    pub fn block_weights(self) -> u64 {
        self.ggml_type().block_size()
    }

    /// Bytes of `weights` weights (whole blocks), or `None` on overflow.
    pub fn bytes_of(self, weights: u64) -> Option<u64> {
        self.ggml_type().row_bytes(weights)
    }

    /// Bytes per block: the granularity of [`Format::fill`].
    pub(super) fn block_bytes(self) -> usize {
        self.ggml_type().type_size() as usize
    }

    /// Fills `out` (whole blocks) with weights of mean `mean` and standard deviation `deviation`. Quantised formats
    /// ignore `mean` and have mean zero.
    pub(super) fn fill(self, out: &mut [u8], random: &mut Random, mean: f32, deviation: f32) {
        let (layout, block_bytes) = (self.layout(), self.block_bytes());
        debug_assert_eq!(out.len() % block_bytes, 0);
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
                for (index, block) in out.chunks_exact_mut(block_bytes).enumerate() {
                    let (scale, _) = scales.pick(block[block_bytes / 2], index);
                    block[at..at + 2].copy_from_slice(&scale);
                }
            }
            Offset { at, offset_at, offset, deviation: unit } => {
                random.fill(out);
                let scales = Scales::new(deviation / unit, offset, false);
                for (index, block) in out.chunks_exact_mut(block_bytes).enumerate() {
                    let (scale, shift) = scales.pick(block[block_bytes / 2], index);
                    block[at..at + 2].copy_from_slice(&scale);
                    block[offset_at..offset_at + 2].copy_from_slice(&shift);
                }
            }
            Exponent { deviation: unit } => {
                random.fill(out);
                let codes = Codes::new(deviation / unit, 1..254, |code| (f32::from(code) - 128.0).exp2());
                out.chunks_exact_mut(block_bytes).for_each(|block| block[0] = codes.pick(block[0]));
            }
            SmallFloats { deviation: unit } => {
                random.fill(out);
                let codes = Codes::new(deviation / unit, 1..126, ue4m3);
                let scales = out.chunks_exact_mut(block_bytes).flat_map(|block| &mut block[..4]);
                scales.for_each(|scale| *scale = codes.pick(*scale));
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

/// A scale between those of two neighbouring codes: both are mixed so that the mean square is right.
struct Codes {
    lower: u8,
    /// Share of the upper code.
    share: f32,
}

impl Codes {
    /// `scale_of`: the scale of a code, which rises with it.
    fn new(scale: f32, codes: std::ops::Range<u8>, scale_of: impl Fn(u8) -> f32) -> Self {
        let lower = codes.clone().rfind(|&code| scale_of(code) <= scale).unwrap_or(codes.start);
        let (least, most) = (scale_of(lower).powi(2), scale_of(lower + 1).powi(2));
        Self { lower, share: (scale.powi(2) - least) / (most - least) }
    }

    fn pick(&self, noise: u8) -> u8 {
        self.lower + u8::from(f32::from(noise) < self.share * 256.0)
    }
}

/// ggml's scale of an NVFP4 code, `ggml_ue4m3_to_fp32`.
fn ue4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3), f32::from(code & 7));
    if exponent == 0 { mantissa * 2f32.powi(-10) } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 8) }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
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
