//! Eviction policies over one token: 256 uses, and an eviction for each miss.

use std::hint::black_box;

use gungraun::{library_benchmark, library_benchmark_group};
use hobbit_core::cache::policy::{self, Belady, PolicyKind, Shape, Upcoming, Weights};
use hobbit_core::cache::{Candidate, Now, Policy, ShareId, Use};
use hobbit_core::expert::{ExpertId, Precision, Version};
use hobbit_guard::inputs::{self, N_EXPERT, N_LAYERS, N_SLOTS, Token};

/// Tokens that a policy has seen before: enough for queues and windows to be full.
const N_BEFORE: usize = 40;

/// A policy's input at one layer.
struct Layer {
    layer: u16,
    scores: Vec<f32>,
    uses: Vec<(ExpertId, Use)>,
    missing: Vec<Version>,
    /// Residents that this token does not use.
    candidates: Vec<Candidate>,
}

struct Decisions {
    policy: Box<dyn Policy>,
    shows_scores: bool,
    token: u64,
    layers: Vec<Layer>,
    evicted: Vec<Version>,
}

impl Decisions {
    /// The cache's part of the contract: scores, uses, then a victim for each miss.
    fn decide(&mut self) {
        for Layer { layer, scores, uses, missing, candidates } in &mut self.layers {
            let now = Now { token: self.token, layer: *layer };
            if self.shows_scores {
                self.policy.on_scores(*layer, scores, now);
            }
            for &(expert, usage) in uses.iter() {
                self.policy.on_use(expert, usage, now);
            }
            for &version in missing.iter() {
                let victim = self.policy.victim(version, candidates, now);
                self.evicted.push(candidates.remove(victim).version);
                self.policy.on_insert(version, now);
            }
        }
    }

    fn show(&mut self, number: usize, token: &Token, slots: &[Vec<Candidate>]) {
        self.token = number as u64;
        self.evicted.clear();
        self.layers.clear();
        for (choice, slots) in token.iter().zip(slots) {
            let is_resident = |expert: &ExpertId| slots.iter().any(|slot| slot.version.expert == *expert);
            let uses = choice.experts().zip(&choice.chosen).map(|(expert, &(_, weight))| {
                (expert, Use::by_one(is_resident(&expert), Some(Precision::High), weight))
            });
            self.layers.push(Layer {
                layer: choice.layer,
                scores: choice.scores.clone(),
                uses: uses.collect(),
                missing: choice.experts().filter(|expert| !is_resident(expert)).map(Version::high).collect(),
                candidates: slots
                    .iter()
                    .copied()
                    .filter(|slot| choice.experts().all(|e| e != slot.version.expert))
                    .collect(),
            });
        }
    }
}

/// A policy that has seen some tokens, and the slots of its layers after them.
fn warm(mut policy: Box<dyn Policy>, shows_scores: bool, tokens: &[Token]) -> Decisions {
    let all = |layer, n| (0..n).map(move |index| Version::high(ExpertId { layer, index }));
    let mut slots: Vec<Vec<Candidate>> = Vec::new();
    for layer in 0..N_LAYERS {
        policy.on_share(ShareId { pool: 0, layer }, &all(layer, N_EXPERT).collect::<Vec<_>>());
        let now = Now { token: 0, layer };
        let inserted = all(layer, N_SLOTS as u16).inspect(|&version| policy.on_insert(version, now));
        slots.push(inserted.zip(0..).map(|(version, last_use)| Candidate { version, last_use }).collect());
    }
    let mut decisions = Decisions { policy, shows_scores, token: 0, layers: Vec::new(), evicted: Vec::new() };
    for (number, token) in tokens.iter().enumerate() {
        decisions.show(number, token, &slots);
        if number + 1 < tokens.len() {
            decisions.decide();
            let inserted = decisions.layers.iter().flat_map(|layer| &layer.missing);
            for (evicted, inserted) in decisions.evicted.iter().zip(inserted) {
                let slots = &mut slots[usize::from(evicted.expert.layer)];
                slots.iter_mut().filter(|slot| slot.version == *evicted).for_each(|slot| slot.version = *inserted);
            }
            for ((expert, _), event) in decisions.layers.iter().flat_map(|layer| &layer.uses).zip(0..) {
                let slots = &mut slots[usize::from(expert.layer)];
                let last_use = (number as u64 + 1) * 1024 + event;
                slots
                    .iter_mut()
                    .filter(|slot| slot.version.expert == *expert)
                    .for_each(|slot| slot.last_use = last_use);
            }
        }
    }
    decisions.evicted.clear();
    decisions.evicted.reserve(1024);
    decisions
}

fn of_kind(kind: PolicyKind) -> Decisions {
    let shape = Shape { n_layers: N_LAYERS, low_cost: 0.25 };
    let tokens = inputs::tokens(N_BEFORE + 1, 1);
    warm(policy::build(kind, &Weights::default(), shape), kind.needs_scores(), &tokens)
}

/// Belady's policy, which only the simulator has.
fn belady() -> Decisions {
    let tokens = inputs::tokens(2 * N_BEFORE, 1);
    let uses = |(choice, time)| {
        let demand = Some(Precision::High);
        inputs::Choice::experts(choice).map(move |expert| Upcoming { time, expert, demand })
    };
    let future = tokens.iter().flatten().zip(0..).flat_map(uses);
    warm(Box::new(Belady::new(future, 1.0)), false, &tokens[..=N_BEFORE])
}

#[library_benchmark(setup = of_kind)]
#[bench::lru(PolicyKind::Lru)]
#[bench::lfu(PolicyKind::Lfu)]
#[bench::hobbit(PolicyKind::Hobbit)]
#[bench::edgemoe(PolicyKind::EdgeMoe)]
#[bench::smoe(PolicyKind::Smoe)]
#[bench::arc(PolicyKind::Arc)]
#[bench::learned(PolicyKind::Learned)]
fn decide(mut decisions: Decisions) -> Decisions {
    black_box(&mut decisions).decide();
    decisions
}

#[library_benchmark(setup = belady)]
#[bench::belady()]
fn decide_knowing(mut decisions: Decisions) -> Decisions {
    black_box(&mut decisions).decide();
    decisions
}

/// A warm `learned`, and two tokens to come: it learns from every second one.
fn learning(shows_scores: bool) -> (Decisions, Vec<Token>) {
    let tokens = inputs::tokens(N_BEFORE + 3, 1);
    let policy = policy::build(PolicyKind::Learned, &Weights::default(), Shape { n_layers: N_LAYERS, low_cost: 0.25 });
    (warm(policy, shows_scores, &tokens[..=N_BEFORE]), tokens[N_BEFORE + 1..].to_vec())
}

#[library_benchmark(setup = learning)]
#[bench::learned_scored(true)]
#[bench::learned_blind(false)]
fn learn((mut decisions, tokens): (Decisions, Vec<Token>)) -> (Decisions, Vec<Token>) {
    let Decisions { policy, shows_scores, token, .. } = black_box(&mut decisions);
    for choices in &tokens {
        *token += 1;
        for choice in choices {
            let now = Now { token: *token, layer: choice.layer };
            if *shows_scores {
                policy.on_scores(choice.layer, &choice.scores, now);
            }
            for &(index, weight) in &choice.chosen {
                let usage = Use::by_one(true, Some(Precision::High), weight);
                policy.on_use(ExpertId { layer: choice.layer, index }, usage, now);
            }
        }
    }
    (decisions, tokens)
}

library_benchmark_group!(name = eviction, benchmarks = [decide, decide_knowing, learn]);
