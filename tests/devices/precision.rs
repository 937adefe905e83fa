//! Dynamic precision, the CPU helper and saved caches on a device with arithmetic or timing of its own.

use std::path::Path;

use hobbit::options::{
    CpuHelper, DraftOptions, DraftSource, FlashAttn, KvType, LowShare, LowSource, Prefetch, SpeculationOptions,
};
use hobbit::stats::WarmStart;
use hobbit::{
    BatchToken, CachingOptions, DeviceOptions, Model, ModelOptions, PrecisionOptions, Sampler, SamplingOptions,
    Session, SessionOptions,
};
use hobbit_core::cache::CacheState;
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::predict::{PathBatches, PredictorKind};
use hobbit_core::profile::write_path_table;
use hobbit_synth::{Format, Spec};
use lagging_device::{Device, Options, Order};

use super::compare::{ALL, HALF, NONE, QUARTER, WAVES, devices, options, same};
use super::fixture::cases::case;
use super::fixture::ends::{dynamic, lowered};
use super::fixture::script::Row;
use super::fixture::{bundled, demo_tokens, one_thread, write};
use super::{assert_sound, on, ordered, register};

/// The device leaves out the experts that the CPU leaves out. Without caches every use is a miss, so that both leave
/// out the same ones: all but each token's first few.
#[test]
fn skipped_experts() {
    let (dir, low_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let spec = Spec { topk: 4, dense_type: Some(Format::Q8_0), ..Spec::tiny("qwen3moe") };
    let path = write(dir.path(), &spec);
    let low = write(low_dir.path(), &Spec { types: vec![Format::Q4_0], ..spec.clone() });
    let case = case("qwen3moe", spec).brief();
    let run = |device: DeviceOptions| {
        let low = Some(LowSource::File(low.clone()));
        let options = ModelOptions { low, precision: dynamic(0.5, 0.6), device, ..options(NONE) };
        let (rows, session) = case.hobbit(&path, &options, None).unwrap();
        (rows, session.stats().total().used.skipped)
    };
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let device = ordered(order);
        let (expected, on_cpu) = run(devices(&[]));
        let (found, on_device) = run(DeviceOptions { cache: WAVES, cpu_helper: CpuHelper::Off, ..on(&[&device]) });
        assert_sound(&device);
        assert!(on_cpu > 0 && on_cpu == on_device, "{on_cpu} on the CPU, {on_device} on the device");
        for (expected, found) in expected.iter().zip(&found) {
            let apart = expected.logits.iter().zip(&found.logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 1e-3, "{}: {apart} apart from the CPU", expected.what);
        }
    }
}

/// In deterministic mode nothing depends on when operations run, not even skipping.
#[test]
fn skipping_does_not_depend_on_when_operations_run() {
    let orders = [Order::CopiesLate, Order::CopiesEarly];
    let [copying, unified] =
        [false, true].map(|unified| orders.map(|order| register(Options { order, unified, ..Options::default() })));
    for arch in ["qwen3moe", "gpt-oss", "deepseek2"] {
        let types = vec![Format::Q8_0];
        let case = case(arch, Spec { experts: 16, topk: 4, seed: 21, types, ..Spec::tiny(arch) });
        let (dir, low_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (high, low) = (case.write(dir.path()), write(low_dir.path(), &lowered(case.spec())));
        let run = |device: &Device, cache, expert_cache| {
            let options = ModelOptions {
                low: Some(LowSource::File(low.clone())),
                low_share: LowShare::Percent(40.0),
                precision: PrecisionOptions { deterministic: true, ..dynamic(0.4, 0.7) },
                device: DeviceOptions { cache, ..on(&[device]) },
                ..options(expert_cache)
            };
            let (rows, session) = case.hobbit(&high, &options, None).unwrap();
            let used = session.stats().total().used;
            assert!(used.high > 0 && used.low > 0 && used.skipped > 0, "{arch}: {used:?}");
            assert_sound(device);
            rows
        };
        let equal = |what: &str, a: &[Row], b: &[Row]| {
            same(a, b).unwrap_or_else(|error| panic!("{arch}, {what}: {error}"));
        };
        for ([late, early], cache, expert_cache) in
            [(&copying, QUARTER, HALF), (&copying, WAVES, HALF), (&copying, HALF, NONE), (&unified, WAVES, HALF)]
        {
            let rows = run(late, cache, expert_cache);
            equal("copies early", &rows, &run(early, cache, expert_cache));
            equal("again", &rows, &run(late, cache, expert_cache));
        }
    }
}

/// Mean KL divergence of the next token's distribution, in nats: the tolerance that README states.
pub const KL_MAX: f64 = 1e-3;

pub fn divergence(from: &[Vec<f32>], to: &[Vec<f32>]) -> f64 {
    let log_softmax = |logits: &[f32]| -> Vec<f64> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        logits.iter().map(|&logit| f64::from(logit - max) - sum.ln()).collect()
    };
    let of_row = |(p, q): (&Vec<f32>, &Vec<f32>)| -> f64 {
        let (p, q) = (log_softmax(p), log_softmax(q));
        p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
    };
    from.iter().zip(to).map(of_row).sum::<f64>() / from.len() as f64
}

