//! Disks that fail while tokens are evaluated.

use std::fs::{self, File};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hobbit::{BatchToken, EvalError, Model, ModelOptions, Session, Token};
use hobbit_core::gguf::Gguf;
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::store::faulty::{Faults, FaultyStore};
use hobbit_core::store::{IoMode, Store};
use hobbit_synth::Spec;

use crate::fixture::{self, one_thread, stores::Breaking};

const CACHES: [ExpertCache; 3] = [ExpertCache::Percent(100.0), ExpertCache::Percent(25.0), ExpertCache::Bytes(0)];

fn spec() -> Spec {
    Spec { embd: 64, ff: 64, heads: 2, experts: 8, layers: 3, ..Spec::tiny("qwen3moe") }
}

fn options(expert_cache: ExpertCache, io: IoMode) -> ModelOptions {
    ModelOptions { budget: Budget::Bytes(4 << 30), expert_cache, io, ..ModelOptions::default() }
}

fn session(model: &Model) -> Session {
    model.session(&one_thread(256)).unwrap()
}

/// Evaluates a prompt and a few single tokens; all logits of the last token.
fn evaluate(session: &mut Session) -> Result<Vec<f32>, EvalError> {
    let entry =
        |position: i32| BatchToken { token: (position * 37 % 500) as Token, position, sequence: 0, logits: true };
    session.evaluate(&(0..40).map(entry).collect::<Vec<_>>())?;
    for position in 40..48 {
        session.evaluate(&[entry(position)])?;
    }
    Ok(session.logits(0).expect("the last batch asked for logits").to_vec())
}

/// One failed read fails one evaluation, with the reason. The next evaluation succeeds with the usual logits.
#[test]
fn failed_reads_are_reported_and_survived() {
    fixture::quiet_llama_cpp();
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &spec());
    let model = Model::open(&path, &options(CACHES[0], IoMode::Auto)).unwrap();
    let expected = evaluate(&mut session(&model)).unwrap();
    // EIO; Windows has another error of this number.
    let failed = fixture::system_error(5);
    let io_error = |n| Faults { io_error: vec![n], ..Faults::default() };
    let short_read = |n| Faults { short_read: vec![n], ..Faults::default() };
    for cache in CACHES {
        for n in [0, 1, 5, 17] {
            for (faults, reason) in [(io_error(n), failed.as_str()), (short_read(n), "shrank")] {
                let what = format!("{cache:?}, {faults:?}");
                let wrap = move |inner| Arc::new(FaultyStore::new(inner, faults.clone())) as Arc<dyn Store>;
                let model = Model::open_with_store(&path, &options(cache, IoMode::Auto), wrap).unwrap();
                let mut session = session(&model);
                let error = evaluate(&mut session).expect_err(&what).to_string();
                assert!(error.contains(reason), "{what}: {error}");
                session.reset();
                let found = evaluate(&mut session).unwrap_or_else(|error| panic!("{what}, second evaluation: {error}"));
                assert_eq!(found, expected, "{what}, second evaluation");
            }
        }
        // Every read fails until the disk is back.
        let gone = Arc::new(AtomicBool::new(true));
        let model = Model::open_with_store(&path, &options(cache, IoMode::Auto), Breaking::wrap(&gone)).unwrap();
        let mut session = session(&model);
        for _ in 0..3 {
            evaluate(&mut session).expect_err("every read fails");
            session.reset();
        }
        gone.store(false, Ordering::Relaxed);
        assert_eq!(evaluate(&mut session).unwrap(), expected, "{cache:?}");
    }
}

/// A file cut short after it was opened (a download started again, say) is an error with its name, not a `SIGBUS`.
#[test]
fn a_file_that_shrinks_while_running() {
    fixture::quiet_llama_cpp();
    let dir = tempfile::tempdir().unwrap();
    fixture::reads_directly("robustness: a file that shrinks", &fixture::write(dir.path(), &spec()));
    for (io, cache) in [IoMode::Buffered, IoMode::Direct].into_iter().flat_map(|io| CACHES.map(|cache| (io, cache))) {
        let path = fixture::write(dir.path(), &spec());
        let whole = fs::read(&path).unwrap();
        let model = Model::open(&path, &options(cache, io)).unwrap();
        let mut session = session(&model);
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(whole.len() as u64 / 3).unwrap();
        let error = evaluate(&mut session).expect_err("most of the experts are gone").to_string();
        for part in [path.to_str().unwrap(), "shrank", "restore"] {
            assert!(error.contains(part), "{io}, {cache:?}: {error}");
        }
        fs::write(&path, &whole).unwrap();
        session.reset();
        let found = evaluate(&mut session).unwrap_or_else(|error| panic!("{io}, {cache:?}, restored: {error}"));
        assert!(found.iter().all(|logit| logit.is_finite()));
    }
}

/// A file that ends before its embeddings: their rows are read for each batch, and its error names the file.
#[test]
fn embeddings_that_are_cut_off_while_running() {
    fixture::quiet_llama_cpp();
    let dir = tempfile::tempdir().unwrap();
    for io in [IoMode::Buffered, IoMode::Direct] {
        let path = fixture::write(dir.path(), &spec());
        let whole = fs::read(&path).unwrap();
        let table = Gguf::open(&path).unwrap().tensor("token_embd.weight").unwrap().extent;
        let model = Model::open(&path, &options(CACHES[0], io)).unwrap();
        let mut session = session(&model);
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(table.offset + 100 * table.len / 512).unwrap();
        let entry = |token| BatchToken { token, position: 0, sequence: 0, logits: true };
        for token in [400, 100] {
            let error = session.evaluate(&[entry(token)]).expect_err("the row is gone").to_string();
            assert!(error.contains(path.to_str().unwrap()) && error.contains("shrank"), "{io}: {error}");
        }
        fs::write(&path, &whole).unwrap();
        session.reset();
        evaluate(&mut session).unwrap_or_else(|error| panic!("{io}, restored: {error}"));
    }
}
