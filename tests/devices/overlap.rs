//! Time that copies and products of experts have in common, in the test device's virtual time: no clock, no noise.
//!
//! Everything is in host memory, so only the link and the device count. Latencies are zero.

use std::path::Path;

use hobbit::options::{CpuHelper, FlashAttn};
use hobbit::{BatchToken, CachingOptions, DeviceOptions, Model, ModelOptions, Session, SessionOptions, Token};
use hobbit_core::plan::ExpertCache;
use hobbit_synth::Spec;
use lagging_device::{Device, Options, Report};

use super::compare::{ALL, HALF, Placed, QUARTER, WAVES, assert_none, open_stock, options};
use super::fixture::script::Evaluate;
use super::fixture::write;
use super::{assert_sound, on, register};

/// Bytes of weights per virtual second.
const COMPUTE: f64 = 1e9;
/// Time to copy a slice, relative to multiplying by it.
const SLOWER: [f64; 3] = [4.0, 1.0, 0.25];
const WIDTHS: (u32, u32) = (256, 512);
const N_USED: u32 = 4;
/// Experts and layers for a batch: as of real models, an expert's weights are much more than what passes through it.
const BATCH: (u32, u32) = (96, 2);
/// Gate, up or down of an expert in Q8_0.
const SLICE_BYTES: f64 = (WIDTHS.0 * WIDTHS.1 / 32 * 34) as f64;

/// Share of the time that could be hidden.
const HIDDEN_MIN: f64 = 0.8;

pub fn spec(experts: u32, layers: u32, topk: u32) -> Spec {
    let (embd, ff) = WIDTHS;
    Spec { layers, embd, ff, experts, topk, ..Spec::tiny("qwen3moe") }
}

fn device(slower: f64) -> Device {
    let (link_bandwidth, compute_bandwidth) = (COMPUTE / slower, COMPUTE);
    register(Options { link_bandwidth, compute_bandwidth, ..Options::default() })
}

pub fn session_options() -> SessionOptions {
    SessionOptions { n_ctx: 1024, threads: Some(1), flash_attn: FlashAttn::Off, ..SessionOptions::default() }
}

pub fn session(path: &Path, device: &Device, cache: ExpertCache) -> Session {
    let device = DeviceOptions { cache, cpu_helper: CpuHelper::Off, ..on(&[device]) };
    Model::open(path, &ModelOptions { device, ..options(ALL) }).unwrap().session(&session_options()).unwrap()
}

/// Tokens from position `from`. All logits are wanted: else the last layer would see a single token.
pub fn batch(from: usize, tokens: &[Token]) -> Vec<BatchToken> {
    let entry =
        |(i, &token): (usize, &Token)| BatchToken { token, position: (from + i) as i32, sequence: 0, logits: true };
    tokens.iter().enumerate().map(entry).collect()
}

pub fn text(n: usize) -> Vec<Token> {
    (0..n).map(|i| 3 + (i * 37 % 500) as Token).collect()
}

/// Few tokens that come again: some experts are found on the device.
pub fn chatter(n: usize) -> Vec<Token> {
    (0..n).map(|i| 3 + 11 * (i * i % 7) as Token).collect()
}

/// The device's report of an evaluation.
pub fn measure(device: &Device, evaluate: impl FnOnce()) -> Report {
    device.reset();
    evaluate();
    let report = device.report();
    assert_sound(device);
    report
}

fn overlap(report: &Report) -> f64 {
    report.copy_busy + report.compute_busy - report.host_time
}

/// The overlap in copies of a slice, rounded, where copies are as fast as products.
fn overlap_of_slices(report: &Report) -> i64 {
    (overlap(report) * COMPUTE / SLICE_BYTES).round() as i64
}

