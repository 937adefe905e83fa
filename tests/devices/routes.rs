//! Recorded routes on a device: what is written over ids and weights there is what plain llama.cpp computes with.

use hobbit::options::{DeviceChoice, RouteOptions};
use hobbit::{DeviceOptions, Model, ModelOptions};
use lagging_device::{Options, Order};

use super::cases::{self, Source};
use super::check::SIZES;
use super::compare::{BUDGET, Hobbit, same};
use super::fixture;
use super::recorded::record;
use super::stock::{Placed, Stock};

/// Softmax before and after the choice, scales per expert, groups of experts.
const ARCHITECTURES: [&str; 4] = ["qwen3moe", "gpt-oss", "deepseek2", "olmoe"];

#[test]
fn recorded_routes() {
    let mut failures = Vec::new();
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let device = lagging_device::register(Options { memory: 1 << 30, order, ..Options::default() });
        fixture::quiet_llama_cpp();
        let name = device.name();
        for case in cases::all_architectures().into_iter().filter(|case| ARCHITECTURES.contains(&case.name.as_str())) {
            let dir = tempfile::tempdir().unwrap();
            let Source::Synth(spec) = &case.model else { panic!("{}: not a file of our own", case.name) };
            let path = fixture::write(dir.path(), spec);
            let trace = dir.path().join("routes.trace");
            record(&path, &trace);
            let routes = RouteOptions { trace, recall: 0.5 };
            let n_batch = case.options.n_batch as usize;
            let stock = |routes| {
                let placed = Placed { devices: &[name], routes, ..Placed::default() };
                case.script.run(&mut Stock::open_placed(&path, &case.options, &placed).unwrap(), n_batch).unwrap()
            };
            let expected = stock(Some(&routes));
            assert!(same(&stock(None), &expected).is_err(), "{}: plain llama.cpp follows no route", case.name);
            for (cache, expert_cache) in SIZES {
                let options = ModelOptions {
                    budget: BUDGET,
                    expert_cache,
                    device: DeviceOptions {
                        devices: DeviceChoice::Named(vec![name.into()]),
                        headroom: 0.0,
                        cache,
                        ..DeviceOptions::default()
                    },
                    routes: Some(routes.clone()),
                    ..ModelOptions::default()
                };
                let run = || {
                    let model = Model::open(&path, &options).map_err(|error| error.to_string())?;
                    let session = model.session(&case.options).map_err(|error| error.to_string())?;
                    same(&expected, &case.script.run(&mut Hobbit::new(session), n_batch)?)
                };
                if let Err(error) = run() {
                    failures.push(format!("{}, {order:?}, {cache:?}, {expert_cache:?}: {error}", case.name));
                }
            }
        }
        failures.extend(device.faults());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
