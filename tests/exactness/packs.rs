//! Packs and rearranged weights: the same bits from one file in which every expert is one record, from experts of
//! unequal types, and from weights in the order of bytes that ggml multiplies fastest.

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Result, ensure};
use hobbit::engine::Ggml;
use hobbit::options::{LowShare, PrecisionMode, Repack};
use hobbit::{CachingOptions, ModelOptions, PrecisionOptions};
use hobbit_core::cache::Allocation;
use hobbit_core::expert::ExpertId;
use hobbit_core::gguf::{GgmlType, Gguf};
use hobbit_core::pack::{Pack, PackKind, PackSpec, SliceTypes, Widths, unpack, write};
use hobbit_core::plan::ExpertCache;
use hobbit_core::store::IoMode;
use hobbit_synth::Format;

use crate::fixture::HighPlanes;
use crate::fixture::cases::Case;
use crate::fixture::compare::{ALL, HALF, NONE, Placed, QUARTER, Reference, options, same};
use crate::fixture::ends::dynamic;
use crate::fixture::script::Row;

const SIZES: [ExpertCache; 3] = [ALL, QUARTER, NONE];

fn full() -> PackSpec<'static> {
    PackSpec::new(PackKind::Full)
}

fn pack(plain: &Path, path: &Path, spec: &PackSpec) {
    let source = Gguf::open(plain).expect("it was just written");
    write(&source, path, spec, &Ggml, &mut |_| ControlFlow::Continue(())).expect("there is room, types are known");
}

/// The model file that a pack unpacks to.
fn unpacked(pack: &Path, to: &Path) {
    let opened = Pack::open(pack).expect("it was just written");
    unpack(&opened, to, true, &mut |_, _| ControlFlow::Continue(())).expect("a pack of equal types unpacks");
}

fn exact() -> PrecisionOptions {
    PrecisionOptions { mode: Some(PrecisionMode::Exact), ..PrecisionOptions::default() }
}

fn in_order(precision: PrecisionOptions, expert_cache: ExpertCache) -> ModelOptions {
    ModelOptions { repack: Repack::Off, precision, ..options(expert_cache) }
}

/// The logits of a pack.
fn run(case: &Case, path: &Path, options: &ModelOptions) -> Result<Vec<Row>> {
    Ok(case.hobbit(path, options, None)?.0)
}

/// Whether a check has every kind of pack and every size of the cache.
#[derive(Clone, Copy)]
pub struct Thorough(pub bool);

impl Thorough {
    /// All, or the last one.
    fn of<T>(self, all: &[T]) -> &[T] {
        if self.0 { all } else { &all[all.len() - 1..] }
    }
}

/// A pack gives llama.cpp's bits on the plain file, in exact mode and at T1 = 1; so does one with other high types on
/// the file that it unpacks to.
pub fn check(case: &Case, thorough: Thorough) -> Vec<String> {
    let reference = Reference::new(case, &Placed::default());
    let mut failures = Vec::new();
    for &high in thorough.of(&[Some("q5_0,down=q4_1"), None]) {
        let [path, back] = ["pack.gguf", "unpacked.gguf"].map(|name| reference.dir.path().join(name));
        // Some experts have fewer bits already.
        let low = has_bits_of_q4_0(case).then(|| "q4_0".parse().expect("a type of ggml's"));
        let high_types = high.map(|types| types.parse().expect("types of ggml's"));
        pack(&reference.path, &path, &PackSpec { low, high: high_types, ..full() });
        unpacked(&path, &back);
        let of_back = high.map(|_| case.stock(&back, &Placed::default()));
        let expected = of_back.as_ref().unwrap_or(&reference.expected);
        for precision in [PrecisionOptions { t1: Some(1.0), t2: Some(1.0), ..exact() }, dynamic(1.0, 1.0)] {
            for &size in thorough.of(&[ALL, NONE, QUARTER]) {
                let found = run(case, &path, &in_order(precision, size));
                let found = found.and_then(|found| same(expected, &found));
                failures.extend(reference.failure(format!("high {high:?}, {:?}, {size:?}", precision.mode), found));
            }
        }
        for path in [path, back] {
            std::fs::remove_file(path).expect("it was just written");
        }
    }
    failures
}

