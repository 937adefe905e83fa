//! Runs a case on both sides and says where they differ.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hobbit::engine::RouterObserver;
use hobbit::options::{Prefetch, Repack};
use hobbit::{BatchToken, CachingOptions, Model, ModelOptions, Session};
use hobbit_core::cache::Allocation;
use hobbit_core::cache::policy::PolicyKind;
use hobbit_core::gguf::Gguf;
use hobbit_core::plan::{Budget, ExpertCache};
use hobbit_core::predict::{PathBatches, PathLimits, PathTableBuilder, PredictorKind};
use hobbit_core::profile::write_path_table;
use hobbit_core::store::faulty::{Faults, FaultyStore, Hold};

use super::cases::{Case, Source, Variant};
use super::fixture;
use super::script::{Evaluate, Row};
use super::stock::Stock;

/// More than any of these models takes.
pub const BUDGET: Budget = Budget::Bytes(4 << 30);

/// What is wrong with a case, one message per variant; empty when every logit is llama.cpp's.
pub fn check(case: &Case, variants: &[Variant]) -> Vec<String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = match &case.model {
        Source::Synth(spec) => fixture::write(dir.path(), spec),
        Source::File(path) => path.clone(),
    };
    compare(case, variants, &path, || ())
}

/// As [`check`], but hobbit reads a file in which one block of one expert has the opposite sign.
pub fn check_against_altered(case: &Case, variants: &[Variant]) -> Vec<String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let Source::Synth(spec) = &case.model else { panic!("{}: not a file of our own", case.name) };
    let path = fixture::write(dir.path(), spec);
    let experts = Gguf::open(&path).and_then(|gguf| gguf.experts()).expect("the model has experts");
    // The first block's scale, 16 bits.
    let at = experts.layers[0].tensors[0].extent(3).offset as usize + 1;
    compare(case, variants, &path, || {
        let mut bytes = fs::read(&path).expect("it was just written");
        bytes[at] ^= 0x80;
        fs::write(&path, bytes).expect("it was just written");
    })
}

/// `between` happens after stock llama.cpp has run and before hobbit does.
fn compare(case: &Case, variants: &[Variant], path: &Path, between: impl FnOnce()) -> Vec<String> {
    let n_batch = case.options.n_batch as usize;
    let stock = Stock::open(path, &case.options).and_then(|mut stock| case.script.run(&mut stock, n_batch));
    let expected = match stock.and_then(|rows| sound(&rows).map(|()| rows)) {
        Ok(rows) => rows,
        Err(error) => return vec![format!("{}: {error}", case.name)],
    };
    between();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let paths = match variants.iter().any(|variant| variant.ahead == Some(PredictorKind::PathTable)) {
        true => match learn_paths(case, path, &dir.path().join("model.paths")) {
            Ok(paths) => Some(paths),
            Err(error) => return vec![format!("{}: {error}", case.name)],
        },
        false => None,
    };
    variants
        .iter()
        .filter_map(|variant| {
            let error = check_variant(case, path, variant, paths.as_deref(), &expected).err()?;
            Some(format!("{}, {variant:?}: {error}", case.name))
        })
        .collect()
}

/// A reference of infinities or of equal numbers would prove nothing.
fn sound(rows: &[Row]) -> Result<(), String> {
    for row in rows {
        if !row.logits.iter().all(|logit| logit.is_finite()) {
            return Err(format!("{}: stock's logits are not finite", row.what));
        }
        if row.logits.iter().all(|logit| *logit == row.logits[0]) {
            return Err(format!("{}: stock's logits are all equal", row.what));
        }
    }
    Ok(())
}

/// The table of the paths that the script itself takes: predictions as good as can be.
fn learn_paths(case: &Case, path: &Path, to: &Path) -> Result<PathBuf, String> {
    let options = ModelOptions { budget: BUDGET, repack: Repack::Off, ..ModelOptions::default() };
    let model = Model::open(path, &options).map_err(|error| error.to_string())?;
    let builder = PathTableBuilder::new(model.predict_shape(), PathLimits::default());
    let batches = Arc::new(Mutex::new(PathBatches::new(builder)));
    let seen = Arc::clone(&batches);
    let observer: RouterObserver = Box::new(move |choice| {
        let experts = choice.experts.iter().map(|&id| id as u16);
        seen.lock().expect("nobody panics").layer(choice.layer, choice.n_expert_used, experts);
    });
    let session = model.session_observed(&case.options, observer).map_err(|error| error.to_string())?;
    case.script.run(&mut Hobbit::new(session), case.options.n_batch as usize)?;
    let table = batches.lock().expect("nobody panics").build();
    if table.n_tokens() == 0 {
        return Err("no router was seen".to_owned());
    }
    write_path_table(to, &table).map_err(|error| error.to_string())?;
    Ok(to.to_owned())
}

