//! A quantiser that needs no ggml: F32, F16 and Q8_0 both ways. For any other type it writes a digest of the weights,
//! enough to check that each block was made of the right ones.

use half::f16;

use crate::gguf::{GgmlType, Recode, RecodeError};

pub(super) struct Toy;

pub(super) fn decode(from: GgmlType, bytes: &[u8]) -> Option<Vec<f32>> {
    let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32();
    Some(match from.name() {
        "f32" => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        "f16" => bytes.chunks_exact(2).map(half).collect(),
        "q8_0" => bytes
            .chunks_exact(34)
            .flat_map(|b| b[2..].iter().map(|q| half(b) * f32::from(*q as i8)).collect::<Vec<_>>())
            .collect(),
        _ => return None,
    })
}

pub(super) fn encode(to: GgmlType, weights: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) {
    match to.name() {
        "f32" => weights.iter().for_each(|w| out.extend(w.to_le_bytes())),
        "f16" => weights.iter().for_each(|w| out.extend(f16::from_f32(*w).to_le_bytes())),
        "q8_0" => weights.chunks_exact(32).for_each(|block| {
            let scale = block.iter().fold(0f32, |max, w| max.max(w.abs())) / 127.0;
            out.extend(f16::from_f32(scale).to_le_bytes());
            let scale = if scale == 0.0 { 1.0 } else { scale };
            out.extend(block.iter().map(|w| (w / scale).round() as i8 as u8));
        }),
        _ => {
            for block in weights.chunks_exact(to.block_size() as usize) {
                let seed = block
                    .iter()
                    .chain(importance.unwrap_or(&[]))
                    .fold(7u64, |h, w| h.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(w.to_bits())));
                out.extend((0..to.type_size()).map(|i| (seed >> (8 * (i % 8))) as u8));
            }
        }
    }
}

impl Recode for Toy {
    fn recode(
        &self,
        from: GgmlType,
        to: GgmlType,
        n_per_row: u64,
        bytes: &[u8],
        importance: Option<&[f32]>,
        out: &mut Vec<u8>,
    ) -> Result<(), RecodeError> {
        let weights = decode(from, bytes);
        let weights = weights.ok_or(RecodeError::NotDecodable { dtype: from })?;
        assert_eq!(weights.len() as u64 % n_per_row, 0, "whole rows");
        out.clear();
        encode(to, &weights, importance, out);
        Ok(())
    }

    fn dequantise(&self, from: GgmlType, _n_per_row: u64, bytes: &[u8], out: &mut Vec<f32>) -> Result<(), RecodeError> {
        *out = decode(from, bytes).ok_or(RecodeError::NotDecodable { dtype: from })?;
        Ok(())
    }

    fn supports(&self, to: GgmlType) -> Result<(), RecodeError> {
        match to.name() {
            "i8" => Err(RecodeError::NotEncodable { dtype: to }),
            _ => Ok(()),
        }
    }

    fn needs_importance(&self, to: GgmlType) -> bool {
        to.name() == "iq4_xs"
    }
}