/// Beside a device with other arithmetic, the helper's results are close to the device's own, and no farther from them
/// than the CPU's are.
#[test]
fn the_cpu_helper_is_close_to_the_device() {
    let device = register(Options { rounds_products: true, ..Options::default() });
    // A trained model: close decisions of random routers flip with the last bit.
    let run = |n_sequences: usize, n_steps: usize, device: DeviceOptions, cpu_helper: CpuHelper| {
        let device = DeviceOptions { cache: WAVES, cpu_helper, ..device };
        let model = Model::open(&bundled("demo.gguf"), &ModelOptions { device, ..options(ALL) }).unwrap();
        let n_seq_max = n_sequences as u32;
        let settings =
            SessionOptions { n_ctx: 512 * n_seq_max, n_seq_max, threads: Some(1), ..SessionOptions::default() };
        let mut session = model.session(&settings).unwrap();
        let tokens = demo_tokens(&model, 500);
        let counters = |session: &Session| session.stats().devices.first().copied().unwrap_or_default();
        let mut before = counters(&session);
        let mut logits: Vec<Vec<f32>> = Vec::new();
        // The first time, some experts may still have to come from the file, and the helper computes none of these.
        for _ in 0..2 {
            session.reset();
            session.feed(&tokens).unwrap();
            session.reset();
            before = counters(&session);
            logits.clear();
            for step in 0..n_steps {
                let entry = |sequence: usize| BatchToken {
                    token: tokens[step + 2 * sequence],
                    position: step as i32,
                    sequence: sequence as i32,
                    logits: true,
                };
                session.evaluate(&(0..n_sequences).map(entry).collect::<Vec<_>>()).unwrap();
                logits.extend((0..n_sequences).map(|row| session.logits(row).unwrap().to_vec()));
            }
        }
        (logits, counters(&session) - before)
    };
    for (n_sequences, n_steps) in [(1, 64), (2, 32), (5, 16), (16, 16)] {
        let run = |device, helper| run(n_sequences, n_steps, device, helper);
        let (on_cpu, _) = run(devices(&[]), CpuHelper::Off);
        let (on_device, alone) = run(on(&[&device]), CpuHelper::Off);
        let (both, helped) = run(on(&[&device]), CpuHelper::On);
        let (apart, found) = (divergence(&on_device, &on_cpu), divergence(&on_device, &both));
        assert!(apart > 0.0 && found > 0.0, "the two backends do not differ");
        assert!(found < KL_MAX && found <= 2.0 * apart, "{n_sequences} sequences: {found}, backends {apart} apart");
        // Without slots every expert is missing, and with all of them in host memory the CPU computes each, once for
        // all sequences: of 8 in each of 6 layers, which use 2 for a token.
        let n_uses = (2 * 6 * n_sequences * n_steps) as u64;
        assert_eq!((alone.helper_experts, helped.helper_experts), (0, helped.misses), "{n_sequences} sequences");
        assert!(helped.misses <= n_uses.min(8 * 6 * n_steps as u64), "{n_sequences} sequences: {helped:?}");
        assert_eq!(helped.misses == n_uses, n_sequences == 1, "{n_sequences} sequences: {helped:?}");
    }
    assert_sound(&device);
}

