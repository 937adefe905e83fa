//! Runs a case on a device, by stock llama.cpp with everything there and by hobbit with tiers of several sizes.

use hobbit::options::{CpuHelper, DeviceChoice};
use hobbit::stats::DeviceCounters;
use hobbit::{CachingOptions, DeviceOptions, Model, ModelOptions};
use hobbit_core::plan::ExpertCache;

use super::cases::{Case, Source};
use super::compare::{BUDGET, Hobbit, same};
use super::fixture;
use super::stock::Stock;

pub const ALL: ExpertCache = ExpertCache::Percent(100.0);
pub const QUARTER: ExpertCache = ExpertCache::Percent(25.0);
/// No slot, only staging.
pub const WAVES: ExpertCache = ExpertCache::Bytes(1);

/// Device cache and host cache.
pub const SIZES: [(ExpertCache, ExpertCache); 5] =
    [(ALL, QUARTER), (QUARTER, QUARTER), (QUARTER, ALL), (WAVES, QUARTER), (WAVES, ExpertCache::Bytes(0))];

/// What is wrong with a case on a device.
pub fn check(case: &Case, device: &DeviceOptions, sizes: &[(ExpertCache, ExpertCache)]) -> Vec<String> {
    check_with(case, device, CachingOptions::default(), sizes, &mut |_| ())
}

/// The same with other caching. `done` is told what the first device did at each size.
pub fn check_with(
    case: &Case,
    device: &DeviceOptions,
    caching: CachingOptions,
    sizes: &[(ExpertCache, ExpertCache)],
    done: &mut dyn FnMut(DeviceCounters),
) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let path = match &case.model {
        Source::Synth(spec) => fixture::write(dir.path(), spec),
        Source::File(path) => path.clone(),
    };
    let n_batch = case.options.n_batch as usize;
    let DeviceChoice::Named(names) = &device.devices else { panic!("tests name their devices") };
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let stock = Stock::open_on(&path, &case.options, &names);
    let expected = match stock.and_then(|mut stock| case.script.run(&mut stock, n_batch)) {
        Ok(rows) => rows,
        Err(error) => return vec![format!("{}: {error}", case.name)],
    };
    let mut failures = Vec::new();
    for &(cache, expert_cache) in sizes {
        let device = DeviceOptions { cache, ..device.clone() };
        let device_options = device.clone();
        let options =
            ModelOptions { budget: BUDGET, expert_cache, caching, device: device_options, ..ModelOptions::default() };
        let mut run = || {
            let model = Model::open(&path, &options).map_err(|error| error.to_string())?;
            let session = model.session(&case.options).map_err(|error| error.to_string())?;
            let mut hobbit = Hobbit::new(session);
            let found = case.script.run(&mut hobbit, n_batch)?;
            same(&expected, &found)?;
            done(hobbit.stats().devices[0]);
            plausible(&hobbit, &device, cache)
        };
        if let Err(error) = run() {
            failures.push(format!("{}, {cache:?} on the device, {expert_cache:?} on the host: {error}", case.name));
        }
    }
    failures
}

/// The run went the way its tiers suggest.
fn plausible(hobbit: &Hobbit, device: &DeviceOptions, cache: ExpertCache) -> Result<(), String> {
    let report = hobbit.devices().first().cloned().ok_or("no device is reported")?;
    let counters = hobbit.stats().devices[0];
    let expected = match cache {
        _ if report.unified => counters.uploads == 0 && counters.hits == 0,
        // A layer that is there as a whole is computed without asking for a slot.
        ALL => {
            report.slots == report.experts
                && counters.misses <= report.experts
                && counters.uploads >= 2 * report.experts
        }
        WAVES => report.slots == 0 && counters.hits == 0 && counters.misses > 0,
        ExpertCache::Percent(percent) => {
            report.slots as f64 <= report.experts as f64 * percent / 100.0
                && counters.misses > 0
                && counters.uploads > 0
        }
        size => panic!("no test has a device cache of {size:?}"),
    };
    let helped = match device.cpu_helper {
        CpuHelper::On => report.unified || cache == ALL || counters.helper_experts > 0,
        CpuHelper::Off => counters.helper_experts == 0,
        _ => true,
    };
    match expected && helped {
        true => Ok(()),
        false => Err(format!("implausible: {report:?} {counters:?}")),
    }
}
