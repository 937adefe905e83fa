//! The host has every expert and the device a quarter: approximations save copies over the link.

use std::collections::BTreeMap;
use std::time::Duration;

use hobbit::options::{CpuHelper, LowShare, LowSource, PrecisionMode};
use hobbit::stats::PrecisionReport;
use hobbit::{BatchToken, DeviceOptions, Model, ModelOptions, PrecisionOptions, Stats};
use hobbit_core::profile::{LossBound, MeasuredMix, Mix, Mixes};
use hobbit_synth::{Format, Spec};
use lagging_device::{Device, Order};

use super::compare::{ALL, QUARTER, options};
use super::fixture::ends::dynamic;
use super::fixture::{one_thread, write};
use super::{assert_sound, on, ordered};

fn spec() -> Spec {
    let types = vec![Format::Q8_0];
    Spec { experts: 16, topk: 4, embd: 256, ff: 64, seed: 11, types, ..Spec::tiny("qwen3moe") }
}

/// Evaluates 32 tokens of a prompt, then 64 one by one, on a device that has a quarter of the experts. Counts bytes
/// copied for the prompt and for the others, and uses in low precision, skipped, and of other experts than the
/// router's.
fn run(device: &Device, low: bool, change: fn(&mut ModelOptions)) -> ([u64; 5], PrecisionReport) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let high = write(dir.path(), &spec());
    let low_dir = tempfile::tempdir().expect("a temporary directory");
    let dense_type = Some(Format::Q8_0);
    let low = low.then(|| write(low_dir.path(), &Spec { types: vec![Format::Q4_0], dense_type, ..spec() }));
    let mut options = ModelOptions {
        low: low.map(LowSource::File),
        precision: PrecisionOptions { deterministic: true, ..PrecisionOptions::default() },
        device: DeviceOptions { cache: QUARTER, cpu_helper: CpuHelper::Off, ..on(&[device]) },
        ..options(ALL)
    };
    change(&mut options);
    let model = Model::open(&high, &options).expect("the model opens");
    let mut session = model.session(&one_thread(512)).expect("a session");
    let token = |position: i32| BatchToken {
        token: (position * 37) % 300 + 3 + position / 20,
        position,
        sequence: 0,
        logits: position >= 31,
    };
    let uploaded = |stats: &Stats| stats.devices.iter().map(|device| device.uploaded_bytes).sum::<u64>();
    let before = uploaded(&session.stats());
    session.evaluate(&(0..32).map(token).collect::<Vec<_>>()).expect("nothing fails");
    let prompt = uploaded(&session.stats());
    for position in 32..96 {
        session.evaluate(&[token(position)]).expect("nothing fails");
    }
    let stats = session.stats();
    assert_sound(device);
    let total = stats.total();
    let counts = [prompt - before, uploaded(&stats) - prompt, total.used.low, total.used.skipped, total.rerouted.uses];
    (counts, session.description().precision.clone())
}

/// Where the device has every expert, too, options on missing ones are named.
#[test]
fn options_that_save_no_copies_are_named() {
    let (device, dir) = (ordered(Order::CopiesLate), tempfile::tempdir().expect("a temporary directory"));
    let path = write(dir.path(), &spec());
    let named = |cache| {
        let device = DeviceOptions { cache, cpu_helper: CpuHelper::On, ..on(&[&device]) };
        let mut options = ModelOptions { device, ..options(ALL) };
        options.routing.cache_bias = 0.2;
        let session = Model::open(&path, &options).expect("the model opens").session(&one_thread(512));
        session.expect("a session").description().idle.iter().map(|idle| idle.setting).collect::<Vec<_>>()
    };
    assert_eq!((named(QUARTER), named(ALL)), (vec![], vec!["cpu_helper", "cache_bias"]));
}

