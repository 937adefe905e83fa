//! Any text as a profile: no panic, and an accepted one can be written and read again. `fuzz/run profile_reader`

#![no_main]

use std::path::Path;

use hobbit_core::profile::Profile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let name = Path::new("fuzzed.json");
    if let Ok(profile) = Profile::parse(text, name) {
        Profile::parse(&profile.to_json(), name).expect("a profile that was accepted");
    }
});
