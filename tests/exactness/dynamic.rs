//! Dynamic precision at its two ends, where the result is known bit for bit: nothing lowered is llama.cpp on the
//! model itself, everything lowered is llama.cpp on a model whose experts are the low ones.

use std::path::Path;
use std::sync::Arc;

use gguf_tools::synth::{Format, Spec};
use hobbit::options::{DeviceChoice, LowShare, LowSource, PrecisionMode, Repack};
use hobbit::{DeviceOptions, Model, ModelOptions, PrecisionOptions};
use hobbit_core::plan::ExpertCache;
use hobbit_core::store::faulty::{Faults, FaultyStore, Hold};

use super::cases::{Case, Source};
use super::compare::{BUDGET, Hobbit, same};
use super::fixture;
use super::stock::Stock;

/// Which end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// T1 = 1: every miss is loaded in high precision.
    AllHigh,
    /// T1 = 0, T2 = 1: every miss is loaded in low precision, and nothing is skipped.
    AllLow,
}

/// What is wrong with a case at this end, one message per cache size.
#[allow(dead_code)]
pub fn check(case: &Case, end: End, sizes: &[ExpertCache]) -> Vec<String> {
    let sizes: Vec<_> = sizes.iter().map(|&size| (ExpertCache::Auto, size)).collect();
    check_on(case, end, &[], &sizes)
}

/// As [`check`], with weights rearranged for the CPU on both sides.
#[allow(dead_code)]
pub fn check_rearranged(case: &Case, end: End, sizes: &[ExpertCache]) -> Vec<String> {
    let sizes: Vec<_> = sizes.iter().map(|&size| (ExpertCache::Auto, size)).collect();
    compare(case, end, &[], &sizes, Repack::On)
}

/// As [`check`], on devices of these names, with sizes of their cache and of the host's.
pub fn check_on(case: &Case, end: End, devices: &[&str], sizes: &[(ExpertCache, ExpertCache)]) -> Vec<String> {
    compare(case, end, devices, sizes, Repack::Auto)
}

fn compare(
    case: &Case,
    end: End,
    devices: &[&str],
    sizes: &[(ExpertCache, ExpertCache)],
    repack: Repack,
) -> Vec<String> {
    let Source::Synth(spec) = &case.model else { panic!("{}: not a model of our own", case.name) };
    let (high_dir, low_dir) = (directory(), directory());
    let high = fixture::write(high_dir.path(), spec);
    let low = fixture::write(low_dir.path(), &lowered(spec));
    let reference = if end == End::AllHigh { &high } else { &low };
    let n_batch = case.options.n_batch as usize;
    let stock = match repack {
        Repack::On => Stock::open_repacked(reference, &case.options),
        Repack::Auto | Repack::Off => Stock::open_on(reference, &case.options, devices),
    };
    let stock = stock.and_then(|mut stock| case.script.run(&mut stock, n_batch));
    let expected = match stock {
        Ok(rows) => rows,
        Err(error) => return vec![format!("{}: {error}", case.name)],
    };
    let named = match devices {
        [] => DeviceChoice::None,
        names => DeviceChoice::Named(names.iter().map(|name| name.to_string()).collect()),
    };
    let failed = |&size: &(ExpertCache, ExpertCache)| {
        let device = DeviceOptions { devices: named.clone(), cache: size.0, headroom: 0.0, ..DeviceOptions::default() };
        let found = run(case, &high, &low, end, device, size.1, repack);
        let error = found.and_then(|found| same(&expected, &found)).err()?;
        Some(format!("{}, {end:?}, {size:?}: {error}", case.name))
    };
    sizes.iter().filter_map(failed).collect()
}

/// The same weights apart from the experts', which have other types.
pub fn lowered(spec: &Spec) -> Spec {
    Spec {
        types: vec![Format::Q4_0],
        down_types: vec![Format::Q5_0],
        dense_type: Some(spec.dense_type.unwrap_or(spec.types[0])),
        ..spec.clone()
    }
}

fn run(
    case: &Case,
    high: &Path,
    low: &Path,
    end: End,
    device: DeviceOptions,
    expert_cache: ExpertCache,
    repack: Repack,
) -> Result<Vec<super::script::Row>, String> {
    let options = ModelOptions {
        budget: BUDGET,
        expert_cache,
        low: Some(LowSource::File(low.to_owned())),
        low_share: LowShare::Percent(if end == End::AllLow { 100.0 } else { 30.0 }),
        repack,
        precision: PrecisionOptions {
            mode: Some(PrecisionMode::Dynamic),
            t1: Some(if end == End::AllLow { 0.0 } else { 1.0 }),
            t2: Some(1.0),
            upgrade: end == End::AllHigh,
            ..PrecisionOptions::default()
        },
        device,
        ..ModelOptions::default()
    };
    let model = Model::open_with_store(high, &options, |inner| {
        let hold = Some(Hold { answers_max: 5, seed: 3 });
        Arc::new(FaultyStore::new(inner, Faults { hold, ..Faults::default() }))
    });
    let model = model.map_err(|error| error.to_string())?;
    let session = model.session(&case.options).map_err(|error| error.to_string())?;
    let mut hobbit = Hobbit::new(session);
    let rows = case.script.run(&mut hobbit, case.options.n_batch as usize)?;
    let used = hobbit.stats().total().used;
    let (wanted, other) = match end {
        End::AllHigh => (used.high, used.low + used.skipped),
        End::AllLow => (used.low, used.high + used.skipped),
    };
    if wanted == 0 || other > 0 {
        return Err(format!("used {used:?}"));
    }
    Ok(rows)
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}
