//! The cache against its model, on scripts the fuzzer writes: `fuzz/run cache_model`.
#![no_main]

use hobbit_core::cache::model_test;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    assert_eq!(model_test::run(script), model_test::run(script), "equal calls, equal answers");
});
