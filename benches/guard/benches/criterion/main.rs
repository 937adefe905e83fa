//! Times of hot, pure functions that are too large for valgrind: opening files; writing, reading and replaying traces.
//! `cargo bench --bench formats` in benches/guard.

use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::Pack;
use hobbit_core::planes::{BLOCK_WEIGHTS, HIGH_BYTES, LOW_BYTES, Q4_1_BYTES, complete, expand, merge, split};
use hobbit_core::predict::PredictorKind;
use hobbit_core::sim::{Config, Eviction, PredictedBy, Prefetch, Recording, replay};
use hobbit_core::trace::{Header, Layer, LayerRecord, ModelDescription, Phase, TraceReader, TraceWriter};
use hobbit_guard::inputs::{self, N_EXPERT, N_LAYERS, N_SLOTS, N_USED, Token};

const N_TOKENS: usize = 64;
const MIB: u64 = 1 << 20;
/// Scores of experts that were not chosen, as the engine keeps them.
const N_UNSELECTED: usize = 8;

fn models() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models"))
}

/// Headers and indices: what a start waits for before the first byte of a weight.
fn open(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("open");
    let model = models().join("demo.gguf");
    group.bench_function("gguf header", |b| {
        b.iter(|| {
            let gguf = Gguf::open(black_box(&model)).expect("the bundled model");
            gguf.experts().expect("its experts")
        });
    });
    let pack = models().join("demo.low-q2_k.hobbit.gguf");
    group.bench_function("pack index", |b| {
        b.iter(|| Pack::open(black_box(&pack)).expect("the bundled pack").catalog);
    });
    group.finish();
}

fn header() -> Header {
    let layer = |layer| Layer {
        layer,
        n_expert: N_EXPERT,
        n_used: N_USED,
        bytes_high: 6 * MIB,
        bytes_low: 2 * MIB,
        bytes_rest: 0,
        slots_high: N_SLOTS,
        slots_low: 0,
    };
    let model = ModelDescription { layers: (0..N_LAYERS).map(layer).collect(), ..ModelDescription::default() };
    Header { model, ..Header::default() }
}

fn write(tokens: &[Token]) -> Vec<u8> {
    let mut writer = TraceWriter::new(Vec::new(), &header()).expect("memory takes every byte");
    let mut record = LayerRecord::default();
    writer.sequence().expect("memory takes every byte");
    for token in tokens {
        for choice in token {
            let (chosen, weights): (Vec<u16>, Vec<f32>) = choice.chosen.iter().copied().unzip();
            record.clear(choice.layer, N_USED);
            record.push_token(&chosen, &weights, Some(&choice.scores), N_UNSELECTED);
            record.compute_seconds = 0.0005;
            writer.layer(&record).expect("memory takes every byte");
        }
        writer.batch(Phase::Decode, 1, 0.05).expect("memory takes every byte");
    }
    writer.finish().expect("memory takes every byte")
}

fn traces(criterion: &mut Criterion) {
    let tokens = inputs::tokens(N_TOKENS, 7);
    let bytes = write(&tokens);
    let mut group = criterion.benchmark_group("trace");
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    group.bench_function("write", |b| b.iter(|| write(black_box(&tokens))));
    group.bench_function("read", |b| {
        b.iter(|| {
            let reader = TraceReader::new(black_box(&bytes[..]), "bench.trace").expect("just written");
            assert!(reader.filter(Result::is_ok).count() > N_TOKENS);
        });
    });
    group.finish();
}

fn replays(criterion: &mut Criterion) {
    let bytes = write(&inputs::tokens(N_TOKENS, 7));
    let path = Path::new("bench.trace");
    let recording = TraceReader::new(&bytes[..], path).map_err(Into::into);
    let recording = recording.and_then(|reader| Recording::read(reader, path)).expect("just written");
    let recorded = Config::recorded(&recording).expect("settings of this version");
    let mut group = criterion.benchmark_group("replay");
    group.throughput(Throughput::Elements(N_TOKENS as u64));
    let evictions = [PolicyKind::Lru, PolicyKind::Learned].map(Eviction::Policy).into_iter().chain([Eviction::Belady]);
    for eviction in evictions {
        let config = Config { eviction, ..recorded.clone() };
        group.bench_function(eviction.to_string(), |b| b.iter(|| replay(&recording, &config, &mut |_, _, _| {})));
    }
    let prefetch = Some(Prefetch::default());
    let predictor = PredictedBy::Predictor(PredictorKind::Previous);
    let config = Config { predictor, prefetch, ..recorded };
    group.bench_function("lru, prefetching", |b| b.iter(|| replay(&recording, &config, &mut |_, _, _| {})));
    group.finish();
}

/// Weights of 8 bits in planes: what is added to every read of a nested pack. Bytes are those of the 8-bit weights.
fn planes(criterion: &mut Criterion) {
    // A slice of 2048 x 768, larger than the caches nearest to a core.
    let n_blocks = 2048 * 768 / BLOCK_WEIGHTS;
    let q8_0 = inputs::q8_0(n_blocks);
    let mut own = vec![0; q8_0.len()];
    let (mut high, mut low) = (vec![0; n_blocks * HIGH_BYTES], vec![0; n_blocks * LOW_BYTES]);
    let mut q4_1 = vec![0; n_blocks * Q4_1_BYTES];
    let mut group = criterion.benchmark_group("planes");
    group.throughput(Throughput::Bytes(q8_0.len() as u64));
    group.bench_function("split", |b| b.iter(|| assert!(split(black_box(&q8_0), &mut high, &mut low))));
    group.bench_function("merge", |b| b.iter(|| assert!(merge(black_box(&high), &low, &mut own))));
    assert!(own == q8_0);
    group.bench_function("expand", |b| b.iter(|| assert!(expand(black_box(&high), &mut q4_1))));
    group.bench_function("complete", |b| b.iter(|| assert!(complete(black_box(&q4_1), &low, &mut own))));
    assert!(own == q8_0);
    // Bounded by memory.
    group.bench_function("copy", |b| b.iter(|| own.copy_from_slice(black_box(&q8_0))));
    group.finish();
}

criterion_group!(benches, open, planes, traces, replays);
criterion_main!(benches);
