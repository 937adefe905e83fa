//! `--cache-state`: a model that is closed and opened again has the same experts in memory, and computes the same.

#[path = "fixture/not_run.rs"]
mod not_run;

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hobbit::options::DeviceChoice;
use hobbit::stats::WarmStart;
use hobbit::{CachingOptions, DeviceOptions, LogLevel, Model, ModelOptions, SessionOptions, Token};
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::cache::{Allocation, CacheState, ModelMark};
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::predict::PredictorKind;

/// Notices go to one place per process: one test at a time.
static NOTICES: Mutex<String> = Mutex::new(String::new());
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    hobbit::set_log(|level, text| {
        if level == LogLevel::Notice {
            NOTICES.lock().unwrap().push_str(text);
        }
    });
    notices();
    guard
}

/// What was told since the last call.
fn notices() -> String {
    std::mem::take(&mut *NOTICES.lock().unwrap())
}

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models")
}

fn options(percent: f64, policy: PolicyKind, state: Option<&Path>) -> ModelOptions {
    ModelOptions {
        budget: Budget::Bytes(4 << 30),
        expert_cache: ExpertCache::Percent(percent),
        // What is read ahead would be resident too, or not.
        caching: CachingOptions { policy, predictor: PredictorKind::None, ..CachingOptions::default() },
        cache_state: state.map(Path::to_owned),
        device: DeviceOptions { devices: DeviceChoice::None, ..DeviceOptions::default() },
        ..ModelOptions::default()
    }
}

#[derive(Default)]
struct Run {
    logits: Vec<f32>,
    /// Hits and misses of each token.
    counts: Vec<(u64, u64)>,
    warm: Option<WarmStart>,
}

impl Run {
    fn hit_rate(&self, tokens: std::ops::Range<usize>) -> f64 {
        let (hits, misses) = self.counts[tokens].iter().fold((0, 0), |sum, n| (sum.0 + n.0, sum.1 + n.1));
        hits as f64 / (hits + misses) as f64
    }
}

/// Parts of a text, token by token, each part a sequence.
fn run(model: &Path, options: &ModelOptions, parts: &[&[Token]]) -> Run {
    let model = Model::open(model, options).unwrap();
    let session = SessionOptions { n_ctx: 1024, threads: Some(1), ..SessionOptions::default() };
    let mut session = model.session(&session).unwrap();
    let mut run = Run { warm: session.warm_start(), ..Run::default() };
    let mut before = session.stats().total();
    for (i, part) in parts.iter().enumerate() {
        if i > 0 {
            session.reset();
        }
        for token in part.chunks(1) {
            session.feed(token).unwrap();
            run.logits.extend_from_slice(session.logits(0).unwrap());
            let now = session.stats().total();
            run.counts.push((now.hits - before.hits, now.misses - before.misses));
            before = now;
        }
    }
    run
}

fn demo() -> PathBuf {
    models().join("demo.gguf")
}

fn tokens() -> Vec<Token> {
    let model = Model::open(&demo(), &options(50.0, PolicyKind::Lru, None)).unwrap();
    let text = fs::read_to_string(models().join("demo-heldout-prose.txt")).unwrap();
    model.tokenize(&text[..8192], true, false).unwrap()
}

/// Layers that have fewer slots now keep their most recent experts, others all that were there.
#[test]
fn slots_may_be_divided_otherwise() {
    let _guard = alone();
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let tokens = tokens();
    let with = |slots, state| {
        let even = options(50.0, PolicyKind::Lru, state);
        ModelOptions { caching: CachingOptions { slots, ..even.caching }, ..even }
    };
    run(&demo(), &with(Allocation::Even, Some(&state)), &[&tokens[..400]]);
    let shallow = Allocation::ShallowFirst { layers: 1 };
    let cold = run(&demo(), &with(shallow, None), &[&tokens[400..500]]);
    let warm = run(&demo(), &with(shallow, Some(&state)), &[&tokens[400..500]]);
    assert!(warm.logits == cold.logits);
    let restored = warm.warm.unwrap();
    assert_eq!((restored.saved, restored.experts), (24, 20), "4 of each layer for 8, 4, 3, 3, 3 and 3 slots");
    assert!(warm.hit_rate(0..16) > cold.hit_rate(0..16));
    let again = run(&demo(), &with(shallow, Some(&state)), &[&tokens[500..600]]);
    assert_eq!(again.warm.map(|warm| (warm.saved, warm.experts)), Some((24, 24)));
    let back = run(&demo(), &with(Allocation::Even, Some(&state)), &[&tokens[..100]]).warm.unwrap();
    assert_eq!((back.saved, back.experts), (24, 20), "4 of 8, 4 of 4, and 3 of 3 four times");
    assert_eq!(notices(), "");
}

