//! `--cache-state`: a model that is closed and opened again has the same experts in memory, and computes the same. This
//! holds for a FILE of the user and for the files of `auto`.

use std::fs;
use std::path::{Path, PathBuf};

use hobbit::options::Prefetch;
use hobbit::stats::WarmStart;
use hobbit::{Model, ModelOptions, Token};
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::cache::{Allocation, CacheState, ModelMark};
use hobbit_core::expert::{ExpertId, Version};
use hobbit_core::predict::{PathBatches, PredictorKind};
use hobbit_core::profile::write_path_table;
use hobbit_core::sim::Recording;

use crate::fixture::cli::demo_model;
use crate::fixture::not_run::not_run;
use crate::fixture::{demo_tokens, no_reads_ahead, notices_about, one_thread, quiet_llama_cpp};

/// A temporary directory for cache states, and the notices that name it.
struct Rig {
    dir: tempfile::TempDir,
    n_seen: usize,
}

impl Rig {
    fn new() -> Rig {
        quiet_llama_cpp();
        Rig { dir: tempfile::tempdir().unwrap(), n_seen: 0 }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Notices since the last call.
    fn notices(&mut self) -> String {
        let all = notices_about(self.dir.path().to_str().unwrap());
        let new = all[self.n_seen..].concat();
        self.n_seen = all.len();
        new
    }
}

fn options(percent: f64, policy: PolicyKind, state: Option<&Path>) -> ModelOptions {
    ModelOptions { cache_state: state.map(Path::to_owned), ..no_reads_ahead(percent, policy) }
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
    let mut session = model.session(&one_thread(1024)).unwrap();
    let mut run = Run { warm: session.description().warm_start, ..Run::default() };
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

fn tokens() -> Vec<Token> {
    demo_tokens(&Model::open(&demo_model(), &options(50.0, PolicyKind::Lru, None)).unwrap(), 600)
}

#[test]
fn the_second_run_begins_where_the_first_ended() {
    let mut rig = Rig::new();
    let tokens = tokens();
    let (first, second) = (&tokens[..400], &tokens[400..600]);
    for policy in [PolicyKind::Lru, PolicyKind::EdgeMoe, PolicyKind::Learned] {
        let state = rig.path(policy.name());
        let before = run(&demo_model(), &options(50.0, policy, Some(&state)), &[first]);
        assert_eq!(before.warm, None, "there was no file");
        let cold = run(&demo_model(), &options(50.0, policy, None), &[second]);
        let warm = run(&demo_model(), &options(50.0, policy, Some(&state)), &[second]);
        let lasting = run(&demo_model(), &options(50.0, policy, None), &[first, second]);
        assert!(warm.logits == cold.logits, "{policy}: resident experts change no logit");
        assert_eq!(warm.counts, lasting.counts[400..], "{policy}: as if the model had stayed open");
        let restored = warm.warm.unwrap();
        assert_eq!((restored.saved, restored.experts), (24, 24), "half of 6 layers of 8");
        assert!(restored.bytes > 0);
        let steady = before.hit_rate(200..400);
        let rates = [&cold, &warm].map(|run| run.hit_rate(0..16));
        assert!(rates[1] > rates[0], "{policy}: {rates:?}");
        // The steady rate of this text is that of the same tokens with caches that were filled long ago.
        assert!(warm.hit_rate(0..16) >= lasting.hit_rate(400..416), "{policy}: {rates:?}");
        assert!(warm.hit_rate(0..16) >= steady - 0.05, "{policy}: {rates:?}, steady {steady}");
    }
    assert_eq!(rig.notices(), "");
    let names = || fs::read_dir(rig.dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names().count(), 3, "nothing else is left behind: {:?}", names().collect::<Vec<_>>());
}

#[test]
fn caches_of_other_sizes_take_what_fits() {
    let mut rig = Rig::new();
    let state = rig.path("state");
    let tokens = tokens();
    run(&demo_model(), &options(50.0, PolicyKind::Lru, Some(&state)), &[&tokens[..200]]);
    let saved = fs::read(&state).unwrap();
    let expected = run(&demo_model(), &options(50.0, PolicyKind::Lru, None), &[&tokens[..40]]).logits;
    // Another policy takes the residents without the statistics of the last one.
    let (lru, other) = (PolicyKind::Lru, PolicyKind::EdgeMoe);
    let (even, shallow) = (Allocation::Even, Allocation::ShallowFirst { layers: 1 });
    for (percent, policy, slots, n) in [
        (25.0, lru, even, 12),
        (100.0, lru, even, 24),
        (50.0, other, even, 24),
        // 4 of each layer for 8, 4, 3, 3, 3 and 3 slots.
        (50.0, lru, shallow, 20),
    ] {
        fs::write(&state, &saved).unwrap();
        let mut options = options(percent, policy, Some(&state));
        options.caching.slots = slots;
        let warm = run(&demo_model(), &options, &[&tokens[..40]]);
        assert!(warm.logits == expected, "{percent} % {policy} {slots}");
        let WarmStart { saved, experts, .. } = warm.warm.unwrap();
        assert_eq!((saved, experts), (24, n), "{percent} % {policy} {slots}");
    }
    assert_eq!(rig.notices(), "");
}

#[test]
fn a_path_table_fills_the_caches_with_its_most_frequent_experts() {
    let rig = Rig::new();
    let [table, trace] = ["table", "trace"].map(|name| rig.path(name));
    let tokens = tokens();
    let mut options = options(50.0, PolicyKind::EdgeMoe, None);
    let shape = Model::open(&demo_model(), &options).unwrap().predict_shape();
    let layers: Vec<u16> = shape.layers.iter().map(|(layer, ..)| *layer).collect();
    // Every token uses expert 7; three use 6, 5 and 4 each, one uses 3.
    let mut batches = PathBatches::new(shape);
    for second in [6, 5, 4, 3] {
        let n_tokens = if second == 3 { 1 } else { 3 };
        layers.iter().for_each(|&layer| batches.layer(layer, 2, [7, second].repeat(n_tokens)));
    }
    write_path_table(&table, &batches.build()).unwrap();
    let cold = run(&demo_model(), &options, &[&tokens[..40]]);
    options.caching.predictor = Some(PredictorKind::PathTable);
    options.caching.prefetch = Prefetch::Off;
    options.path_table = Some(table);
    options.trace = Some(trace.clone());
    let filled = run(&demo_model(), &options, &[&tokens[..40]]);
    assert!(filled.logits == cold.logits, "resident experts change no logit");
    let WarmStart { by_frequency, saved, experts, bytes, .. } = filled.warm.unwrap();
    assert_eq!((by_frequency, saved, experts), (true, 30, 24), "half of 6 layers of 8");
    assert!(bytes > 0);
    let mut residents = Recording::open(&trace).unwrap().start.versions;
    residents.sort();
    let expected = layers.iter().flat_map(|&layer| (4..8).map(move |index| Version::high(ExpertId { layer, index })));
    assert_eq!(residents, expected.collect::<Vec<_>>());
    options.caching.fill = false;
    options.trace = None;
    assert_eq!(run(&demo_model(), &options, &[&tokens[..2]]).warm, None);
}

#[test]
fn an_idle_run_keeps_the_file() {
    let rig = Rig::new();
    let state = rig.path("state");
    let tokens = tokens();
    run(&demo_model(), &options(50.0, PolicyKind::Lru, Some(&state)), &[&tokens[..50]]);
    let saved = fs::read(&state).unwrap();
    let none = run(&demo_model(), &options(25.0, PolicyKind::Lru, Some(&state)), &[]);
    assert_eq!(none.warm.unwrap().experts, 12);
    assert_eq!(fs::read(&state).unwrap(), saved);
    // Equal files and equal tokens: equal hits, and equal files in the end.
    let again = || {
        fs::write(&state, &saved).unwrap();
        let run = run(&demo_model(), &options(25.0, PolicyKind::Learned, Some(&state)), &[&tokens[50..150]]);
        (run.counts, fs::read(&state).unwrap())
    };
    assert!(again() == again());
}

#[test]
fn a_file_that_does_not_fit_starts_cold() {
    let mut rig = Rig::new();
    let state = rig.path("state");
    let tokens = tokens();
    let text = &tokens[..50];
    let cold = run(&demo_model(), &options(50.0, PolicyKind::Lru, Some(&state)), &[text]);
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
    let table: [(&str, Vec<u8>, &str, bool); 5] = [
        ("another name", of_model(|model| model.name.push('2')), "of another model, \"demo.gguf2\"", true),
        ("other places", of_model(|model| model.catalog += 1), "of another model", true),
        ("another version", newer, "of version 2, expected 1", true),
        ("changed", changed, "it is damaged", true),
        ("not ours", b"The bytes of a text of the user's.".to_vec(), "not a cache state", false),
    ];
    for (name, bytes, why, is_replaced) in table {
        fs::write(&state, &bytes).unwrap();
        let run = run(&demo_model(), &options(50.0, PolicyKind::Lru, Some(&state)), &[text]);
        let notice = rig.notices();
        assert!(
            notice.contains("cache state") && notice.contains(why) && notice.contains("start empty"),
            "{name}: {notice}"
        );
        assert_eq!((run.warm, &run.counts), (None, &cold.counts), "{name}");
        assert!(run.logits == cold.logits, "{name}");
        let expected = if is_replaced { &good } else { &bytes };
        assert!(fs::read(&state).unwrap() == *expected, "{name}");
    }
    // The same file under another name is another model: names are how people tell quantisations apart.
    fs::write(&state, &good).unwrap();
    let copy = rig.path("copy.gguf");
    fs::copy(demo_model(), &copy).unwrap();
    assert_eq!(run(&copy, &options(50.0, PolicyKind::Lru, Some(&state)), &[text]).warm, None);
    assert!(rig.notices().contains("of another model, \"demo.gguf\""));
}

#[test]
fn a_hostile_file_restores_only_experts_of_the_model() {
    let rig = Rig::new();
    let state = rig.path("state");
    let tokens = tokens();
    let text = &tokens[..50];
    let cold = run(&demo_model(), &options(50.0, PolicyKind::Learned, Some(&state)), &[text]);
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
    let warm = run(&demo_model(), &options(50.0, PolicyKind::Learned, Some(&state)), &[text]);
    assert_eq!(warm.warm.unwrap().experts, 24);
    assert!(warm.logits == cold.logits);
}

/// Takes away the right to write into a directory. Windows has access lists for that: there it changes nothing.
fn close(dir: &Path) {
    #[cfg(unix)]
    fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(0o500)).unwrap();
    #[cfg(not(unix))]
    let _ = dir;
}

#[test]
fn a_file_that_cannot_be_written_is_refused_before_the_run_or_gives_a_notice() {
    let mut rig = Rig::new();
    let open = |path: &Path| Model::open(&demo_model(), &options(50.0, PolicyKind::Lru, Some(path)));
    let nowhere = rig.path("no such directory/state");
    let error = open(&nowhere).err().expect("refused").to_string();
    assert!(error.contains("no such directory/state") && error.contains("cannot write"), "{error}");
    assert!(open(rig.dir.path()).is_err(), "a directory");
    let closed = rig.path("closed");
    fs::create_dir(&closed).unwrap();
    close(&closed);
    match open(&closed.join("state")) {
        Err(error) => assert!(error.to_string().contains("cannot write"), "{error}"),
        Ok(_) => not_run("warm: a directory that may not be written", "this user may write everywhere (root)"),
    }
    // A directory that is removed while the model is open.
    let lost = rig.path("lost");
    fs::create_dir(&lost).unwrap();
    let model = open(&lost.join("state")).unwrap();
    model.session(&one_thread(1024)).unwrap().feed(&tokens()[..10]).unwrap();
    fs::remove_dir_all(&lost).unwrap();
    drop(model);
    let notice = rig.notices();
    assert!(notice.contains(lost.join("state").to_str().unwrap()) && notice.contains("not saved"), "{notice}");
}

/// The directory of files that hobbit keeps.
fn kept(rig: &Rig) -> PathBuf {
    rig.path("cache/hobbit/experts")
}

/// Half of the experts, with a file that hobbit keeps.
fn keeping(rig: &Rig) -> ModelOptions {
    ModelOptions { cache_state_dir: Some(kept(rig)), ..options(50.0, PolicyKind::Learned, None) }
}

fn only_file(dir: &Path) -> PathBuf {
    let files: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files.into_iter().next().unwrap()
}

/// Logits of the first token, its hits, and what the caches began with, once all free slots are filled.
fn first_token_of_filled(options: &ModelOptions, token: Token) -> (Vec<f32>, u64, Option<WarmStart>) {
    let model = Model::open(&demo_model(), options).unwrap();
    let mut session = model.session(&one_thread(1024)).unwrap();
    model.finish_filling();
    session.feed(&[token]).unwrap();
    (session.logits(0).unwrap().to_vec(), session.stats().total().hits, session.description().warm_start)
}

#[test]
fn a_file_that_hobbit_keeps_is_read_in_a_pause() {
    let mut rig = Rig::new();
    let tokens = tokens();
    let options = keeping(&rig);
    assert_eq!(run(&demo_model(), &options, &[&tokens[..400]]).warm, None);
    let path = only_file(&kept(&rig));
    assert!(path.file_name().unwrap().to_str().unwrap().starts_with("demo.gguf-"), "{path:?}");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = fs::metadata(kept(&rig)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "for the user alone");
    }
    let named = rig.path("named");
    fs::copy(&path, &named).unwrap();
    let (logits, hits, warm) = first_token_of_filled(&options, tokens[400]);
    assert_eq!(warm, Some(WarmStart { saved: 24, later: 24, ..WarmStart::default() }), "half of 6 layers of 8");
    let by_file = ModelOptions { cache_state: Some(named), ..options.clone() };
    let (same, of_named, warm) = first_token_of_filled(&by_file, tokens[400]);
    assert_eq!((hits, warm.unwrap().experts), (of_named, 24), "the same experts are in memory");
    let (plain, ..) = first_token_of_filled(&ModelOptions { cache_state_dir: None, ..options }, tokens[400]);
    assert!(logits == same && logits == plain, "resident experts change no logit");
    assert_eq!(rig.notices(), "");
}

