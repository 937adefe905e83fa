//! The regression guard counts the instructions of hobbit's hot decisions. `check.sh` runs `benches/instructions.rs`
//! under valgrind, and `compare.py` compares the counts with `instructions.json`.
//!
//! Instructions are counted instead of time: they are alike on a busy machine and an idle one, so a few percent show.
//! This module makes a recording of a made-up model: the same on every machine.

use std::path::Path;

use hobbit_core::predict::{softmax, top_k};
use hobbit_core::route::Phase;
use hobbit_core::sim::Recording;
use hobbit_core::trace::{Header, Layer, LayerRecord, ModelDescription, Prediction, TraceReader, TraceWriter};
use rand_mt::Mt;

/// Layers, all with experts.
pub const N_LAYERS: u16 = 32;
/// Experts of a layer.
pub const N_EXPERT: u16 = 64;
/// Experts that a token uses of a layer.
pub const N_USED: u16 = 8;
/// Layers ahead whose scores are predicted.
pub const DISTANCE_MAX: u8 = 2;

/// Probabilities of one token's routers, `[N_LAYERS][N_EXPERT]`.
pub type Token = Vec<Vec<f32>>;

/// Tokens of one text. Some experts are popular throughout; most choices drift from token to token.
pub fn tokens(n_tokens: usize, seed: u32) -> Vec<Token> {
    let mut random = Random(Mt::new(seed));
    let n = usize::from(N_LAYERS) * usize::from(N_EXPERT);
    let always = random.normals(n);
    let mut drift = random.normals(n);
    let token = |_| {
        // The variance is equal at all times: 0.8² + 0.6² = 1.
        drift.iter_mut().zip(random.normals(n)).for_each(|(old, new)| *old = 0.8 * *old + 0.6 * new);
        let noise = random.normals(n);
        let logits: Vec<f32> = (0..n).map(|i| always[i] + drift[i] + 0.5 * noise[i]).collect();
        let probabilities = |logits: &[f32]| {
            let mut scores = Vec::new();
            softmax(logits, &mut scores);
            scores
        };
        logits.chunks(N_EXPERT.into()).map(probabilities).collect()
    };
    (0..n_tokens).map(token).collect()
}

/// The experts of a router's choice and their shares of its weight, best first, `[N_USED]` each.
pub fn choice(scores: &[f32]) -> (Vec<u16>, Vec<f32>) {
    let mut best = Vec::new();
    top_k(scores, N_USED.into(), &mut best);
    let sum: f32 = best.iter().map(|&index| scores[usize::from(index)]).sum();
    let weights = best.iter().map(|&index| scores[usize::from(index)] / sum).collect();
    (best, weights)
}

/// Batches of `n_tokens` tokens, as a run with the stacked gate would record them.
pub fn recording(n_batches: usize, n_tokens: usize, seed: u32) -> Recording {
    let layer = |layer| Layer {
        layer,
        n_expert: N_EXPERT,
        n_used: N_USED,
        bytes_high: 6 << 20,
        bytes_low: 2 << 20,
        ..Layer::default()
    };
    let layers = (0..N_LAYERS).map(layer).collect();
    let mut header = Header { model: ModelDescription { layers, ..ModelDescription::default() }, ..Header::default() };
    header.settings.predictor = "stacked-gate".into();
    let mut writer = TraceWriter::new(Vec::new(), &header).expect("a valid header");
    let phase = Phase::of(n_tokens, true);
    for batch in tokens(n_batches * n_tokens, seed).chunks(n_tokens) {
        for layer in 0..N_LAYERS {
            let mut record = LayerRecord::new(layer, N_USED);
            for token in batch {
                let scores = &token[usize::from(layer)];
                let (chosen, weights) = choice(scores);
                record.push_token(&chosen, &weights, Some(scores), N_EXPERT.into());
                for distance in 1..=DISTANCE_MAX {
                    let Some(later) = token.get(usize::from(layer) + usize::from(distance)) else { continue };
                    let predicted = |(expert, &score)| Prediction { token: 0, distance, expert, score };
                    record.predictions.extend((0..).zip(later).map(predicted));
                }
            }
            if phase == Phase::Prompt {
                record.predictions.clear();
            }
            writer.layer(&record).expect("a valid record");
        }
        writer.batch(phase, n_tokens as u32, 0.1).expect("a valid batch");
    }
    let (bytes, path) = (writer.finish().expect("nothing fails in memory"), "guard.trace");
    let reader = TraceReader::new(&bytes[..], path).expect("a valid trace");
    Recording::read(reader, Path::new(path)).expect("a valid trace")
}

/// `n` numbers between -1 and 1.
pub fn floats(n: usize, seed: u32) -> Vec<f32> {
    Random(Mt::new(seed)).normals(n).into_iter().map(|x| x / 4.0).collect()
}

/// Blocks of Q8_0 with scales below 1.
pub fn q8_0(n_blocks: usize) -> Vec<u8> {
    let mut random = Mt::new(7);
    let n_bytes = n_blocks * hobbit_core::planes::Q8_0_BYTES;
    let mut bytes: Vec<u8> = (0..n_bytes.div_ceil(4)).flat_map(|_| random.next_u32().to_le_bytes()).collect();
    bytes.truncate(n_bytes);
    bytes.chunks_exact_mut(hobbit_core::planes::Q8_0_BYTES).for_each(|block| block[1] &= 0x3b);
    bytes
}

struct Random(Mt);

impl Random {
    /// Nearly normal, of variance 1: sums of twelve uniform numbers. All machines round additions alike.
    fn normal(&mut self) -> f32 {
        // Four bytes of three numbers.
        let sum: u32 = (0..3).flat_map(|_| self.0.next_u32().to_le_bytes()).map(u32::from).sum();
        (sum as f32 - 12.0 * 127.5) / 256.0
    }

    fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_alike_every_time_and_plausible() {
        let chosen = |seed| {
            let of_token = |token: Token| token.iter().map(|scores| choice(scores).0).collect::<Vec<_>>();
            tokens(40, seed).into_iter().map(of_token).collect::<Vec<_>>()
        };
        let all = chosen(7);
        assert_eq!(all, chosen(7));
        assert_ne!(all, chosen(8));
        let pairs = all.windows(2).flat_map(|pair| pair[0].iter().zip(&pair[1]));
        let again: usize = pairs.map(|(a, b)| a.iter().filter(|expert| b.contains(expert)).count()).sum();
        // A text, not noise, of which it would be an eighth.
        let part = again as f64 / (39.0 * f64::from(N_LAYERS) * f64::from(N_USED));
        assert!((0.35..0.65).contains(&part), "{part}");
    }
}
