//! Instructions of the hot decisions. `benches/guard/check.sh` runs this and compares the counts with recorded ones.
//!
//! Most are counted in replays of a recording, which drive the engine's own residency: routing, precision, cache,
//! policy, predictor and prefetching. Only a bench's function is counted: its input is made before, and dropped after.

use std::hint::black_box;
use std::sync::Arc;

use gungraun::{Callgrind, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main};
use hobbit_core::expert::{ExpertId, Extent, Version};
use hobbit_core::load::balance::{Balancer, Costs, HelperMode, Miss, split};
use hobbit_core::options::{PrecisionMode, PrecisionOptions, RoutingOptions};
use hobbit_core::planes::{self, HIGH_BYTES, LOW_BYTES, Q4_1_BYTES, Q8_0_BYTES};
use hobbit_core::predict::{Gate, GateStack, Gating};
use hobbit_core::route::{Routing, Thresholds};
use hobbit_core::sim::{Budget, Compute, Config, Prefetch, Recording, path_table, replay};
use hobbit_core::store::{Form, Order, Rearrange, Rows};
use hobbit_guard::{N_EXPERT, N_LAYERS, N_USED, choice, floats, q8_0, recording, tokens};

const MIB: u64 = 1 << 20;
/// Tokens of a decoding replay.
const N_TOKENS: usize = 24;
/// Tokens of a prompt's batch.
const N_PROMPT: usize = 128;

/// A recording and the settings of its replay.
type Run = (Recording, Config);

/// A layer takes as long as a few reads. Half of the experts have slots.
fn set_up(recording: Recording, change: impl FnOnce(&mut Config)) -> Run {
    let mut config = Config::recorded(&recording).expect("known settings");
    config.memory.budget = Budget::Percent(50.0);
    config.eviction = "learned".parse().expect("a policy");
    config.predictor = "none".parse().expect("a predictor");
    config.link.bytes_per_second = 8e9;
    config.compute = Compute::Given { layer_seconds: 0.001, expert_seconds: 0.0005 };
    change(&mut config);
    (recording, config)
}

fn decode(change: impl FnOnce(&mut Config)) -> Run {
    set_up(recording(N_TOKENS, 1, 1), change)
}

fn policy(name: &str) -> Run {
    decode(|config| config.eviction = name.parse().expect("a policy"))
}

/// Low versions by HOBBIT's scorer, and Fate's rule in prompts.
fn dynamic(config: &mut Config) {
    config.memory.low_percent = 20.0;
    let Thresholds { t1, t2 } = Thresholds::default();
    let (mode, prefill_low) = (Some(PrecisionMode::Dynamic), Some(0.25));
    config.precision = PrecisionOptions { mode, t1: Some(t1), t2: Some(t2), prefill_low, ..config.precision };
}

fn rerouted(bias: f32, substitute: f32) -> Run {
    let routing = RoutingOptions { cache_bias: bias, substitute, ..RoutingOptions::default() };
    decode(|config| config.routing = routing)
}

fn predictor(name: &str, tries: bool) -> Run {
    let mut run = decode(|config| {
        config.predictor = name.parse().expect("a predictor");
        config.prefetch = Some(Prefetch { tries, ..Prefetch::default() });
        config.path_table = Some(Arc::new(path_table(&[recording(64, 1, 4)])));
    });
    // A start that is not cold: a path table would fill the cache with what it predicts.
    run.0.start.versions = vec![Version::high(ExpertId { layer: 0, index: 0 })];
    let outcome = replay(&run.0, &run.1, &mut |_, _, _| {}).expect("a replay");
    assert!(tries || outcome.prefetch.issued > 0, "{name}: there is something to decide");
    run
}

fn prompt(change: impl FnOnce(&mut Config)) -> Run {
    set_up(recording(1, N_PROMPT, 2), change)
}

