//! Any bytes as the body of a chat request, in OpenAI's and Anthropic's forms: no panic. `fuzz/run request_bodies`

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| hobbit_server::fuzzed::body(body));
