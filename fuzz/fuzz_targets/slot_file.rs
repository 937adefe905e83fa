//! Any bytes as a saved slot: no panic, no huge allocation, and an accepted file is written again unchanged.
//! `fuzz/run slot_file`

#![no_main]

use libfuzzer_sys::fuzz_target;
use xxhash_rust::xxh3::xxh3_64;

#[allow(dead_code, reason = "the target only reads and writes")]
#[path = "../../src/saved.rs"]
mod saved;

const MARK: u64 = 7;
/// Magic, mark, number of tokens, bytes of the state, checksum.
const HEADER: usize = 40;

fuzz_target!(|input: &[u8]| {
    // Each process of the fuzzer has its own file.
    let path = std::env::temp_dir().join(format!("hobbit-fuzzed-slot-{}", std::process::id()));
    check(&path, input);
    // The same with a magic, mark and checksum that hold: no fuzzer finds those.
    if input.len() >= HEADER {
        let mut bytes = input.to_vec();
        bytes[..8].copy_from_slice(&hobbit_core::files::SEQUENCE_MAGIC);
        bytes[8..16].copy_from_slice(&MARK.to_le_bytes());
        let sum = xxh3_64(&bytes[HEADER..]);
        bytes[32..HEADER].copy_from_slice(&sum.to_le_bytes());
        check(&path, &bytes);
    }
});

fn check(path: &std::path::Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("the fuzzer's own file");
    if let Ok((saved, n_bytes)) = saved::read(path, MARK) {
        assert_eq!(n_bytes, bytes.len() as u64);
        saved::write(path, MARK, &saved.tokens, &saved.state, &saved.checkpoints).expect("the fuzzer's own file");
        assert!(std::fs::read(path).expect("the fuzzer's own file") == bytes);
    }
}