#[library_benchmark]
#[bench::lru(policy("lru"))]
#[bench::lfu(policy("lfu"))]
#[bench::hobbit(policy("hobbit"))]
#[bench::edgemoe(policy("edgemoe"))]
#[bench::smoe(policy("smoe"))]
#[bench::arc(policy("arc"))]
#[bench::learned(policy("learned"))]
#[bench::belady(policy("belady"))]
#[bench::dynamic(decode(dynamic))]
#[bench::cache_bias(rerouted(0.2, 0.0))]
#[bench::substitute(rerouted(0.0, 0.3))]
#[bench::stacked_gate(predictor("stacked-gate", false))]
#[bench::stacked_gate_in_trials(predictor("stacked-gate", true))]
#[bench::cross_layer(predictor("cross-layer", false))]
#[bench::path_table(predictor("path-table", false))]
#[bench::prompt(prompt(|_| {}))]
#[bench::prompt_dynamic(prompt(dynamic))]
fn layers((recording, config): Run) -> Run {
    let _ = black_box(replay(black_box(&recording), &config, &mut |_, _, _| {}));
    (recording, config)
}

/// A token's layers one by one, or the first layer of a prompt.
fn routings(is_prompt: bool) -> (Vec<Routing>, Vec<i32>, Vec<i32>) {
    let tokens = tokens(if is_prompt { N_PROMPT } else { 1 }, 2);
    let of_layer = |layer: usize| {
        let ids = tokens.iter().flat_map(|token| choice(&token[layer]).0).map(i32::from);
        let mut routing = Routing::default();
        assert!(routing.set(ids, N_USED.into(), N_EXPERT.into()).is_ok(), "ids of the layer");
        routing
    };
    ((0..if is_prompt { 1 } else { N_LAYERS.into() }).map(of_layer).collect(), Vec::new(), Vec::new())
}

// The graph's expert ids become rows of slots.
#[library_benchmark(setup = routings)]
#[bench::token(false)]
#[bench::prompt(true)]
fn remap((routings, mut by_expert, mut ids): (Vec<Routing>, Vec<i32>, Vec<i32>)) -> (Vec<Routing>, Vec<i32>) {
    for routing in black_box(&routings) {
        let rows = (0..N_EXPERT).map(|index| (index, i32::from(index % 32)));
        routing.remap(rows, N_EXPERT.into(), &mut by_expert, &mut ids);
    }
    (routings, ids)
}

/// Gates of four layers with inputs of 2048 numbers.
fn gates(gating: Gating) -> (GateStack, Vec<f32>) {
    const WIDTH: usize = 2048;
    let mut gates = GateStack::default();
    for layer in 0..4 {
        let rows = Arc::new(floats(WIDTH * usize::from(N_EXPERT), 10 + u32::from(layer)));
        assert!(gates.add(layer, WIDTH, Gate { rows, bias: None, choice_bias: None, gating, groups: None }));
    }
    (gates, floats(WIDTH, 9))
}

// One input through three later layers' gates.
#[library_benchmark(setup = gates)]
#[bench::softmax(Gating::Softmax)]
#[bench::sigmoid(Gating::Sigmoid)]
fn product((mut gates, x): (GateStack, Vec<f32>)) -> (GateStack, Vec<f32>) {
    black_box(gates.scores_of(black_box(&[&x[..]]), &[1, 2, 3]));
    (gates, x)
}

/// A token's misses, layer by layer: every chosen expert, three in four of them in host memory.
fn misses() -> (Vec<Vec<Miss>>, Costs) {
    let miss = |(index, score): (u16, f32)| {
        let on_host = !index.is_multiple_of(4);
        Miss { index, bytes: 6 * MIB, rows: 1, score, on_host }
    };
    let of_layer = |scores: &Vec<f32>| {
        let (chosen, weights) = choice(scores);
        chosen.into_iter().zip(weights).map(miss).collect()
    };
    let mut balancer = Balancer::new(Costs::default(), HelperMode::Auto);
    balancer.observe_copy(6 * MIB, 0.001);
    balancer.observe_cpu(6 * MIB, 0.002);
    (tokens(1, 6)[0].iter().map(of_layer).collect(), balancer.costs)
}

// Between copying to a device and computing on the CPU.
#[library_benchmark(setup = misses)]
#[bench::token()]
fn balance((misses, costs): (Vec<Vec<Miss>>, Costs)) -> (Vec<Vec<Miss>>, Costs) {
    for misses in black_box(&misses) {
        black_box(split(misses, &costs, 0.0005, HelperMode::Auto));
    }
    (misses, costs)
}

