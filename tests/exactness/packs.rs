//! Packs: the same bits from one file in which every expert is one record, and from experts of unequal types.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use hobbit::engine::Ggml;
use hobbit::options::{LowShare, PrecisionMode, Repack};
use hobbit::{CachingOptions, Model, ModelOptions, PrecisionOptions};
use hobbit_core::cache::Allocation;
use hobbit_core::expert::ExpertId;
use hobbit_core::gguf::{GgmlType, Gguf};
use hobbit_core::pack::{Pack, PackKind, PackSpec, SliceTypes, Widths, unpack, write};
use hobbit_core::plan::ExpertCache;
use hobbit_core::store::IoMode;

use super::cases::{Case, Source};
use super::compare::{BUDGET, Hobbit, same};
use super::fixture;
use super::script::Row;
use super::stock::Stock;

const SIZES: [ExpertCache; 3] = [ExpertCache::Percent(100.0), ExpertCache::Percent(25.0), ExpertCache::Bytes(0)];

/// A pack gives llama.cpp's bits on the plain file, in exact mode and at T1 = 1; so does one with other high types on
/// what it unpacks to.
pub fn check(case: &Case) -> Vec<String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let plain = plain(case, dir.path());
    let mut failures = Vec::new();
    for high in [None, Some("q5_0,down=q4_1")] {
        let path = dir.path().join(format!("{}.pack.gguf", high.map_or("kept", |_| "other")));
        // gpt-oss experts have four bits already.
        let low = (!case.name.contains("gpt-oss")).then(|| "q4_0".parse().expect("a type of ggml's"));
        let high_types = high.map(|types| types.parse().expect("types of ggml's"));
        let spec = PackSpec { low, high: high_types, ..PackSpec::new(PackKind::Full) };
        pack(&plain, &path, &spec);
        let back = dir.path().join("unpacked.gguf");
        let opened = Pack::open(&path).expect("it was just written");
        unpack(&opened, &back, true, &mut |_, _| ControlFlow::Continue(())).expect("a pack of equal types unpacks");
        let reference = stock(case, if high.is_some() { &back } else { &plain });
        for mode in [PrecisionMode::Exact, PrecisionMode::Dynamic] {
            for size in SIZES {
                let found = run(case, &path, mode, size);
                if let Err(error) = found.and_then(|found| same(&reference, &found)) {
                    failures.push(format!("{}, high {high:?}, {mode:?}, {size:?}: {error}", case.name));
                }
            }
        }
    }
    failures
}

/// A nested pack gives llama.cpp's bits on the plain file, in exact mode and at T1 = 1; at T1 = 0 those on a model whose
/// experts are the high planes alone, and then it reads 18 of 34 bytes.
pub fn check_nested(case: &Case) -> Vec<String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let plain = plain(case, dir.path());
    let [path, low, back] = ["nested", "low", "unpacked"].map(|name| dir.path().join(format!("{name}.gguf")));
    pack(&plain, &path, &PackSpec { bit_planes: true, ..PackSpec::new(PackKind::Full) });
    let source = Gguf::open(&plain).expect("it was just written");
    let lowered = PackSpec { high: Some("q4_1".parse().expect("a type of ggml's")), ..PackSpec::new(PackKind::Full) };
    write(&source, &low, &lowered, &fixture::HighPlanes, &mut |_| ControlFlow::Continue(())).expect("there is room");
    let opened = Pack::open(&low).expect("it was just written");
    unpack(&opened, &back, true, &mut |_, _| ControlFlow::Continue(())).expect("a pack of equal types unpacks");
    let mut failures = Vec::new();
    for (t1, reference) in [(None, &plain), (Some(1.0), &plain), (Some(0.0), &back)] {
        let reference = stock(case, reference);
        for (size, io) in SIZES.into_iter().flat_map(|size| [(size, IoMode::Buffered), (size, IoMode::Direct)]) {
            let found = run_nested(case, &path, t1, size, io);
            match found.and_then(|(found, bytes)| same(&reference, &found).map(|()| bytes)) {
                Ok(bytes) if t1 == Some(0.0) && size == SIZES[2] => {
                    let exact = run_nested(case, &path, None, size, io).expect("it did before").1;
                    // Direct reads are of whole blocks.
                    let (expected, most) = (18.0 / 34.0, if io == IoMode::Buffered { 1e-6 } else { 0.1 });
                    if (bytes / exact - expected).abs() > most {
                        failures.push(format!("{}: {bytes} bytes of a low version, {exact} of a high", case.name));
                    }
                }
                Ok(_) => {}
                Err(error) => failures.push(format!("{}, nested, T1 {t1:?}, {size:?}, {io:?}: {error}", case.name)),
            }
        }
    }
    failures
}

