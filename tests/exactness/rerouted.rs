//! Routing that knows what is in memory: where nothing has to be given up not a bit changes, and where something is, it
//! depends on what is resident and on nothing else.

use std::sync::Arc;

use gguf_tools::synth::Spec;
use hobbit::options::{DeviceChoice, PrecisionMode, Repack, RoutingOptions};
use hobbit::stats::PhaseStats;
use hobbit::{DeviceOptions, Model, ModelOptions, PrecisionOptions};
use hobbit_core::plan::ExpertCache;
use hobbit_core::store::faulty::{Faults, FaultyStore, Hold};

use super::cases::{Case, Source};
use super::compare::{BUDGET, Hobbit, same};
use super::fixture;
use super::script::Row;
use super::stock::Stock;

/// As strong as it can be asked for.
fn strongest() -> RoutingOptions {
    RoutingOptions { cache_bias: 9.0, keep_top: 0, substitute: 9.0, drop: 9.0, ..RoutingOptions::default() }
}

/// What is wrong with a case on devices of these names (none: on the CPU), with sizes of their cache and of the host's.
pub fn check(case: &Case, devices: &[&str], sizes: &[(ExpertCache, ExpertCache)]) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let Source::Synth(spec) = &case.model else { panic!("{}: not a file of our own", case.name) };
    let path = fixture::write(dir.path(), spec);
    let n_batch = case.options.n_batch as usize;
    let stock =
        Stock::open_on(&path, &case.options, devices).and_then(|mut stock| case.script.run(&mut stock, n_batch));
    let expected = match stock {
        Ok(rows) => rows,
        Err(error) => return vec![format!("{}: {error}", case.name)],
    };
    let named = match devices {
        [] => DeviceChoice::None,
        names => DeviceChoice::Named(names.iter().map(|name| name.to_string()).collect()),
    };
    let run = |routing: &RoutingOptions, (cache, expert_cache), seed: u64| -> Result<(Vec<Row>, PhaseStats), String> {
        let options = ModelOptions {
            budget: BUDGET,
            repack: Repack::Off,
            expert_cache,
            routing: routing.clone(),
            precision: PrecisionOptions {
                mode: Some(PrecisionMode::Exact),
                deterministic: true,
                ..PrecisionOptions::default()
            },
            device: DeviceOptions { devices: named.clone(), cache, headroom: 0.0, ..DeviceOptions::default() },
            ..ModelOptions::default()
        };
        let model = Model::open_with_store(&path, &options, move |inner| {
            let hold = Some(Hold { answers_max: 5, seed });
            Arc::new(FaultyStore::new(inner, Faults { hold, ..Faults::default() }))
        });
        let session = model.and_then(|model| model.session(&case.options)).map_err(|error| error.to_string())?;
        let mut hobbit = Hobbit::new(session);
        let rows = case.script.run(&mut hobbit, n_batch)?;
        Ok((rows, hobbit.stats().total()))
    };
    let all = ExpertCache::Percent(100.0);
    let resident = || {
        let (rows, counts) = run(&strongest(), (ExpertCache::Auto, all), 1)?;
        same(&expected, &rows)?;
        match counts.rerouted.uses + counts.used.skipped {
            0 => Ok(()),
            n => Err(format!("{n} uses were given up though there is room for all")),
        }
    };
    let elsewhere = |size| {
        let routing = RoutingOptions { cache_bias: 0.5, ..RoutingOptions::default() };
        let (rows, counts) = run(&routing, size, 1)?;
        if counts.rerouted.refused > 0 || !rows.iter().all(|row| row.logits.iter().all(|logit| logit.is_finite())) {
            return Err(format!("{:?}", counts.rerouted));
        }
        let n_prompt = expected.iter().take_while(|row| row.what.starts_with("prompt")).count();
        same(&expected[..n_prompt], &rows[..n_prompt]).map_err(|error| format!("a prompt: {error}"))?;
        let can_change = spec.topk > 1 && spec.topk < spec.experts;
        if can_change != (counts.rerouted.uses > 0) || can_change == same(&expected, &rows).is_ok() {
            return Err(format!("{:?}, and the same logits: {}", counts.rerouted, same(&expected, &rows).is_ok()));
        }
        let (again, _) = run(&routing, size, 2)?;
        same(&rows, &again).map_err(|error| format!("with answers in another order: {error}"))
    };
    let failed = |what: String, result: Result<(), String>| Some(format!("{}, {what}: {}", case.name, result.err()?));
    let of_size = |&size: &(ExpertCache, ExpertCache)| failed(format!("{size:?}"), elsewhere(size));
    failed("resident".into(), resident()).into_iter().chain(sizes.iter().filter_map(of_size)).collect()
}

/// Where the choice is used before the seam, that is said.
#[allow(dead_code)]
pub fn used_before_the_seam(arch: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = fixture::write(dir.path(), &Spec::tiny(arch));
    let options = ModelOptions { routing: strongest(), ..ModelOptions::default() };
    let error = Model::open(&path, &options).err().expect("refused").to_string();
    assert!(error.contains("cannot be sent") && error.contains(arch), "{error}");
    let drop = RoutingOptions { drop: 0.5, ..RoutingOptions::default() };
    Model::open(&path, &ModelOptions { routing: drop, ..ModelOptions::default() }).expect("--drop works");
}
