//! From the router's ids and weights to rows of slots and demands: all layers of a token, and a layer of a prompt.

use std::hint::black_box;

use gungraun::{library_benchmark, library_benchmark_group};
use hobbit_core::expert::Precision;
use hobbit_core::route::Routing;
use hobbit_core::route::{
    Choice, DECODE_TOKENS_MAX, Demand, Rerouting, Thresholds, TokenScores, Weighing, lower_least_popular, merge,
    renormalise, reroute, resolve, unimportance,
};
use hobbit_guard::inputs::{self, N_EXPERT, N_PROMPT, N_USED, Token};

/// Batches of a layer, with what is computed of them.
struct Batches {
    /// `[n_tokens][N_USED]` each.
    ids: Vec<Vec<i32>>,
    weights: Vec<Vec<f32>>,
    routing: Vec<Routing>,
    /// The row of every expert.
    rows: Vec<(u16, i32)>,
    by_expert: Vec<i32>,
    slot_ids: Vec<i32>,
    of_token: Vec<f32>,
    asked: Vec<(u16, Demand)>,
    is_first: Vec<bool>,
    demands: Vec<Demand>,
    floats: Vec<f32>,
    choices: Vec<Option<Precision>>,
}

/// A token's layers one by one, or the first layer of a prompt.
fn batches(is_prompt: bool) -> Batches {
    let tokens = inputs::tokens(if is_prompt { N_PROMPT } else { 1 }, 2);
    let n_batches = if is_prompt { 1 } else { tokens[0].len() };
    let of = |layer: usize| tokens.iter().flat_map(move |token| token[layer].chosen.iter().copied());
    let ids: Vec<Vec<i32>> = (0..n_batches).map(|layer| of(layer).map(|(id, _)| id.into()).collect()).collect();
    let mut batches = Batches {
        weights: (0..n_batches).map(|layer| of(layer).map(|(_, weight)| weight).collect()).collect(),
        routing: vec![Routing::default(); n_batches],
        ids,
        rows: (0..N_EXPERT).map(|index| (index, i32::from(index % 32))).collect(),
        by_expert: Vec::new(),
        slot_ids: Vec::new(),
        of_token: Vec::new(),
        asked: Vec::new(),
        is_first: vec![false; N_EXPERT.into()],
        demands: vec![Demand::Skip; N_EXPERT.into()],
        floats: Vec::new(),
        choices: Vec::new(),
    };
    // Once before: the engine reuses its memory.
    regroup_all(&mut batches);
    remap_all(&mut batches);
    classify_all(&mut batches);
    batches
}

fn regroup_all(batches: &mut Batches) {
    for (ids, routing) in batches.ids.iter().zip(&mut batches.routing) {
        let set = routing.set(ids.iter().copied(), N_USED.into(), N_EXPERT.into());
        assert!(set.is_ok(), "ids of the layer");
    }
}

fn remap_all(batches: &mut Batches) {
    let Batches { routing, rows, by_expert, slot_ids, .. } = batches;
    for routing in routing {
        routing.remap(rows.iter().copied(), N_EXPERT.into(), by_expert, slot_ids);
    }
}

/// HOBBIT's scorer, Fate's rule, and what experts get of which one in two is resident.
fn classify_all(batches: &mut Batches) {
    let thresholds = Thresholds::default();
    let Batches { ids, weights, routing, of_token, asked, is_first, demands, choices, .. } = batches;
    for ((ids, weights), routing) in ids.iter().zip(weights).zip(routing) {
        asked.clear();
        is_first.fill(false);
        for (ids, weights) in ids.chunks(N_USED.into()).zip(weights.chunks(N_USED.into())) {
            unimportance(weights, of_token);
            asked.extend(ids.iter().map(|&id| id as u16).zip(of_token.iter().map(|&s| thresholds.demand(s))));
            let firsts = ids.iter().zip(&*of_token).filter(|(_, unimportance)| **unimportance == 0.0);
            firsts.for_each(|(&id, _)| is_first[id as usize] = true);
        }
        demands.fill(Demand::Skip);
        merge(asked.iter().copied(), demands);
        if routing.n_tokens > DECODE_TOKENS_MAX {
            lower_least_popular(&routing.needed, 0.25, |index| is_first[usize::from(index)], demands);
        }
        choices.clear();
        choices.extend(
            routing
                .needed
                .iter()
                .map(|&index| resolve(demands[usize::from(index)], [index % 2 == 0, index % 3 == 0], true)),
        );
    }
}