#[test]
fn a_short_run_forgets_no_expert_that_hobbit_keeps() {
    let rig = Rig::new();
    let tokens = tokens();
    run(&demo_model(), &keeping(&rig), &[&tokens[..400]]);
    let residents = || CacheState::from_bytes(&fs::read(only_file(&kept(&rig))).unwrap()).unwrap().caches[0].clone();
    let before = residents();
    // Two experts a layer.
    run(&demo_model(), &keeping(&rig), &[&tokens[..1]]);
    let after = residents().residents;
    assert!(before.residents.iter().all(|version| after.contains(version)), "{before:?} {after:?}");
}

#[test]
fn hobbit_keeps_nothing_where_it_fills_no_slots() {
    let rig = Rig::new();
    let tokens = tokens();
    let changes: [fn(&mut ModelOptions); 6] = [
        |options| options.precision.deterministic = true,
        |options| options.caching.fill = false,
        |options| options.caching.policy = PolicyKind::Lru,
        |options| options.expert_cache = hobbit_core::plan::ExpertCache::Percent(100.0),
        |options| options.trace = Some(options.cache_state_dir.as_ref().unwrap().with_file_name("../../trace")),
        |options| options.cache_state = Some(options.cache_state_dir.as_ref().unwrap().with_file_name("../../named")),
    ];
    fs::create_dir_all(rig.path("cache/hobbit")).unwrap();
    for (nth, change) in changes.iter().enumerate() {
        let mut options = keeping(&rig);
        change(&mut options);
        run(&demo_model(), &options, &[&tokens[..10]]);
        assert!(!kept(&rig).exists(), "change {nth}");
    }
}

