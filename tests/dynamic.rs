//! Dynamic precision between exact and low: reproducible runs, counts, failed reads.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hobbit::options::{LowShare, LowSource, PrecisionMode};
use hobbit::stats::PhaseStats;
use hobbit::{BatchToken, CachingOptions, EvalError, Model, ModelOptions, PrecisionOptions, Session, Token};
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::gguf::Gguf;
use hobbit_core::pack::{PackKind, PackSpec, TypeChoice, write};
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::store::faulty::{Faults, FaultyStore, Hold};
use hobbit_synth::{Format, Spec};

use crate::fixture::{self, one_thread};

/// A model of 16 experts, four used per token, and the same with experts of fewer bits.
struct Models {
    _dir: tempfile::TempDir,
    high: PathBuf,
    low: PathBuf,
}

fn models() -> Models {
    fixture::quiet_llama_cpp();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let spec = Spec { experts: 16, topk: 4, ff: 64, seed: 11, ..Spec::tiny("qwen3moe") };
    let low_spec = Spec { types: vec![Format::Q4_0], dense_type: Some(Format::Q8_0), ..spec.clone() };
    let write = |name: &str, spec: &Spec| {
        let sub = dir.path().join(name);
        std::fs::create_dir(&sub).expect("a directory");
        fixture::write(&sub, spec)
    };
    let (high, low) = (write("high", &spec), write("low", &low_spec));
    Models { _dir: dir, high, low }
}

fn options(low: Option<&Path>, precision: PrecisionOptions) -> ModelOptions {
    ModelOptions {
        budget: Budget::Bytes(4 << 30),
        expert_cache: ExpertCache::Percent(40.0),
        low: low.map(|low| LowSource::File(low.to_owned())),
        low_share: LowShare::Percent(30.0),
        precision: PrecisionOptions { mode: Some(PrecisionMode::Dynamic), ..precision },
        ..ModelOptions::default()
    }
}

fn open(high: &Path, options: &ModelOptions, faults: Faults) -> Session {
    let model = Model::open_with_store(high, options, move |inner| Arc::new(FaultyStore::new(inner, faults.clone())));
    model.and_then(|model| model.session(&one_thread(512))).expect("the model opens")
}

/// Tokens with a rhythm: a few come again and again, so that some experts are used often.
fn text() -> impl Iterator<Item = Token> {
    (0..120).map(|i| if i % 3 == 0 { 40 + (i % 5) } else { (i * 37) % 300 + 3 })
}

/// Feeds a prompt of eight tokens at once and then single tokens; the bits of all logits.
fn run(session: &mut Session) -> Result<Vec<Vec<u32>>, EvalError> {
    let tokens: Vec<Token> = text().collect();
    let batches = [&tokens[..8]].into_iter().chain(tokens[8..].chunks(1));
    let mut position = 0;
    let mut rows = Vec::new();
    for batch in batches {
        let entries: Vec<BatchToken> = batch
            .iter()
            .zip(position..)
            .map(|(&token, position)| BatchToken { token, position, sequence: 0, logits: true })
            .collect();
        // A failed batch does not change the context: the same batch may be tried again.
        if let Err(error) = session.evaluate(&entries) {
            session.evaluate(&entries).map_err(|_| error)?;
        }
        position += entries.len() as i32;
        let row = |i| session.logits(i).expect("asked for").iter().map(|logit| logit.to_bits()).collect();
        rows.extend((0..entries.len()).map(row));
    }
    Ok(rows)
}

fn total(session: &Session) -> PhaseStats {
    session.stats().total()
}

/// In deterministic mode results, upgrades included, do not depend on order and speed of answers.
#[test]
fn a_deterministic_run_does_not_depend_on_the_disk() {
    let models = models();
    let precision = PrecisionOptions { deterministic: true, ..PrecisionOptions::default() };
    let options = options(Some(&models.low), precision);
    repeats(&models, &options);
    // With one or two slots in a share, a slot that is still loading matters.
    for percent in [7.0, 12.0] {
        repeats(&models, &ModelOptions { expert_cache: ExpertCache::Percent(percent), ..options.clone() });
    }
}

fn repeats(models: &Models, options: &ModelOptions) {
    let mut runs = [None, Some(1), Some(2), Some(3)].into_iter().map(|seed| {
        let hold = seed.map(|seed| Hold { answers_max: 4, seed });
        let mut session = open(&models.high, options, Faults { hold, ..Faults::default() });
        let rows = run(&mut session).expect("nothing fails");
        // Hits and misses of prefetched experts depend on speed.
        let PhaseStats { used, missed, upgrades, bytes_read, .. } = total(&session);
        ((rows, missed), (used, upgrades, bytes_read))
    });
    let first = runs.next().expect("four runs");
    let ((_, missed), (used, upgrades, _)) = &first;
    assert!(used.high > 0 && used.low > 0 && used.skipped > 0, "{used:?}: the test sees every kind of use");
    assert!(missed.high > 0 && missed.low > 0 && missed.skipped > 0, "{missed:?}");
    assert!(*upgrades > 0, "upgrades are part of the test");
    for again in runs {
        assert_eq!(first.1, again.1);
        assert!(first.0.0 == again.0.0, "equal counts, other logits");
    }
}