/// Whether every expert has at least as many bits for a weight as Q4_0.
fn has_bits_of_q4_0(case: &Case) -> bool {
    let spec = case.spec();
    let bytes_of = |format: Format| format.bytes_of(256);
    spec.types.iter().chain(&spec.down_types).all(|dtype| bytes_of(*dtype) >= bytes_of(Format::Q4_0))
}

/// A nested pack gives llama.cpp's bits on the plain file, in exact mode and at T1 = 1; at T1 = 0 those on a model
/// whose experts are the high planes alone, and then it reads 18 of 34 bytes.
pub fn check_nested(case: &Case, thorough: Thorough) -> Vec<String> {
    let reference = Reference::new(case, &Placed::default());
    let [path, low, back] = ["nested", "low", "unpacked"].map(|name| reference.dir.path().join(format!("{name}.gguf")));
    pack(&reference.path, &path, &PackSpec { bit_planes: true, ..full() });
    let source = Gguf::open(&reference.path).expect("it was just written");
    let lowered = PackSpec { high: Some("q4_1".parse().expect("a type of ggml's")), ..full() };
    write(&source, &low, &lowered, &HighPlanes, &mut |_| ControlFlow::Continue(())).expect("there is room");
    unpacked(&low, &back);
    let low_rows = case.stock(&back, &Placed::default());
    let mut failures = Vec::new();
    for (t1, expected) in [(None, &reference.expected), (Some(1.0), &reference.expected), (Some(0.0), &low_rows)] {
        let ios = thorough.of(&[IoMode::Direct, IoMode::Buffered]);
        let sizes = thorough.of(&[ALL, QUARTER, NONE]);
        for (size, io) in sizes.iter().flat_map(|size| ios.iter().map(|io| (*size, *io))) {
            let check = || {
                let (found, bytes) = run_nested(case, &path, t1, size, io)?;
                if t1 == Some(0.0) && size == NONE {
                    let exact = run_nested(case, &path, None, size, io)?.1;
                    // Direct reads are of whole blocks.
                    let most = if io == IoMode::Buffered { 1e-6 } else { 0.1 };
                    let is_near = (bytes / exact - 18.0 / 34.0).abs() <= most;
                    ensure!(is_near, "{bytes} bytes of a low version, {exact} of a high");
                }
                same(expected, &found)
            };
            failures.extend(reference.failure(format!("nested, T1 {t1:?}, {size:?}, {io:?}"), check()));
        }
    }
    failures
}

/// Rows, and the bytes that were read for each slice; `t1`: `None` for exact.
fn run_nested(case: &Case, path: &Path, t1: Option<f32>, size: ExpertCache, io: IoMode) -> Result<(Vec<Row>, f64)> {
    let is_low = t1 == Some(0.0);
    // With slots for every high version low ones are never used; where only low ones are wanted, they get the slots.
    let size = if is_low && size == ALL { ExpertCache::Percent(60.0) } else { size };
    let low_share = LowShare::Percent(if is_low { 100.0 } else { 30.0 });
    let precision = t1.map_or_else(exact, |t1| dynamic(t1, 1.0));
    let (rows, session) = case.hobbit(path, &ModelOptions { low_share, io, ..in_order(precision, size) }, None)?;
    let total = session.stats().total();
    let used = total.used;
    ensure!(!is_low || (used.low > 0 && used.high + used.skipped == 0), "used {used:?}");
    Ok((rows, total.bytes_read as f64 / total.slices_loaded.max(1) as f64))
}