/// A loss bound whose cheapest mix, with a quarter of the experts in memory, is λ 0.2, or T1 0.4 and T2 0.8 where there
/// are low versions of this type. A half of the experts would allow more.
fn bound(low: Option<&str>) -> LossBound {
    let one = |mix, bytes_per_token| MeasuredMix { mix, loss: 0.005, error: 0.001, bytes_per_token };
    let measured = |cache_share: f64, mixes: Vec<MeasuredMix>| Mixes {
        text: "prose.txt".to_owned(),
        text_sha256: String::new(),
        tokens: 2048,
        expert_cache: format!("{}%", 100.0 * cache_share),
        cache_share,
        high: "q8_0".to_owned(),
        low: low.map(str::to_owned),
        exact_bytes_per_token: 1000.0,
        mixes,
    };
    let biased = one(Mix { cache_bias: 0.2, ..Mix::EXACT }, 600.0);
    let lowered = one(Mix { t1: 0.4, t2: 0.8, ..Mix::EXACT }, 500.0);
    let too_much = one(Mix { cache_bias: 0.3, ..Mix::EXACT }, 100.0);
    let measured = vec![measured(0.25, vec![lowered, biased]), measured(0.5, vec![too_much])];
    LossBound { max_loss: 0.01, measured, file: "a.json".into(), model: "a.gguf".into(), name: str::to_owned }
}

/// A set of flags, whether it has low versions, and the counts expected.
type Row = (&'static str, bool, fn(&mut ModelOptions), [u64; 5]);

fn repeatable(t1: f32, t2: f32) -> PrecisionOptions {
    PrecisionOptions { deterministic: true, ..dynamic(t1, t2) }
}

#[test]
fn each_approximation_saves_copies() {
    let exact = [2_558_976, 35_355_648, 0, 0, 0];
    let rows: [Row; 13] = [
        ("no flag", false, |_| {}, exact),
        ("--precision exact", true, |all| all.precision.mode = Some(PrecisionMode::Exact), exact),
        ("--low", true, |_| {}, [2_288_640, 25_193_472, 73, 173, 0]),
        ("--t1 0.4 --t2 0.8", true, |all| all.precision = repeatable(0.4, 0.8), [2_128_896, 18_997_248, 83, 279, 0]),
        ("--low-share 20%", true, |all| all.low_share = LowShare::Percent(20.0), [2_288_640, 26_560_512, 116, 160, 0]),
        (
            "--t1 1 --prefill-low 25%",
            true,
            |all| all.precision = PrecisionOptions { prefill_low: Some(0.25), ..repeatable(1.0, 1.0) },
            [2_316_288, 35_355_648, 34, 0, 0],
        ),
        ("--cache-bias 0.2", false, |all| all.routing.cache_bias = 0.2, [2_558_976, 20_262_912, 0, 0, 286]),
        (
            "--cache-bias 0.2 --keep-top 3",
            false,
            |all| (all.routing.cache_bias, all.routing.keep_top) = (0.2, 3),
            [2_558_976, 27_052_032, 0, 0, 161],
        ),
        ("--substitute 0.3", false, |all| all.routing.substitute = 0.3, [2_558_976, 32_796_672, 0, 0, 43]),
        ("--drop 0.9", false, |all| all.routing.drop = 0.9, [2_558_976, 12_742_656, 0, 419, 0]),
        ("--max-loss", false, |all| all.loss_bound = Some(bound(None)), [2_558_976, 20_262_912, 0, 0, 286]),
        (
            "--max-loss, --low",
            true,
            |all| all.loss_bound = Some(bound(Some("q4_0"))),
            [2_128_896, 18_997_248, 83, 279, 0],
        ),
        (
            // Out of reach: λ climbs to the highest strength.
            "--target-latency",
            false,
            |all| all.routing.target_latency = Some(Duration::from_nanos(1)),
            [2_558_976, 24_336_384, 0, 0, 207],
        ),
    ];
    let mut by_name = BTreeMap::new();
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let device = ordered(order);
        for (name, low, change, expected) in rows {
            let (counts, report) = run(&device, low, change);
            // Processors differ in last bits, which move a few choices.
            let is_near = |(found, expected): (&u64, &u64)| match *expected {
                0 => *found == 0,
                expected => found.abs_diff(expected) <= (expected / 100).max(5),
            };
            assert!(counts.iter().zip(&expected).all(is_near), "{name}, {order:?}: {counts:?}, {expected:?}");
            let same = by_name.entry(name).or_insert(counts);
            assert_eq!(counts, *same, "{name}, {order:?}");
            let is_dynamic = low && name != "--precision exact";
            assert_eq!((report.is_dynamic(), report.over_link), (is_dynamic, is_dynamic), "{name}");
        }
    }
}