/// A device's policy counts the tokens of the text, and no rejected draft.
#[test]
fn rejected_drafts_are_no_uses() {
    let device = ordered(Order::CopiesLate);
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec { experts: 32, layers: 3, seed: 11, types: vec![Format::F32], ..Spec::tiny("qwen3moe") };
    let path = write(dir.path(), &spec);
    let run = |drafts: bool| {
        let state = dir.path().join(if drafts { "drafted" } else { "plain" });
        let device = DeviceOptions { cache: QUARTER, ..on(&[&device]) };
        let caching = CachingOptions { policy: PolicyKind::EdgeMoe, ..CachingOptions::default() };
        let options = ModelOptions { device, caching, cache_state: Some(state.clone()), ..options(QUARTER) };
        let model = Model::open(&path, &options).unwrap();
        let (type_k, type_v, flash_attn) = (KvType::F32, KvType::F32, FlashAttn::Off);
        let threads = Some(1);
        let options =
            SessionOptions { n_ctx: 256, n_outputs_max: 5, threads, type_k, type_v, flash_attn, ..Default::default() };
        let mut session = model.session(&options).unwrap();
        if drafts {
            let draft = Some(DraftOptions { path: path.clone(), n_gpu_layers: 0, ..DraftOptions::default() });
            let sources = vec![DraftSource::DraftSimple];
            let options = SpeculationOptions { sources, draft, n_max: 4, fixed: true, ..SpeculationOptions::default() };
            session.speculate(&options).unwrap();
        }
        session.feed(&(10..30).collect::<Vec<_>>()).unwrap();
        let sampling = SamplingOptions { seed: 5, temp: 0.3, ignore_eos: true, ..SamplingOptions::default() };
        let mut sampler = Sampler::new(&model, &sampling).unwrap();
        let text: Vec<_> = session.generate(&mut sampler, Some(60)).map(Result::unwrap).collect();
        let report = session.stats().speculation;
        drop((session, sampler, model));
        let mut caches = CacheState::from_bytes(&std::fs::read(state).unwrap()).unwrap().caches;
        caches.retain(|cache| !cache.name.is_empty());
        (text, caches.remove(0).statistics, report)
    };
    let (plain, drafted) = (run(false), run(true));
    let report = drafted.2.unwrap();
    assert!(report.accepted > 0 && report.accepted < report.drafted, "{report:?}");
    assert_eq!(drafted.0, plain.0);
    assert!(plain.1.iter().any(|byte| *byte > 0) && drafted.1 == plain.1);
    assert_sound(&device);
}

/// `--cache-state`: the device's slots are filled again, and it computes the same.
#[test]
fn saved_caches_are_restored() {
    let device = ordered(Order::CopiesLate);
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &Spec { experts: 32, layers: 3, seed: 11, ..Spec::tiny("qwen3moe") });
    let run = |state: Option<&Path>| {
        let cache_state = state.map(Path::to_owned);
        let device = DeviceOptions { cache: QUARTER, ..on(&[&device]) };
        let options = ModelOptions { device, cache_state, ..options(QUARTER) };
        let model = Model::open(&path, &options).unwrap();
        let mut session = model.session(&one_thread(256)).unwrap();
        let mut logits = Vec::new();
        for token in 10..50 {
            session.feed(&[token]).unwrap();
            logits.extend_from_slice(session.logits(0).unwrap());
        }
        (logits, session.description().warm_start, session.stats().devices[0])
    };
    let state = dir.path().join("state");
    let (expected, none, cold) = run(Some(&state));
    assert_eq!(none, None);
    let (logits, restored, warm) = run(Some(&state));
    assert!(logits == expected && run(None).0 == expected);
    let WarmStart { saved, experts, .. } = restored.unwrap();
    assert_eq!((saved, experts), (48, 48), "a quarter of 3 layers of 32 here, and there");
    assert_sound(&device);
    assert!(warm.hits > cold.hits, "{cold:?}, {warm:?}");
}

/// The most frequent experts of a path table fill the device's slots, the next ones the host's.
#[test]
fn path_tables_fill_both_caches() {
    let device = ordered(Order::CopiesLate);
    let dir = tempfile::tempdir().unwrap();
    let (path, table) =
        (write(dir.path(), &Spec { experts: 32, seed: 11, ..Spec::tiny("qwen3moe") }), dir.path().join("table"));
    let run = |path_table: Option<&Path>| {
        let predictor = Some(path_table.map_or(PredictorKind::None, |_| PredictorKind::PathTable));
        let caching = CachingOptions { predictor, prefetch: Prefetch::Off, ..CachingOptions::default() };
        let device = DeviceOptions { cache: QUARTER, ..on(&[&device]) };
        let path_table = path_table.map(Path::to_owned);
        let model = Model::open(&path, &ModelOptions { device, caching, path_table, ..options(QUARTER) }).unwrap();
        let mut session = model.session(&one_thread(256)).unwrap();
        let mut logits = Vec::new();
        for token in 10..30 {
            session.feed(&[token]).unwrap();
            logits.extend_from_slice(session.logits(0).unwrap());
        }
        (logits, session.description().warm_start, model.predict_shape())
    };
    let (expected, none, shape) = run(None);
    assert_eq!(none, None);
    let n_layers = shape.layers.len() as u64;
    let mut batches = PathBatches::new(shape.clone());
    // Of 20 experts, each is used once more than the next.
    shape.layers.iter().for_each(|&(layer, ..)| batches.layer(layer, 1, (0..20).flat_map(|last| 0..=last)));
    write_path_table(&table, &batches.build()).unwrap();
    let (logits, filled, _) = run(Some(&table));
    assert!(logits == expected);
    let WarmStart { by_frequency, saved, experts, .. } = filled.unwrap();
    assert_eq!((by_frequency, saved, experts), (true, 20 * n_layers, 16 * n_layers), "8 of each layer here, and there");
    assert_sound(&device);
}