/// A pack of bit planes gives the logits of a pack and a low one with the same weights, with upgrades and shared low
/// versions, and reads less.
#[test]
fn bit_planes_give_the_logits_of_two_packs() {
    let models = models();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let [planes, high, low] = ["planes", "high", "low"].map(|name| dir.path().join(format!("{name}.gguf")));
    let source = Gguf::open(&models.high).expect("it was just written");
    let pack = |out: &Path, spec: &PackSpec| {
        write(&source, out, spec, &fixture::HighPlanes, &mut |_| ControlFlow::Continue(())).expect("there is room");
    };
    pack(&planes, &PackSpec { bit_planes: true, ..PackSpec::new(PackKind::Full) });
    pack(&high, &PackSpec::new(PackKind::Full));
    let q4_1: TypeChoice = "q4_1".parse().expect("a type of ggml's");
    pack(&low, &PackSpec { low: Some(q4_1), ..PackSpec::new(PackKind::Low) });
    let precision = PrecisionOptions { deterministic: true, t2: Some(1.0), ..PrecisionOptions::default() };
    // A policy that ignores the cost of low versions.
    let caching = CachingOptions { policy: PolicyKind::Lru, ..CachingOptions::default() };
    for percent in [25.0, 40.0] {
        let with = |low: Option<&Path>| {
            let expert_cache = ExpertCache::Percent(percent);
            ModelOptions { caching, expert_cache, ..options(low, precision) }
        };
        let mut two = open(&high, &with(Some(&low)), Faults::default());
        let expected = run(&mut two).expect("nothing fails");
        let mut one =
            open(&planes, &with(None), Faults { hold: Some(Hold { answers_max: 4, seed: 5 }), ..Faults::default() });
        assert!(run(&mut one).expect("nothing fails") == expected, "{percent} %");
        let (two, one) = (total(&two), total(&one));
        assert_eq!((one.used, one.upgrades), (two.used, two.upgrades));
        assert!(one.upgrades > 0 && one.used.high > 0 && one.used.low > 0, "{one:?}");
        assert!(one.bytes_read < two.bytes_read, "{} bytes, {} from two files", one.bytes_read, two.bytes_read);
    }
}

/// Without low versions the same thresholds leave experts out; without skipping everything is loaded.
#[test]
fn without_low_versions_unimportant_experts_are_skipped() {
    let models = models();
    let precision = PrecisionOptions { t1: Some(0.6), t2: Some(0.6), ..PrecisionOptions::default() };
    let mut session = open(&models.high, &options(None, precision), Faults::default());
    run(&mut session).expect("nothing fails");
    let used = total(&session).used;
    assert!(used.low == 0 && used.high > 0 && used.skipped > 0, "{used:?}");
}

/// A model that fits is never approximated.
#[test]
fn everything_resident_is_exact() {
    let models = models();
    let all = ModelOptions {
        expert_cache: ExpertCache::Percent(100.0),
        ..options(Some(&models.low), PrecisionOptions::default())
    };
    let mut session = open(&models.high, &all, Faults::default());
    assert_eq!(session.description().precision.mode, PrecisionMode::Exact);
    let rows = run(&mut session).expect("nothing fails");
    let mut exact = open(&models.high, &ModelOptions { low: None, ..all }, Faults::default());
    assert!(rows == run(&mut exact).expect("nothing fails"));
}

/// A run survives any failed read: a read that a product waits for fails its batch, which may be tried again; a read of
/// an upgrade fails nothing, because the low version remains.
#[test]
fn any_read_may_fail() {
    let models = models();
    let precision = PrecisionOptions { deterministic: true, ..PrecisionOptions::default() };
    let options = options(Some(&models.low), precision);
    let tokens: Vec<Token> = text().collect();
    let (mut n_failed_batches, mut n_survived) = (0, 0);
    for number in (0..400).step_by(3) {
        let faults = Faults { io_error: vec![number], ..Faults::default() };
        let mut session = open(&models.high, &options, faults);
        let mut failed = false;
        for (&token, position) in tokens.iter().zip(0..).take(60) {
            let entry = [BatchToken { token, position, sequence: 0, logits: true }];
            if let Err(error) = session.evaluate(&entry) {
                assert!(!failed, "one fault fails one batch, not: {error}");
                failed = true;
                session.evaluate(&entry).expect("the second try reads again");
            }
            let logits = session.logits(0).expect("asked for");
            assert!(logits.iter().all(|logit| logit.is_finite()));
        }
        if failed {
            n_failed_batches += 1;
        } else {
            n_survived += 1;
        }
    }
    assert!(n_failed_batches > 0 && n_survived > 0, "{n_failed_batches} batches failed, {n_survived} upgrades did");
}