#[test]
fn the_second_run_begins_where_the_first_ended() {
    let _guard = alone();
    let dir = tempfile::tempdir().unwrap();
    let tokens = tokens();
    let (first, second) = (&tokens[..400], &tokens[400..600]);
    let mut table = String::new();
    for policy in [PolicyKind::Lru, PolicyKind::EdgeMoe, PolicyKind::Learned] {
        let state = dir.path().join(policy.name());
        let before = run(&demo(), &options(50.0, policy, Some(&state)), &[first]);
        assert_eq!(before.warm, None, "there was no file");
        let cold = run(&demo(), &options(50.0, policy, None), &[second]);
        let warm = run(&demo(), &options(50.0, policy, Some(&state)), &[second]);
        let lasting = run(&demo(), &options(50.0, policy, None), &[first, second]);
        assert!(warm.logits == cold.logits, "{policy}: what is resident changes nothing that comes out");
        assert_eq!(warm.counts, lasting.counts[400..], "{policy}: as if the model had stayed open");
        let restored = warm.warm.unwrap();
        assert_eq!((restored.saved, restored.experts), (24, 24), "half of 6 layers of 8");
        assert!(restored.bytes > 0);
        let steady = before.hit_rate(200..400);
        for n in [16, 64] {
            let (cold, warm) = (cold.hit_rate(0..n), warm.hit_rate(0..n));
            table += &format!("{policy}: first {n} tokens: cold {cold:.3}, warm {warm:.3}, steady {steady:.3}\n");
        }
        assert!(warm.hit_rate(0..16) > cold.hit_rate(0..16), "{table}");
        // What the same tokens reach with caches that have been filled for long is the steady rate of this text.
        assert!(warm.hit_rate(0..16) >= lasting.hit_rate(400..416), "{table}");
        assert!(warm.hit_rate(0..16) >= steady - 0.05, "{table}");
    }
    eprint!("{table}");
    assert_eq!(notices(), "");
    let names = || fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names().count(), 3, "nothing else is left behind: {:?}", names().collect::<Vec<_>>());
}

#[test]
fn caches_of_other_sizes_take_what_fits() {
    let _guard = alone();
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let tokens = tokens();
    run(&demo(), &options(50.0, PolicyKind::Lru, Some(&state)), &[&tokens[..200]]);
    let saved = fs::read(&state).unwrap();
    let expected = run(&demo(), &options(50.0, PolicyKind::Lru, None), &[&tokens[..40]]).logits;
    for (percent, n) in [(25.0, 12), (75.0, 24), (100.0, 24)] {
        fs::write(&state, &saved).unwrap();
        let warm = run(&demo(), &options(percent, PolicyKind::Lru, Some(&state)), &[&tokens[..40]]);
        assert!(warm.logits == expected, "{percent} %");
        let WarmStart { saved, experts, .. } = warm.warm.unwrap();
        assert_eq!((saved, experts), (24, n), "{percent} %");
    }
    // Another policy: the residents are as good, what the last one has learned is not.
    fs::write(&state, &saved).unwrap();
    let other = run(&demo(), &options(50.0, PolicyKind::EdgeMoe, Some(&state)), &[&tokens[..40]]);
    assert_eq!(other.warm.unwrap().experts, 24);
    assert!(other.logits == expected);
    assert_eq!(notices(), "");
}

#[test]
fn a_run_that_computes_nothing_leaves_the_file_as_it_is() {
    let _guard = alone();
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let tokens = tokens();
    run(&demo(), &options(50.0, PolicyKind::Lru, Some(&state)), &[&tokens[..50]]);
    let saved = fs::read(&state).unwrap();
    let none = run(&demo(), &options(25.0, PolicyKind::Lru, Some(&state)), &[]);
    assert_eq!(none.warm.unwrap().experts, 12);
    assert_eq!(fs::read(&state).unwrap(), saved);
    // Equal files and equal tokens: equal hits, and equal files in the end.
    let again = || {
        fs::write(&state, &saved).unwrap();
        let run = run(&demo(), &options(25.0, PolicyKind::Learned, Some(&state)), &[&tokens[50..150]]);
        (run.counts, fs::read(&state).unwrap())
    };
    assert!(again() == again());
}

