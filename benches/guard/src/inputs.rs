//! Choices of a made-up model's routers: the same numbers on every machine.

use hobbit_core::expert::ExpertId;
use hobbit_core::predict::{PredictShape, softmax, top_k};
use rand_mt::Mt;

/// Layers, all with experts.
pub const N_LAYERS: u16 = 32;
/// Experts of a layer.
pub const N_EXPERT: u16 = 64;
/// Experts that a token uses of a layer.
pub const N_USED: u16 = 8;
/// Slots of a layer: half of its experts.
pub const N_SLOTS: u32 = 32;
/// Tokens of a prompt's batch.
pub const N_PROMPT: usize = 128;

/// A router's choice for one token.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Its layer.
    pub layer: u16,
    /// Probabilities, `[N_EXPERT]`.
    pub scores: Vec<f32>,
    /// The chosen experts and their shares of the router's weight, best first, `[N_USED]`.
    pub chosen: Vec<(u16, f32)>,
}

impl Choice {
    /// The chosen experts, best first.
    pub fn experts(&self) -> impl Iterator<Item = ExpertId> {
        self.chosen.iter().map(|&(index, _)| ExpertId { layer: self.layer, index })
    }
}

/// One token: its choices, `[N_LAYERS]`.
pub type Token = Vec<Choice>;

/// Tokens of one text. Some experts are popular throughout; most choices drift from token to token.
pub fn tokens(n_tokens: usize, seed: u32) -> Vec<Token> {
    let mut random = Random(Mt::new(seed));
    let n = usize::from(N_LAYERS) * usize::from(N_EXPERT);
    let always = random.normals(n);
    let mut drift = random.normals(n);
    (0..n_tokens)
        .map(|_| {
            // The variance is equal at all times: 0.8² + 0.6² = 1.
            drift.iter_mut().zip(random.normals(n)).for_each(|(old, new)| *old = 0.8 * *old + 0.6 * new);
            let noise = random.normals(n);
            let logits: Vec<f32> = (0..n).map(|i| always[i] + drift[i] + 0.5 * noise[i]).collect();
            (0..N_LAYERS)
                .zip(logits.chunks(usize::from(N_EXPERT)))
                .map(|(layer, logits)| choose(layer, logits))
                .collect()
        })
        .collect()
}

fn choose(layer: u16, logits: &[f32]) -> Choice {
    let (mut scores, mut best) = (Vec::new(), Vec::new());
    softmax(logits, &mut scores);
    top_k(&scores, usize::from(N_USED), &mut best);
    let of_best: f32 = best.iter().map(|&index| scores[usize::from(index)]).sum();
    let chosen = best.iter().map(|&index| (index, scores[usize::from(index)] / of_best)).collect();
    Choice { layer, scores, chosen }
}

/// The model as predictors know it.
pub fn shape() -> PredictShape {
    PredictShape::new((0..N_LAYERS).map(|layer| (layer, N_EXPERT)), |_| N_USED.into())
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
        let all = tokens(40, 7);
        let chosen = |tokens: &[Token]| {
            tokens.iter().flatten().flat_map(|choice| choice.chosen.iter().map(|c| c.0)).collect::<Vec<_>>()
        };
        assert_eq!(chosen(&all), chosen(&tokens(40, 7)));
        assert_ne!(chosen(&all), chosen(&tokens(40, 8)));
        let mut again = 0;
        for pair in all.windows(2) {
            for (a, b) in pair[0].iter().zip(&pair[1]) {
                assert_eq!((a.layer, a.chosen.len(), a.scores.len()), (b.layer, N_USED.into(), N_EXPERT.into()));
                again += a.experts().filter(|expert| b.experts().any(|other| other == *expert)).count();
            }
        }
        // A text, not noise, of which it would be an eighth.
        let part = again as f64 / (39.0 * f64::from(N_LAYERS) * f64::from(N_USED));
        assert!((0.35..0.65).contains(&part), "{part}");
    }
}
