//! Any bytes as a LoRA adapter and as a control vector of the demo model: no panic, no huge allocation.
//! `fuzz/run adapter_header`

#![no_main]

use std::path::Path;
use std::sync::OnceLock;

use hobbit_core::gguf::Gguf;
use hobbit_core::gguf::adapter::{check_lora, read_directions};
use libfuzzer_sys::fuzz_target;

static MODEL: OnceLock<Gguf> = OnceLock::new();

fuzz_target!(|input: &[u8]| {
    let model = MODEL.get_or_init(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo.gguf");
        Gguf::open(Path::new(path)).expect("the demo model")
    });
    // Each process of the fuzzer has its own file.
    let path = std::env::temp_dir().join(format!("hobbit-fuzzed-adapter-{}", std::process::id()));
    std::fs::write(&path, input).expect("the fuzzer's own file");
    let _ = check_lora(&path, model);
    if let Ok(directions) = read_directions([(path.as_path(), 1.0)], model) {
        assert!(directions.data.iter().all(|value| value.is_finite()));
    }
});
