//! Any text as a plan of virtual experts: no panic, and an accepted one can be written and read
//! again. `fuzz/run plan_reader`

#![no_main]

use hobbit_core::profile::VirtualPlan;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    // Each process of the fuzzer has its own file.
    let path = std::env::temp_dir().join(format!("hobbit-fuzzed-plan-{}", std::process::id()));
    let read = |text: &[u8]| {
        std::fs::write(&path, text).expect("the fuzzer's own file");
        VirtualPlan::read(&path)
    };
    if let Ok(plan) = read(input) {
        let _ = plan.check("qwen3moe", &[(0, 8), (1, 8)], 2);
        for layer in &plan.layers {
            let _ = (layer.slots(), plan.slots_of(layer.layer, 8));
        }
        read(plan.to_json().as_bytes()).expect("a plan that was accepted");
    }
});