/// The time that copies and products of one token can have in common at most in one layer, with `hits` experts on the
/// device and `misses` that come slice by slice; gates and ups are complete before the first down.
fn possible(hits: u64, misses: u64, copy: f64, product: f64) -> f64 {
    let mut now = 2.0 * hits as f64 * product;
    for arrived in 1..=2 * misses {
        now = f64::max(now, arrived as f64 * copy) + product;
    }
    now += hits as f64 * product;
    for arrived in 2 * misses + 1..=3 * misses {
        now = f64::max(now, arrived as f64 * copy) + product;
    }
    3.0 * (misses as f64 * copy + (hits + misses) as f64 * product) - now
}

#[test]
fn decoding_hides_what_dependencies_allow() {
    let dir = tempfile::tempdir().unwrap();
    // The next layer's router waits for this layer, so layers have nothing in common: one shows all there is.
    let path = write(dir.path(), &spec(16, 1, N_USED));
    let tokens = chatter(48);
    let mut failures = Vec::new();
    for slower in SLOWER {
        let device = device(slower);
        let (copy, product) = (slower * SLICE_BYTES / COMPUTE, SLICE_BYTES / COMPUTE);
        for cache in [QUARTER, WAVES] {
            let mut session = session(&path, &device, cache);
            let run = |session: &mut Session| {
                let (mut found, mut best, mut counts) = (0.0, 0.0, (0, 0));
                for (at, token) in tokens.iter().enumerate() {
                    let before = session.stats().devices[0];
                    let report = measure(&device, || session.evaluate(&batch(at, &[*token])).unwrap());
                    let after = session.stats().devices[0];
                    let (hits, misses) = (after.hits - before.hits, after.misses - before.misses);
                    assert_eq!(hits + misses, u64::from(N_USED));
                    counts = (counts.0 + hits, counts.1 + misses);
                    found += overlap(&report);
                    best += possible(hits, misses, copy, product);
                }
                (found, best, counts)
            };
            // Once for the host's cache.
            run(&mut session);
            session.reset();
            let (found, best, (hits, misses)) = run(&mut session);
            let share = found / best;
            assert!(misses > 0 && best > 0.0);
            assert!(cache != QUARTER || hits > 0);
            if share < HIDDEN_MIN {
                failures.push(format!("copies {slower}x as slow, {cache:?}: {found} s of {best} s in common"));
            }
        }
    }
    assert_none(failures);
}

/// Embeddings that are read from the file and results of the CPU's experts are copied from pinned memory.
#[test]
fn prompts_copy_nothing_large_from_pageable_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &spec(16, 2, N_USED));
    for n_cpu_moe in [0, 1] {
        let copy_time = |pageable_bandwidth: f64| {
            // Indices of rows are smaller, embeddings twice as large.
            let device = register(Options { pageable_bandwidth, small_copy_bytes: 64 << 10, ..Options::default() });
            let cpu_helper = CpuHelper::Off;
            let place = DeviceOptions { n_cpu_moe, op_offload: false, cache: QUARTER, cpu_helper, ..on(&[&device]) };
            let model = Model::open(&path, &ModelOptions { device: place, ..options(ALL) }).unwrap();
            let mut session = model.session(&session_options()).unwrap();
            measure(&device, || session.evaluate(&batch(0, &text(128))).unwrap()).copy_busy
        };
        assert_eq!(copy_time(1e6), copy_time(f64::INFINITY), "-ncmoe {n_cpu_moe}");
    }
}