/// Rows, and the bytes that were read for each slice; `t1`: `None` for exact.
fn run_nested(
    case: &Case,
    path: &Path,
    t1: Option<f32>,
    expert_cache: ExpertCache,
    io: IoMode,
) -> Result<(Vec<Row>, f64), String> {
    let mode = Some(if t1.is_some() { PrecisionMode::Dynamic } else { PrecisionMode::Exact });
    let precision = PrecisionOptions { mode, t1, t2: t1.map(|_| 1.0), ..PrecisionOptions::default() };
    // With slots for every high version low ones are never used; where nothing but low ones is wanted, they get the slots.
    let low_share = LowShare::Percent(if t1 == Some(0.0) { 100.0 } else { 30.0 });
    let expert_cache = match t1 {
        Some(0.0) if expert_cache == SIZES[0] => ExpertCache::Percent(60.0),
        _ => expert_cache,
    };
    let options = ModelOptions {
        budget: BUDGET,
        repack: Repack::Off,
        expert_cache,
        precision,
        low_share,
        io,
        ..ModelOptions::default()
    };
    let model = Model::open(path, &options).map_err(|error| error.to_string())?;
    let session = model.session(&case.options).map_err(|error| error.to_string())?;
    let mut hobbit = Hobbit::new(session);
    let rows = case.script.run(&mut hobbit, case.options.n_batch as usize)?;
    let total = hobbit.stats().total();
    let used = total.used;
    if t1 == Some(0.0) && (used.low == 0 || used.high + used.skipped > 0) {
        return Err(format!("used {used:?}"));
    }
    Ok((rows, total.bytes_read as f64 / total.slices_loaded.max(1) as f64))
}

/// Experts of one layer in three types: the same bits at any cache size.
pub fn check_widths(case: &Case) -> Vec<String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let plain = plain(case, dir.path());
    let experts = Gguf::open(&plain).and_then(|gguf| gguf.experts()).expect("the model has experts");
    let types = ["q4_0", "q5_0", "q4_1"].map(|name| GgmlType::from_name(name).expect("a type of ggml's"));
    let mut widths = Widths::default();
    for layer in &experts.layers {
        for index in 0..layer.n_expert as u16 {
            let expert = ExpertId { layer: layer.layer, index };
            let chosen = types[usize::from(index + layer.layer) % types.len()];
            let mut slices = SliceTypes::default();
            layer.tensors.iter().for_each(|tensor| slices.set(tensor.kind, chosen));
            widths.insert(expert, slices);
        }
    }
    let path = dir.path().join("widths.pack.gguf");
    pack(&plain, &path, &PackSpec { widths: Some(widths), ..PackSpec::new(PackKind::Full) });
    let reference = match run(case, &path, PrecisionMode::Exact, SIZES[0]) {
        Ok(rows) => rows,
        Err(error) => return vec![format!("{}: {error}", case.name)],
    };
    let differs = |&size: &ExpertCache| {
        let found = run(case, &path, PrecisionMode::Exact, size);
        let error = found.and_then(|found| same(&reference, &found)).err()?;
        Some(format!("{}, unequal widths, {size:?}: {error}", case.name))
    };
    let mut failures: Vec<String> = SIZES[1..].iter().filter_map(differs).collect();
    // Each type has a pool, and each layer a share of every pool.
    let caching = CachingOptions { slots: Allocation::ByPenalty, ..CachingOptions::default() };
    let profile = Some(fixture::profile(&plain, dir.path()));
    for expert_cache in [ExpertCache::Percent(50.0), ExpertCache::Percent(25.0)] {
        let options = ModelOptions { expert_cache, caching, profile: profile.clone(), ..exact() };
        if let Err(error) = run_with(case, &path, &options).and_then(|found| same(&reference, &found)) {
            failures.push(format!("{}, unequal widths, slots by penalty, {expert_cache:?}: {error}", case.name));
        }
    }
    failures
}

fn exact() -> ModelOptions {
    let precision = PrecisionOptions { mode: Some(PrecisionMode::Exact), ..PrecisionOptions::default() };
    ModelOptions { budget: BUDGET, repack: Repack::Off, precision, ..ModelOptions::default() }
}

fn plain(case: &Case, dir: &Path) -> PathBuf {
    let Source::Synth(spec) = &case.model else { panic!("{}: not a model of our own", case.name) };
    fixture::write(dir, spec)
}

pub fn pack(plain: &Path, path: &Path, spec: &PackSpec) {
    let source = Gguf::open(plain).expect("it was just written");
    let go_on = &mut |_| ControlFlow::Continue(());
    write(&source, path, spec, &Ggml, go_on).expect("there is room, and the types are known");
}

fn stock(case: &Case, path: &Path) -> Vec<Row> {
    let n_batch = case.options.n_batch as usize;
    let mut stock = Stock::open(path, &case.options).expect("llama.cpp opens it");
    case.script.run(&mut stock, n_batch).expect("llama.cpp evaluates it")
}

fn run(case: &Case, path: &Path, mode: PrecisionMode, expert_cache: ExpertCache) -> Result<Vec<Row>, String> {
    let precision = PrecisionOptions { mode: Some(mode), t1: Some(1.0), t2: Some(1.0), ..PrecisionOptions::default() };
    let options =
        ModelOptions { budget: BUDGET, repack: Repack::Off, expert_cache, precision, ..ModelOptions::default() };
    run_with(case, path, &options)
}

fn run_with(case: &Case, path: &Path, options: &ModelOptions) -> Result<Vec<Row>, String> {
    let model = Model::open(path, options).map_err(|error| error.to_string())?;
    if model.expert_bytes_read_at_load() != 0 {
        return Err(format!("loading read {} bytes of experts", model.expert_bytes_read_at_load()));
    }
    let session = model.session(&case.options).map_err(|error| error.to_string())?;
    case.script.run(&mut Hobbit::new(session), case.options.n_batch as usize)
}