#[test]
fn files_that_do_not_fit_are_told_and_the_run_starts_cold() {
    let _guard = alone();
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let tokens = tokens();
    let text = &tokens[..50];
    let cold = run(&demo(), &options(50.0, PolicyKind::Lru, Some(&state)), &[text]);
    let good = fs::read(&state).unwrap();
    let of_model = |change: fn(&mut ModelMark)| {
        let mut state = CacheState::from_bytes(&good).unwrap();
        change(&mut state.model);
        state.to_bytes()
    };
    let mut newer = good.clone();
    newer[8] += 1;
    let mut changed = good.clone();
    changed[good.len() / 2] ^= 1;
    let table: [(&str, Vec<u8>, &str, bool); 8] = [
        ("another name", of_model(|model| model.name.push('2')), "of another model, \"demo.gguf2\"", true),
        ("another size", of_model(|model| model.bytes += 1), "of another model", true),
        ("other places", of_model(|model| model.catalog += 1), "of another model", true),
        ("another version", newer, "of version 2, expected 1", true),
        ("changed", changed, "it is damaged", true),
        ("cut off", good[..good.len() - 9].to_vec(), "it is damaged", true),
        ("empty", Vec::new(), "it is damaged", true),
        ("not ours", b"The bytes of a text that somebody needs.".to_vec(), "not a cache state", false),
    ];
    for (name, bytes, why, is_replaced) in table {
        fs::write(&state, &bytes).unwrap();
        let run = run(&demo(), &options(50.0, PolicyKind::Lru, Some(&state)), &[text]);
        let told = notices();
        assert!(told.contains("cache state") && told.contains(why) && told.contains("start empty"), "{name}: {told}");
        assert_eq!((run.warm, &run.counts), (None, &cold.counts), "{name}");
        assert!(run.logits == cold.logits, "{name}");
        let expected = if is_replaced { &good } else { &bytes };
        assert!(fs::read(&state).unwrap() == *expected, "{name}");
    }
    // The same file under another name is another model: names are how people tell quantisations apart.
    fs::write(&state, &good).unwrap();
    let copy = dir.path().join("copy.gguf");
    fs::copy(demo(), &copy).unwrap();
    assert_eq!(run(&copy, &options(50.0, PolicyKind::Lru, Some(&state)), &[text]).warm, None);
    assert!(notices().contains("of another model, \"demo.gguf\""));
}

#[test]
fn what_is_resident_of_a_hostile_file_is_only_what_the_model_has() {
    let _guard = alone();
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let tokens = tokens();
    let text = &tokens[..50];
    let cold = run(&demo(), &options(50.0, PolicyKind::Learned, Some(&state)), &[text]);
    let mut hostile = CacheState::from_bytes(&fs::read(&state).unwrap()).unwrap();
    let host = &mut hostile.caches[0];
    host.statistics.iter_mut().for_each(|byte| *byte = !*byte);
    for version in host.residents.clone() {
        let mut stranger = version;
        stranger.expert.index = u16::MAX;
        host.residents.push(stranger);
        stranger.expert.layer = u16::MAX;
        host.residents.extend([stranger, version, hobbit_core::expert::Version::low(version.expert)]);
    }
    let more = hobbit_core::cache::SavedCache { name: "no such device".to_owned(), ..host.clone() };
    hostile.caches.push(more);
    fs::write(&state, hostile.to_bytes()).unwrap();
    let warm = run(&demo(), &options(50.0, PolicyKind::Learned, Some(&state)), &[text]);
    assert_eq!(warm.warm.unwrap().experts, 24);
    assert!(warm.logits == cold.logits);
}

#[test]
fn files_that_cannot_be_written_are_told() {
    let _guard = alone();
    let dir = tempfile::tempdir().unwrap();
    let tokens = tokens();
    let run = |path: &Path| run(&demo(), &options(50.0, PolicyKind::Lru, Some(path)), &[&tokens[..10]]);
    let nowhere = dir.path().join("no such directory/state");
    assert_eq!(run(&nowhere).counts.len(), 10);
    let told = notices();
    assert!(told.contains("no such directory/state") && told.contains("not saved"), "{told}");
    run(dir.path());
    let told = notices();
    assert!(told.contains("not a regular file") && told.contains("left as it is"), "{told}");
    run(Path::new("/dev/null"));
    assert!(notices().contains("not a regular file"));
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    let closed = dir.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o500)).unwrap();
    run(&closed.join("state"));
    let told = notices();
    if closed.join("state").exists() {
        not_run::not_run("warm: a directory that may not be written", "this user may write everywhere (root)");
    } else {
        assert!(told.contains("not saved"), "{told}");
    }
}