/// HOBBIT computes a layer once its loads have ended (section 3.1).
#[test]
fn without_overlap_nothing_is_hidden() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &spec(16, 1, N_USED));
    let run = |overlap: bool, cache: ExpertCache| {
        let device = device(1.0);
        let device_options = DeviceOptions { cache, cpu_helper: CpuHelper::Off, ..on(&[&device]) };
        let caching = CachingOptions { overlap, ..CachingOptions::default() };
        let options = ModelOptions { device: device_options, caching, ..options(ALL) };
        let mut session = Model::open(&path, &options).unwrap().session(&session_options()).unwrap();
        let (mut logits, mut hidden) = (Vec::new(), Vec::new());
        for (at, token) in chatter(12).iter().enumerate() {
            let report = measure(&device, || {
                logits.extend(Evaluate::evaluate(&mut session, &batch(at, &[*token])).unwrap());
            });
            hidden.push(overlap_of_slices(&report));
        }
        let counts = session.stats().devices[0];
        (logits, hidden, (counts.hits, counts.misses))
    };
    for cache in [QUARTER, HALF] {
        let (expected, with, counts) = run(true, cache);
        let (found, without, same) = run(false, cache);
        assert_eq!(counts, same);
        assert!(found == expected, "the order of products is no matter of bits");
        assert_eq!(without, [0; 12], "{cache:?}");
        assert!(with.iter().sum::<i64>() > 0, "{cache:?}: {with:?} slices hidden");
    }
}

#[test]
fn prefill_hides_the_smaller_of_copies_and_products() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &spec(BATCH.0, BATCH.1, 2));
    let mut failures = Vec::new();
    for slower in SLOWER {
        let device = device(slower);
        let (copy, product) = (slower * SLICE_BYTES / COMPUTE, SLICE_BYTES / COMPUTE);
        for cache in [QUARTER, WAVES] {
            for n_tokens in [64, 512] {
                let mut session = session(&path, &device, cache);
                let prompt = batch(0, &text(n_tokens));
                session.evaluate(&prompt).unwrap();
                session.reset();
                let before = session.stats().devices[0];
                let report = measure(&device, || session.evaluate(&prompt).unwrap());
                let after = session.stats().devices[0];
                let experts = (after.hits + after.misses - before.hits - before.misses) as f64;
                let copies = (after.uploads - before.uploads) as f64 * copy;
                let smaller = copies.min(3.0 * experts * product);
                let share = overlap(&report) / smaller;
                if share < HIDDEN_MIN {
                    failures.push(format!("{n_tokens} tokens, copies {slower}x as slow, {cache:?}: {share}"));
                }
            }
        }
    }
    assert_none(failures);
}

#[test]
fn large_batches_are_never_slower_than_by_op_offload() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &spec(BATCH.0, BATCH.1, 2));
    let mut failures = Vec::new();
    for slower in SLOWER {
        let device = device(slower);
        for n_tokens in [64, 512] {
            let prompt = batch(0, &text(n_tokens));
            let stock = {
                // It copies the experts of large batches to the device (`op_offload`).
                let placed = Placed { on_cpu: "ffn_.*_exps", ..Placed::on(&[device.name()]) };
                let mut stock = open_stock(&path, &session_options(), &placed).unwrap();
                measure(&device, || drop(Evaluate::evaluate(&mut stock, &prompt).unwrap()))
            };
            // Products on the CPU take no virtual time.
            let experts = f64::from(BATCH.0 * BATCH.1) * 3.0 * SLICE_BYTES;
            assert!(stock.copied_bytes as f64 >= 0.3 * experts, "it copied {} bytes, no experts", stock.copied_bytes);
            for cache in [QUARTER, WAVES] {
                let mut session = session(&path, &device, cache);
                session.evaluate(&prompt).unwrap();
                session.reset();
                let found = measure(&device, || session.evaluate(&prompt).unwrap());
                let ratio = stock.host_time / found.host_time;
                if ratio < 1.0 {
                    failures
                        .push(format!("{n_tokens} tokens, copies {slower}x as slow, {cache:?}: {found:?}, {stock:?}"));
                }
            }
        }
    }
    assert_none(failures);
}