/// Every second byte first: the least that an order does.
struct Halves;

impl Rearrange for Halves {
    fn rearrange(&self, rows: &[u8], out: &mut [u8]) {
        let (first, second) = out.split_at_mut(rows.len() / 2);
        for ((pair, a), b) in rows.chunks_exact(2).zip(first).zip(second) {
            (*a, *b) = (pair[0], pair[1]);
        }
    }
}

/// An expert's matrix, as a file has it, room for it, and the form in which it is wanted.
fn handed(n_groups: usize) -> (Vec<u8>, Vec<u8>, Form, Extent) {
    const GROUP_BYTES: usize = 16 * 1088;
    let bytes = n_groups * GROUP_BYTES;
    let order = Order::Other(Arc::new(Halves));
    let rows = Rows { offset: 1000, bytes: bytes as u64, group_bytes: GROUP_BYTES as u64, to: 0, order };
    let extent = Extent { file: 0, offset: 1000, len: bytes as u64 };
    (vec![3; 1000 + bytes], vec![0; bytes], Form::Rows(vec![rows]), extent)
}

// The completion of a read, before the slot is handed over.
#[library_benchmark(setup = handed)]
#[bench::rows(64)]
fn hand_over((file, mut out, form, extent): (Vec<u8>, Vec<u8>, Form, Extent)) -> (Vec<u8>, Vec<u8>) {
    assert!(black_box(&form).assemble(&file, &extent, &mut out));
    (file, out)
}

/// Weights of 8 bits in two planes, as Q4_1, and room for what is made of them.
fn planes_of(n_blocks: usize) -> [Vec<u8>; 4] {
    let (mut high, mut low) = (vec![0; n_blocks * HIGH_BYTES], vec![0; n_blocks * LOW_BYTES]);
    assert!(planes::split(&q8_0(n_blocks), &mut high, &mut low));
    let mut q4_1 = vec![0; n_blocks * Q4_1_BYTES];
    assert!(planes::expand(&high, &mut q4_1));
    [high, low, q4_1, vec![0; n_blocks * Q8_0_BYTES]]
}

// When a read of a pack of bit planes lands: both planes, the first alone, and the second after it.
#[library_benchmark(setup = planes_of)]
#[bench::blocks(4096)]
fn merge([high, low, q4_1, mut q8_0]: [Vec<u8>; 4]) -> [Vec<u8>; 4] {
    planes::merge(black_box(&high), &low, &mut q8_0);
    [high, low, q4_1, q8_0]
}

#[library_benchmark(setup = planes_of)]
#[bench::blocks(4096)]
fn expand([high, low, mut q4_1, q8_0]: [Vec<u8>; 4]) -> [Vec<u8>; 4] {
    planes::expand(black_box(&high), &mut q4_1);
    [high, low, q4_1, q8_0]
}

#[library_benchmark(setup = planes_of)]
#[bench::blocks(4096)]
fn complete([high, low, q4_1, mut q8_0]: [Vec<u8>; 4]) -> [Vec<u8>; 4] {
    planes::complete(black_box(&q4_1), &low, &mut q8_0);
    [high, low, q4_1, q8_0]
}

library_benchmark_group!(
    name = hot,
    benchmarks = [layers, remap, product, balance, hand_over, merge, expand, complete]
);

/// glibc chooses its string and math functions by the processor's features. Without these it chooses the functions that
/// run on every x86-64.
const GLIBC_TUNABLES: &str = "glibc.cpu.hwcaps=-AVX,-AVX2,-AVX512F,-AVX512VL,-AVX512BW,-FMA,-FMA4,-BMI1,-BMI2,-LZCNT,\
    -MOVBE,-POPCNT,-SSE4_1,-SSE4_2,-SSSE3,-ERMS,-FSRM,-RTM,-AVX_Fast_Unaligned_Load,-Fast_Unaligned_Copy,\
    -Fast_Copy_Backward";

main!(
    config = LibraryBenchmarkConfig::default()
        .env("GLIBC_TUNABLES", GLIBC_TUNABLES)
        // Only instructions are compared: no caches are simulated.
        .tool(Callgrind::with_args(["--cache-sim=no"])),
    library_benchmark_groups = [hot]
);