fn check_variant(
    case: &Case,
    path: &Path,
    variant: &Variant,
    paths: Option<&Path>,
    expected: &[Row],
) -> Result<(), String> {
    let caching = match variant.ahead {
        None => CachingOptions { slots: variant.slots, ..CachingOptions::default() },
        Some(predictor) => CachingOptions {
            policy: PolicyKind::Learned,
            predictor,
            prefetch: Prefetch::On,
            distance: 3,
            slots: variant.slots,
            ..Default::default()
        },
    };
    let (expert_cache, io) = (variant.expert_cache, variant.io);
    let path_table = paths.filter(|_| variant.ahead == Some(PredictorKind::PathTable)).map(Path::to_owned);
    let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
    let profile = (variant.slots == Allocation::ByPenalty).then(|| fixture::profile(path, dir.path()));
    let options = ModelOptions {
        budget: BUDGET,
        repack: Repack::Off,
        expert_cache,
        io,
        caching,
        path_table,
        profile,
        ..ModelOptions::default()
    };
    let model = match variant.shuffle {
        None => Model::open(path, &options),
        Some(seed) => Model::open_with_store(path, &options, move |inner| {
            let hold = Some(Hold { answers_max: 5, seed });
            Arc::new(FaultyStore::new(inner, Faults { hold, ..Faults::default() }))
        }),
    };
    let model = model.map_err(|error| error.to_string())?;
    if model.expert_bytes_read_at_load() != 0 {
        return Err(format!("loading read {} bytes of experts, expected none", model.expert_bytes_read_at_load()));
    }
    let session = model.session(&case.options).map_err(|error| error.to_string())?;
    let mut hobbit = Hobbit::new(session);
    let found = case.script.run(&mut hobbit, case.options.n_batch as usize)?;
    same(expected, &found)?;
    check_traffic(&hobbit.session, path, variant)
}

/// Where the two first differ.
pub fn same(expected: &[Row], found: &[Row]) -> Result<(), String> {
    if expected.len() != found.len() {
        return Err(format!("{} rows of logits, expected {}", found.len(), expected.len()));
    }
    let n_rows = expected.iter().zip(found).filter(|(a, b)| first_difference(a, b).is_some()).count();
    for (stock, ours) in expected.iter().zip(found) {
        if let Some(at) = first_difference(stock, ours) {
            let n = stock.logits.iter().zip(&ours.logits).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            return Err(format!(
                "{}, logit {at}: {} expected, {} found; {n} of its {} logits and {n_rows} of {} rows of logits differ",
                stock.what,
                stock.logits[at],
                ours.logits[at],
                stock.logits.len(),
                expected.len()
            ));
        }
    }
    Ok(())
}

fn first_difference(a: &Row, b: &Row) -> Option<usize> {
    a.logits.iter().zip(&b.logits).position(|(a, b)| a.to_bits() != b.to_bits())
}

/// The run went the way its cache size suggests.
fn check_traffic(session: &Session, path: &Path, variant: &Variant) -> Result<(), String> {
    let unseen = session.unseen_experts();
    if !unseen.is_empty() {
        return Err(format!("products that never reached hobbit: {}", unseen.join(", ")));
    }
    let experts = Gguf::open(path).and_then(|gguf| gguf.experts()).map_err(|error| error.to_string())?;
    let n_experts: u64 = experts.layers.iter().map(|layer| u64::from(layer.n_expert)).sum();
    let n_slots: u64 = session.stats().layers.iter().map(|layer| u64::from(layer.slots)).sum();
    let total = session.stats().total();
    let (plausible, expected) = match variant.expert_cache {
        ExpertCache::Bytes(0) => (n_slots == 0 && total.hits < total.misses, "no slots, mostly misses"),
        ExpertCache::Percent(100.0) => (
            n_slots == n_experts && total.misses <= n_experts && total.hits > 0,
            "a slot and at most one miss per expert",
        ),
        ExpertCache::Percent(percent) => {
            let most = (n_experts as f64 * percent / 100.0) as u64;
            (n_slots > 0 && n_slots <= most && total.misses > 0, "its part of the slots and some misses")
        }
        size => panic!("no test has a cache of {size:?}"),
    };
    let slots: Vec<u32> = session.stats().layers.iter().map(|layer| layer.slots).collect();
    let (least, most) = (slots.iter().min().copied(), slots.iter().max().copied());
    let caching = session.caching();
    let told = caching.slots_by_layer.first().map(|told| (told.least, told.most));
    if caching.slots != variant.slots.to_string() || told != least.zip(most) {
        return Err(format!("{slots:?} are the slots, {caching:?} was told"));
    }
    let n_used = u64::from(session.model().info().n_expert_used);
    let is_short = n_slots < n_used * experts.layers.len() as u64;
    if !is_short && slots.iter().any(|slots| u64::from(*slots) < n_used) {
        return Err(format!("a layer has fewer slots than a token uses: {slots:?}"));
    }
    if plausible && total.hits + total.misses > 0 && total.bytes_read > 0 {
        return Ok(());
    }
    Err(format!(
        "{n_slots} slots for {n_experts} experts, {} hits, {} misses, {} bytes read; expected {expected}",
        total.hits, total.misses, total.bytes_read
    ))
}

/// The side under test.
pub struct Hobbit {
    session: Session,
    n_vocab: usize,
}

impl Hobbit {
    pub fn new(session: Session) -> Self {
        Self { n_vocab: session.model().n_vocab(), session }
    }

    #[allow(dead_code)]
    pub fn devices(&self) -> &[hobbit::stats::DeviceReport] {
        self.session.devices()
    }

    pub fn stats(&self) -> hobbit::stats::Stats {
        self.session.stats()
    }
}

impl Evaluate for Hobbit {
    fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    fn evaluate(&mut self, batch: &[BatchToken]) -> Result<Vec<Vec<f32>>, String> {
        self.session.evaluate(batch).map_err(|error| error.to_string())?;
        let row = |index| self.session.logits(index).map(<[f32]>::to_vec).ok_or(format!("no logits for entry {index}"));
        (0..batch.len()).map(row).collect()
    }
}