/// Over a slow link the CPU computes a part of a short prompt's misses, and not of a long one's.
#[test]
fn short_prompts_are_computed_where_it_is_sooner() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let of = |at: usize, n_expert| write(dirs[at].path(), &spec(n_expert, 4, 2));
    // Each expert of the second one has 128 of 512 tokens.
    let (many, few) = (of(0, 16), of(1, 8));
    let run = |path: &Path, cpu_helper: CpuHelper, n_tokens: usize| {
        let (link_bandwidth, host_bandwidth) = (COMPUTE / 8.0, COMPUTE);
        let device = register(Options { link_bandwidth, host_bandwidth, ..Options::default() });
        let options =
            ModelOptions { device: DeviceOptions { cache: WAVES, cpu_helper, ..on(&[&device]) }, ..options(ALL) };
        let mut session = Model::open(path, &options).unwrap().session(&session_options()).unwrap();
        let prompt = batch(0, &text(n_tokens));
        // The first ones fill the host's cache and measure both sides.
        for _ in 0..3 {
            session.evaluate(&prompt).unwrap();
            session.reset();
        }
        let before = session.stats().devices[0];
        let report = measure(&device, || session.evaluate(&prompt).unwrap());
        (report.host_time, (session.stats().devices[0] - before).helper_experts)
    };
    let ((copied, none), (divided, computed)) = (run(&many, CpuHelper::Off, 48), run(&many, CpuHelper::Auto, 48));
    assert!(none == 0 && computed > 0 && divided < 0.5 * copied, "{computed} experts: {divided} s, copied {copied} s");
    assert_eq!(run(&few, CpuHelper::Auto, 512).1, 0, "a long prompt's are copied");
}

/// Fewer and wider ubatches copy less, and their logits are those of a session of that width. A device that lacks few
/// experts gives no memory for them.
#[test]
fn wide_prompts_copy_less() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &Spec { ff: 256, heads: 2, ..spec(32, 28, 1) });
    let options = SessionOptions { n_ctx: 1024, flash_attn: FlashAttn::On, n_outputs_max: 1, ..session_options() };
    let [usual, fixed] = [256, 1024].map(|n| SessionOptions { n_batch: n, n_ubatch: n, ..options.clone() });
    let auto = SessionOptions { n_ubatch_max: 512, ..usual.clone() };
    let device = device(4.0);
    let open = |cache: ExpertCache, session: &SessionOptions| {
        let device = DeviceOptions { cache, cpu_helper: CpuHelper::Off, ..on(&[&device]) };
        Model::open(&path, &ModelOptions { device, ..super::compare::options(ALL) }).unwrap().session(session).unwrap()
    };
    let tokens = text(1000);
    let read = |cache: ExpertCache, settings: &SessionOptions| {
        let mut session = open(cache, settings);
        // It measures the costs, and fills the host's cache.
        session.feed(&tokens).unwrap();
        session.reset();
        let mut ends = Vec::new();
        let report = measure(&device, || session.feed_with(&tokens, |done| ends.push(done)).unwrap());
        (report, ends, session)
    };
    let (narrow, four, _) = read(WAVES, &usual);
    let (wide, two, session) = read(WAVES, &auto);
    assert_eq!((four.len(), &two[..]), (4, &[512, 1000][..]), "{:?}", session.stats().prompt_width);
    assert!(wide.host_time < 0.6 * narrow.host_time, "{} s, {} s in narrow ones", wide.host_time, narrow.host_time);
    assert!(wide.copied_bytes < narrow.copied_bytes * 6 / 10, "{wide:?}, {narrow:?}");

    let mut reference = open(WAVES, &fixed);
    for range in [0..512, 512..1000] {
        let entry = |at: usize| BatchToken { token: tokens[at], position: at as i32, sequence: 0, logits: at == 999 };
        reference.evaluate(&range.map(entry).collect::<Vec<_>>()).unwrap();
    }
    let logits = |session: &Session| session.logits(487).expect("the last token's").to_vec();
    assert_eq!(logits(&session), logits(&reference));
    assert_eq!(read(ExpertCache::Percent(95.0), &auto).1, four, "it lacks few experts");
}
