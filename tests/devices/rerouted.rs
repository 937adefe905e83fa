//! Tokens that are sent to experts in memory, on a device: ids and weights are written there too.

use lagging_device::{Options, Order};

use super::cases;
use super::check::{QUARTER, WAVES};
use super::fixture;
use super::sent;

/// Softmax before and after the choice, scales per expert, groups of experts, a bias of the choice.
const ARCHITECTURES: [&str; 4] = ["qwen3moe", "gpt-oss", "deepseek2", "olmoe"];

#[test]
fn tokens_sent_elsewhere() {
    let mut failures = Vec::new();
    for order in [Order::CopiesLate, Order::CopiesEarly] {
        let device = lagging_device::register(Options { memory: 1 << 30, order, ..Options::default() });
        fixture::quiet_llama_cpp();
        let of_architectures = |case: &cases::Case| ARCHITECTURES.contains(&case.name.as_str());
        let layouts = cases::layouts()
            .into_iter()
            .filter(|case| case.name.contains("groups") || case.name.contains("per expert"));
        for case in cases::all_architectures().into_iter().filter(of_architectures).chain(layouts) {
            let sizes = [(QUARTER, QUARTER), (WAVES, QUARTER)];
            failures.extend(
                sent::check(&case, &[device.name()], &sizes).into_iter().map(|text| format!("{order:?}: {text}")),
            );
        }
        failures.extend(device.faults());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
