//! What an evaluation leaves behind, or another one does meanwhile, does not show in the logits.

use std::sync::{Arc, OnceLock};

use hobbit::options::{LowSource, PrecisionMode};
use hobbit::{BatchToken, Error, Interrupt, Model, ModelOptions, PrecisionOptions, Session};
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::store::{Completion, ReadRequest, Store};

use super::cases::{Case, Source, Variant};
use super::compare::Hobbit;
use super::fixture;
use super::script::Row;

/// A model file of a case, and the logits to expect.
fn reference(case: &Case) -> (tempfile::TempDir, std::path::PathBuf, Vec<Vec<u32>>) {
    let dir = tempfile::tempdir().unwrap();
    let Source::Synth(spec) = &case.model else { panic!("{}: not a file of our own", case.name) };
    let path = fixture::write(dir.path(), spec);
    let model = Model::open(&path, &options(Variant::ALL.expert_cache)).unwrap();
    let expected = run(case, model.session(&case.options).unwrap()).unwrap();
    (dir, path, expected)
}

fn options(expert_cache: ExpertCache) -> ModelOptions {
    ModelOptions { budget: Budget::Bytes(4 << 30), expert_cache, ..ModelOptions::default() }
}

fn run(case: &Case, session: Session) -> Result<Vec<Vec<u32>>, String> {
    let mut hobbit = Hobbit::new(session);
    let rows = case.script.run(&mut hobbit, case.options.n_batch as usize)?;
    Ok(rows.iter().map(bits).collect())
}

fn bits(row: &Row) -> Vec<u32> {
    row.logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Sessions of one model share its cache, also at the same time.
pub fn sessions_side_by_side(case: &Case) {
    let (_dir, path, expected) = reference(case);
    for variant in Variant::SIZES {
        let model = Model::open(&path, &options(variant.expert_cache)).unwrap();
        std::thread::scope(|scope| {
            let threads = [(); 2].map(|()| scope.spawn(|| run(case, model.session(&case.options).unwrap())));
            for thread in threads {
                assert!(thread.join().unwrap().unwrap() == expected, "{}, {variant:?}: other logits", case.name);
            }
        });
        let third = run(case, model.session(&case.options).unwrap()).unwrap();
        assert!(third == expected, "{}, {variant:?}: other logits in a later session", case.name);
    }
}

/// An interrupt in the middle of a batch ends it, and only it.
pub fn an_interrupted_batch(case: &Case) {
    let (_dir, path, expected) = reference(case);
    for variant in Variant::SIZES {
        let interrupt = Arc::new(OnceLock::<Interrupt>::new());
        let wrap = {
            let interrupt = Arc::clone(&interrupt);
            move |inner| -> Arc<dyn Store> { Arc::new(Interrupting { inner, interrupt: Arc::clone(&interrupt) }) }
        };
        let model = Model::open_with_store(&path, &options(variant.expert_cache), wrap).unwrap();
        let mut session = model.session(&case.options).unwrap();
        interrupt.set(session.interrupt_handle()).unwrap();
        let stopped = session.feed(&[1, 2, 3, 4, 5, 6, 7, 8]);
        assert!(matches!(stopped, Err(Error::Interrupted)), "{variant:?}: {stopped:?}");
        // The handle of the session that is gone: nothing stops the next one.
        drop(session);
        let session = model.session(&case.options).unwrap();
        assert!(run(case, session).unwrap() == expected, "{}, {variant:?}: other logits", case.name);
    }
}

/// A store in which the first reads of a session interrupt it.
struct Interrupting {
    inner: Arc<dyn Store>,
    interrupt: Arc<OnceLock<Interrupt>>,
}

impl Store for Interrupting {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn submit(&self, requests: Vec<ReadRequest>, sink: &Arc<dyn Completion>) {
        if let Some(interrupt) = self.interrupt.get() {
            interrupt.set();
        }
        self.inner.submit(requests, sink);
    }
}

/// Rounds of both sessions; a race that shows in most of them cannot hide.
const ROUNDS: usize = 8;

/// In dynamic precision, where a layer comes in several splits (scales per expert), what one session chose for its first
/// split stands for its later ones, whatever another session chooses meanwhile. Without slots nothing is resident, so the
/// choices depend on the router's weights alone, and serial evaluation is the reference.
pub fn dynamic_sessions_side_by_side(case: &Case) {
    let Source::Synth(spec) = &case.model else { panic!("{}: not a model of our own", case.name) };
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let path = fixture::write(dirs[0].path(), spec);
    let low = fixture::write(dirs[1].path(), &super::dynamic::lowered(spec));
    let precision = PrecisionOptions {
        mode: Some(PrecisionMode::Dynamic),
        t1: Some(0.3),
        t2: Some(0.6),
        ..PrecisionOptions::default()
    };
    let options =
        ModelOptions { low: Some(LowSource::File(low)), precision, ..self::options(Variant::ONE_SLOT.expert_cache) };
    let model = Model::open(&path, &options).unwrap();
    let texts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]];
    let evaluate = |session: &mut Session, text: &[hobbit::Token]| -> Vec<Vec<u32>> {
        session.reset();
        let one = |(position, &token)| {
            let entry = BatchToken { token, position, sequence: 0, logits: true };
            session.evaluate(&[entry]).unwrap();
            session.logits(0).unwrap().iter().map(|logit| logit.to_bits()).collect()
        };
        (0..).zip(text).map(one).collect()
    };
    let expected = texts.map(|text| evaluate(&mut model.session(&case.options).unwrap(), &text));
    let mut session = model.session(&case.options).unwrap();
    assert!(evaluate(&mut session, &texts[0]) == expected[0], "{}: a later session differs", case.name);
    let used = session.stats().total().used;
    assert!(used.high > 0 && used.low > 0 && used.skipped > 0, "{}: not every choice is made: {used:?}", case.name);
    drop(session);
    let differ: usize = std::thread::scope(|scope| {
        let threads = [0, 1].map(|which| {
            let mut session = model.session(&case.options).unwrap();
            let (texts, expected) = (&texts, &expected);
            scope
                .spawn(move || (0..ROUNDS).filter(|_| evaluate(&mut session, &texts[which]) != expected[which]).count())
        });
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(differ, 0, "{}: of {} evaluations side by side so many differ", case.name, 2 * ROUNDS);
}
