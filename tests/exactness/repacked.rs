//! Experts in the order of bytes that ggml multiplies fastest: the same bits as llama.cpp with its weights in that order.

use std::path::Path;

use hobbit::options::Repack;
use hobbit::{Model, ModelOptions, PrecisionOptions};
use hobbit_core::pack::{PackKind, PackSpec};
use hobbit_core::plan::ExpertCache;
use hobbit_core::store::IoMode;

use super::cases::{Case, Source};
use super::compare::{BUDGET, Hobbit, same};
use super::fixture;
use super::packs::pack;
use super::script::Row;
use super::stock::Stock;

const SIZES: [ExpertCache; 3] = [ExpertCache::Percent(100.0), ExpertCache::Percent(25.0), ExpertCache::Bytes(0)];

/// What is wrong with a case, one message per setting; empty when every logit is llama.cpp's.
pub fn check(case: &Case) -> Vec<String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let Source::Synth(spec) = &case.model else { panic!("{}: not a file of our own", case.name) };
    let plain = fixture::write(dir.path(), spec);
    let n_batch = case.options.n_batch as usize;
    let stock = Stock::open_repacked(&plain, &case.options).and_then(|mut stock| case.script.run(&mut stock, n_batch));
    let reference = match stock {
        Ok(rows) => rows,
        Err(error) => return vec![format!("{}: {error}", case.name)],
    };
    let packed = dir.path().join("pack.gguf");
    pack(&plain, &packed, &PackSpec::new(PackKind::Full));
    let mut failures = Vec::new();
    for path in [&plain, &packed] {
        for size in SIZES {
            for io in [IoMode::Auto, IoMode::Buffered] {
                let found = run(case, path, size, io);
                if let Err(error) = found.and_then(|found| same(&reference, &found)) {
                    let name = path.file_name().unwrap_or_default().display();
                    failures.push(format!("{}, {name}, {size:?}, {io:?}: {error}", case.name));
                }
            }
        }
    }
    failures
}

/// What is wrong with a case where nobody says whether experts are rearranged: they are with slots for half of them.
pub fn check_auto(case: &Case) -> Vec<String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let Source::Synth(spec) = &case.model else { panic!("{}: not a file of our own", case.name) };
    let path = fixture::write(dir.path(), spec);
    let n_batch = case.options.n_batch as usize;
    let check = |percent: f64, deterministic: bool, repacks: bool| {
        let open = if repacks { Stock::open_repacked } else { Stock::open };
        let expected = case.script.run(&mut open(&path, &case.options)?, n_batch)?;
        let expert_cache = ExpertCache::Percent(percent);
        let precision = PrecisionOptions { deterministic, ..PrecisionOptions::default() };
        let options = ModelOptions { budget: BUDGET, expert_cache, precision, ..ModelOptions::default() };
        let model = Model::open(&path, &options).map_err(|error| error.to_string())?;
        let session = model.session(&case.options).map_err(|error| error.to_string())?;
        let is_told = session.io_choice().contains("rearranged");
        if cfg!(target_arch = "x86_64") && is_told != repacks {
            return Err(format!("found {}", session.io_choice()));
        }
        same(&expected, &case.script.run(&mut Hobbit::new(session), n_batch)?)
    };
    // Slots, whether a run is to be repeatable, and whether they are.
    let sizes = [(50.0, false, true), (49.0, false, false), (100.0, true, false)];
    let failed = |(percent, deterministic, repacks)| {
        let error = check(percent, deterministic, repacks).err()?;
        Some(format!("{}, {percent} %, deterministic {deterministic}: {error}", case.name))
    };
    sizes.into_iter().filter_map(failed).collect()
}

fn run(case: &Case, path: &Path, expert_cache: ExpertCache, io: IoMode) -> Result<Vec<Row>, String> {
    let options = ModelOptions { budget: BUDGET, expert_cache, io, repack: Repack::On, ..ModelOptions::default() };
    let model = Model::open(path, &options).map_err(|error| error.to_string())?;
    let session = model.session(&case.options).map_err(|error| error.to_string())?;
    // Which types are rearranged, ggml decides by the CPU.
    let is_told = session.io_choice().contains("rearranged");
    if cfg!(target_arch = "x86_64") && !is_told {
        return Err(format!("nothing is rearranged: {}", session.io_choice()));
    }
    case.script.run(&mut Hobbit::new(session), case.options.n_batch as usize)
}
