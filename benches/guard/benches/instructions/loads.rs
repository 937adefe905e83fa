//! Decisions on loads: ahead of the router, and between copying to a device and computing on the CPU.

use std::hint::black_box;
use std::sync::Arc;

use gungraun::{library_benchmark, library_benchmark_group};
use hobbit_core::expert::{Extent, Precision, Version};
use hobbit_core::load::balance::{Balancer, Costs, HelperMode, Miss, split};
use hobbit_core::load::prefetch::{Estimates, Governor, Holdings, Link, PrefetchOptions, Prefetcher};
use hobbit_core::predict::{Gates, Predictor};
use hobbit_core::route::Thresholds;
use hobbit_core::store::{Form, Order, Rearrange, Rows};
use hobbit_guard::inputs::{self, N_USED, Token};

const MIB: u64 = 1 << 20;
const N_BEFORE: usize = 8;
const DISTANCE_MAX: u8 = 2;

/// Experts of 6 MiB, of which two in three are resident.
struct Held {
    has_low: bool,
}

impl Holdings for Held {
    fn is_resident(&self, version: Version) -> bool {
        let is_one_in = |n: u16| (version.expert.index + version.expert.layer).is_multiple_of(n);
        match version.precision {
            Precision::High => !is_one_in(3),
            Precision::Low => self.has_low && is_one_in(2),
        }
    }

    fn bytes(&self, version: Version) -> Option<u64> {
        match version.precision {
            Precision::High => Some(6 * MIB),
            Precision::Low => self.has_low.then_some(2 * MIB),
        }
    }

    fn n_used(&self, _layer: u16) -> usize {
        N_USED.into()
    }
}

struct Ahead {
    prefetcher: Prefetcher,
    predictor: Gates,
    held: Held,
    token: Token,
}

impl Ahead {
    /// All layers: settle what was read ahead, look ahead, shield, plan.
    fn run(&mut self) {
        let Self { prefetcher, predictor, held, token } = self;
        predictor.begin_token();
        for (at, choice) in token.iter().enumerate() {
            for distance in 1..=DISTANCE_MAX {
                if let Some(later) = token.get(at + usize::from(distance)) {
                    predictor.scores(choice.layer, distance, &later.scores);
                }
            }
            let used: Vec<Version> = choice.experts().map(Version::high).collect();
            black_box(prefetcher.settle(choice.layer, std::slice::from_ref(&choice.chosen), &used, true));
            let ahead = prefetcher.look_ahead(predictor, choice.layer, DISTANCE_MAX, held);
            let loads = prefetcher.plan(&ahead, Link::default(), held);
            prefetcher.masked().for_each(|version| _ = black_box(version));
            loads.iter().for_each(|load| prefetcher.landed(load.version));
        }
        prefetcher.abandon();
    }
}

/// A layer takes as long as two reads.
fn ahead(has_low: bool) -> Ahead {
    let thresholds = if has_low { Thresholds::default() } else { Thresholds { t1: 1.0, t2: 1.0 } };
    let options = PrefetchOptions { thresholds, ..PrefetchOptions::default() };
    let mut estimates = Estimates::seeded(2e9);
    estimates.observe_layer(0.006);
    let mut tokens = inputs::tokens(N_BEFORE + 1, 5).into_iter();
    let mut ahead = Ahead {
        prefetcher: Prefetcher::new(options, estimates),
        predictor: Gates::stacked(inputs::shape(), DISTANCE_MAX),
        held: Held { has_low },
        token: Vec::new(),
    };
    for token in tokens.by_ref().take(N_BEFORE) {
        ahead.token = token;
        ahead.run();
    }
    ahead.token = tokens.next().unwrap_or_default();
    assert!(ahead.prefetcher.counters.issued > 0, "there is something to decide");
    ahead
}

// A token's prefetches.
#[library_benchmark(setup = ahead)]
#[bench::exact(false)]
#[bench::dynamic(true)]
fn prefetch(mut ahead: Ahead) -> Ahead {
    black_box(&mut ahead).run();
    ahead
}

/// A token's misses, layer by layer: every chosen expert, three in four of them in host memory.
fn misses() -> (Vec<Vec<Miss>>, Costs) {
    let on_host = |index: u16| !index.is_multiple_of(4);
    let miss = |&(index, score): &(u16, f32)| Miss { index, bytes: 6 * MIB, rows: 1, score, on_host: on_host(index) };
    let token = inputs::tokens(1, 6).remove(0);
    let misses = token.iter().map(|choice| choice.chosen.iter().map(miss).collect()).collect();
    let mut balancer = Balancer::new(Costs::default(), HelperMode::Auto);
    balancer.observe_copy(6 * MIB, 0.001);
    balancer.observe_cpu(6 * MIB, 0.002);
    (misses, balancer.costs)
}

#[library_benchmark(setup = misses)]
#[bench::token()]
fn balance((misses, costs): (Vec<Vec<Miss>>, Costs)) -> (Vec<Vec<Miss>>, Costs) {
    for misses in black_box(&misses) {
        black_box(split(misses, &costs, 0.0005, HelperMode::Auto));
    }
    (misses, costs)
}

const N_TOKENS: u16 = 256;

// Tokens whose waits vary, and are a little shorter with prefetching: trials, rests, and a decision.
#[library_benchmark]
#[bench::tokens()]
fn govern() -> Governor {
    let mut governor = Governor::on_trial();
    for at in 0..black_box(N_TOKENS) {
        let wait = 0.02 + f64::from(at % 7) / 1000.0;
        let waited = if governor.is_on() { 0.8 * wait } else { wait };
        governor.end_token(0.03 + waited, waited);
    }
    governor
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

/// An expert's matrix, as a file has it, and the form in which it is wanted.
struct Handed {
    file: Vec<u8>,
    out: Vec<u8>,
    form: Form,
    extent: Extent,
}

fn handed(n_groups: usize) -> Handed {
    const GROUP_BYTES: usize = 16 * 1088;
    let bytes = n_groups * GROUP_BYTES;
    let order = Order::Other(Arc::new(Halves));
    let rows = Rows { offset: 1000, bytes: bytes as u64, group_bytes: GROUP_BYTES as u64, to: 0, order };
    Handed {
        file: vec![3; 1000 + bytes],
        out: vec![0; bytes],
        form: Form::Rows(vec![rows]),
        extent: Extent { file: 0, offset: 1000, len: bytes as u64 },
    }
}

// The completion of a read, before the slot is handed over.
#[library_benchmark(setup = handed)]
#[bench::rows(64)]
fn hand_over(mut handed: Handed) -> Handed {
    let Handed { file, out, form, extent } = &mut handed;
    assert!(black_box(&*form).assemble(file, extent, out));
    handed
}

library_benchmark_group!(name = load, benchmarks = [prefetch, balance, govern, hand_over]);
