//! Time to the first token.

use serde::Serialize;

use super::locality::Locality;
use super::routes::{LayerRoutes, Random};
use super::shape::{Shape, UBATCH_TOKENS};
use super::{EXPERT_SECONDS, FRESH_SECONDS_PER_BYTE, Host, OPERATIONS_PER_BYTE, Rooms, Task};

/// Time to the first token of a model on an idle disk, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct FirstToken {
    pub load_seconds: f64,
    pub prompt_seconds: f64,
    /// Reading the prompt's experts, without waits for products.
    pub reading_seconds: f64,
    /// Multiplying the prompt, without waits for reads.
    pub products_seconds: f64,
}

impl FirstToken {
    pub fn seconds(&self) -> f64 {
        self.load_seconds + self.prompt_seconds
    }

    /// A batch reads its experts that are not resident, each once; reads and products overlap. A cold start has no
    /// resident experts, and slots whose memory was never used.
    pub fn of(shape: &Shape, host: &Host, task: &Task, rooms: &Rooms, locality: &Locality, is_cold: bool) -> Self {
        let share = rooms.prompt_share();
        let n_prompt = u64::from(task.n_prompt.max(1));
        let operations = host.cpu.operations.unwrap_or(OPERATIONS_PER_BYTE * host.cpu.memory);
        let (mut reading, mut products, mut prompt) = (0.0, 0.0, 0.0);
        let n_whole = n_prompt / UBATCH_TOKENS;
        let rest = n_prompt % UBATCH_TOKENS;
        let mut resident = if is_cold { 0.0 } else { share };
        let mut batch = |n_tokens: u64, times: u64| {
            if times == 0 {
                return;
            }
            let (bytes, n_distinct) = distinct(shape, n_tokens, locality);
            let multiplying = 2.0 * shape.n_parameters_used as f64 * n_tokens as f64 / operations;
            // With few rows, products take as long as reading their weights.
            let weights = bytes + shape.ordinary_per_token.values().sum::<u64>() as f64;
            let multiplying = multiplying.max(weights / host.cpu.memory) + n_distinct as f64 * EXPERT_SECONDS;
            for first in [true, false] {
                let times = if first { 1 } else { times - 1 } as f64;
                let seconds = bytes * (1.0 - resident) / host.disk;
                let fresh = if resident == 0.0 { bytes.min(share * shape.expert_bytes as f64) } else { 0.0 };
                reading += times * seconds;
                products += times * multiplying;
                prompt += times * (seconds.max(multiplying) + fresh * FRESH_SECONDS_PER_BYTE);
                if times > 0.0 {
                    resident = share;
                }
            }
        };
        batch(UBATCH_TOKENS, n_whole);
        batch(rest, u64::from(rest > 0));
        Self {
            load_seconds: shape.ordinary_bytes as f64 / host.disk,
            prompt_seconds: prompt,
            reading_seconds: reading,
            products_seconds: products,
        }
    }
}

/// Distinct experts of `n_tokens` tokens: bytes and number.
fn distinct(shape: &Shape, n_tokens: u64, locality: &Locality) -> (f64, u64) {
    let mut random = Random::new(16);
    let (mut bytes, mut n_distinct) = (0.0, 0);
    // Layers differ only in their random draws: one stands for all that are alike.
    let mut known: Vec<(u16, u64)> = Vec::new();
    for layer in &shape.layers {
        let n = known.iter().find(|(n_expert, _)| *n_expert == layer.n_expert).map(|(_, n)| *n).unwrap_or_else(|| {
            let mut routes = LayerRoutes::new(layer.n_expert, shape.n_expert_used, locality, &mut random);
            let (mut chosen, mut seen) = (Vec::new(), vec![false; layer.n_expert.into()]);
            for _ in 0..n_tokens {
                chosen.clear();
                routes.token(&mut random, &mut chosen);
                chosen.iter().for_each(|expert| seen[usize::from(*expert)] = true);
            }
            let n = seen.iter().filter(|seen| **seen).count() as u64;
            known.push((layer.n_expert, n));
            n
        });
        bytes += n as f64 * layer.expert_bytes as f64;
        n_distinct += n;
    }
    (bytes, n_distinct)
}
