//! Virtual experts: tokens use resident experts, which are replaced in the background.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hobbit::engine::Ggml;
use hobbit::options::{RoutingOptions, VirtualExperts, VirtualUpdate};
use hobbit::stats::{NormsSource, VirtualExpertsReport};
use hobbit::{BatchToken, EvalError, Model, ModelOptions, OpenError, PrecisionOptions, Session, SessionOptions, Token};
use hobbit_core::gguf::{Catalog, Gguf, Recode};
use hobbit_core::pack::{self, Pack, PackKind, PackSpec};
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::profile::{LayerNorms, NormsFile, layer_norms};
use hobbit_core::store::Original;
use hobbit_synth::{Format, Spec};

use crate::fixture::script::bits;
use crate::fixture::stores::{Breaking, Gate, Held, OpenAtLast};
use crate::fixture::{self, one_thread};

const N_EXPERT: u16 = 16;
const N_USED: u16 = 4;

fn model() -> (tempfile::TempDir, PathBuf) {
    fixture::quiet_llama_cpp();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let spec = Spec { experts: N_EXPERT.into(), topk: N_USED.into(), ff: 64, seed: 11, ..Spec::tiny("qwen3moe") };
    let path = fixture::write(dir.path(), &spec);
    (dir, path)
}

fn options(virtual_experts: VirtualExperts, expert_cache: f64) -> ModelOptions {
    let virtual_update = VirtualUpdate::Tokens(1);
    ModelOptions {
        budget: Budget::Bytes(4 << 30),
        expert_cache: ExpertCache::Percent(expert_cache),
        routing: RoutingOptions { virtual_experts, virtual_update, ..RoutingOptions::default() },
        ..ModelOptions::default()
    }
}

fn session(model: Result<Model, OpenError>) -> Session {
    model.and_then(|model| model.session(&one_thread(512))).expect("the model opens")
}

fn prompt(session: &mut Session) {
    let entry = |i: i32| BatchToken { token: (i * 37) % 300 + 3, position: i, sequence: 0, logits: i == 39 };
    session.evaluate(&(0..40).map(entry).collect::<Vec<_>>()).expect("a prompt");
}

/// Single tokens from a position on; the bits of their logits.
fn decode(session: &mut Session, positions: std::ops::Range<i32>) -> Result<Vec<Vec<u32>>, EvalError> {
    let token = |i: i32| -> Token { if i % 3 == 0 { 40 + i / 30 } else { (i / 20 * 37) % 300 + i % 3 } };
    let one = |position: i32| {
        session.evaluate(&[BatchToken { token: token(position), position, sequence: 0, logits: true }])?;
        Ok(bits(session.logits(0).expect("asked for")))
    };
    positions.map(one).collect()
}

fn report(session: &Session) -> VirtualExpertsReport {
    session.stats().virtual_experts.expect("experts are virtual")
}

#[test]
fn no_token_waits_however_slow_the_disk_is() {
    let (_dir, path) = model();
    let held = Arc::new(Held::default());
    let options = options(VirtualExperts::Auto, 50.0);
    let mut session = session(Model::open_with_store(&path, &options, Gate::wrap(&held)));
    prompt(&mut session);
    // The prompt's reads ahead may not be complete yet: a layer with fewer experts than a token uses reads.
    decode(&mut session, 40..60).expect("nothing fails");
    let before = (session.stats().decode, report(&session).replacements);
    assert_eq!(before.0.rerouted.refused, 0, "every choice is explained: such tokens would read what they chose");
    let _at_last = OpenAtLast(Arc::clone(&held));
    // From here on no read ends: a token that waited for one would never.
    held.close();
    decode(&mut session, 60..140).expect("nothing fails");
    let decoded = session.stats().decode;
    assert_eq!((decoded.io_wait_seconds, decoded.misses), (before.0.io_wait_seconds, before.0.misses));
    assert!(decoded.rerouted.uses > before.0.rerouted.uses, "{decoded:?}");
    // Reads that were on their way when it was closed may have come.
    let replaced = report(&session).replacements;
    assert!(replaced <= before.1 + 8, "{replaced}");
    assert!(held.open() > 0, "something was to be read in the background");
    let mut position = 140;
    while report(&session).replacements == replaced {
        decode(&mut session, position..position + 1).expect("nothing fails");
        position += 1;
        if position == 512 {
            session.reset();
            prompt(&mut session);
            position = 40;
        }
    }
    assert_eq!(report(&session).failed, 0);
}

