//! An earlier or a concurrent evaluation does not show in the logits.

use std::sync::{Arc, OnceLock};

use hobbit::options::LowSource;
use hobbit::{BatchToken, EvalError, Interrupt, Model, ModelOptions, Session};
use hobbit_core::store::{Completion, ReadRequest, Store};

use super::Variant;
use crate::fixture::cases::Case;
use crate::fixture::compare::{ALL, NONE, options};
use crate::fixture::ends::{dynamic, lowered};
use crate::fixture::script::{Row, bits};
use crate::fixture::{quiet_llama_cpp, write};

/// A model file of a case, and the logits to expect.
fn reference(case: &Case) -> (tempfile::TempDir, std::path::PathBuf, Vec<Vec<u32>>) {
    quiet_llama_cpp();
    let dir = tempfile::tempdir().unwrap();
    let path = case.write(dir.path());
    let model = Model::open(&path, &options(ALL)).unwrap();
    let expected = run(case, model.session(&case.options).unwrap());
    (dir, path, expected)
}

fn run(case: &Case, mut session: Session) -> Vec<Vec<u32>> {
    case.run(&mut session).unwrap().iter().map(Row::bits).collect()
}

/// Sessions of one model share its cache, also at the same time.
pub fn sessions_side_by_side(case: &Case) {
    let (_dir, path, expected) = reference(case);
    for variant in Variant::SIZES {
        let model = Model::open(&path, &options(variant.expert_cache)).unwrap();
        std::thread::scope(|scope| {
            let threads = [(); 2].map(|()| scope.spawn(|| run(case, model.session(&case.options).unwrap())));
            for thread in threads {
                assert!(thread.join().unwrap() == expected, "{}, {variant:?}: other logits", case.name);
            }
        });
        let third = run(case, model.session(&case.options).unwrap());
        assert!(third == expected, "{}, {variant:?}: other logits in a later session", case.name);
    }
}

/// An interrupt in the middle of a batch ends it, and only it.
pub fn an_interrupted_batch(case: &Case) {
    let (_dir, path, expected) = reference(case);
    for variant in Variant::SIZES {
        let interrupt = Arc::new(OnceLock::<Interrupt>::new());
        let shared = Arc::clone(&interrupt);
        let wrap = move |inner| Arc::new(Interrupting { inner, interrupt: Arc::clone(&shared) }) as Arc<dyn Store>;
        let model = Model::open_with_store(&path, &options(variant.expert_cache), wrap).unwrap();
        let mut session = model.session(&case.options).unwrap();
        interrupt.set(session.interrupt_handle()).unwrap();
        let stopped = session.feed(&[1, 2, 3, 4, 5, 6, 7, 8]);
        assert!(matches!(stopped, Err(EvalError::Interrupted)), "{variant:?}: {stopped:?}");
        // The handle is of the session that is gone: nothing stops the next one.
        drop(session);
        let session = model.session(&case.options).unwrap();
        assert!(run(case, session) == expected, "{}, {variant:?}: other logits", case.name);
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

/// In dynamic precision, where a layer comes in several splits (scales per expert), the choice that a session makes for
/// its first split stands for its later ones, whatever another session chooses meanwhile. Without slots nothing is
/// resident, so the choices depend on the router's weights alone, and serial evaluation is the reference.
pub fn dynamic_sessions_side_by_side(case: &Case) {
    quiet_llama_cpp();
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let path = case.write(dirs[0].path());
    let low = write(dirs[1].path(), &lowered(case.spec()));
    let options = ModelOptions { low: Some(LowSource::File(low)), precision: dynamic(0.3, 0.6), ..options(NONE) };
    let model = Model::open(&path, &options).unwrap();
    let texts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]];
    let evaluate = |session: &mut Session, text: &[hobbit::Token]| -> Vec<Vec<u32>> {
        session.reset();
        let one = |(position, &token)| {
            session.evaluate(&[BatchToken { token, position, sequence: 0, logits: true }]).unwrap();
            bits(session.logits(0).unwrap())
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
        let threads = [0, 1].map(|at| {
            let mut session = model.session(&case.options).unwrap();
            let (text, expected) = (&texts[at], &expected[at]);
            scope.spawn(move || (0..ROUNDS).filter(|_| evaluate(&mut session, text) != *expected).count())
        });
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(differ, 0, "{}: {differ} of {} evaluations side by side differ", case.name, 2 * ROUNDS);
}