#[library_benchmark(setup = batches)]
#[bench::token(false)]
#[bench::prompt(true)]
fn regroup(mut batches: Batches) -> Batches {
    regroup_all(black_box(&mut batches));
    batches
}

#[library_benchmark(setup = batches)]
#[bench::token(false)]
#[bench::prompt(true)]
fn remap(mut batches: Batches) -> Batches {
    remap_all(black_box(&mut batches));
    batches
}

#[library_benchmark(setup = batches)]
#[bench::token(false)]
#[bench::prompt(true)]
fn classify(mut batches: Batches) -> Batches {
    classify_all(black_box(&mut batches));
    batches
}

// Shares of the router's weight by expert, as policies are told them.
#[library_benchmark(setup = batches)]
#[bench::token(false)]
#[bench::prompt(true)]
fn shares(mut batches: Batches) -> Batches {
    let Batches { routing, weights, floats, .. } = black_box(&mut batches);
    floats.clear();
    for (routing, weights) in routing.iter().zip(weights) {
        floats.extend(routing.needed.iter().map(|&index| routing.share(index, weights)));
    }
    batches
}

// Weights of the other experts after some were skipped.
#[library_benchmark(setup = batches)]
#[bench::token(false)]
#[bench::prompt(true)]
fn make_up(mut batches: Batches) -> Batches {
    let Batches { weights, floats, .. } = black_box(&mut batches);
    for weights in weights.iter_mut().flat_map(|weights| weights.chunks_mut(N_USED.into())) {
        unimportance(weights, floats);
        let skipped: [bool; N_USED as usize] = std::array::from_fn(|rank| floats[rank] > 0.9);
        renormalise(weights, &skipped);
    }
    batches
}

/// A token's layers, and how it may be rerouted there.
struct ReroutedToken {
    rules: Rerouting,
    token: Token,
    /// Whether one expert in two is missing.
    misses: bool,
    /// By layer, `[N_USED]` each.
    ids: Vec<Vec<u16>>,
    weights: Vec<Vec<f32>>,
    exchanged: u64,
}

const LAMBDA: Rerouting =
    Rerouting { bias: 0.2, keep_top: 1, substitute: 0.0, substitute_max: None, only_present: false };
const ALPHA: Rerouting = Rerouting { bias: 0.0, substitute: 0.3, ..LAMBDA };

fn rerouted_token(rules: Rerouting, misses: bool) -> ReroutedToken {
    let token = inputs::tokens(1, 2).remove(0);
    let of = |choice: &inputs::Choice| choice.chosen.iter().copied().unzip();
    let (ids, weights) = token.iter().map(of).unzip();
    ReroutedToken { rules, token, misses, ids, weights, exchanged: 0 }
}

// Tokens rerouted to experts in memory: where nothing is missing, and where one expert in two is.
#[library_benchmark(setup = rerouted_token)]
#[bench::all_present(LAMBDA, false)]
#[bench::lambda(LAMBDA, true)]
#[bench::alpha(ALPHA, true)]
fn sent(mut rerouted: ReroutedToken) -> ReroutedToken {
    let ReroutedToken { rules, token, misses, ids, weights, exchanged } = black_box(&mut rerouted);
    for ((choice, ids), weights) in token.iter().zip(ids).zip(weights) {
        let choice_of = Choice { ids, weights, n_used: N_USED.into(), weighing: Weighing::Normalised };
        let scores = TokenScores { selection: &choice.scores, weights: &choice.scores };
        *exchanged += reroute(rules, choice_of, &[scores], &|index| !*misses || index % 2 == 0).exchanged;
    }
    rerouted
}

library_benchmark_group!(name = route, benchmarks = [regroup, remap, classify, shares, make_up, sent]);