#[test]
fn trouble_with_a_file_that_hobbit_keeps_is_no_news() {
    let mut rig = Rig::new();
    let tokens = tokens();
    let text = &tokens[..50];
    let cold = run(&demo_model(), &keeping(&rig), &[text]);
    let path = only_file(&kept(&rig));
    let good = fs::read(&path).unwrap();
    let mut stranger = CacheState::from_bytes(&good).unwrap();
    stranger.model.catalog += 1;
    let table = [
        ("cut off", good[..good.len() / 2].to_vec(), true),
        ("of another model", stranger.to_bytes(), true),
        ("not ours", b"The bytes of a text of the user's.".to_vec(), false),
    ];
    for (name, bytes, is_replaced) in table {
        fs::write(&path, &bytes).unwrap();
        let run = run(&demo_model(), &keeping(&rig), &[text]);
        assert!(run.warm.is_none() && run.logits == cold.logits, "{name}");
        let is_same = fs::read(&path).unwrap() == bytes;
        assert!(is_same != is_replaced, "{name}");
        assert!(is_same || CacheState::from_bytes(&fs::read(&path).unwrap()).is_ok(), "{name}");
    }
    // A file stands where the directory would be.
    fs::remove_dir_all(kept(&rig)).unwrap();
    fs::write(kept(&rig), "").unwrap();
    assert!(run(&demo_model(), &keeping(&rig), &[text]).logits == cold.logits);
    assert!(fs::read(kept(&rig)).unwrap().is_empty());
    assert_eq!(rig.notices(), "");
}