#[test]
fn failed_reads_keep_the_old_experts() {
    let (_dir, path) = model();
    let mut options = options(VirtualExperts::Auto, 50.0);
    // Reads end between tokens.
    options.precision = PrecisionOptions { deterministic: true, ..PrecisionOptions::default() };
    let is_broken = Arc::new(AtomicBool::new(false));
    let mut session = session(Model::open_with_store(&path, &options, Breaking::wrap(&is_broken)));
    prompt(&mut session);
    is_broken.store(true, Ordering::Relaxed);
    let rows = decode(&mut session, 40..140).expect("no token waits for a failed read");
    assert!(rows.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
    let VirtualExpertsReport { replacements, failed, .. } = report(&session);
    assert!(replacements == 0 && failed > 0, "{replacements} {failed}");
    is_broken.store(false, Ordering::Relaxed);
    decode(&mut session, 140..240).expect("nothing fails");
    assert!(report(&session).replacements > 0, "failed reads are tried again");
}

#[test]
fn repeatable_runs_repeat() {
    let (_dir, path) = model();
    let mut options = options(VirtualExperts::Auto, 50.0);
    options.routing.virtual_update = VirtualUpdate::Auto;
    options.precision = PrecisionOptions { deterministic: true, ..PrecisionOptions::default() };
    let run = || {
        let mut session = session(Model::open_with_store(&path, &options, |inner| inner));
        prompt(&mut session);
        (decode(&mut session, 40..240).expect("nothing fails"), report(&session))
    };
    let (first, second) = (run(), run());
    assert!(first.0 == second.0, "whether norms are computed or read");
    let counts = |report: VirtualExpertsReport| (report.replacements, report.failed, report.period_tokens);
    assert_eq!(counts(first.1), counts(second.1));
    assert!(first.1.replacements > 0 && first.1.period_tokens == 16, "{:?}", first.1);
}

#[test]
fn resident_experts_change_no_bit() {
    let (dir, path) = model();
    let run = |options: &ModelOptions| {
        let mut session = session(Model::open_with_store(&path, options, |inner| inner));
        prompt(&mut session);
        decode(&mut session, 40..80).expect("nothing fails")
    };
    let exact = run(&options(VirtualExperts::Off, 50.0));
    assert!(exact == run(&options(VirtualExperts::Auto, 100.0)));
    let all = plan(dir.path(), &path, |_| N_EXPERT);
    assert!(exact == run(&ModelOptions { expert_cache: ExpertCache::Auto, ..options(VirtualExperts::Plan(all), 0.0) }));
    assert!(exact != run(&options(VirtualExperts::Auto, 50.0)), "the test sees a difference");
}

/// A plan for the model at `path`: as many experts by the layer's position.
fn plan(dir: &Path, path: &Path, experts: impl Fn(usize) -> u16) -> PathBuf {
    let layers = hobbit_core::gguf::Gguf::open(path).and_then(|gguf| gguf.experts()).expect("a sound model").layers;
    let layer = |(at, layer): (usize, &hobbit_core::gguf::LayerExperts)| {
        format!(r#"{{"layer": {}, "experts": {}, "of": {N_EXPERT}}}"#, layer.layer, experts(at))
    };
    let layers: Vec<String> = layers.iter().enumerate().map(layer).collect();
    let file = dir.join("plan.json");
    let text = format!(r#"{{"format": "hobbit-plan", "version": 1, "layers": [{}]}}"#, layers.join(","));
    std::fs::write(&file, text).expect("a temporary directory can be written");
    file
}

#[test]
fn layers_have_slots_by_plan() {
    let (dir, path) = model();
    let file = plan(dir.path(), &path, |at| N_USED + at as u16);
    let with = |expert_cache| ModelOptions { expert_cache, ..options(VirtualExperts::Plan(file.clone()), 0.0) };
    let open = |expert_cache| Model::open_with_store(&path, &with(expert_cache), |inner| inner);
    let mut planned = session(open(ExpertCache::Auto));
    prompt(&mut planned);
    decode(&mut planned, 40..140).expect("nothing fails");
    let slots: Vec<u32> = planned.stats().layers.iter().map(|layer| layer.slots).collect();
    assert_eq!(slots, (0..slots.len() as u32).map(|at| u32::from(N_USED) + at + 1).collect::<Vec<_>>(), "one to spare");
    assert!(report(&planned).replacements > 0);
    let small = open(ExpertCache::Bytes(4096)).and_then(|model| model.session(&SessionOptions::default()));
    let refused = small.map(drop).expect_err("too small").to_string();
    assert!(refused.contains("plan.json: this plan takes") && refused.contains("the expert cache has"), "{refused}");
    let few = plan(dir.path(), &path, |_| N_USED - 1);
    let refused = open(ExpertCache::Auto).map(drop).expect_err("too few").to_string();
    assert!(refused.contains("at least as many as a token uses (4)"), "{refused}");
    std::fs::write(few, "{").expect("a temporary directory can be written");
    let refused = open(ExpertCache::Auto).map(drop).expect_err("no plan").to_string();
    assert!(refused.contains("plan.json: "), "{refused}");
}

/// The norms of a model's experts from its tensors as a whole.
fn norms_of_tensors(path: &Path) -> Vec<LayerNorms> {
    let gguf = Gguf::open(path).expect("a sound model");
    let bytes = std::fs::read(path).expect("the model is readable");
    let norms = |layer: &hobbit_core::gguf::LayerExperts| {
        let mut squares = vec![0.0; usize::from(N_EXPERT)];
        for tensor in &layer.tensors {
            for (index, squares) in (0..N_EXPERT).zip(&mut squares) {
                let extent = tensor.extent(index);
                let (first, mut floats) = (extent.offset as usize, Vec::new());
                let bytes = &bytes[first..first + extent.len as usize];
                Ggml.dequantise(tensor.dtype, tensor.ne0, bytes, &mut floats).expect("a type of models");
                *squares += floats.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            }
        }
        LayerNorms { layer: layer.layer, norms: squares.into_iter().map(|sum: f64| sum.sqrt() as f32).collect() }
    };
    gguf.experts().expect("a sound model").layers.iter().map(norms).collect()
}

fn are_close(a: &[LayerNorms], b: &[LayerNorms]) -> bool {
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs() && *b > 0.0;
    let pairs = || a.iter().zip(b).map(|(a, b)| (&a.norms, &b.norms));
    a.len() == b.len() && pairs().all(|(a, b)| a.len() == b.len() && a.iter().zip(b).all(close))
}

#[test]
fn norms_are_computed_once_and_kept_beside_the_model() {
    let (dir, path) = model();
    let mut options = options(VirtualExperts::Auto, 50.0);
    let kept = NormsFile::beside(&path);
    // In the background, while tokens are decoded.
    let mut running = session(Model::open_with_store(&path, &options, |inner| inner));
    prompt(&mut running);
    let mut position = 40;
    while report(&running).norms == NormsSource::Computing {
        decode(&mut running, position..position + 1).expect("nothing fails");
        position += 1;
        if position == 512 {
            running.reset();
            prompt(&mut running);
            position = 40;
        }
    }
    assert_eq!(report(&running).norms, NormsSource::Computed);
    drop(running);
    let computed = NormsFile::read(&kept).expect("it was written").norms;
    assert!(are_close(&computed, &norms_of_tensors(&path)), "{computed:?}");

    options.precision = PrecisionOptions { deterministic: true, ..PrecisionOptions::default() };
    let source = || report(&session(Model::open_with_store(&path, &options, |inner| inner))).norms;
    assert_eq!(source(), NormsSource::File);
    let mut half = NormsFile::read(&kept).expect("it was written");
    half.norms.truncate(1);
    half.norms[0].norms[0] = 0.5;
    std::fs::write(&kept, half.to_json()).expect("a temporary directory can be written");
    assert_eq!(source(), NormsSource::Computed, "a run that ended early left the first layer's");
    let whole = NormsFile::read(&kept).expect("it was written").norms;
    assert!(whole[0].norms[0] == 0.5 && whole[1..] == computed[1..], "{whole:?}");
    let spec = Spec { experts: N_EXPERT.into(), topk: N_USED.into(), ff: 64, seed: 12, ..Spec::tiny("qwen3moe") };
    fixture::write(dir.path(), &spec);
    assert_eq!(source(), NormsSource::Computed, "the model was replaced, and repeatable runs wait for its norms");
    let again = NormsFile::read(&kept).expect("it was written").norms;
    assert!(are_close(&again, &norms_of_tensors(&path)) && again != computed);
    std::fs::write(&kept, "{}").expect("a temporary directory can be written");
    assert_eq!((source(), std::fs::read(&kept).ok()), (NormsSource::Computed, Some(b"{}".to_vec())), "a user's file");

    let plan = plan(dir.path(), &path, |_| N_USED);
    let text = std::fs::read_to_string(&plan).expect("it was written");
    let norms = hobbit_core::profile::norms_to_json(&again);
    std::fs::write(&plan, text.replacen('{', &format!(r#"{{"norms": {norms},"#), 1)).expect("it can be written");
    options = ModelOptions { expert_cache: ExpertCache::Auto, ..self::options(VirtualExperts::Plan(plan), 0.0) };
    assert_eq!(report(&session(Model::open_with_store(&path, &options, |inner| inner))).norms, NormsSource::Plan);
}

#[test]
fn planes_have_the_norms_of_the_weights_that_they_are_made_of() {
    fixture::quiet_llama_cpp();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (n, types) = (u32::from(N_EXPERT), vec![Format::Q8_0]);
    let path = fixture::write(dir.path(), &Spec { experts: n, topk: 2, types, ..Spec::tiny("qwen3moe") });
    let packed = dir.path().join("planes.hobbit.gguf");
    let spec = PackSpec { bit_planes: true, threads: 2, ..PackSpec::new(PackKind::Full) };
    let go_on = &mut |_: pack::Progress| std::ops::ControlFlow::Continue(());
    pack::write(&Gguf::open(&path).expect("a sound model"), &packed, &spec, &Ggml, go_on).expect("it is packed");
    let pack = Pack::open(&packed).expect("a sound pack");
    let norms = |gguf: &Gguf, catalog: &Catalog| -> Vec<LayerNorms> {
        let files = gguf.files.iter().map(|file| Original::open(&file.path, file.state).expect("it is there"));
        let (files, go_on) = (files.collect::<Vec<_>>(), |_, _| std::ops::ControlFlow::Continue(()));
        let of_layer = |layer| layer_norms(catalog, layer, &files, &Ggml, 3, &go_on).expect("it can be read");
        catalog.layers.iter().map(|layer| of_layer(layer).expect("nothing stops it")).collect()
    };
    let found = norms(&pack.plain, &pack.catalog);
    assert!(are_close(&found, &norms_of_tensors(&path)), "{found:?}");
}
