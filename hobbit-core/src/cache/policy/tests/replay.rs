//! Traces for the tests of all policies, and their replay through a cache.

use crate::cache::policy::{Policy, Upcoming, Use};
use crate::cache::{Cache, LayerLayout, PoolLayout, SliceKinds};
use crate::expert::{ExpertId, Precision, SliceKind, Version};

/// One layer of one token.
pub(in crate::cache::policy) struct Choice {
    pub(in crate::cache::policy) layer: u16,
    pub(in crate::cache::policy) scores: Vec<f32>,
    /// Experts with their shares of the router's weight, best first.
    pub(in crate::cache::policy) chosen: Vec<(u16, f32)>,
}

/// Tokens of one sequence, layers within them.
pub(in crate::cache::policy) struct Trace {
    pub(in crate::cache::policy) n_expert: u16,
    pub(in crate::cache::policy) n_layers: u16,
    pub(in crate::cache::policy) tokens: Vec<Vec<Choice>>,
}

impl Trace {
    /// The uses to come, the token's number as their time.
    pub(in crate::cache::policy) fn future(&self) -> impl Iterator<Item = Upcoming> {
        self.tokens.iter().zip(0..).flat_map(|(layers, time)| {
            layers.iter().flat_map(move |Choice { layer, chosen, .. }| {
                let expert = move |index| ExpertId { layer: *layer, index };
                chosen.iter().map(move |(index, _)| Upcoming {
                    time,
                    expert: expert(*index),
                    demand: Some(Precision::High),
                })
            })
        })
    }

    /// Misses with `slots_per_layer` slots per layer, high versions only; a token's experts of a layer are pinned
    /// together.
    pub(in crate::cache::policy) fn misses(
        &self,
        policy: Box<dyn Policy>,
        slots_per_layer: u32,
        with_scores: bool,
    ) -> usize {
        let kinds = SliceKinds::from_iter([SliceKind::Down]);
        let members =
            |layer| (0..self.n_expert).map(move |index| Version::high(ExpertId { layer, index })).collect::<Vec<_>>();
        let layers = (0..self.n_layers).map(|layer| LayerLayout { layer, members: members(layer), kinds });
        let n_slots = slots_per_layer * u32::from(self.n_layers);
        let mut cache = Cache::new(
            vec![PoolLayout { layers: layers.collect(), n_slots, capacities: None, is_common: false }],
            policy,
        );
        cache.begin_sequence();
        let mut n_misses = 0;
        for choice in self.tokens.iter().flat_map(|layers| layers.iter().map(Some).chain([None])) {
            match choice {
                Some(choice) => n_misses += run_layer(&mut cache, choice, with_scores),
                None => cache.end_batch(1),
            }
        }
        n_misses
    }
}

fn run_layer(cache: &mut Cache, choice: &Choice, with_scores: bool) -> usize {
    if with_scores {
        cache.scores(choice.layer, &choice.scores);
    }
    let version = |index: u16| Version::high(ExpertId { layer: choice.layer, index });
    let mut pinned = Vec::new();
    for &(index, weight) in &choice.chosen {
        let slot = cache.lookup(version(index));
        if let Some(slot) = slot {
            cache.pin(slot);
        }
        pinned.extend(slot);
        let usage = Use::by_one(slot.is_some(), Some(Precision::High), weight);
        cache.touch(version(index).expert, usage);
    }
    let mut n_misses = 0;
    for &(index, _) in &choice.chosen {
        if cache.lookup(version(index)).is_some() {
            continue;
        }
        n_misses += 1;
        if let Some(acquired) = cache.acquire(version(index)) {
            cache.set_loading(acquired.slot, SliceKind::Down);
            cache.set_ready(acquired.slot, SliceKind::Down);
            cache.pin(acquired.slot);
            pinned.push(acquired.slot);
        }
    }
    pinned.into_iter().for_each(|slot| cache.unpin(slot));
    n_misses
}

/// xorshift64*: equal everywhere.
pub(in crate::cache::policy) struct Random(u64);

impl Random {
    pub(in crate::cache::policy) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// About normal, of variance 1: twelve dice.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

/// How strongly a synthetic router prefers, as standard deviations of its logits.
#[derive(Clone, Copy, Debug)]
pub(in crate::cache::policy) struct Router {
    pub(in crate::cache::policy) n_expert: u16,
    pub(in crate::cache::policy) n_chosen: usize,
    pub(in crate::cache::policy) n_tokens: usize,
    /// Some experts always.
    pub(in crate::cache::policy) always: f64,
    /// Others for about a hundred tokens.
    pub(in crate::cache::policy) topic: f64,
    /// Others for a few tokens: 0.7 of it is there one token later.
    pub(in crate::cache::policy) drift: f64,
    /// Others for one token.
    pub(in crate::cache::policy) noise: f64,
}

pub(in crate::cache::policy) fn synthetic(router: Router, seed: u64) -> Trace {
    let mut random = Random::new(seed);
    let n = usize::from(router.n_expert);
    let mut draw = |deviation: f64| (0..n).map(|_| deviation * random.normal()).collect::<Vec<f64>>();
    let n_layers = 2;
    let always: Vec<_> = (0..n_layers).map(|_| draw(router.always)).collect();
    let mut topic: Vec<_> = (0..n_layers).map(|_| draw(router.topic)).collect();
    let mut drift: Vec<_> = (0..n_layers).map(|_| draw(router.drift)).collect();
    let mut tokens = Vec::new();
    for time in 0..router.n_tokens {
        let mut layers = Vec::new();
        for layer in 0..n_layers {
            if time % 100 == 99 {
                topic[layer] = draw(router.topic);
            }
            // The variance stays equal.
            let fresh = draw(router.drift);
            drift[layer].iter_mut().zip(fresh).for_each(|(old, new)| *old = 0.7 * *old + 0.51f64.sqrt() * new);
            let noise = draw(router.noise);
            let logits = (0..n).map(|i| always[layer][i] + topic[layer][i] + drift[layer][i] + noise[i]);
            layers.push(choose(layer as u16, &logits.collect::<Vec<_>>(), router.n_chosen));
        }
        tokens.push(layers);
    }
    Trace { n_expert: router.n_expert, n_layers: n_layers as u16, tokens }
}

fn choose(layer: u16, logits: &[f64], n_chosen: usize) -> Choice {
    let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
    let scores: Vec<f32> = logits.iter().map(|logit| (logit.exp() / total) as f32).collect();
    let mut order: Vec<u16> = (0..scores.len() as u16).collect();
    order.sort_by(|a, b| scores[usize::from(*b)].total_cmp(&scores[usize::from(*a)]));
    let chosen = &order[..n_chosen];
    let of_chosen: f32 = chosen.iter().map(|&index| scores[usize::from(index)]).sum();
    let chosen = chosen.iter().map(|&index| (index, scores[usize::from(index)] / of_chosen)).collect();
    Choice { layer, scores, chosen }
}
