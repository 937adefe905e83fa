//! Writer, reader, unpacking and verification together, on small models and with a toy quantiser.

mod bit_planes;
mod hostile;
mod round_trip;
mod writing;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use half::f16;
use hobbit_synth::{self as synth, Format, Spec};

use super::*;
use crate::gguf::{GgmlType, Gguf, Recode, RecodeError};

/// A model of 3 layers with 4 experts.
fn spec() -> Spec {
    let types = vec![Format::F16];
    Spec { embd: 64, ff: 96, heads: 2, experts: 4, layers: 3, vocab: 300, types, ..Spec::tiny("qwen3moe") }
}

/// `spec` in Q8_0, with planes of whole blocks, so that high and low ones differ in length.
fn q8_spec() -> Spec {
    Spec { types: vec![Format::Q8_0], embd: 256, ff: 256, ..spec() }
}

/// Writes the model; of a split one, the first shard's path.
fn model(dir: &Path, spec: &Spec) -> PathBuf {
    synth::write(&dir.join("model.gguf"), spec).unwrap().files[0].clone()
}

/// Full, low versions q8_0 with q2_K for down (which falls back to iq4_nl: rows of 96).
fn low_spec() -> PackSpec<'static> {
    PackSpec { low: Some("q8_0,down=q2_k".parse().unwrap()), threads: 2, ..PackSpec::new(PackKind::Full) }
}

fn plane_spec() -> PackSpec<'static> {
    PackSpec { bit_planes: true, threads: 2, ..PackSpec::new(PackKind::Full) }
}

/// A model and a spec of its pack, of each layout.
fn both() -> [(Spec, PackSpec<'static>); 2] {
    [(spec(), low_spec()), (q8_spec(), plane_spec())]
}

fn quietly(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn go_on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn try_pack(model: &Path, out: &Path, spec: &PackSpec<'_>) -> Result<Written, WriteError> {
    write(&Gguf::open(model).unwrap(), out, spec, &Toy, &mut quietly)
}

fn pack(model: &Path, out: &Path, spec: &PackSpec<'_>) -> Written {
    try_pack(model, out, spec).unwrap_or_else(|error| panic!("{error}"))
}

fn packed(dir: &Path, model_spec: &Spec, spec: &PackSpec<'_>) -> (PathBuf, PathBuf, Pack) {
    let (path, out) = (model(dir, model_spec), dir.join("pack.gguf"));
    pack(&path, &out, spec);
    let opened = Pack::open(&out).unwrap();
    (path, out, opened)
}

fn unpacked(pack: &Pack, dir: &Path) -> Result<Vec<u8>, UnpackError> {
    let out = dir.join("unpacked.gguf");
    unpack(pack, &out, true, &mut go_on)?;
    Ok(fs::read(&out).unwrap())
}

fn verified(pack: &Pack) -> Verified {
    verify(pack, &mut go_on).unwrap().expect("it was not stopped")
}

/// Bytes of an extent in a file held in memory.
fn cut(bytes: &[u8], extent: crate::expert::Extent) -> &[u8] {
    &bytes[extent.offset as usize..extent.end() as usize]
}

/// First byte of a text in a file.
fn find(bytes: &[u8], text: &[u8]) -> usize {
    bytes.windows(text.len()).position(|window| window == text).unwrap()
}

/// A quantiser that needs no ggml: F32, F16 and Q8_0 both ways. For any other type it writes a digest of the weights,
/// enough to check that each block was made of the right ones.
struct Toy;

fn decode(from: GgmlType, bytes: &[u8]) -> Option<Vec<f32>> {
    let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32();
    Some(match from.name() {
        "f32" => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        "f16" => bytes.chunks_exact(2).map(half).collect(),
        "q8_0" => bytes
            .chunks_exact(34)
            .flat_map(|b| b[2..].iter().map(|q| half(b) * f32::from(*q as i8)).collect::<Vec<_>>())
            .collect(),
        _ => return None,
    })
}

fn encode(to: GgmlType, weights: &[f32], importance: Option<&[f32]>) -> Vec<u8> {
    let half = |w: f32| f16::from_f32(w).to_le_bytes();
    let q8_0 = |block: &[f32]| {
        let scale = block.iter().fold(0f32, |max, w| max.max(w.abs())) / 127.0;
        let divisor = if scale == 0.0 { 1.0 } else { scale };
        let quants = block.iter().map(move |w| (w / divisor).round() as i8 as u8);
        half(scale).into_iter().chain(quants).collect::<Vec<u8>>()
    };
    let digest = |block: &[f32]| {
        let seed = block
            .iter()
            .chain(importance.unwrap_or(&[]))
            .fold(7u64, |h, w| h.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(w.to_bits())));
        (0..to.type_size()).map(|i| (seed >> (8 * (i % 8))) as u8).collect::<Vec<u8>>()
    };
    match to.name() {
        "f32" => weights.iter().flat_map(|w| w.to_le_bytes()).collect(),
        "f16" => weights.iter().flat_map(|w| half(*w)).collect(),
        "q8_0" => weights.chunks_exact(32).flat_map(q8_0).collect(),
        _ => weights.chunks_exact(to.block_size() as usize).flat_map(digest).collect(),
    }
}

/// Bytes of one type as another.
fn recoded(from: GgmlType, to: GgmlType, bytes: &[u8]) -> Vec<u8> {
    if from == to { bytes.to_vec() } else { encode(to, &decode(from, bytes).unwrap(), None) }
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
        let weights = decode(from, bytes).ok_or(RecodeError::NotDecodable { dtype: from })?;
        assert_eq!(weights.len() as u64 % n_per_row, 0, "whole rows");
        *out = encode(to, &weights, importance);
        Ok(())
    }

    fn dequantise(&self, from: GgmlType, _n_per_row: u64, bytes: &[u8], out: &mut Vec<f32>) -> Result<(), RecodeError> {
        *out = decode(from, bytes).ok_or(RecodeError::NotDecodable { dtype: from })?;
        Ok(())
    }

    fn supports(&self, to: GgmlType) -> Result<(), RecodeError> {
        if to == GgmlType::I8 { Err(RecodeError::NotEncodable { dtype: to }) } else { Ok(()) }
    }

    fn needs_importance(&self, to: GgmlType) -> bool {
        to.name() == "iq4_xs"
    }
}
