//! Where the floating-point fields of each tensor type lie (block layouts: llama.cpp, ggml-common.h), and whether
//! they are finite (as `ggml_validate_row_data` in ggml-quants.c judges).

use hobbit_core::gguf::GgmlType;

/// Floating-point fields of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Floats {
    /// Integers, or scales of which every bit pattern is a number.
    None,
    F64,
    /// One f32, at the start.
    F32,
    Bf16,
    /// An f16 at this byte.
    F16(usize),
    /// An f16 at this byte and another right after it.
    F16Pair(usize),
    /// One byte of exponent (E8M0) at the start; 255 is NaN.
    E8m0,
    /// iq1_m: an f16 whose nibbles are the top nibbles of four 16-bit words at byte 48.
    Iq1m,
}

impl Floats {
    /// The fields of a type; `None` if this table does not know it.
    pub fn of(dtype: GgmlType) -> Option<Self> {
        Some(match dtype.name() {
            "i8" | "i16" | "i32" | "i64" | "nvfp4" => Self::None,
            "f64" => Self::F64,
            "f32" | "q8_K" => Self::F32,
            "bf16" => Self::Bf16,
            "f16" | "q4_0" | "q5_0" | "q8_0" | "q1_0" | "q2_0" | "iq2_xxs" | "iq2_xs" | "iq2_s" | "iq3_xxs"
            | "iq3_s" | "iq1_s" | "iq4_nl" | "iq4_xs" => Self::F16(0),
            "q4_1" | "q5_1" | "q8_1" | "q4_K" | "q5_K" => Self::F16Pair(0),
            "q2_K" => Self::F16Pair(80),
            "q3_K" => Self::F16(108),
            "q6_K" => Self::F16(208),
            "tq1_0" => Self::F16(52),
            "tq2_0" => Self::F16(64),
            "mxfp4" => Self::E8m0,
            "iq1_m" => Self::Iq1m,
            _ => return None,
        })
    }

    /// Whether all fields of `block` are finite.
    pub fn are_finite(self, block: &[u8]) -> bool {
        let word = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
        let finite_f16 = |bits: u16| bits & 0x7c00 != 0x7c00;
        match self {
            Self::None => true,
            Self::F64 => word(6) & 0x7ff0 != 0x7ff0,
            Self::F32 => word(2) & 0x7f80 != 0x7f80,
            Self::Bf16 => word(0) & 0x7f80 != 0x7f80,
            Self::F16(at) => finite_f16(word(at)),
            Self::F16Pair(at) => finite_f16(word(at)) && finite_f16(word(at + 2)),
            Self::E8m0 => block[0] != 0xff,
            Self::Iq1m => {
                let top = |i: usize| word(48 + 2 * i) >> 12;
                finite_f16(top(0) | top(1) << 4 | top(2) << 8 | top(3) << 12)
            }
        }
    }

    /// Counts the blocks of `bytes` (blocks of `size` bytes) that are not finite; the index of the first.
    pub fn scan(self, bytes: &[u8], size: usize) -> (u64, Option<u64>) {
        let mut first = None;
        let mut n = 0;
        if self != Self::None {
            for (i, block) in bytes.chunks_exact(size).enumerate() {
                if !self.are_finite(block) {
                    n += 1;
                    first.get_or_insert(i as u64);
                }
            }
        }
        (n, first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_known_and_fields_lie_in_the_block() {
        for dtype in GgmlType::all() {
            let floats = Floats::of(dtype).unwrap_or_else(|| panic!("{dtype}"));
            assert!(floats.are_finite(&vec![0; dtype.type_size() as usize]), "{dtype}");
        }
    }

    /// (type, byte to change, value that makes the field infinite or NaN): the high byte of each field.
    #[test]
    fn fields_are_where_the_layout_says() {
        let cases: &[(&str, usize, u8)] = &[
            ("f64", 7, 0x7f),
            ("f32", 3, 0x7f),
            ("bf16", 1, 0x7f),
            ("f16", 1, 0x7c),
            ("q4_0", 1, 0xfc),
            ("q4_1", 3, 0x7e),
            ("q5_1", 1, 0x7c),
            ("q2_K", 81, 0x7c),
            ("q2_K", 83, 0x7c),
            ("q3_K", 109, 0x7c),
            ("q4_K", 3, 0x7c),
            ("q6_K", 209, 0x7c),
            ("q8_K", 3, 0x7f),
            ("tq1_0", 53, 0x7c),
            ("tq2_0", 65, 0x7c),
            ("iq4_xs", 1, 0x7c),
            ("mxfp4", 0, 0xff),
        ];
        for (name, at, value) in cases {
            let dtype = GgmlType::from_name(name).unwrap();
            let mut block = vec![0; dtype.type_size() as usize];
            block[*at] = *value;
            // f64 and f32 exponents reach into the next byte.
            if matches!(*name, "f64" | "f32" | "bf16" | "q8_K") {
                block[*at - 1] = 0xf0;
            }
            assert!(!Floats::of(dtype).unwrap().are_finite(&block), "{name}");
            block[*at] = 0x3c;
            assert!(Floats::of(dtype).unwrap().are_finite(&block), "{name}");
        }
    }

    #[test]
    fn iq1_m_scale_is_put_together_from_nibbles() {
        let mut block = [0u8; 56];
        block[55] = 0x7f; // top nibble 7 of the fourth word: bits 12..16
        assert!(Floats::Iq1m.are_finite(&block));
        block[53] = 0xcf; // top nibble c of the third: bits 8..12, exponent all ones
        assert!(!Floats::Iq1m.are_finite(&block));
    }

    #[test]
    fn a_scan_finds_count_and_first() {
        let nan = f32::NAN.to_le_bytes();
        let bytes = [[0; 4], nan, [1; 4], f32::NEG_INFINITY.to_le_bytes()].concat();
        assert_eq!(Floats::F32.scan(&bytes, 4), (2, Some(1)));
        assert_eq!(Floats::None.scan(&bytes, 4), (0, None));
    }
}