/// Experts of one layer in three types: the same bits at any cache size.
pub fn check_widths(case: &Case) -> Vec<String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let plain = case.write(dir.path());
    let experts = Gguf::open(&plain).and_then(|gguf| gguf.experts()).expect("the model has experts");
    let types = ["q4_0", "q5_0", "q4_1"].map(|name| GgmlType::from_name(name).expect("a type of ggml's"));
    let mut widths = Widths::default();
    for layer in &experts.layers {
        for index in 0..layer.n_expert as u16 {
            let chosen = types[usize::from(index + layer.layer) % types.len()];
            let mut slices = SliceTypes::default();
            layer.tensors.iter().for_each(|tensor| slices.set(tensor.kind, chosen));
            widths.insert(ExpertId { layer: layer.layer, index }, slices);
        }
    }
    let path = dir.path().join("widths.pack.gguf");
    pack(&plain, &path, &PackSpec { widths: Some(widths), ..full() });
    let expected = run(case, &path, &in_order(exact(), ALL)).expect("a pack of unequal types runs");
    // Each type has a pool, and each layer a share of every pool.
    let caching = CachingOptions { slots: Allocation::ShallowFirst { layers: 1 }, ..CachingOptions::default() };
    let shallow = |size| ModelOptions { caching, ..in_order(exact(), size) };
    let even = |size| in_order(exact(), size);
    let failed = |options: ModelOptions| {
        let error = run(case, &path, &options).and_then(|found| same(&expected, &found)).err()?;
        let (slots, size) = (options.caching.slots, options.expert_cache);
        Some(format!("{}, unequal widths, {slots:?}, {size:?}: {error:#}", case.name))
    };
    [even(QUARTER), even(NONE), shallow(HALF), shallow(QUARTER)].into_iter().filter_map(failed).collect()
}

/// Weights rearranged on request, from the plain file and from a pack.
pub fn check_rearranged(case: &Case) -> Vec<String> {
    let reference = Reference::new(case, &Placed { repack: Repack::On, ..Placed::default() });
    let packed = reference.dir.path().join("pack.gguf");
    pack(&reference.path, &packed, &full());
    let mut failures = Vec::new();
    for path in [&reference.path, &packed] {
        for (size, io) in SIZES.into_iter().flat_map(|size| [(size, IoMode::Auto), (size, IoMode::Buffered)]) {
            let options = ModelOptions { io, repack: Repack::On, ..options(size) };
            let found = run_rearranged(case, path, &options, true);
            let found = found.and_then(|found| same(&reference.expected, &found));
            failures.extend(reference.failure(format!("{}, {size:?}, {io:?}", path.display()), found));
        }
    }
    failures
}

/// Weights are rearranged by default with slots for half of the experts, unless the run is to be repeatable.
pub fn check_rearranged_by_default(case: &Case) -> Vec<String> {
    let reference = Reference::new(case, &Placed::default());
    let failed = |(percent, deterministic, repack)| {
        let precision = PrecisionOptions { deterministic, ..PrecisionOptions::default() };
        let options = ModelOptions { precision, repack: Repack::Auto, ..options(ExpertCache::Percent(percent)) };
        let expected = case.stock(&reference.path, &Placed { repack, ..Placed::default() });
        let found = run_rearranged(case, &reference.path, &options, repack == Repack::On);
        let found = found.and_then(|found| same(&expected, &found));
        reference.failure(format!("{percent} %, deterministic {deterministic}"), found)
    };
    [(50.0, false, Repack::On), (49.0, false, Repack::Off), (100.0, true, Repack::Off)]
        .into_iter()
        .filter_map(failed)
        .collect()
}

fn run_rearranged(case: &Case, path: &Path, options: &ModelOptions, repacks: bool) -> Result<Vec<Row>> {
    let (rows, session) = case.hobbit(path, options, None)?;
    // ggml decides by the CPU which types are rearranged: on x86 those of all cases, if its kernels have AVX2.
    let reported = &session.description().io_choice;
    let is_known = hobbit::engine::system_info().contains("AVX2 = 1");
    ensure!(!is_known || reported.contains("rearranged") == repacks, "found {reported}");
    Ok(rows)
}
